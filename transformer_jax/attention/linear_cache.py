"""Decoding with linear attention: sums of a constant size instead of keys."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from transformer_jax.attention import arguments, favor, linear
from transformer_jax.attention.features import (
    Features,
    Sums,
    added,
    mean_of,
    no_sums,
    read_sums,
    sums_of,
)
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sums", "position"),
    meta_fields=("max_length", "feature_map"),
)
@dataclasses.dataclass(frozen=True)
class LinearCache:
    """Sums over the keys so far; every leaf begins with B.

    Attributes:
        sums: float32 or float64, of the same size however many keys there were.
        position: int32 `[B]`, how many positions the row has seen.
        max_length: positions that a row can see.
        feature_map: the name of the features.
    """

    sums: Sums
    position: Any
    max_length: int
    feature_map: str


def init_linear(
    batch: int,
    max_length: int,
    *,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    value_width: int | None = None,
    feature_map: str = "elu",
) -> LinearCache:
    """Return an empty cache for `step_linear`; arguments as of `cache.init_cache`.

    Raises:
        TypeError, ValueError: a size or dtype that cannot be, or no such feature map.
    """
    linear.check_feature_map(feature_map)
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    wide = wide_dtype(jnp.zeros((), dtype))
    sums = no_sums(batch, kv_heads, head_width, sizes.value_width, wide, scaled=False)
    return LinearCache(sums, jnp.zeros(batch, jnp.int32), max_length, feature_map)


def init_favor(
    batch: int,
    max_length: int,
    *,
    kv_heads: int,
    head_width: int,
    dtype: DTypeLike,
    value_width: int | None = None,
    features: int = 256,
    feature_map: str = "positive",
) -> LinearCache:
    """Return an empty cache for `step_favor`, with so many `features`.

    Raises:
        TypeError, ValueError: as `init_linear`.
    """
    favor.check_map(feature_map)
    features = check_integer("features", features, 1)
    sizes = arguments.check_cache_sizes(
        batch, max_length, kv_heads, head_width, value_width, dtype
    )
    wide, scaled = wide_dtype(jnp.zeros((), dtype)), feature_map == "positive"
    sums = no_sums(batch, kv_heads, features, sizes.value_width, wide, scaled=scaled)
    return LinearCache(sums, jnp.zeros(batch, jnp.int32), max_length, feature_map)


def step_linear(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cache: LinearCache
) -> tuple[Array, LinearCache]:
    """Add one position to each row and attend to all that the row holds.

    Equals row `cache.position` of causal `linear_attention` over the whole sequence.

    Args:
        query: `[B, 1, N, H]`.
        key: `[B, 1, K, H]`.
        value: `[B, 1, K, V]`.
        cache: what `init_linear` or the last step returned.

    Returns:
        `[B, 1, N, V]` and the new cache. A row whose position was >= max_length gives
        NaN, as with every cache.

    Cost: 4 B N H V FLOPs, wherever a row stands.
    """
    query, key, value, _ = arguments.check_step(query, key, value, cache.position)
    apply = linear.check_feature_map(cache.feature_map)
    keys = linear.mapped_keys(apply, key, value, None)
    return _step(Features(apply(query.astype(wide_dtype(query)))), *keys, query, cache)


def step_favor(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cache: LinearCache,
    *,
    projection: ArrayLike,
) -> tuple[Array, LinearCache]:
    """Do as `step_linear` with the features of `favor_attention`."""
    query, key, value, _ = arguments.check_step(query, key, value, cache.position)
    favor.check_map(cache.feature_map)
    projection = favor.check_projection(projection, query.shape[3])
    queries = favor.query_features(query, projection, cache.feature_map)
    keys = favor.key_features(key, value, projection, cache.feature_map, None)
    return _step(queries, *keys, query, cache)


def fill_linear(
    key: ArrayLike,
    value: ArrayLike,
    lengths: ArrayLike,
    *,
    feature_map: str = "elu",
) -> LinearCache:
    """Return the sums over a whole sequence that is only read, such as a memory.

    Args:
        key: `[B, S, K, H]`.
        value: `[B, S, K, V]`.
        lengths: integers `[B]`; what stands behind is never read.
        feature_map: as in `linear_attention`.
    """
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    apply = linear.check_feature_map(feature_map)
    sums = sums_of(*linear.mapped_keys(apply, key, value, lengths))
    return LinearCache(sums, lengths.astype(jnp.int32), sizes.key_length, feature_map)


def fill_favor(
    key: ArrayLike,
    value: ArrayLike,
    lengths: ArrayLike,
    *,
    projection: ArrayLike,
    feature_map: str = "positive",
) -> LinearCache:
    """Do as `fill_linear` with the features of `favor_attention`."""
    key, _, value, sizes = arguments.check_heads(key, key, value)
    lengths = arguments.check_rows("lengths", lengths, (sizes.batch,), sizes)
    favor.check_map(feature_map)
    projection = favor.check_projection(projection, key.shape[3])
    keys = favor.key_features(key, value, projection, feature_map, lengths)
    sums = sums_of(*keys)
    return LinearCache(sums, lengths.astype(jnp.int32), sizes.key_length, feature_map)


def read_linear(query: ArrayLike, cache: LinearCache) -> Array:
    """Attend from `[B, T, N, H]` to what `fill_linear` returned, `[B, T, N, V]`."""
    query = _check_read(query, cache)
    apply = linear.check_feature_map(cache.feature_map)
    return _read(Features(apply(query.astype(wide_dtype(query)))), query, cache)


def read_favor(query: ArrayLike, cache: LinearCache, *, projection: ArrayLike) -> Array:
    """Attend from `[B, T, N, H]` to what `fill_favor` returned, `[B, T, N, V]`."""
    query = _check_read(query, cache)
    favor.check_map(cache.feature_map)
    projection = favor.check_projection(projection, query.shape[3])
    queries = favor.query_features(query, projection, cache.feature_map)
    return _read(queries, query, cache)


def _step(
    queries: Features, keys: Features, values: Array, query: Array, cache: LinearCache
) -> tuple[Array, LinearCache]:
    B, K, M, V = cache.sums.state.shape
    dtype = cache.sums.state.dtype
    arguments.check_entry("features of key", keys.values, (B, 1, K, M), dtype)
    arguments.check_entry("value", values, (B, 1, K, V), dtype)
    inside = cache.position < cache.max_length
    sums = added(cache.sums, sums_of(keys, values))
    after = dataclasses.replace(cache, sums=sums, position=cache.position + 1)
    output = _read(queries, query, after)
    return arguments.or_nan(inside, output), after


def _check_read(query: ArrayLike, cache: LinearCache) -> Array:
    """Return the queries of a memory; refuse other rows and heads."""
    query = jnp.asarray(query)
    B, K = cache.sums.total.shape[:2]
    if query.ndim != 4 or len(query) != B or query.shape[2] % K:
        raise ValueError(
            f"query must be [B, T, N, H] with B = {B} and N a multiple of {K} to read "
            f"this memory, not {query.shape}"
        )
    return query


def _read(queries: Features, query: Array, cache: LinearCache) -> Array:
    held, features = cache.sums.total.shape[2], queries.values.shape[3]
    if features != held:
        raise ValueError(
            f"the cache holds sums of {held} features, but queries {query.shape} have "
            f"{features}"
        )
    return mean_of(*read_sums(queries.values, cache.sums)).astype(query.dtype)
