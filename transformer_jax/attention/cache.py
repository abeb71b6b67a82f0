"""Decoding with dense attention: keys and values of earlier positions are kept.

They stand as the products want them, heads before positions, and are zero where there
is nothing: as `[B, S, K, H]` they would be masked and transposed anew in every step,
which on a CPU costs more than the products.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool

from transformer_jax import masks
from transformer_jax.attention import arguments, dense


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "position"),
    meta_fields=("pattern",),
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values so far; every leaf begins with B, so rows reorder by one gather.

    Attributes:
        key: `[B, K, max_length, H]`, zero from `position` on.
        value: `[B, K, max_length, V]`, likewise.
        position: int32 `[B]`, how many positions the row holds: the next one's index.
        pattern: static pattern or None; part of the tree's structure.
    """

    key: Any
    value: Any
    position: Any
    pattern: Any = None


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
        ValueError: a size is below 1.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"a cache holds floating keys, not {jnp.dtype(dtype)}")
    if pattern is not None and not callable(getattr(pattern, "dense", None)):
        raise TypeError(
            "pattern must be an attention pattern with a method dense(), not "
            f"{type(pattern).__name__}"
        )
    if min(batch, max_length, kv_heads, head_width) < 1:
        raise ValueError(
            "a cache needs rows, places, heads and a width, each at least 1, not "
            f"{(batch, max_length, kv_heads, head_width)}"
        )
    shape = (batch, kv_heads, max_length)
    return Cache(
        key=jnp.zeros((*shape, head_width), dtype),
        value=jnp.zeros((*shape, value_width or head_width), dtype),
        position=jnp.zeros(batch, jnp.int32),
        pattern=pattern,
    )


def fill(key: ArrayLike, value: ArrayLike, lengths: ArrayLike) -> Cache:
    """Return the cache of a whole sequence that is only read, such as a memory.

    Args:
        key: `[B, S, K, H]`.
        value: `[B, S, K, V]`.
        lengths: integers `[B]`; what stands behind is never read, even NaN.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, by name.
    """
    # No query yet: the keys stand for it.
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    inside = masks.length_mask(lengths, sizes.key_length)[:, None, :, None]
    return Cache(
        key=_kept(inside, key.swapaxes(1, 2)),
        value=_kept(inside, value.swapaxes(1, 2)),
        position=jnp.minimum(lengths, sizes.key_length).astype(jnp.int32),
    )


def read(
    query: ArrayLike,
    cache: Cache,
    *,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Attend to all that the rows of a cache hold; nothing is appended.

    Equals `dot_product_attention` with `key_value_seq_lengths`: a row that holds
    nothing gives 0.

    Args:
        query: `[B, T, N, H]`.
        cache: what `fill` returned.
        bias: array that broadcasts to `[B, N, T, S]`.
        scale: as in `dot_product_attention`.

    Returns:
        `[B, T, N, V]`.

    Raises:
        ValueError, TypeError: a query or bias that does not fit the cache.
    """
    allowed = masks.length_mask(cache.position, cache.key.shape[2])[:, None, None]
    return _attend(jnp.asarray(query), cache.key, cache.value, bias, allowed, scale)


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

    Cost: 2 B N max_length (H + V) FLOPs; one pass over the cache.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    _check_step(query, key, value, cache)
    position = cache.position
    after = Cache(
        _write(cache.key, key, position),
        _write(cache.value, value, position),
        position + 1,
        cache.pattern,
    )
    keys, values = after.key, after.value
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    allowed = (slots[None, :] <= position[:, None])[:, None, None, :]
    if cache.pattern is not None:
        allowed = allowed & _pattern_rows(cache, query.shape[2])
        live = dense.grouped(allowed, keys.shape[1]).any((2, 3))[..., None]
        keys, values = _kept(live, keys), _kept(live, values)
    if callable(bias):
        bias = _bias_rows(bias, position, slots[None, :])
    output = _attend(query, keys, values, bias, allowed, scale)
    inside = (position < keys.shape[2])[:, None, None, None]
    return jnp.where(inside, output, jnp.full((), jnp.nan, output.dtype)), after


def _attend(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None,
    allowed: Bool[Array, "B n 1 S"],
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
        arguments.check_bias(bias, sizes, 0),
        dense.grouped(allowed, K),
        arguments.check_scale(scale, H),
        key_axes="BKS",
    )
    return output.astype(query.dtype).reshape(B, T, N, -1)


def _kept(condition: Array, array: Array) -> Array:
    """The array where the condition holds, else 0."""
    return jnp.where(condition, array, jnp.zeros((), array.dtype))


def _check_step(query: Array, key: Array, value: Array, cache: Cache) -> None:
    """Raise unless one position a row comes in, as the cache was made for."""
    if query.ndim != 4 or query.shape[1] != 1:
        raise ValueError(
            f"a step takes one query a row, [B, 1, N, H], not {query.shape}"
        )
    for name, new, kept in (("key", key, cache.key), ("value", value, cache.value)):
        wanted = (kept.shape[0], 1, kept.shape[1], kept.shape[3])
        if new.shape != wanted:
            raise ValueError(
                f"{name} must be {wanted} to enter a cache of {kept.shape}, "
                f"not {new.shape}"
            )
        if new.dtype != kept.dtype:
            raise TypeError(f"the cache holds {kept.dtype}, but {name} is {new.dtype}")


@jax.vmap
def _write(slots: Array, new: Array, position: Array) -> Array:
    """Set each row's slot; past the end nothing is written.

    A scatter costs half of a select over all slots on a CPU, and is done in place.
    """
    return slots.at[:, position].set(new[0], mode="drop")


def _pattern_rows(cache: Cache, heads: int) -> Array:
    """Each row's row of the pattern, `[B, 1 or N, 1, max_length]`."""
    length = cache.key.shape[2]
    edges = jnp.asarray(cache.pattern.dense(length, length, num_heads=heads))
    edges = edges.reshape(-1, length, length)
    rows = jnp.take(edges, cache.position, axis=1, mode="clip")
    return rows.transpose(1, 0, 2)[:, :, None, :]


def _bias_rows(bias: Any, position: Array, slots: Array) -> Array:
    """The callable at each row's own position, `[B, N, 1, max_length]`."""
    return jax.vmap(lambda row: bias(row.reshape(1, 1), slots))(position)
