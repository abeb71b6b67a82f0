"""Decoding with softmax attention: keys and values that are still needed are kept.

They stand as the products want them, heads before positions, and are zero where there
is nothing: as `[B, S, K, H]` they would be masked and transposed anew in every step,
which on a CPU costs more than the products.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool

from transformer_jax import masks
from transformer_jax.attention import arguments, dense, lookup
from transformer_jax.attention.slots import layout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "position", "held"),
    meta_fields=("pattern", "max_length"),
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values so far; every leaf begins with B, so rows reorder by one gather.

    Attributes:
        key: `[B, K, S, H]`, zero where nothing is held. S is `max_length`, or with a
            pattern as many as it can still reach (`slots.layout`).
        value: `[B, K, S, V]`, likewise.
        position: int32 `[B]`, how many positions the row has seen: the next's index.
        held: int32 `[B, k, S]`, the position in each slot, -1 for none; k is 1 or K.
            None without a pattern, and in what `fill` returned: slot s holds position
            s.
        pattern: static pattern or None; part of the tree's structure.
        max_length: positions that a row can see.
    """

    key: Any
    value: Any
    position: Any
    held: Any
    pattern: Any
    max_length: int


def init_cache(
    batch: int,
    max_length: int,
    *,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    pattern: Any = None,
    value_width: int | None = None,
) -> Cache:
    """Return an empty cache for `step`.

    Args:
        batch: rows B.
        max_length: positions that a row can hold.
        kv_heads: key/value heads K.
        head_width: width H of a key, and of a value unless `value_width` is given.
        dtype: floating dtype of keys and values.
        pattern: static, hashable pattern that is ANDed with causality.
        value_width: width V of a value.

    Raises:
        TypeError: `dtype` is not floating, or `pattern` no pattern.
        ValueError: a size is below 1, or a pattern's heads do not share key/value heads
            evenly.
    """
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    pattern = arguments.check_pattern(pattern, False, None)
    count, held = max_length, None
    if pattern is not None:
        arguments.check_kv_heads(pattern, kv_heads)
        plan = layout(pattern, max_length, kv_heads)
        count = plan.slots
        held = jnp.full((batch, len(plan.slot_of), count), -1, jnp.int32)
    shape = (batch, kv_heads, count)
    return Cache(
        key=jnp.zeros((*shape, head_width), dtype),
        value=jnp.zeros((*shape, sizes.value_width), dtype),
        position=jnp.zeros(batch, jnp.int32),
        held=held,
        pattern=pattern,
        max_length=max_length,
    )


def fill(
    key: ArrayLike, value: ArrayLike, lengths: ArrayLike, *, pattern: Any = None
) -> Cache:
    """Return the cache of a whole sequence that is only read, such as a memory.

    Args:
        key: `[B, S, K, H]`.
        value: `[B, S, K, V]`.
        lengths: integers `[B]`; what stands behind is never read, even NaN.
        pattern: static pattern of the edges to it.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, by name.
    """
    # No query yet: the keys stand for it.
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    pattern = arguments.check_pattern(pattern, False, None)
    if pattern is not None:
        arguments.check_kv_heads(pattern, sizes.kv_heads)
    inside = masks.length_mask(lengths, sizes.key_length)[:, None, :, None]
    return Cache(
        key=masks.or_zero(inside, key.swapaxes(1, 2)),
        value=masks.or_zero(inside, value.swapaxes(1, 2)),
        position=jnp.minimum(lengths, sizes.key_length).astype(jnp.int32),
        held=None,
        pattern=pattern,
        max_length=sizes.key_length,
    )


