"""Decoding with compressed attention, and memories that are projected once."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from transformer_jax.attention import arguments, cache, low_rank
from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.patterns.ranges import check_integer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "key_tail", "value_tail", "position"),
    meta_fields=("stride", "max_length"),
)
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """Compressed keys and values, and the places of the windows that have not ended.

    Attributes:
        key: `[B, windows, K, H]`, zero from the window on that has not ended.
        value: `[B, windows, K, V]`, likewise.
        key_tail: `[B, width, K, H]`, the last places, the newest last.
        value_tail: `[B, width, K, V]`, likewise.
        position: int32 `[B]`, how many positions the row has seen.
        stride: places from one window to the next.
        max_length: positions that a row can see.
    """

    key: Any
    value: Any
    key_tail: Any
    value_tail: Any
    position: Any
    stride: int
    max_length: int


def init_compressed(
    batch: int,
    max_length: int,
    *,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    value_width: int | None = None,
    stride: int = 3,
    width: int | None = None,
) -> CompressedCache:
    """Return an empty cache for `step_compressed`; arguments as of `cache.init_cache`.

    Args:
        batch, max_length, kv_heads, head_width, dtype, value_width: as there.
        stride: as in `compressed_attention`.
        width: places of a window, the stride by default.

    Raises:
        TypeError, ValueError: a size or dtype that cannot be.
    """
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    stride = check_integer("stride", stride, 1)
    width = stride if width is None else check_integer("width", width, 1)
    # Windows that end within max_length; one at least, for the shapes.
    windows = max(1, (max_length - width) // stride + 1)

    def empty(places: int, features: int) -> Array:
        return jnp.zeros((batch, places, kv_heads, features), dtype)

    return CompressedCache(
        key=empty(windows, head_width),
        value=empty(windows, sizes.value_width),
        key_tail=empty(width, head_width),
        value_tail=empty(width, sizes.value_width),
        position=jnp.zeros(batch, jnp.int32),
        stride=stride,
        max_length=max_length,
    )


def step_compressed(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: CompressedCache,
    *,
    key_kernel: ArrayLike,
    value_kernel: ArrayLike,
    scale: ArrayLike | None = None,
) -> tuple[Array, CompressedCache]:
    """Append one position to each row and attend to the windows that have ended.

    Equals row `cache.position` of causal `compressed_attention` over the whole
    sequence. A window is computed when its last place comes; its places are not
    attended one by one.

    Args:
        query: `[B, 1, N, H]`.
        key: `[B, 1, K, H]`.
        value: `[B, 1, K, V]`.
        cache: what `init_compressed` or the last step returned.
        key_kernel: as in `compressed_attention`.
        value_kernel: likewise.
        scale: likewise.

    Returns:
        `[B, 1, N, V]` and the new cache. A row whose position was >= max_length gives
        NaN.
    """
    query, key, value, _ = arguments.check_step(query, key, value, cache.position)
    for name, new, tail in (
        ("key", key, cache.key_tail),
        ("value", value, cache.value_tail),
    ):
        wanted = (len(tail), 1, *tail.shape[2:])
        arguments.check_entry(name, new, wanted, tail.dtype)
    kernels = low_rank.check_kernels(key_kernel, value_kernel, key, value)
    width = cache.key_tail.shape[1]
    if len(kernels[0]) != width:
        raise ValueError(
            f"the cache is for windows of {width} places, but key_kernel is "
            f"{kernels[0].shape}"
        )
    tails = [
        jnp.concatenate([tail[:, 1:], new], 1)
        for tail, new in ((cache.key_tail, key), (cache.value_tail, value))
    ]
    # Places since the first window ended; windows that have ended are counted by it.
    since = cache.position + 1 - width
    ended = jnp.where(since >= 0, since // cache.stride + 1, 0)
    ends = (since >= 0) & (since % cache.stride == 0)
    # A row whose window goes on writes behind the last one: nowhere.
    windows = cache.key.shape[1]
    index = jnp.where(ends, ended - 1, windows)
    rows = jnp.arange(len(index))
    key, value = (
        kept.at[rows, index].set(
            low_rank.compressed_window(tail[:, :, None], kernel)[:, 0], mode="drop"
        )
        for kept, tail, kernel in zip(
            (cache.key, cache.value), tails, kernels, strict=True
        )
    )
    after = dataclasses.replace(
        cache,
        key=key,
        value=value,
        key_tail=tails[0],
        value_tail=tails[1],
        position=cache.position + 1,
    )
    output = dot_product_attention(
        query, key, value, scale=scale, key_value_seq_lengths=ended
    )
    return arguments.or_nan(cache.position < cache.max_length, output), after


def fill_compressed(
    key: ArrayLike,
    value: ArrayLike,
    lengths: ArrayLike,
    *,
    key_kernel: ArrayLike,
    value_kernel: ArrayLike,
    stride: int = 3,
) -> cache.Cache:
    """Compress a whole sequence once, for `cache.read`; arguments as of `cache.fill`.

    Args:
        key, value, lengths: as there.
        key_kernel, value_kernel, stride: as in `compressed_attention`.
    """
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    stride = check_integer("stride", stride, 1)
    windows = low_rank.compressed(key, value, key_kernel, value_kernel, stride, lengths)
    return cache.fill(*windows, low_rank.count_windows(lengths, stride))


def fill_linformer(
    key: ArrayLike,
    value: ArrayLike,
    lengths: ArrayLike,
    *,
    key_projection: ArrayLike,
    value_projection: ArrayLike,
) -> cache.Cache:
    """Project a whole sequence once, for `cache.read`; arguments as of `cache.fill`.

    Args:
        key, value, lengths: as there.
        key_projection, value_projection: as in `linformer_attention`.
    """
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    key, value = low_rank.projected(
        key, value, key_projection, value_projection, lengths, sizes
    )
    every = jnp.full(sizes.batch, key.shape[1], jnp.int32)
    return cache.fill(key, value, every)
