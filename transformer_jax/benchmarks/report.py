"""What a benchmark says while it runs, and on which machine."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax

VERSIONS = ("jax", "torch", "transformers", "ctranslate2")
# Work of others that spoils a measurement, in cores.
BUSY = 0.5


def say(line: str) -> None:
    """Write one line to standard error now."""
    print(line, file=sys.stderr, flush=True)


def say_row(columns: Sequence[str], row: dict[str, Any] | None = None) -> None:
    """Write one row of a table; without a row, its head."""
    cells = columns if row is None else [row.get(column, "") for column in columns]
    widths = [max(len(column), 16 if column == "system" else 8) for column in columns]
    say("  ".join(f"{cell!s:>{n}}" for cell, n in zip(cells, widths, strict=True)))


def machine() -> dict[str, Any]:
    """Describe the machine; complain when others are at work on it."""
    load = os.getloadavg()[0]
    if load > BUSY:
        say(f"this machine is busy (load {load:.1f}): wait, or the numbers mean little")
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "processor": _processor(),
        "cores": cores(),
        "device": jax.devices()[0].device_kind,
        "load_before": round(load, 2),
        "versions": versions,
    }


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        if found := re.search(r"model name\s*: (.*)", text):
            return found[1]
    return platform.processor() or platform.machine()
