"""Attention along a static pattern, at the cost of the tiles that hold its edges.

Each part of the pattern (`partition`) is a list of tiles; a scan goes over its query
tiles and sees a few key tiles of each at a time. Parts merge by their log-sum-exps; the
backward pass computes the weights anew from the final one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from transformer_jax.attention.arguments import Limits
from transformer_jax.attention.merging import merge
from transformer_jax.attention.sparse.access import Access
from transformer_jax.attention.sparse.edges import Edges, Plan
from transformer_jax.attention.sparse.parts import Part, partition

# Scores that are computed at once, if there are so many: what fits in a cache.
BUDGET = 1 << 19
# Query tiles that a step looks at, at most: its program names each.
AT_ONCE = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    bias: Any,
    limits: Limits,
    rng: Any,
) -> tuple[Array, Array]:
    """Return output `[B, T, N, V]` and log-sum-exp `[B, T, N]`, in 32 or 64 bits."""
    return _forward(plan, query, key, value, bias, limits, rng)[0]


def _forward(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    bias: Any,
    limits: Limits,
    rng: Any,
) -> tuple[tuple[Array, Array], tuple]:
    walks = [
        _Walk(plan, part, key, value, bias, limits, rng) for part in parts_of(plan)
    ]
    if walks:
        result = functools.reduce(merge, (walk.forward(query) for walk in walks))
    else:
        result = _nothing((*query.shape[:3], value.shape[-1]), _wide(query))
    return result, (query, key, value, bias, limits, rng, *result)


def _backward(plan: Plan, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    query, key, value, bias, limits, rng, output, residual = saved
    wide = _wide(query)
    alive = residual > -jnp.inf
    up = jnp.where(alive[..., None], cotangents[0], jnp.zeros((), wide))
    mean = (up * output).sum(-1)
    mean -= jnp.where(alive, cotangents[1], jnp.zeros((), wide))
    rows = (
        jnp.where(alive[..., None], query, jnp.zeros((), query.dtype)),
        up.astype(value.dtype),
        mean,
        jnp.where(alive, residual, jnp.zeros((), wide)),
    )
    sums = [jnp.zeros(x.shape, wide) for x in (query, key, value)]
    sums.append(jax.tree.map(jnp.zeros_like, bias))
    for part in parts_of(plan):
        new = _Walk(plan, part, key, value, bias, limits, rng).backward(rows)
        sums = [jax.tree.map(jnp.add, a, b) for a, b in zip(sums, new, strict=True)]
    *gradients, bias_gradient = sums
    gradients = [
        x.astype(of.dtype) for x, of in zip(gradients, (query, key, value), strict=True)
    ]
    return *gradients, bias_gradient, None, None


attend.defvjp(_forward, _backward)


def parts_of(plan: Plan) -> tuple[Part, ...]:
    """Return the pattern of a plan, taken apart."""
    return partition(
        plan.pattern,
        plan.sizes.query_length,
        plan.sizes.key_length,
        block=plan.block,
        query_offset=plan.offset,
    )


def _nothing(shape: tuple[int, ...], wide: Any) -> tuple[Array, Array]:
    """What attention to no key gives, an output `[..., V]` and its log-sum-exp."""
    return jnp.zeros(shape, wide), jnp.full(shape[:-1], -jnp.inf, wide)


def _wide(x: Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


class _Walk:
    """A walk over the tiles of one part.

    Axes as in `edges`: a step looks at n query tiles and at W key tiles of each.
    """

    def __init__(
        self,
        plan: Plan,
        part: Part,
        key: Array,
        value: Array,
        bias: Any,
        limits: Limits,
        rng: Any,
    ) -> None:
        self.plan, self.part, self.bias = plan, part, bias
        self.limits, self.rng = limits, rng
        self.wide = _wide(key)
        self.product = functools.partial(jnp.einsum, preferred_element_type=self.wide)
        self.at_once, self.width = self._step_sizes()
        self.access = Access(part, self.at_once, self.width)
        self.key, self.value = (self._key_tiles(x) for x in (key, value))

    def _step_sizes(self) -> tuple[int, int]:
        """How many query tiles a step looks at, and how many key tiles of each."""
        sizes, part = self.plan.sizes, self.part
        rows, width = part.columns.shape
        tile = part.query_tiling.tile * part.key_tiling.tile
        # Never as many scores as dense attention has, nor as many keys as there are.
        most = min(BUDGET, sizes.query_length * sizes.key_length // 2)
        tiles = max(1, most // max(1, sizes.batch * sizes.heads * tile))
        keys = sizes.key_length // (width * part.key_tiling.tile)
        at_once = max(1, min(rows, tiles // width, keys, AT_ONCE))
        # Evenly: no step is mostly filled up.
        at_once = -(-rows // -(-rows // at_once))
        return at_once, min(width, tiles)

    def forward(self, query: Array) -> tuple[Array, Array]:
        """Output `[B, T, N, V]` and log-sum-exp `[B, T, N]`."""

        def look(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            rows, columns, query = xs
            return merge(carry, self._mean(rows, columns, query)), None

        def step(carry: None, xs: tuple) -> tuple[None, tuple]:
            rows, columns, query = xs
            if columns.shape[1] == self.width:
                return carry, self._mean(rows, columns, query)
            nothing = _nothing((*query.shape[:-1], self.value.shape[-1]), self.wide)
            return carry, self._over_columns(look, nothing, rows, columns, query)[0]

        xs = (self._query_tiles(query),)
        _, (output, residual) = self._over_rows(step, None, xs)
        return self._restored(output, 0.0), self._restored(residual, -jnp.inf)

    def _mean(self, rows: Array, columns: Array, query: Array) -> tuple[Array, Array]:
        """Output `[n, B, q, K, G, V]` and log-sum-exp over some key tiles."""
        edges = self._edges(rows, columns)
        scores = edges.biased(self._scores(edges, columns, query), self.bias)
        top = scores.max(-1, keepdims=True)
        top = jnp.where(top == -jnp.inf, jnp.zeros((), self.wide), top)
        powers = jnp.exp(scores - top)
        total = powers.sum(-1)
        kept = edges.dropped(powers).astype(self.value.dtype)
        values = edges.live(self.access.read(self.value, columns))
        output = self.product("nBKGqs,nBsKV->nBqKGV", kept, values)
        safe = jnp.where(total == 0, jnp.ones((), self.wide), total)
        residual = jnp.where(total == 0, -jnp.inf, top[..., 0] + jnp.log(safe))
        return output / _rows_first(safe)[..., None], _rows_first(residual)

    def backward(self, rows: tuple[Array, ...]) -> tuple:
        """Gradients of query, key, value and bias.

        `rows` holds of every query what its whole row needs: the query, the output's
        cotangent, the mean of the weights' cotangents less the log-sum-exp's, and the
        log-sum-exp.
        """

        def look(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            *sums, query_sum = carry
            *sums, new = self._pulled_back(sums, *xs)
            return (*sums, query_sum + new), None

        def step(sums: tuple, xs: tuple) -> tuple[tuple, Array]:
            numbers, columns, *rows = xs
            carry = (*sums, jnp.zeros(rows[0].shape, self.wide))
            carry, _ = self._over_columns(look, carry, numbers, columns, *rows)
            return carry[:-1], carry[-1]

        sums = (
            jnp.zeros(self.key.shape, self.wide),
            jnp.zeros(self.value.shape, self.wide),
            jax.tree.map(jnp.zeros_like, self.bias),
        )
        xs = tuple(map(self._query_tiles, rows))
        (key_sum, value_sum, bias_sum), query_sum = self._over_rows(step, sums, xs)
        return (
            self._restored(query_sum, 0.0),
            self._restored_keys(key_sum),
            self._restored_keys(value_sum),
            bias_sum,
        )

    def _pulled_back(
        self,
        sums: list,
        rows: Array,
        columns: Array,
        query: Array,
        up: Array,
        mean: Array,
        residual: Array,
    ) -> tuple:
        """`sums` with what these tiles add, and what they add to the queries'."""
        key_sum, value_sum, bias_sum = sums
        edges = self._edges(rows, columns)
        raw = self._scores(edges, columns, query)
        if callable(self.bias):
            scores, pullback = jax.vjp(lambda bias: edges.biased(raw, bias), self.bias)
        else:
            scores, pullback = edges.biased(raw, self.bias), None
        weights = jnp.exp(scores - _rows_last(residual)[..., None])
        kept = edges.dropped(weights).astype(self.value.dtype)
        keys, values = (
            edges.live(self.access.read(x, columns)) for x in (self.key, self.value)
        )
        change = self.product("nBqKGV,nBsKV->nBKGqs", up, values)
        change = weights * (edges.dropped(change) - _rows_last(mean)[..., None])
        if pullback:
            bias_sum = jax.tree.map(jnp.add, bias_sum, pullback(change)[0])
        elif self.bias is not None:
            bias_sum = edges.give(bias_sum, change.astype(bias_sum.dtype))
        change = (change * self.plan.scale).astype(query.dtype)
        return (
            self.access.add(
                key_sum, columns, self.product("nBKGqs,nBqKGH->nBsKH", change, query)
            ),
            self.access.add(
                value_sum, columns, self.product("nBKGqs,nBqKGV->nBsKV", kept, up)
            ),
            bias_sum,
            self.product("nBKGqs,nBsKH->nBqKGH", change, keys),
        )

    def _edges(self, rows: Array, columns: Array) -> Edges:
        return Edges(self.plan, self.part, self.limits, self.rng, rows, columns)

    def _scores(self, edges: Edges, columns: Array, query: Array) -> Array:
        keys = edges.live(self.access.read(self.key, columns))
        scores = self.product("nBqKGH,nBsKH->nBKGqs", query, keys)
        return scores * jnp.asarray(self.plan.scale, self.wide)

    def _over_columns(
        self, look: Callable, carry: tuple, rows: Array, columns: Array, *arrays: Array
    ) -> tuple:
        """Go over the key tiles `[n, W]` of a step, as many at once as have room."""
        steps = -(-columns.shape[1] // self.width)
        if steps == 1:
            return look(carry, (rows, columns, *arrays))
        columns = columns.reshape(len(columns), steps, -1).swapaxes(0, 1)
        return jax.lax.scan(
            lambda carry, some: look(carry, (rows, some, *arrays)), carry, columns
        )

    def _over_rows(self, step: Callable, carry: Any, xs: tuple) -> tuple:
        """Go over the part's query tiles, as many at once as there is room."""
        rows, padded = len(self.part.rows), len(self.access.rows)
        pad = [(0, padded - rows)]
        xs = [jnp.pad(x, pad + [(0, 0)] * (x.ndim - 1)) for x in xs]
        xs = [
            x.reshape(padded // self.at_once, self.at_once, *x.shape[1:])
            for x in map(jnp.asarray, (self.access.rows, self.access.columns, *xs))
        ]
        carry, ys = jax.lax.scan(step, carry, tuple(xs))
        return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:rows], ys)

    def _query_tiles(self, x: Array) -> Array:
        """`[B, T, N, ...]` as the part's rows `[R, B, q, K, G, ...]`."""
        tiles = jax.vmap(self.part.query_tiling.arrange)(x)
        if not self._has_all_rows:
            tiles = tiles[:, self.part.rows]
        heads = (self.plan.sizes.kv_heads, self.plan.group)
        return tiles.swapaxes(0, 1).reshape(
            *tiles.shape[1::-1], tiles.shape[2], *heads, *tiles.shape[4:]
        )

    def _restored(self, x: Array, filler: float) -> Array:
        """Undo `_query_tiles`; elsewhere stands the filler."""
        tiling = self.part.query_tiling
        x = x.swapaxes(0, 1)
        x = x.reshape(*x.shape[:3], self.plan.sizes.heads, *x.shape[5:])
        if not self._has_all_rows:
            shape = (len(x), tiling.tiles, *x.shape[2:])
            x = jnp.full(shape, filler, x.dtype).at[:, self.part.rows].set(x)
        return jax.vmap(lambda tiles: tiling.restore(tiles, filler))(x)

    @property
    def _has_all_rows(self) -> bool:
        return len(self.part.rows) == self.part.query_tiling.tiles

    def _key_tiles(self, x: Array) -> Array:
        """`[B, S, K, ...]` as `[B, C, k, K, ...]`."""
        return self.access.padded(jax.vmap(self.part.key_tiling.arrange)(x))

    def _restored_keys(self, x: Array) -> Array:
        """Undo `_key_tiles`; elsewhere stands zero."""
        restore = jax.vmap(lambda tiles: self.part.key_tiling.restore(tiles, 0.0))
        return restore(self.access.cut(x))


def _rows_first(x: Array) -> Array:
    """`[n, B, K, G, q]` as `[n, B, q, K, G]`."""
    return jnp.moveaxis(x, -1, 2)


def _rows_last(x: Array) -> Array:
    """Undo `_rows_first`."""
    return jnp.moveaxis(x, 2, -1)
