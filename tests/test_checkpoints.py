"""A checkpoint comes back bit for bit, or is passed over, or says what is wrong."""

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from transformer_jax.checkpoints import CheckpointError, Checkpoints
from transformer_jax.config import ConfigError
from transformer_jax.run_directory import (
    config_changes,
    refuse_changes,
    require_writable,
    write_json,
)

OPTIMIZER = optax.adamw(1e-2)
AWAY = {"note": "nothing to see"}


def make_state(step, vocabulary=7):
    """A state whose every number depends on the step."""
    key = jax.random.fold_in(jax.random.key(5), step)
    params = {
        "embedding": jax.random.normal(key, (vocabulary, 16)),
        "layer": {
            "bias": jnp.full((3,), step, jnp.bfloat16),
            "kernel": jax.random.normal(key, (16, 3)),
        },
    }
    optimizer = OPTIMIZER.init(params)
    return {
        "key": key,
        "opt_state": jax.tree.map(lambda leaf: leaf + step, optimizer),
        "params": params,
        "step": jnp.int32(step),
    }


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
        ),
        state,
    )


WANTED = abstract(make_state(0))


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.dtype == other.dtype
        assert bits(one) == bits(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory with the whole steps 1, 2 and 3, to be copied."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoints"
    with Checkpoints(directory, keep_latest=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), {"position": 10 * step})
    return directory


@pytest.fixture
def copied(whole, tmp_path):
    directory = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", whole, directory], check=True)
    return directory


# --- Round trips -----------------------------------------------------------------


def test_state_and_metadata_come_back_bit_for_bit(whole):
    with Checkpoints(whole, read_only=True) as checkpoints:
        restored = checkpoints.restore(WANTED)
        assert_same(restored.state, make_state(3))
        assert (restored.step, restored.metadata) == (3, {"position": 30})
        assert_same(checkpoints.restore(WANTED, step=2).state, make_state(2))


def test_empty_directory_gives_nothing_and_stays_as_it_is(tmp_path):
    with Checkpoints(tmp_path / "none", read_only=True) as checkpoints:
        assert checkpoints.restore(WANTED) is None
        assert checkpoints.steps() == []
        assert checkpoints.best_step() is None
        with pytest.raises(CheckpointError, match="train first"):
            checkpoints.restore_params(WANTED["params"])
        with pytest.raises(CheckpointError, match="reading only"):
            checkpoints.save(1, make_state(1), {})
    assert not (tmp_path / "none").exists()


def test_donated_buffers_do_not_reach_the_checkpoint(tmp_path):
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros((512, 1024))
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        for step in (1, 2, 3):
            array = advance(array)
            checkpoints.save(step, {"params": array}, AWAY)
        array = advance(array)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        for step in (1, 2, 3):
            restored = checkpoints.restore_params(abstract(array), step=step)
            assert (np.asarray(restored.state) == step).all()


def test_metadata_may_change_after_save(tmp_path):
    metadata = {"position": 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), metadata)
        metadata["position"] = 2
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.restore(WANTED).metadata == {"position": 1}


