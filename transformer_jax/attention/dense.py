"""Dense attention: the oracle against which every other kernel is tested."""

from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from transformer_jax import masks
from transformer_jax.attention import arguments

IMPLEMENTATIONS = ("reference", "xla", "splash", "cudnn")


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Any = None,
    mask: ArrayLike | None = None,
    *,
    pattern: Any = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: SupportsIndex = 0,
    dropout_rate: float | int = 0.0,
    dropout_rng: Any = None,
    block_size: int | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Let each query take the mean of the values, weighted by a softmax over keys.

        s[t, j] = scale * q[t] . k[j] + bias[t, j]
        output[t] = sum_j softmax_j(s[t, j] over the allowed j) v[j]

    Vaswani et al. 2017, section 3.2.1 (https://arxiv.org/abs/1706.03762); fewer
    key/value heads than query heads: Ainslie et al. 2023. Query head n reads key/value
    head n // (N / K). Names and layout are those of `jax.nn.dot_product_attention`, but
    an edge is allowed where *all* of `mask`, `pattern`, `is_causal`, the lengths and
    the segments allow it, and where none is:

    - a query without an allowed key returns 0, its log-sum-exp is -inf, and its
      gradients are zero;
    - a key/value without an allowed query (in its head and batch row) is never read:
      NaN there changes nothing, forward or backward.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K.
        value: `[B, S, K, V]`, often V = H.
        bias: array that broadcasts to `[B, N, T, S]`, or a callable `bias(i, j)` of the
            positions i `[T, 1]` and j `[1, S]` that returns `[N, T, S]`.
        mask: booleans that broadcast to `[B, N, T, S]`, True = may attend.
        pattern: static pattern; `pattern.dense(T, S, num_heads=N, query_offset=...)`
            gives `[T, S]` or `[N, T, S]`.
        scale: factor of the scores, 1 / sqrt(H) by default.
        is_causal: allow j <= i only.
        query_seq_lengths: integers `[B]`; later queries return 0.
        key_value_seq_lengths: integers `[B]`; later keys are padding.
        query_segment_ids: integers `[B, T]`; queries attend keys of their own segment
            and segment 0 is padding. Needs `key_value_segment_ids`.
        key_value_segment_ids: integers `[B, S]`.
        query_offset: static; query row t has the position i = t + query_offset, key
            row j the position j.
        dropout_rate: chance to drop an edge's weight, static.
        dropout_rng: one PRNG key; an edge is kept by `masks.hashed_keep` of
            (dropout_rng, b, n, i, j) and scaled by 1 / (1 - dropout_rate).
        block_size: refused here: every score is computed at once.
        implementation: None or "reference" run this function.
        return_residual: also return the log-sum-exp of the allowed scores.

    Returns:
        `[B, T, N, V]` in the query's dtype. With `return_residual` also `[B, T, N]` in
        float32 (float64 for float64), differentiable.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.
        NotImplementedError: an implementation that is not at hand.

    Cost: 2 B N T S (H + V) FLOPs and a few arrays of B N T S floats; twice the FLOPs
    again backward.

    Example:
        >>> query = key = jnp.zeros((1, 3, 1, 2))
        >>> value = jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1)
        >>> dot_product_attention(query, key, value, is_causal=True).ravel().tolist()
        [1.0, 1.5, 2.0]
    """
    _check_implementation(implementation, block_size)
    masks.check_dropout(dropout_rate, dropout_rng)
    query_offset = arguments.check_offset(query_offset)
    query, key, value, sizes = arguments.check_heads(query, key, value)
    bias = arguments.check_bias(bias, sizes, query_offset)
    allowed = arguments.merge_masks(
        sizes,
        mask,
        pattern=pattern,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
    )
    keep = None
    if dropout_rate:
        keep = kept_edges(dropout_rng, dropout_rate, sizes, query_offset)
    scale = arguments.check_scale(scale, query.shape[-1])
    output, residual = _attend(query, key, value, bias, allowed, scale, keep)
    if dropout_rate:
        output = output / (1.0 - dropout_rate)
    output = output.astype(query.dtype)
    if not sizes.batched:
        output, residual = output[0], residual[0]
    return (output, residual) if return_residual else output


def kept_edges(
    key: Any, rate: float | int, sizes: arguments.Sizes, query_offset: int
) -> Bool[Array, "B N T S"]:
    """Mark the edges that dropout keeps, by (b, n, i, j) with the position i."""
    b, n, t, j = (
        jnp.arange(size, dtype=jnp.int32).reshape(
            [-1 if at == axis else 1 for at in range(4)]
        )
        for axis, size in enumerate(sizes.scores)
    )
    return masks.hashed_keep(key, rate, b, n, t + query_offset, j)


def _check_implementation(implementation: str | None, block_size: int | None) -> None:
    """Raise unless the reference is asked for, in a way that it can serve."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"unknown implementation {implementation!r}: the legal ones are None, "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    if implementation not in (None, "reference"):
        raise NotImplementedError(
            f"implementation={implementation!r} is not available here: "
            "use implementation='reference'"
        )
    if block_size is not None:
        raise ValueError(
            "the reference computes every score at once; leave block_size=None"
        )


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
        query = _select(live_queries, query)
        key = _select(live_keys[:, :, :, 0], key)
        value = _select(live_keys[:, :, :, 0], value)
    output, residual = weighted_mean(query, key, value, bias, allowed, scale, keep)
    residual = residual.transpose(0, 3, 1, 2)
    if allowed is not None:
        # Selected again, so that a dead row's cotangents, even NaN, end here.
        output = _select(live_queries, output)
        residual = jnp.where(live_queries[..., 0], residual, -jnp.inf)
    return output.reshape(B, T, N, value.shape[-1]), residual.reshape(B, T, N)


def weighted_mean(
    query: Float[Array, "B T K G H"],
    key: Array,
    value: Array,
    bias: Array | None,
    allowed: Any,
    scale: ArrayLike,
    keep: Any = None,
    *,
    key_axes: str = "BSK",
) -> tuple[Float[Array, "B T K G V"], Float[Array, "B K G T"]]:
    """The products, and the softmax between them, of what may all be read.

    `allowed` and `keep` stand as `grouped` returns them; `key_axes` says how key and
    value stand before their last axis, BSK or BKS.
    """
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    scores = jnp.einsum(
        f"BTKGH,{key_axes}H->BKGTS", query, key, preferred_element_type=wide
    )
    scores = scores * jnp.asarray(scale, wide)
    if bias is not None:
        scores = scores + grouped(bias, query.shape[2]).astype(wide)
    weights, residual = _softmax(scores, allowed)
    if keep is not None:
        weights = _select(grouped(keep, query.shape[2]), weights)
    output = jnp.einsum(
        f"BKGTS,{key_axes}V->BTKGV",
        weights.astype(value.dtype),
        value,
        preferred_element_type=wide,
    )
    return output, residual


def grouped(array: Any, kv_heads: int) -> Any:
    """`[b, n, t, s]` as `[b, k, g, t, s]`, n being N or 1."""
    b, n, t, s = array.shape
    k = kv_heads if n > 1 else 1
    return array.reshape(b, k, n // k, t, s)


def _rows_first(array: Any) -> Any:
    """`[b, k, g, t, 1]` as `[b, t, k, g, 1]`."""
    return array.transpose(0, 3, 1, 2, 4)


def _select(condition: Array | np.ndarray, array: Array) -> Array:
    """The array where the condition holds, else 0; both of one rank."""
    if isinstance(condition, np.ndarray) and condition.all():
        return array
    return jnp.where(condition, array, jnp.zeros((), array.dtype))


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
