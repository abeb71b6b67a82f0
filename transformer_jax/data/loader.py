"""From a step of the plan to a batch on the devices, prepared on a thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from transformer_jax import types
from transformer_jax.data.cache import TokenCache
from transformer_jax.data.plan import Step

T = TypeVar("T")


def make_rows(
    cache: TokenCache,
    step: Step,
    rows: slice = slice(None),
    *,
    pad_source: int,
    pad_target: int,
) -> types.Batch:
    """Return some rows of a step's batch as NumPy arrays.

    Args:
        cache: where the ids are.
        step: the bucket and its items, numbers of pairs, or of examples if the bucket
            says so.
        rows: which rows of the batch.
        pad_source: id that fills the sources.
        pad_target: id that fills the targets.

    Raises:
        ValueError: an item is longer than its bucket.
    """
    items, bucket = step.items[rows], step.bucket
    filler = items < 0
    longest = bucket.target_length - 1
    if bucket.references:
        examples = items
        target, target_lengths = cache.padded_references(
            items, bucket.references, longest, pad_target
        )
    else:
        examples = np.where(filler, -1, cache.example_of(np.maximum(items, 0)))
        target, target_lengths = cache.padded_targets(items, longest, pad_target)
    source, source_lengths = cache.padded_sources(
        examples, bucket.source_length, pad_source
    )
    return types.Batch(
        source=source,
        source_lengths=source_lengths,
        # The place that END needs.
        target=np.pad(
            target, [(0, 0)] * (target.ndim - 1) + [(0, 1)], constant_values=pad_target
        ),
        target_lengths=target_lengths,
        weight=np.where(filler, 0, 1).astype(np.float32),
        index=examples.astype(np.int32),
    )


def device_batch(
    cache: TokenCache,
    step: Step,
    sharding: jax.sharding.NamedSharding,
    *,
    pad_source: int,
    pad_target: int,
) -> types.Batch:
    """Return a step's batch as global arrays; a process reads only its own rows.

    Args:
        cache: where the ids are.
        step: the bucket and its items.
        sharding: how rows are laid out, such as `NamedSharding(mesh, P("data"))`; the
            rows must be divisible by the size of that axis.
        pad_source: id that fills the sources.
        pad_target: id that fills the targets.

    Raises:
        ValueError: as `make_rows`.
    """
    bucket = step.bucket
    made: dict[tuple[int, int], types.Batch] = {}

    def field(name: str, *shape: int) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(bucket.rows)
            if (start, stop) not in made:
                made[start, stop] = make_rows(
                    cache,
                    step,
                    slice(start, stop),
                    pad_source=pad_source,
                    pad_target=pad_target,
                )
            return getattr(made[start, stop], name)[:, *index[1:]]

        return jax.make_array_from_callback((bucket.rows, *shape), sharding, part)

    return types.Batch(
        source=field("source", bucket.source_length),
        source_lengths=field("source_lengths"),
        target=field("target", *bucket.target_shape),
        target_lengths=field("target_lengths", *bucket.lengths_shape),
        weight=field("weight"),
        index=field("index"),
    )


class Prefetcher(Generic[T]):
    """Makes the batches of coming steps on a thread while the present one is used.

    Iterate over it for `make(start)`, `make(start + 1)`, ...; close it, or use it in a
    `with` statement. An exception of `make` is raised again where the batch would have
    come.

    Attributes:
        wait_seconds: time that the consumer has spent waiting for batches.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        start: int = 0,
        stop: int | None = None,
        *,
        depth: int = 2,
    ) -> None:
        """Start the thread.

        Args:
            make: step number -> batch; runs on the thread.
            start: first step.
            stop: the step after the last one, or None for no end.
            depth: finished batches that may wait, at least 1.

        Raises:
            ValueError: `depth` is below 1.
        """
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.wait_seconds = 0.0
        self._make = make
        self._steps = (start, stop)
        self._closed = threading.Event()
        # Holds (batch, None), then (None, exception) to end with.
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is not None:
            raise StopIteration
        began = time.perf_counter()
        batch, self._end = self._ready.get()
        self.wait_seconds += time.perf_counter() - began
        if self._end is not None:
            raise self._end
        return batch

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what waits and end the thread; batches no longer come."""
        self._closed.set()
        # The thread may be waiting for room: give it some. It puts at most one more.
        self._drain()
        self._thread.join()
        self._drain()
        # A consumer on another thread may be waiting still.
        with contextlib.suppress(queue.Full):
            self._ready.put_nowait((None, StopIteration()))

    def _run(self) -> None:
        number, stop = self._steps
        try:
            while not self._closed.is_set() and number != stop:
                self._ready.put((self._make(number), None))
                number += 1
            end: BaseException = StopIteration()
        # Whatever it is, the consumer must hear of it instead of waiting for ever.
        except BaseException as error:
            end = error
        if not self._closed.is_set():
            self._ready.put((None, end))

    def _drain(self) -> None:
        """Empty the queue."""
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return
