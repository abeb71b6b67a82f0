"""What is not static of a call: made ready to be differentiated as a whole.

A `custom_vjp` sees its arguments alone: what a function closes over, numbers that are
no arrays, and arrays that vary over other axes of a mesh than the rest are made into
arguments like all others first.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_jax.attention.arguments import Limits


class Operands(NamedTuple):
    """What is not static of a call whose heads have one pattern.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`.
        value: `[B, S, K, V]`.
        scale: a factor of the scores that has a gradient, or None.
        bias: see `arguments.check_bias`.
        limits: what forbids edges besides the pattern.
        rng: the PRNG key of dropout, or None.
    """

    query: Array
    key: Array
    value: Array
    scale: Array | None
    bias: Any
    limits: Limits
    rng: Any


def prepared(operands: Operands) -> Operands:
    """Return operands that a `custom_vjp` can differentiate."""
    bias = operands.bias
    if callable(bias) and jax.tree_util.all_leaves([bias]):
        # A plain function, not a pytree.
        bias = _opened(bias)
    operands = operands._replace(bias=bias)
    operands = jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), operands
    )
    axes = frozenset().union(*map(_axes, jax.tree.leaves(operands)))
    return jax.tree.map(functools.partial(_varying, axes=axes), operands)


def varying_like(tree: Any, like: Array) -> Any:
    """Return arrays that vary over the axes of a `shard_map` over which `like` does."""
    return jax.tree.map(functools.partial(_varying, axes=_axes(like)), tree)


def _axes(x: Any) -> frozenset:
    """The axes of a `shard_map` over which an array varies."""
    return jax.typeof(x).manual_axis_type.varying


def _varying(x: Any, axes: frozenset) -> Any:
    missing = tuple(axes - _axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _opened(bias: Callable[..., Any]) -> jax.tree_util.Partial:
    """A function of positions as a pytree of the arrays that it closes over."""
    place = jnp.zeros((1, 1), jnp.int32)
    function, arrays = jax.closure_convert(bias, place, place)
    if not arrays:
        return jax.tree_util.Partial(bias)
    return jax.tree_util.Partial(functools.partial(_everywhere, function), *arrays)


def _everywhere(function: Callable[..., Array], *args: Array) -> Array:
    """A function of one place at all places: its trace holds for one alone."""
    *arrays, i, j = args

    def at(i: Array, j: Array) -> Array:
        return function(i.reshape(1, 1), j.reshape(1, 1), *arrays)[:, 0, 0]

    of_row = jax.vmap(at, (None, 0), 1)
    return jax.vmap(of_row, (0, None), 1)(i[:, 0], j[0])


def floats(tree: Any, of: Any) -> list[Array]:
    """Return the leaves of a tree where those of another, like it, have gradients."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(of), strict=True)
    return [x for x, y in leaves if _is_float(y)]


def float_zeros(tree: Any) -> list[Array]:
    """Return zeros like the leaves of a tree that have gradients."""
    return [jnp.zeros_like(x) for x in floats(tree, tree)]


def with_floats(found: Iterable[Array], of: Any) -> Any:
    """Return a cotangent of a tree, given those of its floating leaves."""
    found = iter(found)
    return jax.tree.map(
        lambda x: next(found) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0),
        of,
    )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
