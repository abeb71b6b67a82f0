"""Models that write all places at once, from training to n-best lists."""

import json

import numpy as np
import pytest
from command_line import assert_refused, damage, metrics_of, quick
from toy import BACKWARDS, LETTERS, call, examples

from transformer_jax.data import SOURCES, Example
from transformer_jax.inference import load_model
from transformer_jax.runs import open_run

# Objective -> how it is trained, and how it gives three hypotheses.
RUNS = {
    "parallel": (
        {"train.corruption": "glancing", "train.keep_start": 0.5},
        {"length_beam": 3},
    ),
    "overgenerate": ({}, {"length_beam": 3}),
    "mask_predict": (
        {"model.decoder_inputs": "mask", "model.length_from": "token"},
        {"length_beam": 3, "passes": 2},
    ),
    "ctc": (
        # Words of four equal letters do not fit.
        {
            "model.upsample": 1,
            "model.extra_slots": 2,
            "data.references": "all",
            "train.corruption": "glancing",
        },
        {"strategy": "ctc_beam_search", "beam_size": 3},
    ),
}
COMMON = {
    "train.steps": 60,
    "train.learning_rate": 0.01,
    "train.warmup": 10,
    "train.log_every": 20,
    "train.evaluate_every": 60,
    "train.save_every": 60,
    "model.dropout": 0.0,
    # One shape for all that is decoded.
    "decode.rows": 8,
}
LINES = ["abc", "d", "", "xyz", "abba", "cab"]


@pytest.fixture(scope="module")
def trained_as(data, tmp_path_factory):
    """Objective -> a run of it, made once, and what training it printed."""
    made = {}

    def trained(objective):
        if objective not in made:
            workdir = tmp_path_factory.mktemp(objective) / "run"
            settings = {"train.objective": objective, **COMMON, **RUNS[objective][0]}
            called = quick(data, workdir, **settings)
            assert called.code == 0, called.err
            made[objective] = workdir, called
        return made[objective]

    return trained


def words_of(split):
    return [each.source for each in examples("", split)]


def flags_of(objective):
    return [f"--config.decode.{k}={v}" for k, v in RUNS[objective][1].items()]


def decoded(workdir, *flags, lines=LINES):
    stdin = "\n".join(lines).encode()
    called = call("decode", f"--workdir={workdir}", *flags, stdin=stdin)
    assert called.code == 0, called.err
    return called.out.splitlines()


@pytest.mark.parametrize("objective", RUNS)
class TestEveryObjective:
    def test_training_lowers_the_loss_and_tells_what_cannot_be_learned(
        self, objective, trained_as
    ):
        workdir, called = trained_as(objective)
        result = json.loads(called.out)
        unfit_counts = {"unfit_pairs", "unfit_validation_pairs"}
        assert set(result) == {"step", "loss", "best_step", *unfit_counts}
        losses = [loss for _, loss in metrics_of(workdir)]
        assert losses[-1] == result["loss"] < 0.8 * losses[0]
        alike = [letter for letter in LETTERS if letter * 4 in words_of("train")]
        unfit = len(alike) if objective == "ctc" else 0
        assert unfit or objective != "ctc"
        assert result["unfit_pairs"] == unfit
        assert result["unfit_validation_pairs"] == 0
        said = "do not fit the canvas of model.upsample" in called.err
        assert said == (unfit > 0)

    def test_evaluation_counts_every_word(self, objective, trained_as):
        workdir, _ = trained_as(objective)
        called = call("evaluate", f"--workdir={workdir}", *flags_of(objective))
        assert called.code == 0, called.err
        result = json.loads(called.out)
        assert result["words"] == len(examples("", "test"))
        assert result["per"] < 90, "it must have learnt something"

    def test_lists_begin_with_what_a_single_output_is(self, objective, trained_as):
        workdir, _ = trained_as(objective)
        flags = flags_of(objective)
        records = [json.loads(x) for x in decoded(workdir, *flags, "--nbest=3")]
        assert len(records) == len(LINES)
        assert max(len(record["hypotheses"]) for record in records) == 3
        for line, record in zip(LINES, records, strict=True):
            assert (record["status"] == "INVALID") == (line in ("", "xyz"))
            hypotheses = record["hypotheses"]
            assert record["status"] == hypotheses[0]["status"]
            ended = [h["score"] for h in hypotheses if h["status"] in ("OK", "EMPTY")]
            assert ended == sorted(ended, reverse=True)
        best = [record["hypotheses"][0]["text"] for record in records]
        assert decoded(workdir, *flags) == best

    def test_a_finished_run_goes_on_only_as_it_was(self, objective, trained_as, data):
        workdir, called = trained_as(objective)
        settings = {"train.objective": objective, **COMMON, **RUNS[objective][0]}
        again = quick(data, workdir, **settings)
        assert (again.code, again.out) == (0, called.out)
        other = {**settings, "model.decoder_inputs": "soft_copy"}
        assert_refused(
            quick(data, workdir, **other), "model.decoder_inputs", "soft_copy"
        )
        changed = call("evaluate", f"--workdir={workdir}", "--config.model.upsample=2")
        assert_refused(changed, "model.upsample")


