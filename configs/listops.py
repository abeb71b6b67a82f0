"""Nested lists of digits: what does [MAX 2 9 [MIN 4 7 ] 0 ] evaluate to? A classifier.

Paper: Tay et al. 2021, "Long Range Arena", section 2.2.1, by its rules, but with 51 to
249 symbols instead of 501 to 1,999, so that two cores can train on them.
Hardware: 2 CPU cores; the README has a table of five minutes with every kind of
attention.
Command: transformer-jax train --config=configs/listops.py --workdir=runs/listops \
    --config.model.encoder_attention="linear()"

With the paper's lengths, and a model of its size, `:long`. Expected: 16 to 37 %
accuracy by the paper's table 1, where kinds of attention differ; not run here.
Hardware: one TPU or GPU.
Command: transformer-jax train --config=configs/listops.py:long --workdir=runs/long
"""

import ml_collections

from transformer_jax.config import default_config

VARIANTS = ("", "long")


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Return the settings: of minutes, or with `:long` those of the paper.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"listops.py has no variant {variant!r}: use long")
    config = default_config()
    config.train.objective = "classification"
    config.train.label_smoothing = 0.0
    config.model.dropout = 0.0
    _make_short(config)
    if variant == "long":
        _make_long(config)
    return config


def _make_short(config: ml_collections.ConfigDict) -> None:
    config.data.source = "listops_short"
    config.data.bucket_lengths = (128, 250)
    config.data.tokens_per_batch = 8192
    config.decode.max_source_length = 250
    config.model.width = 64
    config.model.feed_forward = 128
    config.model.encoder_layers = 2
    config.model.max_positions = 250
    config.train.steps = 2000
    config.train.learning_rate = 2e-3
    config.train.warmup = 200
    config.train.evaluate_every = 500


def _make_long(config: ml_collections.ConfigDict) -> None:
    config.data.source = "listops"
    config.data.bucket_lengths = (1000, 2000)
    config.data.tokens_per_batch = 64_000
    config.decode.max_source_length = 2000
    config.model.width = 512
    config.model.heads = 8
    config.model.feed_forward = 2048
    config.model.encoder_layers = 6
    config.model.max_positions = 2000
    config.train.steps = 5000
    config.train.learning_rate = 5e-4
    config.train.warmup = 1000
