"""Logits that compare no query with a key: Synthesizer's, and of sorted blocks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import Attention
from transformer_jax.attention.chunks import chunked
from transformer_jax.masks import length_mask, or_zero
from transformer_jax.projections import make_projection
from transformer_jax.types import EMBED, HEAD, HEADS, KEPT, POSITION, RANK


class SortLogits(nn.Module):
    """How well each block of keys suits each block of queries (Tay et al. 2020).

        logits[u] = W2 relu(W1 s_u + b1) + b2,  s_u the mean of block u

    Section 3.1; with causality s_u is the mean of all places before block u (section
    3.3, where the block's first place counts as well). While a `dropout` key is given,
    Gumbel noise is added (section 3.1.1).

    Attributes:
        attention: the kind, for its `block_size`.
        shape: (heads, blocks, blocks), for the longest sequence.
        dtype: of the products.
    """

    attention: Attention
    shape: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(
        self, x: jax.Array, keys: int, lengths: jax.Array | None, causal: bool
    ) -> jax.Array:
        """Map `[B, T, D]` to `[B, N, blocks, blocks]`, those of T places."""
        del keys
        heads, _, most = self.shape
        size = self.attention.options["block_size"]
        B, T, D = x.shape
        if lengths is None:
            lengths = jnp.full(B, T)
        inside = length_mask(lengths, T)[..., None]
        sums = chunked(or_zero(inside, x.astype(jnp.float32)), size, 1).sum(2)
        blocks = sums.shape[1]
        counts = jnp.clip(lengths[:, None] - size * jnp.arange(blocks), 0, size)
        if causal:
            # Of the blocks before: what is in its own one has no way to reach it.
            sums, counts = (
                jnp.roll(jnp.cumsum(each, 1), 1, 1).at[:, 0].set(0)
                for each in (sums, counts)
            )
        means = sums / jnp.maximum(counts, 1)[..., None]
        narrow = make_projection(D, (EMBED, HEAD), dtype=self.dtype)
        wide = make_projection((heads, most), (HEAD, HEADS, POSITION), dtype=self.dtype)
        logits = wide(jax.nn.relu(narrow(means.astype(x.dtype))))
        logits = logits[..., :blocks].swapaxes(1, 2).astype(jnp.float32)
        if self.has_rng("dropout"):
            logits += jax.random.gumbel(self.make_rng("dropout"), logits.shape)
        return logits


class SynthesizedLogits(nn.Module):
    """The logits of Synthesizer (Tay et al. 2021, section 3).

        dense       logits[t] = W2 relu(W1 x[t] + b1) + b2
        random      R, trained; factorized: A B^T of `rank` columns
        fixed       R as it was drawn

    Attributes:
        attention: the kind, for its `variant` and `rank`.
        shape: (heads, places, places), for the longest sequence.
        dtype: of the products.
    """

    attention: Attention
    shape: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(
        self, x: jax.Array, keys: int, lengths: jax.Array | None, causal: bool
    ) -> jax.Array:
        """Map `[B, T, D]` to `[B or 1, N, T, S]` for S = `keys`."""
        del lengths, causal
        heads, places, _ = self.shape
        variant, T = self.attention.options["variant"], x.shape[1]
        if variant == "dense":
            narrow = make_projection(x.shape[-1], (EMBED, HEAD), dtype=self.dtype)
            wide = make_projection(
                (heads, places), (HEAD, HEADS, POSITION), dtype=self.dtype
            )
            return wide(jax.nn.relu(narrow(x)))[..., :keys].swapaxes(1, 2)
        normal = nn.initializers.normal(1.0)
        if variant == "factorized":
            rank = self.attention.options["rank"]
            sides = [
                self.param(
                    name,
                    nn.with_logical_partitioning(
                        nn.initializers.normal(rank**-0.25), (HEADS, POSITION, RANK)
                    ),
                    (heads, places, rank),
                )[:, :count]
                for name, count in (("queries", T), ("keys", keys))
            ]
            return jnp.einsum("ntr,nsr->nts", *sides)[None]
        if variant == "random":
            axes = (HEADS, POSITION, POSITION)
            init = nn.with_logical_partitioning(normal, axes)
            return self.param("logits", init, self.shape)[None, :, :T, :keys]
        drawn = self.variable(
            KEPT, "logits", lambda: normal(self.make_rng("params"), self.shape)
        )
        return drawn.value[None, :, :T, :keys]
