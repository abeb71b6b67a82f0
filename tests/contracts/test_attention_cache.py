"""Decoding with each kind of attention: token by token equals the full pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import B, H, K, N, Slopes, T, V, normal, operands, run

from transformer_jax import attention
from transformer_jax.patterns import local, parse, per_head

pytestmark = pytest.mark.usefixtures("strict")

DECODING = [
    name
    for name, row in attention.ATTENTION.items()
    if row.capabilities >= {"decode", "exact_mask"}
]


# Rings, residents, residues, gathered reads, and heads that differ.
PATTERNS = (
    None,
    "local(2)",
    "chunked(3)",
    "local(1) | global_tokens(2)",
    "strided(4)",
    "local(1, 0, dilation=3)",
    "~local(1)",
    "random_blocks(1, 2)",
    f"per_head(({', '.join(f'local({n % 4})' for n in range(N))}))",
    # Heads that differ, over slots that all share.
    f"per_head(({'causal(), local(1), ' * (N // 2)}))",
)
LONG = 37


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


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("name", DECODING)
def test_token_by_token_equals_the_full_pass(name, text):
    """Over many wraps of whatever ring a pattern makes."""
    arrays, bias = operands(length=LONG), Slopes(normal(N))
    pattern = text and parse(text)
    whole = run(name, *arrays, bias, is_causal=True, pattern=pattern, scale=0.4)
    cache = fresh_cache(name, LONG, pattern=pattern)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {B}
    outputs, _ = decode(name, arrays, cache, bias=bias, scale=0.4)
    np.testing.assert_allclose(outputs, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("local(2)", 3),
        ("local(2) | global_tokens(3)", 6),
        ("chunked(5)", 5),
        ("local(2, dilation=3)", 7),
        ("global_tokens(2)", 3),
        ("strided(4, 2)", 9),
        # The last keys are not read again.
        ("strided(4)", 994),
        ("full()", 997),
    ],
)
def test_a_cache_is_as_large_as_what_can_still_be_reached(text, slots):
    """However long the sequence is."""
    cache = attention.ATTENTION["dot_product"].init_cache(
        1, 997, kv_heads=1, head_width=1, dtype=jnp.float32, pattern=parse(text)
    )
    assert cache.key.shape == (1, 1, slots, 1)


@pytest.mark.parametrize("text", ["local(2) | global_tokens(1)", PATTERNS[-2]])
@pytest.mark.parametrize("heads", [1, N])
def test_a_bias_of_all_positions_follows_the_slots(text, heads):
    arrays, bias = operands(length=LONG), normal(1, heads, 1, LONG)
    pattern = parse(text)
    whole = run("dot_product", *arrays, bias, is_causal=True, pattern=pattern)
    cache = fresh_cache("dot_product", LONG, pattern=pattern)
    outputs, _ = decode("dot_product", arrays, cache, bias=bias)
    np.testing.assert_allclose(outputs, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", [None, local(1)])
@pytest.mark.parametrize("name", DECODING)
def test_rows_stand_at_different_positions_and_overflow_alone(name, pattern):
    """Rows swapped by a gather go on as themselves; a full row is NaN, others right."""
    arrays, bias = operands(), normal(1, N, 1, T)
    whole = run(name, *arrays, bias, is_causal=True, pattern=pattern)
    _, caches = decode(name, arrays, fresh_cache(name, T, pattern=pattern), bias=bias)
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


@pytest.mark.parametrize("pattern", [None, local(2), per_head((local(2),) * N)])
@pytest.mark.parametrize("lengths", [(T, 2), (0, T + 3)])
@pytest.mark.parametrize("name", DECODING)
def test_reading_a_filled_cache_equals_the_full_pass(name, lengths, pattern):
    """Nor is anything read that stands behind the lengths."""
    (query, key, value), bias = operands(), normal(1, N, 1, T)
    lengths = jnp.array(lengths, jnp.int32)
    call = {"scale": 0.4, "pattern": pattern, "key_value_seq_lengths": lengths}
    whole = run(name, query, key, value, bias, **call)
    behind = (jnp.arange(T)[None] >= lengths[:, None])[:, :, None, None]
    key, value = (jnp.where(behind, jnp.nan, array) for array in (key, value))
    row = attention.ATTENTION[name]
    cache = jax.jit(functools.partial(row.fill, pattern=pattern))(key, value, lengths)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {B}
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    read = jax.jit(row.read)
    output = read(query, cache, positions=positions, bias=bias, scale=0.4)
    np.testing.assert_allclose(output, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODING)
def test_what_a_pattern_hides_is_never_read(name):
    """A key whose only reader is past poisons nothing that comes after."""
    query, key, value = operands()
    whole = run(name, query, key, value, is_causal=True, pattern=local(0))
    key, value = (array.at[:, 1].set(jnp.nan) for array in (key, value))
    cache = fresh_cache(name, T, pattern=local(0))
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
        ({"max_length": 0}, ValueError, r"not \(2, 0, 3, 11, 11\)"),
        ({"head_width": 0}, ValueError, r"not \(2, 5, 3, 0, 0\)"),
    ],
)
def test_wrong_cache_is_refused(options, error, text):
    sizes = {"max_length": T, "kv_heads": K, "head_width": H, "dtype": jnp.float32}
    with pytest.raises(error, match=text):
        attention.ATTENTION["dot_product"].init_cache(B, **(sizes | options))
