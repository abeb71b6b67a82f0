"""What a run tells: `metrics.jsonl` for programs, a progress line for people."""

import json
import os
import sys
import time
from typing import Any, Protocol

from etils import epath

from transformer_jax.run_directory import write_text


class Writer(Protocol):
    """Takes what a run reports; made anew at every start, after `resumed_step` steps.

    `metrics.jsonl` is always written; `tensorboard.EventFiles` is another one.
    """

    def write(self, step: int, **values: float) -> None:
        """Write what is known after `step` steps."""

    def close(self) -> None:
        """Write no more."""


class MetricsFile:
    """One JSON line for every report of a run; a resumed run goes on where it left.

    Lines of steps after the resumed one, and a line that a kill cut short, are dropped
    at the start, so the file never tells of a step twice.
    """

    def __init__(self, path: Any, *, resumed_step: int) -> None:
        self._path = epath.Path(path)
        kept = []
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= resumed_step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue
        write_text(self._path, "".join(kept))

    def write(self, step: int, **values: Any) -> None:
        """Append one line of values.

        Raises:
            OSError: with the file's name, which a failed write does not give.
        """
        line = json.dumps({"step": step, **values})
        try:
            with self._path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Nothing is left to do: every line is in the file once it is written."""


class Progress:
    """A line on standard error: bar, loss, speed, time left.

    On a terminal it is redrawn in place; in a log it is a new line each time.
    """

    WIDTH = 20

    def __init__(self, total: int) -> None:
        self._total, self._start = total, 0
        self._drawn = False
        self._began = time.perf_counter()

    def begin(self, start: int) -> None:
        """Start the clock at step `start`, once what comes before it is done."""
        self._start, self._began = start, time.perf_counter()

    def show(self, step: int, text: str) -> None:
        """Draw the state after `step` steps."""
        done = step / self._total
        elapsed = time.perf_counter() - self._began
        left = elapsed / max(step - self._start, 1) * (self._total - step)
        filled = int(done * self.WIDTH)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        line = f"[{bar}] {step}/{self._total}  {text}  {_clock(left)} left"
        if sys.stderr.isatty():
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\033[K{line[: columns - 1]}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(line, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Write a line of its own."""
        self.end()
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line that is drawn."""
        if self._drawn:
            print(file=sys.stderr)
            self._drawn = False


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
