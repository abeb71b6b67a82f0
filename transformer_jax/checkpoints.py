"""Checkpoints: saved in the background, kept by three rules, read back bit for bit."""

import contextlib
import errno
import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from etils import epath

from transformer_jax import checkpoint_store
from transformer_jax.run_directory import is_local, one_line
from transformer_jax.types import PyTree

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or read; the message names the remedy."""


class Restored(NamedTuple):
    """What a checkpoint gave back: its step, its arrays and the caller's metadata."""

    step: int
    state: PyTree
    metadata: dict


class Checkpoints:
    """A directory of checkpoints, written by one run at a time.

    Kept are the latest `keep_latest`, the best `keep_best` and every step that
    `keep_every` divides; nothing is deleted before a newer one is complete. As a
    context manager it waits for the last save. Every process of a job calls every
    method, and all of them see the same directory.

    Args:
        directory: local folder or `gs://` path; created unless `read_only`.
        keep_latest: at least 1.
        keep_best: how many of the lowest `best_metric`, at least 1.
        keep_every: 0 keeps no step for being a multiple.
        best_metric: key of `metrics`; lower is better. Checkpoints saved without it
            are no candidates.
        read_only: nothing is created, cleaned or saved.

    Raises:
        CheckpointError: the directory cannot be made or read.
    """

    def __init__(
        self,
        directory: Any,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        keep_every: int = 0,
        best_metric: str = "loss",
        read_only: bool = False,
    ) -> None:
        checkpoint_store.silence_orbax()
        path = epath.Path(directory).expanduser()
        self.directory = epath.Path(os.path.abspath(path)) if is_local(path) else path
        self._keep_latest, self._keep_best = keep_latest, keep_best
        self._keep_every = keep_every
        self._best_metric = best_metric
        self._scores: dict[int, float] = {}
        # Steps that this run saved or goes on from: saving one again changes nothing.
        self._own: set[int] = set()
        self._unreadable: set[int] = set()
        self._saving: int | None = None
        self._writer = None
        if not read_only:
            with self._failures("open"):
                self._writer = checkpoint_store.Writer(self.directory, self._kept)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            # The error on its way out is the first cause: this one must not hide it.
            _log.warning("%s", error)

    def close(self) -> None:
        """Wait for the last save; afterwards the directory can only be read.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._writer:
            try:
                self.wait()
            finally:
                self._writer.close()
                self._writer = None

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: dict,
        *,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Copy the state to the host and save it in the background.

        The caller may donate the arrays once this returns. A step that this run has
        saved already, or goes on from, is left as it is.

        Args:
            step: above every step in the directory.
            state: pytree of arrays, typed PRNG keys included.
            metadata: what JSON holds: configuration, vocabulary hash, data position.
            metrics: values by name, to choose the best by.

        Raises:
            CheckpointError: the save before this one failed, this one cannot start,
                or the directory holds a later step.
        """
        if not self._writer:
            raise CheckpointError(f"{self.directory} is open for reading only")
        self.wait()
        if step in self._own:
            return
        if self._unreadable:
            self._writer.set_aside(self._unreadable)
            self._unreadable.clear()
        latest = self._writer.latest()
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"{self.directory} holds step {latest} and is ahead of this run at "
                f"step {step}: continue from step {latest}, or choose another --workdir"
            )
        record = {"metadata": metadata, "metrics": metrics or {}}
        record["leaves"] = checkpoint_store.describe(state)
        self._saving = step
        self._scores.pop(step, None)
        with self._failures("save"):
            self._writer.save(step, state, record)
        self._own.add(step)

    def wait(self) -> None:
        """Wait until the save in progress is complete.

        Raises:
            CheckpointError: it failed.
        """
        if self._writer:
            with self._failures("save"):
                self._writer.wait()

    def steps(self) -> list[int]:
        """Return the steps in the directory, rising; an unfinished save is none."""
        if not self.directory.exists():
            return []
        names = (path.name for path in self.directory.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def best_step(self) -> int | None:
        """Return the step of the lowest metric, or None if no step has it."""
        return next(iter(self.best_steps(1)), None)

    def best_steps(self, count: int) -> list[int]:
        """Return the steps of the `count` lowest metrics, best first.

        There are fewer if fewer have a metric. Of equal ones the earlier is better.
        """
        return self._best(self.steps(), count)

    def leaves(self, step: int) -> dict[str, str]:
        """Return path -> type and shape of every array of a step.

        Raises:
            CheckpointError: the step is missing, or its record is damaged.
        """
        try:
            return checkpoint_store.read_record(self._folder(step))["leaves"]
        except Exception as error:  # However a damaged record may look.
            raise CheckpointError(
                f"{self._problem(step, error)}: the directory has {self.steps()}"
            ) from error

    def restore(
        self, abstract_state: PyTree, *, step: int | None = None
    ) -> Restored | None:
        """Read the newest whole checkpoint, or that of one step.

        Damaged and unfinished checkpoints are passed over with a warning each.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct`, each with the sharding
                that its array shall get.
            step: None means the newest.

        Returns:
            the checkpoint; None if the directory holds none.

        Raises:
            CheckpointError: no checkpoint can be read; the step asked for is missing
                or damaged; or a saved array has another shape, type or place.
        """
        restored = self._read(abstract_state, step)
        if restored:
            self._own.add(restored.step)
        return restored

    def restore_entries(
        self,
        abstract: dict[str, PyTree],
        *,
        step: int | Literal["best"] | None = None,
    ) -> Restored:
        """Read some entries of a saved state, whatever else it holds.

        Args:
            abstract: as in `restore`, by the entries' names: fields of the saved state,
                such as "params" or "ema".
            step: None means the newest; "best" the one of the lowest metric, or the
                newest if none has a metric.

        Raises:
            CheckpointError: as in `restore`, or the directory holds no checkpoint.
        """
        restored = self._read(abstract, step, entries=abstract)
        if restored is None:
            raise CheckpointError(f"no checkpoint in {self.directory}: train first")
        return restored

    def _read(
        self, wanted: PyTree, asked: int | str | None, entries: Collection[str] = ()
    ) -> Restored | None:
        """Read the first choice that is whole: its leaves below `entries`."""
        self.wait()
        choices = [asked] if isinstance(asked, int) else self._ordered(asked)
        if isinstance(asked, int) and asked not in self.steps():
            raise CheckpointError(
                f"{self.directory} has no step {asked}: it has {self.steps()}"
            )
        for step in choices:
            folder = self._folder(step)
            try:
                checkpoint_store.require_whole(folder)
                record = checkpoint_store.read_record(folder)
                _require_same_leaves(record["leaves"], wanted, entries, folder)
                state = checkpoint_store.read_state(folder, wanted)
                return Restored(step, state, record["metadata"])
            except CheckpointError:
                raise
            except Exception as error:  # Orbax has no class of its own for damage.
                problem = self._problem(step, error)
            if isinstance(asked, int):
                raise CheckpointError(f"{problem}: the directory has {self.steps()}")
            self._unreadable.add(step)
            _log.warning("%s: passed over", problem)
        if choices:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be read: bring back a copy, or "
                "start again in another --workdir"
            )
        return None

    def _ordered(self, asked: str | None) -> list[int]:
        """All steps, the newest first, or the best ones before the others."""
        newest = self.steps()[::-1]
        best = self.best_steps(len(newest)) if asked == "best" else []
        return [*best, *(step for step in newest if step not in best)]

    def _folder(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _problem(self, step: int, error: Exception) -> str:
        return f"checkpoint {self._folder(step)} cannot be read ({one_line(error)})"

    def _score(self, step: int) -> float:
        """The metric of a complete step, infinite if it has none; remembered."""
        if step not in self._scores:
            try:
                record = checkpoint_store.read_record(self._folder(step))
                self._scores[step] = _metric(record["metrics"], self._best_metric)
            except Exception:  # Damage is reported when the checkpoint is read.
                return math.inf
        return self._scores[step]

    def _best(self, steps: Sequence[int], count: int) -> list[int]:
        scored = [step for step in steps if math.isfinite(self._score(step))]
        return sorted(scored, key=self._score)[:count]

    def _kept(self, steps: Sequence[int]) -> set[int]:
        """The union of the latest, the best and the multiples."""
        multiples = {s for s in steps if self._keep_every and s % self._keep_every == 0}
        best = self._best(steps, self._keep_best)
        return {*steps[-self._keep_latest :], *multiples, *best}

    @contextlib.contextmanager
    def _failures(self, deed: str) -> Iterator[None]:
        """Turn what Orbax raises into one line that says what is left."""
        try:
            yield
        except Exception as error:
            failed, self._saving = self._saving, None
            self._own.discard(failed)
            what = "" if failed is None else f" step {failed} in"
            raise CheckpointError(
                f"cannot {deed}{what} {self.directory}: {_reason(error)}; whole "
                f"checkpoints there: {self.steps() or 'none'}"
            ) from error


def _require_same_leaves(
    saved: dict[str, str],
    wanted: PyTree,
    entries: Collection[str],
    folder: epath.Path,
) -> None:
    """Raise CheckpointError at the first leaf that differs; Orbax would cast it."""
    now = checkpoint_store.describe(wanted)
    if difference := checkpoint_store.first_difference(saved, now, entries):
        path, old, new = difference
        raise CheckpointError(
            f"checkpoint {folder} holds {old} for {path}, but this model wants "
            f"{new}: use the configuration and vocabulary that it was trained with, or "
            "begin a new run with --init_from"
        )


def _metric(metrics: dict[str, float], name: str) -> float:
    value = metrics.get(name, math.inf)
    return value if math.isfinite(value) else math.inf


def _reason(error: BaseException) -> str:
    """Say in a few words why a save failed."""
    if os.strerror(errno.ENOSPC) in str(error):
        return "no space left on the device, free some and start again"
    return one_line(error)
