"""Arguments of the attention kernels: checked, brought to four axes, masks merged.

Every wrong shape or type ends in one line that names the argument and what it needs.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from transformer_jax import masks


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


def check_bias(bias: Any, sizes: Sizes, query_offset: int) -> Array | None:
    """Return the bias with four axes that broadcast to `[B, N, T, S]`, or None.

    A callable is evaluated on the positions of all rows `[T, 1]` and columns `[1, S]`.

    Raises:
        TypeError: it is boolean.
        ValueError: its shape does not fit.
    """
    if bias is None:
        return None
    if callable(bias):
        rows, columns = _positions(sizes, query_offset)
        bias = jnp.asarray(bias(jnp.asarray(rows), jnp.asarray(columns)))
        if bias.ndim != 3:
            raise ValueError(
                f"bias(i, j) must return [N, T, S] = {sizes.scores[1:]}, "
                f"not {bias.shape}"
            )
    bias = jnp.asarray(bias)
    if bias.dtype == jnp.bool_:
        raise TypeError("bias is boolean: pass it as mask")
    return _four_axes("bias", bias, sizes)


def merge_masks(
    sizes: Sizes,
    mask: ArrayLike | None,
    *,
    pattern: Any,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    query_offset: int,
) -> Bool[Array | np.ndarray, "..."] | None:
    """Return the allowed edges, broadcastable to `[B, N, T, S]`; None allows all.

    The smallest masks are merged first, and no axis is spread that no mask needs. What
    is static stays a NumPy constant: faster on a CPU than comparing positions anew.

    Raises:
        TypeError: a mask is not boolean, lengths or ids are no integers, or `pattern`
            is none.
        ValueError: a shape does not fit, or one of two segment ids is missing.
    """
    B, _, T, S = sizes.scores
    parts = []
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"mask must be boolean (True = may attend), not {mask.dtype}: "
                "pass additive terms as bias"
            )
        parts.append(_four_axes("mask", mask, sizes))
    if pattern is not None:
        parts.append(_dense_pattern(pattern, sizes, query_offset))
    if is_causal:
        rows, columns = _positions(sizes, query_offset)
        parts.append((columns <= rows)[None, None])
    if query_seq_lengths is not None:
        lengths = check_rows("query_seq_lengths", query_seq_lengths, (B,), sizes)
        parts.append(masks.length_mask(lengths, T)[:, None, :, None])
    if key_value_seq_lengths is not None:
        lengths = check_rows(
            "key_value_seq_lengths", key_value_seq_lengths, (B,), sizes
        )
        parts.append(masks.length_mask(lengths, S)[:, None, None, :])
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        raise ValueError(
            "give both query_segment_ids and key_value_segment_ids, or neither "
            "(self-attention: the same ids twice)"
        )
    if query_segment_ids is not None:
        query_ids = check_rows("query_segment_ids", query_segment_ids, (B, T), sizes)
        key_ids = check_rows(
            "key_value_segment_ids", key_value_segment_ids, (B, S), sizes
        )
        parts.append(masks.segment_mask(query_ids, key_ids))
    parts.sort(key=lambda part: part.size)
    return functools.reduce(operator.and_, parts) if parts else None


def check_scale(scale: ArrayLike | None, width: int) -> ArrayLike:
    """Return the factor of the scores, 1 / sqrt(width) where none is given.

    Raises:
        ValueError: it is not one number.
    """
    if scale is None:
        return 1 / math.sqrt(width)
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


def _positions(sizes: Sizes, query_offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Absolute positions of the rows `[T, 1]` and of the columns `[1, S]`, int32."""
    rows = np.arange(sizes.query_length, dtype=np.int32) + np.int32(query_offset)
    columns = np.arange(sizes.key_length, dtype=np.int32)
    return rows[:, None], columns[None, :]


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


def _dense_pattern(pattern: Any, sizes: Sizes, query_offset: int) -> np.ndarray:
    """The pattern as booleans `[1, 1 or N, T, S]`."""
    if not callable(getattr(pattern, "dense", None)):
        raise TypeError(
            "pattern must be an attention pattern with a method dense(), not "
            f"{type(pattern).__name__}"
        )
    edges = pattern.dense(
        sizes.query_length,
        sizes.key_length,
        num_heads=sizes.heads,
        query_offset=query_offset,
    )
    return _four_axes("pattern", np.asarray(edges, np.bool_), sizes)
