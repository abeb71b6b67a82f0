"""What work costs: FLOPs of a function's matrix products, and the machine's peak."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

PEAK_SIZES = (1024, 1536, 2048)


def matmul_flops(function: Callable, *args: Any) -> int:
    """Return the FLOPs of all matrix products in a function, backward passes included.

    2 times batch, rows, columns and contracted places of each `dot_general`, times the
    lengths of the scans around it; XLA's own analysis counts a scan's body once. Of the
    branches of a condition the dearest counts.

    Args:
        function: traced, not run.
        *args: its arguments, arrays or shapes.

    Raises:
        ValueError: a loop of unknown length holds a product.

    Example:
        >>> x, y = jnp.zeros((3, 5)), jnp.zeros((5, 7))
        >>> matmul_flops(jnp.dot, x, y)
        210
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Jaxpr) -> int:
    return sum(map(_flops_of, jaxpr.eqns))


def _flops_of(eqn: Any) -> int:
    if eqn.primitive.name == "dot_general":
        return _product(eqn)
    inner = [_flops(jaxpr) for jaxpr in _inner(eqn.params.values())]
    if eqn.primitive.name == "cond":
        return max(inner)
    if eqn.primitive.name == "while" and any(inner):
        raise ValueError("a loop of unknown length holds a product: count its body")
    return sum(inner) * eqn.params.get("length", 1) if inner else 0


def _product(eqn: Any) -> int:
    left = eqn.invars[0].aval.shape
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shared = math.prod(left[axis] for axis in (*contracted, *batch))
    own = math.prod(eqn.outvars[0].aval.shape) // math.prod(left[a] for a in batch)
    return 2 * shared * own


def _inner(values: Any) -> Iterator[Jaxpr]:
    """The jaxprs that an equation's parameters hold."""
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)


def matmul_peak(sizes: tuple[int, ...] = PEAK_SIZES, repeats: int = 5) -> float:
    """Measure FLOP/s of the fastest square float32 product on this machine."""
    best = 0.0
    for size in sizes:
        x = jax.random.normal(jax.random.key(size), (size, size))
        dot = jax.jit(jnp.dot).lower(x, x).compile()
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(dot(x, x))
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
