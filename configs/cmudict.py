"""Grapheme to phoneme on CMUdict, without stress: the main job in minutes, or in full.

Paper: Yolchuyeva et al. 2019, "Transformer based Grapheme-to-Phoneme Conversion", with
the split of CMUSphinx g2p-seq2seq (every 20th word validation, two of 20 test).
Hardware: 2 CPU cores, about 7 minutes of training (4 epochs).
Expected: 33.6 % WER, 8.3 % PER on the 12,606 test words, greedy. (Sinusoidal instead of
rotary positions: 35.0 % and 8.7 %.)
Command: bash launch/local.sh

In full, `:full`: 28 epochs of a wider model, 107 minutes on 2 CPU cores beside other
work.
Expected: 29.3 % WER, 7.1 % PER, greedy; 29.0 % and 7.0 % with a beam of 4.
Command: transformer-jax train --config=configs/cmudict.py:full --workdir=runs/full
"""

import ml_collections

from transformer_jax.config import default_config

VARIANTS = ("", "full")


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Return the settings: of minutes, or with `:full` those of hours.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"cmudict.py has no variant {variant!r}: use full")
    config = _minutes()
    if variant == "full":
        _make_full(config)
    return config


def _minutes() -> ml_collections.ConfigDict:
    """Four epochs of a small model."""
    config = default_config()
    config.data.source = "cmudict"
    config.data.bucket_lengths = (6, 8, 10, 12, 16, 32)
    # Small batches: more updates for the same arithmetic, and they fit the caches.
    config.data.tokens_per_batch = 1024
    config.model.width = 128
    config.model.feed_forward = 512
    config.model.encoder_layers = 3
    config.model.decoder_layers = 3
    config.model.positions = "rotary"
    # Four epochs are too few to overfit.
    config.model.dropout = 0.0
    config.train.steps = 3820
    config.train.schedule = "cosine"
    config.train.learning_rate = 2e-3
    config.train.warmup = 200
    config.train.log_every = 100
    config.train.evaluate_every = 955
    config.train.save_every = 500
    return config


def _make_full(config: ml_collections.ConfigDict) -> None:
    """Make it 28 epochs of a wider model, with dropout and a moving average."""
    config.model.width = 192
    config.model.feed_forward = 768
    config.model.dropout = 0.15
    config.train.steps = 27000
    config.train.learning_rate = 1.5e-3
    config.train.warmup = 1000
    config.train.ema_decay = 0.999
    config.train.log_every = 250
    config.train.evaluate_every = 3000
    config.train.save_every = 500
    config.train.keep_latest = 8
    config.train.keep_every = 3000
