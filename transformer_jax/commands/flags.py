"""Flags that several commands have, and how an argument list becomes flag values."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from transformer_jax.config import Config, ConfigError, from_config_dict, to_dict
from transformer_jax.runs import read_config


def parse(
    command: str,
    arguments: Sequence[str],
    define: Callable[[flags.FlagValues, Sequence[str]], None],
) -> flags.FlagValues:
    """Return a command's own flag values.

    Args:
        command: its name, for `--help`.
        arguments: what stands behind it on the command line.
        define: defines the command's flags; it sees the arguments as well.

    Raises:
        ConfigError: a flag is unknown, or its value cannot be read.
    """
    argv = [command, *arguments]
    values = flags.FlagValues()
    define(values, argv)
    try:
        extra = values(argv)[1:]
    except (flags.Error, AttributeError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(_one_line(error)) from error
    if extra:
        raise ConfigError(f"unexpected argument {extra[0]!r}: flags begin with --")
    return values


def define_workdir(values: flags.FlagValues) -> None:
    """Define --workdir, which must be given."""
    text = "Working directory: a folder or gs:// path."
    flags.DEFINE_string("workdir", None, text, flag_values=values)
    flags.mark_flag_as_required("workdir", flag_values=values)


def define_saved_config(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, and --config.a.b flags that override the settings there."""
    define_workdir(values)
    workdir = _value_of("workdir", argv)
    settings = to_dict(read_config(workdir)) if workdir else {}
    config_flags.DEFINE_config_dict(
        "config",
        ml_collections.ConfigDict(settings),
        "Settings that override the working directory's, as --config.decode.rows=8.",
        flag_values=values,
        sys_argv=list(argv),
    )


def read_settings(values: flags.FlagValues) -> Config:
    """Return the checked settings that --config and its overrides give."""
    return from_config_dict(json.loads(values.config.to_json()))


def define_checkpoint(values: flags.FlagValues) -> None:
    """Define --checkpoint."""
    flags.DEFINE_string(
        "checkpoint",
        "best",
        "Which checkpoint: best (lowest validation loss), latest, or a step.",
        flag_values=values,
    )


def read_checkpoint(values: flags.FlagValues) -> int | str | None:
    """Return --checkpoint as `load_decoder` takes it."""
    name = values.checkpoint
    if name in ("best", "latest"):
        return None if name == "latest" else name
    if not name.isdecimal():
        raise ConfigError(f"--checkpoint must be best, latest or a step, not {name!r}")
    return int(name)


def _value_of(name: str, argv: Sequence[str]) -> str | None:
    """Read one flag early: the defaults of others depend on it."""
    early = flags.FlagValues()
    flags.DEFINE_string(name, None, "", flag_values=early)
    try:
        early(list(argv), known_only=True)
    except flags.Error as error:
        raise ConfigError(_one_line(error)) from error
    return early[name].value


def _one_line(error: Any) -> str:
    return " ".join(str(error).split()) or type(error).__name__
