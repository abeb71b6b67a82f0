"""Stacks of blocks against each other: scanned, unrolled, with remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import named, perturbed

from transformer_jax.encoder import EncoderBlock
from transformer_jax.stacks import Common, Stack

B, T, D, HEADS = 2, 5, 6, 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
LENGTHS = jnp.array([5, 3])
FIELDS = {
    "width": D,
    "heads": HEADS,
    "kv_heads": HEADS,
    "head_width": 4,
    "hidden": 7,
    "activation": "relu",
    "norm": "layer",
    "norm_position": "pre",
    "dropout": 0.5,
    "attention_dropout": 0.0,
    "positions": "none",
    "dtype": jnp.float32,
}
LAYERS = 2
SEED = 7


def run_stack(params, *, scan, remat="none", seed=None):
    stack = Stack(EncoderBlock, FIELDS, LAYERS, scan, remat)

    def total(params):
        rngs = {} if seed is None else {"dropout": jax.random.key(seed)}
        y, _ = stack.apply(
            params, "__call__", X, None, LENGTHS, Common(), rngs=rngs, method="run"
        )
        return (y**2).sum(), y

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@functools.cache
def unrolled_params():
    stack = Stack(EncoderBlock, FIELDS, LAYERS, False, "none")
    arguments = ("__call__", X, None, LENGTHS, Common())
    return perturbed(stack.init(jax.random.key(0), *arguments, method="run"))


@functools.cache
def unrolled(seed=None):
    """Sum and states, and the gradient: what the others must give as well."""
    return run_stack(unrolled_params(), scan=False, seed=seed)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_scanned_layers_equal_unrolled_ones(remat):
    layers = [unrolled_params()["params"][f"layers_{n}"] for n in range(LAYERS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    (_, expected), gradient = unrolled()
    (_, scanned), stacked_gradient = run_stack(
        {"params": {"layers": stacked}}, scan=True, remat=remat
    )
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-5)
    for number in range(LAYERS):
        mine = jax.tree.map(
            lambda leaf, n=number: leaf[n], stacked_gradient["params"]["layers"]
        )
        theirs = gradient["params"][f"layers_{number}"]
        for name, leaf in named(theirs).items():
            np.testing.assert_allclose(
                named(mine)[name], leaf, rtol=1e-4, atol=1e-3, err_msg=name
            )


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_drops_the_same_entries(remat):
    again = run_stack(unrolled_params(), scan=False, remat=remat, seed=SEED)
    for name, leaf in named(unrolled(SEED)).items():
        np.testing.assert_allclose(
            named(again)[name], leaf, rtol=1e-4, atol=1e-3, err_msg=name
        )
