"""The Transformer that says what a sequence is: an encoder, one vector, one class."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.layers import mean_of
from transformer_jax.types import EMBED


class Classifier(nn.Module):
    """Classes of sequences.

        logits = W pool(encoder(x)) + b

    `pooling` "mean" takes the mean of the states of valid places; "cls" the state of a
    learned token that is put before the sequence (Devlin et al. 2019, section 3), so
    that any kind of attention sees it as a place like others.
    """

    source_frontend: nn.Module
    encoder: nn.Module
    output: nn.Module
    pooling: str

    def setup(self) -> None:
        if self.pooling == "cls":
            width = self.source_frontend.width
            init = nn.initializers.normal(width**-0.5)
            self.cls = self.param(
                "cls", nn.with_logical_partitioning(init, (EMBED,)), (width,)
            )

    def __call__(self, source: jax.Array, source_lengths: jax.Array) -> jax.Array:
        """Return logits `[B, C]`.

        Args:
            source: int32 `[B, S]`, padding on the right.
            source_lengths: int32 `[B]`; what stands behind changes nothing.
        """
        x = self.source_frontend(source)
        if self.pooling == "mean":
            return self.output(mean_of(self.encoder(x, source_lengths), source_lengths))
        token = jnp.broadcast_to(self.cls.astype(x.dtype), (len(x), 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1)
        return self.output(self.encoder(x, source_lengths + 1)[:, 0])
