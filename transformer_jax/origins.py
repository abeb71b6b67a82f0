"""Where a run's first parameters come from: a step of another run (fine-tuning)."""

from typing import NamedTuple

from etils import epath

from transformer_jax.checkpoint_store import describe, first_difference
from transformer_jax.checkpoints import Checkpoints, Restored
from transformer_jax.config import ConfigError
from transformer_jax.run_directory import CONFIG_FILE
from transformer_jax.types import PyTree


class Origin(NamedTuple):
    """A checkpoint of another run: its working directory and its step."""

    workdir: str
    step: int

    def __str__(self) -> str:
        return f"{self.workdir}@{self.step}"

    def restore(self, abstract: dict[str, PyTree]) -> Restored:
        """Read the variables of the step.

        Args:
            abstract: their shapes and types, and the shardings they shall get.

        Raises:
            ConfigError: those of the step have other shapes or types.
            CheckpointError: the checkpoint cannot be read.
        """
        self.require_shapes_of(abstract)
        return _checkpoints(self.workdir).restore_entries(abstract, step=self.step)

    def require_shapes_of(self, abstract: dict[str, PyTree]) -> None:
        """Refuse another model's variables, before any array is read.

        Raises:
            ConfigError: those of the step have other shapes or types.
            CheckpointError: the checkpoint cannot be read.
        """
        held = _checkpoints(self.workdir).leaves(self.step)
        if difference := first_difference(held, describe(abstract), abstract):
            name, old, new = difference
            raise ConfigError(
                f"--init_from {self} holds {old} for {name}, but this model wants "
                f"{new}: take the model's settings from {self.workdir}/{CONFIG_FILE}"
            )


def find_origin(text: str) -> Origin:
    """Return the checkpoint that `WORKDIR`, `WORKDIR@latest` or `WORKDIR@STEP` names.

    Without a step it is the best by validation loss, or the newest if none has one.

    Raises:
        ConfigError: there is no such run, or it has no such step.
    """
    workdir, _, name = text.rpartition("@")
    which = name.isdecimal() or name in ("best", "latest")
    # A directory may have an @ in its own name.
    if not which or (epath.Path(text).expanduser() / CONFIG_FILE).exists():
        workdir, name = text, "best"
    path = epath.Path(workdir).expanduser()
    if not (path / CONFIG_FILE).exists():
        raise ConfigError(
            f"--init_from {text} names no run ({path / CONFIG_FILE} is missing): write "
            "WORKDIR, WORKDIR@latest or WORKDIR@STEP"
        )
    checkpoints = _checkpoints(path)
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError(
            f"--init_from {text}: no checkpoint in {path}, train it first"
        )
    if name == "best":
        best = checkpoints.best_step()
        step = steps[-1] if best is None else best
    else:
        step = steps[-1] if name == "latest" else int(name)
    if step not in steps:
        raise ConfigError(
            f"--init_from {text}: {path} has no step {step}, only {steps}"
        )
    return Origin(str(checkpoints.directory.parent), step)


def _checkpoints(workdir: epath.Path | str) -> Checkpoints:
    return Checkpoints(epath.Path(workdir) / "checkpoints", read_only=True)
