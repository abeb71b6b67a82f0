"""The mean of checkpoints: exact enough, in any order, two sets in memory at most."""

import itertools
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from trees import bits, named

from transformer_jax.averaging import mean_params


def params_of(step):
    draw = np.random.default_rng(step)
    return {
        "layer": {"kernel": np.float32(draw.normal(size=(5, 3)))},
        "scale": jnp.asarray(draw.normal(size=7), jnp.bfloat16),
    }


def test_mean_is_that_of_numpy_in_any_order():
    steps = (2, 3, 5, 7)
    expected = {
        name: np.mean([np.float64(named(params_of(s))[name]) for s in steps], axis=0)
        for name in named(params_of(2))
    }
    for order in itertools.islice(itertools.permutations(steps), 0, None, 5):
        found = named(mean_params(order, params_of))
        assert {name: str(leaf.dtype) for name, leaf in found.items()} == {
            "layer/kernel": "float32",
            "scale": "bfloat16",
        }
        for name, tolerance in (("layer/kernel", 2**-23), ("scale", 2**-8)):
            np.testing.assert_allclose(
                np.float64(found[name]), expected[name], rtol=tolerance
            )


def test_small_parameters_survive_large_ones():
    values = [1e8, 1.0, -1e8]
    found = mean_params(range(3), lambda step: {"x": np.float32(values[step])})
    assert found["x"] == np.float32(1 / 3)


@pytest.mark.parametrize("step", [2, 3])
def test_mean_of_one_is_that_one(step):
    found = mean_params([step], params_of)
    assert [*map(bits, named(found).values())] == [
        *map(bits, named(params_of(step)).values())
    ]


def test_what_is_read_is_let_go_before_the_next():
    alive = []

    def read(step):
        assert not any(reference() is not None for reference in alive)
        array = np.full(11, step, np.float32)
        alive.append(weakref.ref(array))
        return {"x": array}

    np.testing.assert_array_equal(mean_params([2, 4, 9], read)["x"], np.full(11, 5))
    assert len(alive) == 3
