"""Attention that cannot do its part in a model is refused before data is read."""

import dataclasses

import pytest

from transformer_jax.config import Config, ConfigError, ModelConfig
from transformer_jax.objectives import validate


def config_of(objective, model):
    train = dataclasses.replace(Config().train, objective=objective)
    return Config(model=ModelConfig(**model), train=train)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        (
            "encoder_attention",
            "lokal(3)",
            r"encoder_attention: .*column 1.*local",
        ),
        ("cross_attention", "per_head((full(),))", "one of 1 heads, but there are 4"),
        (
            "encoder_attention",
            "full();" * 9 + "full()",
            "10 kinds of attention, but .*layers is",
        ),
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


ATTENTION_PAIRINGS = [
    # objective, settings of the model, message
    (
        "autoregressive",
        {"decoder_attention": "linformer(rank=4)"},
        r"decoder_attention 'linformer\(rank=4\)' lacks 'causal', .*not look ahead: "
        "use a pattern or linear or favor or compressed or lsh or routing$",
    ),
    (
        "autoregressive",
        {"decoder_attention": "synthesizer()"},
        "lacks 'decode', .*writes place after place: use a pattern or linear or favor",
    ),
    (
        "autoregressive",
        {"cross_attention": "lsh()"},
        r"'lsh\(\)' lacks 'cross', .*two sequences: use a pattern or linear or favor",
    ),
    (
        "ctc",
        {"cross_attention": "sinkhorn()"},
        "compares two sequences: use a pattern or linear .* or routing or synthesizer$",
    ),
    (
        "autoregressive",
        {"cross_attention": "routing(clusters=2)"},
        "lacks 'memory', .*projected once: use .* linear or favor or linformer or com",
    ),
    (
        "autoregressive",
        {"encoder_attention": "linear()", "attention_dropout": 0.1},
        "lacks 'dropout', but model.attention_dropout drops weights: use a pattern$",
    ),
    (
        "autoregressive",
        {"encoder_attention": "full(); favor(features=8)", "positions": "alibi"},
        r"encoder_attention 'favor\(features=8\)' .*=alibi is a bias of the scores: us",
    ),
    (
        "autoregressive",
        {"encoder_attention": "lsh(buckets=4)", "extra_global_tokens": 1},
        "extra_global_tokens are attended apart: use a pattern$",
    ),
    (
        "parallel",
        {"encoder_attention": "linear()", "length_from": "token"},
        "length_from=token is attended apart: use a pattern$",
    ),
    (
        "autoregressive",
        {"encoder_attention": "linformer(rank=4)", "max_positions": 31},
        "max_positions=31, but they go to 32: raise model.max_positions, or lower",
    ),
    (
        "autoregressive",
        {"cross_attention": "linformer(rank=4)", "max_positions": 31},
        "cross_attention .* is for sequences of up to model.max_positions=31, but",
    ),
    (
        "classification",
        {"encoder_attention": "sinkhorn()", "max_positions": 32, "pooling": "cls"},
        "max_positions=32, but they go to 33: raise",
    ),
    (
        "autoregressive",
        {"encoder_attention": "lsh(buckets=5)"},
        "buckets must be a multiple of 2",
    ),
    (
        "autoregressive",
        {"encoder_attention": "linear(rank=3)"},
        "no option 'rank', but feature_map",
    ),
]


@pytest.mark.parametrize(("objective", "model", "message"), ATTENTION_PAIRINGS)
def test_attention_that_cannot_do_its_part_is_refused(objective, model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config_of(objective, model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "model"),
    [
        (
            "autoregressive",
            {
                "encoder_attention": "sinkhorn(); synthesizer()",
                "decoder_attention": "routing(clusters=4); lsh()",
                "cross_attention": "linformer(rank=4, share=layer); favor(features=8)",
            },
        ),
        # All places at once: neither causal nor place after place.
        (
            "ctc",
            {
                "decoder_attention": "linformer(rank=4); sinkhorn(block_size=4)",
                "cross_attention": "routing(clusters=2); synthesizer()",
            },
        ),
        # The shortest array that holds the longest sequence.
        ("autoregressive", {"encoder_attention": "sinkhorn()", "max_positions": 32}),
        ("ctc", {"cross_attention": "linformer(rank=4)", "max_positions": 32}),
        ("classification", {"encoder_attention": "linear()", "pooling": "cls"}),
    ],
)
def test_attention_that_can_do_its_part_is_accepted(objective, model):
    assert validate(config_of(objective, model)) is None
