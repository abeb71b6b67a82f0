"""Saving under trouble: full disks, failures, kills, noise."""

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_state import AWAY, WANTED, abstract, assert_same, make_state
from trees import bits

from transformer_jax.checkpoints import CheckpointError, Checkpoints


@pytest.mark.parametrize("surfaces", ["wait", "save", "close"])
def test_full_disk_is_one_clear_line_and_loses_nothing(small_disk, capfd, surfaces):
    noise = jax.random.normal(jax.random.key(0), (1 << 18,))
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(small_disk, keep_latest=1))
        checkpoints.save(1, {"params": noise}, AWAY)
        checkpoints.wait()
        (small_disk / "ballast").write_bytes(b"x" * (3 << 19))
        checkpoints.save(2, {"params": noise + 1}, AWAY)
        with pytest.raises(CheckpointError) as raised:
            {
                "wait": checkpoints.wait,
                "save": lambda: checkpoints.save(3, {"params": noise + 2}, AWAY),
                "close": checkpoints.close,
            }[surfaces]()
        message = str(raised.value)
        assert f"step 2 in {small_disk}: no space left" in message
        assert "whole checkpoints there: [1]" in message
        assert "\n" not in message
    (small_disk / "ballast").unlink()
    with Checkpoints(small_disk, keep_latest=1) as checkpoints:
        restored = checkpoints.restore({"params": abstract(noise)})
        assert (restored.step, bits(restored.state["params"])) == (1, bits(noise))
        checkpoints.save(2, {"params": noise + 1}, AWAY)
        checkpoints.wait()
        assert checkpoints.steps() == [2]
    assert capfd.readouterr() == ("", "")


def refuse(*_):
    raise OSError("the cable is out")


WRITE = "transformer_jax.checkpoint_store.write_json"


def test_run_goes_on_after_a_failed_save(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, make_state(1), AWAY)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(WRITE, refuse)
            checkpoints.save(2, make_state(2), AWAY)
            with pytest.raises(CheckpointError, match=r"step 2 in .* cable is out"):
                checkpoints.wait()
        assert checkpoints.steps() == [1]
        checkpoints.save(2, make_state(2), AWAY)
        assert_same(checkpoints.restore(WANTED).state, make_state(2))
        assert checkpoints.steps() == [2]


def test_failed_save_does_not_hide_the_first_error(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(WRITE, refuse)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(1, make_state(1), AWAY)
        raise ZeroDivisionError
    (record,) = caplog.records
    assert "cannot save step 1" in record.getMessage()
    assert "the cable is out" in record.getMessage()


KILLED = """
import sys
import jax.numpy as jnp
from transformer_jax.checkpoints import Checkpoints

state = {"params": jnp.arange(1 << 20), "step": jnp.int32(0)}
with Checkpoints(sys.argv[1], keep_latest=2) as checkpoints:
    for step in range(1, 1000):
        state = {"params": state["params"] * 3 + step, "step": jnp.int32(step)}
        checkpoints.save(step, state, {"position": step})
        print(step, flush=True)
"""


def expected_params(step):
    values = np.arange(1 << 20, dtype=np.int32)
    for number in range(1, step + 1):
        values = values * 3 + number
    return values


def test_killed_run_goes_on_from_a_whole_step(tmp_path):
    # One process a kill; one at once, while the save that has just begun is written.
    cut_short = 0
    for number, (after, pause) in enumerate([(1, 0.0), (3, 0.0), (4, 0.05), (6, 0.11)]):
        directory = tmp_path / str(number)
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": ""},
        ) as process:
            for line in itertools.islice(process.stdout, after):
                begun = int(line)
            time.sleep(pause)
            process.kill()
            begun = int((process.stdout.read().split() or [begun])[-1])
            assert process.stderr.read() == ""
        assert process.returncode == -signal.SIGKILL
        assert begun >= after
        cut_short += any("tmp" in path.name for path in directory.iterdir())
        with Checkpoints(directory) as checkpoints:
            check_last_whole_step(checkpoints, begun)
            checkpoints.save(1000, {"params": jnp.arange(3)}, AWAY)
        assert all(path.name.isdecimal() for path in directory.iterdir())
    assert cut_short, "no kill fell into a save"


def check_last_whole_step(checkpoints, begun):
    wanted = {
        "params": jax.ShapeDtypeStruct((1 << 20,), jnp.int32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    restored = checkpoints.restore(wanted)
    if restored is None:
        assert begun <= 1
        return
    # A save begins when the one before it is complete, so at most one is lost.
    assert restored.step in (begun - 1, begun, begun + 1)
    assert int(restored.state["step"]) == restored.step
    assert restored.metadata == {"position": restored.step}
    assert (
        np.asarray(restored.state["params"]) == expected_params(restored.step)
    ).all()


def test_library_chatter_stays_away(tmp_path):
    script = (
        "import sys, jax.numpy as jnp\n"
        "from transformer_jax.checkpoints import Checkpoints\n"
        "with Checkpoints(sys.argv[1]) as checkpoints:\n"
        "    checkpoints.save(1, {'params': jnp.zeros(3)}, {})\n"
        "    checkpoints.restore({'params': jnp.ones(3)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_other_logs_of_absl_stay():
    logger = logging.getLogger("absl")
    Checkpoints("/nowhere", read_only=True)
    record = logger.makeRecord(
        "absl", logging.ERROR, "train.py", 1, "hear me", (), None
    )
    assert logger.filter(record)


def test_other_errors_of_threads_stay(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    Checkpoints(tmp_path, read_only=True)
    for text in ("Event loop is closed", "hear me"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(item.exc_value) for item in heard] == ["hear me"]


def test_directory_that_is_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot open .*/file") as raised:
        Checkpoints(tmp_path / "file" / "checkpoints")
    assert "\n" not in str(raised.value)
