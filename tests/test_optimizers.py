"""Schedules by hand; what weight decay and clipping touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import named

from transformer_jax.config import TrainConfig
from transformer_jax.optimizers import make_optimizer, make_schedule

PEAK, WARMUP, STEPS = 0.5, 10, 50


@pytest.mark.parametrize(
    ("kind", "step", "share"),
    [
        ("rsqrt", 0, 0.0),
        ("rsqrt", 5, 0.5),
        ("rsqrt", 10, 1.0),
        ("rsqrt", 40, 0.5),
        ("cosine", 5, 0.5),
        ("cosine", 10, 1.0),
        ("cosine", 30, 0.5),
        ("cosine", 50, 0.0),
        ("constant", 3, 0.3),
        ("constant", 49, 1.0),
    ],
)
def test_schedule(kind, step, share):
    config = TrainConfig(schedule=kind, learning_rate=PEAK, warmup=WARMUP, steps=STEPS)
    rate = make_schedule(config)(jnp.asarray(step))
    np.testing.assert_allclose(rate, share * PEAK, atol=1e-6)


@pytest.mark.parametrize("kind", ["rsqrt", "cosine", "constant"])
def test_no_warmup_begins_at_the_peak(kind):
    config = TrainConfig(schedule=kind, learning_rate=PEAK, warmup=0, steps=STEPS)
    np.testing.assert_allclose(make_schedule(config)(jnp.asarray(0)), PEAK)


PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "norm": {"scale": jnp.ones(3)},
    "embed": {"embedding": jnp.ones((5, 3))},
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_spares_biases_and_norms(optimizer):
    config = TrainConfig(
        optimizer=optimizer,
        schedule="constant",
        learning_rate=0.1,
        warmup=0,
        weight_decay=0.5,
        clip=0.0,
    )
    tx = make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    moved = {name: bool(leaf.any()) for name, leaf in named(updates).items()}
    assert moved == {
        "dense/kernel": True,
        "dense/bias": False,
        "norm/scale": False,
        "embed/embedding": True,
    }
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.05, rtol=1e-5)


def test_clipping_bounds_the_global_norm():
    config = TrainConfig(
        optimizer="sgd", schedule="constant", learning_rate=1.0, warmup=0, momentum=0.0
    )
    tx = make_optimizer(config)
    large = jax.tree.map(lambda leaf: 100 * leaf, PARAMS)
    updates, _ = tx.update(large, tx.init(PARAMS), PARAMS)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(updates)))
    np.testing.assert_allclose(norm, config.clip, rtol=1e-5)
