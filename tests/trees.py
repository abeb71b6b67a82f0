"""Pytrees as tests look at them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def named(tree):
    """Return path -> leaf, paths such as `dense/kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def bits(leaf):
    """Return a leaf's bytes, those of a PRNG key included."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def perturbed(params):
    """Return parameters away from their usual zeros and ones."""
    leaves, tree = jax.tree.flatten(nn.unbox(params))
    draw = np.random.default_rng(1)
    noisy = [leaf + 0.3 * draw.normal(size=leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(tree, jax.tree.map(jnp.float32, noisy))
