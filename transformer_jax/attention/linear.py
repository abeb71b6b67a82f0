"""Linear attention: attention by changing the order of the matrix products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

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


def _elu_plus_one(x: Array) -> Array:
    """x + 1 above 0, e^x below: elu(x) + 1 would round it to 0 below -17."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


FEATURE_MAPS: dict[str, Callable[[Array], Array]] = {
    "elu": _elu_plus_one,
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
}


def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: str = "elu",
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
    chunk_size: int = 128,
) -> Array:
    """Let each query take the mean of the values, weighted by products of features.

        output[t] = f(q[t])^T (sum_j f(k[j]) v[j]^T) / (f(q[t])^T sum_j f(k[j]))

    The bracket is computed once for all queries, or with causality as a running sum:
    (H + V) T S products a head become 2 H V T. Katharopoulos et al. 2020, "Transformers
    are RNNs", equations 5 and 9 (https://arxiv.org/abs/2006.16236). Scores are not
    scaled. Query head n reads key/value head n // (N / K).

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K.
        value: `[B, S, K, V]`.
        feature_map: f, entry by entry: "elu" (elu(x) + 1, the paper's), "relu" or
            "softplus".
        is_causal: allow j <= i only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.
        chunk_size: places that a causal call computes at a time.

    Returns:
        `[B, T, N, V]` in the query's dtype; 0 where no key has weight.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 4 B N T H V FLOPs, and 2 B N T c (H + V) more with causality, c being
    `chunk_size`. Memory of a few times the inputs; sums are float32.

    Example:
        >>> import jax.numpy as jnp
        >>> query = key = jnp.zeros((1, 3, 1, 2))
        >>> value = jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1)
        >>> linear_attention(query, key, value, is_causal=True).ravel().tolist()
        [1.0, 1.5, 2.0]
    """
    apply = check_feature_map(feature_map)
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    chunk_size = check_integer("chunk_size", chunk_size, 1)
    queries = Features(apply(query.astype(wide_dtype(query))))
    keys, values = mapped_keys(apply, key, value, lengths)
    if is_causal:
        output = attend_past(queries, keys, values, chunk_size)
    else:
        output = attend_all(queries, keys, values)
    output = output.astype(query.dtype)
    return output if sizes.batched else output[0]


def mapped_keys(
    apply: Callable[[Array], Array], key: Array, value: Array, lengths: Array | None
) -> tuple[Features, Array]:
    """Return features of keys and values, zero where there is padding.

    The features are zeroed, not the keys alone: f(0) is not 0.
    """
    key, value, inside = keys_inside(key, value, lengths)
    features = apply(key)
    if inside is not None:
        features = masks.or_zero(inside, features)
    return Features(features), value


def check_feature_map(name: Any) -> Callable[[Array], Array]:
    """Return the feature map of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map must be one of {', '.join(FEATURE_MAPS)}, not {name!r}"
        )
    return FEATURE_MAPS[name]
