"""Oracles of the kinds of attention: one row at a time, its padding cut off.

Who may attend whom is told by loops over places in NumPy; what comes of it is dense and
differentiable. Options and pieces are small, so that every tail and border is met.
"""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention import ATTENTION, PieceSizes

B, T, N, K, H, V = 2, 7, 4, 2, 6, 5
LENGTHS = (T, 4)


class Setting(NamedTuple):
    """A kind with options of its kernel and of its pieces."""

    kind: str
    options: dict[str, Any]
    of_pieces: Mapping[str, Any] = MappingProxyType({})


SETTINGS = {
    "linear": Setting("linear", {"chunk_size": 3}),
    "linear, relu": Setting("linear", {"chunk_size": 3, "feature_map": "relu"}),
    "favor": Setting("favor", {"chunk_size": 3}, {"features": 8}),
    "favor, relu": Setting(
        "favor", {"chunk_size": 9, "feature_map": "relu"}, {"features": 4}
    ),
    "linformer": Setting("linformer", {}, {"rank": 3, "share": "head"}),
    "linformer, a head each": Setting("linformer", {}, {"rank": 3, "share": "none"}),
    "compressed": Setting("compressed", {"stride": 3}, {"width": 3}),
    "compressed, overlapping": Setting("compressed", {"stride": 2}, {"width": 3}),
    "lsh": Setting("lsh", {"chunk_size": 2}, {"rounds": 3, "buckets": 4}),
    "routing": Setting("routing", {}, {"clusters": 3}),
    "routing, small windows": Setting("routing", {"window": 2}, {"clusters": 2}),
    "sinkhorn": Setting("sinkhorn", {"block_size": 3, "iterations": 2}),
    "synthesizer": Setting("synthesizer", {}),
}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    draws = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jnp.asarray(draws, jnp.float32)


def arrays_of(setting: Setting, keys: int = T) -> dict[str, jax.Array]:
    """The first arguments of a kernel, by name."""
    shapes = {
        "query": (B, T, N, H),
        "query_key": (B, T, N, H),
        "key": (B, keys, K, H),
        "value": (B, keys, K, V),
    }
    row = ATTENTION[setting.kind]
    return {name: normal(*shapes[name], seed=n) for n, name in enumerate(row.arrays)}


def pieces_of(setting: Setting, keys: int = T) -> dict[str, jax.Array]:
    """Its pieces; kernels of values are as wide as these."""
    row = ATTENTION[setting.kind]
    options = {name: option.default for name, option in row.options.items()}
    options |= {**setting.options, **setting.of_pieces}
    pieces = {}
    for number, piece in enumerate(row.pieces):
        shape = piece.shape(PieceSizes(N, K, H, keys, options))
        if piece.name == "value_kernel":
            shape = (*shape[:2], V, V)
        if piece.origin == "computed":
            last = (T, keys) if setting.kind == "synthesizer" else shape[1:]
            pieces[piece.name] = normal(B, N, *last, seed=20 + number)
        else:
            key = jax.random.key(number)
            pieces[piece.name] = piece.draw(key, shape, jnp.float32)
    return pieces


def in_padding(arrays: dict[str, jax.Array], lengths: tuple[int, ...]) -> Any:
    """The arrays with NaN behind the lengths, queries excepted."""
    dirty = {}
    for name, array in arrays.items():
        inside = np.arange(array.shape[1]) < np.array(lengths)[:, None]
        keep = inside[..., None, None] | (name == "query")
        dirty[name] = jnp.where(keep, array, jnp.nan)
    return dirty


def oracle(
    setting: Setting,
    arrays: dict,
    pieces: dict,
    known: dict,
    lengths: Any,
    causal: bool,
) -> list[jax.Array]:
    """The outputs of each row's valid queries, `[t, N, V]`.

    `known` are the arrays' values, by which places are sorted.
    """
    rows = []
    for b, length in enumerate(lengths):
        whole = arrays["value"].shape[1]
        cut = {name: array[b] for name, array in arrays.items()}
        cut |= {f"known {name}": np.asarray(x)[b] for name, x in known.items()}
        same = cut.get("query", cut["value"]).shape[0] == whole
        for name in cut:
            if not name.endswith("query") or same:
                cut[name] = cut[name][:length]
        of_row = {
            name: piece[b]
            if piece.ndim == 4 and name in ("sort_logits", "logits")
            else piece
            for name, piece in pieces.items()
        }
        rows.append(ORACLES[setting.kind](cut, of_row, setting, causal))
    return rows


