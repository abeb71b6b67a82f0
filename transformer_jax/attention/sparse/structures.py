"""In which order of positions a pattern is block-sparse, and where its tiles lie."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.attention.sparse.tiling import Grid, Selection
from transformer_jax.patterns import Pattern, atoms
from transformer_jax.patterns.random import RandomBlocks
from transformer_jax.patterns.ranges import FULL, Range, states_of, true_like

Tiling = Grid | Selection
# So far below 0 that it stays no tile when those of a chunk are added.
NOWHERE = -(1 << 40)


class Extent(NamedTuple):
    """Rows and columns of all edges, the first row's position, and the tiles' size."""

    rows: int
    columns: int
    offset: int
    block: int


class Rank(enum.IntEnum):
    """Which terms of a union keep what they share: the first ones.

    Regular tiles come first, since what is taken from them would leave them as costly;
    what is left of few rows or columns is masked at little cost.
    """

    BAND = 0
    CHUNK = 1
    BLOCKS = 2
    RESIDUES = 3
    ANYWHERE = 4
    COLUMNS = 5
    ROWS = 6


class Structure(NamedTuple):
    """Where tiles may have edges, in some order of the positions.

    Attributes:
        rank: its turn among the terms of a union.
        queries: the query positions in tiles.
        keys: the key positions in tiles.
        columns: maps query tiles `[R]` to key tiles `[R, W]` that may have edges;
            others than the existing ones are none.
        states: maps query tiles `[R, 1]` and key tiles `[R, W]` to what they hold of
            the pattern, in this order; None where ranges of positions tell as well.
        cost: edges of all those tiles.
    """

    rank: Rank
    queries: Tiling
    keys: Tiling
    columns: Callable[[np.ndarray], np.ndarray]
    states: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    cost: int


@dataclasses.dataclass(frozen=True)
class GlobalSide(Pattern):
    """The edges of global queries, or those of global keys."""

    tokens: atoms.GlobalTokens
    of_queries: bool

    def allowed(self, i: Any, j: Any) -> Any:
        """See `Pattern`."""
        one, other = (i, j) if self.of_queries else (j, i)
        return self.tokens.is_global(one) & true_like(other)

    def states(self, rows: Range, columns: Range) -> np.ndarray:
        """See `Pattern`."""
        positions = rows if self.of_queries else columns
        count = self.tokens.count(positions)
        return states_of(count == positions.stop - positions.start, count == 0)

    def __str__(self) -> str:
        return f"{'rows' if self.of_queries else 'columns'} of {self.tokens}"


def structure_of(pattern: Pattern, extent: Extent) -> Structure:
    """Return where a pattern, an atom as a rule, has its tiles."""
    for kind, function in STRUCTURES.items():
        if isinstance(pattern, kind):
            return function(pattern, extent)
    return _anywhere(extent)


def _plain(extent: Extent) -> tuple[Grid, Grid]:
    return (
        Grid(extent.offset, extent.rows, min(extent.block, extent.rows)),
        Grid(0, extent.columns, min(extent.block, extent.columns)),
    )


def _made(
    rank: Rank,
    queries: Tiling,
    keys: Tiling,
    columns: Callable[[np.ndarray], np.ndarray],
    states: Any = None,
) -> Structure:
    """A structure with its cost, told from its first, middle and last rows."""
    probe = np.unique(np.array([0, queries.tiles // 2, queries.tiles - 1]))
    width = columns(probe).shape[1]
    cost = queries.tiles * width * queries.tile * keys.tile
    return Structure(rank, queries, keys, columns, states, cost)


def _all_full(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The states of tiles that lie wholly within the pattern."""
    return np.full(np.broadcast_shapes(rows.shape, columns.shape), FULL)


def _anywhere(extent: Extent) -> Structure:
    """Every tile."""
    queries, keys = _plain(extent)
    return _made(Rank.ANYWHERE, queries, keys, functools.partial(_every, keys))


def _every(keys: Tiling, rows: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(keys.tiles), (len(rows), keys.tiles))


