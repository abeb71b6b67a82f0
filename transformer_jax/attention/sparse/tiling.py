"""Positions in tiles, in an order in which a pattern is block-sparse."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from transformer_jax.patterns.ranges import Range


@dataclasses.dataclass(frozen=True)
class Grid:
    """The positions offset, ..., offset + length - 1, class by class, in tiles.

    The class of a position is its chunk of `period` positions, or with `residues` its
    residue modulo `period`; a period of 0 makes one class. Classes are cut into tiles,
    the last of each being ragged. Rearranging is a reshape and a transpose.
    """

    offset: int
    length: int
    tile: int
    period: int = 0
    residues: bool = False

    @property
    def classes(self) -> int:
        """How many classes there are."""
        if self.residues:
            return self.period
        return self._chunks[1] - self._chunks[0]

    @property
    def tiles_of_class(self) -> int:
        """Tiles of each class."""
        first, stop = self.members
        return -(-(stop - first) // self.tile)

    @property
    def tiles(self) -> int:
        """Tiles in all, R."""
        return self.classes * self.tiles_of_class

    @property
    def members(self) -> tuple[int, int]:
        """The first place within a class, and the one behind the last."""
        stop = self.offset + self.length
        if self.residues:
            return self.offset // self.period, -(-stop // self.period)
        if self.classes > 1:
            return 0, self.period
        begin = self._chunks[0] * self.period
        return self.offset - begin, stop - begin

    @property
    def _chunks(self) -> tuple[int, int]:
        """The first chunk and the one behind the last."""
        if not self.period:
            return 0, 1
        return self.offset // self.period, -(
            -(self.offset + self.length) // self.period
        )

    def place(self, tiles: Any) -> tuple[Any, Any]:
        """Return class and first member of tiles, integer arrays of any kind."""
        first, _ = self.members
        number, within = tiles // self.tiles_of_class, tiles % self.tiles_of_class
        return number, first + within * self.tile

    def positions(self, tiles: Any, xp: Any = np) -> tuple[Any, Any]:
        """Return the positions `[..., tile]` of tiles `[...]`, and which are real."""
        number, first = self.place(tiles)
        within = xp.arange(self.tile, dtype=first.dtype)
        members = first[..., None] + within.reshape((1,) * first.ndim + (-1,))
        positions = self._position(number[..., None], members)
        real = (positions >= self.offset) & (positions < self.offset + self.length)
        return positions, real & (members < self.members[1])

    def hulls(self) -> tuple[Range, np.ndarray]:
        """Return the range of each tile's positions, and how many they are."""
        number, first = self.place(np.arange(self.tiles, dtype=np.int64))
        stop = np.minimum(first + self.tile, self.members[1])
        end = self.offset + self.length
        if self.residues:
            first = np.maximum(first, -((number - self.offset) // self.period))
            stop = np.minimum(stop, -((number - end) // self.period))
            hull = Range(
                self._position(number, first), self._position(number, stop - 1) + 1
            )
        else:
            first, stop = self._position(number, first), self._position(number, stop)
            first, stop = np.maximum(first, self.offset), np.minimum(stop, end)
            hull = Range(first, stop)
        return hull, np.maximum(stop - first, 0)

    def _position(self, number: Any, member: Any) -> Any:
        if self.residues:
            return member * self.period + number
        return (number + self._chunks[0]) * self.period + member

    def arrange(self, x: Array) -> Array:
        """Return `[length, ...]` as tiles `[R, tile, ...]`, zero where nothing is."""
        first, stop = self.members
        size, rest = stop - first, x.shape[1:]
        front = self.offset - self._position(0, first)
        x = _padded(x, front, self.classes * size - front - len(x))
        if self.residues:
            x = x.reshape(size, self.classes, *rest).swapaxes(0, 1)
        else:
            x = x.reshape(self.classes, size, *rest)
        short = self.tiles_of_class * self.tile - size
        x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * len(rest))
        return x.reshape(self.tiles, self.tile, *rest)

    def restore(self, x: Array, filler: float) -> Array:
        """Return tiles `[R, tile, ...]` as `[length, ...]`: undo `arrange`.

        All positions are in tiles, so nothing takes the filler.
        """
        del filler
        first, stop = self.members
        size, rest = stop - first, x.shape[2:]
        x = x.reshape(self.classes, self.tiles_of_class * self.tile, *rest)[:, :size]
        if self.residues:
            x = x.swapaxes(0, 1)
        x = x.reshape(self.classes * size, *rest)
        front = self.offset - self._position(0, first)
        return x[front : front + self.length]


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A few of the positions offset, ..., offset + length - 1, in tiles."""

    offset: int
    length: int
    tile: int
    chosen: np.ndarray

    @property
    def tiles(self) -> int:
        """Tiles in all, R."""
        return -(-len(self.chosen) // self.tile)

    def positions(self, tiles: Any, xp: Any = np) -> tuple[Any, Any]:
        """See `Grid.positions`."""
        table = xp.asarray(self._table())[tiles]
        return table, table >= 0

    def hulls(self) -> tuple[Range, np.ndarray]:
        """See `Grid.hulls`."""
        table = self._table().astype(np.int64)
        counts = (table >= 0).sum(1)
        last = table[np.arange(len(table)), counts - 1]
        return Range(table[:, 0], last + 1), counts

    def arrange(self, x: Array) -> Array:
        """See `Grid.arrange`."""
        rows = self.chosen - self.offset
        x = jnp.pad(x[rows], [(0, self._short)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(self.tiles, self.tile, *x.shape[1:])

    def restore(self, x: Array, filler: float) -> Array:
        """Return tiles `[R, tile, ...]` as `[length, ...]`, elsewhere the filler."""
        x = x.reshape(self.tiles * self.tile, *x.shape[2:])[: len(self.chosen)]
        rows = self.chosen - self.offset
        whole = jnp.full((self.length, *x.shape[1:]), filler, x.dtype)
        return whole.at[rows].set(x)

    @property
    def _short(self) -> int:
        return self.tiles * self.tile - len(self.chosen)

    def _table(self) -> np.ndarray:
        table = np.full(self.tiles * self.tile, -1, np.int32)
        table[: len(self.chosen)] = self.chosen
        return table.reshape(self.tiles, self.tile)


def _padded(x: Array, front: int, behind: int) -> Array:
    """`x` with zeros before and behind; a negative number cuts off."""
    config = [(front, behind, 0)] + [(0, 0, 0)] * (x.ndim - 1)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)
