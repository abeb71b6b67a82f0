"""Wrong inputs: which, how many, by what schedule, and none where all are kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, drawn
from trees import named

from transformer_jax.config import TrainConfig
from transformer_jax.corruption import (
    CORRUPTIONS,
    KEEP_SCHEDULES,
    DecoderInputs,
    corruption_at,
    keep_share,
)
from transformer_jax.models import build_model
from transformer_jax.objectives import OBJECTIVES, teacher_forcing
from transformer_jax.objectives.canvas import known_length
from transformer_jax.objectives.passes import Passes
from transformer_jax.types import Batch

KEY = jax.random.key(5)
SIZE = 13
# Those of a decoder that reads its own past.
OF_PREFIXES = OBJECTIVES["autoregressive"].corruptions


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, 2, 3
    special_ids = (0, 1, 2, 3)
    size = SIZE


def batch_of(rows=7, length=6):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, length, size=(2, rows))
    ids = draw.integers(4, 11, size=(2, rows, length))
    return Batch(
        source=jnp.asarray(ids[0]),
        source_lengths=jnp.asarray(lengths[0]),
        target=jnp.asarray(ids[1]),
        target_lengths=jnp.asarray(lengths[1]),
        weight=jnp.ones(rows),
        index=jnp.arange(rows),
    )


GIVEN = teacher_forcing(batch_of(), Vocabulary)
# Enough places to count.
WIDE = jax.tree.map(lambda x: np.tile(x, (60, 20)), GIVEN)


def parrot(inputs):
    """A model whose best answer at t is a function of its input at t."""
    return jax.nn.one_hot(4 + inputs * 3 % 9, SIZE) * 50.0


@functools.partial(jax.jit, static_argnames=("name", "predict", "choice"))
def compiled(name, predict, given, key, keep, **options):
    return CORRUPTIONS[name](given, predict, key, keep, Vocabulary, **options)


def corrupted(
    name, keep, predict=parrot, key=KEY, given=GIVEN, **options
) -> DecoderInputs:
    return compiled(name, predict, given, key, jnp.float32(keep), **options)


def test_every_corruption_is_tested():
    assert {*OF_PREFIXES, "glancing"} == CORRUPTIONS.keys()


@pytest.mark.parametrize("name", OF_PREFIXES)
class TestEveryCorruptionOfPrefixes:
    def test_labels_and_weights_stay(self, name):
        keep = jnp.float32(0.3)
        found = CORRUPTIONS[name](GIVEN, parrot, KEY, keep, Vocabulary)
        assert found.labels is GIVEN.labels
        assert found.weights is GIVEN.weights

    def test_all_kept_is_the_right_input(self, name):
        np.testing.assert_array_equal(corrupted(name, 1.0).inputs, GIVEN.inputs)

    def test_the_first_input_stays_and_no_special_symbol_comes_in(self, name):
        def likes_specials(inputs):
            return parrot(inputs).at[..., :4].set(99.0)

        found = corrupted(name, 0.0, predict=likes_specials).inputs
        found = np.asarray(found)
        np.testing.assert_array_equal(found[:, 0], np.asarray(GIVEN.inputs)[:, 0])
        assert (found[:, 1:] >= 4).all()
        assert (found < SIZE).all()
        assert found.dtype == GIVEN.inputs.dtype

    def test_the_share_is_kept(self, name):
        # Answers that never are the input, so that every replacement shows.
        other = DecoderInputs(np.full_like(WIDE.inputs, 12), *WIDE[1:])
        found = corrupted(name, 0.7, lambda i: parrot(i * 0), given=other)
        same = np.asarray(found.inputs)[:, 1:] == 12
        expected = 0.7 + (0.3 / 9 if name == "random_replacement" else 0)
        assert abs(same.mean() - expected) < 5 * 0.5 / same.size**0.5

    def test_places_depend_on_the_key(self, name):
        one, two = (
            corrupted(name, 0.5, key=jax.random.key(seed)).inputs for seed in (1, 2)
        )
        assert (one != two).any()
        np.testing.assert_array_equal(
            one, corrupted(name, 0.5, key=jax.random.key(1)).inputs
        )


@pytest.mark.parametrize("choice", ["argmax", "sample"])
def test_the_answer_at_t_is_the_input_at_t_plus_1(choice):
    found = corrupted("scheduled_sampling", 0.0, choice=choice).inputs
    answers = 4 + np.asarray(GIVEN.inputs) * 3 % 9
    np.testing.assert_array_equal(np.asarray(found)[:, 1:], answers[:, :-1])


def test_answers_are_drawn_as_often_as_the_model_says():
    shares = np.zeros(SIZE)
    shares[[5, 8, 9]] = 0.6, 0.3, 0.1

    def predict(inputs):
        return jnp.broadcast_to(jnp.log(shares), (*inputs.shape, SIZE))

    options = {"given": WIDE, "choice": "sample"}
    found = corrupted("scheduled_sampling", 0.0, predict, **options).inputs
    found = np.asarray(found)[:, 1:]
    counts = np.bincount(found.ravel(), minlength=SIZE) / found.size
    np.testing.assert_allclose(counts, shares, atol=5 * 0.5 / found.size**0.5)


def test_random_replacements_are_uniform():
    found = corrupted("random_replacement", 0.0, None, given=WIDE).inputs
    found = np.asarray(found)[:, 1:]
    counts = np.bincount(found.ravel(), minlength=SIZE) / found.size
    np.testing.assert_allclose(counts[4:], 1 / 9, atol=5 * 0.4 / found.size**0.5)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.25, 0.25, 0.25, 0.25]),
        ("linear", [1.0, 0.9, 0.5, 0.25]),
        ("exponential", [1.0, np.exp(-0.1), np.exp(-0.5), 0.25]),
        (
            "inverse_sigmoid",
            [100 / 101, *(100 / (100 + np.exp(t / 100)) for t in (10, 50)), 0.25],
        ),
    ],
)
def test_schedules(schedule, wanted):
    steps = [0, 10, 50, 100_000]
    found = [
        keep_share(schedule, jnp.int32(step), scale=100, floor=0.25) for step in steps
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_every_schedule_is_tested():
    marks = test_schedules.pytestmark[0].args[1]
    assert {schedule for schedule, _ in marks} == KEEP_SCHEDULES.keys()


@pytest.mark.parametrize("start", [0.5, 0.0])
def test_a_schedule_begins_at_its_start_and_ends_at_its_floor(start):
    found = [
        keep_share("linear", jnp.int32(step), scale=100, floor=0.2, start=start)
        for step in (0, 20, 90)
    ]
    np.testing.assert_allclose(found, [max(start, 0.2), max(0.8 * start, 0.2), 0.2])


# --- Glancing --------------------------------------------------------------------

MASK = 12
CANVAS = known_length(batch_of(), MASK)
LABELS, PLACES = np.asarray(CANVAS.labels), np.asarray(CANVAS.weights) > 0
WRONG = np.random.default_rng(4).random(PLACES.shape) < 0.6


def mistaken(wrong, right):
    """A model that is wrong where it is told to be, and at every place that is none."""
    wrong = wrong | ~PLACES
    return lambda inputs: jax.nn.one_hot(jnp.where(wrong, 4 + right % 7, right), SIZE)


@functools.partial(jax.jit, static_argnames="aligned")
def _glanced(keep, wrong, right, key, aligned):
    options = {"align": lambda logits: right} if aligned else {}
    predict = mistaken(wrong, right)
    return CORRUPTIONS["glancing"](CANVAS, predict, key, keep, Vocabulary, **options)


def glanced(keep, wrong=WRONG, key=KEY, right=None):
    aligned, right = right is not None, LABELS if right is None else right
    return _glanced(np.float32(keep), wrong, right, key, aligned=aligned)


@pytest.mark.parametrize("keep", [0.0, 0.25, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_share_of_the_wrong_places_is_shown(keep, aligned):
    # With an alignment the right answers are its own, not the labels.
    right = (LABELS * 3 + 1) % 7 + 4 if aligned else LABELS
    found = glanced(keep, right=right if aligned else None)
    shown = np.asarray(found.inputs) != MASK
    wanted = np.floor(np.float32(keep) * (WRONG & PLACES).sum(1))
    np.testing.assert_array_equal(shown.sum(1), wanted)
    assert not (shown & ~PLACES).any()
    np.testing.assert_array_equal(found.inputs, np.where(shown, right, MASK))
    np.testing.assert_array_equal(found.weights, PLACES & ~shown)
    np.testing.assert_array_equal(found.labels, LABELS)
    assert found.inputs.dtype == CANVAS.inputs.dtype


def test_with_all_wrong_and_all_kept_everything_is_shown():
    found = glanced(1.0, wrong=np.ones_like(PLACES))
    np.testing.assert_array_equal(found.inputs, np.where(PLACES, LABELS, CANVAS.inputs))
    assert not found.weights.any()


def test_where_nothing_is_wrong_nothing_is_shown():
    found = glanced(1.0, wrong=np.zeros_like(PLACES))
    np.testing.assert_array_equal(found.inputs, CANVAS.inputs)
    np.testing.assert_array_equal(found.weights, CANVAS.weights)


def test_right_places_are_shown_as_often_as_wrong_ones():
    wrong = np.zeros_like(PLACES)
    wrong[:, :2] = True
    keys = jax.random.split(KEY, 3000)
    found = jax.vmap(lambda key: glanced(1.0, wrong, key).inputs)(keys)
    shares = (np.asarray(found) != MASK).mean(0)
    counts = PLACES.sum(1, keepdims=True)
    wanted = np.where(PLACES, np.minimum(2, counts) / np.maximum(counts, 1), 0.0)
    assert (counts > 2).any()
    np.testing.assert_allclose(shares, wanted, atol=5 * 0.5 / len(keys) ** 0.5)


# --- Losses ----------------------------------------------------------------------

CONFIG = dataclasses.replace(TINY, dropout=0.3, attention_dropout=0.2)
MODEL = build_model(CONFIG)


@functools.cache
def model_of(objective):
    """A model and its parameters."""
    batch, model = batch_of(), build_model(CONFIG, objective)
    arguments = batch.source, batch.source_lengths, GIVEN.inputs
    return model, drawn(model, *arguments, seed=3)


@pytest.fixture(scope="module")
def params():
    return model_of("autoregressive")[1]


@functools.cache
def loss_of(objective="autoregressive", **settings):
    """Parameters, step -> loss and weight."""
    config = TrainConfig(**settings)
    model, _ = model_of(objective)
    row = OBJECTIVES[objective]
    options = {name: getattr(config, name) for name in row.options}

    def loss(params, step):
        corrupt = corruption_at(config, step)
        passes = Passes(model, {"params": params}, KEY)
        return row.loss(passes, batch_of(), Vocabulary, corrupt=corrupt, **options)

    return loss


@functools.cache
def loss_and_gradient(**settings):
    """Compiled: parameters, step -> loss and its gradient."""
    loss = loss_of(**settings)
    return jax.jit(jax.value_and_grad(lambda *arguments: loss(*arguments)[0]))


@pytest.mark.parametrize(
    "settings",
    [
        {"corruption": "scheduled_sampling"},
        {"corruption": "scheduled_sampling", "corruption_choice": "sample"},
        {"corruption": "random_replacement"},
    ],
)
def test_with_all_kept_the_loss_is_teacher_forcing_bit_for_bit(params, settings):
    plain, gradient = loss_and_gradient()(params, 0)
    corrupting = loss_and_gradient(**settings, keep_scale=60, keep_floor=0.0)
    # A linear schedule: at step 0 everything is kept, at step 30 a half.
    kept, kept_gradient = corrupting(params, jnp.int32(0))
    assert plain == kept
    for name, leaf in named(gradient).items():
        np.testing.assert_array_equal(named(kept_gradient)[name], leaf, err_msg=name)
    assert plain != corrupting(params, jnp.int32(30))[0]


@pytest.mark.parametrize("objective", ["parallel", "ctc"])
def test_glancing_at_nothing_is_the_plain_loss_bit_for_bit(objective):
    """With dropout. At step 0 all that is wrong is shown, at step 60 nothing."""
    settings = {"corruption": "glancing", "keep_scale": 60, "keep_floor": 0.0}
    _, params = model_of(objective)
    plain = jax.jit(loss_of(objective))(params, jnp.int32(0))
    glancing = jax.jit(loss_of(objective, **settings))
    assert glancing(params, jnp.int32(60)) == plain
    assert glancing(params, jnp.int32(0))[0] != plain[0]


def test_an_answer_depends_on_earlier_inputs_alone(params):
    batch = batch_of()

    def predict(read):
        arguments = (batch.source, batch.source_lengths, read)
        return MODEL.apply({"params": params}, *arguments)

    def inputs(given):
        found = corrupted("scheduled_sampling", 0.0, predict, given=given)
        return np.asarray(found.inputs)

    before = inputs(GIVEN)
    place, changed = 3, np.array(GIVEN.inputs)
    changed[:, place] = changed[:, place] % 9 + 4
    after = inputs(GIVEN._replace(inputs=changed))
    np.testing.assert_array_equal(before[:, : place + 1], after[:, : place + 1])
    assert (before[:, place + 1] != after[:, place + 1]).any()
