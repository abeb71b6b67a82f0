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
)

from transformer_jax import attention
from transformer_jax.attention import ATTENTION
from transformer_jax.attention.buckets import code_of
from transformer_jax.attention.kinds import CAPABILITIES, taken
from transformer_jax.attention.sinkhorn import sorted_blocks

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


def run(name, arrays, pieces, **call):
    """The output alone of a setting's kernel."""
    setting = SETTINGS[name]
    row = ATTENTION[setting.kind]
    # In a compiled function a dictionary's names come sorted.
    ordered = [arrays[word] for word in row.arrays]
    output = row.kernel(*ordered, **pieces, **setting.options, **call)
    return output[0] if isinstance(output, tuple) else output


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


# --- What a kind is at its limits ------------------------------------------------


def dense(query, key, value, **call):
    return attention.dot_product_attention(query, key, value, **call)


def _identity(width):
    return jnp.broadcast_to(jnp.eye(width), (1, K, width, width))


@pytest.mark.parametrize("causal", [False, True])
def test_full_rank_one_cluster_and_narrow_windows_are_dense_attention(causal):
    arrays = arrays_of(SETTINGS["routing"]).values()
    eye, one = jnp.eye(T), normal(N, 1, H)
    kernels = _identity(H), _identity(V)
    call = {"is_causal": causal}

    @jax.jit
    def all_of(*arrays):
        found = {
            "compressed": attention.compressed_attention(
                *arrays, *kernels, stride=1, **call
            ),
            "routing": attention.routing_attention(*arrays, one, window=2 * T, **call)[
                0
            ],
        }
        if not causal:
            blocks = jnp.zeros((B, N, 1, 1))
            found |= {
                "linformer": attention.linformer_attention(*arrays, eye, eye),
                "sinkhorn": attention.sinkhorn_attention(*arrays, blocks, block_size=T),
            }
        return dense(*arrays, **call), found

    wanted, found = all_of(*arrays)
    for name, output in found.items():
        np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5, err_msg=name)


