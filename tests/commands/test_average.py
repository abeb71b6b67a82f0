"""Averages of checkpoints: a model like any other, or one line that says why not."""

import json
import shutil

import jax
import numpy as np
import pytest
from command_line import TRAINED, assert_refused, damage, train
from toy import BACKWARDS, call
from trees import bits, named

from transformer_jax.checkpoints import Checkpoints
from transformer_jax.data import SOURCES
from transformer_jax.inference import load_model
from transformer_jax.runs import open_run, read_config

WORDS = "".join(f"{word}\n" for word in ("abc", "d", "bbad", "ca", "dacb")).encode()


def params_of(workdir, step):
    variables = load_model(open_run(workdir), step=step).variables
    return named(jax.device_get(variables))


@pytest.fixture(scope="module")
def averaged(trained, tmp_path_factory):
    """The mean of both checkpoints of the run, and what the command printed."""
    output = tmp_path_factory.mktemp("averaged") / "run"
    called = call(
        "average", f"--workdir={trained[0]}", f"--output={output}", "--last=2"
    )
    assert called.code == 0, called.err
    return output, json.loads(called.out)


def test_average_is_the_mean_of_the_parameters(trained, averaged):
    output, printed = averaged
    one, other = params_of(trained[0], 60), params_of(trained[0], 120)
    found = params_of(output, "best")
    assert found.keys() == one.keys()
    for name, leaf in found.items():
        expected = (np.float64(one[name]) + np.float64(other[name])) / 2
        assert leaf.dtype == one[name].dtype
        np.testing.assert_allclose(leaf, expected, rtol=2**-23, err_msg=name)
    parameters = sum(leaf.size for leaf in one.values())
    assert printed == {"step": 120, "steps": [60, 120], "parameters": parameters}


def test_average_is_evaluated_decoded_and_checked_like_a_run(
    averaged, monkeypatch, data
):
    output, _ = averaged
    called = call("evaluate", f"--workdir={output}")
    assert json.loads(called.out)["step"] == 120
    assert json.loads(called.out)["per"] < 50
    assert call("decode", f"--workdir={output}", stdin=WORDS).out.count("\n") == 5
    for name in {*SOURCES} - {"backwards"}:
        monkeypatch.delitem(SOURCES, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))
    called = call("check", f"--workdir={output}")
    assert json.loads(called.out) == {"ok": True, "wrong": []}, called.err


def test_average_says_where_it_comes_from(trained, averaged):
    output, _ = averaged
    record = json.loads((output / "config.json").read_text())
    expected = {"workdir": str(trained[0]), "steps": [60, 120]}
    assert record["average"] == expected
    with open_run(output).checkpoints(read_only=True) as checkpoints:
        assert checkpoints.steps() == [120]
        metadata = checkpoints.restore_entries(
            load_model(open_run(output)).variables
        ).metadata
    run = open_run(trained[0])
    assert metadata["averaged"] == [60, 120]
    assert metadata["vocabulary"] == run.vocabulary_hash
    assert metadata["data_position"] == 120
    assert metadata["data"]
    assert read_config(output) == read_config(trained[0])


def test_no_training_goes_on_from_an_average(data, averaged):
    output, _ = averaged
    assert_refused(
        train(data, output, **TRAINED),
        f"{output} holds an average",
        f"--init_from={output}",
    )


@pytest.mark.parametrize("selector", ["--best=1", "--steps={best}", "--last=1"])
def test_average_of_one_is_that_one(trained, tmp_path, selector):
    best = json.loads(trained[1].out)["best_step"]
    output = f"--output={tmp_path / 'one'}"
    called = call(
        "average", f"--workdir={trained[0]}", output, selector.format(best=best)
    )
    step = 120 if "last" in selector else best
    assert json.loads(called.out)["steps"] == [step]
    found, expected = params_of(tmp_path / "one", None), params_of(trained[0], step)
    for name, leaf in found.items():
        assert bits(leaf) == bits(expected[name]), name


