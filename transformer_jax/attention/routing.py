"""Routing attention: queries and keys meet in clusters that follow the data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from transformer_jax import masks
from transformer_jax.attention import arguments, dense
from transformer_jax.attention.arguments import Sizes
from transformer_jax.attention.buckets import (
    Places,
    attend_sorted,
    code_of,
    permuted,
    sort_places,
    unit,
)
from transformer_jax.attention.products import wide_dtype
from transformer_jax.patterns.ranges import check_integer
from transformer_jax.selection import largest_places

# Places, queries and keys counted, of a causal cluster's cell.
CAUSAL_WINDOW = 128


class Members(NamedTuple):
    """Who fell to which centroid in one call.

    Attributes:
        sums: `[N, C, H]`, of the unit vectors of queries and keys.
        counts: `[N, C]`, how many there were.
    """

    sums: Array
    counts: Array

    def moved(
        self, centroids: Float[Array, "N C H"], decay: float = 0.999
    ) -> Float[Array, "N C H"]:
        """Return centroids that have followed their members.

            mu <- unit(decay mu + (1 - decay) mean of the members)

        Roy et al. 2021, algorithm 1; the length of 1 keeps the nearest centroid the one
        of the largest product (spherical k-means, Dhillon and Modha 2001). A centroid
        without members stays.
        """
        alive = (self.counts > 0)[..., None]
        mean = self.sums / jnp.maximum(self.counts, 1)[..., None]
        kept = centroids.astype(mean.dtype)
        moved = unit(kept * decay + mean * (1 - decay))
        return jnp.where(alive, moved, kept).astype(centroids.dtype)


def routing_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    centroids: ArrayLike,
    *,
    window: int | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Members]:
    """Attend to the keys of one's own cluster.

    Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing
    Transformers", section 4 (https://arxiv.org/abs/2003.05997). Each cluster takes the
    `window` queries and keys whose directions lie nearest to its centroid, and softmax
    attention is computed within it. A query that several clusters took returns the mean
    of theirs, one that none took 0.

    Which keys are nearest depends on the whole sequence. With causality a query and a
    key belong to their nearest centroid instead, and a cluster is cut into cells of
    `window` places, queries and keys counted in the order of their positions: a query
    reads the earlier keys of its own cell and of the one before.

    Args:
        query: floating `[B, T, N, H]`, or `[T, N, H]`: then B is left out everywhere.
        key: `[B, S, K, H]`; N is a multiple of K; with causality S = T.
        value: `[B, S, K, V]`.
        centroids: `[N, C, H]`. No gradient reaches them: they follow their members by
            `Members.moved`.
        window: places of a cluster. By default a row's length / C, rounded up; with
            causality 128.
        is_causal: allow j <= i only.
        query_seq_lengths: integers `[B]`; later queries return 0 and take no room.
            By default, where S = T, those of the keys.
        key_value_seq_lengths: integers `[B]`; what stands behind is never read.
        scale: factor of the scores of queries and keys as given, 1 / sqrt(H) by
            default.

    Returns:
        `[B, T, N, V]` in the query's dtype, and what the centroids follow.

    Raises:
        ValueError, TypeError: a shape or type that does not fit, by name.

    Cost: 2 B N (C w^2 (H + V) + 4 T C H) FLOPs with windows of w; of order
    T^1.5 (H + V) where C is of order sqrt(T). With causality
    12 B N T w (H + V) + 8 B N T C H.
    """
    query, key, value, sizes = arguments.check_heads(query, key, value)
    lengths = _lengths(query_seq_lengths, key_value_seq_lengths, sizes)
    centroids = check_centroids(centroids, sizes.heads, query.shape[3])
    scale = arguments.check_scale(scale, query.shape[3])
    if window is not None:
        window = check_integer("window", window, 1)
    share = sizes.heads // sizes.kv_heads
    key, value = jnp.repeat(key, share, axis=2), jnp.repeat(value, share, axis=2)
    sides = [_side(x, each) for x, each in ((query, lengths[0]), (key, lengths[1]))]
    values = _side(value, lengths[1]).x
    nearness = [nearness_of(jax.lax.stop_gradient(side.x), centroids) for side in sides]
    members = _members(sides, nearness)
    if not query.size or not value.size:
        output = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    elif is_causal:
        if sizes.query_length != sizes.key_length:
            raise ValueError(
                "causal routing is for one sequence, but there are "
                f"{sizes.query_length} queries and {sizes.key_length} keys"
            )
        output = _attend_past(sides, values, nearness, window or CAUSAL_WINDOW, scale)
    else:
        output = _attend_clusters(sides, values, nearness, window, scale)
    output = output.astype(query.dtype)
    return (output if sizes.batched else output[0]), members


class _Side(NamedTuple):
    """Queries or keys `[B, N, T, H]`, 0 in padding, and which are none `[B, T]`."""

    x: Array
    inside: Bool[Array, "B T"]


def _side(x: Array, lengths: Array | None) -> _Side:
    size = x.shape[:2]
    inside = jnp.ones(size, bool)
    if lengths is not None:
        inside = masks.length_mask(lengths, size[1])
    return _Side(masks.or_zero(inside[..., None, None], x).swapaxes(1, 2), inside)


def _attend_clusters(
    sides: list[_Side],
    values: Float[Array, "B N S V"],
    nearness: list[Array],
    window: int | None,
    scale: ArrayLike,
) -> Float[Array, "B T N V"]:
    """Let each cluster take its nearest queries and keys, and average what it gives."""
    (query, queries_inside), (key, keys_inside) = sides
    places, alive = _nearest(nearness[0], queries_inside, window)
    key_places, keys_alive = _nearest(nearness[1], keys_inside, window)
    B, N, C, w = places.shape
    flat = B * N * C
    chosen = [
        jnp.take_along_axis(x[:, :, None], index[..., None], 3)
        for x, index in ((query, places), (key, key_places), (values, key_places))
    ]
    allowed = alive[..., :, None] & keys_alive[..., None, :]
    output, _ = dense.weighted_mean(
        chosen[0].reshape(flat, w, 1, 1, -1),
        *(x.reshape(flat, 1, -1, x.shape[-1]) for x in chosen[1:]),
        None,
        allowed.reshape(flat, 1, 1, *allowed.shape[-2:]),
        scale,
    )
    output = output.reshape(B, N, C * w, -1)
    index = jnp.where(alive, places, query.shape[2]).reshape(B, N, C * w)

    def gathered(index: Array, output: Array) -> tuple[Array, Array]:
        places = query.shape[2]
        sums = jnp.zeros((places, output.shape[1]), output.dtype)
        counts = jnp.zeros(places, output.dtype)
        return (
            sums.at[index].add(output, mode="drop"),
            counts.at[index].add(jnp.ones((), output.dtype), mode="drop"),
        )

    sums, counts = jax.vmap(jax.vmap(gathered))(index, output)
    return (sums / jnp.maximum(counts, 1)[..., None]).swapaxes(1, 2)


def _nearest(
    nearness: Float[Array, "B N C T"], inside: Bool[Array, "B T"], window: int | None
) -> tuple[Int[Array, "B N C w"], Bool[Array, "B N C w"]]:
    """The places that each cluster takes, and which of them it really has."""
    clusters, places = nearness.shape[2:]
    size = -(-places // clusters) if window is None else min(window, places)
    nearness = jnp.where(inside[:, None, None], nearness, -jnp.inf)
    index = largest_places(nearness, size)
    count = inside.sum(1, dtype=jnp.int32)
    room = count if window is not None else -(-count // clusters)
    rank = jnp.arange(size, dtype=jnp.int32)[None]
    alive = rank < jnp.minimum(room, count)[:, None]
    return index, jnp.broadcast_to(alive[:, None, None], index.shape)


def _attend_past(
    sides: list[_Side],
    values: Float[Array, "B N T V"],
    nearness: list[Array],
    window: int,
    scale: ArrayLike,
) -> Float[Array, "B T N V"]:
    """Let each query read earlier keys of its cluster, cell by cell.

    Keys and queries of all positions stand side by side, a key before the query of its
    position.
    """
    (query, queries_inside), (key, keys_inside) = sides
    T = query.shape[2]
    clusters = nearness[0].shape[2]
    cluster = [
        jnp.where(inside[:, None], jnp.argmax(each, 2).astype(jnp.int32), clusters)
        for each, inside in zip(nearness, (queries_inside, keys_inside), strict=True)
    ]
    cluster = _side_by_side(cluster[1], cluster[0], axis=2)
    order = sort_places(cluster)
    size = min(window, 2 * T)
    code = code_of(cluster, order.rank, size, 2 * T)

    def arranged(keys: Array, queries: Array) -> Array:
        x = _side_by_side(keys, queries, axis=2)
        return permuted(x, order.order, order.inverse)[:, :, None]

    is_key = order.order % 2 == 0
    within = jnp.take_along_axis(cluster, order.order, -1) < clusters
    places = Places(
        query=arranged(jnp.zeros_like(query), query),
        key=arranged(key, jnp.zeros_like(key)),
        value=arranged(values, jnp.zeros_like(values)),
        codes=jnp.take_along_axis(code, order.order, -1)[:, :, None, None],
        time=order.order[:, :, None],
        readable=(is_key & within)[:, :, None],
    )
    output, _ = attend_sorted(
        places, size=size, back=2, scale=scale, causal=True, own=True
    )
    output = permuted(output[:, :, 0], order.inverse, order.order)
    return output[:, :, 1::2].swapaxes(1, 2)


def _side_by_side(first: Array, second: Array, *, axis: int) -> Array:
    """Two arrays `[..., T, ...]` in turn, `[..., 2 T, ...]`."""
    both = jnp.stack([first, second], axis + 1)
    return both.reshape(*first.shape[:axis], -1, *first.shape[axis + 1 :])


def _members(sides: list[_Side], nearness: list[Array]) -> Members:
    """Sums and counts of the unit vectors, by nearest centroid."""
    sums, counts = [], []
    for side, near in zip(sides, nearness, strict=True):
        belongs = jax.nn.one_hot(jnp.argmax(near, 2), near.shape[2], dtype=near.dtype)
        belongs = masks.or_zero(side.inside[:, None, :, None], belongs)
        x = jax.lax.stop_gradient(side.x)
        vectors = unit(x.astype(wide_dtype(x)))
        sums.append(jnp.einsum("bntc,bnth->nch", belongs, vectors))
        counts.append(belongs.sum((0, 2)))
    return Members(sums[0] + sums[1], counts[0] + counts[1])


def nearness_of(
    x: Float[Array, "B N T H"], centroids: Float[Array, "N C H"]
) -> Float[Array, "B N C T"]:
    """Return how near the directions of places are to centroids."""
    # Rounded otherwise in decoding, a place would be in another cluster there.
    return jnp.einsum(
        "bnth,nch->bnct",
        unit(x.astype(wide_dtype(x))),
        centroids,
        precision=jax.lax.Precision.HIGHEST,
    )


def check_centroids(centroids: ArrayLike, heads: int, width: int) -> Array:
    """Return the centroids as wide floats, cut off from gradients.

    Raises:
        ValueError: their shape does not fit.
    """
    centroids = jnp.asarray(centroids)
    shape = centroids.shape
    if len(shape) != 3 or (shape[0], shape[2]) != (heads, width) or not shape[1]:
        raise ValueError(
            f"centroids must be [N, clusters, H] with N, H = {heads}, {width}, not "
            f"{shape}"
        )
    return jax.lax.stop_gradient(centroids.astype(wide_dtype(centroids)))


def draw_centroids(
    key: Array, heads: int, clusters: int, width: int
) -> Float[Array, "N C H"]:
    """Draw centroids of length 1, `[heads, clusters, width]`."""
    return unit(jax.random.normal(key, (heads, clusters, width)))


def _lengths(
    queries: ArrayLike | None, keys: ArrayLike | None, sizes: Sizes
) -> tuple[Array | None, Array | None]:
    """The lengths of queries and keys."""
    keys = arguments.check_lengths(keys, sizes)
    if queries is not None:
        shape = (sizes.batch,)
        return arguments.check_rows("query_seq_lengths", queries, shape, sizes), keys
    return (keys if sizes.query_length == sizes.key_length else None), keys
