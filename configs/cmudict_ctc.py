"""CMUdict, all phones at once on slots with blanks (CTC); `:glancing` too.

Paper: Libovicky and Helcl 2018, "End-to-End Non-Autoregressive Neural Machine
Translation with Connectionist Temporal Classification"; with glancing Gu and Kong 2021,
"Fully Non-autoregressive Neural Machine Translation: Tricks of the Trade".
Hardware: 2 idle CPU cores, about 10 minutes of training, by the time of a step.
Expected: 34.4 % WER, 7.8 % PER without stress on the 12,606 test words, greedy; 34.3 %
and 7.7 % with a beam of 4; 30.7 % and 7.2 % if that is judged by the main job's model
after 6,000 steps. With glancing, in as much time: 34.5 % and 8.0 %; 34.5 % and 8.0 %;
31.4 % and 7.5 %. On outputs of that model instead (`--config.data.distilled`): 34.8 %
and 8.1 %, with a beam of 4 34.7 % and 8.1 %.
Command: transformer-jax train --config=configs/cmudict_ctc.py --workdir=runs/ctc
    transformer-jax evaluate --workdir=runs/ctc \
        --config.decode.strategy=ctc_beam_search --config.decode.rescorer=runs/cmudict
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
        raise ValueError(f"cmudict_ctc.py has no variant {variant!r}: use glancing")
    config = config_beside(__file__, "cmudict.py")
    config.train.objective = "ctc"
    # Two slots a letter: 45 of 114,669 training pairs have no room, 3 slots cost more.
    config.model.upsample = 2
    config.train.steps = 4000
    if variant == "glancing":
        config.train.steps = 3000
        config.train.corruption = "glancing"
        config.train.keep_start = 0.5
        config.train.keep_floor = 0.3
        config.train.keep_scale = 10000
    return config
