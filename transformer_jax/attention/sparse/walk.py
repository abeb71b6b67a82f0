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

from transformer_jax import masks
from transformer_jax.attention.merging import merge
from transformer_jax.attention.products import product, wide_dtype
from transformer_jax.attention.sparse.access import Access
from transformer_jax.attention.sparse.edges import Edges, Plan
from transformer_jax.attention.sparse.operands import (
    Operands,
    float_zeros,
    floats,
    varying_like,
    with_floats,
)
from transformer_jax.attention.sparse.parts import Part, partition

# Scores that a step computes, 2 MiB of float32: what fits in a cache.
BUDGET = 1 << 19
# Query tiles that a step looks at, at most: its program is unrolled over them.
AT_ONCE = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """Return output `[B, T, N, V]` and log-sum-exp `[B, T, N]`.

    In float32 (float64 for float64). Forward, every look at some key tiles gives
    sum_j exp(s_j - m) v_j / l and lse = m + log l (Rabe and Staats 2021,
    https://arxiv.org/abs/2112.05682), which are merged; backward

        p = exp(s - lse);  ds = p (dp - D);  D = dout . out - dlse

    (Dao et al. 2022, section 3.1, https://arxiv.org/abs/2205.14135).
    """
    return _forward(plan, operands)[0]


def _forward(plan: Plan, operands: Operands) -> tuple[tuple[Array, Array], tuple]:
    query, value = operands.query, operands.value
    walks = [_Walk(plan, part, operands) for part in parts_of(plan)]
    if walks:
        result = functools.reduce(merge, (walk.forward(query) for walk in walks))
    else:
        result = _nothing((*query.shape[:3], value.shape[-1]), wide_dtype(query))
    return result, (operands, *result)


def _backward(plan: Plan, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    operands, output, residual = saved
    query, value = operands.query, operands.value
    alive = residual != -jnp.inf
    output_grad = masks.or_zero(alive[..., None], cotangents[0])
    delta = (output_grad * output).sum(-1) - masks.or_zero(alive, cotangents[1])
    queries = (
        masks.or_zero(alive[..., None], query),
        output_grad.astype(value.dtype),
        delta,
        masks.or_zero(alive, residual),
    )
    wanted = (query, operands.key, value, operands.scale)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(query)), wanted)
    sums = varying_like((*sums, float_zeros(operands.bias)), query)
    for part in parts_of(plan):
        new = _Walk(plan, part, operands).backward(queries)
        sums = jax.tree.map(jnp.add, sums, new)
    gradients = jax.tree.map(lambda x, of: x.astype(of.dtype), sums[:4], wanted)
    bias = with_floats(sums[4], operands.bias)
    return (Operands(*gradients, bias, None, None),)


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


