"""Decoding with attention in buckets: what is kept of each place besides its key."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Int

from transformer_jax.attention import arguments, dense, lsh, routing
from transformer_jax.attention.buckets import SELF_PENALTY, code_of, linked, unit
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer

# The code of a place that holds nothing: near no other.
NOTHING = -3


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "code", "count", "position"),
    meta_fields=("size",),
)
@dataclasses.dataclass(frozen=True)
class BucketCache:
    """Keys, values and where they fell; every leaf begins with B.

    Attributes:
        key: `[B, N or K, S, H]`, zero where nothing is held.
        value: `[B, K, S, V]`, likewise.
        code: int32 `[B, N, R, S]`, bucket and cell of each key in R rounds.
        count: int32 `[B, N, R, buckets]`, places of each bucket so far.
        position: int32 `[B]`, how many positions the row has seen.
        size: places of a cell.
    """

    key: Any
    value: Any
    code: Any
    count: Any
    position: Any
    size: int


def init_lsh(
    batch: int,
    max_length: int,
    *,
    heads: int,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    value_width: int | None = None,
    rounds: int = 4,
    buckets: int = 16,
    chunk_size: int = 64,
) -> BucketCache:
    """Return an empty cache for `step_lsh`.

    Args:
        batch, max_length, kv_heads, head_width, dtype, value_width: as of
            `cache.init_cache`.
        heads: query heads N.
        rounds, buckets: of the rotations.
        chunk_size: as in `lsh_attention`.

    Raises:
        TypeError, ValueError: a size or dtype that cannot be.
    """
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    size = check_integer("chunk_size", chunk_size, 1)
    return _empty(sizes, heads, heads, dtype, (rounds, buckets), size)


def init_routing(
    batch: int,
    max_length: int,
    *,
    heads: int,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    value_width: int | None = None,
    clusters: int = 16,
    window: int | None = None,
) -> BucketCache:
    """Return an empty cache for `step_routing`; arguments as of `init_lsh`.

    Args:
        batch, max_length, heads, kv_heads, head_width, dtype, value_width: as there.
        clusters: C of the centroids.
        window: as in causal `routing_attention`.

    Raises:
        TypeError, ValueError: a size or dtype that cannot be.
    """
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    window = routing.CAUSAL_WINDOW if window is None else window
    size = check_integer("window", window, 1)
    return _empty(sizes, heads, kv_heads, dtype, (1, clusters), size)


def step_lsh(
    query_key: ArrayLike,
    value: ArrayLike,
    cache: BucketCache,
    *,
    rotations: ArrayLike,
    scale: ArrayLike | None = None,
) -> tuple[Array, BucketCache]:
    """Append one position to each row and attend to what its buckets hold.

    Equals row `cache.position` of causal `lsh_attention` over the whole sequence.

    Args:
        query_key: `[B, 1, N, H]`.
        value: `[B, 1, K, V]`.
        cache: what `init_lsh` or the last step returned.
        rotations: as in `lsh_attention`.
        scale: likewise.

    Returns:
        `[B, 1, N, V]` and the new cache. A row whose position was >= max_length gives
        NaN.

    Cost: 2 B N S (H + V) FLOPs: the S places are masked, not sought.
    """
    query_key, value, _ = lsh.check_shared(query_key, value)
    query_key, _, value, _ = arguments.check_step(
        query_key, query_key[:, :, : value.shape[2]], value, cache.position
    )
    rotations = lsh.check_rotations(rotations, query_key.shape[3])
    rounds, _, half = rotations.shape
    _check(cache, query_key, value, (query_key.shape[2], rounds, 2 * half))
    query = query_key.swapaxes(1, 2)
    bucket = lsh.hashed(query, rotations)[..., 0]
    key = unit(query.astype(wide_dtype(query))).astype(query.dtype)
    code, cache = _counted(cache, bucket)
    after = _written(cache, key[:, :, 0], value[:, 0], code)
    allowed = linked(code[..., None], after.code).any(2)
    places = jnp.arange(after.key.shape[2], dtype=jnp.int32)
    own = places[None] == cache.position[:, None]
    bias = jnp.where(own[:, None, None], -SELF_PENALTY, 0.0)
    return _attend(query, cache, after, allowed, bias, scale)


def step_routing(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: BucketCache,
    *,
    centroids: ArrayLike,
    scale: ArrayLike | None = None,
) -> tuple[Array, BucketCache]:
    """Append one position to each row and attend to what its cluster holds.

    Equals row `cache.position` of causal `routing_attention` over the whole sequence.

    Args:
        query: `[B, 1, N, H]`.
        key: `[B, 1, K, H]`.
        value: `[B, 1, K, V]`.
        cache: what `init_routing` or the last step returned.
        centroids: as in `routing_attention`.
        scale: likewise.

    Returns:
        `[B, 1, N, V]` and the new cache. A row whose position was >= max_length gives
        NaN.
    """
    query, key, value, sizes = arguments.check_step(query, key, value, cache.position)
    centroids = routing.check_centroids(centroids, sizes.heads, query.shape[3])
    _check(cache, key, value, (sizes.heads, 1, centroids.shape[1]))
    spread = jnp.repeat(key, sizes.heads // sizes.kv_heads, axis=2)
    key_cluster, cluster = (
        jnp.argmax(routing.nearness_of(x.swapaxes(1, 2), centroids), 2).astype(
            jnp.int32
        )
        for x in (spread, query)
    )
    key_code, counted = _counted(cache, key_cluster)
    code, counted = _counted(counted, cluster)
    after = _written(counted, key[:, 0], value[:, 0], key_code)
    allowed = linked(code[..., None], after.code).any(2)
    bias = jnp.zeros((1, 1, 1, 1), jnp.float32)
    return _attend(query.swapaxes(1, 2), cache, after, allowed, bias, scale)


def _empty(
    sizes: arguments.CacheSizes,
    heads: int,
    key_heads: int,
    dtype: DTypeLike,
    rounds_and_buckets: tuple[int, int],
    size: int,
) -> BucketCache:
    B, S, K, H, V = sizes
    rounds, buckets = rounds_and_buckets
    if min(heads, rounds, buckets) < 1 or heads % K:
        raise ValueError(
            "a cache of buckets needs a round, a bucket, and heads that are a multiple "
            f"of {K}, not {rounds}, {buckets} and {heads}"
        )
    return BucketCache(
        key=jnp.zeros((B, key_heads, S, H), dtype),
        value=jnp.zeros((B, K, S, V), dtype),
        code=jnp.full((B, heads, rounds, S), NOTHING, jnp.int32),
        count=jnp.zeros((B, heads, rounds, buckets), jnp.int32),
        position=jnp.zeros(B, jnp.int32),
        size=size,
    )


def _check(
    cache: BucketCache, key: Array, value: Array, counted: tuple[int, int, int]
) -> None:
    """Raise unless a step's arrays and buckets are those that the cache is for."""
    for name, new, kept in (("key", key, cache.key), ("value", value, cache.value)):
        wanted = (kept.shape[0], 1, kept.shape[1], kept.shape[3])
        arguments.check_entry(name, new, wanted, kept.dtype)
    if counted != cache.count.shape[1:]:
        raise ValueError(
            f"the cache is for {cache.count.shape[1:]} heads, rounds and buckets, not "
            f"{counted}: give `init_cache` those of the queries and pieces"
        )


