"""Arguments of the attention kernels: checked, and brought to four axes.

Every wrong shape or type ends in one line that names the argument and what it needs.
"""

import math
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from transformer_jax.patterns import Pattern, causal, full
from transformer_jax.patterns.base import check_head_count


class Sizes(NamedTuple):
    """The sizes of one call.

    Attributes: by axis letter batch B, query_length T, key_length S, heads N, kv_heads
    K; `batched` is False where the caller gave three axes (then B is 1).
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    batched: bool

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape `[B, N, T, S]`."""
        return self.batch, self.heads, self.query_length, self.key_length


def check_heads(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, Array, Sizes]:
    """Return query `[B, T, N, H]`, key, value `[B, S, K, ...]` and the sizes.

    Raises:
        TypeError: they are not floating, or not of one dtype.
        ValueError: the shapes do not fit together.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(f"query, key and value must be floating, not {query.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "query, key and value must have one dtype, not "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            "query, key and value must all be [B, length, heads, width] or all "
            f"[length, heads, width], not {query.shape}, {key.shape} and {value.shape}"
        )
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "key and value must agree in batch, length and heads, not "
            f"{key.shape} and {value.shape}"
        )
    if len(key) != B:
        raise ValueError(f"batch differs: query is {query.shape}, key is {key.shape}")
    if key.shape[3] != H:
        raise ValueError(
            f"head width differs: query is {query.shape}, key is {key.shape}"
        )
    if not K or N % K:
        raise ValueError(
            f"query heads must be a multiple of key/value heads: query {query.shape} "
            f"has {N}, key {key.shape} has {K}"
        )
    return query, key, value, Sizes(B, T, S, N, K, batched)


def check_bias(bias: Any, sizes: Sizes) -> Any:
    """Return the bias: None, a callable, or four axes that fit `[B, N, T, S]`.

    Raises:
        TypeError: it is boolean.
        ValueError: its shape does not fit.
    """
    if bias is None or callable(bias):
        return bias
    bias = jnp.asarray(bias)
    if bias.dtype == jnp.bool_:
        raise TypeError("bias is boolean: pass it as mask")
    return _four_axes("bias", bias, sizes)


def evaluate_bias(bias: Any, i: Array, j: Array, heads: int) -> Array:
    """Return a callable bias at positions i `[t, 1]` and j `[1, s]`, `[1, N, t, s]`.

    Raises:
        TypeError: it is boolean.
        ValueError: it returns another shape.
    """
    values = jnp.asarray(bias(i, j))
    wanted = (heads, len(i), j.shape[1])
    if values.ndim != 3 or any(
        size not in (1, full) for size, full in zip(values.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"bias(i, j) must return [N, T, S] = {wanted}, not {values.shape}"
        )
    if values.dtype == jnp.bool_:
        raise TypeError("bias is boolean: pass it as mask")
    return jnp.broadcast_to(values, wanted)[None]


class Limits(NamedTuple):
    """What forbids edges besides the pattern, none of it static; each may be None.

    Attributes:
        mask: booleans of four axes that fit `[B, N, T, S]`, True = may attend.
        query_lengths: integers `[B]`.
        key_lengths: integers `[B]`.
        query_ids: segments `[B, T]`, with `key_ids`.
        key_ids: segments `[B, S]`.
    """

    mask: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    query_ids: Array | None = None
    key_ids: Array | None = None


def check_limits(limits: Limits, sizes: Sizes) -> Limits:
    """Return what forbids edges, as arrays.

    Raises:
        TypeError: a mask is not boolean, or lengths or ids are no integers.
        ValueError: a shape does not fit, or one of two segment ids is missing.
    """
    B, _, T, S = sizes.scores
    mask = limits.mask
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"mask must be boolean (True = may attend), not {mask.dtype}: "
                "pass additive terms as bias"
            )
        mask = _four_axes("mask", mask, sizes)
    if (limits.query_ids is None) != (limits.key_ids is None):
        raise ValueError(
            "give both query_segment_ids and key_value_segment_ids, or neither "
            "(self-attention: the same ids twice)"
        )
    rows = {
        "query_seq_lengths": (limits.query_lengths, (B,)),
        "key_value_seq_lengths": (limits.key_lengths, (B,)),
        "query_segment_ids": (limits.query_ids, (B, T)),
        "key_value_segment_ids": (limits.key_ids, (B, S)),
    }
    checked = [
        None if values is None else check_rows(name, values, shape, sizes)
        for name, (values, shape) in rows.items()
    ]
    return Limits(mask, *checked)


class Call(NamedTuple):
    """One call of `dot_product_attention`, checked.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`.
        value: `[B, S, K, V]`.
        bias: see `check_bias`.
        limits: what forbids edges besides the pattern.
        pattern: static, with causality; None allows all.
        offset: position of the first query.
        scale: factor of the scores, a Python number or a scalar array.
        rate: chance to drop an edge's weight.
        rng: the PRNG key of dropout, or None.
        sizes: of all that.
    """

    query: Array
    key: Array
    value: Array
    bias: Any
    limits: Limits
    pattern: Pattern | None
    offset: int
    scale: ArrayLike
    rate: float
    rng: Any
    sizes: Sizes

    @property
    def edges(self) -> Pattern:
        """The pattern, full() where there is none."""
        return full() if self.pattern is None else self.pattern


def check_pattern(pattern: Any, is_causal: bool, heads: int | None) -> Pattern | None:
    """Return the pattern, of causal edges only where asked for; None allows all.

    Raises:
        TypeError: it is no pattern.
        ValueError: it is one of more or fewer heads than `heads`.
    """
    if pattern is not None and not isinstance(pattern, Pattern):
        raise TypeError(
            "pattern must be a pattern of transformer_jax.patterns, not "
            f"{type(pattern).__name__}"
        )
    if pattern is not None:
        check_head_count(pattern, heads)
    if not is_causal:
        return pattern
    return causal() if pattern is None else pattern & causal()


def check_scale(scale: ArrayLike | None, width: int) -> ArrayLike:
    """Return the factor of the scores, 1 / sqrt(width) where none is given.

    Raises:
        ValueError: it is not one number.
    """
    if scale is None:
        # Heads of width 0 have scores of 0, whatever the scale.
        return 1 / math.sqrt(max(width, 1))
    if jnp.ndim(scale):
        raise ValueError(f"scale must be one number, not of shape {jnp.shape(scale)}")
    return scale


def check_offset(query_offset: Any) -> int:
    """Return the offset as a Python int; it is static and not negative.

    Raises:
        TypeError: it is no Python int, such as a traced one.
        ValueError: it is negative.
    """
    try:
        offset = operator.index(query_offset)
    except TypeError:
        raise TypeError(
            f"query_offset must be a Python int, not {type(query_offset).__name__}"
        ) from None
    if offset < 0:
        raise ValueError(f"query_offset must not be negative: {offset}")
    return offset


def _four_axes(name: str, array: Any, sizes: Sizes) -> Any:
    """The array with leading axes of size 1, if it broadcasts to `[B, N, T, S]`."""
    shape = (1,) * (4 - array.ndim) + array.shape
    fits = len(shape) == 4 and all(
        size in (1, full) for size, full in zip(shape, sizes.scores, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} {array.shape} does not broadcast to [B, N, T, S] = {sizes.scores}"
        )
    return array.reshape(shape)


def check_rows(name: str, values: ArrayLike, shape: tuple, sizes: Sizes) -> Array:
    """Return integers of exactly this shape; without a batch its 1 may be left out.

    Raises:
        TypeError: they are no integers.
        ValueError: they have another shape.
    """
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {values.dtype}")
    if values.shape != shape and (sizes.batched or values.shape != shape[1:]):
        letters = "[B]" if len(shape) == 1 else "[B, length]"
        raise ValueError(f"{name} must be {letters} = {shape}, not {values.shape}")
    return values.reshape(shape)


def check_lengths(lengths: ArrayLike | None, sizes: Sizes) -> Array | None:
    """Return the lengths of keys and values, integers `[B]`, or None for all.

    Raises:
        TypeError: they are no integers.
        ValueError: they have another shape.
    """
    if lengths is None:
        return None
    return check_rows("key_value_seq_lengths", lengths, (sizes.batch,), sizes)


def check_kv_heads(pattern: Pattern, kv_heads: int) -> None:
    """Raise unless a pattern's heads, if they differ, share key/value heads evenly.

    Raises:
        ValueError: they do not.
    """
    if pattern.heads and pattern.heads % kv_heads:
        raise ValueError(
            f"a pattern of {pattern.heads} heads does not fit {kv_heads} key/value "
            "heads: the first must be a multiple of the second"
        )


class CacheSizes(NamedTuple):
    """The sizes of a cache: rows, places, heads, and the widths of keys and values."""

    batch: int
    max_length: int
    kv_heads: int
    head_width: int
    value_width: int


def check_cache_sizes(
    batch: int,
    max_length: int,
    kv_heads: int,
    head_width: int,
    value_width: int | None,
    dtype: DTypeLike,
) -> CacheSizes:
    """Return the sizes; values are as wide as keys where no width is given.

    Raises:
        TypeError: `dtype` is not floating.
        ValueError: a size is below 1.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"a cache holds floating keys, not {jnp.dtype(dtype)}")
    value_width = head_width if value_width is None else value_width
    sizes = CacheSizes(batch, max_length, kv_heads, head_width, value_width)
    if min(sizes) < 1:
        raise ValueError(
            "a cache needs rows, places, heads and two widths, each at least 1, not "
            f"{tuple(sizes)}"
        )
    return sizes


def check_step(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, position: Array
) -> tuple[Array, Array, Array, Sizes]:
    """Return one new place a row: query `[B, 1, N, H]`, key and value `[B, 1, K, ...]`.

    Raises:
        TypeError, ValueError: as `check_heads`, or it is not one place of each row.
    """
    if jnp.ndim(query) != 4 or jnp.shape(query)[1] != 1:
        raise ValueError(
            f"a step takes one query a row, [B, 1, N, H], not {jnp.shape(query)}"
        )
    query, key, value, sizes = check_heads(query, key, value)
    if (sizes.batch, sizes.key_length) != (len(position), 1):
        raise ValueError(
            f"a step takes one key of each of the cache's {len(position)} rows, not "
            f"{key.shape}"
        )
    return query, key, value, sizes


def check_entry(name: str, new: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise unless an array is as the cache that it enters was made for.

    Raises:
        ValueError: it has another shape.
        TypeError: it has another dtype.
    """
    if new.shape != shape:
        raise ValueError(f"{name} must be {shape} to enter the cache, not {new.shape}")
    if new.dtype != dtype:
        raise TypeError(
            f"the cache holds {jnp.dtype(dtype)}, but {name} is {new.dtype}"
        )


def or_nan(inside: Array, output: Array) -> Array:
    """Return outputs `[B, ...]`, NaN in rows that had nowhere to write."""
    inside = inside.reshape(-1, *(1,) * (output.ndim - 1))
    return jnp.where(inside, output, jnp.full((), jnp.nan, output.dtype))
