"""What `--help` prints: read without importing a command, and with it jax."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.config import SECTIONS

# Commands that take the settings of `config.py` as flags.
WITH_SETTINGS = ("train", "evaluate", "decode", "check")


def summary_of(command: str) -> str:
    """Return the first line of a command's help, without its name."""
    return _docstring(command).splitlines()[0].partition(": ")[2]


def help_of(command: str) -> str:
    """Return a command's help, and the settings if it takes them."""
    text = _docstring(command)
    if command in WITH_SETTINGS:
        text = "\n".join([text, "", "Settings and their defaults:", *_settings()])
    return text


def _docstring(command: str) -> str:
    source = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source))


def _settings() -> Iterator[str]:
    """One line a setting: its flag, its default, what is legal."""
    for section, record in SECTIONS.items():
        for item in dataclasses.fields(record):
            yield f"  --config.{section}.{item.name}={item.default}{_legal(item)}"


def _legal(item: dataclasses.Field) -> str:
    rule = item.metadata
    if "choices" in rule:
        return f"  ({', '.join(rule['choices'])})"
    if "high" in rule:
        return f"  ({rule['low']} to {rule['high']})"
    return f"  (at least {rule['low']})" if "low" in rule else ""
