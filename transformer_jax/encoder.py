"""The encoder: self-attention over the whole source."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.layers import Dropout
from transformer_jax.stacks import Block, Common, Tower
from transformer_jax.types import EMBED, POSITION


class EncoderBlock(Block):
    """Self-attention and feed-forward, each with Add & Norm."""

    SCANNED: ClassVar[dict[str, int]] = {"__call__": 2}

    def setup(self) -> None:
        self.self_attention = self.make_self_attention()
        self.feed_forward = self.make_feed_forward()
        self.norms = [self.make_norm() for _ in range(2)]
        self.residual_dropout = Dropout(self.dropout)

    def __call__(
        self, x: jax.Array, scanned: None, lengths: jax.Array, common: Common
    ) -> tuple[jax.Array, None]:
        """Map `[B, S, D]` to the same; keys from `lengths` on are not attended.

        Extra tokens stand before what `lengths` count.
        """

        def attend(y: jax.Array) -> jax.Array:
            return self.self_attention(
                y,
                self.self_attention.project(y),
                projections=common.projections,
                bias=common.bias,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
            )

        x = self.add_and_norm(x, attend, self.norms[0])
        return self.add_and_norm(x, self.feed_forward, self.norms[1]), scanned


class Encoder(Tower):
    """A stack of encoder blocks, with learned tokens in front that all attend.

    `block_fields["extra"]` tells how many of those there are; no decoder sees them.
    """

    BLOCK = EncoderBlock

    def setup(self) -> None:
        super().setup()
        fields = self.block_fields
        if fields["extra"]:
            init = nn.initializers.normal(fields["width"] ** -0.5)
            self.extra_tokens = self.param(
                "extra_tokens",
                nn.with_logical_partitioning(init, (POSITION, EMBED)),
                (fields["extra"], fields["width"]),
            )

    def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Map features `[B, S, D]` of `lengths` `[B]` to the memory `[B, S, D]`."""
        return self.with_extra(x, lengths)[1]

    def with_extra(
        self, x: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return what becomes of the extra tokens, `[B, E, D]`, and the memory."""
        extra = self.block_fields["extra"]
        if extra:
            tokens = self.extra_tokens.astype(x.dtype)
            tokens = jnp.broadcast_to(tokens, (len(x), *tokens.shape))
            x = jnp.concatenate([tokens, x], 1)
        x, _ = self.stack.run("__call__", x, None, lengths, self.common())
        x = self.normed(x)
        return x[:, :extra], x[:, extra:]
