"""From raw inputs to the vectors that an encoder or a decoder reads."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.layers import Dropout
from transformer_jax.positions import sinusoidal
from transformer_jax.types import EMBED, VOCAB


class TokenFrontend(nn.Module):
    """Token embeddings plus positions (Vaswani et al. 2017, sections 3.4 and 3.5).

    x_t = scale E[token_t] + PE(t), with scale sqrt(D) or 1.
    """

    vocab: int
    width: int
    positions: str
    scale: bool
    dropout: float
    dtype: Any

    def setup(self) -> None:
        init = nn.initializers.normal(self.width**-0.5)
        self.embedding = nn.Embed(
            self.vocab,
            self.width,
            dtype=self.dtype,
            embedding_init=nn.with_logical_partitioning(init, (VOCAB, EMBED)),
        )
        self.drop = Dropout(self.dropout)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map ids `[B, T]` to `[B, T, D]`, the first column at position 0."""
        return self.at(tokens, jnp.arange(tokens.shape[1]))

    def at(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Map ids `[B, T]` at positions `[T]` or `[B, T]` to `[B, T, D]`."""
        x = self.embedding(tokens)
        if self.scale:
            x *= jnp.asarray(self.width**0.5, x.dtype)
        if self.positions == "sinusoidal":
            x += sinusoidal(positions, self.width).astype(x.dtype)
        return self.drop(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, V]` with the transposed embedding matrix.

        The transposed matrix is the output layer of tied embeddings (Press and Wolf
        2017).
        """
        return self.embedding.attend(x)
