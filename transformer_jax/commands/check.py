"""transformer-jax check: what is wrong with this machine or a run, and how to mend it.

  transformer-jax check [--workdir=runs/cmudict]

Prints one line for each thing looked at, then one JSON line; exit code 1 if anything is
wrong. Python, packages, devices, data and, if named, the working directory.
"""

import contextlib
import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from transformer_jax.checkpoints import CheckpointError
from transformer_jax.config import Config, ConfigError, DataConfig
from transformer_jax.data import data_directory
from transformer_jax.inference import load_model
from transformer_jax.run_directory import one_line, require_writable
from transformer_jax.runs import Run, open_run
from transformer_jax.saved_config import read_config
from transformer_jax.splits import read_examples

OLDEST_PYTHON = (3, 11)
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorflow-datasets",
    "array_record",
    "absl-py",
    "ml_collections",
    "numpy",
)
LITTLE_SPACE = 2**30


class Finding(NamedTuple):
    """One thing looked at: what was found and, if it is wrong, how to mend it."""

    subject: str
    found: str
    remedy: str = ""


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir."""
    del argv
    flags.DEFINE_string(
        "workdir", None, "A working directory to look at.", flag_values=values
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Look at everything; return whether all is well, and what is wrong."""
    looks = {
        "python": _python,
        "packages": _packages,
        "devices": _devices,
        "data": lambda: _data(values.workdir),
    }
    if values.workdir:
        looks["working directory"] = lambda: _workdir(values.workdir)
    wrong = []
    for subject, look in looks.items():
        for finding in _guarded(subject, look):
            mark = "WRONG" if finding.remedy else "ok"
            remedy = f": {finding.remedy}" if finding.remedy else ""
            line = f"{mark:5}  {finding.subject}  {finding.found}{remedy}"
            print(line, file=sys.stderr)
            wrong += [finding.subject] if finding.remedy else []
    return {"ok": not wrong, "wrong": wrong}


def _guarded(subject: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """One broken thing must not hide the others."""
    try:
        yield from look()
    except (ConfigError, CheckpointError, RuntimeError, OSError) as error:
        yield Finding(subject, "cannot be used", one_line(error))


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < OLDEST_PYTHON
    yield Finding("python", version, "install Python 3.11 or newer" if old else "")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "is missing", f"pip install {name}")


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    total = float(jnp.arange(8.0).sum())
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    broken = "" if total == 28 else f"it adds 0..7 up to {total}: mend its driver"
    yield Finding("devices", f"{len(devices)} {devices[0].platform} ({kinds})", broken)


def _data(workdir: str | None) -> Iterator[Finding]:
    # What is wrong with the working directory is told below, once.
    settings = DataConfig()
    with contextlib.suppress(ConfigError):
        settings = read_config(workdir).data if workdir else settings
    directory = data_directory(settings.directory)
    require_writable(directory)
    free = shutil.disk_usage(directory).free
    little = "free some space" if free < LITTLE_SPACE else ""
    yield Finding("data directory", f"{directory}, {free / 2**30:.1f} GiB free", little)
    subject = f"data {settings.source}"
    yield from _guarded(subject, lambda: _source(subject, settings))


def _source(subject: str, settings: DataConfig) -> Iterator[Finding]:
    count = len(read_examples(Config(data=settings), "test"))
    yield Finding(subject, f"{count:,} test examples")


def _workdir(workdir: str) -> Iterator[Finding]:
    opened: Run = open_run(workdir)
    model = opened.config.model
    yield Finding(
        "configuration",
        f"{opened.config.train.objective} on {opened.config.data.source}, width "
        f"{model.width}, {model.encoder_layers}+{model.decoder_layers} layers",
    )
    sizes = f"{model.source_vocab} source and {model.target_vocab} target symbols"
    yield Finding("vocabulary", sizes)
    require_writable(workdir)
    checkpoints = opened.checkpoints(read_only=True)
    missing = "" if checkpoints.steps() else "train first"
    best = checkpoints.best_step()
    yield Finding("checkpoints", f"{checkpoints.steps()}, the best {best}", missing)
    # Read one by one: decoding wants the best, training the newest.
    for step in checkpoints.steps():
        yield from _guarded(f"checkpoint {step}", lambda step=step: _step(opened, step))


def _step(opened: Run, step: int) -> Iterator[Finding]:
    load_model(opened, step=step)
    yield Finding(f"checkpoint {step}", "can be read")