def _band(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The integers from low to high `[R]`, as many in every row `[R, W]`."""
    return low[:, None] + np.arange((high - low).max() + 1)


def _differences(pattern: atoms.Differences, extent: Extent) -> Structure:
    """A band; with a step a band among the positions of each residue."""
    low, high, step = pattern.bounds
    # No difference is as large as this; a period beyond leaves the diagonal alone.
    limit = extent.offset + extent.rows + extent.columns
    if step >= limit:
        low, high, step = 0, 0, 1
    elif low is not None:
        low, high = max(low, -limit // step * step), min(high, limit // step * step)
    if step == 1:
        queries, keys = _plain(extent)
    else:
        queries = _grid(extent.offset, extent.rows, extent.block, step, residues=True)
        keys = _grid(0, extent.columns, extent.block, step, residues=True)
    band = None if low is None else atoms.Local(-low // step, high // step, 1)

    def columns(rows: np.ndarray) -> np.ndarray:
        number, first = queries.place(rows)
        begin = number * keys.tiles_of_class
        if band is None:
            return begin[:, None] + np.arange(keys.tiles_of_class)
        base = keys.members[0]
        lowest = (first - band.left - base) // keys.tile
        highest = (first + queries.tile - 1 + band.right - base) // keys.tile
        within = _band(lowest, highest)
        inside = (within >= 0) & (within < keys.tiles_of_class)
        return np.where(inside, begin[:, None] + within, -1)

    def states(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        if band is None:
            return _all_full(rows, columns)
        (_, i), (_, j) = queries.place(rows), keys.place(columns)
        i, j = np.broadcast_arrays(i, j)
        return band.states(Range(i, i + queries.tile), Range(j, j + keys.tile))

    rank = Rank.BAND if step == 1 else Rank.RESIDUES
    return _made(rank, queries, keys, columns, states if step > 1 else None)


def _grid(offset: int, length: int, block: int, period: int, *, residues: bool) -> Grid:
    """A grid whose tiles are as large as its classes fill evenly."""
    whole = Grid(offset, length, 1, period, residues)
    size = whole.members[1] - whole.members[0]
    pieces = -(-size // block)
    return dataclasses.replace(whole, tile=-(-size // pieces))


def _chunks(pattern: atoms.Chunked, extent: Extent) -> Structure:
    """The tiles of one chunk."""
    offset, block, size = extent.offset, extent.block, pattern.size
    queries = _grid(offset, extent.rows, block, size, residues=False)
    keys = _grid(0, extent.columns, block, size, residues=False)

    def columns(rows: np.ndarray) -> np.ndarray:
        number = rows // queries.tiles_of_class + offset // size
        begin = np.where(number < keys.classes, number * keys.tiles_of_class, NOWHERE)
        return begin[:, None] + np.arange(keys.tiles_of_class)

    return _made(Rank.CHUNK, queries, keys, columns, _all_full)


def _random(pattern: RandomBlocks, extent: Extent) -> Structure:
    """The tiles of linked blocks."""
    tile = next(
        n
        for n in range(min(pattern.block, extent.block), 0, -1)
        if pattern.block % n == 0
    )
    queries = Grid(extent.offset, extent.rows, tile, pattern.block)
    keys = Grid(0, extent.columns, tile, pattern.block)
    first = extent.offset // pattern.block
    blocks = max(first + queries.classes, keys.classes)
    links = _links(pattern, blocks)

    def columns(rows: np.ndarray) -> np.ndarray:
        others = links[rows // queries.tiles_of_class + first]
        begin = np.where(others >= 0, others * keys.tiles_of_class, NOWHERE)
        within = np.arange(keys.tiles_of_class)
        return (begin[:, :, None] + within).reshape(len(rows), -1)

    return _made(Rank.BLOCKS, queries, keys, columns, _all_full)


def _links(pattern: RandomBlocks, blocks: int) -> np.ndarray:
    """The blocks that each one is linked with `[blocks, most]`, then -1."""
    drawn = np.stack(pattern.drawn(np.arange(blocks)), 1)
    one = np.repeat(np.arange(blocks), drawn.shape[1])[drawn.ravel() >= 0]
    other = drawn.ravel()[drawn.ravel() >= 0]
    ends = np.concatenate([one, other]), np.concatenate([other, one])
    order = np.lexsort((ends[1], ends[0]))
    rows, columns = ends[0][order], ends[1][order]
    counts = np.bincount(rows, minlength=blocks)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((blocks, max(1, counts.max(initial=0))), -1)
    table[rows, place] = columns
    return table


def _summaries(pattern: atoms.Columns, extent: Extent) -> Structure:
    """The columns of all summaries, side by side."""
    positions = np.arange(extent.columns)
    return _columns(positions[pattern.allowed(positions, positions)], extent)


def _global_side(pattern: GlobalSide, extent: Extent) -> Structure:
    """The rows of global queries, or the columns of global keys, side by side."""
    begin, count = (
        (extent.offset, extent.rows) if pattern.of_queries else (0, extent.columns)
    )
    positions = np.arange(begin, begin + count)
    chosen = positions[pattern.tokens.is_global(positions)]
    return (_rows if pattern.of_queries else _columns)(chosen, extent)


def _columns(chosen: np.ndarray, extent: Extent) -> Structure:
    queries, _ = _plain(extent)
    tile = min(extent.block, max(1, len(chosen)))
    keys = Selection(0, extent.columns, tile, chosen)
    return _made(
        Rank.COLUMNS, queries, keys, functools.partial(_every, keys), _all_full
    )


def _rows(chosen: np.ndarray, extent: Extent) -> Structure:
    _, keys = _plain(extent)
    tile = min(extent.block, max(1, len(chosen)))
    queries = Selection(extent.offset, extent.rows, tile, chosen)
    every = functools.partial(_every, keys)
    return _made(Rank.ROWS, queries, keys, every, _all_full)


STRUCTURES: dict[type[Pattern], Callable[[Any, Extent], Structure]] = {
    atoms.Differences: _differences,
    atoms.Chunked: _chunks,
    RandomBlocks: _random,
    atoms.Columns: _summaries,
    GlobalSide: _global_side,
}
