"""The largest of many, row by row, on whatever device a row is."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import Array, Int


def largest_places(values: Array, count: int) -> Int[Array, "..."]:
    """Return the places of the `count` largest of the last axis, largest first.

    As `jax.lax.top_k`, for which XLA's CPU and GPU compilers gather the rows of all
    devices; here each sorts its own. There is no derivative.

    Args:
        values: `[..., P]`.
        count: at most P.
    """
    return _top(count)(jax.lax.stop_gradient(values))


@functools.cache
def _top(count: int) -> Callable[[Array], Array]:
    """The function of arrays of any rank, to be mapped over and cut by devices."""

    @jax.custom_batching.custom_vmap
    def top(values: Array) -> Array:
        return _partitioned(count, values.ndim)(values)

    @top.def_vmap
    def _(size: int, batched: Any, values: Array) -> tuple[Array, bool]:
        del size, batched  # The only argument is batched, in front.
        return top(values), True

    return top


@functools.cache
def _partitioned(count: int, rank: int) -> Callable[[Array], Array]:
    """`top_k` whose leading axes are cut as they come."""

    def places(values: Array) -> Array:
        return jax.lax.top_k(values, count)[1]

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        del result
        (values,) = arguments
        rows = jax.NamedSharding(mesh, jax.P(*values.sharding.spec[: rank - 1]))
        return mesh, places, rows, (rows,)

    made = custom_partitioning(places)
    rows = " ".join(f"r{axis}" for axis in range(rank - 1))
    made.def_partition(
        partition=partition,
        sharding_rule=f"{rows} p -> {rows} k".strip(),
    )
    return made
