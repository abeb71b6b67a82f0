"""Wrong inputs: which, how many, by what schedule, and none where all are kept."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY
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
from transformer_jax.objectives import autoregressive, teacher_forcing
from transformer_jax.types import Batch

KEY = jax.random.key(5)
SIZE = 13


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


def parrot(inputs):
    """A model whose best answer at t is a function of its input at t."""
    return jax.nn.one_hot(4 + inputs * 3 % 9, SIZE) * 50.0


def corrupted(name, keep, predict=parrot, key=KEY, **options) -> DecoderInputs:
    return CORRUPTIONS[name](
        GIVEN, predict, key, jnp.float32(keep), Vocabulary, **options
    )


@pytest.mark.parametrize("name", CORRUPTIONS)
class TestEveryCorruption:
    def test_labels_and_weights_stay(self, name):
        found = corrupted(name, 0.3)
        assert found.labels is GIVEN.labels
        assert found.weights is GIVEN.weights

    def test_all_kept_is_the_right_input(self, name):
        np.testing.assert_array_equal(corrupted(name, 1.0).inputs, GIVEN.inputs)

    def test_the_first_input_stays_and_no_special_symbol_comes_in(self, name):
        def likes_specials(inputs):
            return parrot(inputs).at[..., :4].set(99.0)

        found = corrupted(name, 0.0, predict=likes_specials).inputs
        np.testing.assert_array_equal(found[:, 0], GIVEN.inputs[:, 0])
        assert (found[:, 1:] >= 4).all()
        assert (found < SIZE).all()
        assert found.dtype == GIVEN.inputs.dtype

    def test_the_share_is_kept(self, name):
        wide = jax.tree.map(lambda x: jnp.tile(x, (60, 20)), GIVEN)
        # Answers that never are the input, so that every replacement shows.
        other = DecoderInputs(jnp.full_like(wide.inputs, 12), *wide[1:])
        found = CORRUPTIONS[name](
            other, lambda i: parrot(i * 0), KEY, jnp.float32(0.7), Vocabulary
        )
        same = np.asarray(found.inputs == 12)[:, 1:]
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
    answers = 4 + GIVEN.inputs * 3 % 9
    np.testing.assert_array_equal(found[:, 1:], answers[:, :-1])


def test_answers_are_drawn_as_often_as_the_model_says():
    shares = np.zeros(SIZE)
    shares[[5, 8, 9]] = 0.6, 0.3, 0.1
    wide = jax.tree.map(lambda x: jnp.tile(x, (60, 20)), GIVEN)

    def predict(inputs):
        return jnp.broadcast_to(jnp.log(shares), (*inputs.shape, SIZE))

    found = CORRUPTIONS["scheduled_sampling"](
        wide, predict, KEY, jnp.float32(0.0), Vocabulary, choice="sample"
    ).inputs[:, 1:]
    counts = np.bincount(np.asarray(found).ravel(), minlength=SIZE) / found.size
    np.testing.assert_allclose(counts, shares, atol=5 * 0.5 / found.size**0.5)


def test_random_replacements_are_uniform():
    wide = jax.tree.map(lambda x: jnp.tile(x, (60, 20)), GIVEN)
    found = CORRUPTIONS["random_replacement"](
        wide, None, KEY, jnp.float32(0.0), Vocabulary
    ).inputs[:, 1:]
    counts = np.bincount(np.asarray(found).ravel(), minlength=SIZE) / found.size
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


MODEL = build_model(dataclasses.replace(TINY, dropout=0.3, attention_dropout=0.2))


@pytest.fixture(scope="module")
def params():
    batch = batch_of()
    return nn.unbox(
        MODEL.init(KEY, batch.source, batch.source_lengths, GIVEN.inputs)["params"]
    )


@functools.cache
def loss_and_gradient(**settings):
    """Compiled: (parameters, step) -> loss and its gradient."""
    config = TrainConfig(**settings)

    def loss(params, step):
        return autoregressive(
            MODEL.apply,
            params,
            batch_of(),
            Vocabulary,
            key=KEY,
            label_smoothing=0.1,
            corrupt=corruption_at(config, step),
        )[0]

    return jax.jit(jax.value_and_grad(loss))


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


def test_an_answer_depends_on_earlier_inputs_alone(params):
    batch = batch_of()

    def inputs(given):
        def predict(read):
            arguments = (batch.source, batch.source_lengths, read)
            return MODEL.apply({"params": params}, *arguments)

        return CORRUPTIONS["scheduled_sampling"](
            given, predict, KEY, jnp.float32(0.0), Vocabulary
        ).inputs

    before = inputs(GIVEN)
    place = 3
    changed = GIVEN.inputs.at[:, place].set(GIVEN.inputs[:, place] % 9 + 4)
    after = inputs(GIVEN._replace(inputs=changed))
    np.testing.assert_array_equal(before[:, : place + 1], after[:, : place + 1])
    assert (before[:, place + 1] != after[:, place + 1]).any()
