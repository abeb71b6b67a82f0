"""Settings of the whole suite, made before jax is imported.

Tests run on eight faked CPU devices, so that sharding is real everywhere; no test may
depend on another one, on the network or on the order of the draws.
"""

import os
import re
import subprocess
import sys

DEVICES = 8


def _environment() -> None:
    """Ask XLA for faked CPU devices, keeping whatever other flags are set."""
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set it up")
    flag = "--xla_force_host_platform_device_count"
    others = re.sub(rf"{flag}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    # Most of the suite's time is compilation: code may be slow, its maths is the same.
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{others} {fast} {flag}={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # A cache of executables from another machine would hide compilation errors.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


_environment()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# The same few examples on every machine: a failure seen once is seen again.
hypothesis.settings.register_profile(
    "suite", derandomize=True, max_examples=20, deadline=None, database=None
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture
def strict():
    """No silent change of dtype or rank: for tests of level 1, which is jax only."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", disk], check=True)
