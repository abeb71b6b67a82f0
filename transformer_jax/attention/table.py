"""The ATTENTION table: every kind of attention, and what it can do."""

import math
from typing import Any

import jax
from jaxtyping import Array

from transformer_jax.attention import (
    bucket_cache,
    cache,
    favor,
    linear,
    linear_cache,
    low_rank,
    low_rank_cache,
    lsh,
    routing,
    sinkhorn,
    synthetic,
)
from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.attention.kinds import (
    AttentionKind,
    Option,
    Piece,
    PieceSizes,
)
from transformer_jax.types import HEAD, HEADS, POSITION, RANK

_ARRAYS = ("query", "key", "value")
_CHUNK = Option(128, low=1)


def _normal(key: Array, shape: tuple[int, ...], dtype: Any, fan_in: int) -> Array:
    """Normal numbers that keep the scale of what they multiply."""
    return jax.random.normal(key, shape, dtype) / math.sqrt(fan_in)


def _draw_projection(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _normal(key, shape, dtype, shape[-2])


def _draw_kernel(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _normal(key, shape, dtype, shape[0] * shape[2])


def _projection_shape(sizes: PieceSizes) -> tuple[int, ...]:
    one = (sizes.places, sizes.options["rank"])
    return (sizes.kv_heads, *one) if sizes.options["share"] == "none" else one


def _kernel_shape(sizes: PieceSizes) -> tuple[int, ...]:
    width = sizes.options["width"] or sizes.options["stride"]
    return width, sizes.kv_heads, sizes.head_width, sizes.head_width


def _blocks_shape(sizes: PieceSizes) -> tuple[int, ...]:
    blocks = -(-sizes.places // sizes.options["block_size"])
    return sizes.heads, blocks, blocks


def _rotations_shape(sizes: PieceSizes) -> tuple[int, ...]:
    options = sizes.options
    return options["rounds"], sizes.head_width, options["buckets"] // 2


ATTENTION: dict[str, AttentionKind] = {
    "dot_product": AttentionKind(
        kernel=dot_product_attention,
        capabilities=frozenset(
            {
                *("bias", "causal", "cross", "decode", "dropout", "exact_mask", "gqa"),
                *("memory", "padding", "pattern", "residual", "segments"),
            }
        ),
        pieces=(),
        init_cache=cache.init_cache,
        step=cache.step,
        fill=cache.fill,
        read=cache.read,
        options={},
        arrays=_ARRAYS,
        paper="Vaswani et al. 2017",
        file="dot_product.py",
        cost="(H + V) * T * S",
    ),
    "linear": AttentionKind(
        kernel=linear.linear_attention,
        capabilities=frozenset(
            {"causal", "cross", "decode", "gqa", "memory", "padding"}
        ),
        pieces=(),
        init_cache=linear_cache.init_linear,
        step=linear_cache.step_linear,
        fill=linear_cache.fill_linear,
        read=linear_cache.read_linear,
        options={
            "feature_map": Option("elu", choices=tuple(linear.FEATURE_MAPS)),
            "chunk_size": _CHUNK,
        },
        arrays=_ARRAYS,
        paper="Katharopoulos et al. 2020",
        file="linear.py",
        cost="H * V * (T + S)",
    ),
    "favor": AttentionKind(
        kernel=favor.favor_attention,
        capabilities=frozenset(
            {"causal", "cross", "decode", "gqa", "memory", "padding"}
        ),
        pieces=(
            Piece(
                "projection",
                lambda sizes: (sizes.options["features"], sizes.head_width),
                lambda key, shape, dtype: favor.orthogonal_projection(
                    key, *shape, dtype
                ),
                "drawn",
            ),
        ),
        init_cache=linear_cache.init_favor,
        step=linear_cache.step_favor,
        fill=linear_cache.fill_favor,
        read=linear_cache.read_favor,
        options={
            "features": Option(256, low=1),
            "feature_map": Option("positive", choices=favor.RANDOM_MAPS),
            "chunk_size": _CHUNK,
            "redraw": Option(1000, low=0),
        },
        arrays=_ARRAYS,
        paper="Choromanski et al. 2021",
        file="favor.py",
        cost="features * (H + V) * (T + S)",
    ),
    "linformer": AttentionKind(
        kernel=low_rank.linformer_attention,
        capabilities=frozenset({"cross", "gqa", "memory", "padding"}),
        pieces=tuple(
            Piece(
                name,
                _projection_shape,
                _draw_projection,
                "trained",
                (POSITION, RANK),
                by_place="keys",
                like=like,
            )
            for name, like in (
                ("key_projection", ""),
                ("value_projection", "key_projection"),
            )
        ),
        init_cache=None,
        step=None,
        fill=low_rank_cache.fill_linformer,
        read=cache.read,
        options={
            "rank": Option(256, low=1),
            "share": Option("head", choices=("none", "head", "kv", "layer")),
        },
        arrays=_ARRAYS,
        paper="Wang et al. 2020",
        file="low_rank.py",
        cost="rank * (H + V) * (T + S)",
    ),
    "compressed": AttentionKind(
        kernel=low_rank.compressed_attention,
        capabilities=frozenset(
            {"causal", "cross", "decode", "gqa", "memory", "padding"}
        ),
        pieces=tuple(
            Piece(
                name,
                _kernel_shape,
                _draw_kernel,
                "trained",
                (POSITION, HEADS, HEAD, HEAD),
            )
            for name in ("key_kernel", "value_kernel")
        ),
        init_cache=low_rank_cache.init_compressed,
        step=low_rank_cache.step_compressed,
        fill=low_rank_cache.fill_compressed,
        read=cache.read,
        options={"stride": Option(3, low=1), "width": Option(None, low=1)},
        arrays=_ARRAYS,
        paper="Liu et al. 2018",
        file="low_rank.py",
        cost="(H + V) * T * S / stride + (H**2 + V**2) * width * S / stride",
    ),
    "lsh": AttentionKind(
        kernel=lsh.lsh_attention,
        capabilities=frozenset({"causal", "decode", "gqa", "padding"}),
        pieces=(
            Piece(
                "rotations",
                _rotations_shape,
                lambda key, shape, dtype: lsh.draw_rotations(
                    key, shape[0], shape[1], 2 * shape[2]
                ).astype(dtype),
                "drawn",
            ),
        ),
        init_cache=bucket_cache.init_lsh,
        step=bucket_cache.step_lsh,
        fill=None,
        read=None,
        options={
            "rounds": Option(4, low=1),
            "buckets": Option(16, low=2, multiple=2),
            "chunk_size": Option(64, low=1),
            "redraw": Option(1, low=0),
        },
        arrays=("query_key", "value"),
        paper="Kitaev et al. 2020",
        file="lsh.py",
        cost="(2 * (H + V) * chunk_size + H * buckets / 2) * rounds * T",
    ),
    "routing": AttentionKind(
        kernel=routing.routing_attention,
        capabilities=frozenset(
            {"causal", "cross", "decode", "gqa", "padding", "query_lengths"}
        ),
        pieces=(
            Piece(
                "centroids",
                lambda sizes: (
                    sizes.heads,
                    sizes.options["clusters"],
                    sizes.head_width,
                ),
                lambda key, shape, dtype: routing.draw_centroids(key, *shape).astype(
                    dtype
                ),
                "tracked",
            ),
        ),
        init_cache=bucket_cache.init_routing,
        step=bucket_cache.step_routing,
        fill=None,
        read=None,
        options={"clusters": Option(16, low=1), "window": Option(None, low=1)},
        arrays=_ARRAYS,
        paper="Roy et al. 2021",
        file="routing.py",
        cost="(H + V) * T * S / clusters + 2 * H * clusters * (T + S)",
    ),
    "sinkhorn": AttentionKind(
        kernel=sinkhorn.sinkhorn_attention,
        capabilities=frozenset({"causal", "gqa", "padding"}),
        pieces=(
            Piece("sort_logits", _blocks_shape, None, "computed", by_place="both"),
        ),
        init_cache=None,
        step=None,
        fill=None,
        read=None,
        options={
            "block_size": Option(64, low=1),
            "iterations": Option(8, low=1),
            "temperature": Option(0.75, low=1e-3),
        },
        arrays=_ARRAYS,
        paper="Tay et al. 2020",
        file="sinkhorn.py",
        cost="(H + V) * (2 * block_size * T + T * S / block_size)",
    ),
    "synthesizer": AttentionKind(
        kernel=synthetic.synthesizer_attention,
        capabilities=frozenset({"causal", "cross", "gqa", "padding", "pattern"}),
        pieces=(
            Piece(
                "logits",
                lambda sizes: (sizes.heads, sizes.places, sizes.places),
                None,
                "computed",
                by_place="both",
            ),
        ),
        init_cache=None,
        step=None,
        fill=None,
        read=None,
        options={
            "variant": Option(
                "dense", choices=("dense", "random", "fixed", "factorized")
            ),
            "rank": Option(8, low=1),
        },
        arrays=("value",),
        paper="Tay et al. 2021",
        file="synthetic.py",
        cost="(V + 1) * T * S",
    ),
}
