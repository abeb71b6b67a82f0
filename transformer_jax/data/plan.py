"""The batch plan: which items stand in the batch of every step.

The plan is a pure function of (seed, epoch, lengths). It knows nothing of hosts or
devices, so the global batch of step k is the same on any number of them, and a run
resumes exactly from one integer.
"""

import dataclasses
import threading
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a batch.

    Attributes:
        source_length: S.
        target_length: T, the place of END counted.
        rows: B.
        references: R, where a row is an example with all its references; 0 where it is
            a pair, a source with one of them.
    """

    source_length: int
    target_length: int
    rows: int
    references: int = 0

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Axes of a row's target: `[T]`, or `[R, T]` with all references."""
        return (*self.lengths_shape, self.target_length)

    @property
    def lengths_shape(self) -> tuple[int, ...]:
        """Axes of a row's target lengths: `[]` or `[R]`."""
        return (self.references,) if self.references else ()


class Step(NamedTuple):
    """One batch: its shape and int32 `[rows]` items, -1 in filler rows."""

    bucket: Bucket
    items: np.ndarray


class BatchPlan:
    """Cuts items into batches of similar length, each item once an epoch.

    An item goes to the shortest bucket that holds its source and its target with END.
    A bucket of length n has tokens_per_batch // n rows, rounded down to a multiple of
    `multiple`, and at least `multiple`. The last batch of a bucket is filled up.

    Attributes:
        buckets: the shapes in use, short ones first.
        steps_per_epoch: number of batches that hold every item once.
        padding_share: share of an epoch's places, both sides, that hold no symbol.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        *,
        bucket_lengths: tuple[int, ...],
        tokens_per_batch: int,
        multiple: int = 1,
        references: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Plan; the arrays are `[items]`, target lengths without END.

        Args:
            source_lengths: symbols of each item's source, at least 1.
            target_lengths: symbols of each item's target; zeros if none is needed.
            bucket_lengths: rising padded lengths; both sides of a batch have one.
            tokens_per_batch: padded places that a batch may hold on one side.
            multiple: what the rows must be divisible by, such as the device count
                times the micro-batches of a step.
            references: how many an item has at most, see `Bucket`.
            seed: draws the order of every epoch.
            shuffle: False keeps the order of items, bucket after bucket.

        Raises:
            ValueError: an item fits no bucket, an argument is out of range, or there
                is no item.
        """
        source_lengths = np.asarray(source_lengths, np.int64)
        end_lengths = np.asarray(target_lengths, np.int64) + 1
        _check(source_lengths, end_lengths, bucket_lengths, multiple)
        needed = np.maximum(source_lengths, end_lengths)
        place = np.searchsorted(bucket_lengths, needed)
        if too_long := int((place == len(bucket_lengths)).sum()):
            raise ValueError(
                f"{too_long} of {len(needed)} items fit no bucket: the "
                f"longest needs {needed.max()} places, the buckets end at "
                f"{bucket_lengths[-1]}; add a longer one to data.bucket_lengths"
            )
        if not len(needed):
            raise ValueError("no items to plan: the data set is empty")
        self._seed = seed
        self._shuffle = shuffle
        self._lock = threading.Lock()
        self._epoch: tuple[int, list[np.ndarray], np.ndarray] | None = None

        self._members = []
        buckets = []
        for number, length in enumerate(bucket_lengths):
            members = np.flatnonzero(place == number).astype(np.int32)
            if len(members):
                rows = max(multiple, tokens_per_batch // length // multiple * multiple)
                self._members.append(members)
                buckets.append(Bucket(length, length, rows, references))
        self.buckets = tuple(buckets)
        # int `[steps, 2]`: bucket and number of each batch, in unshuffled order.
        self._batches = np.array(
            [
                (number, batch)
                for number, bucket in enumerate(buckets)
                for batch in range(-(-len(self._members[number]) // bucket.rows))
            ]
        )
        self.steps_per_epoch = len(self._batches)
        self.padding_share = self._padding_share(source_lengths + end_lengths)

    def step(self, number: int) -> Step:
        """Return the batch of a step, counted from 0 over all epochs.

        Raises:
            ValueError: `number` is negative.
        """
        if number < 0:
            raise ValueError(f"steps count from 0, not {number}")
        epoch, place = divmod(number, self.steps_per_epoch)
        orders, batches = self._order(epoch)
        index, batch = self._batches[batches[place]]
        bucket = self.buckets[index]
        items = np.full(bucket.rows, -1, np.int32)
        chosen = orders[index][batch * bucket.rows :][: bucket.rows]
        items[: len(chosen)] = chosen
        return Step(bucket, items)

    def _order(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the items of each bucket and the batches, in the epoch's order."""
        if not self._shuffle:
            return self._members, np.arange(self.steps_per_epoch)
        with self._lock:
            if self._epoch is None or self._epoch[0] != epoch:
                # Raw draws and a stable sort: unlike `Generator.permutation`, NumPy
                # promises both to stay the same in every version.
                draw = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
                orders = [
                    members[np.argsort(draw.random_raw(len(members)), kind="stable")]
                    for members in self._members
                ]
                batches = np.argsort(
                    draw.random_raw(self.steps_per_epoch), kind="stable"
                )
                self._epoch = (epoch, orders, batches)
            return self._epoch[1:]

    def _padding_share(self, symbols: np.ndarray) -> float:
        """Return the share of places without a symbol, END being one."""
        used = sum(int(symbols[members].sum()) for members in self._members)
        places = sum(
            bucket.rows * (bucket.source_length + bucket.target_length)
            for bucket in (self.buckets[number] for number in self._batches[:, 0])
        )
        return 1.0 - used / places


def _check(
    source_lengths: np.ndarray,
    end_lengths: np.ndarray,
    bucket_lengths: tuple[int, ...],
    multiple: int,
) -> None:
    """Refuse lengths and settings that no plan can be made of."""
    if source_lengths.shape != end_lengths.shape or source_lengths.ndim != 1:
        raise ValueError(
            "source and target lengths must be flat and of one size, not "
            f"{source_lengths.shape} and {end_lengths.shape}"
        )
    if (empty := np.flatnonzero((source_lengths < 1) | (end_lengths < 1))).size:
        raise ValueError(f"item {empty[0]} has no source or a negative length")
    lengths = np.asarray(bucket_lengths)
    if not lengths.size or lengths[0] < 1 or (np.diff(lengths) <= 0).any():
        raise ValueError(f"bucket lengths must rise from 1, not {bucket_lengths}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, not {multiple}")
