"""Losses: sums and weights, by hand and against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.losses import cross_entropy

pytestmark = pytest.mark.usefixtures("strict")

ROWS, PLACES, VOCAB = 3, 5, 7


@pytest.fixture
def case():
    draw = np.random.default_rng(0)
    logits = jnp.asarray(draw.normal(size=(ROWS, PLACES, VOCAB)) * 3, jnp.float32)
    labels = jnp.asarray(draw.integers(VOCAB, size=(ROWS, PLACES)), jnp.int32)
    weights = jnp.asarray(draw.integers(2, size=(ROWS, PLACES)), jnp.float32)
    return logits, labels, weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_optax(case, smoothing):
    logits, labels, weights = case
    targets = optax.smooth_labels(jax.nn.one_hot(labels, VOCAB), smoothing)
    each = optax.softmax_cross_entropy(logits, targets)
    total, weight = cross_entropy(logits, labels, weights, label_smoothing=smoothing)
    np.testing.assert_allclose(total, jnp.sum(each * weights), rtol=1e-5)
    assert weight == jnp.sum(weights)


def test_uniform_logits_cost_log_vocabulary():
    total, weight = cross_entropy(
        jnp.zeros((2, VOCAB)),
        jnp.zeros(2, jnp.int32),
        jnp.array([1.0, 3.0]),
        label_smoothing=0.2,
    )
    np.testing.assert_allclose(total, 4 * np.log(VOCAB), rtol=1e-6)
    assert weight == 4


def test_garbage_of_weight_zero_changes_nothing(case):
    logits, labels, weights = case
    dirty = jnp.where(weights[..., None] > 0, logits, jnp.nan)

    def mean(logits):
        total, weight = cross_entropy(logits, labels, weights, label_smoothing=0.1)
        return total / weight

    clean, clean_gradient = jax.value_and_grad(mean)(logits)
    value, gradient = jax.value_and_grad(mean)(dirty)
    np.testing.assert_array_equal(value, clean)
    np.testing.assert_array_equal(gradient, clean_gradient)
    assert not gradient[weights == 0].any()


@pytest.mark.parametrize("label", [-100, VOCAB, 99])
def test_labels_of_weight_zero_may_be_anything(case, label):
    logits, labels, weights = case
    marked = jnp.where(weights > 0, labels, label)
    np.testing.assert_array_equal(
        cross_entropy(logits, marked, weights), cross_entropy(logits, labels, weights)
    )


def test_sums_add_up_over_any_split_of_the_batch(case):
    whole = cross_entropy(*case)
    parts = [cross_entropy(*(x[row : row + 1] for x in case)) for row in range(ROWS)]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)


def test_bfloat16_is_summed_in_float32(case):
    logits, labels, weights = case
    coarse = logits.astype(jnp.bfloat16)
    total, _ = cross_entropy(coarse, labels, weights)
    exact, _ = cross_entropy(coarse.astype(jnp.float32), labels, weights)
    assert total.dtype == jnp.float32
    assert total == exact
