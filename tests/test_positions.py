"""Positions: values by hand, slow oracles, and the properties the papers claim."""

import math
from fractions import Fraction

import jax
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


def test_one_hot_are_unit_vectors_and_nan_beyond():
    encoded = positions.one_hot(jnp.array([[2, 0], [3, -1]]), 3)
    assert encoded.dtype == jnp.float32
    np.testing.assert_array_equal(encoded[0], [[0, 0, 1], [1, 0, 0]])
    assert np.isnan(encoded[1]).all()


def normal(*shape):
    draw = np.random.default_rng(sum(shape))
    return jnp.asarray(draw.normal(size=shape), jnp.float32)


class TestRotary:
    B, T, N, H = 2, 5, 3, 6

    def test_is_a_complex_rotation_of_adjacent_pairs(self):
        """Equation 34 in complex numbers: (x0 + i x1) e^(i p w), ..."""
        x, places = normal(self.B, self.T, self.N, self.H), np.array([7, 0, 2, 1, 40])
        pairs = np.asarray(x, np.float64)
        numbers = pairs[..., 0::2] + 1j * pairs[..., 1::2]
        turns = np.exp(1j * places[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6))
        wanted = numbers * turns[None, :, None]
        rotated = np.asarray(positions.rotary(x, jnp.asarray(places)))
        np.testing.assert_allclose(rotated[..., 0::2], wanted.real, atol=1e-5)
        np.testing.assert_allclose(rotated[..., 1::2], wanted.imag, atol=1e-5)

    def test_scores_depend_on_the_distance_alone(self):
        query, key = normal(1, 1, 1, self.H), normal(1, 1, 1, self.H)[..., ::-1]

        def score(i, j):
            turned = [
                positions.rotary(x, jnp.array([p])) for x, p in [(query, i), (key, j)]
            ]
            return float((turned[0] * turned[1]).sum())

        near = score(0, 3)
        for shift in (1, 19, 300):
            assert score(shift, 3 + shift) == pytest.approx(near, abs=1e-4)
        assert abs(score(0, 4) - near) > 0.01

    def test_norms_are_kept_and_rows_have_their_own_positions(self):
        x = normal(self.B, self.T, self.N, self.H)
        places = jnp.array([[0, 1, 2, 3, 4], [900, 7, 7, 0, 31]])
        rotated = positions.rotary(x, places)
        norms = [np.linalg.norm(np.asarray(y), axis=-1) for y in (x, rotated)]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        for row in range(self.B):
            alone = positions.rotary(x[row : row + 1], places[row])
            np.testing.assert_allclose(rotated[row], alone[0], atol=1e-6)

    def test_bfloat16_is_rotated_in_float32(self):
        x = normal(1, 2, 1, 4).astype(jnp.bfloat16)
        places = jnp.array([3, 30000])
        rotated = positions.rotary(x, places)
        assert rotated.dtype == jnp.bfloat16
        exact = positions.rotary(x.astype(jnp.float32), places)
        np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


class TestAlibi:
    def test_slopes_of_the_paper(self):
        """Section 3: 8 heads 1/2 ... 1/256, 16 heads their geometric means as well."""
        eight = [2.0**-k for k in range(1, 9)]
        sixteen = [2.0 ** (-k / 2) for k in range(1, 17)]
        np.testing.assert_allclose(positions.alibi_slopes(8), eight)
        np.testing.assert_allclose(positions.alibi_slopes(16), sixteen, rtol=1e-6)
        np.testing.assert_allclose(positions.alibi_slopes(1), [2.0**-8])
        # No power of two: those of 8, then every other one of 16.
        twelve = eight + sixteen[0:8:2]
        np.testing.assert_allclose(positions.alibi_slopes(12), twelve, rtol=1e-6)

    def test_bias_falls_with_the_distance(self):
        i, j = jnp.array([[5], [6]]), jnp.array([[4, 5, 8]])
        slopes, ahead = jnp.array([0.5, 0.25]), jnp.array([2.0, 3.0])
        falls = np.array([[1, 0, 3], [2, 1, 2]])
        wanted = [-falls / 2, -falls / 4]
        np.testing.assert_array_equal(positions.Alibi(slopes)(i, j), wanted)
        later = np.array([[0, 0, 1], [0, 0, 1]], bool)
        wanted = [np.where(later, -falls * 2, wanted[0]), wanted[1]]
        wanted[1] = np.where(later, -falls * 3, wanted[1])
        np.testing.assert_array_equal(positions.Alibi(slopes, ahead)(i, j), wanted)

    def test_slopes_between_those_of_the_heads_tell_the_directions_apart(self):
        for heads in range(1, 20):
            slopes, between = map(positions.alibi_slopes, (heads, 2 * heads))
            assert (np.asarray(between)[::2] != np.asarray(slopes)).all()


