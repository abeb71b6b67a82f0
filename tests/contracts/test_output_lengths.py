"""Lengths that stand for classes, the best of them, and what a canvas copies."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding import length

pytestmark = pytest.mark.usefixtures("strict")

CLASSES = 7
SOURCES = np.array([1, 3, 11], np.int32)

# Compiled as wholes: operation by operation each shape is a program of its own.
best_lengths = jax.jit(
    length.best_lengths, static_argnames=("count", "shortest", "longest")
)
copy_places = jax.jit(length.copy_places, static_argnames="size")
soft_copy_weights = jax.jit(
    length.soft_copy_weights, static_argnames=("source_size", "size")
)
length_class, lengths_of_classes = (
    jax.jit(function, static_argnames=("classes", "offset"))
    for function in (length.length_class, length.lengths_of_classes)
)


@functools.cache
def told(*, offset):
    """The lengths of all classes of the sources."""
    return np.asarray(lengths_of_classes(SOURCES, classes=CLASSES, offset=offset))


@pytest.mark.parametrize("offset", [False, True])
class TestClasses:
    def test_a_class_stands_for_the_length_of_its_formula(self, offset):
        lengths = told(offset=offset)
        assert lengths.dtype == jnp.int32
        middle = [source - CLASSES // 2 if offset else 0 for source in (1, 3, 11)]
        wanted = [[start + c for c in range(CLASSES)] for start in middle]
        assert lengths.tolist() == wanted

    def test_class_and_length_are_inverse(self, offset):
        lengths = told(offset=offset)
        for c in range(CLASSES):
            assert self.class_of(lengths[:, c], offset) == [c] * 3

    def test_what_has_no_class_has_the_nearest(self, offset):
        lengths = told(offset=offset)
        for by in (1, 2, 50):
            assert self.class_of(lengths[:, -1] + by, offset) == [CLASSES - 1] * 3
            assert self.class_of(lengths[:, 0] - by, offset) == [0] * 3

    @staticmethod
    def class_of(lengths, offset):
        found = length_class(lengths, SOURCES, classes=CLASSES, offset=offset)
        assert found.dtype == jnp.int32
        return found.tolist()


def loop_lengths(logits, lengths, count, shortest, longest):
    """The best lengths of one row and their probabilities among what is legal."""
    legal = [
        (logit, length)
        for logit, length in zip(logits.tolist(), lengths.tolist(), strict=True)
        if shortest <= length <= longest and logit > -math.inf
    ]
    total = sum(math.exp(logit) for logit, _ in legal)
    legal.sort(key=lambda entry: -entry[0])
    found = [(length, logit - math.log(total)) for logit, length in legal]
    return (found + [(0, -math.inf)] * count)[:count]


class TestBestLengths:
    @pytest.mark.parametrize("count", [1, 3, 9])
    @pytest.mark.parametrize(
        ("shortest", "longest"), [(0, 99), (2, 5), (4, 4), (0, 1), (20, 30), (5, 4)]
    )
    def test_they_are_those_of_a_loop(self, count, shortest, longest):
        draw = np.random.default_rng(count)
        logits = draw.normal(size=(3, CLASSES)).astype(np.float32) * 3
        logits[1, [2, 4]] = -np.inf
        lengths = told(offset=True)
        bounds = {"shortest": shortest, "longest": longest}
        found, scores = best_lengths(jnp.asarray(logits), lengths, count, **bounds)
        assert found.dtype == jnp.int32
        assert scores.dtype == jnp.float32
        found, scores = jax.device_get((found, scores))
        for row in range(3):
            wanted = loop_lengths(logits[row], lengths[row], count, **bounds)
            assert found[row].tolist() == [length for length, _ in wanted]
            ours = [score for _, score in wanted]
            np.testing.assert_allclose(scores[row], ours, rtol=1e-5, atol=1e-6)
            real = [length for length, score in wanted if score > -math.inf]
            assert len({*real}) == len(real)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_row_that_is_not_finite_has_none(self, bad):
        logits = np.random.default_rng(1).normal(size=(3, CLASSES)).astype(np.float32)
        lengths = told(offset=False)
        bounds = {"shortest": 1, "longest": 5}
        sound = best_lengths(jnp.asarray(logits), lengths, 2, **bounds)
        # What lies outside of the bounds may be anything.
        logits[0, [0, 6]] = bad
        logits[1] = bad
        found = jax.device_get(best_lengths(jnp.asarray(logits), lengths, 2, **bounds))
        assert found[0][1].tolist() == [0, 0]
        assert found[1][1].tolist() == [-math.inf] * 2
        for mine, ours in zip(found, sound, strict=True):
            np.testing.assert_array_equal(mine[::2], np.asarray(ours)[::2])

    def test_bfloat16_is_read_in_float32(self):
        draw = np.random.default_rng(3).normal(size=(3, CLASSES)) * 3
        logits = jnp.asarray(draw, jnp.bfloat16)
        lengths = told(offset=True)
        found, wanted = (
            best_lengths(given, lengths, 3, shortest=2, longest=9)
            for given in (logits, logits.astype(jnp.float32))
        )
        for mine, ours in zip(found, wanted, strict=True):
            assert mine.dtype == ours.dtype
            np.testing.assert_array_equal(mine, ours)

    def test_none_cannot_be_asked_for(self):
        lengths = told(offset=False)
        logits = jnp.zeros(lengths.shape)
        with pytest.raises(ValueError, match=r"^count must be an integer"):
            best_lengths(logits, lengths, 0, shortest=0, longest=9)


def test_places_are_copied_evenly_with_halves_to_even():
    limit, size = 12, 15
    pairs = [(S, T) for S in range(1, limit + 1) for T in range(limit + 1)]
    sources, targets = (jnp.array(side, jnp.int32) for side in zip(*pairs, strict=True))
    found = copy_places(sources, targets, size)
    assert found.dtype == jnp.int32
    halves = 0
    for (S, T), mine in zip(pairs, found.tolist(), strict=True):
        exact = [Fraction(S - 1, T - 1) * i if T > 1 else Fraction(0) for i in range(T)]
        wanted = [round(place) for place in exact]
        halves += sum(place.denominator == 2 for place in exact)
        assert mine[:T] == wanted
        assert mine[T:] == [wanted[-1] if T else 0] * (size - T)
    assert halves > 50


@pytest.mark.parametrize(
    ("S", "T"), [(2**16, 2**16), (2**16, 2**16 - 7), (2**16, 2**15 + 5)]
)
def test_places_of_the_longest_sources_are_right(S, T):
    """A product of two lengths does not fit into 31 bits."""
    sources, targets = jnp.array([S], jnp.int32), jnp.array([T], jnp.int32)
    found = np.asarray(copy_places(sources, targets, T))[0]
    for i in (0, 1, T // 3, T - 2, T - 1):
        assert found[i] == round(Fraction(S - 1, T - 1) * i)


class TestSoftCopy:
    SOURCES = np.array([1, 4, 7, 0], np.int32)
    TARGETS = np.array([3, 5, 1, 2], jnp.int32)

    @classmethod
    def weights(cls, source_size=7, sharpness=5.0):
        tau = jnp.asarray(sharpness, jnp.float32)
        return soft_copy_weights(cls.SOURCES, cls.TARGETS, source_size, 6, tau)

    @pytest.mark.parametrize("sharpness", [0.3, 5.0])
    def test_they_are_the_softmax_of_distances(self, sharpness):
        found = np.asarray(self.weights(sharpness=sharpness))
        assert found.shape == (4, 6, 7)
        for row, (S, T) in enumerate([(1, 3), (4, 5), (7, 1)]):
            for i in range(T):
                shares = [math.exp(-sharpness * abs(i / T - j / S)) for j in range(S)]
                wanted = np.array(shares) / sum(shares)
                np.testing.assert_allclose(found[row, i, :S], wanted, rtol=1e-5)
            assert (found[row, :, S:] == 0).all()

    def test_rows_sum_to_one_but_an_empty_source_gives_nothing(self):
        found = np.asarray(self.weights())
        np.testing.assert_allclose(found[:3].sum(-1), 1, rtol=1e-6)
        assert (found[3] == 0).all()

    def test_padding_of_the_source_changes_nothing(self):
        short, long = map(np.asarray, (self.weights(), self.weights(source_size=11)))
        np.testing.assert_allclose(long[..., :7], short, rtol=1e-6)
        assert (np.asarray(long[..., 7:]) == 0).all()

    def test_its_sharpness_has_a_finite_gradient(self):
        def first(sharpness):
            return self.weights(sharpness=sharpness)[..., 0].sum()

        gradient = jax.jit(jax.grad(first))(jnp.float32(2))
        assert math.isfinite(gradient)
        assert gradient != 0
