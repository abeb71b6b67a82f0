"""Sinkhorn attention: a block reads itself and another one, chosen by soft sorting."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from transformer_jax import masks
from transformer_jax.attention import arguments
from transformer_jax.attention.arguments import Sizes
from transformer_jax.attention.chunks import chunked
from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer

# The logarithm of no weight; finite, so that differences of two are no NaN.
NO_WEIGHT = -1e9


def sinkhorn_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    sort_logits: ArrayLike,
    *,
    block_size: int,
    iterations: int = 8,
    temperature: float = 0.75,
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Let each block of queries read its own keys and a mixture of blocks of keys.

        P = Sinkhorn(sort_logits / temperature)
        block u attends [sum_v P[u, v] K[v]; K[u]]

    Tay et al. 2020, "Sparse Sinkhorn Attention", section 3
    (https://arxiv.org/abs/2002.11296). Sinkhorn's iterations divide rows and columns by
    their sums in turn, until each is 1: P is a soft permutation of the blocks. Add
    Gumbel noise to `sort_logits` for the paper's Gumbel-Sinkhorn. A place of the
    mixture has the weight of what is no padding in it.

    With causality block u mixes blocks before it alone, with weights of a softmax over
    them: dividing by a column's sum would look ahead. `sort_logits[u]` must then depend
    on places before block u only, which is the caller's part.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, T, K, H]`; N is a multiple of K.
        value: `[B, T, K, V]`.
        sort_logits: `[B, N, blocks, blocks]`, T / block_size blocks, rounded up; rows
            are blocks of queries.
        block_size: places of a block, static.
        iterations: of Sinkhorn's.
        temperature: the lower, the nearer to a permutation.
        is_causal: allow j <= i only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read, and
            its blocks are not sorted.
        scale: factor of the scores, 1 / sqrt(H) by default.

    Returns:
        `[B, T, N, V]` in the query's dtype.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 4 B N T b (H + V) FLOPs with blocks of b, and 2 B N (T / b) T (H + V) for the
    mixtures.
    """
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    size = check_integer("block_size", block_size, 1)
    check_integer("iterations", iterations, 1)
    logits = _sort_logits(sort_logits, sizes, size, temperature, query)
    if not query.size or not value.size:
        output = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
        return output if sizes.batched else output[0]
    B, T, N, _ = query.shape
    size = min(size, T)
    inside = (
        jnp.ones((B, T), bool) if lengths is None else masks.length_mask(lengths, T)
    )
    share = N // sizes.kv_heads
    key, value = (
        masks.or_zero(inside[..., None, None], jnp.repeat(x, share, axis=2))
        for x in (key, value)
    )
    query, key, value, inside = (
        chunked(x, size, 1) for x in (query, key, value, inside)
    )
    sorting = sorted_blocks(logits, inside.any(2), iterations, is_causal)
    output = _attend(query, key, value, inside, sorting, is_causal, scale)
    output = output.reshape(B, -1, N, value.shape[4])[:, :T]
    return output if sizes.batched else output[0]


def _attend(
    query: Float[Array, "B U b N H"],
    key: Float[Array, "B U b N H"],
    value: Float[Array, "B U b N V"],
    inside: Bool[Array, "B U b"],
    sorting: Float[Array, "B N U U"],
    is_causal: bool,
    scale: ArrayLike | None,
) -> Float[Array, "BU b N V"]:
    """Attend from each block to its mixture and to itself."""
    B, U, size, N, _ = query.shape
    mixed = [
        jnp.einsum("bnuv,bvjnh->bujnh", sorting, x.astype(sorting.dtype)).astype(
            x.dtype
        )
        for x in (key, value)
    ]
    weight = jnp.einsum("bnuv,bvj->bunj", sorting, inside.astype(sorting.dtype))
    some = weight > 0
    bias = jnp.log(jnp.where(some, weight, jnp.ones((), weight.dtype)))
    bias = jnp.concatenate([bias, jnp.zeros_like(bias)], -1)
    past = np.tri(size, dtype=bool) if is_causal else np.ones((size, size), bool)
    own = inside[:, :, None, None] & past[None, None, None]
    shape = B, U, N, size, size
    allowed = jnp.concatenate(
        [jnp.broadcast_to(x, shape) for x in (some[:, :, :, None], own)], -1
    )
    keys, values = (
        jnp.concatenate(pair, 2) for pair in zip(mixed, (key, value), strict=True)
    )
    blocks = query, keys, values, bias[:, :, :, None], allowed
    return dot_product_attention(
        *(x.reshape(B * U, *x.shape[2:]) for x in blocks), scale=scale
    )


def sorted_blocks(
    logits: Float[Array, "B N U U"],
    alive: Bool[Array, "B U"],
    iterations: int,
    is_causal: bool,
) -> Float[Array, "B N U U"]:
    """Return the soft permutation of the blocks that are alive, 0 elsewhere.

    With causality a softmax over earlier blocks; the first has none.
    """
    pairs = alive[:, None, :, None] & alive[:, None, None, :]
    if is_causal:
        pairs &= np.tri(logits.shape[2], k=-1, dtype=bool)[None, None]
    x = jnp.where(pairs, logits, NO_WEIGHT)

    def normed(x: Array, axis: int) -> Array:
        sums = jax.scipy.special.logsumexp(x, axis=axis, keepdims=True)
        return jnp.where(pairs, x - sums, NO_WEIGHT)

    def both(x: Array, _: None) -> tuple[Array, None]:
        return normed(normed(x, 3), 2), None

    if is_causal:
        x = normed(x, 3)
    else:
        x, _ = jax.lax.scan(both, x, None, length=iterations)
    return masks.or_zero(pairs, jnp.exp(x))


def _sort_logits(
    sort_logits: ArrayLike, sizes: Sizes, size: int, temperature: float, query: Array
) -> Array:
    """The logits over the temperature, as wide floats."""
    if sizes.query_length != sizes.key_length:
        raise ValueError(
            "sinkhorn attention is for one sequence, but there are "
            f"{sizes.query_length} queries and {sizes.key_length} keys: attend another "
            "one with dot_product"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    logits = jnp.asarray(sort_logits)
    blocks = -(-sizes.query_length // size)
    wanted = (sizes.batch, sizes.heads, blocks, blocks)
    if logits.shape != wanted and (sizes.batched or logits.shape != wanted[1:]):
        raise ValueError(
            f"sort_logits must be [B, N, blocks, blocks] = {wanted}, not {logits.shape}"
        )
    return logits.reshape(wanted).astype(wide_dtype(query)) / temperature
