"""What the training loop reports: numbers of steps and evaluations, and divergence."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_jax.data import Step, TokenCache
from transformer_jax.optimizers import make_schedule
from transformer_jax.progress import MetricsFile, Progress, Writer
from transformer_jax.runs import Run
from transformer_jax.tensorboard import EventFiles
from transformer_jax.training import StepMetrics

AGAINST_DIVERGENCE = (
    "go on from the checkpoint before with a lower train.learning_rate or train.clip"
)


class NonFiniteLossError(RuntimeError):
    """A loss or the parameters are infinite or no number; the message says where."""


class Mark(NamedTuple):
    """Where the report before ended: its step, clock, and seconds waited for data."""

    step: int = 0
    clock: float = 0.0
    waited: float = 0.0


class Reports:
    """Collects what steps give, and writes it to every writer and the progress line.

    Args:
        run: whose working directory gets `metrics.jsonl`.
        cache: the training split, to show what stands in a bad batch.
        progress: the line for people.

    Attributes:
        last_loss: mean loss a token of the last report that has one; not a number
            before it.
    """

    def __init__(self, run: Run, cache: TokenCache, progress: Progress) -> None:
        self._run, self._cache, self._progress = run, cache, progress
        self._schedule = make_schedule(run.config.train)
        self._writers: list[Writer] = []
        self._pending: list[tuple[int, Step, StepMetrics]] = []
        self._settled: list[tuple[float, ...]] = []
        self._mark = Mark()
        self.last_loss = math.nan

    @contextlib.contextmanager
    def opened(self, start: int) -> Iterator[None]:
        """Open the writers of a run that goes on from step `start`."""
        workdir = self._run.workdir
        with contextlib.ExitStack() as closing:
            self._writers = [MetricsFile(workdir / "metrics.jsonl", resumed_step=start)]
            if self._run.config.train.tensorboard:
                folder = workdir / "tensorboard"
                self._writers.append(EventFiles(folder, resumed_step=start))
            for writer in self._writers:
                closing.callback(writer.close)
            closing.callback(self._progress.end)
            yield

    def begin(self, start: int) -> None:
        """Start the clock before the first step."""
        self._mark = Mark(start, time.perf_counter())
        self._progress.begin(start)

    def add(self, number: int, planned: Step, metrics: StepMetrics) -> None:
        """Take a step's numbers, which may be still being computed.

        Raises:
            NonFiniteLossError: those of the step before are infinite or no numbers.
        """
        self._pending.append((number, planned, metrics))
        # One step late: waiting for this step's numbers would idle the device.
        self.settle(keep=1)

    def settle(self, *, keep: int = 0) -> None:
        """Read the numbers of all steps but the last `keep`.

        Raises:
            NonFiniteLossError: one is infinite or no number.
        """
        while len(self._pending) > keep:
            number, planned, metrics = self._pending.pop(0)
            values = tuple(float(value) for value in metrics)
            if not all(math.isfinite(value) for value in values):
                raise NonFiniteLossError(self._diagnosis(number, planned, values))
            self._settled.append(values)

    def log(self, step: int, waited: float) -> None:
        """Report the steps since the last report; `waited` seconds went by for data."""
        self.settle()
        losses, tokens, norms = (np.array(v) for v in zip(*self._settled, strict=True))
        self._settled.clear()
        now = Mark(step, time.perf_counter(), waited)
        before, self._mark = self._mark, now
        seconds = now.clock - before.clock
        mean = {}
        # Where nothing counted, as on canvases that are all shown, there is none.
        if tokens.sum() > 0:
            self.last_loss = mean["loss"] = float(losses.sum() / tokens.sum())
        speed = tokens.sum() / seconds
        wait_share = (waited - before.waited) / seconds
        self._write(
            step,
            **mean,
            learning_rate=float(self._schedule(jnp.asarray(step - 1))),
            gradient_norm=float(norms.mean()),
            tokens_per_second=speed,
            seconds_per_step=seconds / (step - before.step),
            data_wait_share=wait_share,
        )
        self._progress.show(
            step,
            f"loss {self.last_loss:.3f}  {speed:,.0f} tokens/s  "
            f"data wait {wait_share:.0%}",
        )

    def validated(self, step: int, loss: float, tokens: float, began: float) -> None:
        """Report an evaluation that began at the clock's `began`; it is no training.

        Raises:
            NonFiniteLossError: the loss is infinite or no number.
        """
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"after step {step} the validation loss is {loss:g}: "
                f"{AGAINST_DIVERGENCE}"
            )
        self._write(step, validation_loss=loss, tokens=tokens)
        self._progress.say(f"step {step}: validation loss {loss:.4f}")
        spent = time.perf_counter() - began
        self._mark = self._mark._replace(clock=self._mark.clock + spent)

    def _write(self, step: int, **values: float) -> None:
        for writer in self._writers:
            writer.write(step, **values)

    def _diagnosis(self, number: int, planned: Step, values: Sequence[float]) -> str:
        cache = self._cache
        items = planned.items[planned.items >= 0][:3]
        examples = items if planned.bucket.references else cache.example_of(items)
        sources = [
            self._run.source_tokenizer.decode(cache.source(example))
            for example in examples
        ]
        return (
            f"at step {number + 1} the loss is {values[0]:g} and the gradient's norm "
            f"{values[2]:g}, in a batch of {planned.bucket.rows} rows of length "
            f"{planned.bucket.source_length} that begins with {', '.join(sources)}: "
            f"{AGAINST_DIVERGENCE}"
        )
