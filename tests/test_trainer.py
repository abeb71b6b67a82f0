"""Training from end to end: stopped anywhere, it goes on bit for bit, or says why."""

import functools
import json
import random
import signal
import subprocess
import time

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import config_flags, metrics_of, started
from fake_tensorboard import install
from toy import prepared
from trees import bits

from transformer_jax import trainer
from transformer_jax.optimizers import make_optimizer
from transformer_jax.progress import MetricsFile
from transformer_jax.runs import open_run
from transformer_jax.sharding import make_mesh
from transformer_jax.training import abstract_state

# One bucket; dropout is on. Steps that save, evaluate and log fall apart.
SETTINGS = {
    "data.bucket_lengths": "(8,)",
    "train.steps": 8,
    "train.ema_decay": 0.6,
    "train.log_every": 1,
    "train.evaluate_every": 5,
    "train.save_every": 3,
}


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy")
    with prepared(directory):
        yield directory / "data"


def train(data, workdir, *flags, **changes):
    called = command_line.train(data, workdir, *flags, **{**SETTINGS, **changes})
    assert "Traceback" not in called.err
    return called


def training(data, workdir, **changes):
    """The same in a process of its own."""
    settings = config_flags(data, **{**SETTINGS, **changes})
    return started("train", *settings, f"--workdir={workdir}", text=True)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """A run that nothing interrupts; to be read only."""
    workdir = tmp_path_factory.mktemp("straight")
    called = train(data, workdir)
    assert called.code == 0, called.err
    return workdir


def restored(workdir):
    run = open_run(workdir)
    mesh = make_mesh(run.config.parallel)
    train = run.config.train
    wanted = abstract_state(
        run.model(), make_optimizer(train), mesh, ema=train.ema_decay > 0
    )
    return run.checkpoints(read_only=True).restore(wanted)


def assert_same_end(workdir, expected):
    """Step, parameters, optimiser and key are equal bit by bit."""
    found, wanted = restored(workdir), restored(expected)
    assert found.step == found.metadata["data_position"]
    assert found.step == wanted.step
    assert found.metadata["vocabulary"] == wanted.metadata["vocabulary"]
    leaves = jax.tree_util.tree_leaves_with_path(found.state)
    others = jax.tree.leaves(wanted.state)
    assert len(leaves) == len(others)
    for (path, leaf), other in zip(leaves, others, strict=True):
        assert bits(leaf) == bits(other), jax.tree_util.keystr(path)


def steps_of(workdir):
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


# --- Stopped and started again ---------------------------------------------------


def stop_after(monkeypatch, step, *signals):
    """Send signals as soon as a step is logged."""
    write = MetricsFile.write

    def written(self, number, **values):
        write(self, number, **values)
        if number == step and "loss" in values:
            for each in signals:
                signal.raise_signal(each)

    monkeypatch.setattr(MetricsFile, "write", written)


def test_run_stopped_twice_equals_the_straight_one(data, straight, tmp_path):
    # After the first step, told twice; and where it would save anyway.
    for step, signals in ((1, [signal.SIGTERM] * 2), (3, [signal.SIGINT])):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, step, *signals)
            called = train(data, tmp_path)
        assert (called.code, called.out) == (75, "")
        name = signals[0].name
        assert f"stopped by {name}, saved at step {step}" in called.err
        assert restored(tmp_path).step == step
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    called = train(data, tmp_path)
    assert called.code == 0, called.err
    assert "resuming at step 3" in called.err
    assert_same_end(tmp_path, straight)
    assert metrics_of(tmp_path) == metrics_of(straight)
    assert [step for step, _ in metrics_of(straight)] == [*range(1, 9)]
    state = restored(straight).state
    params, averages = (jax.tree.leaves(tree) for tree in (state.params, state.ema))
    assert any(map(lambda one, other: bits(one) != bits(other), params, averages))


