"""Dense attention, "reference": every score at once."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from transformer_jax import masks
from transformer_jax.attention.arguments import Call, evaluate_bias
from transformer_jax.attention.products import product


def attend(call: Call) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Return output and log-sum-exp of a call; every score is computed at once.

    Cost: 2 B N T S (H + V) FLOPs and a few arrays of B N T S floats; twice the FLOPs
    again backward.
    """
    allowed = allowed_edges(call)
    bias = call.bias
    if callable(bias):
        rows, columns = _positions(call)
        bias = evaluate_bias(
            bias, jnp.asarray(rows), jnp.asarray(columns), call.sizes.heads
        )
    keep = kept_edges(call) if call.rate else None
    output, residual = _attend(
        call.query, call.key, call.value, bias, allowed, call.scale, keep
    )
    return output / (1.0 - call.rate) if call.rate else output, residual


def allowed_edges(call: Call) -> Bool[Array | np.ndarray, "..."] | None:
    """Return the allowed edges, broadcastable to `[B, N, T, S]`; None allows all.

    The smallest masks are merged first, and no axis is spread that no mask needs. What
    is static stays a NumPy constant: faster on a CPU than comparing positions anew.
    """
    _, _, T, S = call.sizes.scores
    limits, parts = call.limits, []
    if call.pattern is not None:
        edges = call.pattern.dense(T, S, query_offset=call.offset)
        parts.append(edges[None] if edges.ndim == 3 else edges[None, None])
    if limits.mask is not None:
        parts.append(limits.mask)
    if limits.query_lengths is not None:
        parts.append(masks.length_mask(limits.query_lengths, T)[:, None, :, None])
    if limits.key_lengths is not None:
        parts.append(masks.length_mask(limits.key_lengths, S)[:, None, None, :])
    if limits.query_ids is not None:
        parts.append(masks.segment_mask(limits.query_ids, limits.key_ids))
    parts.sort(key=lambda part: part.size)
    return functools.reduce(operator.and_, parts) if parts else None


def kept_edges(call: Call) -> Bool[Array, "B N T S"]:
    """Mark the edges that dropout keeps, by (b, n, i, j) with the position i."""
    b, n, t, j = (
        jnp.arange(size, dtype=jnp.int32).reshape(
            [-1 if at == axis else 1 for at in range(4)]
        )
        for axis, size in enumerate(call.sizes.scores)
    )
    return masks.hashed_keep(call.rng, call.rate, b, n, t + call.offset, j)


def _positions(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Absolute positions of the rows `[T, 1]` and of the columns `[1, S]`, int32."""
    rows = np.arange(call.sizes.query_length, dtype=np.int32) + np.int32(call.offset)
    columns = np.arange(call.sizes.key_length, dtype=np.int32)
    return rows[:, None], columns[None, :]


def _attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    allowed: Bool[Array | np.ndarray, "..."] | None,
    scale: ArrayLike,
    keep: Bool[Array, "B N T S"] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """The products and the softmax, in float32 or float64.

    Query heads stand as `[K, G]`, G of them on each key/value head. On a CPU this form
    and its backward pass cost what attention without any masking costs, because the
    selects melt into the copies by which XLA prepares its batched products.
    """
    B, T, N, H = query.shape
    K = key.shape[2]
    query = query.reshape(B, T, K, N // K, H)
    if allowed is not None:
        allowed = grouped(allowed, K)
        live_queries = _rows_first(allowed.any(4, keepdims=True))
        live_keys = _rows_first(allowed.any((2, 3), keepdims=True).swapaxes(3, 4))
        query = masks.or_zero(live_queries, query)
        key = masks.or_zero(live_keys[:, :, :, 0], key)
        value = masks.or_zero(live_keys[:, :, :, 0], value)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    output, residual = weighted_mean(query, key, value, bias, allowed, scale, keep)
    residual = residual.transpose(0, 3, 1, 2)
    if allowed is not None:
        # Selected again, so that a dead row's cotangents, even NaN, end here.
        output = masks.or_zero(live_queries, output)
        residual = jnp.where(live_queries[..., 0], residual, -jnp.inf)
    return output.reshape(B, T, N, value.shape[-1]), residual.reshape(B, T, N)


def weighted_mean(
    query: Float[Array, "B T K G H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S V"],
    bias: Array | None,
    allowed: Any,
    scale: ArrayLike,
    keep: Any = None,
) -> tuple[Float[Array, "B T K G V"], Float[Array, "B K G T"]]:
    """The products, and the softmax between them, of what may all be read.

        output = sum_j softmax_j(scale q . k_j + bias_j over the allowed j) v_j

    `allowed` and `keep` stand as `grouped` returns them.
    """
    scores = product("bqh,bsh->bqs", jnp.moveaxis(query, 1, 3), key)
    scores = scores * jnp.asarray(scale, scores.dtype)
    if bias is not None:
        scores = scores + grouped(bias, query.shape[2]).astype(scores.dtype)
    weights, residual = _softmax(scores, allowed)
    if keep is not None:
        weights = masks.or_zero(grouped(keep, query.shape[2]), weights)
    output = product("bqs,bsh->bqh", weights.astype(value.dtype), value)
    return jnp.moveaxis(output, 3, 1), residual


def grouped(array: Any, kv_heads: int) -> Any:
    """`[b, n, t, s]` as `[b, k, g, t, s]`, n being N or 1."""
    b, n, t, s = array.shape
    k = kv_heads if n > 1 else 1
    return array.reshape(b, k, n // k, t, s)


def _rows_first(array: Any) -> Any:
    """`[b, k, g, t, 1]` as `[b, t, k, g, 1]`."""
    return array.transpose(0, 3, 1, 2, 4)


@jax.custom_jvp
def _softmax(scores: Array, allowed: Any) -> tuple[Array, Array]:
    """Softmax and log-sum-exp over the allowed places of the last axis.

    A row with none (or of -inf only) has the weights 0 and the log-sum-exp -inf. The
    derivative is written by weights alone, so it meets no -inf and needs no scores.
    """
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    powers = jnp.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    dead = total == 0
    total = jnp.where(dead, 1.0, total)
    residual = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    return powers / total, residual[..., 0]


@_softmax.defjvp
def _softmax_jvp(primals: tuple, tangents: tuple) -> tuple:
    weights, residual = _softmax(*primals)
    change = weights * tangents[0]
    mean = change.sum(-1, keepdims=True)
    return (weights, residual), (change - weights * mean, mean[..., 0])
