"""The configuration refuses what cannot work, and survives JSON."""

import dataclasses
import json

import pytest

from transformer_jax import config as c


def test_defaults_survive_config_dict_and_json():
    settings = c.default_config()
    assert c.from_config_dict(settings) == c.Config()
    assert c.from_config_dict(json.loads(settings.to_json())) == c.Config()


def test_overrides_arrive():
    settings = c.default_config()
    settings.model.width = 64
    settings.data.bucket_lengths = (4, 9)
    made = c.from_config_dict(settings)
    assert (made.model.width, made.data.bucket_lengths) == (64, (4, 9))


def test_a_misspelt_field_of_a_config_file_is_refused():
    with pytest.raises(AttributeError, match="Did you mean"):
        c.default_config().model.widht = 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": {}}, "unknown section 'modle': the sections are model, data"),
        ({"model": {"widht": 3}}, "unknown field model.widht"),
        ({"model": {"width": 3.5}}, "model.width must be int, not float 3.5"),
        ({"model": {"width": True}}, "model.width must be int, not bool True"),
        ({"model": {"dropout": 1.5}}, "model.dropout must be between 0.0 and 0.99"),
        ({"model": {"norm": "batch"}}, "must be one of layer, rms, not 'batch'"),
        ({"model": {"heads": 3}}, "width 256 is no multiple of model.heads 3"),
        ({"model": {"kv_heads": 3}}, "no multiple of model.kv_heads 3"),
        ({"model": {"width": 9, "heads": 3}}, "model.width 9 is odd"),
        (
            {"model": {"positions": "rotary", "width": 12}},
            "head width .* is 3: make it even",
        ),
        ({"model": {"positions": "rotary", "head_width": 7}}, "is 7: make it even"),
        ({"model": {"positions": "learnt"}}, "one of sinusoidal, learned, one_hot, ro"),
        ({"train": {"steps": 0}}, "train.steps must be at least 1, not 0"),
        ({"train": {"learning_rate": float("nan")}}, "must be finite"),
        ({"data": {"bucket_lengths": [9, 4]}}, "must be rising integers"),
        ({"data": {"bucket_lengths": [4, "a"]}}, "must be rising integers"),
        ({"decode": {"max_length": 10**9}}, "decode.max_length must be between 1"),
        ({"model": {"length_classes": 10**9}}, "length_classes must be between 2 and"),
        ({"train": {"seed": 2**32}}, "train.seed must be between 0 and"),
        ({"data": {"bucket_lengths": []}}, "must be rising integers"),
        ({"data": {"bucket_lengths": [4, 5000]}}, "must lie between 2 and"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(c.ConfigError, match=message):
        c.from_config_dict(settings)


def test_a_whole_number_will_do_for_a_float():
    assert c.from_config_dict({"train": {"clip": 1}}).train.clip == 1


@pytest.mark.parametrize("section", c.SECTIONS)
def test_sections_are_frozen_and_hashable(section):
    made = c.SECTIONS[section]()
    assert hash(made) == hash(c.SECTIONS[section]())
    field = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field, None)
