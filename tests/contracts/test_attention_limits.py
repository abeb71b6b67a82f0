"""What kinds of attention are at their limits: dense, sorted, sums, softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds_oracle import (
    LENGTHS,
    SETTINGS,
    B,
    H,
    K,
    N,
    T,
    V,
    arrays_of,
    normal,
    pieces_of,
    run,
)

from transformer_jax import attention
from transformer_jax.attention import ATTENTION
from transformer_jax.attention.buckets import code_of
from transformer_jax.attention.kinds import taken
from transformer_jax.attention.sinkhorn import sorted_blocks

pytestmark = pytest.mark.usefixtures("strict")


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
