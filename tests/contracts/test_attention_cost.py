"""What attention along a pattern may cost: FLOPs, and nothing as large as T S."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import largest_value

from transformer_jax.attention import dot_product_attention
from transformer_jax.attention.sparse.parts import partition
from transformer_jax.benchmarks.cost import matmul_flops
from transformer_jax.patterns import parse
from transformer_jax.patterns.ranges import EMPTY

UNION = "local(128) | strided(128) | global_tokens(4) | random_blocks(3, 64)"


def program(text, length, *, heads=1, width=64, backward=False, **call):
    """A function to trace, and the shapes of its arguments."""
    attend = functools.partial(dot_product_attention, pattern=parse(text), **call)
    shape = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32)

    def both(*arrays):
        output, pullback = jax.vjp(attend, *arrays[:3])
        return output, pullback(arrays[3])

    return (both, (shape,) * 4) if backward else (attend, (shape,) * 3)


def flops(text, length, **call):
    function, shapes = program(text, length, **call)
    return matmul_flops(function, *shapes)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "causal() & local(5)",
        "local(3, 6)",
        "strided(16)",
        "causal() & (local(4) | strided(16) | global_tokens(2))",
        "chunked(16)",
        "fixed(32, 2)",
        "random_blocks(2, 16) | local(8)",
        "global_tokens((0, 100))",
        "local(4, dilation=8)",
        "per_head((local(3), strided(16)))",
    ],
)
def test_no_value_is_as_large_as_all_edges(text, backward):
    length, width = 256, 16
    function, shapes = program(text, length, heads=2, width=width, backward=backward)
    assert largest_value(function, shapes) < length**2


def test_the_largest_value_is_found():
    """Dense attention makes one of all edges, inside of a scan as well."""

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c, x @ x.T), 0.0, None, length=2)[1].sum()

    assert largest_value(scanned, [jax.ShapeDtypeStruct((32, 3), jnp.float32)]) == 2048
    function, shapes = program("causal()", 64, implementation="reference")
    assert largest_value(function, shapes) >= 64**2


def test_a_window_costs_its_tiles():
    length, block, width = 16384, 128, 64
    text = "causal() & local(128)"
    starts = np.arange(0, length, block)
    states = parse(text).block_states(
        starts[:, None], starts[:, None] + block, starts, starts + block
    )
    ideal = 4 * np.count_nonzero(states != EMPTY) * block**2 * width
    forward = flops(text, length, block_size=block)
    assert ideal <= forward <= 1.15 * ideal
    assert flops(text, length, block_size=block, backward=True) <= 3.7 * forward


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("local(128)", 1.05),
        ("global_tokens(4)", 1.05),
        ("random_blocks(3, 64)", 1.05),
        ("local(128) | global_tokens(4) | random_blocks(3, 64)", 1.05),
        # T / stride keys for each of T queries.
        ("strided(128)", 2.05),
        (UNION, 2.05),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_cost_grows_as_the_pattern_does(text, slope, backward):
    lengths = 4096, 65536
    costs = [flops(text, n, block_size=128, backward=backward) for n in lengths]
    assert math.log(costs[1] / costs[0]) / math.log(16) <= slope


def test_a_union_costs_the_sum_of_its_parts():
    length = 8192
    parts = [f"({part.strip()})" for part in UNION.split("|")]
    together = flops(UNION, length, block_size=128)
    assert together <= 1.1 * sum(flops(part, length, block_size=128) for part in parts)


def test_blocks_are_as_small_as_the_pattern_wants():
    """A narrow window in large tiles would be nearly all waste."""
    chosen, large = (flops("local(4)", 4096, block_size=size) for size in (None, 256))
    assert chosen < large / 5


@pytest.mark.parametrize(
    "text", ["local(128)", "global_tokens(4)", "chunked(128)", "strided(128)"]
)
def test_a_million_positions_are_taken_apart(text):
    """At once: no array of positions squared could be made."""
    length = 1 << 20
    parts = partition(parse(text), length, length, block=128)
    tiles = sum(np.count_nonzero(part.states != EMPTY) for part in parts)
    per_query = {"strided(128)": 64}.get(text, 3)
    assert tiles <= per_query * length / 128 + 8
