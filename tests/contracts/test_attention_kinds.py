"""The contract of the kinds of attention besides dot_product, over their table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds_oracle import (
    LENGTHS,
    ORACLES,
    SETTINGS,
    B,
    H,
    K,
    N,
    T,
    V,
    arrays_of,
    in_padding,
    normal,
    oracle,
    pieces_of,
    run,
)

from transformer_jax.attention import ATTENTION
from transformer_jax.attention.kinds import CAPABILITIES, taken

pytestmark = pytest.mark.usefixtures("strict")

CALLS = [
    pytest.param(name, causal, id=f"{name}{', causal' * causal}")
    for name, setting in SETTINGS.items()
    for causal in (False, True)[
        : 1 + ("causal" in ATTENTION[setting.kind].capabilities)
    ]
]


# What no gradient reaches: oracles sort by it.
DRAWN = {
    piece.name
    for row in ATTENTION.values()
    for piece in row.pieces
    if piece.origin in ("drawn", "tracked")
}


def having(word):
    """Settings whose kinds have a capability."""
    return [
        n for n, each in SETTINGS.items() if word in ATTENTION[each.kind].capabilities
    ]


def test_every_kind_has_an_oracle():
    assert {each.kind for each in SETTINGS.values()} == set(ORACLES)
    assert set(ORACLES) == set(ATTENTION) - {"dot_product"}


@pytest.mark.parametrize("name", ATTENTION)
def test_row_of_the_table_is_complete(name):
    row = ATTENTION[name]
    assert callable(row.kernel)
    assert row.capabilities <= CAPABILITIES.keys()
    for function in (row.init_cache, row.step):
        assert ("decode" in row.capabilities) == callable(function)
    for function in (row.fill, row.read):
        assert ("memory" in row.capabilities) == callable(function)
    wanted = [*row.arrays, *(piece.name for piece in row.pieces)]
    assert list(taken(row.kernel, dict.fromkeys(wanted))) == wanted
    for piece in row.pieces:
        assert piece.origin in ("trained", "drawn", "tracked", "computed")
        assert callable(piece.draw) == (piece.origin != "computed")
    for option in row.options.values():
        assert option.choices or option.low is not None
    assert row.kernel.__module__.endswith(row.file.removesuffix(".py"))


@pytest.mark.parametrize(("name", "causal"), CALLS)
def test_kernel_equals_the_oracle(name, causal):
    """Forward and all gradients by name, NaN in padding, each row by itself."""
    setting = SETTINGS[name]
    arrays, pieces = arrays_of(setting), pieces_of(setting)
    cotangent = normal(B, T, N, V, seed=9)
    call = {"is_causal": True} if causal else {}

    def total(inputs):
        lengths = jnp.asarray(LENGTHS)
        output = run(name, *inputs, key_value_seq_lengths=lengths, **call)
        valid = [output[b, :length] for b, length in enumerate(LENGTHS)]
        return _against(valid, cotangent), valid

    drawn = {w: np.asarray(x) for w, x in pieces.items() if w in DRAWN}

    def wanted(inputs):
        valid = oracle(setting, inputs[0], inputs[1] | drawn, arrays, LENGTHS, causal)
        return _against(valid, cotangent), valid

    dirty = in_padding(arrays, LENGTHS)
    gradient = functools.partial(jax.value_and_grad, has_aux=True)
    (_, found), slopes = jax.jit(gradient(total))((dirty, pieces))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        (_, rows), wanted_slopes = jax.jit(gradient(wanted))((arrays, pieces))
    for one, other in zip(found, rows, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    origins = {piece.name: piece.origin for piece in ATTENTION[setting.kind].pieces}
    for one, other in zip(slopes, wanted_slopes, strict=True):
        for word, slope in one.items():
            learned = origins.get(word, "trained") in ("trained", "computed")
            expected = other[word] if learned else np.zeros(slope.shape)
            size = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(slope, expected, atol=1e-4 * size, err_msg=word)


def _against(rows, cotangent):
    return sum((row * cotangent[b, : len(row)]).sum() for b, row in enumerate(rows))


@pytest.mark.parametrize("name", having("cross"))
def test_keys_of_another_sequence(name):
    """Nine keys for seven queries, and a row without any."""
    setting, keys = SETTINGS[name], 9
    arrays, pieces = arrays_of(setting, keys), pieces_of(setting, keys)
    lengths = (5, 0)
    output = jax.jit(functools.partial(run, name))(
        in_padding(arrays, lengths), pieces, key_value_seq_lengths=jnp.array(lengths)
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        known = {w: np.asarray(x) if w in DRAWN else x for w, x in pieces.items()}
        wanted = jax.jit(
            lambda: oracle(setting, arrays, known, arrays, lengths[:1], False)[0]
        )()
    np.testing.assert_allclose(output[0, : len(wanted)], wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(output[1], np.zeros((T, N, V)))


@pytest.mark.parametrize("name", having("causal"))
def test_causal_outputs_ignore_the_future(name):
    """The Jacobian of output t to place j is exactly zero where j > t."""
    setting = SETTINGS[name]
    pieces = {word: _of_first_row(x) for word, x in pieces_of(setting).items()}
    arrays = {word: x[:1] for word, x in arrays_of(setting).items()}

    def summed(arrays):
        return run(name, arrays, pieces, is_causal=True).sum((0, 2, 3))

    slopes = jax.jit(jax.jacrev(summed))(arrays)
    ahead = ~np.tri(T, dtype=bool)
    for word, slope in slopes.items():
        touched = (np.asarray(slope) != 0).any((1, 3, 4))
        assert not touched[ahead].any(), word
    assert (np.asarray(slopes["value"]) != 0).any()


def _of_first_row(piece):
    return piece[:1] if piece.ndim == 4 and len(piece) == B else piece


@pytest.mark.parametrize("name", having("decode"))
def test_place_by_place_equals_the_whole(name):
    """From its own cache, with rows taken from another order, and NaN past the end."""
    setting = SETTINGS[name]
    row, pieces = ATTENTION[setting.kind], pieces_of(setting)
    arrays = arrays_of(setting)
    whole = jax.jit(functools.partial(run, name, is_causal=True))(arrays, pieces)
    sizes = {"heads": N, "kv_heads": K, "head_width": H, "value_width": V}
    options = {**sizes, **setting.options, **setting.of_pieces, "dtype": jnp.float32}
    cache = row.init_cache(B, T, **taken(row.init_cache, options))

    @jax.jit
    def step(place, cache, rows):
        cache = jax.tree.map(lambda leaf: leaf[rows], cache)
        return row.step(*place, cache, **pieces)

    order = np.arange(B)
    for t in range(T):
        # A beam's rows change places between two steps.
        order = order[::-1]
        place = [np.asarray(x)[order, t : t + 1] for x in arrays.values()]
        output, cache = step(place, cache, np.arange(B)[::-1])
        wanted = np.asarray(whole)[order, t : t + 1]
        np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)
        assert {len(leaf) for leaf in jax.tree.leaves(cache)} == {B}
    assert np.isnan(step(place, cache, order)[0]).all()


@pytest.mark.parametrize("name", [n for n in having("decode") if n in ORACLES])
def test_a_cache_refuses_what_it_is_not_for(name):
    """More heads in the cache, or another number of the pieces' features."""
    setting = SETTINGS[name]
    row, pieces = ATTENTION[setting.kind], pieces_of(setting)
    place = [array[:, :1] for array in arrays_of(setting).values()]
    sizes = {"heads": N, "kv_heads": K, "head_width": H, "value_width": V}
    sizes |= {**setting.options, **setting.of_pieces, "dtype": jnp.float32}
    others = {"heads": 2 * N, "kv_heads": 2 * K, "dtype": jnp.float64}
    others |= {"features": 1, "clusters": 2, "buckets": 2, "width": 2}
    for word, other in taken(row.init_cache, others).items():
        with jax.enable_x64(word == "dtype"):
            options = taken(row.init_cache, sizes | {word: other})
            cache = row.init_cache(B, T, **options)
            with pytest.raises((TypeError, ValueError), match="cache"):
                jax.eval_shape(functools.partial(row.step, **pieces), *place, cache)


