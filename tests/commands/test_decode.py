"""Strategies, n-best lists and JSON lines of `decode`, on the toy run."""

import json

import numpy as np
import pytest
from command_line import assert_refused
from toy import call, examples

BEAM = ("--config.decode.strategy=beam_search", "--config.decode.beam_size=5")
SAMPLE = ("--config.decode.strategy=sample", "--config.decode.temperature=2.0")
LINES = ["abc", "d", "", "abba", "xyz", "cab"]


def called_with(workdir, *flags, lines=LINES):
    called = call(
        "decode", f"--workdir={workdir}", *flags, stdin="\n".join(lines).encode()
    )
    assert called.code == 0, called.err
    return called


def parsed(workdir, *flags, lines=LINES):
    """One record a line, read by a parser that refuses NaN."""

    def refuse(constant):
        raise ValueError(constant)

    found = called_with(workdir, *flags, lines=lines).out.splitlines()
    assert len(found) == len(lines)
    return [json.loads(line, parse_constant=refuse) for line in found]


def test_beams_are_json_lines_best_first(trained):
    records = parsed(trained[0], "--nbest=4", *BEAM)
    for line, record in zip(LINES, records, strict=True):
        if line in ("", "xyz"):
            assert record["status"] == "INVALID"
            assert record["hypotheses"] == [
                {"text": "", "score": None, "status": "INVALID"}
            ]
            assert record["reason"]
            continue
        hypotheses = record["hypotheses"]
        assert 1 <= len(hypotheses) <= 4
        assert record["status"] == hypotheses[0]["status"]
        assert len({one["text"] for one in hypotheses}) == len(hypotheses)
        ended = [h["score"] for h in hypotheses if h["status"] in ("OK", "EMPTY")]
        assert ended == sorted(ended, reverse=True)
    # The best of the list is what a single output gives.
    plain = called_with(trained[0], *BEAM).out.splitlines()
    assert plain == [record["hypotheses"][0]["text"] for record in records]


def test_scores_of_a_beam_are_sums_over_the_penalty(trained):
    def scores(penalty, *flags):
        flags = (*BEAM, f"--config.decode.penalty={penalty}", *flags)
        found = parsed(trained[0], "--scores", *flags, lines=["abba"])
        (best,) = found[0]["hypotheses"]
        return best["score"], len(best["text"].split())

    total, length = scores("none")
    mean, other = scores("average", "--config.decode.alpha=1.0")
    assert length == other == 4
    np.testing.assert_allclose(mean, total / 5, rtol=1e-5)


def test_scores_make_json_lines_of_a_single_output(trained):
    records = parsed(trained[0], "--scores")
    plain = called_with(trained[0]).out.splitlines()
    assert [record["hypotheses"][0]["text"] for record in records] == plain
    assert all(len(record["hypotheses"]) == 1 for record in records)
    assert all(r["hypotheses"][0]["score"] < 0 for r in records if r["status"] == "OK")


def test_samples_depend_on_seed_and_line_number_alone(trained):
    def drawn(*flags, lines):
        return called_with(trained[0], *SAMPLE, *flags, lines=lines).out.splitlines()

    words = [example.source for example in examples("", "test")]
    found = drawn(lines=words + ["abba"] * 40)
    # The same word on another line is another draw.
    assert len({*found[len(words) :]}) > 10
    found = found[: len(words)]
    assert found == drawn("--config.decode.rows=8", lines=words)
    assert found != drawn("--config.decode.seed=1", lines=words)
    # A shorter input changes none.
    assert drawn(lines=words[:5]) == found[:5]
    best = parsed(trained[0], *SAMPLE, "--nbest=3", lines=words[:8])
    assert any(len({h["text"] for h in r["hypotheses"]}) > 1 for r in best)


def test_forbidden_symbols_and_least_length(trained):
    flags = ("--config.decode.forbidden=('A',)", "--config.decode.min_length=6")
    for strategy in ((), BEAM, SAMPLE):
        texts = called_with(trained[0], *flags, *strategy, lines=["abc", "aa"])
        for text in texts.out.splitlines():
            assert "A" not in text.split()
            assert len(text.split()) >= 6


def test_evaluate_takes_every_strategy(trained):
    for flags in ((), BEAM, SAMPLE):
        called = call("evaluate", f"--workdir={trained[0]}", *flags)
        assert called.code == 0, called.err
        result = json.loads(called.out)
        assert result["words"] == len(examples("", "test"))
        assert result["tokens_per_second"] > 0
        assert result["compilations"] >= 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nbest=2"], ["--nbest=2", "'greedy'", "beam_search or sample"]),
        (["--nbest=6", *BEAM], ["--nbest=6", "decode.beam_size=5"]),
        (["--nbest=0"], ["nbest"]),
        (
            ["--config.decode.top_k=3"],
            [
                *("decode.top_k does nothing", "'greedy'"),
                *("decode.strategy=sample", "set it to 0"),
            ],
        ),
        (
            ["--config.decode.temperature=0.5", *BEAM],
            ["decode.temperature does nothing", "'beam_search'"],
        ),
        (
            ["--config.decode.beam_size=5", *SAMPLE],
            ["decode.beam_size does nothing", "'sample'", "=beam_search"],
        ),
        (
            [*BEAM, "--config.decode.penalty=none", "--config.decode.alpha=1.0"],
            ["decode.alpha does nothing", "decode.penalty 'none'"],
        ),
        (["--config.decode.top_p=0.0"], ["decode.top_p", "between"]),
        (["--config.decode.temperature=0.0"], ["decode.temperature", "between"]),
        (["--config.decode.penalty=wu"], ["decode.penalty", "gnmt"]),
        (["--config.decode.min_length=8"], ["decode.min_length=8", "max_length=8"]),
        (["--config.decode.forbidden=('a',)"], ["decode.forbidden", "'a'", "A"]),
        (["--config.decode.forbidden=('<end>',)"], ["decode.forbidden", "'<end>'"]),
        (["--config.decode.forbidden=(1,'A')"], ["decode.forbidden", "in quotes"]),
        (["--config.decode.use_ema=true"], ["decode.use_ema", "train.ema_decay"]),
    ],
)
def test_impossible_settings_are_refused_in_one_line(trained, flags, words):
    called = call("decode", f"--workdir={trained[0]}", *flags, stdin=b"abc")
    assert_refused(called, *words)
