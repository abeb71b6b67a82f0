"""The smallest model that has every part, for tests of what surrounds it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig

TINY = ModelConfig(
    source_vocab=11,
    target_vocab=13,
    encoder_layers=1,
    decoder_layers=1,
    width=8,
    heads=2,
    feed_forward=12,
    dropout=0.0,
)


def drawn(model, *arguments, scale=0.35, seed=1):
    """Return parameters that are all away from zero and one, without compiling."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *arguments)
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * draw.normal(size=leaf.shape), leaf.dtype),
        nn.unbox(shapes)["params"],
    )