def test_one_bucket_is_dense_attention_to_all_others():
    @jax.jit
    def both(query, value):
        output = attention.lsh_attention(
            query, value, jnp.zeros((1, H, 1)), chunk_size=T
        )
        key = query / jnp.linalg.norm(query, axis=3, keepdims=True)
        others = ~jnp.eye(T, dtype=bool)
        return output, dense(query, key, jnp.repeat(value, N // K, 2), mask=others)

    output, wanted = both(*arrays_of(SETTINGS["lsh"]).values())
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_lsh_takes_queries_of_any_size(size):
    """The scale undoes it; a key has the length of 1 anyway, and none reads itself."""
    query, value = arrays_of(SETTINGS["lsh"]).values()
    rotations = pieces_of(SETTINGS["lsh"])["rotations"]

    @jax.jit
    def attend(size):
        def total(query):
            output = attention.lsh_attention(
                query * size, value, rotations, chunk_size=3, scale=1 / size
            )
            return jnp.square(output).sum(), output

        return jax.grad(total, has_aux=True)(query)

    for one, other in zip(attend(size), attend(1.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_lsh_reads_itself_only_if_alone():
    """However much nearer it is: scores differ by 2e6."""
    query = 1e6 * jnp.array([[[[1.0, 0.0]], [[-1.0, 0.0]]]])
    value = jnp.array([[[[1.0]], [[2.0]]]])
    attend = jax.jit(functools.partial(attention.lsh_attention, chunk_size=2))
    output = attend(query, value, jnp.zeros((1, 2, 1)))
    np.testing.assert_array_equal(output.ravel(), [2.0, 1.0])


@pytest.mark.parametrize("name", ["linear", "favor"])
def test_a_memory_refuses_other_queries(name):
    setting = SETTINGS[name]
    row, pieces = ATTENTION[setting.kind], pieces_of(setting)
    query, *memory = arrays_of(setting).values()
    filled = row.fill(*memory, jnp.array(LENGTHS), **taken(row.fill, pieces))
    for other in (query[0], query[:1], query[:, :, :3]):
        with pytest.raises(ValueError, match="to read this memory"):
            row.read(other, filled, **taken(row.read, pieces))
    if name == "linear":
        with pytest.raises(ValueError, match="sums of 6 features"):
            row.read(query[..., :5], filled)


def test_a_cache_of_other_features_is_refused():
    setting = SETTINGS["favor"]
    cache = ATTENTION["linear"].init_cache(
        B, T, kv_heads=K, head_width=H, value_width=V, dtype=jnp.float32
    )
    place = [array[:, :1] for array in arrays_of(setting).values()]
    with pytest.raises(ValueError, match="must be one of positive, relu, not 'elu'"):
        ATTENTION["favor"].step(*place, cache, projection=normal(H, H))


def test_cells_of_different_buckets_are_apart_among_a_million_places():
    places, size, buckets = 2**20 - 2, 64, 2**15
    corners = [(b, r) for b in (0, 1, 4096, buckets) for r in (0, places - 1)]
    bucket, rank = jnp.array(corners, jnp.int32).T
    codes = np.asarray(code_of(bucket, rank, size, places))
    assert (np.diff(codes) > 1).all()


def test_lengths_may_be_unsigned():
    arrays, pieces = (
        arrays_of(SETTINGS["compressed"]),
        pieces_of(SETTINGS["compressed"]),
    )
    attend = jax.jit(functools.partial(run, "compressed"))
    one, other = (
        attend(arrays, pieces, key_value_seq_lengths=jnp.array([7, 5], dtype))
        for dtype in (jnp.uint32, jnp.int32)
    )
    np.testing.assert_array_equal(one, other)


def test_a_hard_permutation_of_blocks_is_a_mask():
    """Block u reads itself and block u + 1."""
    size, length = 3, 9
    arrays = [normal(B, length, heads, H) for heads in (N, K, K)]
    turn = np.roll(np.eye(3, dtype=np.float32), 1, axis=1)
    logits = np.broadcast_to(100 * turn, (B, N, 3, 3))
    block = np.arange(length) // size
    mask = np.isin(np.subtract.outer(block, block) % 3, (0, 2))

    @jax.jit
    def both(*arrays):
        output = attention.sinkhorn_attention(*arrays, logits, block_size=size)
        return output, dense(*arrays, mask=mask)

    output, wanted = both(*arrays)
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)


def test_rows_and_columns_of_a_sorting_sum_to_one():
    alive = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
    sort = jax.jit(functools.partial(sorted_blocks, iterations=20, is_causal=False))
    sorting = np.asarray(sort(normal(B, N, 5, 5), alive))
    for axis in (2, 3):
        sums = sorting.sum(axis)
        np.testing.assert_allclose(sums[0], np.ones((N, 5)), atol=1e-3)
        np.testing.assert_allclose(sums[1, :, :3], np.ones((N, 3)), atol=1e-3)
        np.testing.assert_array_equal(sums[1, :, 3:], np.zeros((N, 2)))


def test_random_features_approach_softmax_attention():
    """The error falls about as one over the root of their number."""
    arrays = [0.5 * normal(1, 64, 2, 16, seed=n) for n in range(2)]
    arrays.append(normal(1, 64, 2, 16, seed=2))
    numbers = [16, 64, 256, 1024]

    @jax.jit
    def errors():
        wanted = dense(*arrays)

        def error(key, features):
            projection = attention.orthogonal_projection(key, features, 16)
            found = attention.favor_attention(*arrays, projection)
            return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)

        keys = jax.random.split(jax.random.key(0), 4)
        of_number = [
            jax.vmap(functools.partial(error, features=n))(keys) for n in numbers
        ]
        return jnp.stack(of_number).mean(1)

    errors = np.asarray(errors())
    slope = np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    assert -0.6 <= slope <= -0.35
    assert errors[-1] < 0.1


def test_features_may_be_tiny():
    """A factor of the query's features cancels, however small, and so does its slope.

    e^x of -50 and -25 makes a denominator whose square float32 cannot hold.
    """
    query, key, value = arrays_of(SETTINGS["linear"]).values()
    below = -jnp.abs(query) - 1.0, -jnp.abs(key) - 1.0

    @jax.jit
    def slopes(shift):
        def mean(query, key):
            return attention.linear_attention(query, key, value).sum()

        return jax.value_and_grad(mean, (0, 1))(below[0] - shift, below[1] - shift / 2)

    found, wanted = jax.device_get((slopes(50.0), slopes(0.0)))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for one, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "favor"])
