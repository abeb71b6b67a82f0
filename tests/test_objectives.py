"""Objectives: what the decoder is fed, what counts, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import (
    Config,
    ConfigError,
    DecodeConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_jax.corruption import CORRUPTIONS, KEEP_SCHEDULES
from transformer_jax.decoding import STRATEGIES
from transformer_jax.decoding.beam import PENALTIES
from transformer_jax.objectives import OBJECTIVES, OPTIONS, teacher_forcing, validate
from transformer_jax.types import Batch


class Vocabulary:
    pad_id, bos_id, end_id = 0, 1, 2


BATCH = Batch(
    source=jnp.ones((3, 2), jnp.int32),
    source_lengths=jnp.array([2, 1, 0]),
    target=jnp.array([[5, 6, 7, 0], [5, 0, 0, 0], [0, 0, 0, 0]]),
    target_lengths=jnp.array([3, 1, 0]),
    weight=jnp.array([1.0, 1.0, 0.0]),
    index=jnp.array([4, 9, -1]),
)


def test_teacher_forcing_is_the_target_one_place_late():
    inputs, labels, weights = teacher_forcing(BATCH, Vocabulary)
    assert inputs.tolist() == [[1, 5, 6, 7], [1, 5, 0, 0], [1, 0, 0, 0]]
    assert labels[:2].tolist() == [[5, 6, 7, 2], [5, 2, 0, 0]]
    assert weights.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_an_empty_target_still_ends():
    empty = BATCH._replace(target_lengths=jnp.zeros(3, int), weight=jnp.ones(3))
    _, labels, weights = teacher_forcing(empty, Vocabulary)
    assert labels[:, 0].tolist() == [2, 2, 2]
    assert weights.sum() == 3


def test_autoregressive_counts_every_token_and_end_once():
    def apply(variables, *arguments, method, rngs):
        assert not rngs
        if method == "encode":
            return jnp.zeros(())
        return jnp.zeros((*arguments[2].shape, 8)) + variables["params"]

    total, weight = OBJECTIVES["autoregressive"].loss(
        apply, jnp.zeros(()), BATCH, Vocabulary, key=None, label_smoothing=0.1
    )
    assert weight == 4 + 2
    np.testing.assert_allclose(total, 6 * np.log(8), rtol=1e-6)


def test_a_key_turns_dropout_on():
    seen = []

    def apply(variables, *arguments, method, rngs):
        seen.append(tuple(jax.random.key_data(rngs["dropout"]).tolist()))
        return jnp.zeros((*arguments[-1].shape, 8))

    key = jax.random.key(0)
    OBJECTIVES["autoregressive"].loss(
        apply, (), BATCH, Vocabulary, key=key, label_smoothing=0.0
    )
    assert len(set(seen)) == len(seen) == 2


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "objective", "magic", "must be one of autoregressive, not 'magic'"),
        ("decode", "strategy", "magic", "must be one of greedy, sample, beam_search"),
    ],
)
def test_impossible_pairings_are_refused(section, field, value, message):
    config = Config()
    part = dataclasses.replace(getattr(config, section), **{field: value})
    with pytest.raises(ConfigError, match=message):
        validate(dataclasses.replace(config, **{section: part}))
    validate(config)


@pytest.mark.parametrize("positions", ["learned", "one_hot"])
@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("data", "bucket_lengths", (8, 33)),
        ("decode", "max_length", 33),
        ("decode", "max_source_length", 33),
    ],
)
def test_sequences_beyond_the_position_table_are_refused(
    section, field, value, positions
):
    def config(positions, value):
        model = ModelConfig(positions=positions, max_positions=32)
        section_ = dataclasses.replace(getattr(Config(), section), **{field: value})
        return dataclasses.replace(Config(), model=model, **{section: section_})

    message = f"{section}.{field} goes to 33, .*={positions} .*max_positions=32: raise"
    with pytest.raises(ConfigError, match=message):
        validate(config(positions, value))
    validate(config("rotary", value))
    validate(config(positions, (8, 32) if section == "data" else 32))


def test_what_a_saved_setting_must_become_is_said():
    """A run that was configured for a beam can be decoded greedily."""
    decode = DecodeConfig(strategy="beam_search", beam_size=8)
    validate(Config(decode=decode))
    greedy = dataclasses.replace(decode, strategy="greedy")
    with pytest.raises(ConfigError, match=r"decode.beam_size does nothing .* to 4$"):
        validate(Config(decode=greedy))
    validate(Config(decode=dataclasses.replace(greedy, beam_size=4)))


def choices(record, name):
    (item,) = (item for item in dataclasses.fields(record) if item.name == name)
    return {*item.metadata["choices"]}


def test_settings_offer_what_the_tables_hold():
    assert choices(TrainConfig, "corruption") == {"none", *CORRUPTIONS}
    assert choices(TrainConfig, "keep_schedule") == {*KEEP_SCHEDULES}
    assert choices(DecodeConfig, "penalty") == {*PENALTIES}
    assert {*OBJECTIVES["autoregressive"].strategies} == {*STRATEGIES} == {*OPTIONS}
    fields = {item.name for item in dataclasses.fields(DecodeConfig)}
    assert {name for names in OPTIONS.values() for name in names} < fields


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        (
            "encoder_attention",
            "lokal(3)",
            r"encoder_attention: .*column 1.*local",
        ),
        ("cross_attention", "per_head((full(),))", "one of 1 heads, but there are 4"),
        ("encoder_attention", "full();" * 9 + "full()", "10 patterns, but .*layers is"),
        ("encoder_attention", "full(); ~full()", "'~full()' leaves place 0 nothing"),
        ("decoder_attention", "~local(0)", "leaves place 0 nothing to attend"),
        ("decoder_attention", "local(-1)", "left must be at least 0, not -1"),
        ("cross_attention", "local(20)", "leaves place 52 nothing to attend"),
    ],
)
def test_patterns_that_nothing_can_use_are_refused(field, text, message):
    def config(text):
        model = ModelConfig(**{field: text})
        decode = dataclasses.replace(Config().decode, max_length=64)
        return Config(model=model, decode=decode)

    with pytest.raises(ConfigError, match=message.replace("()'", r"\(\)'")) as caught:
        validate(config(text))
    assert "\n" not in str(caught.value)
    validate(config("local(40) | per_head((local(0), full(), full(), full()))"))
