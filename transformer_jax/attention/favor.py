"""FAVOR+: softmax attention by random features (Performer)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from transformer_jax import masks
from transformer_jax.attention import arguments
from transformer_jax.attention.features import (
    Features,
    attend_all,
    attend_past,
    keys_inside,
)
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer

RANDOM_MAPS = ("positive", "relu")
# Of the authors' code: it keeps relu features above zero.
RELU_EPSILON = 1e-3
# Keeps a query's features above zero where float32 cannot hold them.
QUERY_EPSILON = 1e-16


def favor_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projection: ArrayLike,
    *,
    feature_map: str = "positive",
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
    chunk_size: int = 128,
) -> Array:
    """Approximate softmax attention by products of positive random features.

        f(x)[m] = exp(w[m] . x' - |x'|^2 / 2) / sqrt(M),  x' = x / H^(1/4)
        output[t] = f(q[t])^T (sum_j f(k[j]) v[j]^T) / (f(q[t])^T sum_j f(k[j]))

    E f(q) . f(k) = exp(q . k / sqrt(H)) where the rows w of `projection` are standard
    normal: the error falls with sqrt(M) for small queries and keys, and is large for
    large ones. Choromanski et al. 2021, "Rethinking Attention with Performers", section
    2 (https://arxiv.org/abs/2009.14794). A query's largest exponent cancels; a key's is
    kept apart and compared with those of the keys before it alone, so that no later key
    sways an earlier output, not even by rounding.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K.
        value: `[B, S, K, V]`.
        projection: `[M, H]`, such as from `orthogonal_projection`. It is no parameter:
            no gradient reaches it.
        feature_map: "positive", as above, or "relu": relu(w . x') + 0.001, which
            approximates no softmax.
        is_causal: allow j <= i only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.
        chunk_size: places that a causal call computes at a time.

    Returns:
        `[B, T, N, V]` in the query's dtype; 0 where there is no key.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 4 B N T M (H + V) FLOPs for S = T and K = N, and 2 B N T c (M + V) more with
    causality.
    """
    check_map(feature_map)
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    chunk_size = check_integer("chunk_size", chunk_size, 1)
    projection = check_projection(projection, query.shape[3])
    queries = query_features(query, projection, feature_map)
    keys, values = key_features(key, value, projection, feature_map, lengths)
    if is_causal:
        output = attend_past(queries, keys, values, chunk_size)
    else:
        output = attend_all(queries, keys, values)
    output = output.astype(query.dtype)
    return output if sizes.batched else output[0]


def query_features(query: Array, projection: Array, feature_map: str) -> Features:
    """Return the features of queries, each less a factor that cancels."""
    exponents = _projected(query.astype(wide_dtype(query)), projection, feature_map)
    if feature_map == "relu":
        return Features(exponents)
    return Features(_relative(exponents)[0] + QUERY_EPSILON)


def key_features(
    key: Array,
    value: Array,
    projection: Array,
    feature_map: str,
    lengths: Array | None,
) -> tuple[Features, Array]:
    """Return the features of keys and the values, zero where there is padding."""
    key, value, inside = keys_inside(key, value, lengths)
    features, scale = _projected(key, projection, feature_map), None
    if feature_map == "positive":
        features, scale = _relative(features)
    if inside is not None:
        features = masks.or_zero(inside, features)
        if scale is not None:
            scale = jnp.where(inside[..., 0], scale, -jnp.inf)
    return Features(features, scale), value


def orthogonal_projection(
    key: Array, features: int, width: int, dtype: Any = jnp.float32
) -> Float[Array, "features width"]:
    """Draw normal vectors that are orthogonal in blocks of `width`.

    Their lengths are those of independent normal vectors. Choromanski et al. 2021,
    section 2.4: the error is smaller than with independent ones.

    Args:
        key: PRNG key.
        features: vectors M.
        width: head width H.
        dtype: floating.

    Raises:
        ValueError: there are no features, or they have no width.
    """
    features = check_integer("features", features, 1)
    width = check_integer("width", width, 1)
    blocks = -(-features // width)
    of_blocks, of_norms = jax.random.split(key)
    normal = jax.random.normal(of_blocks, (blocks, width, width))
    # The signs make it uniform among the orthogonal matrices (Mezzadri 2007).
    rotation, upper = jnp.linalg.qr(normal)
    signs = jnp.sign(jnp.diagonal(upper, axis1=1, axis2=2))
    rows = (rotation * signs[:, None]).reshape(-1, width)[:features]
    norms = jnp.linalg.norm(jax.random.normal(of_norms, (features, width)), axis=1)
    return (rows * norms[:, None]).astype(dtype)


def check_map(name: Any) -> None:
    """Raise ValueError unless there are random features of this name."""
    if name not in RANDOM_MAPS:
        raise ValueError(
            f"feature_map must be one of {', '.join(RANDOM_MAPS)}, not {name!r}"
        )


def check_projection(projection: ArrayLike, width: int) -> Array:
    """Return the projection, cut off from gradients.

    Raises:
        ValueError: its shape does not fit.
    """
    projection = jnp.asarray(projection)
    if projection.ndim != 2 or projection.shape[1] != width or not len(projection):
        raise ValueError(
            f"projection must be [features, H] = [at least 1, {width}], not "
            f"{projection.shape}"
        )
    return jax.lax.stop_gradient(projection)


def _projected(x: Array, projection: Array, feature_map: str) -> Array:
    """Exponents of positive features, or features of relu, `[..., M]`."""
    x = x * (x.shape[-1] ** -0.25 if x.shape[-1] else 1.0)
    along = jnp.einsum("...h,mh->...m", x, projection.astype(x.dtype))
    if feature_map == "relu":
        return jax.nn.relu(along) + RELU_EPSILON
    half = jnp.square(x).sum(-1, keepdims=True) / 2
    return along - half - math.log(len(projection)) / 2


def _relative(exponents: Array) -> tuple[Array, Array]:
    """Features less the largest factor of each place, and its logarithm."""
    top = jax.lax.stop_gradient(exponents.max(-1))
    return jnp.exp(exponents - top[..., None]), top