def sending(function, number=1):
    """The function, told to stop at its n-th call."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    return wrapped


def evaluation_told_to_stop(*args):
    compiled = compile_losses(*args)
    return {bucket: sending(losses) for bucket, losses in compiled.items()}


compile_losses = trainer.compile_losses


@pytest.mark.parametrize(
    ("replacement", "saved"),
    [(sending(compile_losses), []), (evaluation_told_to_stop, [3, 5])],
    ids=["compiling", "evaluating"],
)
def test_stop_elsewhere_loses_nothing(
    data, straight, tmp_path, monkeypatch, replacement, saved
):
    monkeypatch.setattr(trainer, "compile_losses", replacement)
    called = train(data, tmp_path)
    assert (called.code, called.out) == (75, ""), called.err
    assert "stopped by SIGTERM" in called.err
    assert steps_of(tmp_path) == saved
    monkeypatch.undo()
    assert train(data, tmp_path).code == 0
    assert_same_end(tmp_path, straight)
    assert metrics_of(tmp_path) == metrics_of(straight)


def test_stop_before_compiling_does_not_compile(data, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "abstract_state", sending(trainer.abstract_state))
    called = train(data, tmp_path)
    assert (called.code, called.out) == (75, "")
    assert "stopped by SIGTERM at step 0, before anything was done" in called.err
    assert "compilations" not in called.err


def test_scalars_are_the_metrics_also_of_a_resumed_run(data, tmp_path, monkeypatch):
    made, settings = install(monkeypatch), {"train.tensorboard": "true"}
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert train(data, tmp_path, **settings).code == 75
    assert train(data, tmp_path, **settings).code == 0
    assert [each.settings["logdir"] for each in made] == [
        str(tmp_path / "tensorboard")
    ] * 2
    assert [each.settings["purge_step"] for each in made] == [1, 5]
    assert all(each.calls[-1] == "close" for each in made)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = [
        (name, value, report["step"])
        for report in map(json.loads, lines)
        for name, value in report.items()
        if name != "step"
    ]
    calls = [call for each in made for call in each.calls]
    assert [call for call in calls if isinstance(call, tuple)] == expected


def wait_for(condition, process):
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.001)


def test_terminated_process_exits_75_and_goes_on(data, tmp_path):
    long = {"train.steps": 3000, "train.evaluate_every": 3000}
    with training(data, tmp_path, **long) as process:
        metrics = tmp_path / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, process)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, ""), err
    step = restored(tmp_path).step
    assert f"saved at step {step}" in err
    assert 0 < step < 3000
    # Three steps more, so that it ends.
    more = {**long, "train.steps": step + 3}
    called = train(data, tmp_path, "--allow_config_change=train.steps", **more)
    assert called.code == 0, called.err
    assert f"resuming at step {step}" in called.err
    assert json.loads(called.out)["step"] == step + 3
    assert [step for step, _ in metrics_of(tmp_path)] == [*range(1, step + 4)]


@pytest.mark.slow
def test_killed_process_goes_on_bit_for_bit(data, tmp_path):
    changes = {"train.steps": 200, "train.save_every": 2, "train.evaluate_every": 50}
    assert train(data, tmp_path / "straight", **changes).code == 0
    workdir, draw = tmp_path / "killed", random.Random(7)
    saves = workdir / "checkpoints"
    cut_short = 0
    for number in range(5):
        before = restored(workdir).step if number else 0
        with training(data, workdir, **changes) as process:
            if number == 2:
                # A folder of another name is a save in progress.
                wait_for(lambda: any(map(unfinished, saves.iterdir())), process)
            else:
                wait_for(functools.partial(has_passed, workdir, before), process)
                time.sleep(draw.uniform(0, 0.3))
            process.kill()
            process.wait()
        cut_short += any(map(unfinished, saves.iterdir()))
        assert restored(workdir).step >= before
    assert cut_short, "no kill fell into a save"
    assert train(data, workdir, **changes).code == 0
    assert_same_end(workdir, tmp_path / "straight")
    assert metrics_of(workdir) == metrics_of(tmp_path / "straight")
    assert not any(map(unfinished, saves.iterdir()))


def has_passed(workdir, step):
    return any(saved > step for saved in steps_of(workdir))


def unfinished(path):
    return "tmp" in path.name


# --- Divergence and full disks ---------------------------------------------------


@pytest.mark.parametrize(
    ("save_every", "words", "saved"),
    [
        # The first step has a learning rate of zero, the second one explodes.
        (9, ["at step 3 the loss is", "8 rows of length 8 that begins with"], []),
        (
            1,
            ["after step 2 the norm of the parameters is inf"],
            [1],
        ),
    ],
)
def test_divergence_is_never_saved(data, tmp_path, save_every, words, saved):
    wild = {"train.learning_rate": 1e30, "train.save_every": save_every}
    called = train(data, tmp_path, **wild, **{"data.tokens_per_batch": 64})
    assert (called.code, called.out) == (1, "")
    complaint = called.err.splitlines()[-1]
    for word in [*words, "train.learning_rate"]:
        assert word in complaint
    assert steps_of(tmp_path) == saved
    if saved:
        leaves = jax.tree.leaves(restored(tmp_path).state.params)
        assert all(np.isfinite(leaf).all() for leaf in leaves)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert np.isfinite(json.loads(line)["loss"])


def test_validation_loss_that_is_no_number_ends_the_run(data, tmp_path, monkeypatch):
    def broken(*args):
        return {
            bucket: lambda params, batch: (jnp.nan, jnp.ones(()))
            for bucket in compile_losses(*args)
        }

    monkeypatch.setattr(trainer, "compile_losses", broken)
    called = train(data, tmp_path)
    assert (called.code, called.out) == (1, "")
    assert "after step 5 the validation loss is nan" in called.err.splitlines()[-1]
    assert steps_of(tmp_path) == [3]
    assert metrics_of(tmp_path, "validation_loss") == []


def test_full_disk_costs_one_save(data, straight, small_disk):
    # There is room for a few saves, but not for eight.
    many = {"train.save_every": 1, "train.keep_latest": 9}
    called = train(data, small_disk / "run", **many)
    assert (called.code, called.out) == (1, "")
    # Either a checkpoint or the metrics come first; both say where.
    complaint = called.err.splitlines()[-1]
    assert "no space left" in complaint.lower()
    assert str(small_disk / "run") in complaint
    last = restored(small_disk / "run").step
    remount = ["mount", "-o", "remount,size=9m", small_disk]
    subprocess.run(remount, check=True)
    called = train(data, small_disk / "run", **many)
    assert called.code == 0, called.err
    assert f"resuming at step {last}" in called.err
    assert_same_end(small_disk / "run", straight)
    assert metrics_of(small_disk / "run") == metrics_of(straight)


# --- Devices ---------------------------------------------------------------------


def test_losses_do_not_depend_on_the_number_of_devices(data, straight, tmp_path):
    assert train(data, tmp_path, **{"parallel.data": 8}).code == 0
    for name in ("loss", "gradient_norm", "validation_loss"):
        steps, values = zip(*metrics_of(tmp_path, name), strict=True)
        others, expected = zip(*metrics_of(straight, name), strict=True)
        assert steps == others
        np.testing.assert_allclose(values, expected, rtol=1e-5)
