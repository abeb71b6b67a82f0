"""transformer-jax decode: one output line for every input line, in order.

  transformer-jax decode --workdir=runs/cmudict [--input=words.txt]
      [--checkpoint=best|latest|STEP] [--config.decode.max_length=40 ...]

Reads --input or standard input, split at newlines, without a final carriage return and
a byte-order mark at the start. A line that fails is an empty line; `line 17: STATUS
reason` goes to standard error, where a JSON summary comes last.
"""

import codecs
import json
import pathlib
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO

from absl import flags

from transformer_jax.commands.flags import (
    define_checkpoint,
    define_saved_config,
    read_checkpoint,
    read_settings,
)
from transformer_jax.config import ConfigError
from transformer_jax.decoding import Status
from transformer_jax.inference import Output, TrainedModel, load_model
from transformer_jax.runs import open_run

# Lines decoded together at most; enough to fill batches of every length.
LINES = 4096


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, --config.*, --checkpoint and --input."""
    define_saved_config(values, argv)
    define_checkpoint(values)
    flags.DEFINE_string(
        "input", None, "File to decode; standard input without it.", flag_values=values
    )


def run(values: flags.FlagValues, output: IO[str]) -> None:
    """Decode lines to `output`."""
    with _opened(values.input) as source:
        opened = open_run(values.workdir, read_settings(values))
        trained = load_model(opened, step=read_checkpoint(values))
        counts = _decode_lines(trained, source, output)
    summary = {
        "lines": sum(counts.values()),
        **{status.name.lower(): counts[status] for status in Status if counts[status]},
        "step": trained.step,
    }
    print(json.dumps(summary), file=sys.stderr)


def _opened(path: str | None) -> IO[bytes]:
    if path is None:
        if sys.stdin is None:
            raise ConfigError("standard input is closed: name a file with --input")
        return sys.stdin.buffer
    try:
        return pathlib.Path(path).open("rb")
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error


def _decode_lines(
    trained: TrainedModel, source: IO[bytes], output: IO[str]
) -> Counter[Status]:
    counts: Counter[Status] = Counter()
    for lines in _available(source):
        texts = [line.decode("utf-8", errors="replace") for line in lines]
        for line, result in zip(lines, trained.decode(texts), strict=True):
            result = _checked(line, result)
            counts[result.status] += 1
            if result.status != Status.OK:
                place = f"line {sum(counts.values())}"
                print(f"{place}: {result.status.name} {result.reason}", file=sys.stderr)
            # One line a line, even if a symbol of the model holds a line break.
            output.write(result.text.replace("\n", " ") + "\n")
        output.flush()
    return counts


def _checked(line: bytes, result: Output) -> Output:
    """A line that is no UTF-8 is INVALID for that reason, not for what replaced it."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"no UTF-8 at byte {error.start + 1}"
        return Output("", Status.INVALID, reason, result.score)
    return result


def _available(source: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield all lines that have come, up to LINES: a pipe is answered as it speaks."""
    # Lines, then what ended them.
    waiting: queue.Queue[bytes | Exception] = queue.Queue(4 * LINES)

    def read() -> None:
        try:
            for number, line in enumerate(source):
                # Some editors begin a UTF-8 file with a mark that is no text.
                text = line if number else line.removeprefix(codecs.BOM_UTF8)
                if text:
                    waiting.put(text)
            waiting.put(EOFError())
        except Exception as error:  # Whatever it is, the reader's thread must tell.
            waiting.put(error)

    threading.Thread(target=read, name="reader", daemon=True).start()
    end = None
    while end is None:
        lines = []
        while end is None and len(lines) < LINES and not (lines and waiting.empty()):
            got = waiting.get()
            if isinstance(got, bytes):
                lines.append(got.removesuffix(b"\n").removesuffix(b"\r"))
            else:
                end = got
        if lines:
            yield lines
    if not isinstance(end, EOFError):
        raise end
