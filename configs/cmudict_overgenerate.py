"""CMUdict, more places than are needed, written at once and cut at the first END.

Source: the second of two ways to know an output's length in lectures on
non-autoregressive decoding; the other one predicts it (cmudict_parallel.py).
Hardware: 2 idle CPU cores, about 10 minutes of training, by the time of a step.
Expected: 39.5 % WER, 9.7 % PER without stress on the 12,606 test words; three ends
instead of the first change nothing.
Command: transformer-jax train --config=configs/cmudict_overgenerate.py \
        --workdir=runs/overgenerate
    transformer-jax evaluate --workdir=runs/overgenerate
"""

import ml_collections

from transformer_jax.config import config_beside


def get_config() -> ml_collections.ConfigDict:
    """Return the main job's settings with another objective."""
    config = config_beside(__file__, "cmudict.py")
    config.train.objective = "overgenerate"
    config.model.positions = "sinusoidal"
    # Room for END and three phones more than letters.
    config.model.upsample = 1
    config.model.extra_slots = 4
    config.train.steps = 4700
    return config
