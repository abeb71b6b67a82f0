"""LSH attention (Reformer): queries that are keys, sorted by random rotations."""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from transformer_jax import masks
from transformer_jax.attention import arguments
from transformer_jax.attention.buckets import (
    Places,
    attend_sorted,
    code_of,
    merged,
    permuted,
    sort_places,
    unit,
)
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer


def lsh_attention(
    query_key: ArrayLike,
    value: ArrayLike,
    rotations: ArrayLike,
    *,
    chunk_size: int = 64,
    is_causal: bool = False,
    key_value_seq_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> Array:
    """Attend to the places that fall into one's own bucket, in any of several rounds.

        bucket(q) = argmax [q R; -q R];  s[i, j] = scale q[i] . q[j] / |q[j]|

    Kitaev et al. 2020, "Reformer: The Efficient Transformer", section 2
    (https://arxiv.org/abs/2001.04451). Queries are the keys as well, at length 1. In a
    round, places are sorted by bucket and position and cut into chunks; a place attends
    those of its bucket in its own chunk and in the one before. The softmax goes over
    all that any round allows, each counted once; a place attends itself only where it
    has nothing else.

    With causality a bucket's chunks are counted from its own beginning, not from that
    of the sequence's first bucket: the paper's chunks depend on later places, these do
    not, so that token by token equals the whole.

    Args:
        query_key: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out.
        value: `[B, T, K, V]`; N is a multiple of K.
        rotations: `[rounds, H, buckets / 2]`, normally distributed as a rule. No
            gradient reaches them.
        chunk_size: places of a chunk.
        is_causal: allow j <= i only.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read, and
            returns 0.
        scale: factor of the scores, 1 / sqrt(H) by default.

    Returns:
        `[B, T, N, V]` in the dtype of `query_key`.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 2 B N T rounds w (H + V) FLOPs, w = 2 c with chunks of c and 3 c with
    causality, as many hashes as rotations have columns, and a sort a round.
    """
    query_key, value, sizes = check_shared(query_key, value)
    lengths = arguments.check_lengths(key_value_seq_lengths, sizes)
    rotations = check_rotations(rotations, query_key.shape[3])
    size = check_integer("chunk_size", chunk_size, 1)
    scale = arguments.check_scale(scale, query_key.shape[3])
    B, T, N, _ = query_key.shape
    if query_key.size and value.size:
        inside = jnp.ones((B, T), bool)
        if lengths is not None:
            inside = masks.length_mask(lengths, T)
        value = jnp.repeat(value, N // sizes.kv_heads, axis=2)
        query, values = (
            masks.or_zero(inside[..., None, None], x).swapaxes(1, 2)
            for x in (query_key, value)
        )
        output = _attend(
            query, values, inside, rotations, min(size, T), is_causal, scale
        )
        output = output.swapaxes(1, 2).astype(query_key.dtype)
    else:
        output = jnp.zeros((B, T, N, value.shape[3]), query_key.dtype)
    return output if sizes.batched else output[0]


def _attend(
    query: Float[Array, "B N T H"],
    value: Float[Array, "B N T V"],
    inside: Bool[Array, "B T"],
    rotations: Float[Array, "R H F"],
    size: int,
    is_causal: bool,
    scale: ArrayLike,
) -> Float[Array, "B N T V"]:
    """Sort the places in every round, attend within chunks, and merge the rounds."""
    T, buckets = query.shape[2], 2 * rotations.shape[2]
    bucket = jnp.where(inside[:, None, None], hashed(query, rotations), buckets)
    order = sort_places(bucket)
    rank = order.rank if is_causal else order.inverse
    codes = code_of(bucket, rank, size, T)

    def arranged(x: Array) -> Array:
        spread = jnp.broadcast_to(x[:, :, None], (*bucket.shape, x.shape[-1]))
        return permuted(spread, order.order, order.inverse)

    def back(x: Array) -> Array:
        return permuted(x, order.inverse, order.order)

    places = Places(
        query=arranged(query),
        key=arranged(unit(query.astype(wide_dtype(query))).astype(query.dtype)),
        value=arranged(value),
        codes=jnp.take_along_axis(codes[:, :, None], order.order[:, :, :, None], -1),
        time=order.order,
        readable=jnp.take_along_axis(bucket, order.order, -1) < buckets,
    )
    output, residual = attend_sorted(
        places,
        size=size,
        back=2 if is_causal else 1,
        scale=scale,
        causal=is_causal,
        own=False,
    )
    output = merged(back(output), back(residual[..., None])[..., 0])
    return masks.or_zero(inside[:, None, :, None], output)


def hashed(
    query: Float[Array, "B N T H"], rotations: Float[Array, "R H F"]
) -> Int[Array, "B N R T"]:
    """Return the bucket of each place in each round."""
    query = jax.lax.stop_gradient(query).astype(wide_dtype(query))
    turned = jnp.einsum(
        "bnth,rhf->bnrtf",
        query,
        rotations.astype(query.dtype),
        # Rounded otherwise in decoding, a place would be in another bucket there.
        precision=jax.lax.Precision.HIGHEST,
    )
    turned = jnp.concatenate([turned, -turned], -1)
    return jnp.argmax(turned, -1).astype(jnp.int32)


def draw_rotations(
    key: Array, rounds: int, width: int, buckets: int
) -> Float[Array, "R H F"]:
    """Draw the rotations of so many rounds, `[rounds, width, buckets / 2]`.

    Raises:
        ValueError: the number of buckets is odd.
    """
    if buckets % 2:
        raise ValueError(
            f"buckets come in pairs, so their number is even, not {buckets}"
        )
    return jax.random.normal(key, (rounds, width, buckets // 2))


def check_shared(
    query_key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, arguments.Sizes]:
    """Return `[B, T, N, H]`, `[B, T, K, V]` and the sizes.

    Raises:
        TypeError, ValueError: shapes or types that do not fit.
    """
    query_key, value = jnp.asarray(query_key), jnp.asarray(value)
    if query_key.shape[:-2] != value.shape[:-2]:
        raise ValueError(
            "query_key and value must agree in batch and length, because its queries "
            f"are the keys, not {query_key.shape} and {value.shape}: attend another "
            "sequence with dot_product"
        )
    # Any K of the heads stand for the keys, to check the value's.
    heads = value.shape[-2] if value.ndim > 2 else 0
    query_key, _, value, sizes = arguments.check_heads(
        query_key, query_key[..., :heads, :], value
    )
    return query_key, value, sizes


def check_rotations(rotations: ArrayLike, width: int) -> Array:
    """Return the rotations, cut off from gradients.

    Raises:
        ValueError: their shape does not fit.
    """
    rotations = jnp.asarray(rotations)
    if (
        rotations.ndim != 3
        or rotations.shape[1] != width
        or not math.prod(rotations.shape)
    ):
        raise ValueError(
            f"rotations must be [rounds, H, buckets / 2] with H = {width}, not "
            f"{rotations.shape}"
        )
    return jax.lax.stop_gradient(rotations)
