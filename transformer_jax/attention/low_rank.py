"""Attention to fewer keys: projected along the length, or convolved with a stride."""

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax import masks
from transformer_jax.attention import arguments
from transformer_jax.attention.arguments import Sizes
from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer


def linformer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_projection: ArrayLike,
    value_projection: ArrayLike,
    *,
    key_value_seq_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Attend to keys and values that are projected along the length.

        output = softmax(scale Q (E^T K)^T) (F^T V)

    Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", equation 7
    (https://arxiv.org/abs/2006.04768); its E and F are `key_projection` and
    `value_projection` transposed. Every projected key mixes all positions, so there is
    no causal form.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K.
        value: `[B, S, K, V]`.
        key_projection: `[P, rank]`, or `[K, P, rank]` of each key/value head; P >= S,
            and the first S rows are used.
        value_projection: likewise.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.
        scale: factor of the scores, 1 / sqrt(H) by default.

    Returns:
        `[B, T, N, V]` in the query's dtype; 0 in rows of length 0.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name; a sequence
            longer than P.

    Cost: 2 B rank (N T + K S) (H + V) FLOPs.
    """
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    key, value = projected(key, value, key_projection, value_projection, lengths, sizes)
    output = dot_product_attention(query, key, value, scale=scale)
    return output if sizes.batched else output[0]


def projected(
    key: Array,
    value: Array,
    key_projection: ArrayLike,
    value_projection: ArrayLike,
    lengths: Array | None,
    sizes: Sizes,
) -> tuple[Array, Array]:
    """Return keys and values `[B, rank, K, ...]`, without what stands in padding.

    Raises:
        ValueError: a projection has another shape, or fewer rows than there are places.
    """
    key, value = _inside(key, value, lengths)
    pairs = {"key_projection": key_projection, "value_projection": value_projection}
    weights = [_projection(*pair, sizes) for pair in pairs.items()]
    if weights[0].shape[-1] != weights[1].shape[-1]:
        raise ValueError(
            "key_projection and value_projection must have one rank, not "
            f"{weights[0].shape} and {weights[1].shape}"
        )
    return tuple(
        _along_length(x, weight.astype(x.dtype))
        for x, weight in zip((key, value), weights, strict=True)
    )


def _along_length(x: Array, weight: Array) -> Array:
    """`[B, S, K, H]` times `[S, rank]` or `[K, S, rank]`, as `[B, rank, K, H]`.

    XLA's CPU takes a bfloat16 product to float32 only with one free axis of each side.
    """
    B, S, K, H = x.shape
    wide = wide_dtype(x)
    if weight.ndim == 2:
        flat = x.reshape(B, S, K * H)
        found = jnp.einsum("sr,bsf->brf", weight, flat, preferred_element_type=wide)
        found = found.reshape(B, found.shape[1], K, H)
    else:
        by_row = jnp.broadcast_to(weight, (B, *weight.shape))
        found = jnp.einsum("bksr,bskh->brkh", by_row, x, preferred_element_type=wide)
    return found.astype(x.dtype)


def compressed_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_kernel: ArrayLike,
    value_kernel: ArrayLike,
    *,
    stride: int,
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Attend to keys and values that a strided convolution has compressed.

        k'[m] = sum_w key_kernel[w] k[stride m + w];  softmax(scale Q K'^T) V'

    Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", section
    4.2.3, "memory-compressed attention" (https://arxiv.org/abs/1801.10198). Window m
    covers the positions [stride m, stride m + width); those that are missing or padding
    count as 0. A window counts where it begins within the sequence; with causality a
    query sees it once it has ended, so that the first `width - 1` queries see nothing
    and return 0.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K.
        value: `[B, S, K, V]`.
        key_kernel: `[width, K, H, H]`: offset, head, feature in, feature out.
        value_kernel: `[width, K, V, V]`.
        stride: places from one window to the next, static; 3 in the paper, as is width.
        is_causal: allow what has ended at i or before only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.
        scale: factor of the scores, 1 / sqrt(H) by default.

    Returns:
        `[B, T, N, V]` in the query's dtype.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 2 B N T (S / stride) (H + V) FLOPs for the scores, and for the windows
    2 B K S (width / stride) (H^2 + V^2).
    """
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    stride = check_integer("stride", stride, 1)
    key, value = compressed(key, value, key_kernel, value_kernel, stride, lengths)
    mask = None
    if is_causal:
        width, windows = jnp.shape(key_kernel)[0], key.shape[1]
        ends = jnp.arange(windows) * stride + width - 1
        mask = ends[None] <= jnp.arange(sizes.query_length)[:, None]
    if lengths is not None:
        lengths = count_windows(lengths, stride)
    output = dot_product_attention(
        query, key, value, None, mask, scale=scale, key_value_seq_lengths=lengths
    )
    return output if sizes.batched else output[0]


def compressed(
    key: Array,
    value: Array,
    key_kernel: ArrayLike,
    value_kernel: ArrayLike,
    stride: int,
    lengths: Array | None,
) -> tuple[Array, Array]:
    """Return the windows `[B, ceil(S / stride), K, ...]` of keys and values.

    Raises:
        ValueError: a kernel has another shape.
    """
    kernels = check_kernels(key_kernel, value_kernel, key, value)
    return tuple(
        _windows(x, kernel, stride)
        for x, kernel in zip(_inside(key, value, lengths), kernels, strict=True)
    )


def count_windows(lengths: Array, stride: int) -> Array:
    """Return how many windows begin within sequences; also of unsigned lengths."""
    return -(-lengths.astype(jnp.int32) // stride)


def check_kernels(
    key_kernel: ArrayLike, value_kernel: ArrayLike, key: Array, value: Array
) -> tuple[Array, Array]:
    """Return the kernels of a convolution in the dtype of keys and values.

    Raises:
        ValueError: a kernel has another shape.
    """
    kernels = jnp.asarray(key_kernel), jnp.asarray(value_kernel)
    names = "key_kernel", "value_kernel"
    for name, kernel, x in zip(names, kernels, (key, value), strict=True):
        wanted = (x.shape[2], x.shape[3], x.shape[3])
        if kernel.ndim != 4 or kernel.shape[1:] != wanted or not len(kernel):
            raise ValueError(
                f"{name} must be [width, K, H, H] with K, H, H = {wanted} for "
                f"{x.shape}, not {kernel.shape}"
            )
    if len(kernels[0]) != len(kernels[1]):
        raise ValueError(
            "key_kernel and value_kernel must have one width, not "
            f"{kernels[0].shape} and {kernels[1].shape}"
        )
    return tuple(kernel.astype(key.dtype) for kernel in kernels)


def compressed_window(
    places: Array, kernel: Array, equation: str = "bwskh,wkhd->bskd"
) -> Array:
    """Return one compressed place of so many `[B, width, S, K, H]`."""
    wide = wide_dtype(places)
    found = jnp.einsum(equation, places, kernel, preferred_element_type=wide)
    return found.astype(places.dtype)


def _windows(x: Array, kernel: Array, stride: int) -> Array:
    """`[B, S, K, H]` as `[B, ceil(S / stride), K, H]`."""
    B, S, *rest = x.shape
    width, count = len(kernel), -(-S // stride)
    needed = max(0, (count - 1) * stride + width) if count else 0
    x = jnp.pad(x, [(0, 0), (0, max(0, needed - S)), (0, 0), (0, 0)])
    last = (count - 1) * stride + 1
    shifted = [x[:, w : w + last : stride] for w in range(width)] if count else []
    if not shifted:
        return jnp.zeros((B, 0, *rest), x.dtype)
    return compressed_window(jnp.stack(shifted, 1), kernel)


def _inside(key: Array, value: Array, lengths: Array | None) -> tuple[Array, Array]:
    """Keys and values, 0 where they are padding."""
    if lengths is None:
        return key, value
    inside = masks.length_mask(lengths, key.shape[1])[..., None, None]
    return masks.or_zero(inside, key), masks.or_zero(inside, value)


def _projection(name: str, projection: ArrayLike, sizes: Sizes) -> Any:
    """The rows of a projection that a sequence uses, `[S, rank]` or `[K, S, rank]`."""
    projection = jnp.asarray(projection)
    heads = projection.shape[:-2]
    if projection.ndim < 2 or heads not in ((), (sizes.kv_heads,)):
        raise ValueError(
            f"{name} must be [S, rank] or [K, S, rank] with K = {sizes.kv_heads}, not "
            f"{projection.shape}"
        )
    rows = projection.shape[-2]
    if rows < sizes.key_length:
        raise ValueError(
            f"{name} {projection.shape} is for {rows} places, but there are "
            f"{sizes.key_length}: project more, or cut the sequence"
        )
    return projection[..., : sizes.key_length, :]