def test_sums_of_the_past_run_under_shard_map(name):
    arrays, pieces = arrays_of(SETTINGS[name]), pieces_of(SETTINGS[name])
    mesh = jax.make_mesh((B,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.P("rows"), jax.P()
    attend = functools.partial(run, name, is_causal=True)
    split = jax.shard_map(
        attend, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows
    )
    found, wanted = jax.jit(split)(arrays, pieces), jax.jit(attend)(arrays, pieces)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_no_later_key_sways_an_earlier_output():
    """Not even by a factor that leaves no other key's features above zero."""
    arrays = arrays_of(SETTINGS["favor"])
    projection = attention.orthogonal_projection(jax.random.key(0), 8, H)
    larger = arrays | {"key": arrays["key"].at[:, -1].multiply(300.0)}
    attend = jax.jit(functools.partial(attention.favor_attention, is_causal=True))
    one, other = (np.asarray(attend(*x.values(), projection)) for x in (arrays, larger))
    np.testing.assert_array_equal(one[:, :-1], other[:, :-1])


def test_projections_are_orthogonal_in_blocks():
    rows = np.asarray(attention.orthogonal_projection(jax.random.key(2), 10, 4))
    products = rows @ rows.T
    for start in (0, 4, 8):
        block = products[start : start + 4, start : start + 4]
        np.testing.assert_allclose(block, np.diag(np.diag(block)), atol=1e-5)
    many = attention.orthogonal_projection(jax.random.key(3), 4096, 4)
    np.testing.assert_allclose(jnp.square(many).sum(1).mean(), 4, rtol=0.1)


def test_centroids_follow_their_members():
    centroids = jnp.array([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    query = jnp.array([[[[3.0, 1.0]], [[0.1, 2.0]]]])
    key = jnp.array([[[[2.0, 0.0]], [[jnp.nan, 1.0]]]])
    _, members = jax.jit(attention.routing_attention)(
        query,
        key,
        key,
        centroids,
        key_value_seq_lengths=jnp.array([1]),
        query_seq_lengths=jnp.array([2]),
    )
    np.testing.assert_array_equal(members.counts, [[2, 1, 0]])
    root = np.sqrt(10)
    np.testing.assert_allclose(members.sums[0, 0], [3 / root + 1, 1 / root], rtol=1e-6)
    moved = np.asarray(members.moved(centroids, 0.5))[0]
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(moved[0, 1] / moved[0, 0], 1 / (3 * root + 3), rtol=1e-5)
    np.testing.assert_array_equal(moved[2], centroids[0, 2])


# --- Refusals --------------------------------------------------------------------

REFUSALS = {
    "lsh of another sequence": (
        lambda q, k, v: attention.lsh_attention(q, v[:, 1:], jnp.ones((1, H, 1))),
        "attend another sequence with dot_product",
    ),
    "lsh of other widths": (
        lambda q, k, v: attention.lsh_attention(q, v, jnp.ones((1, H + 1, 1))),
        "rotations must be",
    ),
    "a sequence longer than its projection": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((T - 1, 2)), jnp.ones((T - 1, 2))
        ),
        "is for 6 places, but there are 7",
    ),
    "two ranks": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((T, 2)), jnp.ones((T, 3))
        ),
        "one rank",
    ),
    "a projection of other heads": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((3, T, 2)), jnp.ones((3, T, 2))
        ),
        "key_projection must be",
    ),
    "causal routing of another sequence": (
        lambda q, k, v: attention.routing_attention(
            q[:, 1:], k, v, jnp.ones((N, 2, H)), is_causal=True
        ),
        "causal routing is for one sequence",
    ),
    "centroids of other heads": (
        lambda q, k, v: attention.routing_attention(q, k, v, jnp.ones((K, 2, H))),
        "centroids must be",
    ),
    "sorting of another sequence": (
        lambda q, k, v: attention.sinkhorn_attention(
            q[:, 1:], k, v, jnp.ones((B, N, 1, 1)), block_size=T
        ),
        "attend another one with dot_product",
    ),
    "another number of blocks": (
        lambda q, k, v: attention.sinkhorn_attention(
            q, k, v, jnp.ones((B, N, 2, 2)), block_size=3
        ),
        "sort_logits must be",
    ),
    "no temperature": (
        lambda q, k, v: attention.sinkhorn_attention(
            q, k, v, jnp.ones((B, N, 1, 1)), block_size=T, temperature=0.0
        ),
        "temperature must be positive",
    ),
    "a kernel of other heads": (
        lambda q, k, v: attention.compressed_attention(
            q, k, v, jnp.ones((2, N, H, H)), jnp.ones((2, K, V, V)), stride=2
        ),
        "key_kernel must be",
    ),
    "no stride": (
        lambda q, k, v: attention.compressed_attention(
            q, k, v, jnp.ones((2, K, H, H)), jnp.ones((2, K, V, V)), stride=0
        ),
        "stride must be at least 1",
    ),
    "an unknown feature map": (
        lambda q, k, v: attention.linear_attention(q, k, v, feature_map="tanh"),
        "feature_map must be one of elu, relu, softplus",
    ),
    "features of other widths": (
        lambda q, k, v: attention.favor_attention(q, k, v, jnp.ones((4, H + 1))),
        "projection must be",
    ),
    "lengths of more rows": (
        lambda q, k, v: attention.linear_attention(
            q, k, v, key_value_seq_lengths=jnp.ones(3, jnp.int32)
        ),
        "key_value_seq_lengths must be",
    ),
    "logits of more places": (
        lambda q, k, v: attention.synthesizer_attention(v, jnp.ones((T, T + 1))),
        "logits .* must be as long",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(case):
    call, words = REFUSALS[case]
    arrays = arrays_of(SETTINGS["routing"]).values()
    with pytest.raises(ValueError, match=words) as refused:
        jax.eval_shape(call, *arrays)
    assert "\n" not in str(refused.value).split("\n---")[0].strip()
