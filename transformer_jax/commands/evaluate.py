"""transformer-jax evaluate: decode a split and compare it with its references.

  transformer-jax evaluate --workdir=runs/cmudict [--split=test] [--samples=12]
      [--checkpoint=best|latest|STEP] [--config.decode.rows=64 ...]

Prints one JSON line: wer and per in percent, over every example of the split once, or
accuracy of a classifier, beside the share of the commonest class; an output is right if
it equals any of the example's references. Seconds and tokens per second are those of
decoding, without compilations; END is a token.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from transformer_jax.commands.flags import (
    define_checkpoint,
    define_saved_config,
    read_checkpoint,
    read_settings,
)
from transformer_jax.data import Example
from transformer_jax.inference import Output, load_model
from transformer_jax.metrics import Accuracy, ErrorRates
from transformer_jax.runs import open_run
from transformer_jax.splits import read_examples

SPLITS = ("train", "validation", "test")
CHUNK = 4096


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, --config.*, --checkpoint, --split and --samples."""
    define_saved_config(values, argv)
    define_checkpoint(values)
    flags.DEFINE_enum(
        "split", "test", SPLITS, "Which split of the data.", flag_values=values
    )
    flags.DEFINE_integer(
        "samples",
        0,
        "Show this many decoded examples, spread over the split.",
        lower_bound=0,
        flag_values=values,
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Evaluate; return the metrics."""
    opened = open_run(values.workdir, read_settings(values))
    trained = load_model(opened, step=read_checkpoint(values))
    compiled = trained.generator.executables
    examples = read_examples(opened.config, values.split)
    began = time.perf_counter()
    outputs: list[Output] = []
    for start in range(0, len(examples), CHUNK):
        part = examples[start : start + CHUNK]
        outputs += trained.decode([example.source for example in part], first=start)
        print(f"decoded {len(outputs)} of {len(examples)}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began - compiled.compile_seconds
    ends = opened.config.train.objective != "classification"
    symbols = sum(len(output.text.split()) + ends for output in outputs)
    if values.samples:
        _show(examples, outputs, values.samples)
    return {
        **_measured(opened.config.train.objective, examples, outputs),
        "split": values.split,
        "step": trained.step,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(symbols / seconds),
        "compilations": compiled.compilations,
        "compile_seconds": round(compiled.compile_seconds, 1),
    }


def _measured(
    objective: str, examples: Sequence[Example], outputs: Sequence[Output]
) -> dict[str, float]:
    """How far outputs are from their references."""
    if objective == "classification":
        accuracy = Accuracy()
        for example, output in zip(examples, outputs, strict=True):
            accuracy.add(output.text, example.references)
        return accuracy.result()
    rates = ErrorRates()
    for example, output in zip(examples, outputs, strict=True):
        rates.add(output.text.split(), [text.split() for text in example.references])
    return rates.result()


def _show(examples: Sequence[Example], outputs: Sequence[Output], samples: int) -> None:
    """Print a table of sources, references and predictions."""
    step = max(1, len(examples) // samples)
    rows = [("", "source", "reference", "prediction")]
    for number in range(0, len(examples), step)[:samples]:
        example, output = examples[number], outputs[number]
        right = output.text in example.references
        # The nearest reference stands for all of them.
        reference = output.text if right else example.references[0]
        rows.append(("" if right else "x", example.source, reference, output.text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), file=sys.stderr)
