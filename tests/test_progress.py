"""What a run tells: metrics once a step, a progress line that fits the terminal."""

import io
import itertools
import json
import os
from pathlib import Path

import pytest

from transformer_jax import progress
from transformer_jax.progress import MetricsFile, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 2


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves when it is told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_metrics_are_one_line_a_report(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", resumed_step=0)
    metrics.write(3, loss=0.5)
    metrics.write(5, loss=0.25, tokens=7)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "loss": 0.5},
        {"step": 5, "loss": 0.25, "tokens": 7},
    ]


@pytest.mark.parametrize(
    "damage", ['{"step": 4, "lo', "[]", "3", '{"loss": 1}', '{"step": null}', "\0\0"]
)
def test_resumed_metrics_keep_what_led_to_the_step(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    kept = ['{"step": 2, "loss": 1.0}', '{"step": 3, "loss": 0.5}']
    path.write_text("\n".join([*kept, '{"step": 5, "loss": 9.0}', damage]))
    MetricsFile(path, resumed_step=3).write(4, loss=0.25)
    assert path.read_text().splitlines() == [*kept, '{"step": 4, "loss": 0.25}']
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, resumed_step=0)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        metrics.write(1, loss=0.5)


def test_time_left_counts_the_steps_of_this_start(clock, capsys):
    shown = Progress(total=50)
    clock[0] += 1000  # Compiling is over before the first step.
    shown.begin(20)
    clock[0] += 20
    shown.show(30, "loss 1.5")
    assert capsys.readouterr().err == (
        "[############........] 30/50  loss 1.5  0:40 left\n"
    )
    clock[0] += 2 * 3600 - 20
    shown.show(40, "loss 1.5")
    assert capsys.readouterr().err.endswith("  1:00:00 left\n")


def test_terminal_line_is_redrawn_and_cut(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    size = os.terminal_size((30, 9))
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: size)
    shown = Progress(total=10)
    for step in (5, 10):
        shown.show(step, "a text longer than any terminal")
    shown.say("evaluated")
    shown.end()
    first, second, said, rest = (
        terminal.getvalue().replace("\r\033[K", "\n").split("\n")[1:]
    )
    assert len(first) == len(second) == 29
    assert first.startswith("[##########..........] 5/10")
    assert second.startswith("[####################] 10/10")
    # The drawn line is left before something else is said, and only once.
    assert (said, rest) == ("evaluated", "")


def test_bar_grows(clock, capsys):
    shown = Progress(total=7)
    for step in range(1, 8):
        shown.show(step, "")
    lines = capsys.readouterr().err.splitlines()
    bars = [line[1 : 1 + Progress.WIDTH] for line in lines]
    assert all(a.count("#") < b.count("#") for a, b in itertools.pairwise(bars))
    assert bars[-1] == "#" * Progress.WIDTH
