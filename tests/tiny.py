"""The smallest model that has every part, for tests of what surrounds it."""

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
