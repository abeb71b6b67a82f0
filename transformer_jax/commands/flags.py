"""Flags that several commands have, and how an argument list becomes flag values."""

import dataclasses
import importlib.machinery
import importlib.util
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags
from ml_collections.config_flags.config_flags import FlagOrderError

from transformer_jax.config import (
    SECTIONS,
    Config,
    ConfigError,
    from_config_dict,
    to_dict,
)
from transformer_jax.run_directory import one_line
from transformer_jax.saved_config import read_config

WORKDIR = "Working directory: a folder or gs:// path."
NO_WORKDIR = "--workdir is missing: name a folder or gs:// path"
# How ml_collections and Python say what `parse` says more plainly.
_NEAREST = re.compile(r"\.?\s*Did you mean \"(\w+)\" instead of \"\w+\"\?")
_NO_NUMBER = re.compile(
    r"flag (--[^=]+)=(.*): (?:invalid literal for (int)|could not convert string).*"
)


def parse(
    command: str,
    arguments: Sequence[str],
    define: Callable[[flags.FlagValues, list[str]], None],
) -> flags.FlagValues:
    """Return a command's own flag values.

    Args:
        command: its name, for `--help`.
        arguments: what stands behind it on the command line.
        define: defines the command's flags; it sees the arguments as well, behind the
            command's name, and takes out those that are no flags.

    Raises:
        ConfigError: a flag is unknown, or its value cannot be read.
    """
    argv = [command, *arguments]
    values = flags.FlagValues()
    try:
        define(values, argv)
        extra = values(argv)[1:]
    except ConfigError:
        raise
    except FlagOrderError as error:
        raise ConfigError(
            "--config=FILE comes first, before the settings that change it"
        ) from error
    except (AttributeError, KeyError) as error:  # How ml_collections says it.
        name = _NEAREST.sub(r": did you mean \1?", one_line(_innermost(error)))
        raise ConfigError(f"unknown setting {name}{_others(argv)}") from error
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"{one_line(error)}{_as_setting(error)}") from error
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(_plainer(one_line(error))) from error
    if extra:
        raise ConfigError(f"unexpected argument {extra[0]!r}: flags begin with --")
    return values


def define_workdir(values: flags.FlagValues) -> None:
    """Define --workdir, which must be given."""
    flags.DEFINE_string("workdir", None, WORKDIR, flag_values=values)
    flags.register_validator("workdir", bool, message=NO_WORKDIR, flag_values=values)


def define_config_file(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --config, and --config.a.b flags that override what the file gives."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "File whose get_config() returns the settings; --config.a.b=v overrides one.",
        flag_values=values,
        sys_argv=list(argv),
    )
    # The parser of ml_collections hides why a file cannot be read.
    values["config"].parser = _ConfigFile()


def define_saved_config(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, and --config.a.b flags that override the settings there.

    Raises:
        ConfigError: --workdir is missing, or holds no run that can be read.
    """
    define_workdir(values)
    workdir = _value_of("workdir", argv)
    if not workdir:
        raise ConfigError(NO_WORKDIR)
    config_flags.DEFINE_config_dict(
        "config",
        ml_collections.ConfigDict(to_dict(read_config(workdir))),
        "Settings that override the working directory's, as --config.decode.rows=8.",
        flag_values=values,
        sys_argv=list(argv),
    )


def read_settings(values: flags.FlagValues) -> Config:
    """Return the checked settings that --config and its overrides give.

    Raises:
        ConfigError: a setting has the wrong type or lies outside its range.
    """
    return from_config_dict(values.config.to_dict())


def define_checkpoint(values: flags.FlagValues) -> None:
    """Define --checkpoint."""
    flags.DEFINE_string(
        "checkpoint",
        "best",
        "Which checkpoint: best (lowest validation loss), latest, or a step.",
        flag_values=values,
    )


def read_checkpoint(values: flags.FlagValues) -> int | str | None:
    """Return --checkpoint as `load_model` takes it.

    Raises:
        ConfigError: it is neither best nor latest nor a step.
    """
    name = values.checkpoint
    if name in ("best", "latest"):
        return None if name == "latest" else name
    if not name.isdecimal():
        raise ConfigError(f"--checkpoint must be best, latest or a step, not {name!r}")
    return int(name)


class _ConfigFile(flags.ArgumentParser):
    """Runs a config file; `path:text` passes the text to its get_config."""

    def parse(self, path: str) -> ml_collections.ConfigDict:
        name, *argument = path.split(":", 1)
        loader = importlib.machinery.SourceFileLoader("config_file", name)
        spec = importlib.util.spec_from_loader(loader.name, loader)
        module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
            settings = module.get_config(*argument)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error.filename} does not exist: name a file such as "
                "configs/cmudict.py"
            ) from error
        except ValueError as error:  # How get_config() refuses a variant.
            raise ConfigError(one_line(error)) from error
        except (Exception, SystemExit) as error:  # It may do whatever it likes.
            raise ConfigError(
                f"the file does not work: {type(error).__name__}: {one_line(error)}"
            ) from error
        if not isinstance(settings, ml_collections.ConfigDict):
            raise ConfigError("get_config() must return what default_config() returns")
        return settings.lock()


def _value_of(name: str, argv: Sequence[str]) -> str | None:
    """Read one flag early: the defaults of others depend on it."""
    value = None
    for argument, following in itertools.zip_longest(argv, argv[1:]):
        if found := re.fullmatch(f"--?{name}(=(.*))?", argument, re.DOTALL):
            value = found[2] if found[1] else following
    return value


def _as_setting(error: flags.UnrecognizedFlagError) -> str:
    """The setting that a flag of another name may have meant."""
    for section, record in SECTIONS.items():
        if error.flagname in {item.name for item in dataclasses.fields(record)}:
            return f": write --config.{section}.{error.flagname}"
    return ""


def _plainer(line: str) -> str:
    """What absl or ml_collections say, in our words where theirs mislead."""
    if "Overriding config is not allowed" in line:
        return (
            "--config=FILE is for train: the settings are those of --workdir, and "
            "--config.SECTION.NAME=VALUE changes one"
        )
    if found := _NO_NUMBER.fullmatch(line):
        kind = "an integer" if found[3] else "a number"
        return f"{found[1]} must be {kind}, not {found[2]!r}"
    return line.removeprefix("flag --workdir=None: ")


def _others(argv: Sequence[str]) -> str:
    """Which settings the section of a misspelt one has, if a section is named."""
    for argument in argv:
        path = argument.lstrip("-").partition("=")[0].split(".")
        if path[0] != "config" or len(path) != 3 or path[1] not in SECTIONS:
            continue
        known = {item.name for item in dataclasses.fields(SECTIONS[path[1]])}
        if path[2] not in known:
            return f" ({path[1]} has {', '.join(sorted(known))})"
    return f" (the sections are {', '.join(SECTIONS)})"


def _innermost(error: Any) -> Any:
    """Return what a wrapped error says; as text, a KeyError would be quoted twice."""
    while isinstance(error, BaseException):
        error = error.args[0] if error.args else type(error).__name__
    return error
