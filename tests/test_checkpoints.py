"""A checkpoint comes back bit for bit, or is passed over, or says what is wrong."""

import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from saved_state import AWAY, WANTED, abstract, assert_same, make_state
from trees import bits

from transformer_jax.checkpoints import CheckpointError, Checkpoints

WANTED_PARAMS = {"params": WANTED["params"]}


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
            checkpoints.restore_entries(WANTED_PARAMS)
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
    wanted = {"params": abstract(array)}
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        for step in (1, 2, 3):
            restored = checkpoints.restore_entries(wanted, step=step)
            assert (np.asarray(restored.state["params"]) == step).all()


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
        restored = checkpoints.restore_entries(WANTED_PARAMS)
    assert_same(restored.state["params"], make_state(3)["params"])
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
        assert checkpoints.restore_entries(WANTED_PARAMS, step="best").step == 4
        assert checkpoints.restore(WANTED).step == 14


def test_keeps_as_many_of_the_best_as_are_asked_for(tmp_path):
    losses = [3.0, 1.0, 4.0, 2.0, 9.0, 8.0, 7.0]
    with Checkpoints(tmp_path, keep_latest=1, keep_best=3) as checkpoints:
        for step, loss in enumerate(losses, start=1):
            checkpoints.save(step, make_state(step), AWAY, metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 4, 7]
        assert checkpoints.best_steps(3) == [2, 4, 1]


def test_of_equally_good_steps_the_first_is_the_best_everywhere(tmp_path):
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        for step, loss in enumerate([2.0, 1.0, 1.0, 3.0], start=1):
            checkpoints.save(step, make_state(step), AWAY, metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.best_step() == 2
        assert checkpoints.best_steps(2) == [2, 3]
        assert checkpoints.restore_entries(WANTED_PARAMS, step="best").step == 2


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


def test_best_steps_are_those_that_have_a_metric_best_first(tmp_path):
    losses = {2: 3.0, 3: float("nan"), 5: 1.0, 7: None, 11: 2.0}
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        for step, loss in losses.items():
            metrics = {} if loss is None else {"loss": loss}
            checkpoints.save(step, make_state(step), AWAY, metrics=metrics)
        checkpoints.wait()
        assert checkpoints.best_steps(2) == [5, 11]
        assert checkpoints.best_steps(9) == [5, 11, 2]


def test_leaves_are_described_without_reading_them(copied):
    (copied / "3" / "metadata" / "metadata").write_text("{")
    with Checkpoints(copied, read_only=True) as checkpoints:
        leaves = checkpoints.leaves(2)
        assert leaves["params/layer/kernel"] == "float32[16, 3]"
        assert len(leaves) == len(jax.tree.leaves(make_state(2)))
        for step in (3, 4):
            with pytest.raises(CheckpointError, match=rf"/{step} cannot be read"):
                checkpoints.leaves(step)


def test_without_metrics_best_is_the_newest(whole):
    with Checkpoints(whole, read_only=True) as checkpoints:
        assert checkpoints.best_step() is None
        assert checkpoints.restore_entries(WANTED_PARAMS, step="best").step == 3


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
            checkpoints.restore_entries(WANTED_PARAMS).state["params"],
            make_state(2)["params"],
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
        pytest.raises(CheckpointError, match=r"has no step 7: it has \[1, 2, 3\]"),
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
            checkpoints.restore_entries({"params": state["params"]})
    assert caplog.records == []
