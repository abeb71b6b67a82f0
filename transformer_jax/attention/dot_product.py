"""Softmax attention: one function, and implementations that give one answer."""

from collections.abc import Callable
from typing import Any, SupportsIndex

from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax import masks
from transformer_jax.attention import arguments, cudnn, dense, sparse, splash
from transformer_jax.attention.arguments import Call, Limits
from transformer_jax.attention.platform import platform

# A walk over tiles takes as long as dense attention of its edges and so many more, as
# measured on a CPU at 64 to 512 positions.
OVERHEAD = 1 << 13
# From 16 MiB of float32 scores a head on, a pattern is never computed densely.
MANY_EDGES = 1 << 22


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
    key/value heads than query heads: Ainslie et al. 2023
    (https://arxiv.org/abs/2305.13245). Query head n reads key/value
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
            positions i `[T, 1]` and j `[1, S]` that returns `[N, T, S]`. It is called
            on some of them at a time: an entry depends on its own i and j alone.
        mask: booleans that broadcast to `[B, N, T, S]`, True = may attend.
        pattern: static pattern of `transformer_jax.patterns`.
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
        block_size: places of a tile of "xla", or of "splash" (a multiple of 128); by
            default chosen from the pattern. Where given, no implementation means "xla".
        implementation: None chooses one of the first three. "reference" computes every
            score; "xla" only the tiles that hold edges of the pattern, a few at a time;
            "splash" does so by JAX's kernel for TPUs, for comparisons of positions
            (causal, local, global_tokens and what they make) without bias, mask and
            dropout; "cudnn" by NVIDIA's for full, causal and local patterns. Only
            "reference" has derivatives in forward mode (`jax.jvp`).
        return_residual: also return the log-sum-exp of the allowed scores.

    Returns:
        `[B, T, N, V]` in the query's dtype. With `return_residual` also `[B, T, N]` in
        float32 (float64 for float64), differentiable.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.
        NotImplementedError: an implementation that cannot do this call, or not here.

    Cost: 2 B N E (H + V) FLOPs, E being T S for "reference" and the edges of all tiles
    for "xla"; twice as many again backward ("xla", which computes the scores anew, 2.5
    times if V = H). Memory of "reference": a few arrays of B N T S floats; of "xla": a
    few times its inputs, and some MB of scores.

    Example:
        >>> import jax.numpy as jnp
        >>> query = key = jnp.zeros((1, 3, 1, 2))
        >>> value = jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1)
        >>> dot_product_attention(query, key, value, is_causal=True).ravel().tolist()
        [1.0, 1.5, 2.0]
    """
    masks.check_dropout(dropout_rate, dropout_rng)
    query, key, value, sizes = arguments.check_heads(query, key, value)
    limits = Limits(
        mask,
        query_seq_lengths,
        key_value_seq_lengths,
        query_segment_ids,
        key_value_segment_ids,
    )
    call = Call(
        query,
        key,
        value,
        arguments.check_bias(bias, sizes),
        arguments.check_limits(limits, sizes),
        arguments.check_pattern(pattern, is_causal, sizes.heads),
        arguments.check_offset(query_offset),
        arguments.check_scale(scale, query.shape[-1]),
        dropout_rate,
        dropout_rng if dropout_rate else None,
        sizes,
    )
    if implementation is None:
        implementation = _choice(call, block_size, return_residual)
    output, residual = _attend(call, implementation, block_size)
    output = output.astype(query.dtype)
    if not sizes.batched:
        output = output[0]
        residual = None if residual is None else residual[0]
    if not return_residual:
        return output
    if residual is None:
        raise NotImplementedError(
            f"implementation={implementation!r} tells no log-sum-exp: use "
            "implementation='xla'"
        )
    return output, residual


def _attend(
    call: Call, name: str, block_size: int | None
) -> tuple[Array, Array | None]:
    """Output and log-sum-exp, if it tells, by the implementation of a name.

    Raises:
        ValueError: there is none, or one that has no tiles to size.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {name!r}: the legal ones are None, "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    if block_size is None:
        return IMPLEMENTATIONS[name](call)
    if name == "reference":
        raise ValueError(
            "the reference computes every score at once; leave block_size=None"
        )
    return IMPLEMENTATIONS[name](call, block_size)


def _choice(call: Call, block_size: int | None, return_residual: bool) -> str:
    """The implementation that is best at a call."""
    edges = call.sizes.query_length * call.sizes.key_length
    if block_size is not None:
        return "xla"
    if call.pattern is None or edges <= OVERHEAD:
        return "reference"
    if platform() == "tpu" and not return_residual and splash.refusal(call) is None:
        return "splash"
    if edges >= MANY_EDGES:
        return "xla"
    return "xla" if sparse.fewest_edges(call) + OVERHEAD < edges else "reference"


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array | None]]] = {
    "reference": dense.attend,
    "xla": sparse.attend,
    "splash": splash.attend,
    "cudnn": cudnn.attend,
}
