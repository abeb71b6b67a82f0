"""Blocks that are linked at random (Zaheer et al. 2020), by a hash without lengths."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import masks
from transformer_jax.patterns.base import Pattern
from transformer_jax.patterns.ranges import (
    PARTIAL,
    Range,
    blocks_of,
    states_of,
    true_like,
)

# Pairs of blocks that are looked at one by one; beyond, they are PARTIAL.
MANY_PAIRS = 64


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Pattern):
    """The blocks of i and j are linked.

    Block b draws min(count, b) distinct blocks before itself, by a hash of (seed, b)
    and Floyd's algorithm (Bentley and Floyd 1987); links hold both ways. No draw
    depends on a length.
    """

    count: int
    block: int
    seed: int

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return self._linked(i // self.block, j // self.block)

    def drawn(self, blocks: Any) -> list[Any]:
        """Return `count` arrays: the earlier blocks that each block draws, or -1."""
        where = jnp.where if isinstance(blocks, jax.Array) else np.where
        number = where(blocks < self.count, blocks, self.count)
        seeded = masks.mix(blocks.astype(np.uint32), np.uint32(self.seed))
        chosen: list[Any] = []
        for turn in range(self.count):
            # In its turn a block draws up to `top`, and takes `top` for what it has.
            top = blocks - number + turn
            choices = (top + 1).astype(np.uint32)
            draw = (masks.mix(seeded, np.uint32(turn)) % choices).astype(blocks.dtype)
            for earlier in tuple(chosen):
                draw = where(earlier == draw, top, draw)
            chosen.append(where(turn < number, draw, -1))
        return chosen

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        row, column = blocks_of(rows, self.block), blocks_of(columns, self.block)
        pairs = (row.stop - row.start) * (column.stop - column.start)
        few = pairs <= MANY_PAIRS
        linked = np.zeros(pairs.shape, np.int64)
        heights = np.where(few, row.stop - row.start, 0).max(initial=0)
        widths = np.where(few, column.stop - column.start, 0).max(initial=0)
        for down in range(heights):
            for right in range(widths):
                i, j = row.start + down, column.start + right
                inside = few & (i < row.stop) & (j < column.stop)
                linked += inside & self._linked(i, j)
        return np.where(few, states_of(linked == pairs, linked == 0), PARTIAL)

    def _linked(self, one: Any, other: Any) -> Any:
        """Tell whether one of two blocks draws the other."""
        marks = ~(true_like(one) & true_like(other))
        for drawn in self.drawn(one):
            marks = marks | (drawn == other)
        for drawn in self.drawn(other):
            marks = marks | (drawn == one)
        return marks

    def __str__(self) -> str:
        seed = f", seed={self.seed}" * bool(self.seed)
        return f"random_blocks({self.count}, {self.block}{seed})"
