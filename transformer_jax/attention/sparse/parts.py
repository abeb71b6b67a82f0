"""A pattern as disjoint parts, each in an order in which its tiles are few."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from transformer_jax.attention.sparse.structures import (
    Extent,
    GlobalSide,
    Structure,
    Tiling,
    structure_of,
)
from transformer_jax.patterns import Pattern, atoms, base, ranges
from transformer_jax.patterns.ranges import EMPTY, FULL, PARTIAL

# Unions of more terms than this are not taken apart.
MANY_TERMS = 32
# Parts that a term's rows are sorted into by their number of tiles.
GROUPS = 8
# Rows stay one group while padding to the longest costs at most a tenth.
EVEN = 1.1
# Tiles that are looked at together.
CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some of a pattern's edges, as tiles of positions that are not in order.

    Attributes:
        pattern: the edges, exactly; parts of one partition share none.
        query_tiling: the query positions in tiles.
        key_tiling: the key positions in tiles.
        rows: int32 `[R]`, query tiles: all in a row for a band, else what has edges.
        columns: int32 `[R, W]`, the key tiles of each; -1 is none.
        states: int8 `[R, W]`: EMPTY (for -1), PARTIAL or FULL.
    """

    pattern: Pattern
    query_tiling: Tiling
    key_tiling: Tiling
    rows: np.ndarray
    columns: np.ndarray
    states: np.ndarray

    @property
    def permutation(self) -> tuple[np.ndarray, np.ndarray]:
        """Query and key positions as they stand in tiles `[C, tile]`; -1 is none."""
        return _places(self.query_tiling), _places(self.key_tiling)

    @property
    def edges(self) -> int:
        """Edges of the tiles that hold any, without what fills rows to one width."""
        tile = self.query_tiling.tile * self.key_tiling.tile
        return int((self.states != EMPTY).sum()) * tile


def _places(tiling: Tiling) -> np.ndarray:
    """The positions of all tiles `[C, tile]`; -1 is none."""
    positions, real = tiling.positions(np.arange(tiling.tiles))
    return np.where(real, positions, -1)


@functools.lru_cache(maxsize=256)
def partition(
    pattern: Pattern,
    query_length: int,
    key_length: int,
    *,
    block: int,
    query_offset: int = 0,
) -> tuple[Part, ...]:
    """Take a pattern apart into disjoint parts that together are the pattern.

    A union's terms become bands of tiles, bands among positions of one residue or one
    chunk, lists of tiles, and the few rows and columns of global tokens. What an
    earlier term holds is taken from a later one. Nothing of size T S is made, unless
    the pattern has that many tiles.

    Args:
        pattern: of one head.
        query_length: T.
        key_length: S.
        block: rows and columns of a tile; smaller where a part is smaller.
        query_offset: position of the first query.

    Returns:
        The parts, none where there is no edge.

    Raises:
        TypeError, ValueError: an argument is no such integer, or heads differ.
    """
    ranges.check_integer("query_offset", query_offset, 0)
    ranges.check_lengths(query_length, key_length)
    ranges.check_integer("block", block, 1)
    if pattern.heads:
        raise ValueError("heads differ: take the pattern of each apart, of_head(n)")
    if not query_length or not key_length:
        return ()
    extent = Extent(query_length, key_length, query_offset, block)
    terms = [(term, *_sparsest(term, extent)) for term in _terms(pattern)]
    parts: list[Part] = []
    excluded: list[Pattern] = []
    for term, atom, structure in sorted(terms, key=lambda term: term[2].rank):
        # A structure with states answers for its own atom.
        others = tuple(
            part for part in term if part is not atom or not structure.states
        )
        parts.extend(_parts(term, others, tuple(excluded), structure))
        excluded.append(~_intersection(term))
    return tuple(parts)


def count_edges(
    pattern: Pattern,
    query_length: int,
    key_length: int,
    *,
    block: int,
    query_offset: int = 0,
) -> int:
    """Return about how many edges the tiles have in which a pattern's edges lie.

    Quickly told, from a few rows: tiles that `partition` finds empty count as well.
    """
    if not query_length or not key_length:
        return 0
    extent = Extent(query_length, key_length, query_offset, block)
    return sum(_sparsest(term, extent)[1].cost for term in _terms(pattern))


def _intersection(parts: tuple[Pattern, ...]) -> Pattern:
    return parts[0] if len(parts) == 1 else base.And(parts)


def _terms(pattern: Pattern) -> list[tuple[Pattern, ...]]:
    """The pattern as a union of intersections; one alone where they are too many."""
    terms = _expanded(pattern)
    if len(terms) > MANY_TERMS:
        return [(pattern,)]
    return list(dict.fromkeys(tuple(dict.fromkeys(term)) for term in terms))


def _expanded(pattern: Pattern) -> list[tuple[Pattern, ...]]:
    match pattern:
        case base.Or(parts):
            return [term for part in parts for term in _expanded(part)]
        case base.And(parts):
            choices = [_expanded(part) for part in parts]
            if math.prod(map(len, choices)) > MANY_TERMS:
                return [(pattern,)]
            return [sum(choice, ()) for choice in itertools.product(*choices)]
        case base.Not(base.Or(parts)):
            return _expanded(_intersection(tuple(~part for part in parts)))
        case base.Not(base.And(parts)):
            return [term for part in parts for term in _expanded(~part)]
        case atoms.Fixed():
            return [(part,) for part in pattern.parts]
        case atoms.GlobalTokens():
            return [(GlobalSide(pattern, False),), (GlobalSide(pattern, True),)]
    return [(pattern,)]


