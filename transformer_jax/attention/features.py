"""Attention whose weights are products of features: sums over keys come first.

    output[t] = sum_j w[t, j] v[j] / sum_j w[t, j],  w[t, j] = f(q[t]) . g(k[j]) e^s[j]

As (f(q) g(k)^T) v this costs T S (M + V) products a head, as f(q) (g(k)^T v) it costs
(T + S) M V: linear in the length. A key's scale s is kept apart, so that features of
any size can be summed in float32 without overflow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax import masks
from transformer_jax.attention.chunks import chunked
from transformer_jax.attention.products import wide_dtype


class Features(NamedTuple):
    """Keys or queries as features.

    Attributes:
        values: `[B, T, heads, M]`, not negative.
        scale: logarithm of the factor that they lack, `[B, T, heads]`; None where it is
            0, or, of queries, where it cancels.
    """

    values: Array
    scale: Array | None = None


class Sums(NamedTuple):
    """What is kept of the keys so far; every leaf begins with B.

    Attributes:
        state: `[B, K, M, V]`, sum of g(k[j]) v[j] e^(s[j] - top).
        total: `[B, K, M]`, sum of g(k[j]) e^(s[j] - top).
        top: `[B, K]`, the largest scale; None where there are no scales.
    """

    state: Array
    total: Array
    top: Array | None = None


def no_sums(
    batch: int, kv_heads: int, features: int, width: int, dtype: Any, scaled: bool
) -> Sums:
    """Return the sums over no key."""
    shape = batch, kv_heads, features
    top = jnp.full((batch, kv_heads), -jnp.inf, dtype) if scaled else None
    return Sums(jnp.zeros((*shape, width), dtype), jnp.zeros(shape, dtype), top)


def sums_of(key: Features, value: Float[Array, "B S K V"]) -> Sums:
    """Return the sums over all keys; `value` is 0 where `key` is."""
    features, top = key.values, None
    if key.scale is not None:
        top = jax.lax.stop_gradient(key.scale.max(1, initial=-jnp.inf))
        features = features * _powers(key.scale, top[:, None])[..., None]
    state = jnp.einsum("bskm,bskv->bkmv", features, value)
    return Sums(state, features.sum(1), top)


def added(sums: Sums, more: Sums) -> Sums:
    """Return the sums over the keys of both."""
    if sums.top is None:
        return Sums(sums.state + more.state, sums.total + more.total)
    top = jnp.maximum(sums.top, more.top)
    one, other = (_powers(x.top, top) for x in (sums, more))
    return Sums(
        one[..., None, None] * sums.state + other[..., None, None] * more.state,
        one[..., None] * sums.total + other[..., None] * more.total,
        top,
    )


def read_sums(
    query: Float[Array, "B T N M"], sums: Sums
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Return a query's numerator and denominator, less the factor e^top."""
    B, T, N, M = query.shape
    K, V = sums.state.shape[1], sums.state.shape[3]
    grouped = query.reshape(B, T, K, N // K, M)
    over = jnp.einsum("btkgm,bkmv->btkgv", grouped, sums.state)
    under = jnp.einsum("btkgm,bkm->btkg", grouped, sums.total)
    return over.reshape(B, T, N, V), under.reshape(B, T, N)


def mean_of(
    over: Float[Array, "B T N V"], under: Float[Array, "B T N"]
) -> Float[Array, "B T N V"]:
    """Return numerator / denominator, 0 where nothing has weight.

    Both are scaled first: the derivative's square of a small denominator would be 0.
    """
    alive = under > 0
    safe = jnp.where(alive, under, jnp.ones((), under.dtype))
    tiny = jnp.finfo(under.dtype).tiny
    scale = jax.lax.stop_gradient(1 / jnp.maximum(safe, tiny))
    over = masks.or_zero(alive[..., None], over) * scale[..., None]
    return over / (safe * scale)[..., None]


def attend_all(
    query: Features, key: Features, value: Float[Array, "B S K V"]
) -> Float[Array, "B T N V"]:
    """Attend to every key: 2 (S K + T N) M V FLOPs."""
    return mean_of(*read_sums(query.values, sums_of(key, value)))


def attend_past(
    query: Features, key: Features, value: Float[Array, "B T K V"], chunk_size: int
) -> Float[Array, "B T N V"]:
    """Attend to the keys up to one's own place, chunk after chunk.

    Within a chunk of c places weights are computed one by one, before it they are in
    the sums: 2 T N (c (M + V) + 2 M V) FLOPs. The backward pass computes a chunk anew
    from the sums before it. A query's factor e^-top is the largest scale up to its own
    place: that of the whole chunk would let a later key push earlier ones below the
    smallest number.
    """
    length = query.values.shape[1]
    chunk = max(1, min(chunk_size, length))

    def cut(x: Array, fill: float = 0.0) -> Array:
        """`[B, S, ...]` as `[chunks, B, chunk, ...]`: keys of all queries' places."""
        return jnp.moveaxis(chunked(x, chunk, 1, fill, length=length), 1, 0)

    # A missing key has the scale -inf.
    scales = None if key.scale is None else cut(key.scale, fill=-jnp.inf)
    keys = Features(cut(key.values), scales)
    parts = Features(cut(query.values)), keys, cut(value)
    # Sums of no key, not plain zeros: under `shard_map` a loop must begin with what
    # varies over devices as its end does.
    start = sums_of(jax.tree.map(lambda x: x[:, :0], key), value[:, :0])
    _, output = jax.lax.scan(jax.checkpoint(_attend_chunk), start, parts)
    output = jnp.moveaxis(output, 0, 1)
    places = output.shape[1] * output.shape[2]
    return output.reshape(len(output), places, *output.shape[3:])[:, :length]


def _attend_chunk(
    sums: Sums, part: tuple[Features, Features, Array]
) -> tuple[Sums, Array]:
    """The sums with a chunk's keys, and its output."""
    query, key, value = part
    B, c, N, M = query.values.shape
    K = key.values.shape[2]
    past = jnp.tril(jnp.ones((c, c), bool))
    grouped = query.values.reshape(B, c, K, N // K, M)
    weights = jnp.einsum("btkgm,bskm->bkgts", grouped, key.values)
    weights = masks.or_zero(past, weights)
    before_over, before_under = read_sums(query.values, sums)
    if key.scale is not None:
        # [B, c, K]: the largest scale up to each place.
        tops = jax.lax.cummax(jax.lax.stop_gradient(key.scale), axis=1)
        tops = jnp.maximum(tops, sums.top[:, None])
        before = _powers(sums.top[:, None], tops)
        before = jnp.repeat(before, N // K, axis=2)
        before_over, before_under = (
            before_over * before[..., None],
            before_under * before,
        )
        scales = jnp.moveaxis(key.scale, 1, 2)[:, :, None]
        scales = jnp.where(past, scales, -jnp.inf)
        weights = (
            weights * _powers(scales, jnp.moveaxis(tops, 1, 2)[..., None])[:, :, None]
        )
    over = jnp.einsum("bkgts,bskv->btkgv", weights, value).reshape(
        B, c, N, value.shape[3]
    )
    under = jnp.moveaxis(weights.sum(-1), 3, 1).reshape(B, c, N)
    output = mean_of(over + before_over, under + before_under)
    return added(sums, sums_of(key, value)), output


def _powers(scale: Array, top: Array) -> Array:
    """e^(scale - top), 0 where the scale is -inf."""
    alive = scale > -jnp.inf
    return masks.or_zero(alive, jnp.exp(masks.or_zero(alive, scale - top)))


def keys_inside(
    key: Array, value: Array, lengths: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return keys and values as wide floats, zero behind `lengths`, and the mask."""
    wide = wide_dtype(key)
    key, value = key.astype(wide), value.astype(wide)
    if lengths is None:
        return key, value, None
    inside = masks.length_mask(lengths, key.shape[1])[..., None, None]
    return masks.or_zero(inside, key), masks.or_zero(inside, value), inside
