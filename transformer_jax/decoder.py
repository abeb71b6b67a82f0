"""The decoder: self-attention, masked or not, then cross-attention to a memory."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from transformer_jax.attention import Attention
from transformer_jax.layers import Dropout, empty_cache
from transformer_jax.stacks import Block, Common, Tower, is_scanned
from transformer_jax.types import PyTree


class DecoderBlock(Block):
    """Self-attention, cross-attention, feed-forward, each with Add & Norm.

    Self-attention is masked where `causal` is set: row t reads rows up to t.
    """

    SCANNED: ClassVar[dict[str, int]] = {"__call__": 4, "project": 2, "step": 1}

    def setup(self) -> None:
        self.self_attention = self.make_self_attention()
        self.cross_attention = self.make_cross_attention()
        self.feed_forward = self.make_feed_forward()
        self.norms = [self.make_norm() for _ in range(3)]
        self.residual_dropout = Dropout(self.dropout)

    def __call__(
        self,
        x: jax.Array,
        scanned: None,
        memory: jax.Array,
        memory_lengths: jax.Array,
        lengths: jax.Array | None,
        common: Common,
    ) -> tuple[jax.Array, None]:
        """Map target states `[B, T, D]` to the same.

        Keys from `lengths` on, if given, are not attended.
        """

        def attend_self(y: jax.Array) -> jax.Array:
            return self.self_attention(
                y,
                self.self_attention.project(y),
                projections=common.projections,
                bias=common.bias,
                is_causal=self.causal,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
            )

        x = self.add_and_norm(x, attend_self, self.norms[0])
        projected = self.cross_attention.project(memory)

        def attend_memory(y: jax.Array) -> jax.Array:
            return self.cross_attention(
                y,
                projected,
                projections=common.cross_projections,
                query_seq_lengths=lengths,
                key_value_seq_lengths=memory_lengths,
            )

        return self._read_memory(x, attend_memory), scanned

    def project(
        self,
        memory: jax.Array,
        scanned: None,
        memory_lengths: jax.Array,
        common: Common,
    ) -> tuple[jax.Array, PyTree]:
        """Project the memory once a source, for `step`."""
        projections = common.cross_projections
        return memory, self.cross_attention.fill(memory, memory_lengths, projections)

    def step(
        self, x: jax.Array, scanned: PyTree, common: Common
    ) -> tuple[jax.Array, PyTree]:
        """Map one new place `[M, 1, D]`; `scanned` is (cache, projected memory)."""
        cache, projected = scanned
        positions = cache.position

        def attend_self(y: jax.Array) -> jax.Array:
            nonlocal cache
            attended, cache = self.self_attention.step(y, cache, bias=common.bias)
            return attended

        x = self.add_and_norm(x, attend_self, self.norms[0])
        # The rows of one source (its beam) read its memory as several queries do.
        sources = jax.tree.leaves(projected)[0].shape[0]
        x = x.reshape(sources, -1, x.shape[-1])
        positions = positions.reshape(sources, -1)
        x = self._read_memory(
            x, lambda y: self.cross_attention.read(y, projected, positions)
        )
        return x.reshape(-1, 1, x.shape[-1]), cache

    def _read_memory(
        self, x: jax.Array, attend_memory: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        x = self.add_and_norm(x, attend_memory, self.norms[1])
        return self.add_and_norm(x, self.feed_forward, self.norms[2])


class Decoder(Tower):
    """A stack of decoder blocks, causal or bidirectional.

    `block_fields["causal"]` tells which; `step` is for causal ones.
    """

    BLOCK = DecoderBlock

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        memory_lengths: jax.Array,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Map target features `[B, T, D]` to states `[B, T, D]`.

        Args:
            x: features.
            memory: `[B, S, D]`.
            memory_lengths: int32 `[B]`.
            lengths: int32 `[B]`, places of the target that are attended; None means
                all, which a causal decoder with padding on the right can afford.
        """
        shared = memory, memory_lengths, lengths, self.common()
        x, _ = self.stack.run("__call__", x, None, *shared)
        return self.normed(x)

    def project(self, memory: jax.Array, memory_lengths: jax.Array) -> PyTree:
        """Return what every layer reads of the memory `[B, S, D]`, for `step`."""
        shared = memory_lengths, self.common()
        return self.stack.run("project", memory, None, *shared)[1]

    def step(
        self, x: jax.Array, caches: PyTree, projected: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Map the features of one new place `[M, 1, D]` to its states."""
        scanned = tuple(zip(caches, projected, strict=True))
        x, caches = self.stack.run("step", x, scanned, self.common())
        return self.normed(x), caches

    def init_cache(self, batch: int, max_length: int) -> PyTree:
        """Return empty self-attention caches, leaves `[batch, ...]`.

        Unrolled: one a layer; scanned: one a variant, whose leaves hold its layers on
        axis 1. Needs no parameters.
        """
        fields = self.block_fields
        sizes = {
            name: fields[name] for name in ("heads", "kv_heads", "head_width", "dtype")
        }
        caches = [
            empty_cache(variant.get("kind", Attention()), batch, max_length, **sizes)
            for variant in self.variants
        ]
        turns = self.layers // len(caches)
        if not is_scanned(self.scan, self.layers, self.variants):
            return tuple(caches[n % len(caches)] for n in range(self.layers))
        return tuple(
            jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], turns, axis=1), cache)
            for cache in caches
        )
