"""The edges of a few tiles: which are allowed, their bias, what dropout keeps.

Axes: n query tiles at once, q places of each; B, K, G batch, key/value heads and query
heads on each of those; s places of the key tiles that are looked at together.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax import masks
from transformer_jax.attention.arguments import Limits, Sizes, evaluate_bias
from transformer_jax.attention.sparse.parts import Part
from transformer_jax.patterns import Pattern


class Plan(NamedTuple):
    """What is static of a call whose heads have one pattern.

    Attributes:
        pattern: of every head.
        offset: position of the first query.
        scale: factor of the scores, 1 where that is an array.
        block: places of a tile.
        rate: chance to drop an edge.
        heads: numbers of the query heads.
        all_heads: how many a callable bias tells of.
        sizes: of the arrays.
    """

    pattern: Pattern
    offset: int
    scale: float
    block: int
    rate: float
    heads: tuple[int, ...]
    all_heads: int
    sizes: Sizes

    @property
    def group(self) -> int:
        """Query heads on each key/value head, G."""
        return self.sizes.heads // self.sizes.kv_heads


class Edges:
    """Edges from query tiles `rows` `[n]` to key tiles `columns` `[n, W]`.

    Numbers of tiles that are none have no edges.

    Attributes:
        allowed: booleans `[n, b, k, g, q, s]`; b, k and g are B, K and G, or 1.
    """

    def __init__(
        self,
        plan: Plan,
        part: Part,
        limits: Limits,
        rng: Any,
        rows: Array,
        columns: Array,
    ) -> None:
        self._plan, self._limits, self._rng = plan, limits, rng
        i, real = part.query_tiling.positions(rows, jnp)
        real &= (rows < part.query_tiling.tiles)[:, None]
        tiles = part.key_tiling.tiles
        j, exists = part.key_tiling.positions(jnp.clip(columns, 0, tiles - 1), jnp)
        exists &= ((columns >= 0) & (columns < tiles))[..., None]
        self._i, self._j = i, j.reshape(len(i), -1)
        edges = part.pattern.allowed(self._i[:, :, None], self._j[:, None])
        edges = edges & real[:, :, None] & exists.reshape(len(i), 1, -1)
        self.allowed = self._limited(edges[:, None, None, None])

    def _limited(self, allowed: Array) -> Array:
        """Without the edges that limits forbid, `[n, b, k, g, q, s]`."""
        limits, (t, s) = self._limits, self._rows_and_columns
        if limits.query_lengths is not None:
            inside = t[:, None] < limits.query_lengths[None, :, None]
            allowed &= inside[:, :, None, None, :, None]
        if limits.key_lengths is not None:
            inside = s[:, None] < limits.key_lengths[None, :, None]
            allowed &= inside[:, :, None, None, None]
        if limits.query_ids is not None:
            one = limits.query_ids[:, t].swapaxes(0, 1)[..., None]
            other = limits.key_ids[:, s].swapaxes(0, 1)[:, :, None]
            allowed &= ((one == other) & (one != 0))[:, :, None, None]
        if limits.mask is not None:
            allowed &= self._taken(limits.mask)
        return allowed

    @property
    def _rows_and_columns(self) -> tuple[Array, Array]:
        """Rows `[n, q]` and columns `[n, s]`; any for what is no position."""
        sizes = self._plan.sizes
        rows = jnp.clip(self._i - self._plan.offset, 0, sizes.query_length - 1)
        return rows, jnp.clip(self._j, 0, sizes.key_length - 1)

    def _index(self, array: Array) -> tuple[Array, Array]:
        """Indices of the two last axes of `[..., t, s]`; 0 for an axis of size 1."""
        t, s = self._rows_and_columns
        none = jnp.zeros((1, 1, 1), jnp.int32)
        return (
            t[:, :, None] if array.shape[2] > 1 else none,
            s[:, None] if array.shape[3] > 1 else none,
        )

    def _taken(self, array: Array) -> Array:
        """From `[b, h, t, s]` what belongs to the tiles, `[n, b, k, g, q, s]`."""
        b, h = array.shape[:2]
        taken = jnp.moveaxis(array[:, :, *self._index(array)], 2, 0)
        k = self._plan.sizes.kv_heads if h > 1 else 1
        return taken.reshape(len(taken), b, k, h // k, *taken.shape[3:])

    def give(self, total: Array, change: Array) -> Array:
        """Add to `[b, h, t, s]` what belongs to the tiles: the transpose of taking."""
        b, h = total.shape[:2]
        change = change.reshape(*change.shape[:2], -1, *change.shape[4:])
        change = jnp.moveaxis(change, 0, 2)
        t, s = self._index(total)
        shape = (b, h, *jnp.broadcast_shapes(t.shape, s.shape))
        axes = [a for a in range(5) if shape[a] == 1 and change.shape[a] > 1]
        return total.at[:, :, t, s].add(change.sum(axes, keepdims=True))

    def live(self, tiles: Array) -> Array:
        """Keys or values `[n, B, K, s, H]`, zero where no query of a tile reads."""
        live = self.allowed.any((3, 4))[..., None]
        return masks.or_zero(live, tiles)

    def biased(self, scores: Array, bias: Any) -> Array:
        """Scores `[n, B, K, G, q, s]` with bias, -inf where nothing is allowed."""
        if callable(bias):
            scores = scores + self._evaluated(bias).astype(scores.dtype)
        elif bias is not None:
            scores = scores + self._taken(bias).astype(scores.dtype)
        return jnp.where(self.allowed, scores, -jnp.inf)

    def _evaluated(self, bias: Any) -> Array:
        """A callable bias, `[n, 1, K, G, q, s]`."""
        plan = self._plan

        def of_tile(i: Array, j: Array) -> Array:
            return evaluate_bias(bias, i[:, None], j[None], plan.all_heads)

        values = jax.vmap(of_tile)(self._i, self._j)[:, :, list(plan.heads)]
        shape = (len(values), 1, plan.sizes.kv_heads, plan.group)
        return values.reshape(*shape, *values.shape[3:])

    def dropped(self, x: Array) -> Array:
        """Weights or their cotangents where dropout keeps the edge, scaled; else 0."""
        plan = self._plan
        if not plan.rate:
            return x
        b = jnp.arange(plan.sizes.batch, dtype=jnp.int32)
        n = jnp.asarray(plan.heads, jnp.int32)
        keep = masks.hashed_keep(
            self._rng,
            plan.rate,
            b.reshape(1, -1, 1, 1, 1, 1),
            n.reshape(1, 1, plan.sizes.kv_heads, plan.group, 1, 1),
            self._i[:, None, None, None, :, None],
            self._j[:, None, None, None, None],
        )
        return masks.or_zero(keep, x / (1.0 - plan.rate))
