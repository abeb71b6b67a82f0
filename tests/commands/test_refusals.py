"""What the commands refuse: one clear line, the right exit code, nothing lost."""

import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from command_line import (
    ROOT,
    TOY,
    TRAINED,
    assert_refused,
    damage,
    quick,
    train,
)
from toy import BACKWARDS, call, examples

from transformer_jax import __version__
from transformer_jax.commands import COMMANDS
from transformer_jax.data import SOURCES
from transformer_jax.inference import TrainedModel
from transformer_jax.run_directory import exclusive


def test_usage_is_shown():
    assert call("--help").out.startswith("usage: transformer-jax COMMAND")
    assert call().code == 2
    assert call("--version").out == f"transformer-jax {__version__}\n"
    for command in COMMANDS:
        called = call(command, "--help")
        assert called.code == 0
        assert called.out.startswith(f"transformer-jax {command}: ")
        assert f"  {command:10}" in call("--help").out
    assert "--config.train.steps=1000  (at least 1)" in call("train", "--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["unknown command 'trian'", "train"]),
        (["train", "--workdir={tmp}/run"], ["--config is missing"]),
        (["train", "{config}"], ["--workdir"]),
        (["train", "{config}", "--workdir"], ["workdir"]),
        (["train", "{config}", "--workdir={tmp}/run", "--frobnicate"], ["frobnicate"]),
        (["train", "{config}", "--workdir={tmp}/run", "more"], ["'more'", "--"]),
        (["train", "--config={tmp}/none.py", "--workdir={tmp}/run"], ["none.py"]),
        (["train", "--config={tmp}", "--workdir={tmp}/run"], ["{tmp}"]),
        (["train", "--config.train.steps=5", "{config}", "--workdir={tmp}/run"],
         ["--config=FILE comes first"]),
        (["train", "{config}", "--workdir={tmp}/run", "--steps=10"],
         ["'steps'", "write --config.train.steps"]),
        (["train", "--config={config_file}:huge", "--workdir={tmp}/run"], ["huge"]),
        (["bench"], ["which benchmark?", "bench decode"]),
        (["bench", "sleep"], ["'sleep' is no benchmark", "bench train"]),
        (["evaluate"], ["--workdir"]),
        (["evaluate", "--workdir="], ["--workdir"]),
        (["evaluate", "--workdir={tmp}"], ["{tmp}", "config.json is missing"]),
        (["decode", "--workdir={tmp}/none"], ["{tmp}/none", "config.json is missing"]),
    ],
)  # fmt: skip
def test_bad_command_line_is_refused(arguments, words, tmp_path):
    real = ROOT / "configs" / "cmudict.py"
    names = {"tmp": tmp_path, "config": f"--config={TOY}", "config_file": real}
    arguments = [argument.format(**names) for argument in arguments]
    assert_refused(call(*arguments), *(word.format(**names) for word in words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def get_config(:", "invalid syntax"),
        ("x = 1", "get_config"),
        ("def get_config(): return 1 / 0", "division by zero"),
        ("def get_config(): return None", "get_config"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_bad_config_file_is_refused(text, word, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text + "\n")
    called = call("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert_refused(called, "mine.py", word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("model.widht", 3, ["unknown setting 'widht': did you mean width?"]),
        ("train.steps", "ten", ["--config.train.steps must be an integer, not 'ten'"]),
        ("train.clip", "x", ["--config.train.clip must be a number, not 'x'"]),
        ("decode.nothing", 3, ["unknown setting 'nothing' (decode has alpha, beam_s"]),
        ("modle.width", 3, ["unknown setting", "modle", "model"]),
        ("model.width", "abc", ["model.width", "abc"]),
        ("model.width", 3.5, ["model.width", "3.5"]),
        ("model.width", 17, ["model.width", "model.heads"]),
        ("model.dropout", 1.5, ["model.dropout", "0.99"]),
        ("model.scan_layers", "perhaps", ["model.scan_layers", "perhaps"]),
        ("train.steps", 0, ["train.steps", "at least 1"]),
        ("train.objective", "guessing", ["train.objective", "autoregressive"]),
        ("train.optimizer", "magic", ["train.optimizer", "adamw"]),
        ("train.momentum", 0.5, ["train.momentum does nothing", "optimizer=sgd"]),
        ("decode.strategy", "magic", ["decode.strategy", "greedy"]),
        ("train.corruption", "noise", ["train.corruption", "scheduled_sampling"]),
        ("train.keep_floor", 0.1, ["train.keep_floor does nothing", "'none'"]),
        ("train.corruption_choice", "sample", ["train.corruption_choice", "nothing"]),
        ("data.source", "nowhere", ["data.source", "cmudict"]),
        ("data.bucket_lengths", "(8,4)", ["data.bucket_lengths", "rising"]),
        ("data.bucket_lengths", "(2,4)", ["data.bucket_lengths", "longest needs 5"]),
        ("model.source_vocab", 99, ["model.source_vocab", "8 symbols"]),
        ("parallel.data", 99, ["parallel.data=99", "8"]),
        ("data.directory", "/dev/null/data", ["/dev/null/data"]),
    ],
)
def test_bad_setting_is_refused(data, tmp_path, setting, value, words):
    assert_refused(train(data, tmp_path / "run", **{setting: value}), *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("decode", ["--input=none.txt"], ["--input none.txt", "No such file"]),
        ("decode", [f"--input={ROOT}"], [f"--input {ROOT}", "directory"]),
        ("decode", ["--input="], ["--input is empty"]),
        ("decode", ["words.txt"], ["'words.txt'"]),
        ("decode", ["--config.decode.rows=0"], ["decode.rows", "at least 1"]),
        ("decode", ["--config.decode.row=1"], ["row"]),
        ("decode", ["--checkpoint=foo"], ["--checkpoint", "'foo'"]),
        ("decode", ["--checkpoint=\u00b2"], ["--checkpoint"]),
        ("evaluate", ["--checkpoint=999"], ["999", "60"]),
        ("evaluate", ["--split=dev"], ["split", "validation"]),
        ("evaluate", ["--samples=-1"], ["samples"]),
        ("evaluate", ["--config.data.source=none"], ["data.source", "cmudict"]),
        ("evaluate", ["--config.model.width=24"], ["model.width: 16 -> 24"]),
        ("evaluate", ["--config.parallel.data=0"], ["parallel.data=0"]),
    ],
)
def test_bad_use_of_a_run_is_refused(trained, command, flags, words):
    called = call(command, f"--workdir={trained[0]}", *flags)
    assert_refused(called, *words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", ["config.json cannot be read"]),
        ("config.json", '{"config": 3}', ["config.json cannot be read"]),
        ("config.json", '{"config": {"model": 3}}', ["config.json cannot be read"]),
        ("config.json", '{"config": {"x": {}}}', ["unknown section 'x'"]),
        ("vocabulary/source.json", "{", ["vocabulary", "source.json"]),
        ("vocabulary/target.json", None, ["vocabulary", "target.json"]),
    ],
)
def test_damaged_run_is_refused(data, copied, name, text, words):
    damage(copied, name, text)
    assert_refused(call("decode", f"--workdir={copied}"), *words)
    assert_refused(train(data, copied, **TRAINED), *words)


def test_vocabulary_of_another_run_is_refused(data, copied):
    path = copied / "vocabulary" / "source.json"
    vocabulary = json.loads(path.read_text())
    vocabulary["symbols"][-1] = "z"
    path.write_text(json.dumps(vocabulary))
    assert_refused(call("decode", f"--workdir={copied}"), "vocabulary", "step")
    assert_refused(
        train(data, copied, **TRAINED), "vocabulary", "does not fit the data"
    )
    vocabulary["symbols"].append("y")
    path.write_text(json.dumps(vocabulary))
    assert_refused(call("evaluate", f"--workdir={copied}"), "8 source symbols", "has 9")
    assert_refused(train(data, copied, **TRAINED), "9")


def test_run_without_checkpoint_is_refused(copied):
    shutil.rmtree(copied / "checkpoints")
    assert_refused(call("evaluate", f"--workdir={copied}"), "no checkpoint", code=1)


def test_damaged_checkpoint_gives_way_to_the_one_before(data, copied, caplog):
    shutil.rmtree(copied / "checkpoints" / "120" / "state")
    called = call("decode", f"--workdir={copied}", "--checkpoint=latest")
    assert called.code == 0
    assert "passed over" in caplog.text
    assert json.loads(called.err.splitlines()[-1])["step"] == 60
    called = train(data, copied, **TRAINED)
    assert json.loads(called.out)["step"] == 120
    assert "resuming at step 60" in called.err


def test_missing_tensorboard_is_refused_before_work(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    called = quick(data, tmp_path / "run", **{"train.tensorboard": "true"})
    assert_refused(called, "train.tensorboard", "transformer-jax[tensorboard]")
    assert not (tmp_path / "run").exists()


def test_working_directory_below_a_file_is_refused(data, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert_refused(
        quick(data, tmp_path / "file" / "run"), "--workdir", "Not a directory"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc")
def test_input_that_breaks_off_is_reported(trained):
    # It opens, but its first page cannot be read.
    called = call("decode", f"--workdir={trained[0]}", "--input=/proc/self/mem")
    assert_refused(called, "Input/output error", code=1)


def test_refused_training_leaves_the_run_as_it_was(data, copied):
    before = (copied / "config.json").read_text()
    changes = {**TRAINED, "data.bucket_lengths": "(2, 3)"}
    allow = "--allow_config_change=data.bucket_lengths,model.width"
    assert_refused(train(data, copied, allow, **changes), "fit no bucket")
    wider = train(data, copied, allow, **{**TRAINED, "model.width": 32})
    assert_refused(wider, "but this model wants", code=1)
    assert (copied / "config.json").read_text() == before
    assert train(data, copied, **TRAINED).code == 0


@pytest.mark.parametrize(
    "change", ["model.positions=none", "model.activation=gelu", "data.source=cmudict"]
)
def test_trained_model_is_not_changed_by_flags(trained, change):
    called = call("evaluate", f"--workdir={trained[0]}", f"--config.{change}")
    name, _, value = change.partition("=")
    assert_refused(called, "a trained model cannot be changed", name, value)


def test_full_memory_is_one_clear_line(trained, monkeypatch):
    def exhaust(*_, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(TrainedModel, "decode", exhaust)
    called = call("decode", f"--workdir={trained[0]}", stdin=b"abc\n")
    assert_refused(called, "out of memory", "decode.rows", code=1)


def test_resuming_on_other_data_is_refused(copied, tmp_path, monkeypatch):
    fewer = BACKWARDS._replace(examples=lambda *place: examples(*place)[:-1])
    monkeypatch.setitem(SOURCES, "backwards", fewer)
    before = (copied / "metrics.jsonl").read_bytes()
    called = train(
        tmp_path / "data",
        copied,
        "--allow_config_change=data.directory,train.steps",
        **{**TRAINED, "train.steps": 130},
    )
    assert_refused(called, "training data is not that of step 120", "--workdir")
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_directory_in_which_another_process_trains_is_refused(data, copied):
    with exclusive(copied):
        assert_refused(train(data, copied, **TRAINED), "another process writes", copied)
