"""Where a cache keeps the keys that a pattern can still reach.

While tokens are decoded, a key is kept from its own step to the last one that may
attend it; then its slot is free for another. So a window becomes a ring, global tokens
stay, and a stride keeps what its residues need, whatever the pattern is made of.
"""

import functools
import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from transformer_jax.patterns import Pattern, causal
from transformer_jax.patterns.ranges import EMPTY

# Steps that are looked at together.
TILE = 64
# A step gathers what it reads where that is at most one of so many slots.
SPARSE = 4


class Layout(NamedTuple):
    """The slots of one pattern and length; k is 1, or K where key/value heads differ.

    Attributes:
        slots: how many there are, S.
        slot_of: int32 `[k, L]`, where each position is written.
        reads: int32 `[k, L, W]`, the positions that each step attends, then -1; None
            where a step looks at every slot.
    """

    slots: int
    slot_of: Int32[np.ndarray, "k L"]
    reads: Int32[np.ndarray, "k L W"] | None


@functools.lru_cache(maxsize=64)
def layout(pattern: Pattern, length: int, kv_heads: int) -> Layout:
    """Return the slots for `length` steps under a pattern, made causal.

    Args:
        pattern: of any heads; those that share a key/value head share its slots.
        length: positions L.
        kv_heads: key/value heads K.

    Cost: looks at the L^2 / 64^2 tiles, and at all L^2 / 2 edges where the last step
    reads few of the slots; once a pattern and length, on the host.
    """
    patterns = _of_kv_heads(pattern, kv_heads)
    slots_of = np.stack([_allocated(_last_uses(each, length)) for each in patterns])
    slots = int(slots_of.max()) + 1
    return Layout(slots, slots_of, _reads(patterns, length, slots))


def _of_kv_heads(pattern: Pattern, kv_heads: int) -> list[Pattern]:
    """The edges that the query heads of each key/value head have, one if all agree."""
    if not pattern.heads:
        return [pattern & causal()]
    group = pattern.heads // kv_heads
    unions = [
        functools.reduce(
            lambda one, other: one | other,
            dict.fromkeys(pattern.of_head(k * group + n) for n in range(group)),
        )
        & causal()
        for k in range(kv_heads)
    ]
    return unions if len(set(unions)) > 1 else unions[:1]


def _last_uses(pattern: Pattern, length: int) -> np.ndarray:
    """The last step that attends each position, `[L]`; its own where there is none."""
    last = np.full(length, -1)
    starts = np.arange(0, length, TILE)
    stops = np.minimum(starts + TILE, length)
    for start, stop in zip(starts[::-1], stops[::-1], strict=True):
        states = pattern.block_states(start, stop, starts, stops)
        for tile in np.flatnonzero(states != EMPTY):
            j = np.arange(starts[tile], stops[tile])
            j = j[last[j] < 0]
            i = np.arange(start, stop)[:, None]
            edges = np.broadcast_to(pattern.allowed(i, j), (len(i), len(j)))
            found = np.where(edges, i, -1).max(0, initial=-1)
            last[j] = found
    return np.maximum(last, np.arange(length))


def _allocated(last: np.ndarray) -> np.ndarray:
    """A slot for each position, the lowest that is free from its step to its last."""
    slots = np.empty(len(last), np.int32)
    free, busy, count = [], [], 0
    for position, until in enumerate(last.tolist()):
        while busy and busy[0][0] < position:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, count = [count], count + 1
        slots[position] = heapq.heappop(free)
        heapq.heappush(busy, (until, int(slots[position])))
    return slots


def _reads(patterns: list[Pattern], length: int, slots: int) -> np.ndarray | None:
    """The positions that each step attends, unless they are many of the slots."""
    rows = [_row(pattern, length - 1) for pattern in patterns]
    if max(map(len, rows)) * SPARSE > slots:
        return None
    tables = [[_row(pattern, i) for i in range(length)] for pattern in patterns]
    width = max(len(row) for table in tables for row in table)
    if width * SPARSE > slots:
        return None
    reads = np.full((len(patterns), length, width), -1, np.int32)
    for k, table in enumerate(tables):
        for i, row in enumerate(table):
            reads[k, i, : len(row)] = row
    return reads


def _row(pattern: Pattern, i: int) -> np.ndarray:
    """The positions that step i attends."""
    j = np.arange(i + 1)
    return np.flatnonzero(np.broadcast_to(pattern.allowed(np.full(1, i), j), j.shape))
