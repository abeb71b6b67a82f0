"""The training loop: batches in, updates, evaluations, checkpoints, reports out."""

import math
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from transformer_jax.checkpoints import Checkpoints
from transformer_jax.config import ConfigError, to_dict
from transformer_jax.data import (
    BatchPlan,
    Bucket,
    Prefetcher,
    Step,
    TokenCache,
    device_batch,
)
from transformer_jax.objectives import OBJECTIVES, training_loss, validation_loss
from transformer_jax.optimizers import make_optimizer
from transformer_jax.progress import Progress
from transformer_jax.reports import AGAINST_DIVERGENCE, NonFiniteLossError, Reports
from transformer_jax.run_directory import exclusive
from transformer_jax.runs import Run
from transformer_jax.sharding import batch_sharding, make_mesh
from transformer_jax.training import (
    TrainState,
    abstract_state,
    compile_losses,
    compile_train_steps,
    count_parameters,
    init_state,
    make_train_step,
)
from transformer_jax.types import Batch, PyTree

# The share of a split's pairs that may be beyond what an objective can learn.
MOST_UNFIT = 0.05


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
        self._model = run.model()
        self._caches = {split: run.cache(split) for split in ("train", "validation")}
        self._plan = self._make_plan("train", shuffle=True)
        self._validation = self._make_plan("validation", shuffle=False)
        self._unfit = self._count_unfit()
        self._norm = jax.jit(optax.tree.norm)
        self._progress = Progress(self._config.steps)
        self._reports = Reports(run, self._caches["train"], self._progress)
        self._steps: dict[Bucket, Callable] = {}
        self._losses: dict[Bucket, Callable] = {}

    def train(self) -> dict[str, Any]:
        """Run the loop; return what the command prints.

        Raises:
            PreemptedError: a signal came; every step that was made is saved.
            NonFiniteLossError: training diverged; nothing of it is saved.
            CheckpointError: a checkpoint can be neither saved nor read.
        """
        with (
            exclusive(self._run.workdir),
            self._run.checkpoints(read_only=False) as checkpoints,
        ):
            state, start = self._first_state(checkpoints)
            self._run.record()
            with self._reports.opened(start):
                if start < self._config.steps:
                    self._stop_before(start)
                    self._compile(state)
                    self._stop_before(start)
                    state = self._loop(state, start, checkpoints)
                else:
                    self._progress.say(f"nothing left to do: step {start} is reached")
            checkpoints.wait()
            loss = self._reports.last_loss
            return {
                "step": int(state.step),
                "loss": None if math.isnan(loss) else loss,
                "best_step": checkpoints.best_step(),
                **self._unfit,
            }

    def _count_unfit(self) -> dict[str, int]:
        """Tell how many pairs of each split the objective cannot learn.

        Raises:
            ConfigError: there are so many that something is wrong.
        """
        objective = OBJECTIVES[self._config.objective]
        if objective.fits is None:
            return {}
        counts = {}
        for split, name in (("train", "training"), ("validation", "validation")):
            cache = self._caches[split]
            lengths = cache.pair_source_lengths, cache.target_lengths
            fit = objective.fits(self._run.config.model, *lengths, cache.target_repeats)
            counts[split] = count = int((~fit).sum())
            text = f"{count:,} of {len(fit):,} {name} pairs {objective.unfit}"
            if count > MOST_UNFIT * len(fit):
                raise ConfigError(text)
            if count:
                print(text, file=sys.stderr, flush=True)
        return {
            "unfit_pairs": counts["train"],
            "unfit_validation_pairs": counts["validation"],
        }

    def _make_plan(self, split: str, *, shuffle: bool) -> BatchPlan:
        data, cache = self._run.config.data, self._caches[split]
        if data.references == "all":
            lengths = cache.source_lengths, cache.longest_references()
            references = cache.most_references
        else:
            lengths = cache.pair_source_lengths, cache.target_lengths
            references = 0
        try:
            return BatchPlan(
                *lengths,
                references=references,
                bucket_lengths=data.bucket_lengths,
                tokens_per_batch=data.tokens_per_batch,
                multiple=self._mesh.shape["data"] * self._config.accumulation,
                seed=data.seed,
                shuffle=shuffle,
            )
        except ValueError as error:
            raise ConfigError(f"cannot batch the {split} split: {error}") from error

    def _first_state(self, checkpoints: Checkpoints) -> tuple[TrainState, int]:
        abstract = abstract_state(
            self._model,
            self._optimizer,
            self._mesh,
            ema=self._config.ema_decay > 0,
        )
        restored = checkpoints.restore(abstract)
        if restored is None:
            return self._new_state(abstract), 0
        self._run.require_vocabulary_of(restored)
        if restored.metadata["data"] != self._caches["train"].fingerprint:
            raise ConfigError(
                f"the training data is not that of step {restored.step}: bring it "
                "back, or choose another --workdir"
            )
        self._reports.last_loss = restored.metadata["loss"]
        print(f"resuming at step {restored.step}", file=sys.stderr, flush=True)
        return restored.state, restored.step

    def _new_state(self, abstract: TrainState) -> TrainState:
        """Draw the variables, or take those of another run."""
        variables = None
        if origin := self._run.origin:
            restored = origin.restore(abstract.variables)
            self._run.require_vocabulary_of(restored)
            variables = restored.state
            print(f"beginning with the parameters of {origin}", file=sys.stderr)
        seed = self._config.seed
        return init_state(self._model, self._optimizer, abstract, seed, variables)

    def _stop_before(self, start: int) -> None:
        """Nothing is lost while no step is made."""
        if self._stop.received:
            raise PreemptedError(
                f"stopped by {self._stop.received} at step {start}, before anything "
                "was done: start again to go on"
            )

    def _compile(self, state: TrainState) -> None:
        began = time.perf_counter()
        count = len(self._plan.buckets) + len(self._validation.buckets)
        self._progress.say(f"compiling {count} programs, which can take minutes")
        parts = self._model, self._run.target_tokenizer.vocabulary, self._config
        step = make_train_step(
            training_loss(*parts),
            self._optimizer,
            accumulation=self._config.accumulation,
            ema_decay=self._config.ema_decay,
        )
        self._steps = compile_train_steps(step, state, self._plan.buckets, self._mesh)
        self._losses = compile_losses(
            validation_loss(*parts),
            state.variables,
            self._validation.buckets,
            self._mesh,
        )
        count = len(self._steps) + len(self._losses)
        self._progress.say(
            f"{count_parameters(state.params):,} parameters; {count} compilations "
            f"({len(self._steps)} training, {len(self._losses)} evaluation) in "
            f"{time.perf_counter() - began:.0f} s; {self._plan.steps_per_epoch} steps "
            f"an epoch, {self._plan.padding_share:.0%} padding"
        )

    def _loop(
        self, state: TrainState, start: int, checkpoints: Checkpoints
    ) -> TrainState:
        stop = self._config.steps
        with self._prefetch("train", self._plan, start, stop) as batches:
            self._reports.begin(start)
            for number, (planned, batch) in enumerate(batches, start):
                state, metrics = self._steps[planned.bucket](state, batch)
                self._reports.add(number, planned, metrics)
                self._after_step(number + 1, state, batches.wait_seconds, checkpoints)
        return state

    def _after_step(
        self, step: int, state: TrainState, waited: float, checkpoints: Checkpoints
    ) -> None:
        config, last = self._config, step == self._config.steps
        if last or step % config.log_every == 0:
            self._reports.log(step, waited)
        evaluates = last or step % config.evaluate_every == 0
        losses = self._evaluate(step, state.variables) if evaluates else None
        stopped = self._stop.received
        if stopped or evaluates or step % config.save_every == 0:
            self._save(step, state, losses, checkpoints)
        if stopped:
            checkpoints.wait()
            raise PreemptedError(
                f"stopped by {stopped}, saved at step {step}: start again to go on"
            )

    def _evaluate(self, step: int, variables: PyTree) -> dict[str, float] | None:
        """Return the mean loss of the validation split, each pair counted once.

        None if a signal came in between.

        Raises:
            NonFiniteLossError: it is infinite or no number.
        """
        self._reports.settle()
        began = time.perf_counter()
        total = weight = 0.0
        stop = self._validation.steps_per_epoch
        with self._prefetch("validation", self._validation, 0, stop) as batches:
            for planned, batch in batches:
                sums = self._losses[planned.bucket](variables, batch)
                total, weight = total + float(sums[0]), weight + float(sums[1])
                if self._stop.received:
                    return None
        self._reports.validated(step, total / weight, weight, began)
        return {"loss": total / weight}

    def _save(
        self,
        step: int,
        state: TrainState,
        metrics: dict[str, float] | None,
        checkpoints: Checkpoints,
    ) -> None:
        self._reports.settle()
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
            "loss": self._reports.last_loss,
        }
        checkpoints.save(step, state, metadata, metrics=metrics)

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
