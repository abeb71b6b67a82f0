"""What a step of decoding sees of a cache: slots, their positions, allowed edges."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from transformer_jax import masks
from transformer_jax.attention import dense
from transformer_jax.attention.arguments import evaluate_bias
from transformer_jax.attention.slots import Layout, layout
from transformer_jax.patterns import Pattern


class View(NamedTuple):
    """S slots, all of a cache or those that a step gathers.

    Attributes:
        keys: `[B, K, S, H]`.
        values: `[B, K, S, V]`.
        positions: int32 `[B or 1, K or 1, S]`, which each holds; below 0 none.
        allowed: booleans `[B, N or 1, 1, S]`.
    """

    keys: Array
    values: Array
    positions: Array
    allowed: Bool[Array, "B n 1 S"]


def look(cache: Any, position: Array, heads: int) -> View:
    """Return what the queries at `position` `[B]` see of a cache that holds them."""
    rows = position[:, None, None, None]
    if cache.pattern is None:
        positions = jnp.arange(cache.max_length, dtype=jnp.int32)[None, None]
        allowed = positions[:, :, None] <= rows
        return View(cache.key, cache.value, positions, allowed)
    plan, keys, values = layout_of(cache), cache.key, cache.value
    positions = cache.held
    if plan.reads is not None:
        positions = jnp.take(jnp.asarray(plan.reads), position, 1, mode="clip")
        positions = positions.swapaxes(0, 1)
        keys, values = (_gathered(x, positions, plan) for x in (keys, values))
    columns = positions[:, :, None]
    allowed = edges(cache.pattern, heads, rows, columns)
    allowed &= _by_head((columns >= 0) & (columns <= rows), allowed.shape[1])
    return View(*live(allowed, keys, values), positions, allowed)


def layout_of(cache: Any) -> Layout:
    """Return the slots of a cache with a pattern."""
    return layout(cache.pattern, cache.max_length, cache.key.shape[1])


def edges(
    pattern: Pattern, heads: int, rows: Array, columns: Array
) -> Bool[Array, "B n T S"]:
    """Return the pattern's edges at rows `[B, 1, T, 1]` and columns `[b, k, 1, S]`."""
    if not pattern.heads:
        return pattern.allowed(rows, columns)
    columns = jnp.repeat(columns, heads // columns.shape[1], axis=1)
    of_heads = [
        pattern.of_head(n).allowed(rows, columns[:, n : n + 1]) for n in range(heads)
    ]
    shape = jnp.broadcast_shapes(rows.shape, columns[:, :1].shape)
    return jnp.concatenate([jnp.broadcast_to(x, shape) for x in of_heads], 1)


def live(allowed: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Return keys and values, zero where no query may attend."""
    alive = dense.grouped(allowed, keys.shape[1]).any((2, 3))[..., None]
    return masks.or_zero(alive, keys), masks.or_zero(alive, values)


def bias_of(view: View, bias: Any, position: Array, heads: int) -> Array:
    """Return the bias at the view's positions, `[B, N or 1, 1, S or 1]`.

    Args:
        view: what the queries see.
        bias: a callable, or an array `[b, n, 1, max_length or 1]` of all positions.
        position: that of the queries `[B]`.
        heads: N.
    """
    if not callable(bias):
        if bias.shape[3] == 1:
            return bias
        columns = _by_head(jnp.maximum(view.positions, 0)[:, :, None], heads)
        return jnp.take_along_axis(bias, columns, 3)
    columns = jnp.broadcast_to(
        view.positions, (len(position), *view.positions.shape[1:])
    )

    def of_row(i: Array, columns: Array) -> Array:
        rows = i.reshape(1, 1)
        found = [evaluate_bias(bias, rows, j[None], heads)[0] for j in columns]
        share = heads // len(found)
        return jnp.concatenate(
            [
                x if len(found) == 1 else x[k * share : (k + 1) * share]
                for k, x in enumerate(found)
            ]
        )

    return jax.vmap(of_row)(position, columns)


def _gathered(slots: Array, positions: Array, plan: Layout) -> Array:
    """Of `[B, K, S, H]` the slots of some positions `[B, k, W]`."""
    table = jnp.asarray(plan.slot_of)[None]
    index = jnp.take_along_axis(table, jnp.maximum(positions, 0), 2)
    return jnp.take_along_axis(slots, index[..., None], 2)


def _by_head(array: Array, heads: int) -> Array:
    """What stands by key/value head on axis 1, by query head; 1 stays 1."""
    if array.shape[1] in (1, heads):
        return array
    return jnp.repeat(array, heads // array.shape[1], axis=1)