def read(
    query: ArrayLike,
    cache: Cache,
    *,
    positions: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Attend to all that the rows of a cache hold; nothing is appended.

    Equals `dot_product_attention` with `key_value_seq_lengths`: a row that holds
    nothing gives 0.

    Args:
        query: `[B, T, N, H]`.
        cache: what `fill` returned.
        positions: integers `[B, T]`, those of the queries, where `fill` got a pattern.
        bias: array that broadcasts to `[B, N, T, S]`.
        scale: as in `dot_product_attention`.

    Returns:
        `[B, T, N, V]`.

    Raises:
        ValueError, TypeError: a query or bias that does not fit the cache, or a
            pattern without positions.
    """
    query, keys, values = jnp.asarray(query), cache.key, cache.value
    arguments.check_pattern(cache.pattern, False, query.shape[2])
    allowed = masks.length_mask(cache.position, cache.max_length)[:, None, None]
    if cache.pattern is not None:
        if positions is None:
            raise ValueError("the memory has a pattern: give the queries' positions")
        columns = jnp.arange(cache.max_length, dtype=jnp.int32)
        sizes = _sizes(query, cache)
        shape = query.shape[:2]
        positions = arguments.check_rows("positions", positions, shape, sizes)
        rows = positions.astype(jnp.int32)[:, None, :, None]
        columns = columns[None, None, None]
        allowed &= lookup.edges(cache.pattern, query.shape[2], rows, columns)
        keys, values = lookup.live(allowed, keys, values)
    return _attend(query, keys, values, bias, allowed, scale)


def step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: Cache,
    *,
    bias: Any = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Cache]:
    """Append one position to each row and attend to all that the row holds.

    Equals row `cache.position` of causal `dot_product_attention` over the whole
    sequence. Rows may stand at different positions.

    Args:
        query: `[B, 1, N, H]`.
        key: `[B, 1, K, H]`, in the cache's dtype.
        value: `[B, 1, K, V]`.
        cache: what `init_cache` or the last step returned.
        bias: array that broadcasts to `[B, N, 1, max_length]`, or a callable as in
            `dot_product_attention`.
        scale: as in `dot_product_attention`.

    Returns:
        `[B, 1, N, V]` and the new cache. A row whose position was >= max_length has
        nowhere to write: its output is NaN, and only its.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit the cache, by name.

    Cost: 2 B N S (H + V) FLOPs and one pass over the S slots of the cache; W of them
    where the pattern attends few.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    _check_step(query, key, value, cache)
    arguments.check_pattern(cache.pattern, False, query.shape[2])
    after = _written(cache, key, value)
    view = lookup.look(after, cache.position, query.shape[2])
    if bias is not None:
        bias = arguments.check_bias(bias, _sizes(query, cache))
        bias = lookup.bias_of(view, bias, cache.position, query.shape[2])
    output = _attend(query, view.keys, view.values, bias, view.allowed, scale)
    return arguments.or_nan(cache.position < cache.max_length, output), after


def _written(cache: Cache, key: Array, value: Array) -> Cache:
    """The cache with one more position in each row; past the end none is written."""
    position, held = cache.position, cache.held
    if held is None:
        index = position[:, None]
    else:
        # A position past the end has no slot.
        table = jnp.asarray(lookup.layout_of(cache).slot_of)
        index = jnp.take(table, position, 1, mode="fill", fill_value=held.shape[2]).T
        held = _write(held, position[:, None], index)
    return dataclasses.replace(
        cache,
        key=_write(cache.key, key[:, 0], index),
        value=_write(cache.value, value[:, 0], index),
        position=position + 1,
        held=held,
    )


@jax.vmap
def _write(slots: Array, new: Array, index: Array) -> Array:
    """Set the slot `index` `[1 or K]` of each row, `[K, S, ...]`, to `[1 or K, ...]`.

    A scatter costs half of a select over all slots on a CPU, and is done in place.
    """
    if len(index) == 1:
        return slots.at[:, index[0]].set(new, mode="drop")
    heads = np.arange(len(slots), dtype=np.int32)
    return slots.at[heads, index].set(new, mode="drop")


def _attend(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None,
    allowed: Bool[Array, "B n t S"],
    scale: ArrayLike | None,
) -> Array:
    """Dense attention on `[B, K, S, H]` and `[B, K, S, V]`, as they are stored.

    What no query may attend is zero there, so that only scores are masked.
    """
    query, *_, sizes = arguments.check_heads(
        query, key.swapaxes(1, 2), value.swapaxes(1, 2)
    )
    B, T, N, H = query.shape
    K = sizes.kv_heads
    output, _ = dense.weighted_mean(
        query.reshape(B, T, K, N // K, H),
        key,
        value,
        arguments.check_bias(bias, sizes),
        dense.grouped(allowed, K),
        arguments.check_scale(scale, H),
    )
    return output.astype(query.dtype).reshape(B, T, N, -1)


def _sizes(query: Array, cache: Cache) -> arguments.Sizes:
    """The sizes of a step over all positions."""
    B, K = cache.key.shape[:2]
    return arguments.Sizes(B, 1, cache.max_length, query.shape[2], K, True)


def _check_step(query: Array, key: Array, value: Array, cache: Cache) -> None:
    """Raise unless one position a row comes in, as the cache was made for."""
    if query.ndim != 4 or query.shape[1] != 1:
        raise ValueError(
            f"a step takes one query a row, [B, 1, N, H], not {query.shape}"
        )
    if cache.pattern is not None and cache.held is None:
        raise ValueError("what `fill` returned is read, not stepped: use `init_cache`")
    for name, new, kept in (("key", key, cache.key), ("value", value, cache.value)):
        wanted = (kept.shape[0], 1, kept.shape[1], kept.shape[3])
        arguments.check_entry(name, new, wanted, kept.dtype)
