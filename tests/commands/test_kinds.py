"""Runs with other kinds of attention, and classifiers, from training to decoding."""

import json

import jax
import numpy as np
import pytest
from command_line import assert_refused, metrics_of, quick
from toy import call
from toy import examples as toy_examples
from trees import bits, named

from transformer_jax.data import SOURCES, Example, Source
from transformer_jax.inference import load_model
from transformer_jax.runs import open_run
from transformer_jax.types import KEPT

MODEL = {
    "model.encoder_attention": "routing(clusters=2)",
    "model.decoder_attention": "favor(features=6, redraw=2)",
    "model.cross_attention": "linformer(rank=3)",
    "model.max_positions": 8,
    "train.save_every": 1,
}


def kept_by(workdir, step=None):
    """What the model keeps besides its parameters, at the newest step."""
    return named(jax.device_get(load_model(open_run(workdir), step=step).variables))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("kinds") / "run"
    called = quick(data, workdir, **MODEL)
    assert called.code == 0, called.err
    return workdir


def test_what_attention_keeps_is_trained_saved_and_decoded_with(run):
    kept = {name: leaf for name, leaf in kept_by(run).items() if KEPT in name}
    ages = [leaf for name, leaf in kept.items() if name.endswith("age")]
    assert ages == [3]
    assert any(name.endswith("centroids") for name in kept)
    called = call("decode", f"--workdir={run}", stdin=b"abc\nd\n")
    assert (called.code, called.out.count("\n")) == (0, 2)


def test_a_run_goes_on_where_its_attention_was(run, data, tmp_path):
    """Six steps at once, and three after three, bit for bit."""
    change = "--allow_config_change=train.steps"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = {**MODEL, "train.schedule": "constant"}
    assert quick(data, whole, **flags, **{"train.steps": 6}).code == 0
    assert quick(data, parts, **flags).code == 0
    again = quick(data, parts, change, **flags, **{"train.steps": 6})
    assert again.code == 0, again.err
    others = kept_by(parts)
    for name, leaf in kept_by(whole).items():
        assert bits(leaf) == bits(others[name]), name


def test_average_and_fine_tuning_take_the_kept_along(run, data, tmp_path):
    averaged, tuned = tmp_path / "averaged", tmp_path / "tuned"
    called = call("average", f"--workdir={run}", f"--output={averaged}", "--last=2")
    assert called.code == 0, called.err
    before, after = kept_by(run), kept_by(averaged)
    for name, leaf in before.items():
        # Centroids and features are no parameters, whose mean would mean something.
        assert np.array_equal(after[name], leaf) == name.startswith(KEPT), name
    called = quick(data, tuned, f"--init_from={run}", **MODEL, **{"train.steps": 1})
    assert called.code == 0, called.err
    (name,) = (name for name in before if name.endswith("age"))
    assert kept_by(tuned)[name] == before[name] + 1


# --- Classification ----------------------------------------------------------------


# It has no decoder, so that its number of layers is the default.
CLASSIFIER = {"train.objective": "classification", "model.decoder_layers": 3}


def parities(directory, split):
    """Words, and whether they are of an even length."""
    return [
        Example(each.source, ("odd" if len(each.source) % 2 else "even",))
        for each in toy_examples(directory, split)
    ]


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.setitem(SOURCES, "parity", Source(parities, "characters", "symbols"))


def test_a_classifier_is_trained_evaluated_and_asked(parity, data, tmp_path):
    settings = {**CLASSIFIER, "data.source": "parity"}
    more = {"model.pooling": "cls", "train.steps": 40, "train.learning_rate": 0.01}
    workdir = tmp_path / "run"
    called = quick(data, workdir, **settings, **more)
    assert called.code == 0, called.err
    assert metrics_of(workdir, "validation_loss")[-1][1] < 0.6
    result = json.loads(call("evaluate", f"--workdir={workdir}").out)
    words = parities("", "test")
    odd = sum(each.references == ("odd",) for each in words)
    share = 100 * max(odd, len(words) - odd) / len(words)
    assert (result["examples"], result["majority"]) == (len(words), share)
    assert result["accuracy"] >= share
    asked = call("decode", f"--workdir={workdir}", "--nbest=9", stdin=b"abc\nabcd\n")
    assert (asked.code, asked.out.count("\n")) == (0, 2)
    for line in asked.out.splitlines():
        found = json.loads(line)["hypotheses"]
        assert {each["text"] for each in found} == {"odd", "even"}
        np.testing.assert_allclose(
            sum(np.exp(each["score"]) for each in found), 1, rtol=1e-5
        )


def test_targets_that_are_no_classes_are_refused(data, tmp_path):
    called = quick(data, tmp_path / "run", **CLASSIFIER)
    assert_refused(called, "training pairs have targets of other than one symbol")
