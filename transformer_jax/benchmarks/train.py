"""Training speed, beside PyTorch's MarianMT of the same shape and weights.

One update of AdamW with dropout, label smoothing and clipping, on full batches; every
system in turn. FLOPs are those of our step's matrix products, forward and backward, and
their share is of the machine's own fastest product, measured in the same run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from transformer_jax.benchmarks import cost, peers, timing
from transformer_jax.benchmarks.marian import make_marian
from transformer_jax.benchmarks.ours import JaxTrainer
from transformer_jax.benchmarks.report import machine, say, say_row
from transformer_jax.benchmarks.shape import (
    Shape,
    draw_params,
    draw_sources,
    parse_depth,
    setting,
)
from transformer_jax.config import TrainConfig
from transformer_jax.objectives import teacher_forcing
from transformer_jax.training import count_parameters
from transformer_jax.types import Batch

COLUMNS = ("system", "p50_ms", "p95_ms", "tokens_per_second", "speedup")
OPTIMIZATION = TrainConfig(learning_rate=1e-4, schedule="constant", warmup=0)


@dataclasses.dataclass(frozen=True)
class Settings(Shape):
    """What `bench train` measures."""

    SYSTEMS: ClassVar = ("jax", "torch", "torch-compile")

    depth: str = setting("6-6", "Encoder-decoder layers.")
    rows: int = setting(32, "Rows of the batch.")
    dropout: float = setting(0.1, "Share of activations dropped.", low=0)
    systems: tuple[str, ...] = setting(SYSTEMS, "Who is measured.", choices=SYSTEMS)
    seconds: float = setting(5.0, "A turn repeats its update for this long.", low=0)
    compile_seconds: int = setting(900, "Longest wait for torch.compile.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_config(*parse_depth(self.depth), self.dropout)


def draw_batch(settings: Settings) -> Batch:
    """Return a full batch: every row has the longest source and target."""
    rows, length = settings.rows, settings.target_length
    whole = dataclasses.replace(settings, source_length=length)
    return Batch(
        *draw_sources(settings, rows, 0, varied=False),
        target=draw_sources(whole, rows, 1, varied=False).ids,
        target_lengths=np.full(rows, length - 1, np.int32),
        weight=np.ones(rows, np.float32),
        index=np.arange(rows, dtype=np.int32),
    )


class Bench:
    """The systems' updates, ready to be called."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._config = settings.model_config(
            *parse_depth(settings.depth), settings.dropout
        )
        self._params = draw_params(self._config, settings.symbols(), settings.seed)
        self._params = jax.device_get(self._params)
        self.parameters = count_parameters(self._params)
        self.batch = draw_batch(settings)
        self.ours: JaxTrainer | None = None
        self.missing: list[str] = []
        self.calls: dict[str, Callable[[], float]] = {}
        # The loss of each system's first update: dropout apart, all have the same one.
        self.first_losses: dict[str, float] = {}
        for name in settings.systems:
            self._add(name)

    def _add(self, name: str) -> None:
        reason = peers.why_missing(name)
        if reason is None and name == "jax":
            self.ours = JaxTrainer(
                self._config, self._params, self._settings.symbols(), OPTIMIZATION
            )
            self.calls[name] = self.ours.prepare(self.batch)
        elif reason is None:
            self.calls[name] = self._torch(compiled=name == "torch-compile")
        if name in self.calls:
            reason = self._try(name)
        if reason:
            say(f"missing: {reason}")
            self.missing.append(reason)

    def _try(self, name: str) -> str | None:
        """Make the first update, which compiles; say why if it does not work."""
        if name != "torch-compile":
            self.first_losses[name] = self.calls[name]()
            return None
        try:
            with peers.time_limit(self._settings.compile_seconds):
                self.first_losses[name] = self.calls[name]()
        except Exception as error:  # Compilers and what they wrap: whatever it is.
            del self.calls[name]
            text = str(error).strip().partition("\n")[0]
            return f"{name}: does not work here: {type(error).__name__}: {text}"
        return None

    def _torch(self, *, compiled: bool) -> Callable[[], float]:
        settings, symbols = self._settings, self._settings.symbols()
        length = max(settings.source_length, settings.target_length)
        trainer = peers.TorchTrainer(
            make_marian(self._config, self._params, symbols, max_length=length),
            learning_rate=OPTIMIZATION.learning_rate,
            betas=(OPTIMIZATION.beta1, OPTIMIZATION.beta2),
            clip=OPTIMIZATION.clip,
            label_smoothing=OPTIMIZATION.label_smoothing,
            compiled=compiled,
        )
        inputs, labels, _ = teacher_forcing(self.batch, symbols)
        return trainer.prepare(self.batch.source, inputs, labels)

    def measure(self) -> dict[str, timing.Measured]:
        """Measure all systems in turn."""
        tokens = self.batch.target.size

        def job(name: str, number: int) -> timing.Job:
            del number
            return timing.Job(self.calls[name], lambda _: tokens)

        return timing.interleaved(
            {name: functools.partial(job, name) for name in self.calls},
            rounds=self._settings.rounds,
            seconds=self._settings.seconds,
            pause=self._settings.pause,
        )


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything; return all numbers."""
    about = machine()
    bench = Bench(settings)
    peak = cost.matmul_peak()
    measured = bench.measure()
    peak = max(peak, cost.matmul_peak())
    results = []
    say_row(COLUMNS)
    for name in measured:
        result = {"system": name, **measured[name].summary()}
        result["first_loss"] = round(bench.first_losses[name], 4)
        if name == "jax":
            seconds = float(np.median(measured[name].seconds))
            result |= _use_of_the_machine(bench, seconds, peak)
        elif "jax" in measured:
            result["speedup"] = timing.ratio(measured["jax"], measured[name])
        say_row(COLUMNS, result)
        results.append(result)
    return {
        "benchmark": "train",
        "machine": about,
        "settings": dataclasses.asdict(settings),
        "missing": bench.missing,
        "parameters": bench.parameters,
        "peak_gflops_per_second": round(peak / 1e9, 2),
        "results": results,
    }


def _use_of_the_machine(bench: Bench, seconds: float, peak: float) -> dict[str, float]:
    """What one of our updates computes, how fast, and what compiling it took."""
    flops = bench.ours.flops(bench.batch)
    return {
        "compile_seconds": bench.ours.compile_seconds,
        "gflops_per_step": round(flops / 1e9, 3),
        "gflops_per_second": round(flops / seconds / 1e9, 2),
        "share_of_peak": round(flops / seconds / peak, 4),
    }
