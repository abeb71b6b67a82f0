"""What `check` finds in a sound run and in damaged ones."""

import json

import pytest
from command_line import damage
from toy import call

from transformer_jax.data import SOURCES


@pytest.fixture(autouse=True)
def no_other_data(data, monkeypatch):
    """The real data takes seconds to prepare."""
    for name in {*SOURCES} - {"backwards"}:
        monkeypatch.delitem(SOURCES, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))


def test_check_finds_nothing_wrong(trained):
    called = call("check", f"--workdir={trained[0]}")
    assert called.code == 0, called.err
    assert json.loads(called.out) == {"ok": True, "wrong": []}
    assert "checkpoints  [60, 120]" in called.err


def test_check_reads_every_checkpoint(copied):
    damage(copied, "checkpoints/60/files.json", None)
    called = call("check", f"--workdir={copied}")
    assert called.code == 1
    assert json.loads(called.out) == {"ok": False, "wrong": ["checkpoint 60"]}
    assert "checkpoint 120  can be read" in called.err


def test_check_names_what_is_wrong(copied):
    damage(copied, "vocabulary/source.json", "{")
    called = call("check", f"--workdir={copied}")
    assert called.code == 1
    assert json.loads(called.out) == {"ok": False, "wrong": ["working directory"]}
    assert "source.json" in called.err
    assert "Traceback" not in called.err
