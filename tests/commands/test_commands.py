"""What the commands do, from end to end, on a toy data set."""

import codecs
import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import (
    TRAINED,
    assert_refused,
    metrics_of,
    started,
    train,
)
from toy import call, examples

from transformer_jax.__main__ import main
from transformer_jax.decoding import Status
from transformer_jax.inference import Hypothesis, Output, TrainedModel, load_model
from transformer_jax.metrics import ErrorRates
from transformer_jax.runs import open_run

# Good and bad lines for `decode`, with what is said of the bad ones.
GOOD = [b"abc", b"d", b"ABCD", b"bbad", b"ca", b"abc\r"]
BAD = {
    b"": "INVALID empty",
    b"   ": "INVALID empty",
    b"\t": "INVALID empty",
    b"\r": "INVALID empty",
    b"abcdabcda": "INVALID 9 symbols",
    b"ab" * 5000: "INVALID 10000 characters",
    "\N{GRINNING FACE}".encode(): "INVALID unknown symbol",
    "a\N{HEBREW LETTER ALEF}b".encode(): "INVALID unknown symbol",
    "a\N{LINE SEPARATOR}b".encode(): "INVALID unknown symbol",
    "a\N{NEXT LINE}b".encode(): "INVALID unknown symbol",
    b"ab\0c": "INVALID unknown symbol",
    b"a\tb": "INVALID unknown symbol",
    b"a\x0bb": "INVALID unknown symbol",
    b"a\x1cb": "INVALID unknown symbol",
    b"a\rb": "INVALID unknown symbol",
    b"abc\r\r": "INVALID unknown symbol",
    b"abxc": "INVALID unknown symbol",
    b"<pad>": "INVALID unknown symbol",
    b"ab\xff": "INVALID no UTF-8 at byte 3",
    b"\xed\xa0\x80": "INVALID no UTF-8 at byte 1",
}


def test_train_prints_one_line_and_fills_the_working_directory(trained):
    workdir, called = trained
    assert called.code == 0, called.err
    assert called.out.count("\n") == 1
    result = json.loads(called.out)
    assert set(result) == {"step", "loss", "best_step"}
    assert result["step"] == 120
    assert result["best_step"] in (60, 120)
    # Two buckets, each once for training and once for evaluation.
    assert "4 compilations (2 training, 2 evaluation)" in called.err
    files = {"config.json", "vocabulary", "checkpoints", "metrics.jsonl"}
    assert {path.name for path in workdir.iterdir()} == files
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["config"]["model"]["source_vocab"] == 4 + 4
    assert {"python", "jax", "flax", "transformer_jax"} == set(saved["versions"])


def test_metrics_tell_of_every_report_once_in_order(trained):
    workdir, called = trained
    losses = metrics_of(workdir)
    assert [step for step, _ in losses] == [30, 60, 90, 120]
    assert losses[-1][1] == json.loads(called.out)["loss"] < losses[0][1]
    validated = dict(metrics_of(workdir, "validation_loss"))
    assert set(validated) == {60, 120}
    best = min(validated, key=validated.get)
    assert best == json.loads(called.out)["best_step"]
    # Every pair once: its symbols and an END.
    references = [r for each in examples("", "validation") for r in each.references]
    counted = {tokens for _, tokens in metrics_of(workdir, "tokens")}
    assert counted == {sum(len(r.split()) + 1 for r in references)}


def test_validation_loss_is_the_mean_over_all_symbols(trained):
    """Pair by pair from the saved parameters, in NumPy."""
    workdir = trained[0]
    run = open_run(workdir)
    variables, cache = load_model(run, step=60).variables, run.cache("validation")
    vocabulary = run.target_tokenizer.vocabulary
    owners = [cache.example_of(pair) for pair in range(cache.num_pairs)]
    source, lengths = cache.padded_sources(np.array(owners), 5, 0)
    ends = [[*cache.target(p), vocabulary.end_id] for p in range(cache.num_pairs)]
    inputs = np.full((len(ends), 5), vocabulary.pad_id)
    for row, symbols in zip(inputs, ends, strict=True):
        row[: len(symbols)] = [vocabulary.bos_id, *symbols[:-1]]
    apply = jax.jit(run.model().apply)
    logits = np.float64(apply(variables, source, lengths, inputs))
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    picked = [
        log_probs[p, t, s] for p, row in enumerate(ends) for t, s in enumerate(row)
    ]
    validated = dict(metrics_of(workdir, "validation_loss"))
    np.testing.assert_allclose(validated[60], -np.mean(picked), rtol=1e-5)


