"""Attention kernels: pure functions of arrays, and the table of what each can do.

Layout: query `[B, T, N, H]`, key and value `[B, S, K, H]`, as in `jax.nn`.
"""

from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.attention.favor import favor_attention, orthogonal_projection
from transformer_jax.attention.kinds import AttentionKind, Piece, PieceSizes
from transformer_jax.attention.linear import linear_attention
from transformer_jax.attention.low_rank import (
    compressed_attention,
    linformer_attention,
)
from transformer_jax.attention.lsh import lsh_attention
from transformer_jax.attention.merging import attend_with_extra, merge
from transformer_jax.attention.platform import assume_platform
from transformer_jax.attention.routing import Members, routing_attention
from transformer_jax.attention.sinkhorn import sinkhorn_attention
from transformer_jax.attention.sparse.parts import partition
from transformer_jax.attention.synthetic import synthesizer_attention
from transformer_jax.attention.table import ATTENTION
from transformer_jax.attention.text import Attention, parse, parse_layers

__all__ = [
    "ATTENTION",
    "Attention",
    "AttentionKind",
    "Members",
    "Piece",
    "PieceSizes",
    "assume_platform",
    "attend_with_extra",
    "compressed_attention",
    "dot_product_attention",
    "favor_attention",
    "linear_attention",
    "linformer_attention",
    "lsh_attention",
    "merge",
    "orthogonal_projection",
    "parse",
    "parse_layers",
    "partition",
    "routing_attention",
    "sinkhorn_attention",
    "synthesizer_attention",
]
