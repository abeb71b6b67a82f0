"""A teacher's outputs: line by line, whole after any stop, and for whom they are."""

import hashlib
import json
import shutil

import pytest
from command_line import assert_refused, damage, quick
from toy import call, examples

from transformer_jax.commands import distill
from transformer_jax.data.distilled import Distillation
from transformer_jax.decoding import Status
from transformer_jax.inference import Hypothesis, Output, TrainedModel
from transformer_jax.runs import open_run

TRAIN = examples("", "train")
RATIO = "--max_ratio=1.2"


def distilled(workdir, output, *flags):
    return call("distill", f"--workdir={workdir}", f"--output={output}", *flags)


def contents(folder):
    """Both files, byte by byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines_of(folder):
    text = (folder / "outputs.txt").read_text()
    assert text.endswith("\n")
    return text.split("\n")[:-1]


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """A distillation of the trained run, and what was printed; to be read only."""
    folder = tmp_path_factory.mktemp("distilled") / "outputs"
    called = distilled(trained[0], folder, RATIO)
    assert called.code == 0, called.err
    return folder, called


@pytest.fixture
def taken(finished, tmp_path):
    """A copy to be damaged."""
    folder = tmp_path / "outputs"
    shutil.copytree(finished[0], folder)
    return folder


def test_lines_are_what_decode_gives_in_order(trained, finished):
    folder, called = finished
    words = "".join(f"{each.source}\n" for each in TRAIN).encode()
    plain = call("decode", f"--workdir={trained[0]}", "--scores", stdin=words)
    counts = {"ok": 0, "filtered": 0}
    lines = lines_of(folder)
    records = map(json.loads, plain.out.splitlines())
    for line, record, example in zip(lines, records, TRAIN, strict=True):
        status, text = record["status"], record["hypotheses"][0]["text"]
        sizes = sorted([len(example.source), len(text.split())])
        if status == "OK":
            kept = sizes[1] <= 1.2 * sizes[0]
            counts["ok" if kept else "filtered"] += 1
            assert line == (text if kept else "")
        else:
            name = status.lower()
            counts[name] = counts.get(name, 0) + 1
            assert line == ""
    assert min(counts.values()) > 0
    assert json.loads(called.out) == {"lines": len(TRAIN), **counts}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["lines"] == len(TRAIN)
    assert manifest["counts"] == counts
    assert manifest["filters"] == {"max_ratio": 1.2}
    assert manifest["decode"]["strategy"] == "greedy"
    assert manifest["teacher"]["step"] == json.loads(trained[1].out)["best_step"]
    assert manifest["rescorer"] is None
    data = (folder / "outputs.txt").read_bytes()
    assert manifest["outputs_sha256"] == hashlib.sha256(data).hexdigest()
    assert {path.name for path in folder.iterdir()} == {"outputs.txt", "manifest.json"}


@pytest.mark.parametrize("stop", [1, 3])
def test_what_was_stopped_goes_on_where_it_was(
    stop, trained, finished, tmp_path, monkeypatch
):
    """In its first chunk, or later; of a chunk half of which is on the disk."""
    folder, asked = tmp_path / "outputs", []
    decode = TrainedModel.decode

    def stopping(self, texts, *, first):
        asked.append((first, len(texts)))
        if len(asked) == stop:
            raise KeyboardInterrupt
        return decode(self, texts, first=first)

    monkeypatch.setattr(distill, "CHUNK", 50)
    monkeypatch.setattr(TrainedModel, "decode", stopping)
    called = distilled(trained[0], folder, RATIO)
    assert_refused(called, "interrupted", code=130)
    unfinished = json.loads((folder / "manifest.json").read_text())
    assert unfinished["complete"] is False
    assert sum(unfinished["counts"].values()) == 50 * (stop - 1)
    with (folder / "outputs.txt").open("ab") as file:
        file.write(b"half a li")
    # Other rows a batch change nothing.
    called = distilled(trained[0], folder, RATIO, "--config.decode.rows=16")
    assert called.out == finished[1].out
    # Each line once, by its number, on which samples depend.
    del asked[stop - 1]
    wanted = range(0, len(TRAIN), 50)
    assert asked == [(first, min(50, len(TRAIN) - first)) for first in wanted]
    assert contents(folder) == contents(finished[0])


def test_what_is_finished_stays_as_it_is(trained, taken, finished, monkeypatch):
    monkeypatch.setattr(TrainedModel, "decode", None)
    called = distilled(trained[0], taken, RATIO)
    assert (called.code, called.out) == (0, finished[1].out)
    assert contents(taken) == contents(finished[0])


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_damaged_outputs_are_made_anew(how, trained, taken, finished, tmp_path):
    """Training refuses them, and what it says helps."""
    path = taken / "outputs.txt"
    text = path.read_text()
    changed = {"cut": text[:-9], "changed": text.replace("A", "B", 1), "gone": None}
    damage(taken, "outputs.txt", changed[how])
    refused = quick(tmp_path, tmp_path / "run", **{"data.distilled": taken})
    assert_refused(refused, path)
    called = distilled(trained[0], taken, RATIO)
    assert "is damaged: beginning anew" in called.err
    assert called.out == finished[1].out
    assert contents(taken) == contents(finished[0])


@pytest.mark.parametrize("counts", [{"ok": 5}, {"ok": 5000}, {}])
def test_outputs_that_are_not_as_many_as_counted_are_made_anew(
    counts, trained, taken, finished
):
    """Not written once more behind what is there, nor called finished."""
    altered(taken, counts=counts)
    called = distilled(trained[0], taken, RATIO)
    assert "is damaged: beginning anew" in called.err
    assert called.out == finished[1].out
    assert contents(taken) == contents(finished[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": "12"},
        {"bytes": None},
        {"counts": None},
        {"counts": ["ok"]},
        {"counts": {"ok": "1"}},
        {"outputs_sha256": None},
    ],
)
def test_a_manifest_that_counts_nothing_is_damaged(changes, trained, taken):
    altered(taken, **changes)
    before = contents(taken)
    refused = distilled(trained[0], taken, RATIO)
    assert_refused(refused, "manifest.json is damaged", "delete")
    assert contents(taken) == before


def test_an_output_that_would_be_two_lines_is_none():
    """Of a symbol that holds a line break."""
    output = Output((Hypothesis("A\nB", Status.OK, -1.0),), "")
    assert distill._verdict(None, "ab", output, 9.0) == "filtered"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max_ratio=2"], ["another filters", "choose another folder"]),
        ([RATIO, "--checkpoint=60"], ["another teacher"]),
        ([RATIO, "--config.decode.min_length=1"], ["another decode"]),
        (["--max_ratio=0.5"], ["max_ratio"]),
        (["--max_ratio=nan"], ["--max_ratio must be finite, not nan"]),
        (["--max_ratio=inf"], ["--max_ratio must be finite, not inf", "1000"]),
    ],
)
def test_other_settings_are_refused_in_a_folder_that_was_begun(
    trained, finished, flags, words
):
    before = contents(finished[0])
    if "--checkpoint=60" in flags and json.loads(trained[1].out)["best_step"] == 60:
        flags = [RATIO, "--checkpoint=120"]
    assert_refused(distilled(trained[0], finished[0], *flags), *words)
    assert contents(finished[0]) == before


def test_folders_of_others_are_left_alone(trained, taken, tmp_path):
    assert_refused(call("distill", f"--workdir={trained[0]}"), "--output")
    assert_refused(distilled(trained[0], "gs://x/y"), "--output", "this machine")
    (taken / "manifest.json").unlink()
    before = contents(taken)
    assert_refused(distilled(trained[0], taken, RATIO), "holds other files")
    assert contents(taken) == before
    for text in ("{", "3"):
        (taken / "manifest.json").write_text(text)
        refused = distilled(trained[0], taken, RATIO)
        assert_refused(refused, "manifest.json is damaged", "delete")
    (tmp_path / "file").write_text("mine")
    assert_refused(distilled(trained[0], tmp_path / "file"), "--output")


# --- Students --------------------------------------------------------------------


def references_of(run):
    """What a run is trained on: the texts of each source's references."""
    cache = run.cache("train")
    found = [[] for _ in range(cache.num_examples)]
    for pair in range(cache.num_pairs):
        text = run.target_tokenizer.decode(cache.target(pair))
        found[cache.example_of(pair)].append(text)
    return found


