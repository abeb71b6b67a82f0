"""Ranges of positions, what rectangles of edges hold, and checks of integers."""

import dataclasses
import operator
from typing import Any

import numpy as np
from jax.typing import ArrayLike

# What a rectangle of edges holds: none that is allowed, some perhaps, all.
EMPTY, PARTIAL, FULL = np.int8(0), np.int8(1), np.int8(2)


@dataclasses.dataclass(frozen=True)
class Range:
    """Positions from `start` up to, without, `stop`; integer arrays of one shape."""

    start: np.ndarray
    stop: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """The last position."""
        return self.stop - 1


def check_lengths(query_length: int, key_length: int) -> None:
    """Check that both are integers from 0 on.

    Raises:
        TypeError, ValueError: as `check_integer`.
    """
    check_integer("query_length", query_length, 0)
    check_integer("key_length", key_length, 0)


def check_integer(name: str, value: Any, low: int) -> int:
    """Return an integer from `low` on and below 2^31: positions have 32 bits.

    Raises:
        TypeError: it is no integer.
        ValueError: it is outside.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not low <= operator.index(value) < 2**31:
        limits = f"at least {low}" if operator.index(value) < low else "below 2^31"
        raise ValueError(f"{name} must be {limits}, not {value}")
    return operator.index(value)


def as_integers(values: ArrayLike) -> np.ndarray:
    """Return the values as NumPy integers of 64 bits.

    Raises:
        TypeError: they are no integers.
    """
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"positions must be integers, not {array.dtype}")
    return array.astype(np.int64)


def true_like(x: Any) -> Any:
    """Return True in the shape of integers, of NumPy or JAX as they are."""
    return x == x


def states_of(full: np.ndarray, empty: np.ndarray) -> np.ndarray:
    """Return the states where these are full or empty; empty wins."""
    return np.where(empty, EMPTY, np.where(full, FULL, PARTIAL))


def blocks_of(positions: Range, size: int) -> Range:
    """Return the blocks of `size` that some positions lie in."""
    return Range(positions.start // size, positions.last // size + 1)