@pytest.mark.parametrize("back", [False, True], ids=["1-to-8", "8-to-1"])
def test_restores_onto_other_devices(tmp_path, back):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    one = SingleDeviceSharding(jax.devices()[3])
    eight = NamedSharding(mesh, PartitionSpec("data"))
    source, target = (eight, one) if back else (one, eight)
    array = jnp.arange(8 * 5, dtype=jnp.float32).reshape(8, 5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": jax.device_put(array, source)}, {})
        restored = checkpoints.restore({"params": abstract(array, target)})
    found = restored.state["params"]
    assert found.sharding == target
    assert bits(found) == bits(array)


def test_params_are_read_without_the_optimizer(whole):
    with Checkpoints(whole, read_only=True) as checkpoints:
        restored = checkpoints.restore_params(WANTED["params"])
    assert_same(restored.state, make_state(3)["params"])
    assert restored.metadata == {"position": 30}


# --- What is kept ----------------------------------------------------------------


def test_keeps_latest_best_and_multiples_over_restarts(tmp_path):
    losses = {2: float("nan"), 4: 1.0, 6: 5.0, 8: 3.0, 10: None, 12: 2.0, 14: 9.0}
    for step, loss in losses.items():
        with Checkpoints(tmp_path, keep_latest=2, keep_every=6) as checkpoints:
            metrics = {} if loss is None else {"loss": loss}
            checkpoints.save(step, make_state(step), AWAY, metrics=metrics)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [4, 6, 12, 14]
        assert checkpoints.best_step() == 4
        assert checkpoints.restore_params(WANTED["params"], step="best").step == 4
        assert checkpoints.restore(WANTED).step == 14


def test_best_moves_on_within_a_run(tmp_path):
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        for step, loss in enumerate([3.0, 2.0, 4.0, 1.0, 5.0], start=1):
            checkpoints.save(step, make_state(step), AWAY, metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5]
        assert checkpoints.best_step() == 4


def test_replaced_step_has_its_new_metric(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step, loss in ((1, 1.0), (2, 5.0)):
            checkpoints.save(step, make_state(step), AWAY, metrics={"loss": loss})
    data_file(tmp_path / "2").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best_step() == 1
        assert checkpoints.restore(WANTED).step == 1
        checkpoints.save(2, make_state(2), AWAY, metrics={"loss": 0.5})
        checkpoints.wait()
        assert checkpoints.best_step() == 2


def test_without_metrics_best_is_the_newest(whole):
    with Checkpoints(whole, read_only=True) as checkpoints:
        assert checkpoints.best_step() is None
        assert checkpoints.restore_params(WANTED["params"], step="best").step == 3


def test_saving_again_is_no_change_and_going_back_is_refused(copied):
    with Checkpoints(copied, keep_latest=9) as checkpoints:
        assert checkpoints.restore(WANTED, step=2).step == 2
        checkpoints.save(2, make_state(99), AWAY)
        for step in (3, 1):
            with pytest.raises(CheckpointError, match=r"holds step 3 and is ahead"):
                checkpoints.save(step, make_state(step), AWAY)
        checkpoints.save(4, make_state(4), AWAY)
        checkpoints.save(4, make_state(99), AWAY)
        assert_same(checkpoints.restore(WANTED).state, make_state(4))
        assert_same(checkpoints.restore(WANTED, step=2).state, make_state(2))


# --- Damage ----------------------------------------------------------------------


def data_file(step):
    return max(
        (path for path in step.glob("state/**/*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_folder(step):
    for path in sorted(step.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGE = {
    "no-data": (lambda step: data_file(step).unlink(), "is missing"),
    "half-data": (lambda step: os.truncate(data_file(step), 99), "has 99 bytes"),
    "one-bit": (lambda step: flip(data_file(step)), "checksum"),
    "no-record": (lambda step: (step / "metadata/metadata").unlink(), "is missing"),
    "wrong-record": (lambda step: flip(step / "metadata/metadata"), "checksum"),
    "no-tree": (lambda step: (step / "state/_METADATA").unlink(), "is missing"),
    "no-list": (lambda step: (step / "files.json").unlink(), "never finished"),
    "half-list": (lambda step: os.truncate(step / "files.json", 50), "cannot be read"),
    "empty": (empty_folder, "never finished"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_step_is_passed_over(copied, caplog, capfd, name):
    damage, reason = DAMAGE[name]
    damage(copied / "3")
    with Checkpoints(copied, keep_latest=2) as checkpoints:
        restored = checkpoints.restore(WANTED)
        assert_same(restored.state, make_state(2))
        assert_same(
            checkpoints.restore_params(WANTED["params"]).state, make_state(2)["params"]
        )
        with pytest.raises(CheckpointError, match=rf"{reason}.*has \[1, 2, 3\]"):
            checkpoints.restore(WANTED, step=3)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        for message in messages:
            assert f"{copied / '3'} cannot be read" in message
            assert reason in message
            assert "\n" not in message
        # The run goes on; what cannot be read takes no whole step's place.
        checkpoints.save(3, make_state(3), AWAY)
        assert_same(checkpoints.restore(WANTED).state, make_state(3))
        assert checkpoints.steps() == [2, 3]
        assert (copied / "unreadable-3").is_dir()
    assert capfd.readouterr() == ("", "")


def test_nothing_readable_is_an_error(copied, caplog):
    for step in (1, 2, 3):
        data_file(copied / str(step)).unlink()
    with (
        Checkpoints(copied, read_only=True) as checkpoints,
        pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"),
    ):
        checkpoints.restore(WANTED)
    assert len(caplog.records) == 3


def test_missing_step_is_an_error(whole):
    with (
        Checkpoints(whole, read_only=True) as checkpoints,
        pytest.raises(CheckpointError, match=r"/7 cannot be read.*has \[1, 2, 3\]"),
    ):
        checkpoints.restore(WANTED, step=7)


def test_unfinished_save_is_no_step_and_is_removed(copied):
    left = copied / "9.orbax-checkpoint-tmp"
    subprocess.run(["cp", "-r", copied / "3", left], check=True)
    with Checkpoints(copied, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
        assert checkpoints.restore(WANTED).step == 3
    assert left.exists()
    with Checkpoints(copied, keep_latest=9) as checkpoints:
        checkpoints.save(4, make_state(4), AWAY)
        assert_same(checkpoints.restore(WANTED).state, make_state(4))
    assert not left.exists()


# --- Another model ---------------------------------------------------------------


def other_type(state):
    state["params"]["embedding"] = state["params"]["embedding"].astype(jnp.bfloat16)
    return state


def extra_leaf(state):
    state["params"]["layer"]["scale"] = jnp.ones((3,))
    return state


def missing_leaf(state):
    del state["params"]["layer"]["bias"]
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda _: make_state(0, vocabulary=11),
            r"holds float32\[7, 16\] for .*embedding, .* wants float32\[11, 16\]",
        ),
        (other_type, r"float32\[7, 16\] for params/embedding.* bfloat16\[7, 16\]"),
        (extra_leaf, r"holds nothing for params/layer/scale.* float32\[3\]"),
        (missing_leaf, r"holds bfloat16\[3\] for params/layer/bias.* wants nothing"),
    ],
    ids=["shape", "type", "extra", "missing"],
)
def test_another_model_is_refused_at_its_first_leaf(whole, caplog, change, message):
    state = abstract(change(make_state(0)))
    with Checkpoints(whole, read_only=True) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(state)
        with pytest.raises(CheckpointError, match=r"params/\w+"):
            checkpoints.restore_params(state["params"])
    assert caplog.records == []


# --- Full disks, kills, closed directories ---------------------------------------


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


# --- The working directory -------------------------------------------------------


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
