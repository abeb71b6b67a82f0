"""Splash attention, JAX's block-sparse kernel for TPUs: one call for a whole pattern.

All that is private of JAX stands here. A pattern is a mask that the kernel computes on
the fly, and its block states are the kernel's table, so no array of T S is made on the
host either.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array

from transformer_jax import masks
from transformer_jax.attention import reach
from transformer_jax.attention.arguments import Call
from transformer_jax.attention.platform import platform
from transformer_jax.patterns import Pattern, atoms, base
from transformer_jax.patterns.ranges import PARTIAL
from transformer_jax.types import BATCH_MESH_AXES, HEADS_MESH_AXES

# Run the kernel in Pallas's interpreter: for tests without a TPU.
INTERPRET = False
# Lanes of a TPU's vectors: tiles are multiples.
LANES = 128
# Places of a tile that are tried.
BLOCKS = (512, 256, 128)
# Patterns whose predicate the TPU's vector unit computes: comparisons alone.
ATOMS = (atoms.Full, atoms.Causal, atoms.Local, atoms.GlobalTokens)


def attend(call: Call, block_size: int | None = None) -> tuple[Array, None]:
    """Return the output of a call `[B, T, N, V]`; there is no log-sum-exp.

    Raises:
        NotImplementedError: the kernel cannot do this call, or there is no TPU.
        ValueError: the block is no multiple of 128.
    """
    reason = refusal(call)
    if reason is None and platform() != "tpu" and not INTERPRET:
        reason = "runs on TPUs only"
    if reason:
        raise NotImplementedError(
            f"implementation='splash' {reason}: use implementation='xla'"
        )
    if block_size is not None and (block_size < LANES or block_size % LANES):
        raise ValueError(f"splash wants a block_size of n x 128, not {block_size}")
    call, alive = reach.cleaned(call)
    query = call.query * jnp.asarray(call.scale, call.query.dtype)
    output = _sharded(call, block_size, query, call.key, call.value)
    return masks.or_zero(alive, output), None


def refusal(call: Call) -> str | None:
    """Return why splash cannot do a call; None where it can."""
    limits, pattern = call.limits, call.pattern
    if call.rate:
        return "has no dropout"
    if call.bias is not None:
        return "has no bias"
    if limits.mask is not None:
        return "takes no mask"
    if pattern is not None and pattern.heads:
        return "wants one pattern for all heads"
    if pattern is not None and not _is_computable(pattern):
        return f"cannot compute the pattern {pattern} in the kernel"
    if limits.query_ids is not None and not _attends_itself(call):
        return "takes segments of one sequence that attends itself, the same ids twice"
    cut = limits.query_lengths is not None or limits.key_lengths is not None
    if limits.query_ids is not None and cut:
        return "takes segments or lengths, not both"
    return None


def _is_computable(pattern: Pattern) -> bool:
    if isinstance(pattern, base.And | base.Or):
        return all(map(_is_computable, pattern.parts))
    if isinstance(pattern, base.Not):
        return _is_computable(pattern.part)
    if isinstance(pattern, atoms.Local) and pattern.dilation > 1:
        return False
    return isinstance(pattern, ATOMS)


def _attends_itself(call: Call) -> bool:
    """Whether each query's own position is a key that it may attend."""
    sizes = call.sizes
    own = np.arange(sizes.query_length)
    return (
        call.limits.query_ids is call.limits.key_ids
        and call.offset == 0
        and (call.pattern is None or bool(np.all(call.pattern.allowed(own, own))))
    )


def _sharded(
    call: Call, block_size: int | None, query: Array, key: Array, value: Array
) -> Array:
    """The kernel, by shards of batch and heads where a mesh is set."""
    run = functools.partial(_batched, call, block_size)
    mesh = jax.sharding.get_abstract_mesh()
    batch = tuple(a for a in BATCH_MESH_AXES if a in mesh.axis_names)
    heads = tuple(a for a in HEADS_MESH_AXES if a in mesh.axis_names)
    limits = (call.limits.query_lengths, call.limits.key_lengths, call.limits.query_ids)
    arrays = (query, key, value, *limits)
    if not batch + heads:
        return run(*arrays)
    spec = jax.sharding.PartitionSpec
    by_head = spec(batch, None, heads, None)
    specs = (by_head,) * 3 + tuple(None if x is None else spec(batch) for x in limits)
    # The kernel's own outputs carry no record of how they vary over the mesh.
    shard = jax.shard_map(run, in_specs=specs, out_specs=by_head, check_vma=False)
    return shard(*arrays)