def test_another_model_chooses(trained_as, trained):
    """Among what the first one has, by scores of its own."""
    workdir, _ = trained_as("parallel")
    chooser = f"--config.decode.rescorer={trained[0]}"
    flags = [*flags_of("parallel"), "--nbest=3"]
    words = words_of("test")

    def lists(*flags):
        found = decoded(workdir, *flags, lines=words)
        return [json.loads(line)["hypotheses"] for line in found]

    plain, chosen = lists(*flags), lists(*flags, chooser)
    for before, after in zip(plain, chosen, strict=True):
        assert {h["text"] for h in before} == {h["text"] for h in after}
        scores = [h["score"] for h in after]
        assert scores == sorted(scores, reverse=True)
    best = [hypotheses[0]["text"] for hypotheses in chosen]
    assert best != [hypotheses[0]["text"] for hypotheses in plain]
    # Without a list it is the best of it.
    assert decoded(workdir, *flags[:-1], chooser, lines=words) == best


def test_choosers_that_cannot_choose_are_refused(trained_as, trained, copied, tmp_path):
    workdir, _ = trained_as("parallel")

    def refused(rescorer, *words):
        flags = f"--workdir={workdir}", f"--config.decode.rescorer={rescorer}"
        complaint = assert_refused(call("decode", *flags, stdin=b"abc"), *words)
        assert "decode.rescorer" in complaint
        assert complaint.count("\n") == 1

    refused(tmp_path / "none", "none", "config.json is missing")
    refused(trained_as("ctc")[0], "'ctc'", "name an autoregressive model")
    path = copied / "vocabulary" / "target.json"
    text = path.read_text()
    damage(copied, "vocabulary/target.json", text.replace('"D"', '"Z"'))
    refused(copied, "other vocabularies", "trained with the same ones")
    damage(copied, "vocabulary/target.json", text)
    # END would not have a place behind the longest output, or a source none.
    config = (copied / "config.json").read_text()
    learned = config.replace('"sinusoidal"', '"learned"')
    damage(copied, "config.json", learned.replace('ons": 512', 'ons": 8'))
    refused(copied, "model.max_positions=8", "need 9", "decode.max_length=8")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"train.objective": "ctc", "model.upsample": 1},
            ["training pairs do not fit the canvas", "raise one of these"],
        ),
        (
            {
                "train.objective": "parallel",
                "model.length_target": "absolute",
                "model.length_classes": 3,
            },
            ["have a length beyond those told apart", "raise model.length_classes"],
        ),
        ({"train.objective": "parallel", "data.references": "all"}, ["use each"]),
        ({"train.objective": "ctc", "train.length_weight": 0.5}, ["does nothing"]),
        ({"model.upsample": 2}, ["model.upsample does nothing", "'autoregressive'"]),
        ({"data.distilled": "nowhere"}, ["nowhere holds no distillation", "distill"]),
        ({"data.keep_raw": "true"}, ["data.keep_raw", "without data.distilled"]),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(data, tmp_path, settings, words):
    complaint = assert_refused(quick(data, tmp_path / "run", **settings), *words)
    assert complaint.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_steps_in_which_nothing_counts_have_no_loss(data, tmp_path):
    """All is wrong at first, so glancing shows all, and no symbol is left to learn."""
    settings = {
        "train.objective": "parallel",
        "train.corruption": "glancing",
        "train.keep_floor": 1.0,
        "train.log_every": 1,
        # One row.
        "data.tokens_per_batch": 8,
    }
    called = quick(data, tmp_path / "run", **settings)
    assert (called.code, "Traceback" in called.err) == (0, False), called.err
    losses = metrics_of(tmp_path / "run")
    assert len(losses) < len(metrics_of(tmp_path / "run", "gradient_norm")) == 3
    assert np.isfinite([loss for _, loss in losses]).all()
    last = losses[-1][1] if losses else None
    assert json.loads(called.out)["loss"] == last


