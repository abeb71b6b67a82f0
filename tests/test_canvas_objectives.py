"""Objectives of canvases: what is written where, what counts, what is left out."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canvas_oracle import (
    END,
    MASK,
    OUTPUTS,
    Oracle,
    batch_of,
    collapsed,
    log_softmax,
    loss_of,
    score,
    slots_of,
)
from tiny import TINY

from transformer_jax.decoding.length import length_class, lengths_of_classes
from transformer_jax.models import CANVASES
from transformer_jax.objectives.canvas import known_length, overlong
from transformer_jax.objectives.fitting import has_class, holds_blanks, holds_end


@functools.partial(jax.jit, static_argnames=("objective", "options"))
def _asked_of(objective, batch, key, options):
    model = Oracle()
    loss_of(objective, model, batch, key=key, **dict(options))
    return model.asked


def asked_of(objective, batch, key=None, **options):
    """What a model is asked: inputs, lengths and the key of dropout, for each pass."""
    return jax.device_get(_asked_of(objective, batch, key, tuple(options.items())))


# --- What is written -------------------------------------------------------------


def test_a_canvas_of_known_length_has_a_place_for_each_symbol():
    """The drawing of the docstring."""
    given = known_length(batch_of([[4, 5, 6], [6]], places=5), MASK)
    assert given.inputs.tolist() == [[MASK] * 4] * 2
    assert given.labels.tolist() == [[4, 5, 6, 0], [6, 0, 0, 0]]
    assert given.weights.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("places", [4, 9])
def test_an_overlong_canvas_ends_in_ends(places):
    """The drawing of the docstring; whatever the places of the batch are."""
    targets = [[4, 5, 6], [4, 5, 6], [6], [], []]
    batch = batch_of(targets, places=places, weight=[1, 1, 1, 1, 0])
    lengths = np.array([6, 3, 2, 2, 6])
    given = overlong(batch, lengths, 6, mask_id=MASK, end_id=END, fill=0.25)
    assert given.inputs.tolist() == [[MASK] * 6] * 5
    assert given.labels[0].tolist() == [4, 5, 6, END, END, END]
    assert given.labels[2, :2].tolist() == [6, END]
    assert given.labels[3, :2].tolist() == [END, END]
    assert given.weights.tolist() == [
        [1, 1, 1, 1, 0.25, 0.25],
        # Its three places have no room for END.
        [0] * 6,
        [1, 1, 0, 0, 0, 0],
        [1, 0.25, 0, 0, 0, 0],
        # A filler row.
        [0] * 6,
    ]


def hidden_places(batch, key=None):
    ((inputs, lengths, _),) = asked_of("mask_predict", batch, key=key)
    np.testing.assert_array_equal(lengths, batch.target_lengths)
    return inputs


def test_mask_predict_hides_a_uniform_number_of_places_chosen_evenly():
    rows, lengths = 2000, (1, 2, 4)
    batch = batch_of([[4, 5, 6, 4][:n] for n in lengths for _ in range(rows)], places=6)
    found = hidden_places(batch, jax.random.key(3))
    labels = batch.target[:, :-1]
    inside = np.arange(5) < batch.target_lengths[:, None]
    hidden = (found == MASK) & inside
    # Nothing but hidden places, shown symbols and empty padding.
    np.testing.assert_array_equal(found, np.where(hidden | ~inside, MASK, labels))
    tolerance = 5 * 0.5 / rows**0.5
    for number, length in enumerate(lengths):
        mine = hidden[number * rows :][:rows, :length]
        counts = np.bincount(mine.sum(1), minlength=length + 1) / rows
        wanted = [0.0, *[1 / length] * length]
        np.testing.assert_allclose(counts, wanted, atol=tolerance)
        pairs = mine[mine.sum(1) == 2]
        if len(pairs):
            shares = pairs.mean(0)
            np.testing.assert_allclose(shares, 2 / length, atol=2 * tolerance)
            assert len({*map(tuple, pairs)}) == math.comb(length, 2)


def test_what_is_hidden_without_a_key_depends_on_the_example_alone():
    batch = batch_of([[4, 5, 6, 5]] * 30)
    found = hidden_places(batch)
    np.testing.assert_array_equal(found, hidden_places(batch))
    turned = hidden_places(batch._replace(index=batch.index[::-1]))
    np.testing.assert_array_equal(turned, found[::-1])
    assert len({*map(tuple, found)}) > 5
    assert (found != hidden_places(batch, jax.random.key(0))).any()


@pytest.mark.parametrize("objective", CANVASES)
def test_the_canvas_is_empty_and_dropout_comes_with_the_key(objective):
    batch = batch_of([[4, 5], [6]], [3, 1])
    ((inputs, lengths, rngs),) = asked_of(objective, batch, key=jax.random.key(0))
    assert [*rngs] == ["dropout"]
    model = Oracle()
    jax.eval_shape(functools.partial(loss_of, objective, model), batch)
    assert model.asked[0][2] == {}
    known = CANVASES[objective].length
    wanted = batch.target_lengths if known else 2 * batch.source_lengths
    np.testing.assert_array_equal(lengths, wanted)
    if objective != "mask_predict":
        assert (inputs == MASK).all()


@pytest.mark.parametrize("objective", ["parallel", "ctc"])
def test_both_passes_of_a_corruption_have_one_dropout(objective):
    def corrupt(given, predict, key, vocabulary, **hints):
        predict(given.inputs)
        return given._replace(inputs=given.inputs.at[:, 0].set(5))

    batch, key = batch_of([[4, 5], [6]]), jax.random.key(1)
    first, second = asked_of(objective, batch, key=key, corrupt=corrupt)
    assert first[2]["dropout"] == second[2]["dropout"]
    assert (first[0] == MASK).all()
    # What a corruption shows is what the model then reads.
    assert (second[0][:, 0] == 5).all()
    assert (second[0][:, 1:] == MASK).all()


# --- What counts -----------------------------------------------------------------


def test_parallel_is_the_cross_entropy_of_symbols_and_of_the_length():
    draw = np.random.default_rng(0)
    targets, sources = [[4, 5, 6], [], [6]], [2, 3, 4]
    logits, length_logits = draw.normal(size=(3, 3, OUTPUTS)), draw.normal(size=(3, 5))
    model = Oracle(*map(jnp.float32, (logits, length_logits)))

    batch = jax.device_put(batch_of(targets, sources))

    @jax.jit
    def found(weight):
        options = {"label_smoothing": 0.0, "length_weight": weight}
        return loss_of("parallel", model, batch, **options)

    symbols = -sum(
        log_softmax(logits)[row, place, symbol]
        for row, target in enumerate(targets)
        for place, symbol in enumerate(target)
    )
    np.testing.assert_allclose(found(0.0), [symbols, 4], rtol=1e-5)
    # Offsets 1, -3, -3 of five classes around 0: the last two are the least one. The
    # empty target's length counts once.
    lengths = -sum(
        count * log_softmax(length_logits)[row, number]
        for row, (number, count) in enumerate([(3, 3), (0, 1), (0, 1)])
    )
    np.testing.assert_allclose(found(0.7), [symbols + 0.7 * lengths, 4], rtol=1e-5)


@pytest.mark.parametrize("objective", ["parallel", "mask_predict"])
def test_a_length_counts_as_much_as_the_symbols_that_count(objective):
    """So it does with some of the symbols hidden or shown."""

    def corrupt(given, *_):
        return given._replace(weights=given.weights.at[:, 1:].set(0.0))

    options = {"corrupt": corrupt if objective == "parallel" else None}
    batch, key = jax.device_put(batch_of([[4, 5, 6, 4]] * 9)), jax.random.key(1)

    @jax.jit
    def found(weight):
        options["length_weight"] = weight
        return loss_of(objective, Oracle(), batch, key=key, **options)

    (total, weight), (more, same) = found(0.0), found(1.0)
    assert weight == same < 9 * 4
    np.testing.assert_allclose(more - total, weight * math.log(5), rtol=1e-5)


def test_overgenerate_counts_the_fill_less():
    logits = np.random.default_rng(0).normal(size=(2, 6, OUTPUTS))
    batch = batch_of([[4, 5, 6], [6]], [3, 2])
    options = {"label_smoothing": 0.0, "fill_weight": 0.3}
    model = Oracle(jnp.float32(logits))
    found = jax.jit(functools.partial(loss_of, "overgenerate", model, **options))(batch)
    labels = [[4, 5, 6, END, END, END], [6, END, END, END]]
    weights = [[1, 1, 1, 1, 0.3, 0.3], [1, 1, 0.3, 0.3]]
    wanted = -sum(
        weights[row][place] * log_softmax(logits)[row, place, label]
        for row, places in enumerate(labels)
        for place, label in enumerate(places)
    )
    np.testing.assert_allclose(found, [wanted, 6 + 1.2], rtol=1e-5)


def test_ctc_sums_over_all_slots_that_collapse():
    logits = np.random.default_rng(0).normal(size=(3, 6, OUTPUTS))
    targets, sources = [[4, 4], [], [6, 5]], [3, 2, 1]
    model, batch = Oracle(jnp.float32(logits)), batch_of(targets, sources)
    found = jax.jit(functools.partial(loss_of, "ctc", model))(batch)
    wanted = 0.0
    for row, (target, source) in enumerate(zip(targets, sources, strict=True)):
        ways = [way for way in slots_of(2 * source) if collapsed(way) == target]
        wanted -= np.log(np.exp([score(logits[row], way) for way in ways]).sum())
    # An empty target weighs as one symbol.
    np.testing.assert_allclose(found, [wanted, 2 + 1 + 2], rtol=1e-5)


# --- What is left out ------------------------------------------------------------


PAIRS = [
    ([4 + (place % 2 if changing else 0) for place in range(length)], source)
    for source in (1, 2, 3)
    for length in range(7)
    for changing in (False, True)
]


def sizes_of(pairs):
    """Lengths of sources and targets, and equal neighbours, as a cache tells them."""
    repeats = [
        sum(one == other for one, other in itertools.pairwise(target))
        for target, _ in pairs
    ]
    lengths = [len(target) for target, _ in pairs]
    return tuple(map(np.array, ([source for _, source in pairs], lengths, repeats)))


@pytest.mark.parametrize(
    ("objective", "fits"), [("overgenerate", holds_end), ("ctc", holds_blanks)]
)
def test_what_does_not_fit_its_canvas_counts_nothing(objective, fits):
    """And what is said to fit is just what counts."""
    model = Oracle()
    model.extra_slots = 1
    config = dataclasses.replace(TINY, upsample=2, extra_slots=1)

    @jax.jit
    @jax.vmap
    def of_row(row):
        return loss_of(objective, model, jax.tree.map(lambda leaf: leaf[None], row))

    totals, weights = of_row(batch_of(*zip(*PAIRS, strict=True)))
    fit = fits(config, *sizes_of(PAIRS))
    assert 5 < fit.sum() < len(PAIRS) - 5
    np.testing.assert_array_equal(weights > 0, fit)
    np.testing.assert_array_equal(totals != 0, fit)


@pytest.mark.parametrize(("target", "offset"), [("offset", True), ("absolute", False)])
def test_lengths_beyond_the_classes_are_trained_as_the_nearest(target, offset):
    classes = {"classes": 5, "offset": offset}
    config = dataclasses.replace(TINY, length_classes=5, length_target=target)
    source, lengths, repeats = sizes_of(PAIRS)
    numbers = length_class(jnp.asarray(lengths), jnp.asarray(source), **classes)
    told = np.asarray(lengths_of_classes(jnp.asarray(source), **classes))
    meant = told[np.arange(len(PAIRS)), np.asarray(numbers)]
    fit = has_class(config, source, lengths, repeats)
    assert 0 < fit.sum() < len(PAIRS)
    np.testing.assert_array_equal(meant == lengths, fit)
    nearest = np.abs(told - lengths[:, None]).min(1)
    np.testing.assert_array_equal(np.abs(meant - lengths), nearest)
