"""transformer-jax average: the mean of a run's checkpoints, as a model of its own.

  transformer-jax average --workdir=runs/cmudict --output=runs/averaged
      (--last=5 | --best=5 | --steps=1000,2000,3000)

--last takes the newest checkpoints, --best those of the lowest validation loss. The new
working directory is decoded and evaluated like any other; no training goes on from it,
but a new one may begin with it: train --init_from.

Prints one JSON line: step (the last one averaged), steps, parameters.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from absl import flags
from etils import epath

from transformer_jax.averaging import mean_params
from transformer_jax.checkpoint_store import first_difference
from transformer_jax.checkpoints import Checkpoints
from transformer_jax.commands.flags import define_workdir
from transformer_jax.config import Config, ConfigError, ParallelConfig, to_dict
from transformer_jax.run_directory import CONFIG_FILE, require_writable
from transformer_jax.runs import Run, open_run
from transformer_jax.saved_config import read_config, write_config
from transformer_jax.sharding import make_mesh
from transformer_jax.training import abstract_variables, count_parameters
from transformer_jax.types import KEPT, PyTree, variables_of
from transformer_jax.vocabularies import save_tokenizers

SELECTORS = ("last", "best", "steps")


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, --output, --last, --best and --steps."""
    del argv
    define_workdir(values)
    flags.DEFINE_string(
        "output", None, "Working directory to make for the average.", flag_values=values
    )
    for name, which in (("last", "newest"), ("best", "best by validation loss")):
        flags.DEFINE_integer(
            name,
            None,
            f"Average this many checkpoints, the {which}.",
            lower_bound=1,
            flag_values=values,
        )
    flags.DEFINE_string(
        "steps", None, "Average these steps, such as 1000,2000.", flag_values=values
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Average; return the last step, all steps and the number of parameters."""
    if not values.output:
        raise ConfigError("--output is missing: name a directory for the average")
    opened = open_run(values.workdir, _settings(values.workdir))
    checkpoints = opened.checkpoints(read_only=True)
    steps = _choose(values, checkpoints)
    output = epath.Path(values.output).expanduser()
    _require_no_run(output)
    _require_one_shape(checkpoints, steps)
    require_writable(output, flag="--output")
    variables, metadata = _average(opened, checkpoints, steps)
    # The configuration comes last: it makes the directory a run.
    save_tokenizers([opened.source_tokenizer, opened.target_tokenizer], output)
    with Checkpoints(output / "checkpoints") as averaged:
        averaged.save(steps[-1], variables, metadata)
    of = {"workdir": str(checkpoints.directory.parent), "steps": steps}
    write_config(output, opened.config, average=of)
    parameters = count_parameters(variables["params"])
    return {"step": steps[-1], "steps": steps, "parameters": parameters}


def _require_no_run(output: epath.Path) -> None:
    """Refuse to overwrite; what a failed average left behind is no run."""
    held = Checkpoints(output / "checkpoints", read_only=True).steps()
    if (output / CONFIG_FILE).exists() or held:
        raise ConfigError(f"--output {output} holds a run already: choose another one")


def _settings(workdir: str) -> Config:
    """The run's settings, without the moving average, which is not written."""
    config = read_config(workdir)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, ema_decay=0.0),
        decode=dataclasses.replace(config.decode, use_ema=False),
    )


def _choose(values: flags.FlagValues, checkpoints: Checkpoints) -> list[int]:
    """Return the steps that the flags name, rising."""
    given = [name for name in SELECTORS if values[name].value is not None]
    if len(given) != 1:
        raise ConfigError(
            "which checkpoints? Give one of --last=N, --best=N and --steps=A,B, not "
            f"{' and '.join(f'--{name}' for name in given) or 'none'}"
        )
    there = checkpoints.steps()
    if values.steps is not None:
        return _named(values.steps, there, checkpoints)
    if values.last is not None:
        wanted, found, what = values.last, there[-values.last :], ""
    else:
        wanted, found = values.best, checkpoints.best_steps(values.best)
        what = " with a validation loss"
    if len(found) < wanted:
        raise ConfigError(
            f"--{given[0]}={wanted} wants {wanted} checkpoints{what}, but "
            f"{checkpoints.directory} has {len(found)}: {sorted(found)}; a run keeps "
            "more with train.keep_latest, train.keep_best and train.keep_every"
        )
    return sorted(found)


def _named(text: str, there: Sequence[int], checkpoints: Checkpoints) -> list[int]:
    names = text.split(",")
    steps = sorted(int(name) for name in names if name.isdecimal())
    if len({*steps}) < len(names):
        raise ConfigError(
            f"--steps must be different steps, such as 1000,2000, not {text!r}"
        )
    if missing := [step for step in steps if step not in there]:
        raise ConfigError(
            f"{checkpoints.directory} has no step {missing[0]}: it has {there}"
        )
    return steps


def _require_one_shape(checkpoints: Checkpoints, steps: Sequence[int]) -> None:
    """Refuse steps between which the model was changed, before any array is read."""
    for one, other in itertools.pairwise(steps):
        held = checkpoints.leaves(one), checkpoints.leaves(other)
        if difference := first_difference(*held, ("params", KEPT)):
            name, old, new = difference
            raise ConfigError(
                f"{name} is {old} at step {one}, but {new} at step {other}: the model "
                "was changed in between; choose --steps on one side of it"
            )


def _average(
    opened: Run, checkpoints: Checkpoints, steps: list[int]
) -> tuple[PyTree, dict[str, Any]]:
    """Return variables and metadata: the mean of parameters, else the last step's."""
    wanted = abstract_variables(opened.model(), make_mesh(ParallelConfig(data=1)))
    last: dict[str, Any] = {}

    def read(step: int) -> PyTree:
        restored = checkpoints.restore_entries(wanted, step=step)
        opened.require_vocabulary_of(restored)
        last.update(metadata=restored.metadata, kept=restored.state.get(KEPT))
        return restored.state["params"]

    params = mean_params(steps, read)
    of = {"config": to_dict(opened.config), "loss": None, "averaged": steps}
    return variables_of(params, last["kept"]), last["metadata"] | of
