"""CMUdict, all phones at once: predicted length, parallel decoder; `:glancing` too.

Paper: Gu et al. 2018, "Non-Autoregressive Neural Machine Translation" (without
fertilities); Qian et al. 2021, "Glancing Transformer".
Hardware: 2 idle CPU cores, about 10 minutes of training, by the time of a step.
Expected: 37.0 % WER, 9.0 % PER without stress on the 12,606 test words; 35.6 % and
8.5 % with three lengths; 33.0 % and 7.9 % if those are judged by the main job's model
after 6,000 steps. With glancing, in as much time: 37.4 % and 9.0 %; 36.2 % and 8.6 %;
33.5 % and 8.0 %.
Command: transformer-jax train --config=configs/cmudict_parallel.py \
        --workdir=runs/parallel
    transformer-jax evaluate --workdir=runs/parallel --config.decode.length_beam=3 \
        --config.decode.rescorer=runs/cmudict
"""

import ml_collections

from transformer_jax.config import config_beside

VARIANTS = ("", "glancing")


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Return the main job's settings with another objective.

    Raises:
        ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"cmudict_parallel.py has no variant {variant!r}: use glancing"
        )
    config = config_beside(__file__, "cmudict.py")
    config.train.objective = "parallel"
    # Lengths and places must be known absolutely.
    config.model.positions = "sinusoidal"
    config.train.steps = 5600
    if variant == "glancing":
        config.train.steps = 5400
        config.train.corruption = "glancing"
        config.train.keep_start = 0.5
        config.train.keep_floor = 0.3
        config.train.keep_scale = 10000
    return config
