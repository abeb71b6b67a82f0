"""WMT14 English to German: Transformer-base, autoregressive or all words at once.

Variants: "" (autoregressive), parallel, glancing, mask_predict, ctc, ctc_glancing; each
on raw data, and with `--config.data.distilled=FOLDER` on the outputs of a teacher
(`transformer-jax distill`, beam 4, gnmt 0.6).
Papers: Vaswani et al. 2017; Gu et al. 2018; Qian et al. 2021; Ghazvininejad et al.
2019; Libovicky and Helcl 2018; Gu and Kong 2021. The recipe of 300k updates of 64k
tokens is that of Huang et al. 2022 (DA-Transformer), whose Table 1 has the scores.
Hardware: a TPU slice, such as v4-32; not run by us.
Expected, published, tokenised BLEU on newstest2014, raw / distilled: autoregressive
28.07 / 28.54; parallel 11.79 / 19.99; glancing 19.42 / 25.21; mask_predict in 10 passes
24.61 / 27.03; ctc 18.42 / 25.52; ctc_glancing 25.02 / 26.39. (sacreBLEU is up to 3
lower.)
Data: a row `wmt14_en_de` of SOURCES, to be registered as CONTRIBUTING.md says.
Command: transformer-jax train --config=configs/wmt14_en_de.py:ctc_glancing \
        --config.data.distilled=distilled --workdir=gs://BUCKET/ctc_glancing
"""

import ml_collections

from transformer_jax.config import default_config

# Variant -> objective.
VARIANTS = {
    "": "autoregressive",
    "parallel": "parallel",
    "glancing": "parallel",
    "mask_predict": "mask_predict",
    "ctc": "ctc",
    "ctc_glancing": "ctc",
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Return the settings of a variant.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        known = ", ".join(filter(None, VARIANTS))
        raise ValueError(f"wmt14_en_de.py has no variant {variant!r}: use {known}")
    config = _base()
    config.train.objective = VARIANTS[variant]
    if "ctc" in variant:
        # Slots for a target of up to three times the source's length.
        config.model.upsample = 3
    if variant == "mask_predict":
        config.model.decoder_inputs = "mask"
        config.model.length_from = "token"
    if "glancing" in variant:
        config.train.corruption = "glancing"
        config.train.keep_start = 0.5
        # From 0.5 to 0.3 over 300k updates.
        config.train.keep_scale = 750_000
        config.train.keep_floor = 0.3
    if config.train.objective in ("parallel", "mask_predict"):
        # Sentences grow and shrink by more than words do.
        config.model.length_classes = 256
    return config


def _base() -> ml_collections.ConfigDict:
    """Transformer-base on batches of 64k tokens."""
    config = default_config()
    config.data.source = "wmt14_en_de"
    config.data.bucket_lengths = (16, 32, 48, 64, 96, 128, 256)
    config.data.tokens_per_batch = 65536
    config.model.encoder_layers = 6
    config.model.decoder_layers = 6
    config.model.width = 512
    config.model.heads = 8
    config.model.feed_forward = 2048
    config.model.tied_embeddings = "all"
    config.model.dropout = 0.1
    config.model.scan_layers = True
    config.model.dtype = "bfloat16"
    config.train.steps = 300_000
    config.train.learning_rate = 5e-4
    config.train.warmup = 10_000
    config.train.weight_decay = 0.01
    config.train.ema_decay = 0.9999
    config.train.log_every = 100
    config.train.evaluate_every = 5000
    config.train.save_every = 1000
    config.train.keep_latest = 5
    config.train.keep_best = 5
    config.decode.max_length = 256
    config.decode.max_source_length = 256
    config.decode.use_ema = True
    return config
