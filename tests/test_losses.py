"""Losses: sums and weights, by hand and against optax."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.ctc import ctc_log_likelihood
from transformer_jax.losses import any_reference, cross_entropy, ctc

pytestmark = pytest.mark.usefixtures("strict")

ROWS, PLACES, VOCAB = 3, 5, 7
BLANK = 2


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


INF = float("inf")
LOSSES = jnp.array([[1.0, 2.0, 0.5], [3.0, INF, 700.0], [INF, INF, INF], [1.0, 1.0, 2]])
SIZES = jnp.array([[2.0, 4.0, 3.0], [5.0, 9.0, 7.0], [1.0, 1.0, 1.0], [1.0, 3.0, 2.0]])
WEIGHTS = jnp.array([1.0, 1.0, 1.0, 0.0])
any_summed = jax.jit(any_reference)


def test_any_reference_is_right():
    total, size = any_summed(LOSSES, SIZES, WEIGHTS)
    # Nothing of the row without a possible reference, nothing of the filler row.
    wanted = -np.log(np.exp([-1.0, -2.0, -0.5]).sum()) + 3.0
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert size == 3 + 6


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_the_gradient_is_each_references_share(far):
    """Finite also where there is no reference, or one is hardly possible."""
    gradient = jax.grad(lambda losses: any_summed(losses, SIZES, WEIGHTS)[0])
    found = np.asarray(gradient(LOSSES + far))
    shares = np.exp([-1.0, -2.0, -0.5])
    np.testing.assert_allclose(found[0], shares / shares.sum(), rtol=1e-3)
    assert found[1:].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_a_loss_that_is_no_number_is_heard():
    """A model that has diverged must not look like one that has nothing to learn."""
    assert np.isnan(any_summed(LOSSES.at[1, 1].set(jnp.nan), SIZES, WEIGHTS)[0])
    filler = any_summed(LOSSES.at[3].set(jnp.nan), SIZES, WEIGHTS)
    np.testing.assert_array_equal(filler, any_summed(LOSSES, SIZES, WEIGHTS))


def test_ctc_leaves_out_what_cannot_be_and_what_does_not_count():
    """Also in its gradient, and whatever stands in a filler row."""
    draw = np.random.default_rng(1)
    logits = jnp.asarray(draw.normal(size=(3, 4, 5)), jnp.float32)
    slots, blank = jnp.array([4, 2, 4]), 4
    # Row 1: two equal symbols need three slots. Row 2 is a filler.
    labels = jnp.array([[[1, 2], [3, 0]], [[2, 2], [0, 0]], [[1, 1], [0, 0]]])
    lengths = jnp.array([[2, 1], [2, -1], [2, -1]])
    weights = jnp.array([1.0, 1.0, 0.0])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def found(logits, weights):
        return ctc(logits, slots, labels, lengths, weights, blank_id=blank)

    dirty = logits.at[2].set(jnp.nan)
    (total, size), gradient = found(dirty, weights)
    (alone, same), _ = found(logits, jnp.array([1.0, 0.0, 0.0]))
    assert (total, size) == (alone, same)
    assert size == 1.5
    assert np.abs(gradient[0]).min() > 0
    assert not gradient[1:].any()


class Slots(NamedTuple):
    """Arguments of `ctc`, of one reference a row."""

    logits: Any
    lengths: Any
    labels: Any
    label_lengths: Any
    weights: Any


@jax.jit
def ctc_answers(case):
    """Sum, weight and the gradient of the sum."""

    def total(logits):
        one = case.labels[:, None], case.label_lengths[:, None]
        return ctc(logits, case.lengths, *one, case.weights, blank_id=BLANK)

    (total, weight), back = jax.vjp(total, case.logits)
    return total, weight, back((jnp.ones_like(total), jnp.zeros_like(weight)))[0]


@pytest.fixture
def slots():
    """Rows of which the second does not fit, the third is empty, the fourth off."""
    draw = np.random.default_rng(1)
    return Slots(
        logits=draw.normal(size=(5, 7, 4)).astype(np.float32) * 2,
        lengths=np.array([7, 2, 3, 6, 5], np.int32),
        labels=np.array([[1, 3, 3], [0, 0, 1], [3, 1, 0], [1, 1, 1], [0, 1, 9]]),
        label_lengths=np.array([3, 2, 0, 3, 2]),
        weights=np.array([1.0, 1.0, 3.0, 0.0, 0.5], np.float32),
    )


def test_ctc_sums_likelihoods_of_what_fits(slots):
    log_probs = jax.nn.log_softmax(slots.logits)
    parts = map(jnp.asarray, slots[1:4])
    likelihood = ctc_log_likelihood(log_probs, *parts, blank_id=BLANK)
    assert np.isneginf(likelihood).tolist() == [False, True, False, False, False]
    total, weight, gradient = ctc_answers(slots)
    wanted = -likelihood[0] - 3 * likelihood[2] - 0.5 * likelihood[4]
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert weight == 3 + 3 * 1 + 0.5 * 2
    counted = np.abs(gradient).max((1, 2)) > 0
    assert counted.tolist() == [True, False, True, False, True]
    # Softmax minus posterior: nothing is left of a slot, and nothing is no number.
    np.testing.assert_allclose(gradient.sum(2), np.zeros((5, 7)), atol=1e-5)


def test_ctc_garbage_that_does_not_count_changes_nothing(slots):
    clean = ctc_answers(slots)
    behind = np.arange(7) >= slots.lengths[:, None]
    dirty = np.where(behind[..., None], np.float32(np.nan), slots.logits)
    dirty[3] = np.nan
    labels = np.where(np.arange(3) < slots.label_lengths[:, None], slots.labels, -5)
    labels[3] = 99
    found = ctc_answers(slots._replace(logits=dirty, labels=labels))
    for ours, wanted in zip(found, clean, strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_ctc_hears_nan(slots):
    slots.logits[0, 4, 1] = np.nan
    total, weight, gradient = ctc_answers(slots)
    assert np.isnan(total)
    assert weight == 7
    assert np.isnan(gradient[0, 4]).all()
    assert np.isfinite(gradient[1:]).all()


def test_ctc_sums_add_up_over_any_split_of_the_batch(slots):
    whole = ctc_answers(slots)[:2]
    rows = [Slots(*(x[row : row + 1] for x in slots)) for row in range(5)]
    parts = [jax.device_get(ctc_answers(row)[:2]) for row in rows]
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-6)


def test_ctc_bfloat16_is_summed_in_float32(slots):
    coarse = slots._replace(logits=slots.logits.astype(jnp.bfloat16))
    exact = slots._replace(logits=coarse.logits.astype(np.float32))
    total, _, gradient = ctc_answers(coarse)
    assert total.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(total, ctc_answers(exact)[0], rtol=1e-6)
