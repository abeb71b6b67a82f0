"""Masks that depend on data: lengths, segments, ranks, and the edges dropout keeps.

True always means "may attend" or "keep". Padding stands on the right.
"""

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

# Multipliers of the 32-bit mixer "lowbias32" (Wellons 2018, "Prospecting for hash
# functions"); the start is the golden ratio, because the mixer sends 0 to 0.
_MULTIPLIERS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
_START = np.uint32(0x9E3779B9)


def length_mask(lengths: ArrayLike, size: int) -> Bool[Array, "B size"]:
    """Mark the valid positions of padded rows.

        length_mask([2, 0, 3], 4)
        1 1 . .
        . . . .
        1 1 1 .

    Args:
        lengths: integers `[B]`; below 0 counts as 0, beyond `size` as `size`.
        size: padded length.

    Raises:
        TypeError: `lengths` are no integers.
        ValueError: `lengths` have not one axis.
    """
    lengths = _integers("lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"lengths must have shape [B], not {lengths.shape}")
    return jnp.arange(size, dtype=jnp.int32)[None, :] < lengths[:, None]


def segment_mask(
    query_segment_ids: ArrayLike, key_segment_ids: ArrayLike
) -> Bool[Array, "B 1 T S"]:
    """Let positions attend within their own segment; segment 0 is padding.

        segment_mask([[1, 1, 2, 0]], [[1, 2, 2, 0, 0]])
        1 . . . .
        1 . . . .
        . 1 1 . .
        . . . . .

    Args:
        query_segment_ids: integers `[B, T]`.
        key_segment_ids: integers `[B, S]`.

    Raises:
        TypeError: the ids are no integers.
        ValueError: the ids have not two axes, or differ in batch.
    """
    query_ids = _integers("query_segment_ids", query_segment_ids)
    key_ids = _integers("key_segment_ids", key_segment_ids)
    if query_ids.ndim != 2 or key_ids.ndim != 2 or len(query_ids) != len(key_ids):
        raise ValueError(
            "segment ids must have shapes [B, T] and [B, S], not "
            f"{query_ids.shape} and {key_ids.shape}"
        )
    query_ids, key_ids = query_ids[:, None, :, None], key_ids[:, None, None, :]
    return (query_ids == key_ids) & (query_ids != 0)


def lowest_places(
    values: Float[Array, "B T"], places: Bool[Array, "B T"], count: Int[Array, " B"]
) -> Bool[Array, "B T"]:
    """Mark those of a row's places that have the lowest values.

    Of equal ones the first are marked; all places where `count` is more than there are.

    Args:
        values: `[B, T]`; what stands elsewhere than in the places changes nothing.
        places: `[B, T]`, those to choose from.
        count: `[B]`, how many to mark.
    """
    order = jnp.argsort(jnp.where(places, values, jnp.inf), axis=1)
    rank = jnp.argsort(order, axis=1)
    return (rank < count[:, None]) & places


def _integers(name: str, values: ArrayLike) -> Array:
    """The values as int32; anything but integers is refused."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {values.dtype}")
    return values.astype(jnp.int32)


def hashed_keep(key: Any, rate: float | int, *indices: ArrayLike) -> Bool[Array, "..."]:
    """Decide by a hash of the indices what dropout keeps: True with chance 1 - rate.

        h = mix(... mix(mix(key) ^ index_1) ... ^ index_n);  keep = h >= rate * 2^32

    The decision depends on the values of the indices alone, never on how an array is
    cut into tiles or laid out over devices. The indices are mixed in the given order,
    each at the shape reached so far: pass the small ones first and the one that spans
    the most places last, and each place costs a single mix.

    Args:
        key: PRNG key, typed (`jax.random.key`) or raw uint32; not consumed, but the
            same key and indices give the same decisions.
        rate: chance to drop, a Python number in [0, 1).
        indices: integer arrays that broadcast against each other, of equal rank
            where the rank is not 0.

    Returns:
        Booleans of the indices' common shape.

    Raises:
        TypeError: an index is not integer, or `key` is no key, or `rate` no number.
        ValueError: `rate` lies outside [0, 1), or `key` is a batch of keys.
    """
    check_dropout(rate, key)
    words = [*_key_words(key), *map(_index, indices)]
    state = functools.reduce(mix, words, _START)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return state >= np.uint32(threshold)


def hashed_dropout(x: ArrayLike, key: Any, rate: float | int) -> Float[Array, "..."]:
    """Zero elements with chance `rate` and scale the others by 1 / (1 - rate).

    Elements are hashed by (row, column), the column being the last axis: far cheaper
    than drawing random bits, and equal under any sharding (Srivastava et al. 2014 for
    dropout itself).

    Args:
        x: floating, any rank.
        key: PRNG key, typed or raw; may be None at rate 0.
        rate: chance to drop, a Python number in [0, 1).

    Returns:
        As `x` in shape and dtype; `x` itself at rate 0.

    Raises:
        TypeError, ValueError: as `hashed_keep`; or the key is missing at rate > 0.
    """
    check_dropout(rate, key)
    x = jnp.asarray(x)
    if not rate:
        return x
    *outer, width = x.shape or (1,)
    row = jnp.zeros((*outer, 1), jnp.uint32)
    for axis in range(len(outer)):
        step = np.uint32(math.prod(outer[axis + 1 :]) % 2**32)
        row += jax.lax.broadcasted_iota(jnp.uint32, row.shape, axis) * step
    column = jax.lax.broadcasted_iota(
        jnp.uint32, (1,) * len(outer) + (width,), len(outer)
    )
    keep = hashed_keep(key, rate, row, column).reshape(x.shape)
    return or_zero(keep, x / (1.0 - rate))


def or_zero(keep: ArrayLike, x: Array) -> Array:
    """Return `x` where `keep` holds, else 0, whatever stands there, even NaN."""
    if isinstance(keep, np.ndarray) and keep.all():
        return x
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


def check_dropout(rate: Any, key: Any) -> None:
    """Raise unless `rate` is a number in [0, 1) and a positive rate has its key."""
    if not isinstance(rate, numbers.Real):
        raise TypeError(
            f"the dropout rate must be a Python number, not {type(rate).__name__}"
        )
    if not 0 <= rate < 1:
        raise ValueError(f"the dropout rate must lie in [0, 1), not {rate}")
    if rate and key is None:
        raise ValueError(f"dropout at rate {rate} needs a PRNG key (dropout_rng)")


def _key_words(key: Any) -> list[UInt32[Array, ""]]:
    """The key's 32-bit words, two for threefry, whether it is typed or raw."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    dtype = getattr(key, "dtype", None)
    if dtype != jnp.uint32:
        raise TypeError(
            f"a PRNG key comes from jax.random.key, not {dtype or type(key).__name__}"
        )
    if key.ndim != 1:
        raise ValueError(f"dropout takes one PRNG key, not keys of shape {key.shape}")
    return list(jnp.asarray(key))


def _index(values: ArrayLike) -> Array:
    """The values modulo 2^32, so that negative and 64-bit indices are legal."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, not {values.dtype}")
    return values.astype(jnp.uint32)


def mix(state: ArrayLike, word: ArrayLike) -> ArrayLike:
    """A bijection of `state ^ word` in which each bit sways each other bit."""
    state = state ^ word
    state = (state ^ (state >> np.uint32(16))) * _MULTIPLIERS[0]
    state = (state ^ (state >> np.uint32(15))) * _MULTIPLIERS[1]
    return state ^ (state >> np.uint32(16))
