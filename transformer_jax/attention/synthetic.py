"""Synthesizer attention: weights that compare no queries with keys."""

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax.attention.dot_product import dot_product_attention


def synthesizer_attention(
    value: ArrayLike,
    logits: ArrayLike,
    *,
    pattern: Any = None,
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
) -> Array:
    """Take the mean of the values, weighted by a softmax of given logits.

        output[t] = sum_j softmax_j(logits[t, j] over the allowed j) v[j]

    Tay et al. 2021, "Synthesizer: Rethinking Self-Attention in Transformer Models",
    section 3 (https://arxiv.org/abs/2005.00743): logits are made of the query's place
    alone (dense), or learned or drawn for each pair of positions (random).

    Args:
        value: floating `[B, S, K, V]`, or `[S, K, V]`: then B is left out everywhere.
        logits: broadcast to `[B, N, T, S]`, with their own N (K where it is 1; a
            multiple of K) and T.
        pattern: static pattern of `transformer_jax.patterns`.
        is_causal: allow j <= i only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.

    Returns:
        `[B, T, N, V]` in the dtype of `value`; 0 where nothing is allowed.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 2 B N T S V FLOPs: it saves the comparison, not the square.
    """
    value, logits = jnp.asarray(value), jnp.asarray(logits)
    if value.ndim not in (3, 4) or logits.ndim < 2:
        raise ValueError(
            "value must be [B, S, K, V] or [S, K, V] and logits [B, N, T, S], not "
            f"{value.shape} and {logits.shape}"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, logits)):
        raise TypeError(
            f"value and logits must be floating, not {value.dtype} and {logits.dtype}"
        )
    if logits.shape[-1] not in (1, value.shape[-3]):
        raise ValueError(
            f"logits {logits.shape} must be as long in their last axis as value "
            f"{value.shape} in S: cut them to [..., {value.shape[-3]}]"
        )
    kv_heads = value.shape[-2]
    heads = kv_heads if logits.ndim < 3 else max(kv_heads, logits.shape[-3])
    # Queries and keys of 0 leave the logits alone to tell the scores.
    query = jnp.zeros((*value.shape[:-3], logits.shape[-2], heads, 1), value.dtype)
    key = jnp.zeros((*value.shape[:-1], 1), value.dtype)
    return dot_product_attention(
        query,
        key,
        value,
        logits,
        pattern=pattern,
        is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths,
    )
