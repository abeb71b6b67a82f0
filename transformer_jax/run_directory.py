"""A run's working directory: proven writable, written atomically, never mixed up."""

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from etils import epath

from transformer_jax.config import ConfigError

CONFIG_FILE = "config.json"
ABSENT = "absent"


def is_local(path: Any) -> bool:
    """Tell a path of this machine from an object store's, such as `gs://bucket`."""
    return "://" not in os.fspath(path)


def write_json(path: Any, value: Any) -> None:
    """Write `value` as JSON, whole or not at all; see `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Any, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one whole.

    Args:
        path: local file or `gs://` object; its folder exists.
        text: the contents.
    """
    path = epath.Path(path)
    if not is_local(path):  # An object appears when it is complete.
        path.write_text(text)
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(workdir: Any, *, flag: str = "--workdir") -> None:
    """Create the working directory and prove by writing that it can be written.

    Args:
        workdir: folder or `gs://` path.
        flag: what named it, for the message.

    Raises:
        ConfigError: it is no directory, cannot be created or cannot be written.
    """
    path = epath.Path(workdir)
    probe = path / f".writable-{uuid.uuid4().hex}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except Exception as error:  # Object stores have error classes of their own.
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(
            f"{flag} {path} cannot be written ({reason}): choose another one, or "
            "mend its permissions or its disk"
        ) from error


@contextlib.contextmanager
def exclusive(workdir: Any, *, flag: str = "--workdir") -> Iterator[None]:
    """Keep other writers out of a local directory; the lock dies with us.

    Args:
        workdir: folder or `gs://` path.
        flag: what named it, for the message.

    Raises:
        ConfigError: another process writes there.
    """
    path = epath.Path(workdir)
    if not is_local(path):
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        _lock(folder, path, flag)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: epath.Path, flag: str) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another process writes in {flag} {path}: wait for its end, or "
            "choose another one"
        ) from None


def one_line(error: Any) -> str:
    """Return what an error says as one line of bearable length."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 300 else line[:300] + "..."


def config_changes(saved: dict, now: dict) -> list[str]:
    """List what differs between two nested configurations, one line a key.

    Lists and tuples are equal, as JSON knows no tuples.

    Returns:
        lines such as `train.learning_rate: 0.001 -> 0.002`; a key that only one of
        them has is `absent` in the other.
    """
    old, new = _flat(saved), _flat(now)
    return [
        f"{key}: {old.get(key, ABSENT)} -> {new.get(key, ABSENT)}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def refuse_changes(saved: dict, now: dict, allowed: Collection[str]) -> None:
    """Raise unless the configuration is the saved one, up to the allowed keys.

    Args:
        saved: nested configuration of the run in the working directory.
        now: nested configuration of this start.
        allowed: keys such as `train.steps`, or whole sections such as `train`.

    Raises:
        ConfigError: another key differs; the message lists every such change and the
            flag that accepts them.
    """
    changes = {line.partition(":")[0]: line for line in config_changes(saved, now)}
    refused = {
        key: line
        for key, line in changes.items()
        if not any(key == name or key.startswith(f"{name}.") for name in allowed)
    }
    if refused:
        accept = ",".join(dict.fromkeys([*allowed, *refused]))
        raise ConfigError(
            "the configuration differs from the run in this working directory:\n  "
            + "\n  ".join(refused.values())
            + "\nundo the changes, choose another --workdir, or accept them with "
            f"--allow_config_change={accept}"
        )


def _flat(tree: dict, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON text."""
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{name}."))
        else:
            flat[name] = json.dumps(value)
    return flat
