"""Logits that compare no query with a key: Synthesizer's, and of sorted blocks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import Attention
from transformer_jax.masks import length_mask, or_zero
from transformer_jax.types import EMBED, HEADS, KEPT, MLP, POSITION, RANK

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


class SortLogits(nn.Module):
    """How well each block of keys suits each block of queries (Tay et al. 2020).

        logits[u] = W2 relu(W1 s_u),  s_u the mean of block u

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
        self, x: jax.Array, lengths: jax.Array | None, causal: bool
    ) -> jax.Array:
        """Map `[B, T, D]` to `[B, N, blocks, blocks]`, those of T places."""
        heads, _, most = self.shape
        size = self.attention.options["block_size"]
        B, T, D = x.shape
        blocks = -(-T // size)
        if lengths is None:
            lengths = jnp.full(B, T)
        inside = length_mask(lengths, T)[..., None]
        kept = jnp.pad(or_zero(inside, x), ((0, 0), (0, blocks * size - T), (0, 0)))
        sums = kept.reshape(B, blocks, size, D).sum(2)
        starts = jnp.arange(blocks) * size
        counts = jnp.clip(lengths[:, None] - starts, 0, size)
        if causal:
            sums, counts = (jnp.cumsum(each, 1) - each for each in (sums, counts))
        means = sums / jnp.maximum(counts, 1)[..., None].astype(x.dtype)
        hidden = jax.nn.relu(_dense(D, (EMBED, MLP), self.dtype)(means))
        logits = _dense((heads, most), (MLP, HEADS, POSITION), self.dtype)(hidden)
        logits = logits[..., :blocks].swapaxes(1, 2).astype(jnp.float32)
        if self.has_rng("dropout"):
            logits += jax.random.gumbel(self.make_rng("dropout"), logits.shape)
        return logits


class SynthesizedLogits(nn.Module):
    """The logits of Synthesizer (Tay et al. 2021, section 3).

        dense       logits[t] = W2 relu(W1 x[t])
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
        self, x: jax.Array, lengths: jax.Array | None, causal: bool
    ) -> jax.Array:
        """Map `[B, T, D]` to `[B or 1, N, T, T]`."""
        del lengths, causal
        heads, places, _ = self.shape
        variant, T = self.attention.options["variant"], x.shape[1]
        if variant == "dense":
            hidden = _dense(x.shape[-1], (EMBED, MLP), self.dtype)(x)
            out = _dense((heads, places), (MLP, HEADS, POSITION), self.dtype)
            return out(jax.nn.relu(hidden))[..., :T].swapaxes(1, 2)
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
                )[:, :T]
                for name in ("queries", "keys")
            ]
            return jnp.einsum("ntr,nsr->nts", *sides)[None]
        if variant == "random":
            axes = (HEADS, POSITION, POSITION)
            init = nn.with_logical_partitioning(normal, axes)
            return self.param("logits", init, self.shape)[None, :, :T, :T]
        drawn = self.variable(
            KEPT, "logits", lambda: normal(self.make_rng("params"), self.shape)
        )
        return drawn.value[None, :, :T, :T]


def _dense(features: int | tuple[int, ...], axes: tuple[str, ...], dtype: Any) -> Any:
    """A linear map of the last axis, with logical axes."""
    return nn.DenseGeneral(
        features,
        dtype=dtype,
        kernel_init=nn.with_logical_partitioning(_kernel_init, axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), axes[1:]),
    )
