"""Decoding with each kind of attention: token by token equals the full pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import B, Band, H, K, N, Slopes, T, V, normal, operands, run

from transformer_jax import attention

pytestmark = pytest.mark.usefixtures("strict")

DECODING = [
    name for name, row in attention.ATTENTION.items() if "decode" in row.capabilities
]


def decode(name, arrays, cache, **call):
    """Scan `step` over the positions of query, key and value."""
    step = attention.ATTENTION[name].step

    def body(cache, position):
        output, cache = step(*(array[:, None] for array in position), cache, **call)
        return cache, (output[:, 0], cache)

    by_time = tuple(array.swapaxes(0, 1) for array in arrays)
    _, (outputs, caches) = jax.jit(lambda *a: jax.lax.scan(body, *a))(cache, by_time)
    return outputs.swapaxes(0, 1), caches


def fresh_cache(name, max_length, **options):
    return attention.ATTENTION[name].init_cache(
        B,
        max_length,
        kv_heads=K,
        head_width=H,
        value_width=V,
        dtype=jnp.float32,
        **options,
    )


@pytest.mark.parametrize("pattern", [None, Band(2), Band(0, N)])
@pytest.mark.parametrize("name", DECODING)
def test_token_by_token_equals_the_full_pass(name, pattern):
    arrays, bias = operands(), Slopes(normal(N))
    whole = run(name, *arrays, bias, is_causal=True, pattern=pattern, scale=0.4)
    cache = fresh_cache(name, T + 2, pattern=pattern)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {B}
    outputs, _ = decode(name, arrays, cache, bias=bias, scale=0.4)
    np.testing.assert_allclose(outputs, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODING)
def test_rows_stand_at_different_positions_and_overflow_alone(name):
    """Rows swapped by a gather go on as themselves; a full row is NaN, others right."""
    arrays, bias = operands(), normal(1, N, 1, T)
    whole = run(name, *arrays, bias, is_causal=True)
    _, caches = decode(name, arrays, fresh_cache(name, T), bias=bias)
    # Row 0 after two positions and row 1 after all five, in swapped order.
    times, rows = np.array([T - 1, 1]), np.array([1, 0])
    cache = jax.tree.map(lambda leaf: leaf[times, rows], caches)
    np.testing.assert_array_equal(cache.position, [T, 2])
    new = [array[rows, np.array([0, 2])][:, None] for array in arrays]
    output, after = jax.jit(attention.ATTENTION[name].step)(*new, cache, bias=bias)
    assert np.isnan(output[0]).all()
    np.testing.assert_allclose(output[1, 0], whole[0, 2], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after.key[0], cache.key[0])
    np.testing.assert_array_equal(after.position, [T + 1, 3])


@pytest.mark.parametrize("lengths", [(T, 2), (0, T + 3)])
@pytest.mark.parametrize("name", DECODING)
def test_reading_a_filled_cache_equals_the_full_pass(name, lengths):
    """Nor is anything read that stands behind the lengths."""
    (query, key, value), bias = operands(), normal(1, N, 1, T)
    lengths = jnp.array(lengths, jnp.int32)
    whole = run(name, query, key, value, bias, scale=0.4, key_value_seq_lengths=lengths)
    behind = (jnp.arange(T)[None] >= lengths[:, None])[:, :, None, None]
    key, value = (jnp.where(behind, jnp.nan, array) for array in (key, value))
    row = attention.ATTENTION[name]
    cache = jax.jit(row.fill)(key, value, lengths)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {B}
    output = jax.jit(row.read)(query, cache, bias=bias, scale=0.4)
    np.testing.assert_allclose(output, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODING)
def test_what_a_pattern_hides_is_never_read(name):
    """A key whose only reader is past poisons nothing that comes after."""
    query, key, value = operands()
    whole = run(name, query, key, value, is_causal=True, pattern=Band(0))
    key, value = (array.at[:, 1].set(jnp.nan) for array in (key, value))
    cache = fresh_cache(name, T, pattern=Band(0))
    outputs, _ = decode(name, (query, key, value), cache)
    np.testing.assert_allclose(outputs[:, 2:], whole[:, 2:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": normal(B, T, N, H + 1)}, ValueError, "head width differs"),
        ({"query": jnp.zeros((B, T, N, H), jnp.bfloat16)}, TypeError, "one dtype"),
        ({"bias": normal(1, N, 1, 3)}, ValueError, r"bias \(1, 6, 1, 3\)"),
        ({"scale": normal(2)}, ValueError, r"scale must be one number.*\(2,\)"),
    ],
)
def test_wrong_read_is_refused(change, error, text):
    row = attention.ATTENTION["dot_product"]
    _, key, value = operands()
    call = {"query": normal(B, T, N, H)}
    call["cache"] = row.fill(key, value, jnp.full(B, T, jnp.int32))
    with pytest.raises(error, match=text):
        row.read(**(call | change))


@pytest.mark.parametrize(
    ("lengths", "error", "text"),
    [
        (jnp.ones(B + 1, jnp.int32), ValueError, r"lengths must be .*= \(2,\), not"),
        (jnp.int32(1), ValueError, r"lengths must be .*= \(2,\), not \(\)"),
        (jnp.ones(B), TypeError, "lengths must be integers, not float32"),
    ],
)
def test_wrong_lengths_are_refused(lengths, error, text):
    _, key, value = operands()
    with pytest.raises(error, match=text):
        attention.ATTENTION["dot_product"].fill(key, value, lengths)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"query": normal(B, 2, N, H)},
            ValueError,
            r"one query a row.*\(2, 2, 6, 11\)",
        ),
        ({"key": normal(B, 1, N, H)}, ValueError, r"key must be \(2, 1, 3, 11\)"),
        ({"value": normal(B, 1, K, H)}, ValueError, r"value must be \(2, 1, 3, 13\)"),
        (
            {"key": jnp.zeros((B, 1, K, H), jnp.bfloat16)},
            TypeError,
            "cache holds float32, but key is bfloat16",
        ),
        ({"bias": normal(1, N, 1, 3)}, ValueError, r"bias \(1, 6, 1, 3\)"),
        ({"scale": normal(2)}, ValueError, r"scale must be one number.*\(2,\)"),
    ],
)
def test_wrong_step_is_refused(change, error, text):
    row = attention.ATTENTION["dot_product"]
    call = {"query": normal(B, 1, N, H), "key": normal(B, 1, K, H)}
    call |= {"value": normal(B, 1, K, V), "cache": fresh_cache("dot_product", T)}
    with pytest.raises(error, match=text):
        row.step(**(call | change))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pattern": "causal()"}, TypeError, "not str"),
        ({"dtype": jnp.int32}, TypeError, "not int32"),
        ({"max_length": 0}, ValueError, r"at least 1, not \(2, 0, 3, 11\)"),
        ({"head_width": 0}, ValueError, r"at least 1, not \(2, 5, 3, 0\)"),
    ],
)
def test_wrong_cache_is_refused(options, error, text):
    sizes = {"max_length": T, "kv_heads": K, "head_width": H, "dtype": jnp.float32}
    with pytest.raises(error, match=text):
        attention.ATTENTION["dot_product"].init_cache(B, **(sizes | options))