def _batched(
    call: Call,
    block_size: int | None,
    query: Array,
    key: Array,
    value: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    ids: Array | None,
) -> Array:
    """The kernel on each row and key/value head, padded to whole blocks and lanes."""
    B, T, N, _ = query.shape
    _, S, K, V = value.shape
    block = _block(call, block_size)
    rows, columns = -(-T // block) * block, -(-S // block) * block
    kernel = _kernel(call.edges, rows, columns, S, call.offset, block, N // K)
    query = _padded(query, rows).reshape(B, rows, K, N // K, -1)
    segments = None
    if key_lengths is not None or ids is not None:
        segments = splash_attention_kernel.SegmentIds(
            _segments(ids, query_lengths, B, T, rows, -1),
            _segments(ids, key_lengths, B, S, columns, -2),
        )
    of_heads = jax.vmap(kernel, (0, 0, 0, None))
    output = jax.vmap(of_heads, (0, 0, 0, None if segments is None else 0))(
        query.transpose(0, 2, 3, 1, 4),
        _padded(key, columns).transpose(0, 2, 1, 3),
        _padded(value, columns).transpose(0, 2, 1, 3),
        segments,
    )
    return output.transpose(0, 3, 1, 2, 4)[:, :T, ..., :V].reshape(B, T, N, V)


def _padded(x: Array, length: int) -> Array:
    """`[B, T, N, H]` with zeros behind: `length` places, whole lanes."""
    _, places, _, width = x.shape
    return jnp.pad(x, ((0, 0), (0, length - places), (0, 0), (0, -width % LANES)))


def _segments(
    ids: Array | None,
    lengths: Array | None,
    batch: int,
    places: int,
    padded: int,
    none: int,
) -> Array:
    """Segments `[B, padded]`; `none`, other for queries than for keys, is padding."""
    if ids is None:
        ids = jnp.ones((batch, places), jnp.int32)
    real = ids != 0
    if lengths is not None:
        real &= jnp.arange(places, dtype=jnp.int32)[None] < lengths[:, None]
    ids = jnp.where(real, ids.astype(jnp.int32), none)
    return jnp.pad(ids, ((0, 0), (0, padded - places)), constant_values=none)


def _block(call: Call, block_size: int | None) -> int:
    """Places of a tile: large ones feed the matrix unit, small ones waste less."""
    if block_size is not None:
        return block_size
    sizes, pattern = call.sizes, call.edges

    def cost(block: int) -> int:
        rows = np.arange(0, sizes.query_length, block)[:, None] + call.offset
        columns = np.arange(0, sizes.key_length, block)
        states = pattern.block_states(rows, rows + block, columns, columns + block)
        # A tile's border costs about as much as LANES more places.
        return int(np.count_nonzero(states)) * (block + LANES) ** 2

    return min(BLOCKS, key=cost)


@functools.lru_cache(maxsize=64)
def _kernel(
    pattern: Pattern,
    rows: int,
    columns: int,
    real_columns: int,
    offset: int,
    block: int,
    heads: int,
) -> Any:
    """Splash for the query heads of one key/value head."""
    mask = _PatternMask(pattern, rows, columns, real_columns, offset)
    names = [
        field.name for field in dataclasses.fields(splash_attention_kernel.BlockSizes)
    ]
    sizes = {name: block for name in names if name.startswith("block_")}
    # Tables must be arrays, not tracers of whatever program asks first.
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mqa_single_device(
            splash_attention_mask.MultiHeadMask([mask] * heads),
            block_sizes=splash_attention_kernel.BlockSizes(**sizes),
            interpret=INTERPRET,
        )


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """The edges of a pattern whose key exists."""

    pattern: Pattern
    columns: int

    def __call__(self, i: Any, j: Any) -> Any:
        return self.pattern.allowed(i, j) & (j < self.columns)


class _PatternMask(splash_attention_mask._ComputableMask):
    """A pattern as splash reads it: states of blocks, and a function of positions.

    For a block splash asks only whether any and whether all edges are allowed, so a
    stand-in of two edges answers for each block.
    """

    STAND_INS = np.array([[[0, 0]], [[0, 1]], [[1, 1]]], np.bool_)

    def __init__(
        self, pattern: Pattern, rows: int, columns: int, real_columns: int, offset: int
    ) -> None:
        super().__init__((rows, columns), _Allowed(pattern, real_columns))
        self.q_sequence = np.arange(rows, dtype=np.int32) + np.int32(offset)
        self._pattern, self._columns, self._offset = pattern, real_columns, offset
        self._tables: dict[tuple[int, int], np.ndarray] = {}

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index
        size = (rows.stop - rows.start, columns.stop - columns.start)
        if size not in self._tables:
            self._tables[size] = self._states(*size)
        state = self._tables[size][rows.start // size[0], columns.start // size[1]]
        return self.STAND_INS[state]

    def _states(self, height: int, width: int) -> np.ndarray:
        """What all blocks of a size hold; behind the last key there is nothing."""
        rows = np.arange(0, self.shape[0], height)[:, None] + self._offset
        columns = np.arange(0, self.shape[1], width)
        stops = np.minimum(columns + width, self._columns)
        states = self._pattern.block_states(rows, rows + height, columns, stops)
        whole = stops == columns + width
        return np.where(whole, states, np.minimum(states, PARTIAL))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
