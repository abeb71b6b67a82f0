"""`decode.use_ema`: decoding with the moving average of the parameters."""

import dataclasses
import json
import shutil

import jax
import pytest
from command_line import assert_refused, quick
from toy import call, examples
from trees import bits, named

from transformer_jax.checkpoints import Checkpoints
from transformer_jax.inference import load_model
from transformer_jax.runs import open_run

WORDS = "".join(f"{each.source}\n" for each in examples("", "train")).encode()
USE = "--config.decode.use_ema=true"


def average_of(workdir):
    """The moving average in the newest checkpoint, and that checkpoint's metadata."""
    run = open_run(workdir)
    with run.checkpoints(read_only=True) as checkpoints:
        wanted = load_model(run, step=None).variables["params"]
        return checkpoints.restore_entries({"ema": wanted})


@pytest.fixture(scope="module")
def swapped(with_ema, tmp_path_factory):
    """The same run, its parameters replaced by their average."""
    workdir = tmp_path_factory.mktemp("swapped") / "run"
    shutil.copytree(with_ema, workdir)
    shutil.rmtree(workdir / "checkpoints")
    restored = average_of(with_ema)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        state = {"params": restored.state["ema"]}
        checkpoints.save(restored.step, state, restored.metadata)
    return workdir


def decoded(workdir, *flags):
    called = call("decode", f"--workdir={workdir}", *flags, stdin=WORDS)
    assert called.code == 0, called.err
    return called.out


def evaluated(workdir, *flags):
    called = call("evaluate", f"--workdir={workdir}", *flags)
    assert called.code == 0, called.err
    result = json.loads(called.out)
    return {name: result[name] for name in ("wer", "per", "words", "step")}


def test_average_is_what_is_loaded(with_ema):
    run = open_run(with_ema)
    decode = dataclasses.replace(run.config.decode, use_ema=True)
    config = dataclasses.replace(run.config, decode=decode)
    expected = named(average_of(with_ema).state["ema"])
    plain = named(load_model(run).variables["params"])
    found = named(load_model(open_run(with_ema, config)).variables["params"])
    for name, leaf in jax.device_get(found).items():
        assert bits(leaf) == bits(expected[name]), name
    assert any(bits(plain[name]) != bits(leaf) for name, leaf in found.items())


def test_decode_and_evaluate_use_the_average_when_told(with_ema, swapped):
    assert decoded(with_ema, USE) == decoded(swapped)
    assert decoded(with_ema, USE) != decoded(with_ema)
    assert evaluated(with_ema, USE) == evaluated(swapped)


@pytest.mark.parametrize("command", ["decode", "evaluate"])
def test_run_without_an_average_is_refused(trained, command):
    called = call(command, f"--workdir={trained[0]}", USE)
    complaint = assert_refused(called, "decode.use_ema", "train.ema_decay")
    assert complaint.count("\n") == 1
    # What the flags say now was not said in training.
    later = "--config.train.ema_decay=0.9"
    assert_refused(call(command, f"--workdir={trained[0]}", USE, later), "use_ema")


def test_training_for_an_average_that_is_not_kept_is_refused(data, tmp_path):
    called = quick(data, tmp_path / "run", **{"decode.use_ema": "true"})
    assert_refused(called, "decode.use_ema", "train.ema_decay")
    assert not (tmp_path / "run").exists()