def test_average_of_a_run_with_a_moving_average_has_none(with_ema, tmp_path):
    """Decoding with it would find nothing, so it is switched off."""
    shutil.copytree(with_ema, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    record["config"]["decode"]["use_ema"] = True
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    flags = [f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'new'}"]
    assert call("average", *flags, "--last=1").code == 0
    config = read_config(tmp_path / "new")
    assert (config.train.ema_decay, config.decode.use_ema) == (0, False)
    one, other = params_of(tmp_path / "new", None), params_of(with_ema, None)
    for name, leaf in one.items():
        assert bits(leaf) == bits(other[name]), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--last=N", "not none"]),
        (["--last=1", "--best=1"], ["--last=N", "not --last and --best"]),
        (["--last=1", "--steps=60"], ["not --last and --steps"]),
        (["--last=0"], ["--last=0", "positive"]),
        (["--best=-1"], ["--best=-1", "positive"]),
        (["--last=many"], ["last", "many"]),
        (["--last=3"], ["--last=3 wants 3", "has 2: [60, 120]", "train.keep_latest"]),
        (["--best=3"], ["--best=3 wants 3", "validation loss", "[60, 120]"]),
        (["--steps=60,77"], ["no step 77", "[60, 120]"]),
        (["--steps="], ["--steps", "1000,2000"]),
        (["--steps=60,,120"], ["--steps", "'60,,120'"]),
        (["--steps=60,60"], ["--steps", "different", "'60,60'"]),
        (["--steps=60,060"], ["--steps", "different", "'60,060'"]),
    ],
)
def test_bad_choice_is_refused(trained, tmp_path, flags, words):
    output = tmp_path / "new"
    called = call("average", f"--workdir={trained[0]}", f"--output={output}", *flags)
    assert_refused(called, *words)
    assert not output.exists()


def test_bad_directories_are_refused(trained, tmp_path):
    run = f"--workdir={trained[0]}"
    assert_refused(call("average", run, "--last=1"), "--output is missing")
    taken = call("average", run, f"--output={trained[0]}", "--last=1")
    assert_refused(taken, f"--output {trained[0]}", "holds a run already")
    none = call("average", f"--workdir={tmp_path}", "--output=new", "--last=1")
    assert_refused(none, tmp_path, "config.json is missing")
    (tmp_path / "file").write_text("mine")
    below = call("average", run, f"--output={tmp_path / 'file' / 'new'}", "--last=1")
    assert_refused(below, "--output", "Not a directory")


def test_checkpoints_of_different_shapes_are_refused(copied, tmp_path):
    state = jax.device_get(load_model(open_run(copied)).variables)
    state["params"]["extra"] = {"kernel": np.zeros((3, 5), np.float32)}
    with Checkpoints(tmp_path / "other") as checkpoints:
        checkpoints.save(3, state, {})
    shutil.copytree(tmp_path / "other" / "3", copied / "checkpoints" / "3")
    flags = [f"--workdir={copied}", f"--output={tmp_path / 'new'}"]
    called = call("average", *flags, "--steps=3,60")
    held = "params/extra/kernel is float32[3, 5] at step 3, but nothing at step 60"
    assert assert_refused(called, held, "--steps").count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["files.json", "metadata/metadata"])
def test_damaged_checkpoint_is_named(copied, tmp_path, name):
    damage(copied, f"checkpoints/60/{name}", "{")
    flags = [f"--workdir={copied}", f"--output={tmp_path / 'new'}"]
    called = call("average", *flags, "--last=2")
    assert_refused(called, copied / "checkpoints" / "60", "cannot be read", code=1)
    assert not (tmp_path / "new" / "config.json").exists()
    assert call("average", *flags, "--last=1").code == 0


def test_other_data_does_not_matter(trained, tmp_path, monkeypatch):
    def gone(directory, split):
        raise OSError(f"{directory} {split}")

    monkeypatch.setitem(SOURCES, "backwards", BACKWARDS._replace(examples=gone))
    flags = [f"--workdir={trained[0]}", f"--output={tmp_path / 'new'}"]
    assert call("average", *flags, "--last=2").code == 0


def test_what_a_failed_average_left_is_no_run(trained, tmp_path):
    output = tmp_path / "new"
    (output / "vocabulary").mkdir(parents=True)
    (output / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir(parents=True)
    flags = [f"--workdir={trained[0]}", f"--output={output}", "--last=1"]
    called = call("average", *flags)
    assert called.code == 0, called.err
    assert_refused(call("average", *flags), f"--output {output} holds a run already")
