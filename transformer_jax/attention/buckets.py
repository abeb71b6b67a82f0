"""Attention within buckets: places are sorted by bucket and cut into chunks.

A place has a code for each way to sort: its bucket, and within it a cell of so many
places. It may attend what has its own code or the one before, which belongs to the same
bucket. Chunks of sorted places hold all of that, in their own and in a few before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from transformer_jax import masks
from transformer_jax.attention import dense
from transformer_jax.attention.chunks import chunked, with_before
from transformer_jax.attention.products import wide_dtype

# A place attends itself only if there is nothing else (Kitaev et al. 2020, section 2):
# far more than scores differ by, where 1e5, the authors' number, may be too little.
SELF_PENALTY = 1e30


class Order(NamedTuple):
    """How places are sorted.

    Attributes:
        order: int32 `[..., P]`, the place that comes n-th.
        inverse: int32 `[..., P]`, where each place comes.
        rank: int32 `[..., P]`, how many of its bucket come before each place.
    """

    order: Array
    inverse: Array
    rank: Array


def sort_places(bucket: Int[Array, "... P"]) -> Order:
    """Sort places by bucket, those of one bucket by position."""
    order = jnp.argsort(bucket, axis=-1, stable=True).astype(jnp.int32)
    inverse = jnp.argsort(order, axis=-1).astype(jnp.int32)
    arranged = jnp.take_along_axis(bucket, order, -1)
    index = jax.lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    before = jnp.roll(arranged, 1, -1)
    starts = jnp.where((index == 0) | (arranged != before), index, 0)
    begin = jax.lax.cummax(starts, axis=starts.ndim - 1)
    return Order(order, inverse, jnp.take_along_axis(index - begin, inverse, -1))


def code_of(bucket: Array, rank: Array, size: int, places: int) -> Int[Array, "..."]:
    """Return bucket and cell as one number; cells of two buckets are no neighbours.

    Args:
        bucket: from 0 on.
        rank: below `places`; every `size` of them are a cell.
        size: places of a cell.
        places: how many there are; buckets times cells stay below 2^31.
    """
    return bucket * (-(-places // size) + 2) + rank // size


def linked(query_code: Array, key_code: Array) -> Bool[Array, "..."]:
    """Tell where a key is in the query's cell or in the one before."""
    difference = query_code - key_code
    return (difference == 0) | (difference == 1)


@jax.custom_vjp
def permuted(
    x: Float[Array, "... P F"], order: Array, inverse: Array
) -> Float[Array, "... P F"]:
    """Return the places of `x` in another order; backward by the inverse, no scatter.

    Backward only: there is no forward-mode derivative.
    """
    return jnp.take_along_axis(x, order[..., None], -2)


def _permuted_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return permuted(x, order, inverse), inverse


def _permuted_backward(inverse: Array, cotangent: Array) -> tuple[Array, None, None]:
    return jnp.take_along_axis(cotangent, inverse[..., None], -2), None, None


permuted.defvjp(_permuted_forward, _permuted_backward)


class Places(NamedTuple):
    """Sorted places, `[B, N, R, P, ...]` for R ways to sort them.

    Attributes:
        query: `[..., P, H]`.
        key: `[..., P, H]`.
        value: `[..., P, V]`.
        codes: int32 `[B, N, R, R, P]`, each way's code of the places as this way sorts
            them.
        time: int32 `[..., P]`, when a place comes; a causal query reads earlier ones.
        readable: bool `[..., P]`, what is a key and no padding.
    """

    query: Array
    key: Array
    value: Array
    codes: Array
    time: Array
    readable: Array


def attend_sorted(
    places: Places, *, size: int, back: int, scale: ArrayLike, causal: bool, own: bool
) -> tuple[Float[Array, "B N R P V"], Float[Array, "B N R P"]]:
    """Attend within chunks and `back` chunks before; return output and log-sum-exp.

    An edge that several ways of sorting allow counts once: its score is lowered by the
    logarithm of their number in each (Kitaev et al. 2020, appendix A).

    Args:
        places: sorted.
        size: places of a chunk.
        back: chunks before that are read.
        scale: factor of the scores.
        causal: read no later place.
        own: read oneself like others; else only where there is nothing else.
    """
    B, N, R, P, _ = places.query.shape
    query = chunked(places.query, size, 3)
    key = with_before(chunked(places.key, size, 3), 3, back)
    value = with_before(chunked(places.value, size, 3), 3, back)
    times = chunked(places.time, size, 3, -1)
    earlier = with_before(times, 3, back, -1)
    readable = with_before(chunked(places.readable, size, 3, False), 3, back, False)
    codes = chunked(places.codes, size, 4, -3)
    key_codes = with_before(codes, 4, back, -6)
    # [B, N, R, R, C, c, w]: which ways allow an edge; a way's own is on the diagonal.
    allowed = linked(codes[..., :, None], key_codes[..., None, :])
    count = allowed.sum(3)
    allowed = jnp.diagonal(allowed, axis1=2, axis2=3)
    allowed = jnp.moveaxis(allowed, -1, 2) & readable[..., None, :]
    rows, columns = times[..., :, None], earlier[..., None, :]
    if causal:
        allowed &= columns <= rows
    wide = wide_dtype(query)
    bias = -jnp.log(jnp.maximum(count, 1).astype(wide))
    if not own:
        bias = bias - jnp.where(rows == columns, SELF_PENALTY, 0.0).astype(wide)
    chunks = query.shape[3]
    flat = B * N * R * chunks
    output, residual = dense.weighted_mean(
        query.reshape(flat, size, 1, 1, query.shape[-1]),
        key.reshape(flat, 1, *key.shape[-2:]),
        value.reshape(flat, 1, *value.shape[-2:]),
        bias.reshape(flat, 1, *bias.shape[-2:]),
        allowed.reshape(flat, 1, 1, *allowed.shape[-2:]),
        scale,
    )
    output = output.reshape(B, N, R, chunks * size, -1)[..., :P, :]
    return output, residual.reshape(B, N, R, chunks * size)[..., :P]


def merged(
    output: Float[Array, "B N R P V"], residual: Float[Array, "B N R P"]
) -> Float[Array, "B N P V"]:
    """Return attention over what any of R ways allows, given that of each."""
    top = residual.max(2, keepdims=True)
    alive = top > -jnp.inf
    weights = jnp.exp(masks.or_zero(alive, residual - masks.or_zero(alive, top)))
    weights = masks.or_zero(alive, weights)
    total = jnp.maximum(weights.sum(2, keepdims=True), jnp.finfo(weights.dtype).tiny)
    return ((weights / total)[..., None] * output).sum(2)


def unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Return vectors of length 1; that of length 0 stays."""
    # Scaled first: squares of small numbers are 0, those of large ones infinite.
    largest = jax.lax.stop_gradient(jnp.abs(x).max(-1, keepdims=True, initial=0))
    alive = largest > 0
    x = masks.or_zero(alive, x / jnp.where(alive, largest, 1))
    squares = jnp.square(x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(alive, squares, 1))