def test_finished_run_has_nothing_to_do(data, trained, copied):
    before = (copied / "metrics.jsonl").read_bytes()
    again = train(data, copied, **TRAINED)
    assert (again.code, again.out) == (0, trained[1].out)
    assert "compilations" not in again.err
    assert again.err.splitlines()[-1] == "nothing left to do: step 120 is reached"
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_finished_run_is_extended_when_that_is_allowed(data, copied):
    more = {**TRAINED, "train.steps": 125}
    complaint = assert_refused(train(data, copied, **more), "train.steps: 120 -> 125")
    flag = "--allow_config_change=train.steps"
    assert flag in complaint
    called = train(data, copied, flag, **more)
    assert json.loads(called.out)["step"] == 125
    assert [step for step, _ in metrics_of(copied)] == [30, 60, 90, 120, 125]


@pytest.mark.parametrize("allowed", ["train.learning_rate", "train"])
def test_changed_setting_is_accepted_by_name_or_section(data, copied, allowed):
    changed = {**TRAINED, "train.learning_rate": 0.5}
    assert_refused(train(data, copied, **changed), "train.learning_rate: 0.01 -> 0.5")
    called = train(data, copied, f"--allow_config_change={allowed}", **changed)
    assert called.code == 0, called.err
    saved = json.loads((copied / "config.json").read_text())
    assert saved["config"]["train"]["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("setting", "value"), [("optimizer", "sgd"), ("ema_decay", 0.9)]
)
def test_what_decides_what_is_kept_cannot_change(data, copied, setting, value):
    """No flag is offered that could not help."""
    changed = {**TRAINED, f"train.{setting}": value}
    called = train(data, copied, "--allow_config_change=train", **changed)
    complaint = assert_refused(called, f"train.{setting} was", f"--init_from={copied}")
    assert "--allow_config_change" not in complaint


def test_evaluate_counts_every_example_once(trained):
    workdir = trained[0]
    called = call("evaluate", f"--workdir={workdir}", "--samples=5")
    assert called.code == 0, called.err
    result = json.loads(called.out)
    model = load_model(open_run(workdir))
    rates = ErrorRates()
    test = examples("", "test")
    # One at a time: neither batches nor chunks are those of the command.
    for example, output in zip(
        test, [model.decode([each.source])[0] for each in test], strict=True
    ):
        rates.add(output.text.split(), [r.split() for r in example.references])
    expected = rates.result()
    assert expected["words"] == len(test) == result["words"]
    assert {name: result[name] for name in expected} == expected
    assert 0 < result["wer"] < 90, "the toy run must have learnt some words, not all"
    assert (result["split"], result["step"]) == ("test", model.step)
    table = called.err.splitlines()[-6:]
    assert table[0].split() == ["source", "reference", "prediction"]


def decoded(workdir, stdin, *flags):
    called = call("decode", f"--workdir={workdir}", *flags, stdin=stdin)
    assert called.code == 0, called.err
    *said, summary = called.err.splitlines()
    assert called.out == "" or called.out.endswith("\n")
    return called.out.split("\n")[:-1], said, json.loads(summary)


def test_hostile_lines_keep_their_places(trained):
    workdir = trained[0]
    kinds = [*GOOD, *BAD]
    lines = [kinds[(7 * number) % len(kinds)] for number in range(2000)]
    alone = {line: decoded(workdir, line)[0] for line in GOOD}
    texts, said, summary = decoded(workdir, b"\n".join(lines))
    assert len(texts) == summary["lines"] == 2000
    spoken = dict(line.removeprefix("line ").split(": ", 1) for line in said)
    for number, (line, text) in enumerate(zip(lines, texts, strict=True), 1):
        if line in BAD:
            assert text == ""
            assert spoken[str(number)].startswith(BAD[line])
        else:
            assert [text] == alone[line]
    assert summary["invalid"] == sum(line in BAD for line in lines)
    counted = sum(v for k, v in summary.items() if k not in ("lines", "step"))
    assert counted == 2000
    assert set(alone[b"abc"]) == set(alone[b"abc\r"])
    assert any(alone.values())


