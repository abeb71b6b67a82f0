"""The file `config.json` of a working directory: resolved settings, with versions."""

import contextlib
import json
import platform
from collections.abc import Iterator
from typing import Any

import flax
import jax
from etils import epath

import transformer_jax
from transformer_jax.config import Config, ConfigError, from_config_dict, to_dict
from transformer_jax.run_directory import CONFIG_FILE, write_json


def read_config(workdir: Any) -> Config:
    """Read the configuration in a working directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    record = read_record(workdir)
    with _whole_config(workdir):
        return from_config_dict(record["config"])


def write_config(workdir: epath.Path, config: Config, **provenance: Any) -> None:
    """Write the configuration with the versions of now, and how the run came about.

    Args:
        workdir: folder or `gs://` path.
        config: resolved.
        provenance: "init_from" of a run that began with another's parameters, or
            "average" of checkpoints, from which no run can go on.
    """
    record = {"config": to_dict(config), "versions": versions(), **provenance}
    write_json(workdir / CONFIG_FILE, record)


def read_record(workdir: Any) -> dict[str, Any]:
    """Read all that the file of the configuration says."""
    with _whole_config(workdir):
        path = epath.Path(workdir).expanduser() / CONFIG_FILE
        return {**json.loads(path.read_text())}


@contextlib.contextmanager
def _whole_config(workdir: Any) -> Iterator[None]:
    """Say in one line what is wrong with the file of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"{workdir} holds no run ({CONFIG_FILE} is missing): train one "
            "there first, or name another directory"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        path = epath.Path(workdir) / CONFIG_FILE
        raise ConfigError(f"{path} cannot be read ({error}): restore it") from error


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "transformer_jax": transformer_jax.__version__,
    }
