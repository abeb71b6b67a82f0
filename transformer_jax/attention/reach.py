"""Which queries and keys have an edge at all, for kernels that do not tell.

Others' kernels return a mean of everything for a query without a key, and read keys
that nothing attends; what is found here is selected around them.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from transformer_jax import masks
from transformer_jax.attention.arguments import Call
from transformer_jax.patterns import Pattern
from transformer_jax.patterns.ranges import EMPTY, FULL

# Rows and columns of edges that are looked at together.
TILE = 128


def cleaned(call: Call) -> tuple[Call, Bool[Array, "B T 1 1"]]:
    """Return a call whose dead queries and keys are 0, and which queries are alive.

    For the calls of `alive`.
    """
    queries, keys = (x[..., None, None] for x in alive(call))
    call = call._replace(
        query=masks.or_zero(queries, call.query),
        key=masks.or_zero(keys, call.key),
        value=masks.or_zero(keys, call.value),
    )
    return call, queries


def alive(call: Call) -> tuple[Bool[Array, "B T"], Bool[Array, "B S"]]:
    """Mark the queries that have a key, and the keys that have a query.

    For calls of one pattern without a mask. Segments, if any, are those of one sequence
    that attends itself, without lengths: each position has itself unless it is padding.
    """
    sizes, limits = call.sizes, call.limits
    B, T, S = sizes.batch, sizes.query_length, sizes.key_length
    first_keys, first_queries = first_edges(call.edges, T, S, call.offset)
    rows = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    columns = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    queries, keys = first_keys[None] < S, first_queries[None] < T
    queries, keys = jnp.asarray(queries), jnp.asarray(keys)
    if limits.query_lengths is not None:
        end = limits.query_lengths[:, None]
        queries, keys = queries & (rows < end), keys & (first_queries[None] < end)
    if limits.key_lengths is not None:
        end = limits.key_lengths[:, None]
        queries, keys = queries & (first_keys[None] < end), keys & (columns < end)
    if limits.query_ids is not None:
        queries, keys = queries & (limits.query_ids != 0), keys & (limits.key_ids != 0)
    return jnp.broadcast_to(queries, (B, T)), jnp.broadcast_to(keys, (B, S))


@functools.lru_cache(maxsize=64)
def first_edges(
    pattern: Pattern, query_length: int, key_length: int, query_offset: int
) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " S"]]:
    """Return each query's first key, and the row of each key's first query.

    The pattern is one of one head; S stands for no key and T for no query.
    """
    rows = np.arange(0, query_length, TILE)
    columns = np.arange(0, key_length, TILE)
    row_stops = np.minimum(rows + TILE, query_length)
    column_stops = np.minimum(columns + TILE, key_length)
    keys = np.full(query_length, key_length, np.int32)
    queries = np.full(key_length, query_length, np.int32)
    for r, stop in zip(rows, row_stops, strict=True):
        states = pattern.block_states(
            r + query_offset, stop + query_offset, columns, column_stops
        )
        for number in np.flatnonzero(states != EMPTY):
            c, end = columns[number], column_stops[number]
            found, wanted = keys[r:stop], queries[c:end]
            if found.max() < key_length and wanted.max() < query_length:
                continue
            if states[number] == FULL:
                np.minimum(found, c, out=found)
                np.minimum(wanted, r, out=wanted)
                continue
            i, j = np.arange(r, stop)[:, None], np.arange(c, end)[None, :]
            edges = pattern.allowed(i + query_offset, j)
            edges = np.broadcast_to(edges, (len(i), j.shape[1]))
            np.minimum(found, np.where(edges, j, key_length).min(1), out=found)
            np.minimum(wanted, np.where(edges, i, query_length).min(0), out=wanted)
    return keys, queries
