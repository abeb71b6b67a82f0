"""transformer-jax decode: one output line for every input line, in order.

  transformer-jax decode --workdir=runs/cmudict [--input=words.txt]
      [--nbest=5] [--scores] [--checkpoint=best|latest|STEP]
      [--config.decode.strategy=beam_search --config.decode.beam_size=5 ...]

Reads --input or standard input, split at newlines, without a final carriage return and
a byte-order mark at the start. A line that fails is an empty line; `line 17: STATUS
reason` goes to standard error, where a JSON summary comes last.

With --nbest above 1, or with --scores, each output line is JSON: status, reason if
something is wrong, and hypotheses, best first: text, score, status. A score is a
log-probability, END included where there is one, divided by the length penalty in beam
search; of mask_predict it is the mean over the symbols.
"""

import codecs
import json
import math
import pathlib
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from absl import flags

from transformer_jax.commands.flags import (
    define_checkpoint,
    define_saved_config,
    read_checkpoint,
    read_settings,
)
from transformer_jax.config import ConfigError
from transformer_jax.decoding import Status
from transformer_jax.inference import Output, TrainedModel, invalid, load_model
from transformer_jax.runs import open_run

# Lines decoded together at most; enough to fill batches of every length.
LINES = 4096
# Bytes asked for at once.
CHUNK = 1 << 16


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Define --workdir, --config.*, --checkpoint, --input, --nbest and --scores."""
    define_saved_config(values, argv)
    define_checkpoint(values)
    flags.DEFINE_string(
        "input", None, "File to decode; standard input without it.", flag_values=values
    )
    flags.DEFINE_integer(
        "nbest", 1, "Hypotheses a line.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_boolean(
        "scores", False, "Write JSON lines with scores.", flag_values=values
    )


def run(values: flags.FlagValues, output: IO[str]) -> None:
    """Decode lines to `output`."""
    with _opened(values.input) as source:
        opened = open_run(values.workdir, read_settings(values))
        step, nbest = read_checkpoint(values), values.nbest
        trained = load_model(opened, step=step, nbest=nbest)
        written = _as_json if nbest > 1 or values.scores else _as_text
        counts = _decode_lines(trained, source, output, written)
    summary = {
        "lines": sum(counts.values()),
        **{status.name.lower(): counts[status] for status in Status if counts[status]},
        "step": trained.step,
    }
    print(json.dumps(summary), file=sys.stderr)


def _opened(path: str | None) -> IO[bytes]:
    """What is read, unbuffered: a buffer that waits for input cannot be closed."""
    if path is None:
        if sys.stdin is None:
            raise ConfigError("standard input is closed: name a file with --input")
        return open(0, "rb", buffering=0, closefd=False)
    if not path:
        raise ConfigError("--input is empty: name a file, or leave it out")
    try:
        return pathlib.Path(path).open("rb", buffering=0)
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error


def _decode_lines(
    trained: TrainedModel,
    source: IO[bytes],
    output: IO[str],
    written: Callable[[Output], str],
) -> Counter[Status]:
    counts: Counter[Status] = Counter()
    for lines in _available(source):
        texts = [line.decode("utf-8", errors="replace") for line in lines]
        results = trained.decode(texts, first=counts.total())
        for line, result in zip(lines, results, strict=True):
            result = _checked(line, result)
            counts[result.status] += 1
            if result.status != Status.OK:
                place = f"line {sum(counts.values())}"
                print(f"{place}: {result.status.name} {result.reason}", file=sys.stderr)
            output.write(written(result) + "\n")
        output.flush()
    return counts


def _as_text(result: Output) -> str:
    """The best text; one line, even if a symbol of the model holds a line break."""
    return result.text.replace("\n", " ")


def _as_json(result: Output) -> str:
    """All hypotheses; a score that is not finite is null, since JSON has no such."""
    fields: dict[str, Any] = {"status": result.status.name}
    if result.reason:
        fields["reason"] = result.reason
    fields["hypotheses"] = [
        {
            "text": one.text,
            "score": one.score if math.isfinite(one.score) else None,
            "status": one.status.name,
        }
        for one in result.hypotheses
    ]
    return json.dumps(fields, ensure_ascii=False)


def _checked(line: bytes, result: Output) -> Output:
    """A line that is no UTF-8 is INVALID for that reason, not for what replaced it."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return invalid(f"no UTF-8 at byte {error.start + 1}")
    return result


def _split(source: IO[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends, each as soon as it is there."""
    pieces = []
    while chunk := source.read(CHUNK):
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for piece in others:
            yield b"".join(pieces) + b"\n"
            pieces = [piece]
    yield b"".join(pieces)


def _available(source: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield all lines that have come, up to LINES: a pipe is answered as it speaks."""
    # Lines, then what ended them.
    waiting: queue.Queue[bytes | Exception] = queue.Queue(4 * LINES)

    def read() -> None:
        try:
            for number, line in enumerate(_split(source)):
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