def softmax_mean(scores: jax.Array, allowed: np.ndarray, value: jax.Array) -> jax.Array:
    """`[t, s]` scores to means of `[s, V]`; rows without an allowed place are 0."""
    alive = allowed.any(1, keepdims=True)
    scores = jnp.where(allowed, scores, -jnp.inf)
    weights = jax.nn.softmax(jnp.where(alive, scores, 0.0), axis=1)
    return jnp.where(allowed, weights, 0.0) @ value


def past(queries: int, keys: int, causal: bool) -> np.ndarray:
    return np.tri(queries, keys, dtype=bool) | (not causal)


def by_head(attend: Callable[[int, int], jax.Array]) -> jax.Array:
    """Stack what each query head gets, given its number and its key/value head's."""
    return jnp.stack([attend(n, n // (N // K)) for n in range(N)], 1)


def scored(query: jax.Array, key: jax.Array) -> jax.Array:
    return query @ key.T / H**0.5


def by_features(features: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Attention by an explicit matrix of products of features."""

    def attend(arrays, pieces, setting, causal):
        query, key, value = (arrays[name] for name in ("query", "key", "value"))

        def of_head(n, k):
            weights = features(query[:, n], setting, pieces) @ (
                features(key[:, k], setting, pieces).T
            )
            weights = jnp.where(past(*weights.shape, causal), weights, 0.0)
            total = weights.sum(1, keepdims=True)
            return weights @ value[:, k] / jnp.where(total > 0, total, 1.0)

        return by_head(of_head)

    return attend


def linear_features(x, setting, _):
    if setting.options.get("feature_map") == "relu":
        return jnp.maximum(x, 0.0)
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0.0)))


def favor_features(x, setting, pieces):
    x, projection = x / H**0.25, pieces["projection"]
    if setting.options.get("feature_map") == "relu":
        return jnp.maximum(x @ projection.T, 0.0) + 1e-3
    return jnp.exp(x @ projection.T - (x**2).sum(1, keepdims=True) / 2)


def linformer(arrays, pieces, setting, causal):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))

    def of_head(n, k):
        rows = []
        for x, name in ((key, "key_projection"), (value, "value_projection")):
            weights = pieces[name] if pieces[name].ndim == 2 else pieces[name][k]
            rows.append(weights[: len(x)].T @ x[:, k])
        scores = scored(query[:, n], rows[0])
        return softmax_mean(scores, np.ones(scores.shape, bool), rows[1])

    return by_head(of_head)


def compressed(arrays, pieces, setting, causal):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    stride, width = setting.options["stride"], len(pieces["key_kernel"])
    windows = range(-(-len(key) // stride))

    def of_window(x, kernel, m):
        pairs = [(w, m * stride + w) for w in range(width) if m * stride + w < len(x)]
        inside, places = (np.array(each) for each in zip(*pairs, strict=True))
        return jnp.einsum("wkh,wkhd->kd", x[places], kernel[inside])

    keys, values = (
        jnp.stack([of_window(x, pieces[name], m) for m in windows])
        for x, name in ((key, "key_kernel"), (value, "value_kernel"))
    )

    def of_head(n, k):
        ends = np.array([m * stride + width - 1 for m in windows])
        allowed = (ends <= np.arange(len(query))[:, None]) | (not causal)
        return softmax_mean(scored(query[:, n], keys[:, k]), allowed, values[:, k])

    return by_head(of_head)


def lsh(arrays, pieces, setting, causal):
    query, value = arrays["query_key"], arrays["value"]

    def of_head(n, k):
        known = arrays["known query_key"][:, n]
        allowed = _lsh_edges(known, pieces["rotations"], setting, causal)
        keys = query[:, n] / jnp.linalg.norm(query[:, n], axis=1, keepdims=True)
        return softmax_mean(scored(query[:, n], keys), allowed, value[:, k])

    return by_head(of_head)


def _lsh_edges(query, rotations, setting, causal):
    """Who shares a bucket, and a chunk or the one before, in any round."""
    count, size = len(query), setting.options["chunk_size"]
    allowed = np.zeros((count, count), bool)
    for rotation in rotations:
        turned = query @ rotation
        bucket = np.concatenate([turned, -turned], 1).argmax(1)
        order = sorted(range(count), key=lambda place: (bucket[place], place))
        for i, j in itertools.product(range(count), repeat=2):
            ranks = [order.index(place) for place in (i, j)]
            if causal:
                ranks = [sum(bucket[:p] == bucket[p]) for p in (i, j)]
            chunks = [rank // size for rank in ranks]
            near = chunks[0] - chunks[1] in (0, 1) and bucket[i] == bucket[j]
            allowed[i, j] |= near and (j <= i or not causal)
    others = allowed & ~np.eye(count, dtype=bool)
    return np.where(others.any(1, keepdims=True), others, allowed)


def routing(arrays, pieces, setting, causal):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))

    def of_head(n, k):
        sides = arrays["known query"][:, n], arrays["known key"][:, k]
        near = [
            x / np.linalg.norm(x, axis=1, keepdims=True) @ pieces["centroids"][n].T
            for x in sides
        ]
        scores = scored(query[:, n], key[:, k])
        window = setting.options.get("window")
        if causal:
            return softmax_mean(scores, _cells(*near, window or 128), value[:, k])
        taken = _clusters(*near, window)
        total = sum(softmax_mean(scores, each, value[:, k]) for each in taken)
        times = sum(each.any(1, keepdims=True).astype(np.float32) for each in taken)
        return total / np.maximum(times, 1)

    return by_head(of_head)


def _clusters(near_queries, near_keys, window):
    """Of each cluster the edges between the queries and keys that it takes."""
    taken = []
    for cluster in range(near_queries.shape[1]):
        sides = []
        for near in (near_queries, near_keys):
            room = window or -(-len(near) // near.shape[1])
            nearest = np.argsort(-near[:, cluster], kind="stable")[:room]
            sides.append(np.isin(np.arange(len(near)), nearest))
        taken.append(sides[0][:, None] & sides[1])
    return taken


def _cells(near_queries, near_keys, window):
    """Who is in the same cluster, and in the same cell or the one before."""
    count: dict[int, int] = {}
    cells: list[tuple[list, list]] = [([], []), ([], [])]
    for key, query in zip(near_keys.argmax(1), near_queries.argmax(1), strict=True):
        for (clusters, ranks), cluster in zip(cells, (key, query), strict=True):
            clusters.append(cluster)
            ranks.append(count.get(cluster, 0) // window)
            count[cluster] = count.get(cluster, 0) + 1
    (key_clusters, key_cells), (clusters, of_queries) = cells
    difference = np.subtract.outer(of_queries, key_cells)
    near = (difference == 0) | (difference == 1)
    return near & np.equal.outer(clusters, key_clusters) & np.tri(len(near), dtype=bool)


def sinkhorn(arrays, pieces, setting, causal):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    length, size = len(query), setting.options["block_size"]
    blocks = [range(s, min(s + size, length)) for s in range(0, length, size)]

    by_sorting = _sorting(pieces["sort_logits"], len(blocks), causal)

    def of_head(n, k):
        sorting = by_sorting[n]
        outputs = []
        for u, block in enumerate(blocks):
            keys, values, scale = [], [], []
            for j in range(size):
                places = [own[j] for own in blocks if j < len(own)]
                weights = sorting[u, : len(places)]
                keys.append(weights @ key[np.array(places, int), k])
                values.append(weights @ value[np.array(places, int), k])
                scale.append(weights.sum())
            scale = jnp.stack(scale)
            own = [list(x[np.array(block), k]) for x in (key, value)]
            powers = jnp.exp(
                scored(query[np.array(block), n], jnp.stack(keys + own[0]))
            )
            weights = powers * jnp.concatenate([scale, jnp.ones(len(block))])
            seen = past(len(block), len(block), causal)
            weights *= np.concatenate([np.ones((len(block), size)), seen], 1)
            total = weights.sum(1, keepdims=True)
            outputs.append(weights @ jnp.stack(values + own[1]) / total)
        return jnp.concatenate(outputs)

    return by_head(of_head)


def _sorting(logits, blocks, causal):
    """Twice rows and columns; with causality a softmax over earlier blocks."""
    powers = jnp.exp(logits[:, :blocks, :blocks] / 0.75)
    if causal:
        powers = powers * np.tri(blocks, k=-1)
        total = powers.sum(2, keepdims=True)
        return powers / jnp.where(total > 0, total, 1.0)
    for _ in range(2):
        powers = powers / powers.sum(2, keepdims=True)
        powers = powers / powers.sum(1, keepdims=True)
    return powers


def synthesizer(arrays, pieces, setting, causal):
    value = arrays["value"]
    queries = min(len(value), T)

    def of_head(n, k):
        logits = pieces["logits"][n, :queries, : len(value)]
        return softmax_mean(logits, past(*logits.shape, causal), value[:, k])

    return by_head(of_head)


ORACLES = {
    "linear": by_features(linear_features),
    "favor": by_features(favor_features),
    "linformer": linformer,
    "compressed": compressed,
    "lsh": lsh,
    "routing": routing,
    "sinkhorn": sinkhorn,
    "synthesizer": synthesizer,
}


def run(name, arrays, pieces, **call):
    """The output alone of a setting's kernel."""
    setting = SETTINGS[name]
    row = ATTENTION[setting.kind]
    # In a compiled function a dictionary's names come sorted.
    ordered = [arrays[word] for word in row.arrays]
    output = row.kernel(*ordered, **pieces, **setting.options, **call)
    return output[0] if isinstance(output, tuple) else output
