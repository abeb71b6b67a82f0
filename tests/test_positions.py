"""Sinusoidal positions: values by hand and the properties the paper claims."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import positions

pytestmark = pytest.mark.usefixtures("strict")


def test_values_by_hand():
    """Width 4: frequencies 1 and 1 / 100; sine first, then cosine."""
    encoded = positions.sinusoidal(jnp.array([[0, 1], [50, 3]]), 4)
    wanted = [
        [[0, 1, 0, 1], [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]],
        [
            [math.sin(50), math.cos(50), math.sin(0.5), math.cos(0.5)],
            [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)],
        ],
    ]
    assert encoded.dtype == jnp.float32
    np.testing.assert_allclose(encoded, wanted, atol=2e-6)


def test_max_wavelength_sets_the_frequencies():
    encoded = positions.sinusoidal(7, 4, max_wavelength=49.0)
    wanted = [math.sin(7), math.cos(7), math.sin(1), math.cos(1)]
    np.testing.assert_allclose(encoded, wanted, atol=2e-6)


def test_shift_is_a_rotation_of_each_pair():
    """One linear map for all positions takes p to p + 5 (section 3.5)."""
    width, shift = 22, 5
    angles = shift / 10000 ** (np.arange(0, width, 2) / width)
    rotation = np.zeros((width, width))
    for pair, angle in enumerate(angles):
        turn = [
            [math.cos(angle), math.sin(angle)],
            [-math.sin(angle), math.cos(angle)],
        ]
        rotation[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = turn
    encoded = np.asarray(positions.sinusoidal(np.arange(40), width), np.float64)
    np.testing.assert_allclose(
        encoded[:-shift] @ rotation.T, encoded[shift:], atol=2e-5
    )


def test_norm_is_root_of_half_the_width():
    encoded = positions.sinusoidal(np.arange(0, 9000, 301), 26)
    norms = np.linalg.norm(np.asarray(encoded), axis=-1)
    np.testing.assert_allclose(norms, math.sqrt(13), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: positions.sinusoidal(jnp.ones(3), 4), TypeError, "not float32"),
        (lambda: positions.sinusoidal(jnp.arange(3), 5), ValueError, "even.*5"),
        (lambda: positions.sinusoidal(jnp.arange(3), 0), ValueError, "positive"),
        (
            lambda: positions.sinusoidal(jnp.arange(3), 4, max_wavelength=-1.0),
            ValueError,
            "max_wavelength must be positive, not -1.0",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
