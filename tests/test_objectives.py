"""Objectives: what the decoder is fed, what counts, what is refused."""

import dataclasses
from types import SimpleNamespace

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
from transformer_jax.models import CANVASES
from transformer_jax.objectives import (
    OBJECTIVES,
    OPTIONS,
    check_nbest,
    resolved,
    teacher_forcing,
    validate,
)
from transformer_jax.objectives.passes import Passes
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
        Passes(SimpleNamespace(apply=apply), {"params": jnp.zeros(())}, None),
        *(BATCH, Vocabulary),
        label_smoothing=0.1,
    )
    assert weight == 4 + 2
    np.testing.assert_allclose(total, 6 * np.log(8), rtol=1e-6)


def test_a_key_turns_dropout_on():
    seen = []

    def apply(variables, *arguments, method, rngs):
        seen.append(tuple(jax.random.key_data(rngs["dropout"]).tolist()))
        return jnp.zeros((*arguments[-2].shape, 8))

    key = jax.random.key(0)
    model = SimpleNamespace(apply=apply)
    OBJECTIVES["autoregressive"].loss(
        Passes(model, {}, key), BATCH, Vocabulary, label_smoothing=0.0
    )
    assert len(set(seen)) == len(seen) == 2


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "objective", "magic", "one of autoregressive, .* not 'magic'"),
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


