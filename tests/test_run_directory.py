"""The working directory: changes refused, files whole, proven writable."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.run_directory import (
    config_changes,
    exclusive,
    refuse_changes,
    require_writable,
    write_json,
)


def test_config_changes_name_every_key():
    saved = {"train": {"rate": 0.001, "steps": 7, "old": "a"}, "data": {"sizes": [2]}}
    now = {"train": {"rate": 0.002, "steps": 7, "new": None}, "data": {"sizes": (2,)}}
    assert config_changes(saved, now) == [
        "train.new: absent -> null",
        'train.old: "a" -> absent',
        "train.rate: 0.001 -> 0.002",
    ]
    assert config_changes(saved, saved) == []


def test_changes_are_refused_unless_allowed():
    saved = {"train": {"rate": 1.0, "steps": 3}, "trainer": {"name": "a"}}
    now = {"train": {"rate": 2.0, "steps": 5}, "trainer": {"name": "a"}}
    refuse_changes(saved, now, ["train"])
    refuse_changes(saved, now, ["train.rate", "train.steps"])
    refuse_changes(saved, saved, [])
    with pytest.raises(ConfigError) as raised:
        refuse_changes(saved, now, ["train.rate", "trainer"])
    message = str(raised.value)
    assert "train.steps: 3 -> 5" in message
    assert "train.rate: " not in message
    accepted = message.partition("--allow_config_change=")[2].split(",")
    refuse_changes(saved, now, accepted)


def test_section_is_no_prefix_of_another():
    saved, now = {"trainer": {"name": "a"}}, {"trainer": {"name": "b"}}
    with pytest.raises(ConfigError, match=r"trainer\.name"):
        refuse_changes(saved, now, ["train"])


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_json(path, {"a": [1]})
    assert json.loads(path.read_text()) == {"a": [1]}

    def fail(_):
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        write_json(path, {"a": [2]})
    assert json.loads(path.read_text()) == {"a": [1]}
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]


def test_writable_directory_is_made_and_left_clean(tmp_path):
    require_writable(tmp_path / "runs" / "one")
    assert list((tmp_path / "runs").rglob("*")) == [tmp_path / "runs" / "one"]


@pytest.mark.parametrize("place", ["file", "file/below", "closed/run"])
def test_unwritable_directory_is_one_clear_line(tmp_path, place):
    (tmp_path / "file").write_text("")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    if place.startswith("closed") and os.access(closed, os.W_OK):
        command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", closed]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this user may write everywhere")
    try:
        with pytest.raises(ConfigError, match=r"--workdir .* cannot be written \(\w+"):
            require_writable(Path(tmp_path, place))
    finally:
        if closed.is_mount():
            subprocess.run(["umount", closed], check=True)


def test_one_process_at_a_time_trains_in_a_directory(tmp_path):
    with (
        exclusive(tmp_path),
        pytest.raises(ConfigError, match="another process writes in"),
        exclusive(tmp_path),
    ):
        pass
    with exclusive(tmp_path):
        assert not list(tmp_path.iterdir())
