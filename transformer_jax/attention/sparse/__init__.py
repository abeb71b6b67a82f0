"""Any pattern by portable XLA code: which heads together, in tiles of which size."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_jax.attention import dense
from transformer_jax.attention.arguments import Call
from transformer_jax.attention.sparse import walk
from transformer_jax.attention.sparse.edges import Plan
from transformer_jax.attention.sparse.operands import Operands, prepared
from transformer_jax.attention.sparse.parts import count_edges
from transformer_jax.patterns.ranges import check_integer

# Places of a tile that are tried, and what a tile's border costs in places.
BLOCKS = (16, 32, 64, 128, 256)
BORDER = 16


def attend(
    call: Call, block_size: int | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Return output and log-sum-exp of a call, computed in tiles of its pattern.

    Raises:
        TypeError, ValueError: the block is no integer from 1 on.
    """
    if not call.query.size or not call.key.size:
        # Of nothing there are no tiles.
        return dense.attend(call)
    # A number is static; only an array has a gradient.
    scale = call.scale if isinstance(call.scale, jax.Array) else None
    pattern = call.edges
    groups = defaultdict(list)
    for head in range(call.sizes.heads):
        groups[pattern.of_head(head)].append(head)
    results, order = [], []
    for of_group, heads in groups.items():
        some = _of_heads(call._replace(pattern=of_group), heads)
        plan = Plan(
            pattern=of_group,
            offset=call.offset,
            scale=1.0 if scale is not None else float(call.scale),
            block=choose_block(some, block_size),
            rate=call.rate,
            heads=tuple(heads),
            all_heads=call.sizes.heads,
            sizes=some.sizes,
        )
        operands = Operands(*some[:3], scale, some.bias, some.limits, call.rng)
        results.append(walk.attend(plan, prepared(operands)))
        order.extend(heads)
    if len(results) == 1:
        return results[0]
    back = np.argsort(order)
    return tuple(jnp.concatenate(x, 2)[:, :, back] for x in zip(*results, strict=True))


def choose_block(call: Call, block_size: int | None) -> int:
    """Return the places of a tile: the given ones, or those of the least work."""
    if block_size is not None:
        return check_integer("block_size", block_size, 1)
    costs = {block: _edges(call, block) * (1 + BORDER / block) for block in BLOCKS}
    return min(costs, key=lambda block: (costs[block], block))


def fewest_edges(call: Call) -> int:
    """Return the least edges of a head's tiles over BLOCKS; what is chosen has more."""
    return min(_edges(call, block) for block in BLOCKS)


def _edges(call: Call, block: int) -> int:
    """About how many edges all tiles have, of the head that has most."""
    pattern, sizes = call.edges, call.sizes
    return max(
        count_edges(
            pattern.of_head(head),
            sizes.query_length,
            sizes.key_length,
            block=block,
            query_offset=call.offset,
        )
        for head in range(pattern.heads or 1)
    )


def _of_heads(call: Call, heads: list[int]) -> Call:
    """The same call with some of its query heads and the key/value heads they read."""
    sizes = call.sizes
    if len(heads) == sizes.heads:
        return call
    kv = np.array(heads) // (sizes.heads // sizes.kv_heads)
    kv_heads, counts = np.unique(kv, return_counts=True)
    if len(set(counts)) > 1:
        # Uneven shares: each query head gets a copy of its key/value head.
        kv_heads = kv
    index = np.array(heads)
    mask, bias = call.limits.mask, call.bias
    return call._replace(
        query=call.query[:, :, index],
        key=call.key[:, :, kv_heads],
        value=call.value[:, :, kv_heads],
        bias=bias if bias is None or callable(bias) else _some(bias, index),
        limits=call.limits._replace(mask=None if mask is None else _some(mask, index)),
        sizes=sizes._replace(heads=len(heads), kv_heads=len(kv_heads)),
    )


def _some(array: Array, heads: np.ndarray) -> Array:
    """Some heads of `[b, n, t, s]`."""
    return array[:, heads] if array.shape[1] > 1 else array