def config_of(objective, **sections):
    """A configuration; sections are dictionaries of settings."""
    sections = {"train": {}, **sections}
    sections["train"] = {"objective": objective} | sections["train"]
    parts = {
        name: dataclasses.replace(getattr(Config(), name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(Config(), **parts)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_can_be_trained_and_decoded_by_all_its_strategies(objective):
    validate(config_of(objective))
    automatic = resolved(config_of(objective)).decode.strategy
    assert automatic == OBJECTIVES[objective].strategies[0]
    for strategy in OBJECTIVES[objective].strategies:
        config = config_of(objective, decode={"strategy": strategy})
        validate(config)
        assert resolved(config) is config
    for strategy in STRATEGIES.keys() - OBJECTIVES[objective].strategies:
        message = f"{strategy!r} cannot decode .* {objective!r}: use {automatic}"
        with pytest.raises(ConfigError, match=message):
            validate(config_of(objective, decode={"strategy": strategy}))


PAIRINGS = [
    # Settings that the objective does not read.
    ("autoregressive", {"model": {"upsample": 2}}, "model.upsample does nothing .* 3$"),
    ("autoregressive", {"model": {"decoder_inputs": "mask"}}, "to 'uniform_copy'$"),
    ("autoregressive", {"train": {"length_weight": 0.5}}, "train.length_weight does"),
    ("ctc", {"train": {"fill_weight": 0.5}}, "train.fill_weight does nothing .*'ctc'"),
    ("ctc", {"train": {"label_smoothing": 0.0}}, "label_smoothing does .* it to 0.1$"),
    ("ctc", {"model": {"length_classes": 9}}, "model.length_classes does nothing"),
    ("overgenerate", {"model": {"length_from": "token"}}, "model.length_from does"),
    ("parallel", {"model": {"extra_slots": 2}}, "model.extra_slots does nothing"),
    ("mask_predict", {"train": {"fill_weight": 0.5}}, "train.fill_weight does nothing"),
    # Settings that the strategy does not read.
    ("parallel", {"decode": {"passes": 4}}, "decode.passes does nothing .* it to 10$"),
    (
        "mask_predict",
        {"decode": {"passes": 4, "strategy": "parallel"}},
        "use decode.strategy=mask_predict, or",
    ),
    ("parallel", {"decode": {"beam_size": 8}}, "decode.beam_size does nothing"),
    ("autoregressive", {"decode": {"length_beam": 3}}, "decode.length_beam does"),
    ("autoregressive", {"decode": {"rescorer": "x"}}, "decode.rescorer does nothing"),
    ("ctc", {"decode": {"min_length": 1}}, "decode.min_length does nothing .* to 0$"),
    ("ctc", {"decode": {"rescorer": "x"}}, "rescorer .* use .*=ctc_beam_search, or"),
    ("ctc", {"decode": {"length_beam": 2}}, "decode.length_beam does nothing"),
    ("ctc", {"model": {"pooling": "cls"}}, "pooling does nothing .* it to 'mean'$"),
    ("classification", {"model": {"decoder_layers": 2}}, "decoder_layers does nothing"),
    ("classification", {"decode": {"min_length": 1}}, "min_length does nothing with"),
    ("overgenerate", {"decode": {"min_length": 32}}, "min_length=32 and an end do not"),
    ("parallel", {"decode": {"min_length": 33}}, "min_length=33 does not fit in"),
    # Corruptions and references of other objectives.
    (
        "autoregressive",
        {"train": {"corruption": "glancing"}},
        "'glancing' is not for .*: use none or scheduled_sampling or random_replace",
    ),
    (
        "parallel",
        {"train": {"corruption": "scheduled_sampling"}},
        "is not for train.objective 'parallel': use none or glancing$",
    ),
    ("overgenerate", {"train": {"corruption": "glancing"}}, ": use none$"),
    ("mask_predict", {"train": {"corruption": "glancing"}}, ": use none$"),
    (
        "ctc",
        {"train": {"corruption": "glancing", "corruption_choice": "sample"}},
        "train.corruption_choice does nothing with train.corruption 'glancing'",
    ),
    ("ctc", {"train": {"keep_start": 0.5}}, "train.keep_start does nothing"),
    (
        "ctc",
        {"train": {"corruption": "glancing", "keep_start": 0.3}},
        "keep_start=0.3 lies below train.keep_floor=0.5, .*: lower the floor, or",
    ),
    (
        "parallel",
        {"data": {"references": "all"}},
        "'all' is not for .*'parallel': use each, or train autoregressive or ctc$",
    ),
    ("overgenerate", {"data": {"references": "all"}}, "'all' is not for"),
    ("ctc", {"data": {"keep_raw": True}}, "keep_raw does nothing without data.dist"),
    # Places that nothing tells apart, and patterns of another direction.
    (
        "parallel",
        {"model": {"decoder_inputs": "mask", "positions": "rotary"}},
        "positions=rotary leaves the empty places of .*=mask all alike: use sinusoid",
    ),
    (
        "ctc",
        {"model": {"decoder_inputs": "uniform_copy", "positions": "none"}},
        "positions=none leaves the empty places of .*=uniform_copy all alike",
    ),
    (
        "parallel",
        {"model": {"decoder_inputs": "soft_copy", "positions": "none"}},
        "positions=none leaves the last empty places of .*=soft_copy all alike: use "
        "sinusoidal, learned, one_hot positions$",
    ),
    (
        "ctc",
        {"model": {"upsample": 10**9}},
        "its canvas .*, more than 65536: lower model.upsample",
    ),
    (
        "overgenerate",
        {"model": {"extra_slots": 10**9}},
        "its canvas 1000000096, more than",
    ),
    (
        "ctc",
        {"model": {"decoder_attention": "causal() & local(3)"}},
        r"decoder_attention 'causal\(\) & local\(3\)' is causal, but the decoder of .*"
        r"'ctc' reads both sides of a place: use one that reaches ahead",
    ),
    ("parallel", {"model": {"decoder_attention": "full(); local(2, 0)"}}, "is causal"),
    # A canvas that no machine holds.
    (
        "ctc",
        {"model": {"upsample": 10**6}},
        "source has 32 places and its canvas 32000000, .*: lower model.upsample",
    ),
    (
        "parallel",
        {"data": {"bucket_lengths": (2**17,), "tokens_per_batch": 2**17}},
        "source has 131072 places .* or decode.max_source_length$",
    ),
    # The canvas, not the buckets, is the longest target.
    (
        "ctc",
        {"model": {"positions": "learned", "max_positions": 95}},
        "the canvas of model.upsample and model.extra_slots goes to 96, .*=95: raise",
    ),
    (
        "overgenerate",
        {"model": {"cross_attention": "local(60)"}},
        r"cross_attention 'local\(60\)' leaves place 92 nothing to attend",
    ),
]


@pytest.mark.parametrize(("objective", "sections", "message"), PAIRINGS)
def test_pairings_that_cannot_work_are_refused_in_one_line(
    objective, sections, message
):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config_of(objective, **sections))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "sections"),
    [
        ("ctc", {"train": {"corruption": "glancing"}, "data": {"references": "all"}}),
        ("autoregressive", {"data": {"references": "all"}}),
        ("parallel", {"model": {"decoder_inputs": "soft_copy", "positions": "rotary"}}),
        ("parallel", {"model": {"positions": "rotary"}}),
        ("mask_predict", {"model": {"decoder_inputs": "mask"}}),
        ("overgenerate", {"model": {"decoder_attention": "local(2, 1)"}}),
        ("ctc", {"model": {"positions": "learned", "max_positions": 96}}),
        # A causal decoder may say so, and a bidirectional encoder be causal.
        ("autoregressive", {"model": {"decoder_attention": "causal() & local(3)"}}),
        ("parallel", {"model": {"encoder_attention": "causal()"}}),
        (
            "ctc",
            {"decode": {"strategy": "ctc_beam_search", "rescorer": "x"}},
        ),
        (
            "mask_predict",
            {"decode": {"strategy": "parallel", "length_beam": 3, "min_length": 1}},
        ),
        ("parallel", {"data": {"keep_raw": True, "distilled": "x"}}),
        # All places are symbols.
        ("parallel", {"decode": {"min_length": 32}}),
        (
            "parallel",
            {"train": {"corruption": "glancing", "keep_start": 0.5}},
        ),
    ],
)
def test_their_neighbours_are_allowed(objective, sections):
    config = config_of(objective, **sections)
    assert validate(config) is None