def slow_bucket(relative, buckets, max_distance, bidirectional):
    """The published rule, distance by distance; logarithms compared as fractions."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if relative > 0 else 0
        n = abs(relative)
    else:
        n = max(-relative, 0)
    exact = buckets // 2
    if n < exact:
        return offset + n
    share, span = buckets - exact, Fraction(max_distance, exact)
    # The greatest k with k <= share log(n / exact) / log(span).
    k = 0
    while k + 1 < share and Fraction(n, exact) ** share >= span ** (k + 1):
        k += 1
    return offset + exact + k


class TestT5:
    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize(("buckets", "far"), [(32, 128), (4, 3), (14, 50)])
    def test_buckets_equal_the_slow_rule(self, buckets, far, bidirectional):
        relative = np.arange(-2 * far - 9, 2 * far + 10, dtype=np.int32)
        arguments = (buckets, far, bidirectional)
        got = positions.t5_bucket(
            relative, buckets=buckets, max_distance=far, bidirectional=bidirectional
        )
        wanted = [slow_bucket(int(r), *arguments) for r in relative]
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, wanted)
        every = set(range(buckets))
        # Nothing at distance 0 comes after the query.
        assert set(wanted) == (every - {buckets // 2} if bidirectional else every)

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_the_rule_is_the_logarithm_of_the_paper(self, bidirectional):
        """In floating point, away from where it rounds."""
        relative = np.arange(-300, 301, dtype=np.int32)
        half = 16 if bidirectional else 32
        n = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
        exact = half // 2
        steps = np.log(np.maximum(n, 1) / exact) / np.log(128 / exact) * (half - exact)
        wide = np.minimum(exact + np.floor(steps), half - 1)
        wanted = np.where(n < exact, n, wide) + half * (relative > 0) * bidirectional
        clear = np.abs(steps - np.round(steps)) > 1e-6
        got = positions.t5_bucket(
            relative, buckets=32, max_distance=128, bidirectional=bidirectional
        )
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(np.asarray(got)[clear], wanted[clear])

    def test_gradients_count_the_pairs_of_each_bucket(self):
        table, T, S = normal(8, 3), 4, 5
        i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
        weights = normal(3, T, S)

        def total(table):
            bias = positions.T5Bias(table, bidirectional=True, max_distance=3)
            return (bias(i, j) * weights).sum(), bias(i, j)

        gradient, tile = jax.grad(total, has_aux=True)(table)
        wanted = np.zeros((8, 3))
        for t in range(T):
            for s in range(S):
                bucket = slow_bucket(s - t, 8, 3, True)
                np.testing.assert_array_equal(tile[:, t, s], table[bucket])
                wanted[bucket] += weights[:, t, s]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


BIASES = [
    positions.Alibi(positions.alibi_slopes(3), jnp.arange(3.0)),
    positions.T5Bias(normal(32, 3), bidirectional=False),
]


@pytest.mark.parametrize("bias", BIASES, ids=["alibi", "t5"])
def test_biases_are_pytrees_and_a_tile_is_a_piece_of_the_whole(bias):
    i, j = jnp.arange(150)[:, None], jnp.arange(170)[None]
    again = jax.tree.unflatten(jax.tree.structure(bias), jax.tree.leaves(bias))
    whole = again(i, j)
    assert whole.shape == (3, 150, 170)
    np.testing.assert_array_equal(bias(i[140:], j[:, 3:20]), whole[:, 140:, 3:20])


def bucket(**settings):
    settings = {"buckets": 8, "max_distance": 9, "bidirectional": True} | settings
    return positions.t5_bucket(jnp.arange(3), **settings)


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
        (lambda: positions.one_hot(jnp.ones(3), 4), TypeError, "not float32"),
        (
            lambda: positions.rotary(normal(1, 2, 1, 5), jnp.arange(2)),
            ValueError,
            "even.*5",
        ),
        (
            lambda: positions.rotary(normal(1, 2, 1, 4), jnp.arange(3)),
            ValueError,
            r"of x \(1, 2, 1, 4\), not \(3,\)",
        ),
        (lambda: positions.alibi_slopes(0), ValueError, "one head, not 0"),
        (lambda: bucket(buckets=7), ValueError, "even number from 4 on, not 7"),
        (lambda: bucket(buckets=2), ValueError, "even number from 4 on, not 2"),
        (
            lambda: bucket(buckets=1, bidirectional=False),
            ValueError,
            "at least 2, not 1",
        ),
        (lambda: bucket(max_distance=2), ValueError, "the 2 exact distances, not 2"),
    ],
)
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