def _counted(
    cache: BucketCache, bucket: Int[Array, "B N R"]
) -> tuple[Int[Array, "B N R"], BucketCache]:
    """The code of one more place in each bucket, and the cache that counts it."""
    one_hot = jax.nn.one_hot(bucket, cache.count.shape[3], dtype=jnp.int32)
    rank = (one_hot * cache.count).sum(-1, dtype=jnp.int32)
    code = code_of(bucket, rank, cache.size, 2 * cache.code.shape[3])
    return code, dataclasses.replace(cache, count=cache.count + one_hot)


def _written(
    cache: BucketCache,
    key: Array,
    value: Array,
    code: Int[Array, "B N R"],
) -> BucketCache:
    """The cache with one more position in each row; past the end none is written."""
    rows = jnp.arange(len(code), dtype=jnp.int32)
    at = cache.position
    return dataclasses.replace(
        cache,
        key=cache.key.at[rows, :, at].set(key, mode="drop"),
        value=cache.value.at[rows, :, at].set(value, mode="drop"),
        code=cache.code.at[rows, :, :, at].set(code, mode="drop"),
        position=at + 1,
    )


def _attend(
    query: Array,
    before: BucketCache,
    after: BucketCache,
    allowed: Bool[Array, "B N S"],
    bias: Array,
    scale: ArrayLike | None,
) -> tuple[Array, BucketCache]:
    """Attend from `[B, N, 1, H]` to the allowed places."""
    N, S = allowed.shape[1:]
    key, value = (
        jnp.repeat(x, N // x.shape[1], axis=1) for x in (after.key, after.value)
    )
    output, _ = dense.weighted_mean(
        query.swapaxes(1, 2)[:, :, :, None],
        key,
        value,
        bias,
        dense.grouped(allowed[:, :, None], N),
        arguments.check_scale(scale, query.shape[3]),
    )
    output = output[:, :, :, 0].astype(query.dtype)
    return arguments.or_nan(before.position < S, output), after
