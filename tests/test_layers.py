"""Layers against NumPy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import perturbed

from transformer_jax.layers import (
    Dropout,
    FeedForward,
    MultiHeadAttention,
    make_norm,
    residual,
)

B, T, D, F, HEADS, H = 2, 5, 6, 7, 3, 4
DRAW = np.random.default_rng(0)
X = jnp.asarray(DRAW.normal(size=(B, T, D)), jnp.float32)
LENGTHS = jnp.array([5, 3])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(kind):
    norm = make_norm(kind, jnp.float32)
    params = perturbed(norm.init(jax.random.key(0), X))
    x = np.asarray(X, np.float64)
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    scale = params["params"]["scale"]
    bias = params["params"].get("bias", 0)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        norm.apply(params, X), expected * scale + bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("activation", "function"),
    [("relu", lambda h: np.maximum(h, 0)), ("swiglu", lambda h: h / (1 + np.exp(-h)))],
)
def test_feed_forward(activation, function):
    layer = FeedForward(F, activation, 0.0, jnp.float32)
    params = perturbed(layer.init(jax.random.key(0), X))
    maps = [
        lambda x, p=p: np.asarray(x) @ p["kernel"] + p.get("bias", 0)
        for _, p in sorted(params["params"].items())
    ]
    hidden = function(maps[0](X))
    if activation == "swiglu":
        hidden = hidden * maps[1](X)
    expected = maps[-1](hidden)
    np.testing.assert_allclose(layer.apply(params, X), expected, rtol=1e-4, atol=1e-5)
    assert ("bias" in params["params"]["DenseGeneral_0"]) == (activation == "relu")


def test_multi_head_attention_is_one_attention_a_head():
    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x, memory):
            layer = MultiHeadAttention(D, HEADS, HEADS, H, 0.0, jnp.float32)
            key_value = layer.project(memory)
            return layer(x, key_value, key_value_seq_lengths=LENGTHS)

    layer = Whole()
    memory = jnp.flip(X, axis=1) * 2
    params = perturbed(layer.init(jax.random.key(0), X, memory))
    parts = params["params"]["MultiHeadAttention_0"]
    assert "bias" not in parts["key"]
    expected = np.zeros((B, T, D)) + np.asarray(parts["out"]["bias"])
    for row in range(B):
        seen = np.asarray(memory[row, : LENGTHS[row]])
        for head in range(HEADS):
            query, value = (
                inputs @ parts[name]["kernel"][:, head] + parts[name]["bias"][head]
                for name, inputs in (("query", np.asarray(X[row])), ("value", seen))
            )
            scores = query @ (seen @ parts["key"]["kernel"][:, head]).T / np.sqrt(H)
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            expected[row] += weights @ value @ parts["out"]["kernel"][head]
    np.testing.assert_allclose(
        layer.apply(params, X, memory), expected, rtol=1e-4, atol=1e-5
    )


def test_residual_before_and_after():
    double, triple = (lambda x: 2 * x), (lambda x: 3 * x)

    def norm(x):
        return x - 1

    pre = residual(X, triple, norm, double, position="pre")
    np.testing.assert_allclose(pre, X + 2 * 3 * (X - 1), rtol=1e-6)
    post = residual(X, triple, norm, double, position="post")
    np.testing.assert_allclose(post, X + 2 * 3 * X - 1, rtol=1e-5)


def test_dropout_needs_a_key_and_keeps_the_mean():
    layer, ones = Dropout(0.25), jnp.ones((100, 100))
    assert layer.apply({}, ones) is ones
    dropped = layer.apply({}, ones, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(np.unique(dropped), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)