class _Walk:
    """A walk over the tiles of one part.

    Axes as in `edges`: a step looks at n query tiles and at W key tiles of each.
    """

    def __init__(self, plan: Plan, part: Part, operands: Operands) -> None:
        self.plan, self.part = plan, part
        _, key, value, self.scale, self.bias, self.limits, self.rng = operands
        self.wide = wide_dtype(key)
        self.at_once, self.width = self._step_sizes()
        self.access = Access(part, self.at_once, self.width)
        self.key, self.value = (self._key_tiles(x) for x in (key, value))

    def _step_sizes(self) -> tuple[int, int]:
        """How many query tiles a step looks at, and how many key tiles of each."""
        sizes, part = self.plan.sizes, self.part
        rows, width = part.columns.shape
        tile = part.query_tiling.tile * part.key_tiling.tile
        # At most half of all edges, and no more gathered keys than there are.
        room = min(BUDGET // sizes.batch, sizes.query_length * sizes.key_length // 2)
        tiles = max(1, room // (sizes.heads * tile))
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
                # One look: nothing to merge.
                return carry, self._mean(rows, columns, query)
            nothing = _nothing((*query.shape[:-1], self.value.shape[-1]), self.wide)
            nothing = varying_like(nothing, query)
            return carry, self._over_columns(look, nothing, rows, columns, query)[0]

        xs = (self._query_tiles(query),)
        _, (output, residual) = self._over_rows(step, None, xs)
        return self._restored(output, 0.0), self._restored(residual, -jnp.inf)

    def _mean(self, rows: Array, columns: Array, query: Array) -> tuple[Array, Array]:
        """Output `[n, B, K, G, q, V]` and log-sum-exp over some key tiles."""
        edges = self._edges(rows, columns)
        scores = edges.biased(
            self._scaled(self._products(edges, columns, query)), self.bias
        )
        top = scores.max(-1, keepdims=True)
        top = masks.or_zero(top > -jnp.inf, top)
        powers = jnp.exp(scores - top)
        total = powers.sum(-1)
        kept = edges.dropped(powers).astype(self.value.dtype)
        values = edges.live(self.access.read(self.value, columns))
        output = product("bqs,bsh->bqh", kept, values)
        safe = jnp.where(total == 0, jnp.ones((), self.wide), total)
        residual = jnp.where(total == 0, -jnp.inf, top[..., 0] + jnp.log(safe))
        return output / safe[..., None], residual

    def backward(self, queries: tuple[Array, ...]) -> tuple:
        """Gradients of query, key, value, scale and the bias's floating leaves.

        `queries` holds what a whole row needs: the query, the output's cotangent, D and
        the log-sum-exp.
        """

        def look(carry: tuple, xs: tuple) -> tuple[tuple, None]:
            *sums, query_sum = carry
            *sums, new = self._pulled_back(sums, *xs)
            return (*sums, query_sum + new), None

        def step(sums: tuple, xs: tuple) -> tuple[tuple, Array]:
            rows, columns, *queries = xs
            new = jnp.zeros(queries[0].shape, self.wide)
            carry = (*sums, varying_like(new, queries[0]))
            carry, _ = self._over_columns(look, carry, rows, columns, *queries)
            return carry[:-1], carry[-1]

        sums = (
            jnp.zeros(self.key.shape, self.wide),
            jnp.zeros(self.value.shape, self.wide),
            None if self.scale is None else jnp.zeros((), self.wide),
            float_zeros(self.bias),
        )
        sums = varying_like(sums, self.key)
        xs = tuple(map(self._query_tiles, queries))
        sums, query_sum = self._over_rows(step, sums, xs)
        key_sum, value_sum, scale_sum, bias_sum = sums
        return (
            self._restored(query_sum, 0.0),
            self._restored_keys(key_sum),
            self._restored_keys(value_sum),
            scale_sum,
            bias_sum,
        )

    def _pulled_back(
        self,
        sums: list,
        rows: Array,
        columns: Array,
        query: Array,
        output_grad: Array,
        delta: Array,
        residual: Array,
    ) -> tuple:
        """`sums` with what these tiles add, and what they add to the queries'."""
        key_sum, value_sum, scale_sum, bias_sum = sums
        edges = self._edges(rows, columns)
        products = self._products(edges, columns, query)
        raw = self._scaled(products)
        if callable(self.bias):
            scores, pullback = jax.vjp(lambda bias: edges.biased(raw, bias), self.bias)
        else:
            scores, pullback = edges.biased(raw, self.bias), None
        weights = jnp.exp(scores - residual[..., None])
        kept = edges.dropped(weights).astype(self.value.dtype)
        keys, values = (
            edges.live(self.access.read(x, columns)) for x in (self.key, self.value)
        )
        change = product("bqh,bsh->bqs", output_grad, values)
        change = weights * (edges.dropped(change) - delta[..., None])
        if pullback:
            new = floats(pullback(change)[0], self.bias)
            bias_sum = jax.tree.map(jnp.add, bias_sum, new)
        elif bias_sum:
            bias_sum = [edges.give(x, change.astype(x.dtype)) for x in bias_sum]
        if self.scale is not None:
            # Forbidden edges add 0 * 0: what nothing reads, even NaN, is zero here.
            scale_sum += (change * products).sum()
        change = self._scaled(change).astype(query.dtype)
        return (
            self.access.add(key_sum, columns, product("bqs,bqh->bsh", change, query)),
            self.access.add(
                value_sum, columns, product("bqs,bqh->bsh", kept, output_grad)
            ),
            scale_sum,
            bias_sum,
            product("bqs,bsh->bqh", change, keys),
        )

    def _edges(self, rows: Array, columns: Array) -> Edges:
        return Edges(self.plan, self.part, self.limits, self.rng, rows, columns)

    def _scaled(self, x: Array) -> Array:
        scale = self.plan.scale if self.scale is None else self.scale
        return x * jnp.asarray(scale, self.wide)

    def _products(self, edges: Edges, columns: Array, query: Array) -> Array:
        keys = edges.live(self.access.read(self.key, columns))
        return product("bqh,bsh->bqs", query, keys)

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
        """`[B, T, N, ...]` as the part's rows `[R, B, K, G, q, ...]`."""
        tiles = jax.vmap(self.part.query_tiling.arrange)(x)
        if not self._has_all_rows:
            tiles = tiles[:, self.part.rows]
        heads = (self.plan.sizes.kv_heads, self.plan.group)
        tiles = tiles.reshape(*tiles.shape[:3], *heads, *tiles.shape[4:])
        return jnp.moveaxis(tiles, (0, 2), (1, 4))

    def _restored(self, x: Array, filler: float) -> Array:
        """Undo `_query_tiles`; elsewhere stands the filler."""
        tiling = self.part.query_tiling
        x = jnp.moveaxis(x, (1, 4), (0, 2))
        x = x.reshape(*x.shape[:3], self.plan.sizes.heads, *x.shape[5:])
        if not self._has_all_rows:
            shape = (len(x), tiling.tiles, *x.shape[2:])
            x = jnp.full(shape, filler, x.dtype).at[:, self.part.rows].set(x)
        return jax.vmap(lambda tiles: tiling.restore(tiles, filler))(x)

    @property
    def _has_all_rows(self) -> bool:
        return len(self.part.rows) == self.part.query_tiling.tiles

    def _key_tiles(self, x: Array) -> Array:
        """`[B, S, K, H]` as `[B, K, C, k, H]`."""
        tiles = jax.vmap(self.part.key_tiling.arrange)(x)
        return self.access.padded(jnp.moveaxis(tiles, 3, 1))

    def _restored_keys(self, x: Array) -> Array:
        """Undo `_key_tiles`; elsewhere stands zero."""
        restore = jax.vmap(lambda tiles: self.part.key_tiling.restore(tiles, 0.0))
        return restore(jnp.moveaxis(self.access.cut(x), 1, 3))
