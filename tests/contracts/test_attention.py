"""The contract of exact attention, run over the rows of the ATTENTION table."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import (
    CASES,
    RNG,
    B,
    Case,
    H,
    K,
    N,
    S,
    Slopes,
    T,
    V,
    check_case,
    kernel_of,
    normal,
    operands,
    random_mask,
    run,
)
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pattern_oracle import texts

from transformer_jax import attention, masks
from transformer_jax.patterns import local, parse

pytestmark = pytest.mark.usefixtures("strict")

EXACT = [
    f"{name}/{way}"
    for way in ("reference", "xla")
    for name, row in attention.ATTENTION.items()
    if row.capabilities >= {"exact_mask", "bias", "residual"}
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXACT)
def test_kernel_equals_the_oracle(name, case):
    """Forward and all gradients by name, with NaN in everything unattended."""
    got = check_case(name, CASES[case], jnp.float32, 1e-5, 1e-4)
    assert got["output"].dtype == got["residual"].dtype == jnp.float32


@hypothesis.settings(max_examples=6)
@hypothesis.given(text=texts(), offset=st.integers(0, 3))
def test_any_union_in_tiles_equals_the_oracle(text, offset):
    """Forward and all gradients by name, NaN included, over drawn patterns."""
    call = {"pattern": text, "query_offset": offset, "dropout_rate": 0.2}
    case = Case(call | {"key_value_seq_lengths": [7, 4]}, "slopes")
    check_case("dot_product/xla", case, jnp.float32, 1e-5, 1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_scale_has_a_gradient(name):
    """By differences; a query without a key is NaN, and narrow products do not."""
    query, key, value = operands()
    query = query.at[:, 0].set(jnp.nan)
    pattern = parse("causal() & ~local(0)")

    @jax.jit
    def total(scale):
        call = {"pattern": pattern, "scale": scale}
        return (kernel_of(name)(query, key, value, **call) ** 2).sum()

    scale, step = jnp.float32(0.4), jnp.float32(1e-2)
    found = jax.jit(jax.grad(total))(scale)
    wanted = (total(scale + step) - total(scale - step)) / (2 * step)
    np.testing.assert_allclose(found, wanted, rtol=1e-2)
    # In float16 the scaled query would be infinite, the scaled product is not.
    large = [jnp.full(x.shape, c, jnp.float16) for x, c in ((query, 30), (key, 1e-3))]
    output = run(name, *large, value.astype(jnp.float16), scale=jnp.float16(3000))
    assert np.isfinite(output).all()


@pytest.mark.parametrize("name", EXACT)
def test_bfloat16_is_near_the_oracle(name):
    got = check_case(name, CASES["all at once"], jnp.bfloat16, 2e-2, 2e-2)
    assert got["output"].dtype == got["key"].dtype == jnp.bfloat16
    assert got["residual"].dtype == jnp.float32


@pytest.mark.parametrize("name", EXACT)
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        case = CASES["causal with offset"]
        got = check_case(name, case, jnp.float64, 1e-12, 1e-12)
    assert {array.dtype for array in got.values()} == {np.dtype(np.float64)}


# --- What the dense oracle shares with the outside world -------------------------


@pytest.mark.parametrize("name", EXACT)
def test_agrees_with_jax(name):
    """Where every query may attend something, jax.nn is right too."""
    query, key = normal(B, T, N, H), normal(B, S, K, H, seed=1)
    value, bias = normal(B, S, K, H, seed=2), normal(1, N, T, S, seed=3)
    call = {
        "mask": jnp.asarray(np.arange(S) != 1).reshape(1, 1, 1, S),
        "is_causal": True,
        "key_value_seq_lengths": jnp.array([S, 3], jnp.int32),
        "return_residual": True,
    }
    got = run(name, query, key, value, bias, **call)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        peer = functools.partial(jax.nn.dot_product_attention, **call)
        wanted = jax.jit(peer)(query, key, value, bias)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_three_axes_are_a_batch_of_one(name):
    """Lengths, segments and masks then come with or without their axis of 1."""
    kernel = functools.partial(run, name)
    query, key, value = (array[:1] for array in operands())
    mask = jnp.asarray(random_mask(N, T, T))
    ids = jnp.array([1, 1, 2, 2, 0])
    call = {"key_value_seq_lengths": 4, "query_seq_lengths": 5, "return_residual": True}
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    plain = kernel(query[0], key[0], value[0], None, mask, **call, **segments)
    wrapped = {word: jnp.asarray(values)[None] for word, values in segments.items()}
    wrapped |= {word: jnp.array([size]) for word, size in list(call.items())[:2]}
    batched = kernel(query, key, value, None, mask, return_residual=True, **wrapped)
    other = kernel(query[0], key[0], value[0], None, mask[None], **(call | wrapped))
    assert plain[0].shape == (T, N, V)
    assert plain[1].shape == (T, N)
    for one, two, three in zip(plain, batched, other, strict=True):
        np.testing.assert_array_equal(one, two[0])
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("pattern", [None, local(1)])
@pytest.mark.parametrize("name", EXACT)
def test_no_keys_no_queries_and_no_rows(name, pattern):
    query, key, value = operands()
    call = {"pattern": pattern, "return_residual": True}
    output, residual = run(name, query, key[:, :0], value[:, :0], **call)
    np.testing.assert_array_equal(output, np.zeros((B, T, N, V)))
    np.testing.assert_array_equal(residual, np.full((B, T, N), -np.inf))
    assert run(name, query[:, :0], key, value, pattern=pattern).shape == (B, 0, N, V)
    none = run(name, query[:0], key[:0], value[:0], pattern=pattern)
    assert none.shape == (0, T, N, V)


@pytest.mark.parametrize("name", EXACT)
def test_bias_of_minus_infinity_is_a_mask(name):
    """A row of it is dead, like a row without allowed keys, and has zero gradients."""
    query, key, value = operands()
    allowed = jnp.asarray(random_mask(T, T))
    bias = jnp.where(allowed, 0.0, -jnp.inf)
    kernel = jax.jit(kernel_of(name))

    def loss(query, *pieces):
        return (kernel(query, key, value, *pieces) ** 2).sum()

    by_bias = jax.value_and_grad(loss)(query, bias)
    by_mask = jax.value_and_grad(loss)(query, None, allowed)
    for one, other in zip(by_bias, by_mask, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(by_bias[1][:, 1], np.zeros((B, N, H)))


# --- Invariants ------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_weights_sum_to_one(name):
    query, key, value = operands()
    mask = jnp.asarray(random_mask(T, T))
    output = run(name, query, key, jnp.ones_like(value), mask=mask)
    alive = np.asarray(mask).any(1)[None, :, None, None]
    wanted = np.broadcast_to(alive, output.shape).astype(float)
    np.testing.assert_allclose(output, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_batch_mates_and_padding_change_nothing(name):
    """Each row alone, cut to its length, gives what it gives among others."""
    query, key, value = operands()
    lengths = [2, 3]
    together = run(name, query, key, value, key_value_seq_lengths=jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        alone = run(
            name,
            query[row : row + 1],
            key[row : row + 1, :length],
            value[row : row + 1, :length],
        )
        np.testing.assert_allclose(together[row], alone[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_causal_outputs_ignore_the_future(name):
    """Jacobian of output t to keys and values j: zero exactly where j > t."""
    query, key, value = (array[:1, :, :1] for array in operands())
    kernel = functools.partial(kernel_of(name), is_causal=True)
    jacobian = jax.jit(jax.jacrev(kernel, (0, 1, 2)))(query, key, value)
    past = np.tril(np.ones((T, T), bool))
    for array, wanted in zip(jacobian, (np.eye(T) > 0, past, past), strict=True):
        touched = (np.asarray(array) != 0).any((0, 2, 3, 4, 6, 7))
        # The first query has one key: its weight is 1 whatever the query and the key.
        np.testing.assert_array_equal(touched[1:], wanted[1:])
        assert not touched[0, 1:].any()


@pytest.mark.parametrize("name", EXACT)
def test_later_queries_continue_with_an_offset(name):
    """Queries from 2 on, at query_offset 2, equal those rows of the whole."""
    query, key, value = operands()
    call = {"is_causal": True, "pattern": local(2), "bias": Slopes(normal(N))}
    call |= {"dropout_rate": 0.3, "dropout_rng": RNG}
    whole = run(name, query, key, value, **call)
    part = run(name, query[:, 2:], key, value, **call, query_offset=2)
    np.testing.assert_allclose(part, whole[:, 2:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dot_product/reference"])
def test_forward_mode_agrees_with_reverse_mode(name):
    query, key, value = operands()
    mask = jnp.asarray(random_mask(T, T))

    def call(query):
        output, residual = kernel_of(name)(
            query, key, value, mask=mask, return_residual=True
        )
        return output, jnp.where(jnp.isfinite(residual), residual, 0.0)

    @jax.jit
    def both(query, tangent):
        outputs, tangents = jax.jvp(call, (query,), (tangent,))
        return outputs, tangents, jax.vjp(call, query)[1](outputs)[0]

    tangent = normal(B, T, N, H, seed=9)
    outputs, tangents, cotangent = both(query, tangent)
    forward = sum(jnp.vdot(*pair) for pair in zip(outputs, tangents, strict=True))
    np.testing.assert_allclose(forward, jnp.vdot(cotangent, tangent), rtol=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_bias_may_close_over_what_is_differentiated(name):
    """Functions, partial ones and pytrees with numbers for leaves give one answer."""
    query, key, value = operands()
    kernel = functools.partial(kernel_of(name), pattern=local(1))
    slopes = normal(N)

    def of_function(slopes):
        return lambda i, j: -slopes[:, None, None] * jnp.abs(i - j)[None]

    def of_partial(slopes):
        return functools.partial(lambda bias, i, j: bias(i, j), Slopes(slopes, 1))

    def loss(slopes, made):
        return (kernel(query, key, value, made(slopes)) ** 2).sum()

    makers = (Slopes, of_function, of_partial, lambda slopes: Slopes(slopes, 1))
    with jax.numpy_dtype_promotion("standard"):
        values = [
            jax.jit(jax.value_and_grad(functools.partial(loss, made=made)))(slopes)
            for made in makers
        ]
    for other in values[1:]:
        for one, two in zip(values[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_within_shard_map_gradients_are_those_of_one_device(name):
    """What all devices share, the bias, has the sum of their gradients."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    query, key, value = operands(8, 7)

    def kernel(query, key, value, slopes):
        bias = Slopes(slopes)
        return kernel_of(name)(query, key, value, bias, pattern=local(1))

    cut, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        kernel, mesh=mesh, in_specs=(cut, cut, cut, whole), out_specs=cut
    )

    def gradients(attend):
        def loss(*arrays):
            return (attend(*arrays) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

    arrays = (query, key, value, normal(N))
    found, wanted = (gradients(each)(*arrays) for each in (sharded, kernel))
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


# --- Dropout ---------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_dropout_is_equal_over_eight_devices(name):
    """The batch cut over devices drops the same edges, and keeps the mean."""
    rate, length = 0.25, 11
    query, key, _ = operands(8, length)
    identity = jnp.broadcast_to(
        jnp.eye(length, dtype=jnp.float32)[None, :, None], (8, length, K, length)
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    kernel = jax.jit(functools.partial(kernel_of(name), dropout_rate=rate))
    single = kernel(query, key, identity, dropout_rng=RNG)
    cut = jax.device_put(
        (query, key, identity), NamedSharding(mesh, PartitionSpec("data"))
    )
    sharded = kernel(*cut, dropout_rng=RNG)
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_allclose(sharded, single, rtol=1e-6, atol=1e-7)
    # With the identity as values the output is the weights themselves.
    kept = masks.hashed_keep(
        RNG, rate, *np.indices((8, N, length, length), np.int32)
    ).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(np.asarray(single) > 0, kept)
    sums = np.asarray(single).sum(-1)
    assert abs(sums.mean() - 1) < 5 * sums.std() / sums.size**0.5
