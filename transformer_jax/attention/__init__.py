"""Attention kernels: pure functions of arrays, and the table of what each can do.

Layout: query `[B, T, N, H]`, key and value `[B, S, K, H]`, as in `jax.nn`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformer_jax.attention import cache
from transformer_jax.attention.dot_product import dot_product_attention
from transformer_jax.attention.merging import attend_with_extra, merge
from transformer_jax.attention.platform import assume_platform
from transformer_jax.attention.sparse.parts import partition

__all__ = [
    "ATTENTION",
    "AttentionKind",
    "assume_platform",
    "attend_with_extra",
    "dot_product_attention",
    "merge",
    "partition",
]


class AttentionKind(NamedTuple):
    """A row of the table.

    Attributes:
        kernel: the pure function.
        capabilities: words for what it can do. causal: `is_causal`; cross: keys of
            another sequence; padding: lengths; segments, bias, dropout, residual: the
            arguments of that name; gqa: fewer key/value heads; exact_mask: any boolean
            `mask`; decode: `init_cache`, `step`, `fill` and `read`.
        pieces: extra arrays that the kernel takes: (name, shape from sizes,
            initialiser) each, for a module to create.
        init_cache: makes an empty cache of `batch` rows and `max_length` positions.
        step: appends one position to the cache and attends from it.
        fill: makes the cache of a whole sequence, to be read only.
        read: attends to all that a cache holds.
    """

    kernel: Callable[..., Any]
    capabilities: frozenset[str]
    pieces: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...]
    init_cache: Callable[..., Any] | None
    step: Callable[..., Any] | None
    fill: Callable[..., Any] | None = None
    read: Callable[..., Any] | None = None


ATTENTION: dict[str, AttentionKind] = {
    "dot_product": AttentionKind(
        kernel=dot_product_attention,
        capabilities=frozenset(
            {
                "bias",
                "causal",
                "cross",
                "decode",
                "dropout",
                "exact_mask",
                "gqa",
                "padding",
                "residual",
                "segments",
            }
        ),
        pieces=(),
        init_cache=cache.init_cache,
        step=cache.step,
        fill=cache.fill,
        read=cache.read,
    ),
}
