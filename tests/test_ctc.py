"""CTC: all slot sequences enumerated, optax, PyTorch, and what does not fit."""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lattice_oracle as oracle
import numpy as np
import optax
import pytest

from transformer_jax.ctc import ctc_alignment, ctc_lattice, ctc_log_likelihood
from transformer_jax.lattice import count_paths

pytestmark = pytest.mark.usefixtures("strict")

VOCAB, SLOTS = 3, 5
LENGTHS = (5, 0, 2, 3)
BLANK = 1


class Case(NamedTuple):
    """Arguments of all functions."""

    log_probs: Any
    lengths: Any
    labels: Any
    label_lengths: Any


class Answers(NamedTuple):
    likelihood: Any
    gradient: Any
    score: Any
    slots: Any


def answers(case, blank=BLANK):
    """Likelihood, its gradient by the log-probabilities, and the best slots."""
    return jax.device_get(_answers(case, blank))


@partial(jax.jit, static_argnums=1)
def _answers(case, blank):
    def summed(log_probs):
        likelihood = ctc_log_likelihood(log_probs, *case[1:], blank_id=blank)
        return likelihood.sum(), likelihood

    gradient, likelihood = jax.grad(summed, has_aux=True)(case.log_probs)
    return Answers(likelihood, gradient, *ctc_alignment(*case, blank_id=blank))


def assert_same(found, wanted, **tolerance):
    for name, one, other in zip(Answers._fields, found, wanted, strict=True):
        np.testing.assert_allclose(one, other, err_msg=name, **tolerance)


