"""What a pattern is, and its algebra: `&`, `|`, `~` and one pattern a head."""

import abc
import dataclasses
import functools
import operator
from typing import Any, ClassVar

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int8

from transformer_jax.patterns.ranges import (
    EMPTY,
    FULL,
    Range,
    as_integers,
    check_integer,
    check_lengths,
)

# Edges that are looked at together.
CHUNK = 1 << 22


class Pattern(abc.ABC):
    """A static set of edges: which query position i may attend which key position j.

    Frozen, hashable and free of shapes: equal patterns are one value to `jit`, and to a
    configuration. Positions are absolute: query row r stands at r + query_offset.
    """

    # How tightly the text binds: `|`, `&`, `~`, then calls.
    BINDING: ClassVar[int] = 3

    @abc.abstractmethod
    def allowed(self, i: Any, j: Any) -> Any:
        """Tell which edges are allowed, for integer arrays i and j that broadcast.

        NumPy arrays give a NumPy array, so nothing is computed on a device; JAX arrays
        give a JAX array, also while tracing.
        """

    @abc.abstractmethod
    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """`block_states` of ranges that are not empty."""

    @property
    def heads(self) -> int | None:
        """The number of heads, where they differ."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether it is plain that no edge reaches ahead, j > i."""
        return False

    @property
    def has_future(self) -> bool:
        """Whether it is plain that every edge ahead, j > i, is allowed."""
        return False

    def of_head(self, head: int) -> "Pattern":
        """Return the pattern of one query head."""
        del head
        return self

    def __and__(self, other: "Pattern") -> "Pattern":
        return _combined(And, self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return _combined(Or, self, other)

    def __invert__(self) -> "Pattern":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a pattern is not true or false: join patterns by &, | and ~")

    def dense(
        self,
        query_length: int,
        key_length: int,
        *,
        num_heads: int | None = None,
        query_offset: int = 0,
    ) -> Bool[np.ndarray, "T S"] | Bool[np.ndarray, "N T S"]:
        """Return every edge, True = may attend: the oracle.

        Args:
            query_length: rows T, at the positions from `query_offset` on.
            key_length: columns S, at the positions from 0 on.
            num_heads: query heads N, checked where they differ.
            query_offset: position of the first row.

        Raises:
            TypeError: a length is no integer.
            ValueError: a length is negative, or the heads are others.

        Cost: N T S booleans.
        """
        check_lengths(query_length, key_length)
        check_head_count(self, num_heads)
        i = np.arange(query_length)[:, None] + query_offset
        j = np.arange(key_length)[None, :]
        heads = [
            np.broadcast_to(self.of_head(head).allowed(i, j), (len(i), j.shape[1]))
            for head in range(self.heads or 1)
        ]
        return np.stack(heads) if self.heads else heads[0].copy()

    def block_states(
        self,
        query_start: ArrayLike,
        query_stop: ArrayLike,
        key_start: ArrayLike,
        key_stop: ArrayLike,
        *,
        head: int = 0,
    ) -> Int8[np.ndarray, "..."]:
        """Say what rectangles of edges hold, without looking at the edges.

        Args:
            query_start: first query positions, integers; all four broadcast.
            query_stop: the positions behind the last ones.
            key_start: first key positions.
            key_stop: the positions behind the last ones.
            head: the query head, where they differ.

        Returns:
            EMPTY 0, PARTIAL 1 or FULL 2. EMPTY and FULL are never wrong; PARTIAL may
            stand for either: where parts of a compound meet, in rule(), and in large
            rectangles of random_blocks(). A rectangle without edges is EMPTY.

        Raises:
            TypeError: positions are no integers.
        """
        starts_and_stops = np.broadcast_arrays(
            *(as_integers(x) for x in (query_start, query_stop, key_start, key_stop))
        )
        rows, columns = Range(*starts_and_stops[:2]), Range(*starts_and_stops[2:])
        states = self.of_head(head).states(rows, columns)
        nothing = (rows.start >= rows.stop) | (columns.start >= columns.stop)
        return np.where(nothing, EMPTY, states).astype(np.int8)

    def density(
        self, query_length: int, key_length: int, *, block: int | None = None
    ) -> float:
        """Return the share of edges that are allowed, a mean over the heads.

        With `block`, the share of tiles of `block` x `block` that are not EMPTY: what a
        kernel of such tiles computes in the original order.

        Raises:
            TypeError, ValueError: a length or block is no integer, or too small.

        Cost: looks at N T S edges, or at N T S / block^2 tiles; some at a time.
        """
        check_lengths(query_length, key_length)
        size = 1 if block is None else check_integer("block", block, 1)
        rows, columns = -(-query_length // size), -(-key_length // size)
        if not rows * columns:
            return 0.0
        found = 0
        for begin in range(0, rows, max(1, CHUNK // columns)):
            i = np.arange(begin, min(rows, begin + max(1, CHUNK // columns)))[:, None]
            j = np.arange(columns)[None, :]
            for head in range(self.heads or 1):
                if block is None:
                    marks = np.broadcast_to(
                        self.of_head(head).allowed(i, j), (len(i), columns)
                    )
                else:
                    marks = self.block_states(
                        i * size,
                        np.minimum((i + 1) * size, query_length),
                        j * size,
                        np.minimum((j + 1) * size, key_length),
                        head=head,
                    )
                found += np.count_nonzero(marks)
        return float(found) / (rows * columns * (self.heads or 1))

    def draw(self, query_length: int, key_length: int) -> str:
        """Return the picture: a line a query, `#` where it may attend, heads in turn.

        Example:
            >>> from transformer_jax.patterns import causal, local
            >>> print((causal() & local(1)).draw(3, 4))
            #...
            ##..
            .##.
        """
        edges = self.dense(query_length, key_length, num_heads=self.heads)
        heads = edges if edges.ndim == 3 else edges[None]
        pictures = [
            "\n".join("".join(np.where(row, "#", ".")) for row in head)
            for head in heads
        ]
        return "\n\n".join(pictures)

    def inside(self, binding: int) -> str:
        """The text, in parentheses where it binds less tightly."""
        return f"({self})" if binding > self.BINDING else str(self)


@dataclasses.dataclass(frozen=True)
class And(Pattern):
    """The edges that all parts allow."""

    BINDING = 1
    parts: tuple[Pattern, ...]

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        return any(part.is_causal for part in self.parts)

    @property
    def has_future(self) -> bool:
        """See `Pattern`."""
        return all(part.has_future for part in self.parts)

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return functools.reduce(
            operator.and_, (part.allowed(i, j) for part in self.parts)
        )

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return functools.reduce(
            np.minimum, (part.states(rows, columns) for part in self.parts)
        )

    def __str__(self) -> str:
        return " & ".join(part.inside(self.BINDING + 1) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Or(Pattern):
    """The edges that at least one part allows."""

    BINDING = 0
    parts: tuple[Pattern, ...]

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        return all(part.is_causal for part in self.parts)

    @property
    def has_future(self) -> bool:
        """See `Pattern`."""
        return any(part.has_future for part in self.parts)

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return functools.reduce(
            operator.or_, (part.allowed(i, j) for part in self.parts)
        )

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return functools.reduce(
            np.maximum, (part.states(rows, columns) for part in self.parts)
        )

    def __str__(self) -> str:
        return " | ".join(part.inside(self.BINDING + 1) for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Not(Pattern):
    """The edges that a pattern does not allow."""

    BINDING = 2
    part: Pattern

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        return self.part.has_future

    @property
    def has_future(self) -> bool:
        """See `Pattern`."""
        return self.part.is_causal

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        return ~self.part.allowed(i, j)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        return FULL - self.part.states(rows, columns)

    def __invert__(self) -> Pattern:
        return self.part

    def __str__(self) -> str:
        return f"~{self.part.inside(self.BINDING)}"


@dataclasses.dataclass(frozen=True)
class PerHead(Pattern):
    """One pattern a query head; operators distribute over it."""

    patterns: tuple[Pattern, ...]

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.patterns)

    @property
    def is_causal(self) -> bool:
        """See `Pattern`."""
        return all(pattern.is_causal for pattern in self.patterns)

    def of_head(self, head: int) -> Pattern:
        """See `Pattern`."""
        return self.patterns[head]

    def allowed(self, i: Any, j: Any) -> Any:
        """Refuse: no edge is allowed or not before a head is chosen."""
        raise TypeError("the heads differ: choose one by of_head(n)")

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """Refuse, as `allowed` does."""
        return self.allowed(rows, columns)

    def __invert__(self) -> Pattern:
        return PerHead(tuple(~pattern for pattern in self.patterns))

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.patterns))
        return f"per_head(({inner}{',' * (len(self.patterns) == 1)}))"


def per_head(patterns: tuple[Pattern, ...]) -> Pattern:
    """Return the pattern whose query head n is `patterns[n]`, also with grouped keys.

    Raises:
        TypeError, ValueError: there is none, or one that is no pattern or has heads.
    """
    patterns = tuple(patterns)
    if not patterns:
        raise ValueError("per_head() wants a pattern for each head, not none")
    for pattern in patterns:
        if not isinstance(pattern, Pattern):
            raise TypeError(f"per_head() takes patterns, not {pattern!r}")
        if pattern.heads:
            raise ValueError(f"per_head() within per_head(): {pattern}")
    return PerHead(patterns)


def _combined(kind: type[And] | type[Or], one: Pattern, other: Any) -> Pattern:
    """Both under `&` or `|`, nested ones as one."""
    if not isinstance(other, Pattern):
        return NotImplemented
    heads = {pattern.heads for pattern in (one, other) if pattern.heads}
    if len(heads) > 1:
        raise ValueError(
            f"patterns of {one.heads} and {other.heads} heads do not combine"
        )
    if heads:
        return PerHead(
            tuple(
                _combined(kind, one.of_head(n), other.of_head(n))
                for n in range(heads.pop())
            )
        )
    parts: list[Pattern] = []
    for pattern in (one, other):
        parts.extend(pattern.parts if isinstance(pattern, kind) else [pattern])
    return kind(tuple(parts))


def check_head_count(pattern: Pattern, num_heads: int | None) -> None:
    """Check that a pattern of heads has one for each of them.

    Raises:
        ValueError: it has not.
    """
    if pattern.heads and num_heads is not None and pattern.heads != num_heads:
        raise ValueError(
            f"the pattern is one of {pattern.heads} heads, but there are {num_heads}: "
            "per_head() takes a pattern for each query head"
        )
