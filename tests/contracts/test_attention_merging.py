"""Attention over disjoint keys as one, and tokens outside of the sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RNG, B, K, N, Slopes, T, normal, operands

from transformer_jax.attention import dot_product_attention, merge
from transformer_jax.attention.merging import attend_with_extra
from transformer_jax.patterns import parse

pytestmark = pytest.mark.usefixtures("strict")

EXTRA = 2


def test_two_halves_are_the_whole():
    query, key, value = operands()
    attend = functools.partial(dot_product_attention, query, return_residual=True)
    first = jnp.array([0, 3])[:, None, None, None]
    mask = jnp.arange(T)[None, None, None] >= first

    def halves(key, value):
        one = attend(key[:, :2], value[:, :2], mask=mask[..., :2])
        other = attend(key[:, 2:], value[:, 2:], mask=mask[..., 2:])
        return merge(one, other)

    whole = functools.partial(attend, mask=mask)
    cotangent = (normal(B, T, N, value.shape[-1], seed=5), normal(B, T, N, seed=6))
    found, pullback = jax.vjp(halves, key, value)
    right, right_pullback = jax.vjp(whole, key, value)
    for mine, ours in zip(
        jax.tree.leaves((found, pullback(cotangent))),
        jax.tree.leaves((right, right_pullback(cotangent))),
        strict=True,
    ):
        np.testing.assert_allclose(mine, ours, rtol=0, atol=1e-5)


def test_nothing_and_nothing_is_nothing():
    nothing = jnp.zeros((3, 2)), jnp.full(3, -jnp.inf)
    output, residual = merge(nothing, nothing)
    np.testing.assert_array_equal(output, np.zeros((3, 2)))
    np.testing.assert_array_equal(residual, np.full(3, -np.inf))

    def total(lse):
        output, residual = merge((nothing[0], lse), nothing)
        return output.sum() + jnp.where(residual > -jnp.inf, residual, 0.0).sum()

    np.testing.assert_array_equal(jax.grad(total)(nothing[1]), np.zeros(3))
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones(3)), np.ones(3))


@pytest.mark.parametrize("is_causal", [False, True])
def test_extra_tokens_are_a_mask_around_the_sequence(is_causal):
    """Forward and backward, with a bias and lengths that are the sequence's alone."""
    arrays = operands(length=EXTRA + T)
    pattern, bias = parse("local(1)"), Slopes(normal(N))
    lengths = jnp.array([T, 2], jnp.int32)
    inside = np.arange(T) < np.array([T, 2])[:, None, None, None]
    edges = pattern.dense(T, T) & (np.tri(T, dtype=bool) if is_causal else True)
    mask = np.ones((B, 1, EXTRA + T, EXTRA + T), bool)
    mask[:, :, EXTRA:, EXTRA:] = edges & inside
    mask[:, :, :EXTRA, EXTRA:] = inside & (not is_causal)

    def extra(*arrays):
        return attend_with_extra(
            dot_product_attention,
            *arrays,
            EXTRA,
            pattern=parse("local(1) & causal()") if is_causal else pattern,
            sequence_is_causal=is_causal,
            bias=bias,
            scale=0.3,
            key_value_seq_lengths=lengths,
        )

    def wanted(*arrays):
        steps = jnp.arange(T, dtype=jnp.int32)
        whole = jnp.zeros((N, EXTRA + T, EXTRA + T))
        whole = whole.at[:, EXTRA:, EXTRA:].set(bias(steps[:, None], steps[None]))
        return dot_product_attention(*arrays, whole, jnp.asarray(mask), scale=0.3)

    found, pullback = jax.jit(lambda *x: jax.vjp(extra, *x))(*arrays)
    right, right_pullback = jax.jit(lambda *x: jax.vjp(wanted, *x))(*arrays)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
    cotangent = normal(*found.shape, seed=8)
    for mine, ours in zip(pullback(cotangent), right_pullback(cotangent), strict=True):
        np.testing.assert_allclose(mine, ours, rtol=0, atol=1e-5)


def test_extra_tokens_drop_edges_of_their_own():
    """With the identity as values the output is the weights themselves."""
    query, key, _ = operands(length=EXTRA + T)
    identity = jnp.broadcast_to(jnp.eye(EXTRA + T), (B, K, EXTRA + T, EXTRA + T))
    weights = attend_with_extra(
        dot_product_attention,
        query,
        key,
        identity.swapaxes(1, 2),
        EXTRA,
        sequence_is_causal=False,
        dropout_rate=0.5,
        dropout_rng=RNG,
    )
    kept = np.asarray(weights) > 0
    for rows in (slice(EXTRA), slice(EXTRA, None)):
        for columns in (slice(EXTRA), slice(EXTRA, None)):
            assert 0.2 < kept[:, rows, :, columns].mean() < 0.8
    np.testing.assert_allclose(np.asarray(weights).sum(-1).mean(), 1, atol=0.15)


def test_extra_tokens_take_no_masks():
    arrays = operands(length=EXTRA + T)
    with pytest.raises(NotImplementedError, match="key_value_seq_lengths"):
        attend_with_extra(
            dot_product_attention,
            *arrays,
            EXTRA,
            sequence_is_causal=False,
            mask=jnp.ones((T, T), bool),
        )