def draw_log_probs(seed, *shape):
    """Log-softmax of noise; some of the symbols 0 are impossible."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=shape) * 2
    logits[..., 0][draw.random(shape[:-1]) < 0.1] = -np.inf
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return log_probs.astype(np.float32)


def padded(outputs, width, pad):
    """Outputs as arrays; behind their ends stands what `pad` repeats."""
    fill = itertools.cycle(pad)
    labels = [[*output, *itertools.islice(fill, width)][:width] for output in outputs]
    sizes = np.array([len(output) for output in outputs], np.int32)
    return np.array(labels, np.int32).reshape(-1, width), sizes


def outputs(blank, longest=SLOTS):
    symbols = [symbol for symbol in range(VOCAB) if symbol != blank]
    lengths = range(longest + 1)
    return [y for n in lengths for y in itertools.product(symbols, repeat=n)]


def draw_case(blank=BLANK, junk=(0,)):
    """Each of four rows of slots with each of 63 outputs, row after row."""
    log_probs = draw_log_probs(0, len(LENGTHS), SLOTS, VOCAB)
    every = outputs(blank)
    return Case(
        np.repeat(log_probs, len(every), axis=0),
        np.repeat(np.array(LENGTHS, np.int32), len(every)),
        *padded(every * len(LENGTHS), SLOTS, junk),
    )


def pairs(case, blank):
    """Row, output, and all slot sequences of it with their log-probabilities."""
    every = outputs(blank)
    for start in range(0, len(case.lengths), len(every)):
        length = int(case.lengths[start])
        found = oracle.slots_by_output(case.log_probs[start], length, blank)
        for place, output in enumerate(every):
            yield start + place, output, found.get(output, {})


@pytest.mark.parametrize("blank", range(VOCAB))
def test_every_output_sums_its_slots_and_all_sum_to_one(blank):
    case = draw_case(blank)
    found = answers(case, blank).likelihood
    for row, output, sequences in pairs(case, blank):
        wanted = oracle.log_sum(list(sequences.values()))
        assert found[row] == pytest.approx(wanted, rel=1e-5, abs=1e-6), output
    total = np.exp(found.reshape(len(LENGTHS), -1)).sum(1)
    np.testing.assert_allclose(total, np.ones(len(LENGTHS)), rtol=1e-5)


@pytest.mark.parametrize("blank", range(VOCAB))
def test_alignment_is_the_best_of_its_output(blank):
    case = draw_case(blank)
    found = answers(case, blank)
    for row, output, sequences in pairs(case, blank):
        length = int(case.lengths[row])
        slots = tuple(found.slots[row].tolist())
        assert set(slots[length:]) <= {blank}
        best = max(sequences.values(), default=-math.inf)
        assert found.score[row] == pytest.approx(best, rel=1e-5), output
        if best > -math.inf:
            assert oracle.collapse(slots[:length], blank) == output
            assert sequences[slots[:length]] == pytest.approx(best, rel=1e-5)
        else:
            assert set(slots) <= {blank}


def test_gradient_is_the_posterior_of_each_slot():
    case = draw_case()
    found = answers(case).gradient
    for row, _, sequences in pairs(case, BLANK):
        wanted = np.zeros((SLOTS, VOCAB))
        total = oracle.log_sum(list(sequences.values()))
        for slots, value in sequences.items():
            if value > -math.inf:
                for time, slot in enumerate(slots):
                    wanted[time, slot] += math.exp(value - total)
        np.testing.assert_allclose(found[row], wanted, atol=1e-5)
        possible = total > -math.inf
        inside = np.arange(SLOTS) < case.lengths[row]
        np.testing.assert_allclose(found[row].sum(1), inside * possible, atol=1e-5)


def test_gradient_equals_finite_differences():
    """In float64, with 64-bit integers."""
    with jax.enable_x64(True):
        log_probs = draw_log_probs(1, 4, SLOTS, VOCAB).astype(np.float64)
        labels, sizes = padded([(0, 2), (), (0, 0, 2), (2,)], 3, [2])
        others = [x.astype(np.int64) for x in (np.array([5, 3, 4, 2]), labels, sizes)]

        def function(vector):
            parts = vector.reshape(log_probs.shape), *map(jnp.asarray, others)
            return ctc_log_likelihood(*parts, blank_id=BLANK)

        vector, step = log_probs.ravel(), 1e-6 * np.eye(log_probs.size)
        totals = jax.jit(jax.vmap(function))
        ahead, behind = totals(vector + step), totals(vector - step)
        assert ahead.dtype == jnp.float64
        assert np.isfinite(ahead).all()
        slopes = np.sum(ahead - behind, axis=1) / 2e-6
        found = jax.jit(jax.grad(lambda vector: function(vector).sum()))(vector)
        np.testing.assert_allclose(found, slopes, atol=1e-8)


def peer_case():
    """Logits, and outputs that fit, among them repeats, an empty and a full one."""
    draw = np.random.default_rng(2)
    logits = np.asarray(draw.normal(size=(5, 7, 4)) * 2, np.float32)
    labels, sizes = padded([(1, 2, 2), (), (3, 1, 2, 3), (1,), (2, 2)], 4, [0])
    return logits, np.array([7, 5, 4, 1, 3]), labels, sizes


@jax.jit
def ours(logits, *others):
    """Losses and the gradient of their sum."""

    def summed(logits):
        losses = -ctc_log_likelihood(jax.nn.log_softmax(logits), *others, blank_id=0)
        return losses.sum(), losses

    gradient, losses = jax.grad(summed, has_aux=True)(logits)
    return losses, gradient


def test_equals_optax():
    logits, lengths, labels, sizes = peer_case()

    @jax.jit
    def theirs(logits):
        behind = jnp.arange(logits.shape[1]) >= lengths[:, None]
        paddings = behind, labels, jnp.arange(labels.shape[1]) >= sizes[:, None]
        losses, back = jax.vjp(lambda logits: optax.ctc_loss(logits, *paddings), logits)
        return losses, *back(jnp.ones_like(losses))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        losses, gradient = theirs(logits)
    found, slope = ours(logits, lengths, labels, sizes)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, atol=2e-5)


def test_equals_pytorch():
    """Also where nothing fits: its infinity, and zeros by `zero_infinity`."""
    torch = pytest.importorskip("torch")
    logits, lengths, labels, sizes = peer_case()
    lengths[4] = 2  # Two equal labels need three slots.
    tensor = torch.tensor(logits, requires_grad=True)

    def theirs(zero_infinity):
        return torch.nn.functional.ctc_loss(
            torch.log_softmax(tensor, 2).transpose(0, 1),
            *(torch.tensor(x) for x in (labels, lengths, sizes)),
            reduction="none",
            zero_infinity=zero_infinity,
        )

    theirs(zero_infinity=True).sum().backward()
    found, slope = ours(logits, lengths, labels, sizes)
    np.testing.assert_allclose(found, theirs(zero_infinity=False).detach(), rtol=1e-5)
    assert found[4] == jnp.inf
    np.testing.assert_allclose(slope, tensor.grad, atol=2e-5)


@pytest.mark.parametrize("label", [BLANK, VOCAB, 99, -1])
def test_label_that_cannot_be_written_leaves_its_row_no_path(label):
    case, row = draw_case(), 12
    assert case.label_lengths[row] == 3
    alive = answers(case)
    assert alive.likelihood[row] > -np.inf
    case.labels[row, 1] = label
    found = answers(case)
    assert found.likelihood[row] == found.score[row] == -jnp.inf
    assert not found.gradient[row].any()
    assert (found.slots[row] == BLANK).all()
    others = np.arange(len(case.lengths)) != row
    assert_same(*([x[others] for x in each] for each in (found, alive)), rtol=0)


def test_labels_fit_from_their_number_and_repeats_on():
    case = draw_case()
    found = answers(case._replace(log_probs=np.zeros_like(case.log_probs)))
    for row, output, _ in pairs(case, BLANK):
        repeats = sum(one == other for one, other in itertools.pairwise(output))
        fits = case.lengths[row] >= len(output) + repeats
        assert (found.likelihood[row] > -np.inf) == fits


@pytest.mark.parametrize("junk", [(BLANK,), (99, -7), (2, 2, 0)])
def test_what_stands_behind_the_lengths_changes_nothing(junk):
    case, dirty = draw_case(), draw_case(junk=junk)
    dirty.log_probs[np.arange(SLOTS) >= case.lengths[:, None]] = np.nan
    assert np.isnan(dirty.log_probs).any()
    assert_same(answers(dirty), answers(case), rtol=0)


def test_nan_in_a_slot_that_counts_is_heard():
    case, row = draw_case(), 17
    assert 2 in case.labels[row, : case.label_lengths[row]]
    case.log_probs[row, 3, 2] = np.nan
    found = answers(case)
    assert np.flatnonzero(np.isnan(found.score)).tolist() == [row]
    assert (found.slots[row] == BLANK).all()
    assert np.flatnonzero(np.isnan(found.likelihood)).tolist() == [row]
    assert set(np.nonzero(np.isnan(found.gradient))[0].tolist()) == {row}


@pytest.mark.parametrize(("slots", "places"), [(0, 2), (3, 0)])
def test_without_slots_or_labels(slots, places):
    """Nothing is written without a slot; the empty output is all blanks."""
    log_probs = draw_log_probs(3, 2, slots, VOCAB)
    labels = np.zeros((2, places), np.int32)
    sizes = np.array([0, min(1, places)])
    case = Case(log_probs, np.full(2, slots), labels, sizes)
    found = answers(case)
    blanks = log_probs[..., BLANK].sum(1)
    wanted = np.where(sizes == 0, blanks, -np.inf)
    np.testing.assert_allclose(found.likelihood, wanted, rtol=1e-6)
    np.testing.assert_allclose(found.score, wanted, rtol=1e-6)
    assert found.slots.shape == (2, slots)
    assert (found.slots == BLANK).all()
    only_blanks = np.broadcast_to(np.eye(VOCAB)[BLANK], (2, slots, VOCAB))
    np.testing.assert_array_equal(found.gradient, only_blanks)


def ways(slots, labels):
    """In how many ways labels are written: a formula (Graves et al. 2006, fig. 3).

    Slots and labels interleave; each pair of equal neighbours takes one blank away.
    """
    repeats = sum(one == other for one, other in itertools.pairwise(labels))
    return math.comb(slots + len(labels) - repeats, 2 * len(labels))


@jax.jit
def count_alignments(*parts):
    return count_paths(ctc_lattice(*parts, blank_id=BLANK))


@pytest.mark.parametrize("labels", [(), (0,), (0, 2, 3), (0, 0, 2, 2)])
def test_alignments_are_counted_by_a_formula(labels):
    written = padded([labels], 4, [BLANK])
    parts = np.zeros((1, 11, 4), np.float32), np.array([11]), *written
    assert count_alignments(*parts)[0] == ways(11, labels)


def test_long_rows_do_not_underflow():
    """All slots uniform: p is the number of ways over V^T, here about e^-9000."""
    size, vocab, labels = 2000, 100, (*range(2, 92), 5, 5)
    written, sizes = padded([labels], len(labels), [0])
    log_probs = np.full((1, size, vocab), -np.log(vocab), np.float32)
    case = Case(log_probs, np.array([size]), written, sizes)
    found = answers(case, 0)
    wanted = math.log(ways(size, labels)) - size * math.log(vocab)
    assert found.likelihood[0] == pytest.approx(wanted, rel=1e-5)
    assert found.score[0] == pytest.approx(-size * math.log(vocab), rel=1e-5)
    slots = tuple(found.slots[0].tolist())
    assert oracle.collapse(slots, 0) == labels
    np.testing.assert_allclose(found.gradient.sum(2), np.ones((1, size)), rtol=1e-5)


def test_bfloat16_is_summed_in_float32():
    case = draw_case()
    coarse = case._replace(log_probs=case.log_probs.astype(jnp.bfloat16))
    exact = case._replace(log_probs=coarse.log_probs.astype(np.float32))
    found, wanted = answers(coarse), answers(exact)
    assert found.likelihood.dtype == found.score.dtype == jnp.float32
    assert found.gradient.dtype == jnp.bfloat16
    rounded = wanted.gradient.astype(jnp.bfloat16)
    assert_same(found, wanted._replace(gradient=rounded), rtol=1e-2)
    np.testing.assert_allclose(found.likelihood, wanted.likelihood, rtol=1e-6)


def test_vmap_changes_nothing():
    """Every output of a row at once, as beam search asks."""
    case = draw_case()
    rows = [x.reshape(len(LENGTHS), -1, *x.shape[1:]) for x in case]
    found = jax.device_get(jax.vmap(lambda case: _answers(case, BLANK))(Case(*rows)))
    flat = [x.reshape(-1, *x.shape[2:]) for x in found]
    assert_same(flat, answers(case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blank", [-1, VOCAB])
@pytest.mark.parametrize("function", [ctc_log_likelihood, ctc_alignment])
def test_blank_outside_of_the_vocabulary_is_refused(function, blank):
    with pytest.raises(ValueError, match=rf"blank_id must lie in 0\.\.2, not {blank}"):
        function(*map(jnp.asarray, draw_case()), blank_id=blank)
