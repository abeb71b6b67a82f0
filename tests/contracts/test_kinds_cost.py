"""What the kinds of attention cost: products as their table says, nothing quadratic."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jaxprs import largest_value

from transformer_jax.attention import ATTENTION, PieceSizes
from transformer_jax.benchmarks.cost import matmul_flops

N, H, V = 2, 16, 16
OPTIONS = {
    "favor": {"features": 32},
    "linformer": {"rank": 32},
    "lsh": {"rounds": 2, "buckets": 8, "chunk_size": 16},
    "routing": {"clusters": 16, "window": None},
    "sinkhorn": {"block_size": 16},
}
# Kinds that promise less than all pairs of places, and how their products grow.
SLOPES = {
    "linear": 1.0,
    "favor": 1.0,
    "linformer": 1.0,
    "lsh": 1.0,
    "routing": 1.5,
    "sinkhorn": 1.5,
}


def options_of(name, length=None):
    """Options of a kind; clusters and blocks grow with the root of the length."""
    row = ATTENTION[name]
    options = {word: option.default for word, option in row.options.items()}
    options |= OPTIONS.get(name, {})
    if "width" in options:
        options["width"] = options["stride"]
    for word in {"clusters", "block_size"} & set(options):
        options[word] = options[word] if length is None else math.isqrt(length)
    return options


def program(name, length, *, grows=False, backward=False, **call):
    """A kind's kernel at a length, and the shapes of what it takes."""
    row, options = ATTENTION[name], options_of(name, length if grows else None)
    shapes = [(1, length, N, H)] * len(row.arrays)
    sizes = PieceSizes(N, N, H, length, options)
    shapes += [
        ((1,) if piece.origin == "computed" else ()) + piece.shape(sizes)
        for piece in row.pieces
    ]
    words = {"chunk_size", "feature_map", "stride", "window", "block_size"} & set(
        options
    )
    kernel = functools.partial(row.kernel, **{w: options[w] for w in words}, **call)

    def attend(*arrays):
        output = kernel(*arrays)
        return output[0] if isinstance(output, tuple) else output

    def both(cotangent, *arrays):
        return jax.vjp(attend, *arrays)[1](cotangent)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    output = jax.ShapeDtypeStruct((1, length, N, V), jnp.float32)
    return (both, [output, *arrays]) if backward else (attend, arrays)


@pytest.mark.parametrize("name", ATTENTION)
def test_products_are_those_of_the_table(name):
    """Within a tenth, at 512 places."""
    length = 512
    function, shapes = program(name, length)
    counted = matmul_flops(function, *shapes) / 2 / N
    known = {"T": length, "S": length, "H": H, "V": V, **options_of(name)}
    wanted = eval(ATTENTION[name].cost, {}, known)
    assert abs(counted / wanted - 1) < 0.1, (counted, wanted)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SLOPES)
def test_products_grow_as_promised(name, backward):
    lengths = 1024, 16384
    costs = [
        matmul_flops(*_flat(program(name, n, grows=True, backward=backward)))
        for n in lengths
    ]
    slope = math.log(costs[1] / costs[0]) / math.log(16)
    assert abs(slope - SLOPES[name]) < 0.06


def _flat(made):
    return made[0], *made[1]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SLOPES)
def test_no_value_is_as_large_as_all_pairs(name, backward):
    length = 4096
    for causal in (False, True)[: 1 + ("causal" in ATTENTION[name].capabilities)]:
        call = {"is_causal": True} if causal else {}
        function, shapes = program(name, length, grows=True, backward=backward, **call)
        assert largest_value(function, shapes) < length**2


def test_a_block_of_sinkhorn_is_no_longer_than_the_sequence():
    shapes = program("sinkhorn", 7, grows=True)[1]
    shapes[-1] = jax.ShapeDtypeStruct((1, N, 1, 1), jnp.float32)
    attend = functools.partial(ATTENTION["sinkhorn"].kernel, block_size=10**5)
    assert largest_value(attend, shapes) < 1000