def test_results_do_not_depend_on_batches_devices_or_the_way_in(trained, tmp_path):
    workdir = trained[0]
    lines = b"\n".join([*examples_of("test")[:30], b"", b"?"])
    expected = decoded(workdir, lines)
    for flags in (
        ["--config.decode.rows=7"],
        ["--config.decode.rows=1", "--config.parallel.data=8"],
        # Other mates in every batch, and other padding.
        ["--config.data.bucket_lengths=(8,)"],
    ):
        assert decoded(workdir, lines, *flags) == expected, flags
    backwards = b"\n".join(lines.split(b"\n")[::-1])
    assert decoded(workdir, backwards)[0] == expected[0][::-1]
    (tmp_path / "words.txt").write_bytes(lines + b"\n")
    assert decoded(workdir, b"", f"--input={tmp_path / 'words.txt'}") == expected
    assert decoded(workdir, codecs.BOM_UTF8 + lines) == expected


def examples_of(split):
    return [example.source.encode() for example in examples("", split)]


def test_line_break_in_an_output_does_not_make_two_lines(trained, monkeypatch):
    output = Output((Hypothesis("x\ny", Status.OK, 0.0),), "")
    monkeypatch.setattr(
        TrainedModel, "decode", lambda _, texts, first: [output] * len(texts)
    )
    assert decoded(trained[0], b"a\nab")[:2] == (["x y"] * 2, [])


def test_longest_source_is_decoded_and_one_symbol_more_is_not(trained):
    texts, said, _ = decoded(trained[0], b"abcdabcd\nabcdabcda")
    assert (bool(texts[0]), texts[1]) == (True, "")
    assert said[-1].startswith("line 2: INVALID 9 symbols")
    assert "decode.max_source_length=8" in said[-1]


def test_nothing_in_is_nothing_out(trained):
    for nothing in (b"", codecs.BOM_UTF8):
        summary = {"lines": 0, "step": step_of(trained)}
        assert decoded(trained[0], nothing) == ([], [], summary)


def step_of(trained):
    return json.loads(trained[1].out)["best_step"]


def test_checkpoint_is_chosen(trained):
    workdir = trained[0]
    for name, step in (("latest", 120), ("60", 60), ("best", step_of(trained))):
        assert decoded(workdir, b"", f"--checkpoint={name}")[2]["step"] == step


def test_pipe_is_answered_line_by_line(trained):
    with started("decode", f"--workdir={trained[0]}") as process:
        answers = []
        for line in (b"abc\n", b"?\n", b"d\n"):
            process.stdin.write(line)
            process.stdin.flush()
            # Blocks for ever if the answer waits for more lines: pytest ends it.
            answers.append(process.stdout.readline().decode())
        out, err = process.communicate(timeout=60)
    assert out == b""
    assert process.returncode == 0, err
    assert answers == [f"{t}\n" for t in decoded(trained[0], b"abc\n?\nd\n")[0]]


def test_reader_that_leaves_is_no_accident(trained):
    with started("decode", f"--workdir={trained[0]}") as process:
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write(b"d\n" * 99)
        process.stdin.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert err.splitlines()[-1].startswith("transformer-jax decode: ")


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("end", ["interrupt", "closed output"])
def test_standard_input_that_stays_open_keeps_nobody(trained, end):
    with started("decode", f"--workdir={trained[0]}") as process:
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        assert process.stdout.readline()
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
            process.stdin.write(b"d\n")
            process.stdin.flush()
        # Blocks for ever if it waits for the end of its input: pytest ends it.
        code, err = process.wait(60), process.stderr.read().decode()
    assert code == (130 if end == "interrupt" else 1)
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("transformer-jax decode: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_under_standard_output_is_reported(trained):
    with open("/dev/full", "w") as full:
        process = started("decode", f"--workdir={trained[0]}", stdout=full)
        err = process.communicate(b"abc\n", timeout=60)[1].decode()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "No space left" in err.splitlines()[-1]


def test_closed_standard_input_is_refused(trained, monkeypatch):
    monkeypatch.setattr("toy.main", without_stdin)
    called = call("decode", f"--workdir={trained[0]}")
    assert_refused(called, "standard input is closed", "--input")


def without_stdin(arguments):
    """Python has no stream where the file descriptor is closed."""
    sys.stdin = None
    return main(arguments)


def test_status_names_leave_the_other_words_of_the_summary():
    assert {status.name.lower() for status in Status}.isdisjoint({"lines", "step"})
