"""The non-autoregressive model: all places of an output are written at once.

The decoder reads a canvas: so many empty places, which attend to each other in both
directions. Gu et al. 2018, "Non-Autoregressive Neural Machine Translation".
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.decoding.length import copy_places, soft_copy_weights
from transformer_jax.layers import mean_of
from transformer_jax.masks import length_mask, or_zero
from transformer_jax.types import EMBED, POSITION

# What the sharpness of soft copies is before it is learned: of ten places the next one
# then gets exp(-5 / 10), about 0.6, of what the nearest one gets.
SHARPNESS = 5.0


class Encoded(NamedTuple):
    """What is known of a source; every leaf begins with B.

    Attributes:
        memory: `[B, S, D]`.
        lengths: int32 `[B]`.
        length_logits: `[B, C]`, of the classes of the output's length, or None.
    """

    memory: jax.Array
    lengths: jax.Array
    length_logits: jax.Array | None


class ParallelSeq2Seq(nn.Module):
    """An encoder, and a decoder that writes all places of a canvas at once.

    Behind the vocabulary's symbols comes the blank of CTC where there is one, which is
    an output as well; the last symbol, `mask_id`, stands for an empty place of the
    canvas and is no output.

    Attributes:
        source_frontend, target_frontend: embeddings and positions of each side.
        encoder, decoder: the stacks; the decoder is not causal.
        inputs: what an empty place reads: its own vector ("mask"), or states of the
            memory, "uniform_copy" or "soft_copy" (see `decoding.length`).
        length_from: what tells the output's length: the mean of the memory ("pooled"),
            an extra token of the encoder ("token"), or nothing ("").
        length_classes: lengths that are told apart.
        length_offset: whether they are differences to the source's length.
        upsample, extra_slots: a canvas of unknown length has upsample |x| + extra_slots
            places.
        output: projection to the vocabulary; None means the target's embeddings.
    """

    source_frontend: nn.Module
    target_frontend: nn.Module
    encoder: nn.Module
    decoder: nn.Module
    inputs: str
    length_from: str
    length_classes: int
    length_offset: bool
    upsample: int
    extra_slots: int
    output: nn.Module | None = None

    def setup(self) -> None:
        if self.inputs == "soft_copy":
            init = nn.initializers.constant(SHARPNESS)
            self.sharpness = self.param(
                "sharpness", nn.with_logical_partitioning(init, ()), ()
            )
        if self.length_from:
            init = nn.initializers.normal(self.target_frontend.width**-0.5)
            self.length_output = nn.Dense(
                self.length_classes,
                use_bias=False,
                kernel_init=nn.with_logical_partitioning(init, (EMBED, POSITION)),
            )

    @property
    def mask_id(self) -> int:
        """The symbol of an empty place."""
        return self.target_frontend.vocab - 1

    @property
    def blank_id(self) -> int:
        """The blank, of a model for CTC."""
        return self.mask_id - 1

    def slots(self, source_lengths: jax.Array | int) -> jax.Array | int:
        """Return the places of a canvas of unknown length."""
        return self.upsample * source_lengths + self.extra_slots

    def __call__(
        self, source: jax.Array, source_lengths: jax.Array, target_inputs: jax.Array
    ) -> jax.Array:
        """Return logits `[B, T, V]` of target inputs `[B, T]`, all of them valid."""
        lengths = jnp.full(target_inputs.shape[0], target_inputs.shape[1], jnp.int32)
        return self.predict(self.encode(source, source_lengths), target_inputs, lengths)

    def encode(self, source: jax.Array, source_lengths: jax.Array) -> Encoded:
        """Read sources `[B, S]`; what stands behind their lengths changes nothing."""
        features = self.source_frontend(source)
        extra, memory = self.encoder.with_extra(features, source_lengths)
        logits = None
        if self.length_from:
            token = self.length_from == "token"
            logits = self.length_output(
                extra[:, 0] if token else mean_of(memory, source_lengths)
            )
        return Encoded(memory, source_lengths, logits)

    def predict(
        self, encoded: Encoded, tokens: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Return logits `[B, T, V]` of all places of a canvas.

        Args:
            encoded: from `encode`.
            tokens: int32 `[B, T]`, `mask_id` in empty places.
            lengths: int32 `[B]`, places of each row's canvas; later ones count nothing.
        """
        x = self.target_frontend.embed(tokens)
        if self.inputs != "mask":
            empty = (tokens == self.mask_id)[..., None]
            x = jnp.where(empty, self._copied(encoded, lengths, tokens.shape[1]), x)
        x = self.target_frontend.placed(x, self.target_frontend.places(tokens.shape[1]))
        x = self.decoder(x, encoded.memory, encoded.lengths, lengths)
        if self.output is not None:
            return self.output(x)
        return self.target_frontend.logits(x)[..., : self.mask_id]

    def _copied(self, encoded: Encoded, lengths: jax.Array, size: int) -> jax.Array:
        """What the empty places read of the memory, `[B, T, D]`."""
        memory = encoded.memory
        if self.inputs == "uniform_copy":
            places = copy_places(encoded.lengths, lengths, size)
            return jnp.take_along_axis(memory, places[..., None], axis=1)
        weights = soft_copy_weights(
            encoded.lengths, lengths, memory.shape[1], size, self.sharpness
        )
        inside = length_mask(encoded.lengths, memory.shape[1])[..., None]
        return weights.astype(memory.dtype) @ or_zero(inside, memory)
