"""What dense attention refuses: one line that names the argument and its shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RNG, B, H, K, N, S, T, V, normal, operands

from transformer_jax import attention
from transformer_jax.patterns import causal, per_head

pytestmark = pytest.mark.usefixtures("strict")

WRONG = [
    ({"query": jnp.ones((B, T, N, H), int)}, TypeError, "floating, not int32"),
    ({"key": jnp.ones((B, S, K, H), jnp.bfloat16)}, TypeError, "float32, bfloat16 and"),
    ({"query": normal(T, N, H)}, ValueError, r"not \(5, 6, 11\), \(2, 7, 3, 11\)"),
    ({"query": normal(N, H)}, ValueError, r"not \(6, 11\)"),
    ({"query": normal(3, T, N, H)}, ValueError, r"batch differs.*\(3, 5.*\(2, 7"),
    ({"query": normal(B, T, 4, H)}, ValueError, r"5, 4, 11\) has 4.*3, 11\) has 3"),
    ({"query": normal(B, T, N, V)}, ValueError, "head width.*6, 13.*3, 11"),
    ({"value": normal(B, 5, K, V)}, ValueError, r"agree.*\(2, 7, 3, 11\) and \(2, 5"),
    ({"value": normal(B, S, 1, V)}, ValueError, "agree in batch, length and heads"),
    ({"mask": normal(T, S)}, TypeError, "mask must be boolean.*float32.*bias"),
    ({"mask": jnp.ones((S, T), bool)}, ValueError, r"mask \(7, 5\).*\(2, 6, 5, 7\)"),
    ({"mask": jnp.ones((1, B, N, T, S), bool)}, ValueError, "mask .* broadcast"),
    ({"bias": jnp.ones((T, S), bool)}, TypeError, "bias is boolean: pass it as mask"),
    ({"bias": normal(B, K, T, S)}, ValueError, r"bias \(2, 3, 5, 7\).*\(2, 6, 5, 7\)"),
    ({"bias": lambda i, j: i - j}, ValueError, r"\(6, 5, 7\), not \(5, 7\)"),
    ({"pattern": "causal()"}, TypeError, "pattern must be .* not str"),
    ({"pattern": lambda i, j: i > j}, TypeError, "not function"),
    ({"scale": jnp.ones(N)}, ValueError, r"scale .* \(6,\)"),
    ({"query_seq_lengths": jnp.ones(T, int)}, ValueError, r"= \(2,\), not \(5,\)"),
    (
        {"key_value_seq_lengths": jnp.ones(B)},
        TypeError,
        "key_value_seq_lengths must be",
    ),
    ({"key_value_seq_lengths": 3}, ValueError, r"= \(2,\), not \(\)"),
    (
        {"query_segment_ids": jnp.ones((B, T), int)},
        ValueError,
        "both query_segment_ids and key_value_segment_ids",
    ),
    (
        {
            "query_segment_ids": jnp.ones((B, S), int),
            "key_value_segment_ids": jnp.ones((B, S), int),
        },
        ValueError,
        r"query_segment_ids must be .* \(2, 5\), not \(2, 7\)",
    ),
    ({"query_offset": -1}, ValueError, "query_offset must not be negative: -1"),
    ({"dropout_rate": 0.1}, ValueError, "needs a PRNG key"),
    ({"dropout_rate": 1.0, "dropout_rng": RNG}, ValueError, r"in \[0, 1\), not 1.0"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1, not 0"),
    (
        {"block_size": 128, "implementation": "reference"},
        ValueError,
        "leave block_size=None",
    ),
    (
        {"pattern": per_head((causal(),) * 3)},
        ValueError,
        "one of 3 heads, but there are 6",
    ),
    ({"implementation": "splash"}, NotImplementedError, "on TPUs only: use .*'xla'"),
    ({"implementation": "cudnn"}, NotImplementedError, "as wide as keys: use .*'xla'"),
    ({"implementation": "fast"}, ValueError, "'fast'.*'reference', 'xla', 'splash'"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_wrong_call_is_refused_in_one_line(change, error, text):
    call = {"query": normal(B, T, N, H), "key": normal(B, S, K, H)}
    call |= {"value": normal(B, S, K, V)}
    with pytest.raises(error, match=text) as caught:
        attention.dot_product_attention(**(call | change))
    assert "\n" not in str(caught.value)


def test_traced_offset_is_refused():
    arrays = operands()
    with pytest.raises(TypeError, match="query_offset must be a Python int"):
        jax.jit(
            lambda offset: attention.dot_product_attention(*arrays, query_offset=offset)
        )(1)


def test_reference_may_be_named():
    arrays = operands()
    named = attention.dot_product_attention(*arrays, implementation="reference")
    np.testing.assert_array_equal(named, attention.dot_product_attention(*arrays))
