"""The training loop: batches in, updates, evaluations, checkpoints, reports out."""

import math
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.config import ConfigError, to_dict
from transformer_jax.corruption import corruption_at
from transformer_jax.data import BatchPlan, Prefetcher, Step, TokenCache, device_batch
from transformer_jax.objectives import OBJECTIVES
from transformer_jax.optimizers import make_optimizer, make_schedule
from transformer_jax.progress import MetricsFile, Progress
from transformer_jax.run_directory import exclusive
from transformer_jax.runs import Run
from transformer_jax.sharding import batch_sharding, make_mesh
from transformer_jax.training import (
    StepMetrics,
    TrainState,
    abstract_state,
    compile_losses,
    compile_train_steps,
    init_state,
    make_train_step,
)
from transformer_jax.types import Batch, PyTree

AGAINST_DIVERGENCE = (
    "go on from the checkpoint before with a lower train.learning_rate or train.clip"
)


class NonFiniteLossError(RuntimeError):
    """A loss or the parameters are infinite or no number; the message says where."""


class PreemptedError(Exception):
    """The run was told to stop and has saved: start it again to go on."""


class StopSignal:
    """Notes SIGTERM and SIGINT instead of dying; a second SIGINT does kill."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


class Trainer:
    """Trains one run, from wherever it is, to `train.steps`."""

    def __init__(self, run: Run, stop: StopSignal) -> None:
        self._run, self._stop = run, stop
        self._config = run.config.train
        self._mesh = make_mesh(run.config.parallel)
        self._optimizer = make_optimizer(self._config)
        self._schedule = make_schedule(self._config)
        self._model = run.model()
        self._objective = OBJECTIVES[self._config.objective]
        self._caches = {split: run.cache(split) for split in ("train", "validation")}
        self._plan = self._make_plan("train", shuffle=True)
        self._validation = self._make_plan("validation", shuffle=False)
        self._norm = jax.jit(optax.tree.norm)
        self._pending: list[tuple[int, Step, StepMetrics]] = []
        self._reported: list[tuple[float, float, float]] = []
        self._last_loss = math.nan

    def train(self) -> dict[str, Any]:
        """Run the loop; return what the command prints.

        Raises:
            PreemptedError: a signal came; every step that was made is saved.
            NonFiniteLossError: training diverged; nothing of it is saved.
            CheckpointError: a checkpoint can be neither saved nor read.
        """
        with (
            exclusive(self._run.workdir),
            self._run.checkpoints(read_only=False) as self._checkpoints,
        ):
            state, start = self._first_state()
            self._run.record()
            self._metrics = MetricsFile(
                self._run.workdir / "metrics.jsonl", resumed_step=start
            )
            self._progress = Progress(self._config.steps, start)
            if start < self._config.steps:
                self._stop_before(start)
                self._compile(state)
                self._stop_before(start)
                self._progress.begin()
                try:
                    state = self._loop(state, start)
                finally:
                    self._progress.end()
            else:
                self._progress.say(f"nothing left to do: step {start} is reached")
            self._checkpoints.wait()
            return {
                "step": int(state.step),
                "loss": None if math.isnan(self._last_loss) else self._last_loss,
                "best_step": self._checkpoints.best_step(),
            }

    def _make_plan(self, split: str, *, shuffle: bool) -> BatchPlan:
        data, cache = self._run.config.data, self._caches[split]
        sources = cache.source_lengths[cache.example_of(np.arange(cache.num_pairs))]
        try:
            return BatchPlan(
                sources,
                cache.target_lengths,
                bucket_lengths=data.bucket_lengths,
                tokens_per_batch=data.tokens_per_batch,
                multiple=self._mesh.shape["data"] * self._config.accumulation,
                seed=data.seed,
                shuffle=shuffle,
            )
        except ValueError as error:
            raise ConfigError(f"cannot batch the {split} split: {error}") from error

    def _first_state(self) -> tuple[TrainState, int]:
        abstract = abstract_state(
            self._model,
            self._optimizer,
            self._mesh,
            ema=self._config.ema_decay > 0,
        )
        restored = self._checkpoints.restore(abstract)
        if restored is None:
            seed = self._config.seed
            return init_state(self._model, self._optimizer, abstract, seed), 0
        self._run.require_vocabulary_of(restored)
        if restored.metadata["data"] != self._caches["train"].fingerprint:
            raise ConfigError(
                f"the training data is not that of step {restored.step}: bring it "
                "back, or choose another --workdir"
            )
        self._last_loss = restored.metadata["loss"]
        print(f"resuming at step {restored.step}", file=sys.stderr, flush=True)
        return restored.state, restored.step

    def _stop_before(self, start: int) -> None:
        """Nothing is lost while no step is made."""
        if self._stop.received:
            raise PreemptedError(
                f"stopped by {self._stop.received} at step {start}, before anything "
                "was done: start again to go on"
            )

    def _compile(self, state: TrainState) -> None:
        began = time.perf_counter()
        step = make_train_step(
            self._training_loss,
            self._optimizer,
            accumulation=self._config.accumulation,
            ema_decay=self._config.ema_decay,
        )
        self._steps = compile_train_steps(step, state, self._plan.buckets, self._mesh)
        self._losses = compile_losses(
            self._validation_loss, state.params, self._validation.buckets, self._mesh
        )
        count = len(self._steps) + len(self._losses)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self._progress.say(
            f"{parameters:,} parameters; {count} compilations "
            f"({len(self._steps)} training, {len(self._losses)} evaluation) in "
            f"{time.perf_counter() - began:.0f} s; {self._plan.steps_per_epoch} steps "
            f"an epoch, {self._plan.padding_share:.0%} padding"
        )

    def _training_loss(
        self, params: PyTree, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return self._objective.loss(
            self._model.apply,
            params,
            batch,
            self._run.target_tokenizer.vocabulary,
            key=key,
            label_smoothing=self._config.label_smoothing,
            corrupt=corruption_at(self._config, step),
        )

    def _validation_loss(
        self, params: PyTree, batch: Batch, *_: None
    ) -> tuple[jax.Array, jax.Array]:
        """Right inputs alone, no dropout and no smoothing."""
        return self._objective.loss(
            self._model.apply,
            params,
            batch,
            self._run.target_tokenizer.vocabulary,
            key=None,
            label_smoothing=0.0,
        )

    def _loop(self, state: TrainState, start: int) -> TrainState:
        stop = self._config.steps
        with self._prefetch("train", self._plan, start, stop) as batches:
            self._since = (start, time.perf_counter(), 0.0)
            for number, (planned, batch) in enumerate(batches, start):
                state, metrics = self._steps[planned.bucket](state, batch)
                self._pending.append((number, planned, metrics))
                # One step late: waiting for this step's numbers would idle the device.
                self._settle(keep=1)
                self._after_step(number + 1, state, batches)
        return state

    def _after_step(self, step: int, state: TrainState, batches: Prefetcher) -> None:
        config, last = self._config, step == self._config.steps
        if last or step % config.log_every == 0:
            self._settle(keep=0)
            self._log(step, batches.wait_seconds)
        evaluates = last or step % config.evaluate_every == 0
        losses = self._evaluate(step, state.params) if evaluates else None
        if self._stop.received is None:
            if evaluates or step % config.save_every == 0:
                self._save(step, state, losses)
            return
        self._save(step, state, losses)
        self._checkpoints.wait()
        raise PreemptedError(
            f"stopped by {self._stop.received}, saved at step {step}: start again to "
            "go on"
        )

    def _settle(self, *, keep: int) -> None:
        """Read the numbers of finished steps; a bad one ends the run."""
        while len(self._pending) > keep:
            number, planned, metrics = self._pending.pop(0)
            values = [float(value) for value in metrics]
            if not all(math.isfinite(value) for value in values):
                raise NonFiniteLossError(self._diagnosis(number, planned, values))
            self._reported.append(tuple(values))

    def _diagnosis(self, number: int, planned: Step, values: Sequence[float]) -> str:
        cache = self._caches["train"]
        pairs = planned.items[planned.items >= 0][:3]
        sources = [
            self._run.source_tokenizer.decode(cache.source(cache.example_of(pair)))
            for pair in pairs
        ]
        return (
            f"at step {number + 1} the loss is {values[0]:g} and the gradient's norm "
            f"{values[2]:g}, in a batch of {planned.bucket.rows} rows of length "
            f"{planned.bucket.source_length} that begins with {', '.join(sources)}: "
            f"{AGAINST_DIVERGENCE}"
        )

    def _log(self, step: int, waited: float) -> None:
        losses, tokens, norms = (np.array(v) for v in zip(*self._reported, strict=True))
        self._reported.clear()
        since, began, waited_before = self._since
        now = time.perf_counter()
        seconds = now - began
        self._last_loss = float(losses.sum() / tokens.sum())
        speed = tokens.sum() / seconds
        wait_share = (waited - waited_before) / seconds
        self._since = (step, now, waited)
        self._metrics.write(
            step,
            loss=self._last_loss,
            learning_rate=float(self._schedule(jnp.asarray(step - 1))),
            gradient_norm=float(norms.mean()),
            tokens_per_second=speed,
            seconds_per_step=seconds / (step - since),
            data_wait_share=wait_share,
        )
        self._progress.show(
            step,
            f"loss {self._last_loss:.3f}  {speed:,.0f} tokens/s  "
            f"data wait {wait_share:.0%}",
        )

    def _evaluate(self, step: int, params: PyTree) -> dict[str, float] | None:
        """Return the mean loss of the validation split, each pair counted once.

        None if a signal came in between.

        Raises:
            NonFiniteLossError: it is infinite or no number.
        """
        self._settle(keep=0)
        began = time.perf_counter()
        total = weight = 0.0
        stop = self._validation.steps_per_epoch
        with self._prefetch("validation", self._validation, 0, stop) as batches:
            for planned, batch in batches:
                sums = self._losses[planned.bucket](params, batch)
                total, weight = total + float(sums[0]), weight + float(sums[1])
                if self._stop.received:
                    return None
        loss = total / weight
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"after step {step} the validation loss is {loss:g}: "
                f"{AGAINST_DIVERGENCE}"
            )
        self._metrics.write(step, validation_loss=loss, tokens=weight)
        self._progress.say(f"step {step}: validation loss {loss:.4f}")
        since, start, waited = self._since
        # Evaluation is no training time.
        self._since = (since, start + time.perf_counter() - began, waited)
        return {"loss": loss}

    def _save(
        self, step: int, state: TrainState, metrics: dict[str, float] | None
    ) -> None:
        self._settle(keep=0)
        # The last update has not been through a loss yet.
        if not math.isfinite(norm := float(self._norm(state.params))):
            raise NonFiniteLossError(
                f"after step {step} the norm of the parameters is {norm:g}: "
                f"{AGAINST_DIVERGENCE}"
            )
        metadata = {
            "config": to_dict(self._run.config),
            "vocabulary": self._run.vocabulary_hash,
            "data": self._caches["train"].fingerprint,
            # The next batch: the plan is a pure function of this number.
            "data_position": step,
            "loss": self._last_loss,
        }
        self._checkpoints.save(step, state, metadata, metrics=metrics)

    def _prefetch(
        self, split: str, plan: BatchPlan, start: int, stop: int
    ) -> Prefetcher[tuple[Step, Batch]]:
        cache: TokenCache = self._caches[split]
        sharding = batch_sharding(self._mesh)
        pads = {
            "pad_source": self._run.source_tokenizer.vocabulary.pad_id,
            "pad_target": self._run.target_tokenizer.vocabulary.pad_id,
        }

        def make(number: int) -> tuple[Step, Batch]:
            planned = plan.step(number)
            return planned, device_batch(cache, planned, sharding, **pads)

        depth = self._run.config.data.prefetch
        return Prefetcher(make, start, stop, depth=depth)
