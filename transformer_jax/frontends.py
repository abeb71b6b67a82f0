"""From raw inputs to the vectors that an encoder or a decoder reads."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.layers import Dropout
from transformer_jax.positions import one_hot, sinusoidal
from transformer_jax.projections import make_projection
from transformer_jax.types import EMBED, POSITION, VOCAB


class TokenFrontend(nn.Module):
    """Token embeddings plus positions (Vaswani et al. 2017, sections 3.4 and 3.5).

        x_t = scale E[token_t] + P(t), with scale sqrt(D) or 1

    `positions` says what P is; kinds that work inside of attention add nothing here.

    - sinusoidal: sines and cosines, for any length.
    - learned: a row of a learned table `[max_positions, D]` (Gehring et al. 2017,
      section 3.1).
    - one_hot: W_P e_t, a learned map of the position's unit vector. The map's columns
      are a learned table; only its initial scale, a projection's, is another.
    """

    vocab: int
    width: int
    positions: str
    max_positions: int
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
        if self.positions == "learned":
            self.position_table = self.param(
                "position_table",
                nn.with_logical_partitioning(init, (POSITION, EMBED)),
                (self.max_positions, self.width),
            )
        elif self.positions == "one_hot":
            self.position_map = make_projection(
                self.width, (POSITION, EMBED), use_bias=False, dtype=self.dtype
            )
        self.drop = Dropout(self.dropout)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map ids `[B, T]` to `[B, T, D]`, the first column at position 0.

        Raises:
            ValueError: T is beyond the table of positions.
        """
        return self.at(tokens, self.places(tokens.shape[1]))

    def places(self, length: int) -> jax.Array:
        """Return the positions of a whole sequence, from 0 on.

        Raises:
            ValueError: the length is beyond the table of positions.
        """
        if self.positions in ("learned", "one_hot") and length > self.max_positions:
            raise ValueError(
                f"a length of {length} is beyond the {self.max_positions} "
                f"{self.positions} positions: raise max_positions"
            )
        return jnp.arange(length)

    def at(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Map ids `[B, T]` at positions `[T]` or `[B, T]` to `[B, T, D]`.

        A position beyond a table of positions has no vector: it gives NaN.
        """
        return self.placed(self.embed(tokens), positions)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Map ids `[B, T]` to their scaled embeddings `[B, T, D]`."""
        x = self.embedding(tokens)
        if self.scale:
            x *= jnp.asarray(self.width**0.5, x.dtype)
        return x

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Add the vectors of positions, and dropout, to embeddings `[B, T, D]`."""
        if self.positions == "sinusoidal":
            x += sinusoidal(positions, self.width).astype(x.dtype)
        elif self.positions == "learned":
            rows = self.position_table.at[positions]
            x += rows.get(mode="fill", fill_value=jnp.nan).astype(x.dtype)
        elif self.positions == "one_hot":
            x += self.position_map(one_hot(positions, self.max_positions))
        return self.drop(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, V]` with the transposed embedding matrix.

        The transposed matrix is the output layer of tied embeddings (Press and Wolf
        2017).
        """
        return self.embedding.attend(x)
