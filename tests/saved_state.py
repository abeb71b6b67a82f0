"""A training state of the checkpoint tests, and what makes two of them the same."""

import jax
import jax.numpy as jnp
import optax
from trees import bits

OPTIMIZER = optax.adamw(1e-2)
AWAY = {"note": "nothing to see"}


def make_state(step, vocabulary=7):
    """A state whose every number depends on the step."""
    key = jax.random.fold_in(jax.random.key(5), step)
    params = {
        "embedding": jax.random.normal(key, (vocabulary, 16)),
        "layer": {
            "bias": jnp.full((3,), step, jnp.bfloat16),
            "kernel": jax.random.normal(key, (16, 3)),
        },
    }
    optimizer = OPTIMIZER.init(params)
    return {
        "key": key,
        "opt_state": jax.tree.map(lambda leaf: leaf + step, optimizer),
        "params": params,
        "step": jnp.int32(step),
    }


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
        ),
        state,
    )


WANTED = abstract(make_state(0))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert one.dtype == other.dtype
        assert bits(one) == bits(other)