def _sparsest(term: tuple[Pattern, ...], extent: Extent) -> tuple[Pattern, Structure]:
    """The atom of an intersection that has the fewest tiles, and where they are."""
    choices = [(atom, structure_of(atom, extent)) for atom in term]
    return min(choices, key=lambda choice: choice[1].cost)


def _parts(
    term: tuple[Pattern, ...],
    others: tuple[Pattern, ...],
    excluded: tuple[Pattern, ...],
    structure: Structure,
) -> Iterator[Part]:
    """The tiles of one term, without those that others before it hold whole."""
    queries, keys = structure.queries, structure.keys
    if not queries.tiles or not keys.tiles:
        return
    tables = []
    width = max(1, structure.columns(np.zeros(1, np.int64)).shape[1])
    step = max(1, CHUNK // width)
    for begin in range(0, queries.tiles, step):
        rows = np.arange(begin, min(begin + step, queries.tiles))
        columns = structure.columns(rows)
        columns = np.where((columns >= 0) & (columns < keys.tiles), columns, -1)
        states = _states((*others, *excluded), structure, rows, columns)
        tables.append((rows, np.where(states == EMPTY, -1, columns), states))
    pattern = _intersection((*term, *excluded))
    for rows, columns, states in _groups(tables):
        yield Part(
            pattern,
            queries,
            keys,
            rows.astype(np.int32),
            columns.astype(np.int32),
            states.astype(np.int8),
        )


def _states(
    others: tuple[Pattern, ...],
    structure: Structure,
    rows: np.ndarray,
    columns: np.ndarray,
) -> np.ndarray:
    """What the tiles hold: told in this order, or by the ranges of their positions."""
    row_hulls, row_counts = structure.queries.hulls()
    hulls, counts = structure.keys.hulls()
    i = ranges.Range(row_hulls.start[rows][:, None], row_hulls.stop[rows][:, None])
    j = ranges.Range(hulls.start[columns], hulls.stop[columns])
    states = np.full(columns.shape, FULL)
    if structure.states:
        states = structure.states(rows[:, None], columns)
    for pattern in others:
        states = np.minimum(states, pattern.states(i, j))
    ragged = row_counts[rows][:, None] < structure.queries.tile
    ragged = ragged | (counts[columns] < structure.keys.tile)
    states = np.where(ragged, np.minimum(states, PARTIAL), states)
    nothing = (columns < 0) | (row_counts[rows][:, None] == 0) | (counts[columns] == 0)
    return np.where(nothing, EMPTY, states)


def _groups(
    tables: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The rows that have tiles: a band as it is, others sorted by how many."""
    width = max(columns.shape[1] for _, columns, _ in tables)
    rows = np.concatenate([rows for rows, _, _ in tables])
    columns = np.concatenate([_widened(columns, width, -1) for _, columns, _ in tables])
    states = np.concatenate([_widened(states, width, EMPTY) for *_, states in tables])
    used = (states != EMPTY).any(0)
    columns, states = columns[:, used], states[:, used]
    if not used.any():
        return
    if is_band(rows, columns):
        yield rows, columns, states
        return
    # What is no tile comes last, so that rows can be cut to their number.
    order = np.argsort(states == EMPTY, axis=1, kind="stable")
    columns = np.take_along_axis(columns, order, 1)
    states = np.take_along_axis(states, order, 1)
    counts = (states != EMPTY).sum(1)
    fewest = 1
    for most in _cuts(counts):
        group = np.flatnonzero((counts >= fewest) & (counts <= most))
        yield rows[group], columns[group, :most], states[group, :most]
        fewest = most + 1


def _cuts(counts: np.ndarray) -> list[int]:
    """Where to cut rows of so many tiles into groups that are padded to their longest.

    The cuts of the least padding, by dynamic programming over the counts that occur.
    """
    values, rows = np.unique(counts[counts > 0], return_counts=True)
    if values[-1] * rows.sum() <= EVEN * (values * rows).sum():
        return [int(values[-1])]
    before = np.concatenate([[0], np.cumsum(rows)])
    # The least cost of the first n values in g groups, and where the last one begins.
    cost = np.where(np.arange(len(before)) == 0, 0, np.inf)
    begins = []
    for _ in range(min(GROUPS, len(values))):
        sizes = before[None, 1:] - before[:-1, None]
        total = cost[:-1, None] + np.where(sizes > 0, sizes * values[None], np.inf)
        begins.append(total.argmin(0))
        cost = np.concatenate([[np.inf], total.min(0)])
    cuts, stop = [], len(values)
    for begin in reversed(begins):
        cuts.append(int(values[stop - 1]))
        stop = int(begin[stop - 1])
    return cuts[::-1]


def _widened(table: np.ndarray, width: int, filler: int | np.int8) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=filler)


def is_band(rows: np.ndarray, columns: np.ndarray) -> bool:
    """Tell whether rows are neighbours, and each slot's columns move with them."""
    shifts, limits = columns - rows[:, None], np.iinfo(columns.dtype)
    low = np.where(columns < 0, limits.max, shifts).min(0)
    high = np.where(columns < 0, limits.min, shifts).max(0)
    return bool((np.diff(rows) == 1).all() and (low == high).all())
