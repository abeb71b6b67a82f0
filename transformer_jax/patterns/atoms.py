"""The patterns that others are made of; positions are absolute."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from transformer_jax.patterns.base import Pattern
from transformer_jax.patterns.ranges import (
    FULL,
    PARTIAL,
    Range,
    blocks_of,
    states_of,
    true_like,
)

LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Full(Pattern):
    """Every edge."""

    has_future = True

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return true_like(i) & true_like(j)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return np.full(rows.start.shape, FULL)

    def __str__(self) -> str:
        return "full()"


@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
    """j <= i."""

    is_causal = True

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return j <= i

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        full, empty = columns.last <= rows.start, columns.start > rows.last
        return states_of(full, empty)

    def __str__(self) -> str:
        return "causal()"


class Differences(Pattern):
    """low <= j - i <= high, and `step` divides j - i."""

    @property
    @abc.abstractmethod
    def bounds(self) -> tuple[int | None, int | None, int]:
        """low, high and step; None is an open end."""

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        _, high, step = self.bounds
        return high is not None and high < step

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        low, high, step = self.bounds
        difference = j - i
        marks = true_like(difference) if step == 1 else difference % step == 0
        # Traced positions have 32 bits, and no difference is larger.
        if low is not None:
            marks = marks & (difference >= max(low, -LARGEST))
        return marks if high is None else marks & (difference <= min(high, LARGEST))

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`. A rectangle has every difference between its extremes."""
        low, high, step = self.bounds
        first, last = columns.start - rows.last, columns.last - rows.start
        low = first if low is None else np.maximum(first, low)
        high = last if high is None else np.minimum(last, high)
        # The first multiple of the step from `low` on lies behind `high`.
        empty = -(-low // step) * step > high
        full = (low == first) & (high == last)
        if step > 1:
            full &= (first == last) & (first % step == 0)
        return states_of(full, empty)


@dataclasses.dataclass(frozen=True)
class Local(Differences):
    """-left dilation <= j - i <= right dilation, and `dilation` divides j - i."""

    left: int
    right: int
    dilation: int

    @property
    def bounds(self) -> tuple[int, int, int]:
        """See `Differences`."""
        return -self.left * self.dilation, self.right * self.dilation, self.dilation

    def __str__(self) -> str:
        right = f", {self.right}" * (self.right != self.left)
        dilation = f", dilation={self.dilation}" * (self.dilation > 1)
        return f"local({self.left}{right}{dilation})"


@dataclasses.dataclass(frozen=True)
class Strided(Differences):
    """`stride` divides j - i, which is at most `reach` strides far."""

    stride: int
    reach: int | None

    @property
    def bounds(self) -> tuple[int | None, int | None, int]:
        """See `Differences`."""
        if self.reach is None:
            return None, None, self.stride
        return -self.reach * self.stride, self.reach * self.stride, self.stride

    def __str__(self) -> str:
        reach = "" if self.reach is None else f", {self.reach}"
        return f"strided({self.stride}{reach})"


@dataclasses.dataclass(frozen=True)
class Chunked(Pattern):
    """i and j lie in one chunk."""

    size: int

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        return self.size == 1

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return i // self.size == j // self.size

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        row, column = blocks_of(rows, self.size), blocks_of(columns, self.size)
        empty = (row.last < column.start) | (column.last < row.start)
        full = (row.start == column.last) & (row.last == column.start)
        return states_of(full & ~empty, empty)

    def __str__(self) -> str:
        return f"chunked({self.size})"


@dataclasses.dataclass(frozen=True)
class Columns(Pattern):
    """j is one of the last `count` positions of its block; what `fixed` adds."""

    block: int
    count: int

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return (j % self.block >= self.block - self.count) & true_like(i)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        others = self.block - self.count
        inside = columns.start % self.block
        empty = columns.start + np.maximum(others - inside, 0) > columns.last
        length = columns.stop - columns.start
        full = (inside >= others) & (inside + length <= self.block)
        return states_of(full | (others == 0), empty)


@dataclasses.dataclass(frozen=True)
class Fixed(Pattern):
    """i and j lie in one block, or j is one of the last positions of its block."""

    block: int
    summary: int

    @property
    def parts(self) -> tuple[Chunked, Columns]:
        """The two patterns of which it is the union."""
        return Chunked(self.block), Columns(self.block, self.summary)

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        one, other = self.parts
        return one.allowed(i, j) | other.allowed(i, j)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return np.maximum(*(part.states(rows, columns) for part in self.parts))

    def __str__(self) -> str:
        return f"fixed({self.block}, {self.summary})"


@dataclasses.dataclass(frozen=True)
class GlobalTokens(Pattern):
    """i or j is global: one of the first positions, or of those given."""

    tokens: int | tuple[int, ...]

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return self.is_global(i) | self.is_global(j)

    def is_global(self, positions: Any) -> Any:
        """Tell which positions are global."""
        if isinstance(self.tokens, int):
            return positions < self.tokens
        if isinstance(positions, np.ndarray):
            return np.isin(positions, self.tokens)
        # One by one: a TPU's kernel has no room for another axis.
        found = (positions == token for token in self.tokens)
        return functools.reduce(operator.or_, found)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        counts = [self.count(rows), self.count(columns)]
        sizes = [rows.stop - rows.start, columns.stop - columns.start]
        full = (counts[0] == sizes[0]) | (counts[1] == sizes[1])
        return states_of(full, (counts[0] == 0) & (counts[1] == 0))

    def count(self, positions: Range) -> np.ndarray:
        """Count the global positions of ranges."""
        if isinstance(self.tokens, int):
            inside = np.minimum(positions.stop, self.tokens) - positions.start
            return np.maximum(inside, 0)
        start, stop = (
            np.searchsorted(self.tokens, end)
            for end in (positions.start, positions.stop)
        )
        return stop - start

    def __str__(self) -> str:
        return f"global_tokens({self.tokens})"


@dataclasses.dataclass(frozen=True)
class Rule(Pattern):
    """What a function says; nothing is known of it before it is called."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return self.function(i, j, *self.arguments)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return np.full(rows.start.shape, PARTIAL)

    def __str__(self) -> str:
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"rule({', '.join([name, *map(repr, self.arguments)])})"
