"""Every file in configs/ describes a run that can work, and says what to expect."""

import importlib.util
from pathlib import Path

import pytest

from transformer_jax.config import from_config_dict
from transformer_jax.objectives import OBJECTIVES, resolved, validate

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variants(module):
    return getattr(module, "VARIANTS", ("",))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_variant_can_work(path):
    module = load(path)
    for variant in variants(module):
        config = from_config_dict(module.get_config(*filter(None, [variant])).to_dict())
        validate(config)
        strategies = OBJECTIVES[config.train.objective].strategies
        assert resolved(config).decode.strategy in strategies
        assert variant in module.__doc__
    if hasattr(module, "VARIANTS"):
        with pytest.raises(ValueError, match="has no variant 'magic'"):
            module.get_config("magic")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_docstring_says_what_to_expect(path):
    text = load(path).__doc__
    for word in ("Hardware:", "Expected", "Command:", "transformer-jax"):
        assert word in text or (word == "transformer-jax" and "local.sh" in text)


def test_every_objective_has_a_config():
    trained = {
        module.get_config(*filter(None, [variant])).train.objective
        for module in map(load, FILES)
        for variant in variants(module)
    }
    assert trained == set(OBJECTIVES)
