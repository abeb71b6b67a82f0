"""Grapheme to phoneme on CMUdict, without stress: the main job, in minutes.

Paper: Yolchuyeva et al. 2019, "Transformer based Grapheme-to-Phoneme Conversion", with
the split of CMUSphinx g2p-seq2seq (every 20th word validation, two of 20 test).
Hardware: 2 CPU cores.
Command: bash launch/local.sh
"""

import ml_collections

from transformer_jax.config import default_config


def get_config() -> ml_collections.ConfigDict:
    """Return the settings."""
    config = default_config()
    config.data.source = "cmudict"
    config.data.bucket_lengths = (8, 12, 16, 32)
    config.data.tokens_per_batch = 4096
    config.model.width = 128
    config.model.feed_forward = 512
    config.model.encoder_layers = 3
    config.model.decoder_layers = 3
    config.train.steps = 1600
    config.train.schedule = "cosine"
    config.train.learning_rate = 3e-3
    config.train.warmup = 100
    return config
