"""Schedules by hand; what weight decay and clipping touch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
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


ROWS, COLUMNS = 37, 41


def adafactor_in_numpy(parameter, gradients, rate):
    """Algorithm 4 of Shazeer and Stern 2018, with beta2 of section 7.2."""
    row, column = np.zeros(ROWS), np.zeros(COLUMNS)
    for step, gradient in enumerate(gradients, start=1):
        decay = 1 - step**-0.8
        square = gradient**2 + 1e-30
        row = decay * row + (1 - decay) * square.sum(axis=1)
        column = decay * column + (1 - decay) * square.sum(axis=0)
        update = gradient / np.sqrt(np.outer(row, column) / row.sum())
        update /= max(1, np.sqrt((update**2).mean()))
        scale = max(1e-3, np.sqrt((parameter**2).mean()))
        parameter = parameter - scale * rate * update
    return parameter


def test_adafactor_is_the_paper_s_and_keeps_sums_of_rows_and_columns():
    draw = np.random.default_rng(0)
    first, *gradients = draw.normal(size=(4, ROWS, COLUMNS))
    config = TrainConfig(
        optimizer="adafactor",
        schedule="constant",
        learning_rate=0.01,
        warmup=0,
        clip=0.0,
    )
    tx, params = make_optimizer(config), {"kernel": jnp.float32(first)}
    state = tx.init(params)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert ROWS + COLUMNS <= kept < ROWS + COLUMNS + 9
    for gradient in gradients:
        updates, state = tx.update({"kernel": jnp.float32(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    expected = adafactor_in_numpy(first, gradients, 0.01)
    np.testing.assert_allclose(
        params["kernel"] - first, expected - first, rtol=1e-3, atol=1e-6
    )
