"""How the key tiles of a part are read, and written when gradients are summed.

Where a row's key tiles stand side by side they are a slice, which is a plain copy;
elsewhere they are gathered one by one, which costs a CPU several times as much.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from transformer_jax.attention.sparse.parts import Part, is_band


class Access:
    """Reads and writes tiles `[B, K, C, k, H]`, n rows and W tiles of each at once.

    Attributes:
        columns: int32 `[R, W]`, the key tiles of all steps' rows; below 0 or from C on
            there is none.
        rows: int32 `[R]`, the query tiles of all steps; what fills the last step up
            is tile 0 without columns, or lies beyond the part.
    """

    def __init__(self, part: Part, at_once: int, width: int) -> None:
        """Prepare for steps of `at_once` rows that look at `width` tiles of each."""
        rows, most = part.columns.shape
        short, extra = -rows % at_once, -most % width
        starts = _starts(part.columns)
        alike = at_once == 1 or is_band(part.rows, part.columns)
        self._sliced = starts is not None and alike
        self.rows = np.pad(part.rows, (0, short))
        if not self._sliced:
            pad = ((0, short), (0, extra))
            self.columns = np.pad(part.columns, pad, constant_values=-1)
            self._front = self._behind = 0
            return
        # Rows beyond the last one go on as it does: a step's tiles stay side by side.
        beyond = np.arange(1, short + 1, dtype=np.int32)
        self.rows[rows:] = part.rows[-1] + beyond
        starts = np.concatenate([starts, starts[-1] + beyond])
        columns = starts[:, None] + np.arange(most + extra, dtype=np.int32)
        self.columns = columns.astype(np.int32)
        tiles = part.key_tiling.tiles
        self._front = max(0, -int(columns.min()))
        self._behind = max(0, int(columns.max()) + 1 - tiles)

    def padded(self, tiles: Array) -> Array:
        """Add tiles of zeros, so that every slice lies within."""
        if not self._front + self._behind:
            return tiles
        none = (0, 0)
        return jnp.pad(tiles, (none, none, (self._front, self._behind), none, none))

    def cut(self, tiles: Array) -> Array:
        """Undo `padded`."""
        return tiles[:, :, self._front : tiles.shape[2] - self._behind]

    def read(self, tiles: Array, columns: Int[Array, "n W"]) -> Array:
        """Return the tiles of n rows, `[n, B, K, W k, H]`."""
        n, width = columns.shape
        if not self._sliced:
            take = jax.vmap(lambda c: jnp.take(tiles, c, axis=2, mode="clip"))
            found = take(columns)
        else:
            block = self._slice(tiles, columns, n + width - 1)
            windows = [block[:, :, i : i + width] for i in range(n)]
            found = windows[0][None] if n == 1 else jnp.stack(windows)
        return found.reshape(*found.shape[:3], -1, found.shape[-1])

    def add(self, tiles: Array, columns: Int[Array, "n W"], new: Array) -> Array:
        """Add `[n, B, K, W k, H]` to the tiles of n rows."""
        n, width = columns.shape
        new = new.reshape(*new.shape[:3], width, -1, new.shape[-1])
        if not self._sliced:
            # What is none lies behind the end, and is dropped.
            index = jnp.where(columns < 0, tiles.shape[2], columns)
            return tiles.at[:, :, index].add(jnp.moveaxis(new, 0, 2), mode="drop")
        block = self._slice(tiles, columns, n + width - 1)
        for i in range(n):
            block = block.at[:, :, i : i + width].add(new[i])
        return jax.lax.dynamic_update_slice_in_dim(
            tiles, block, columns[0, 0] + self._front, axis=2
        )

    def _slice(self, tiles: Array, columns: Array, size: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(
            tiles, columns[0, 0] + self._front, size, axis=2
        )


def _starts(columns: np.ndarray) -> np.ndarray | None:
    """Where each row's tiles begin if they stand side by side; None if some do not."""
    places = columns - np.arange(columns.shape[1], dtype=np.int32)
    real = columns >= 0
    low = np.where(real, places, np.iinfo(np.int32).max).min(1)
    high = np.where(real, places, np.iinfo(np.int32).min).max(1)
    return low if (low == high).all() else None