@pytest.mark.parametrize("name", having("memory"))
def test_a_memory_is_projected_once(name):
    """`read` of what `fill` made is the kernel, and NaN in padding changes nothing."""
    setting, keys = SETTINGS[name], 9
    row, pieces = ATTENTION[setting.kind], pieces_of(setting, keys)
    arrays = arrays_of(setting, keys)
    lengths = jnp.array([9, 4])
    query, *memory = in_padding(arrays, (9, 4)).values()

    @jax.jit
    def both():
        whole = run(name, arrays, pieces, key_value_seq_lengths=lengths)
        options = pieces | setting.options
        filled = row.fill(*memory, lengths, **taken(row.fill, options))
        return row.read(query, filled, **taken(row.read, pieces)), whole

    found, whole = both()
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ORACLES)
def test_three_axes_nothing_and_types(name):
    """No batch axis, no rows, no keys; bfloat16 near, float64 kept."""
    setting = SETTINGS[name]
    arrays, pieces = arrays_of(setting), pieces_of(setting)
    kernel = jax.jit(functools.partial(run, name))
    whole = kernel(arrays, pieces)
    one = {word: _without_batch(x) for word, x in pieces.items()}
    flat = kernel({word: x[0] for word, x in arrays.items()}, one)
    np.testing.assert_allclose(flat, whole[0], rtol=0, atol=1e-6)
    none = {word: x[:0] for word, x in arrays.items()}
    nothing = {word: x[:0] if _by_row(x) else x for word, x in pieces.items()}
    assert jax.eval_shape(kernel, none, nothing).shape == (0, T, N, V)
    if "query" in arrays and "cross" in ATTENTION[setting.kind].capabilities:
        empty = {w: x[:, :0] if w != "query" else x for w, x in arrays.items()}
        np.testing.assert_array_equal(kernel(empty, pieces), np.zeros((B, T, N, V)))
    low = {word: x.astype(jnp.bfloat16) for word, x in arrays.items()}
    found = kernel(low, pieces)
    assert found.dtype == jnp.bfloat16
    # Of the same numbers: places are sorted by them.
    wanted = kernel({word: x.astype(jnp.float32) for word, x in low.items()}, pieces)
    size = max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=2e-2 * size)
    with jax.enable_x64(True):
        double = {word: x.astype(jnp.float64) for word, x in arrays.items()}
        wide = {word: x.astype(jnp.float64) for word, x in pieces.items()}
        found = kernel(double, wide)
        assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)


def _by_row(piece):
    return piece.ndim == 4 and piece.shape[:2] == (B, N)


def _without_batch(piece):
    return piece[0] if _by_row(piece) else piece


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_stay_on_their_devices(name):
    arrays, pieces = arrays_of(SETTINGS[name]), pieces_of(SETTINGS[name])
    mesh = jax.make_mesh((B,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["rows"], []))
    shardings = (
        jax.tree.map(lambda _: rows, arrays),
        jax.tree.map(lambda piece: rows if _by_row(piece) else whole, pieces),
    )
    attend = jax.jit(
        functools.partial(run, name, key_value_seq_lengths=jnp.array(LENGTHS)),
        in_shardings=shardings,
        out_shardings=rows,
    )
    program = attend.lower(arrays, pieces).compile().as_text()
    assert "all-gather" not in program
