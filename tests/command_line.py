"""The command line on the toy data set, as its tests call it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
from toy import CACHE, call

ROOT = Path(__file__).parents[1]
TOY = ROOT / "tests" / "toy.py"
# Enough to spell most words; the rest of the output does not end or is wrong.
TRAINED = {
    "train.steps": 120,
    "train.learning_rate": 0.01,
    "train.warmup": 20,
    "train.log_every": 30,
    "train.evaluate_every": 60,
    "train.save_every": 60,
    "model.dropout": 0.0,
}


def config_flags(data, **changes):
    settings = {"data.directory": data, "parallel.data": 1, **changes}
    return [f"--config={TOY}", *(f"--config.{k}={v}" for k, v in settings.items())]


def train(data, workdir, *flags, **changes):
    return call("train", *config_flags(data, **changes), f"--workdir={workdir}", *flags)


def quick(data, workdir, *flags, **changes):
    """A run of one bucket and three steps."""
    few = {"train.steps": 3, "data.bucket_lengths": "(8,)", **changes}
    return train(data, workdir, *flags, **few)


def environment():
    names = (*CACHE, "jax_compilation_cache_dir")
    cached = {name.upper(): str(getattr(jax.config, name)) for name in names}
    return {**os.environ, **cached, "PYTHONPATH": str(ROOT)}


def started(*arguments, **options):
    """A command in a process of its own, its standard streams being pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, TOY, *map(str, arguments)],
        env=environment(),
        **{**pipes, **options},
    )


def metrics_of(workdir, name="loss"):
    """What a run reported under a name: (step, value) in the file's order."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return [(line["step"], line[name]) for line in values if name in line]


def assert_refused(called, *words, code=2):
    """One clear complaint, nothing on standard output, no traceback."""
    assert "Traceback" not in called.err
    assert (called.code, called.out) == (code, ""), called.err
    complaint = called.err[called.err.index("transformer-jax ") :]
    for word in words:
        assert str(word) in complaint
    return complaint


def damage(workdir, name, text):
    path = workdir / name
    path.unlink() if text is None else path.write_text(text)