# Strategy -> settings, most hypotheses (None for any number), what is said of more.
NBEST = {
    "greedy": ({}, 1, "use beam_search or sample"),
    "sample": ({}, None, ""),
    "beam_search": ({"beam_size": 3}, 3, "more than decode.beam_size=3: raise"),
    "parallel": ({"length_beam": 3}, 3, "more than decode.length_beam=3: raise"),
    "overgenerate": ({"length_beam": 5}, 5, "more than decode.length_beam=5: raise"),
    "mask_predict": ({"length_beam": 2}, 2, "more than decode.length_beam=2: raise"),
    "ctc_greedy": ({}, 1, "'ctc_greedy' has one: use ctc_beam_search"),
    "ctc_beam_search": ({"beam_size": 7}, 7, "more than decode.beam_size=7: raise"),
    "classify": ({}, None, ""),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_gives_more_hypotheses_than_it_has(strategy):
    settings, most, message = NBEST[strategy]
    config = DecodeConfig(strategy=strategy, **settings)
    check_nbest(config, most or 99)
    if most is not None:
        with pytest.raises(ConfigError, match=f"^--nbest={most + 1} .*{message}"):
            check_nbest(config, most + 1)


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
    used = {name for row in OBJECTIVES.values() for name in row.corruptions}
    assert used == {*CORRUPTIONS}
    for record, field in ((TrainConfig, "options"), (ModelConfig, "shape")):
        names = {name for row in OBJECTIVES.values() for name in getattr(row, field)}
        assert names < {item.name for item in dataclasses.fields(record)}
    assert choices(TrainConfig, "keep_schedule") == {*KEEP_SCHEDULES}
    assert choices(DecodeConfig, "penalty") == {*PENALTIES}
    decoded = {name for row in OBJECTIVES.values() for name in row.strategies}
    assert decoded == {*STRATEGIES} == {*OPTIONS}
    assert {"autoregressive", "classification", *CANVASES} == {*OBJECTIVES}
    fields = {item.name for item in dataclasses.fields(DecodeConfig)}
    assert {name for names in OPTIONS.values() for name in names} < fields
