"""transformer-jax distill: let a trained model write the targets of its training data.

  transformer-jax distill --workdir=runs/teacher --output=distilled
      [--checkpoint=best|latest|STEP] [--max_ratio=3]
      [--config.decode.strategy=beam_search --config.decode.beam_size=5 ...]

Decodes the sources of the training split, in order, into outputs.txt, one line a
source. A line is empty where the teacher has no finished output, or one that is more
than --max_ratio times as long as its source or the other way round. Stopped, it goes on
where it was when it is called again with the same settings. manifest.json tells how
the outputs came about.

Train a student on them with --config.data.distilled=distilled; where a line is empty it
sees the real references. --config.data.keep_raw mixes both.

Prints one JSON line: lines, and how many of each status.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from transformer_jax.commands.flags import (
    define_checkpoint,
    define_saved_config,
    read_checkpoint,
    read_settings,
)
from transformer_jax.config import ConfigError, to_dict
from transformer_jax.data import Example
from transformer_jax.data.distilled import MANIFEST, OUTPUTS
from transformer_jax.decoding import Status
from transformer_jax.inference import Output, TrainedModel, load_model
from transformer_jax.run_directory import (
    exclusive,
    is_local,
    require_writable,
    write_json,
)
from transformer_jax.runs import open_run
from transformer_jax.splits import read_examples

CHUNK = 4096
# What becomes of a line: it is written, "filtered", or the status of no output.
WRITTEN, FILTERED = Status.OK.name.lower(), "filtered"


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, --config.*, --checkpoint, --output and --max_ratio."""
    define_saved_config(values, argv)
    define_checkpoint(values)
    flags.DEFINE_string(
        "output", None, "Folder to write, of this machine.", flag_values=values
    )
    flags.DEFINE_float(
        "max_ratio",
        3.0,
        "Longest output and source, as a multiple of the other, in symbols.",
        lower_bound=1.0,
        flag_values=values,
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Distill; return the counts."""
    if not values.output or not is_local(values.output):
        raise ConfigError("--output must name a folder of this machine for the outputs")
    # NaN is above no bound and below none: every pair would pass, and none resume.
    if not math.isfinite(values.max_ratio):
        raise ConfigError(
            f"--max_ratio must be finite, not {values.max_ratio}: a large number, such "
            "as 1000, filters nothing"
        )
    folder = pathlib.Path(values.output).expanduser()
    opened = open_run(values.workdir, read_settings(values))
    trained = load_model(opened, step=read_checkpoint(values))
    examples = read_examples(opened.config, "train")
    require_writable(folder, flag="--output")
    with exclusive(folder, flag="--output"):
        manifest = _manifest(trained, values.max_ratio, len(examples))
        outputs = _Outputs(folder, manifest)
        _decode(trained, examples, outputs, values.max_ratio)
    return {"lines": len(examples), **outputs.counts}


def _manifest(trained: TrainedModel, max_ratio: float, lines: int) -> dict[str, Any]:
    """How the outputs come about: what decides them, and nothing else."""
    run = trained.run
    # What the teacher itself was trained on decides nothing, and may be gone.
    data = dataclasses.replace(run.config.data, distilled="", keep_raw=False)
    raw = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    # How many rows are decoded together changes no output.
    decode = to_dict(run.config)["decode"]
    del decode["rows"]
    return {
        "source": run.config.data.source,
        "split": "train",
        "lines": lines,
        "data": raw.cache("train").fingerprint,
        "teacher": {
            "workdir": str(run.workdir),
            "step": trained.step,
            "params": _hash(trained.variables),
            "vocabulary": run.vocabulary_hash,
        },
        # Its path is a setting, and may hold another model by now.
        "rescorer": trained.rescorer and _hash(trained.rescorer.variables),
        # As it is read back: a tuple becomes a list.
        "decode": json.loads(json.dumps(decode)),
        "filters": {"max_ratio": max_ratio},
    }


def _hash(variables: Any) -> str:
    """SHA-256 of a model's variables, by name."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


class _Outputs:
    """The two files of a distillation, which agree at any time.

    Attributes:
        counts: what became of the lines written so far.
    """

    def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
        """Begin, or go on where the folder's manifest says.

        Raises:
            ConfigError: the folder holds something else, or other settings' outputs.
        """
        self._manifest, self._folder = manifest, folder
        outputs = folder / OUTPUTS
        saved = self._saved()
        if not saved and outputs.exists():
            raise ConfigError(
                f"--output {folder} holds other files: choose another one"
            )
        data = outputs.read_bytes() if outputs.exists() else b""
        # What is behind was written by a call that was stopped.
        data = data[: saved["bytes"] if saved else 0]
        self._digest = hashlib.sha256(data)
        if saved and not self._agrees(saved, data):
            print(f"{outputs} is damaged: beginning anew", file=sys.stderr, flush=True)
            saved, data, self._digest = {}, b"", hashlib.sha256()
        self._size = len(data)
        self.counts: Counter[str] = Counter(saved.get("counts", {}))
        if not saved:
            # First of all: outputs without a manifest are somebody else's.
            self.record()
        with outputs.open("ab") as file:
            file.truncate(self._size)

    def _agrees(self, saved: dict[str, Any], data: bytes) -> bool:
        """Tell whether a manifest is that of these outputs, whose lines it counts."""
        same = self._digest.hexdigest() == saved["outputs_sha256"]
        return same and data.count(b"\n") == sum(saved["counts"].values())

    def append(self, lines: Sequence[str], verdicts: Sequence[str]) -> None:
        """Write lines, then the manifest."""
        data = "".join(f"{line}\n" for line in lines).encode()
        with (self._folder / OUTPUTS).open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(data)
        self._size += len(data)
        self.counts.update(verdicts)
        self.record()

    def record(self, *, complete: bool = False) -> None:
        """Write the manifest of the lines so far."""
        state = {
            "bytes": self._size,
            "counts": self.counts,
            "outputs_sha256": self._digest.hexdigest(),
            "complete": complete,
        }
        write_json(self._folder / MANIFEST, self._manifest | state)

    def _saved(self) -> dict[str, Any]:
        """The manifest in the folder; empty if there is none."""
        path = self._folder / MANIFEST
        if not path.exists():
            return {}
        try:
            saved = {**json.loads(path.read_text("utf-8"))}
            numbers = saved["bytes"], *saved["counts"].values()
            whole = all(type(each) is int for each in numbers)
            whole = whole and "outputs_sha256" in saved
        except (ValueError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"{path} is damaged: delete {self._folder}")
        wanted = self._manifest
        if changed := [key for key in wanted if saved.get(key) != wanted[key]]:
            raise ConfigError(
                f"--output {self._folder} was begun with another "
                f"{' and '.join(changed)}: set that back, or choose another folder"
            )
        return saved


def _decode(
    trained: TrainedModel, examples: Sequence[Example], outputs: _Outputs, ratio: float
) -> None:
    """Write what is missing, a chunk at a time."""
    for start in range(outputs.counts.total(), len(examples), CHUNK):
        part = examples[start : start + CHUNK]
        found = trained.decode([each.source for each in part], first=start)
        verdicts = [
            _verdict(trained, example.source, output, ratio)
            for example, output in zip(part, found, strict=True)
        ]
        lines = [
            output.text if verdict == WRITTEN else ""
            for output, verdict in zip(found, verdicts, strict=True)
        ]
        outputs.append(lines, verdicts)
        done = outputs.counts.total()
        print(f"decoded {done} of {len(examples)}", file=sys.stderr, flush=True)
    outputs.record(complete=True)


def _verdict(trained: TrainedModel, source: str, output: Output, ratio: float) -> str:
    """Return what becomes of a line: `WRITTEN`, `FILTERED`, or a status."""
    if output.status != Status.OK:
        return output.status.name.lower()
    if "\n" in output.text:  # Of a symbol that is, or holds, a line break.
        return FILTERED
    run = trained.run
    length = len(run.source_tokenizer.encode(source))
    written = len(run.target_tokenizer.encode(output.text))
    if max(length, written) > ratio * min(length, written):
        return FILTERED
    return WRITTEN
