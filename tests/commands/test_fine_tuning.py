"""Runs that begin with the parameters of another one."""

import json
import shutil

import jax
import numpy as np
import pytest
from command_line import TRAINED, assert_refused, metrics_of, train
from toy import BACKWARDS, examples
from trees import named

from transformer_jax.data import SOURCES, Example
from transformer_jax.inference import load_model
from transformer_jax.runs import open_run

# The learning rate of the first step is zero.
ONE_STEP = {**TRAINED, "train.steps": 1, "train.ema_decay": 0.9}
# One bucket: half as much to compile. Sums of other batches are rounded otherwise.
ONE_STEP |= {"data.bucket_lengths": "(8,)"}
TOLERANCE = 3e-6


def params_of(workdir, step, part="params"):
    run = open_run(workdir)
    with run.checkpoints(read_only=True) as checkpoints:
        wanted = {part: load_model(run).variables["params"]}
        restored = checkpoints.restore_entries(wanted, step=step)
    return named(jax.device_get(restored.state[part]))


@pytest.fixture(scope="module")
def tuned(data, trained, tmp_path_factory):
    """A run that begins with the best step of the trained one, and makes one step."""
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    called = train(data, workdir, f"--init_from={trained[0]}", **ONE_STEP)
    assert called.code == 0, called.err
    return workdir, called


def validation_loss(workdir, step):
    return dict(metrics_of(workdir, "validation_loss"))[step]


def test_fine_tuning_begins_where_the_other_run_was_best(trained, tuned):
    best = json.loads(trained[1].out)["best_step"]
    assert f"beginning with the parameters of {trained[0]}@{best}" in tuned[1].err
    assert json.loads(tuned[1].out)["step"] == 1
    np.testing.assert_allclose(
        validation_loss(tuned[0], 1), validation_loss(trained[0], best), rtol=TOLERANCE
    )
    record = json.loads((tuned[0] / "config.json").read_text())
    assert record["init_from"] == {"workdir": str(trained[0]), "step": best}
    for side in ("source.json", "target.json"):
        one, other = (run / "vocabulary" / side for run in (trained[0], tuned[0]))
        assert one.read_bytes() == other.read_bytes()


def test_moving_average_begins_with_those_parameters_too(trained, tuned):
    best = json.loads(trained[1].out)["best_step"]
    expected = params_of(trained[0], best)
    for part in ("params", "ema"):
        for name, leaf in params_of(tuned[0], 1, part=part).items():
            np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, err_msg=name)


def test_run_that_was_killed_before_it_saved_begins_there_again(data, tuned, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(tuned[0], workdir)
    shutil.rmtree(workdir / "checkpoints")
    assert train(data, workdir, **ONE_STEP).code == 0
    assert validation_loss(workdir, 1) == validation_loss(tuned[0], 1)


def test_another_step_can_be_named(data, trained, tmp_path):
    called = train(data, tmp_path, f"--init_from={trained[0]}@60", **ONE_STEP)
    assert called.code == 0, called.err
    np.testing.assert_allclose(
        validation_loss(tmp_path, 1), validation_loss(trained[0], 60), rtol=TOLERANCE
    )


def test_resuming_wins(data, tuned, tmp_path):
    """The other run may be gone by then."""
    workdir = tmp_path / "run"
    shutil.copytree(tuned[0], workdir)
    record = json.loads((workdir / "config.json").read_text())
    record["init_from"]["workdir"] = str(tmp_path / "gone")
    (workdir / "config.json").write_text(json.dumps(record))
    more = {**ONE_STEP, "train.steps": 2}
    flags = [f"--init_from={tmp_path / 'gone'}", "--allow_config_change=train.steps"]
    called = train(data, workdir, *flags, **more)
    assert called.code == 0, called.err
    assert called.err.count("--init_from is ignored") == 1
    assert "resuming at step 1" in called.err
    after = json.loads((workdir / "config.json").read_text())
    assert after["init_from"] == record["init_from"]


@pytest.mark.parametrize(
    ("origin", "changes", "words"),
    [
        ("{tmp}/none", {}, ["--init_from {tmp}/none names no run"]),
        ("{run}@77", {}, ["{run} has no step 77", "[60, 120]"]),
        (
            "{run}@60",
            {"model.width": 24},
            ["--init_from {run}@60", "params/", "16", "24", "config.json"],
        ),
        ("{run}", {"model.source_vocab": 9}, ["model.source_vocab", "8 symbols"]),
    ],
)
def test_what_cannot_be_begun_with_is_refused(
    data, trained, tmp_path, origin, changes, words
):
    names = {"tmp": tmp_path, "run": trained[0]}
    workdir, flag = tmp_path / "run", f"--init_from={origin.format(**names)}"
    called = train(data, workdir, flag, **{**ONE_STEP, **changes})
    complaint = assert_refused(called, *(word.format(**names) for word in words))
    assert complaint.count("\n") == 1
    assert list(workdir.glob("*")) == []


def test_run_of_other_vocabularies_is_refused(data, trained, copied):
    shutil.rmtree(copied / "checkpoints")
    path = copied / "vocabulary" / "source.json"
    vocabulary = json.loads(path.read_text())
    vocabulary["symbols"][-1] = "z"
    path.write_text(json.dumps(vocabulary))
    called = train(data, copied, f"--init_from={trained[0]}", **TRAINED)
    assert_refused(called, "has other vocabularies", copied, "--workdir")


def test_data_that_the_vocabulary_lacks_is_refused(trained, tmp_path, monkeypatch):
    def more(directory, split):
        return [*examples(directory, split), Example("e", ("E",))]

    monkeypatch.setitem(SOURCES, "backwards", BACKWARDS._replace(examples=more))
    called = train(
        tmp_path / "data", tmp_path / "run", f"--init_from={trained[0]}", **ONE_STEP
    )
    assert_refused(called, "--init_from", "cannot spell the data", "unknown symbol")
    assert list((tmp_path / "run").glob("*")) == []