@pytest.mark.parametrize("unfit", [1, 9])
def test_what_cannot_be_validated_is_counted_too(data, tmp_path, monkeypatch, unfit):
    """And refused where there is so much of it that the loss means little."""

    def harder(directory, split):
        added = [Example("a", ("A B C",))] * unfit
        return examples(directory, split) + added * (split == "validation")

    source = f"harder{unfit}"
    monkeypatch.setitem(SOURCES, source, BACKWARDS._replace(examples=harder))
    settings = {"train.objective": "overgenerate", "data.source": source}
    canvas = {"model.upsample": 1, "model.extra_slots": 1}
    called = quick(data, tmp_path / "run", **settings, **canvas)
    pairs = sum(len(each.references) for each in harder("", "validation"))
    said = f"{unfit} of {pairs} validation pairs do not fit the canvas"
    if unfit > 1:
        assert_refused(called, said)
        return
    assert called.code == 0, called.err
    assert said in called.err
    result = json.loads(called.out)
    assert (result["unfit_pairs"], result["unfit_validation_pairs"]) == (0, 1)


@pytest.mark.parametrize(
    ("objective", "flags", "words"),
    [
        ("parallel", ["--nbest=2"], ["decode.length_beam=1"]),
        ("ctc", ["--nbest=2"], ["'ctc_greedy'", "use ctc_beam_search"]),
        ("ctc", ["--config.decode.strategy=greedy"], ["cannot decode", "ctc_greedy"]),
        ("ctc", ["--config.decode.min_length=2"], ["min_length does nothing"]),
        ("mask_predict", ["--config.decode.passes=0"], ["decode.passes", "between"]),
        ("overgenerate", ["--config.decode.passes=3"], ["decode.passes does nothing"]),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_one_line(
    trained_as, objective, flags, words
):
    workdir, _ = trained_as(objective)
    called = call("decode", f"--workdir={workdir}", *flags, stdin=b"abc")
    complaint = assert_refused(called, *words)
    assert complaint.count("\n") == 1


def test_the_validation_loss_of_ctc_is_that_of_any_reference(trained_as):
    """Every example once, with all its references."""
    workdir, _ = trained_as("ctc")
    validated = dict(metrics_of(workdir, "validation_loss"))
    tokens = dict(metrics_of(workdir, "tokens"))
    assert [*validated] == [60]
    sizes = [
        np.mean([len(reference.split()) for reference in each.references])
        for each in examples("", "validation")
        if not (len(set(each.source)) == 1 and len(each.source) == 4)
    ]
    assert tokens[60] == pytest.approx(sum(sizes))
    assert load_model(open_run(workdir)).step == 60