@pytest.mark.parametrize("keep_raw", [False, True])
def test_a_student_is_trained_on_the_outputs(data, finished, tmp_path, keep_raw):
    """On the real references where there is no output, or on both."""
    settings = {"data.distilled": finished[0], "data.keep_raw": keep_raw}
    called = quick(data, tmp_path / "run", **settings)
    assert called.code == 0, called.err
    run = open_run(tmp_path / "run")
    found = references_of(run)
    for mine, line, example in zip(found, lines_of(finished[0]), TRAIN, strict=True):
        raw = [*example.references]
        if not line:
            assert mine == raw
        elif keep_raw:
            assert mine == [line, *(each for each in raw if each != line)]
        else:
            assert mine == [line]
    if not keep_raw:
        return
    # Outputs are for training alone.
    validation = run.cache("validation")
    references = [r for each in examples("", "validation") for r in each.references]
    assert validation.num_pairs == len(references)
    # Nor does decoding need them any more.
    saved = (tmp_path / "run" / "config.json").read_text()
    gone = saved.replace(str(finished[0]), str(tmp_path / "gone"))
    (tmp_path / "run" / "config.json").write_text(gone)
    called = call("evaluate", f"--workdir={tmp_path / 'run'}")
    assert called.code == 0, called.err


def altered(folder, **changes):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, ["is not finished", "transformer-jax distill"]),
        ({"complete": None}, ["manifest.json cannot be read", "distill once more"]),
        ({"outputs_sha256": None}, ["manifest.json cannot be read"]),
        ({"source": "cmudict"}, ["made of data.source 'cmudict', not 'backwards'"]),
        (
            {"teacher": {"vocabulary": "others"}},
            ["other vocabularies than this run", "trained on the same data"],
        ),
    ],
)
def test_students_refuse_outputs_that_are_not_for_them(
    data, taken, tmp_path, changes, words
):
    altered(taken, **changes)
    called = quick(data, tmp_path / "run", **{"data.distilled": taken})
    complaint = assert_refused(called, *words)
    assert complaint.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_a_teacher_was_trained_on_is_not_needed(data, taken, tmp_path, finished):
    """The sources are the same, and so is what the manifest says of them."""
    called = quick(data, tmp_path / "run", **{"data.distilled": taken})
    assert called.code == 0, called.err
    (taken / "manifest.json").unlink()
    called = distilled(tmp_path / "run", tmp_path / "second")
    assert called.code == 0, called.err
    first, second = (
        json.loads((folder / "manifest.json").read_text())
        for folder in (finished[0], tmp_path / "second")
    )
    assert first["data"] == second["data"]


def test_outputs_of_other_sources_are_refused(taken):
    found = Distillation(str(taken))
    assert len(found.examples(TRAIN, keep_raw=False)) == len(TRAIN)
    with pytest.raises(ValueError, match=f"{len(TRAIN)} lines for {len(TRAIN) - 1}"):
        found.examples(TRAIN[1:], keep_raw=False)
