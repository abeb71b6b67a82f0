"""transformer-jax train: train a model, or go on with the one in --workdir.

  transformer-jax train --config=configs/cmudict.py --workdir=runs/cmudict
      [--config.train.steps=2000 ...] [--allow_config_change=train.steps,...]
      [--init_from=WORKDIR|WORKDIR@latest|WORKDIR@STEP]

Every setting of transformer_jax/config.py is such a flag. --init_from begins a new run
with the vocabularies and the parameters of another one, by default of its best step.

Prints one JSON line: step, loss, best_step; and, of models that write all places at
once, how many pairs of the training and the validation split they cannot learn. Exit
code 75 says that it was told to stop and has saved: start it again and it goes on where
it was.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from transformer_jax.commands.flags import (
    define_config_file,
    define_workdir,
    read_settings,
)
from transformer_jax.config import ConfigError
from transformer_jax.runs import create_run
from transformer_jax.trainer import StopSignal, Trainer


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --config, --workdir, --allow_config_change and --init_from."""
    define_workdir(values)
    define_config_file(values, argv)
    flags.DEFINE_list(
        "allow_config_change",
        [],
        "Settings, or sections, that may differ from the run in --workdir.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "init_from",
        "",
        "WORKDIR, WORKDIR@latest or WORKDIR@STEP of a run that a new run begins with.",
        flag_values=values,
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Train; return step, loss and best_step."""
    if values.config is None:
        raise ConfigError("--config is missing: name a file such as configs/cmudict.py")
    with StopSignal() as stop:
        prepared = create_run(
            read_settings(values),
            values.workdir,
            allowed_changes=values.allow_config_change,
            init_from=values.init_from,
        )
        return Trainer(prepared, stop).train()
