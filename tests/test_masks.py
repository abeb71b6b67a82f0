"""Masks that depend on data, and the hash that decides what dropout keeps."""

import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax import masks

pytestmark = pytest.mark.usefixtures("strict")


def drawing(function) -> np.ndarray:
    """The matrix of `1` and `.` in a docstring."""
    lines = [line.split() for line in inspect.getdoc(function).splitlines()]
    rows = [words for words in lines if words and set(words) <= {"1", "."}]
    return np.array(rows) == "1"


def test_length_mask_is_its_drawing():
    mask = masks.length_mask(jnp.array([2, 0, 3]), 4)
    np.testing.assert_array_equal(mask, drawing(masks.length_mask))


def test_length_mask_clips_lengths():
    mask = masks.length_mask(np.array([-5, 9], np.int8), 3)
    np.testing.assert_array_equal(mask, [[0, 0, 0], [1, 1, 1]])


def test_segment_mask_is_its_drawing():
    mask = masks.segment_mask(jnp.array([[1, 1, 2, 0]]), jnp.array([[1, 2, 2, 0, 0]]))
    assert mask.shape == (1, 1, 4, 5)
    np.testing.assert_array_equal(mask[0, 0], drawing(masks.segment_mask))


def test_lowest_places_are_those_of_a_sort():
    draw = np.random.default_rng(0)
    # Few values, so that many are equal; one that is no place would be the lowest.
    values = draw.integers(0, 3, size=(50, 7)).astype(np.float32)
    places = draw.random((50, 7)) < 0.6
    values[~places] = draw.choice([np.nan, -np.inf], size=(~places).sum())
    count = draw.integers(0, 9, size=50).astype(np.int32)
    found = masks.lowest_places(*map(jnp.asarray, (values, places, count)))
    for row in range(50):
        ranked = sorted(np.flatnonzero(places[row]), key=values[row].__getitem__)
        marked = np.flatnonzero(found[row]).tolist()
        assert marked == sorted(ranked[: count[row]])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: masks.length_mask(jnp.ones(2), 3), TypeError, "integers, not float32"),
        (lambda: masks.length_mask(jnp.ones((2, 1), int), 3), ValueError, r"\(2, 1\)"),
        (
            lambda: masks.segment_mask(jnp.ones((2, 3), int), jnp.ones((5, 7), int)),
            ValueError,
            r"\(2, 3\) and \(5, 7\)",
        ),
        (
            lambda: masks.segment_mask(jnp.ones((2, 3)), jnp.ones((2, 3), int)),
            TypeError,
            "query_segment_ids must be integers",
        ),
    ],
)
def test_wrong_masks_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


# --- The hash --------------------------------------------------------------------


def grid(*sizes: int) -> list[np.ndarray]:
    return list(np.indices(sizes, np.int32, sparse=True))


KEYS = [jax.random.key(0), jax.random.key(1), jax.random.key(7)]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_kept_share_is_one_minus_rate(rate):
    """Within five standard deviations, over all, in each row and in each column."""
    keep = np.asarray(masks.hashed_keep(KEYS[0], rate, *grid(499, 503)))
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 5 * deviation / keep.size**0.5
    for axis in (0, 1):
        worst = np.abs(keep.mean(axis) - (1 - rate)).max()
        assert worst < 5 * deviation / keep.shape[axis] ** 0.5


def test_neighbours_rows_and_keys_are_independent():
    """Pairs of decisions agree half of the time, also for close keys and indices."""
    sets = {
        f"key {number}": np.asarray(masks.hashed_keep(key, 0.5, *grid(3, 211, 223)))
        for number, key in enumerate(KEYS)
    }
    base = sets["key 0"]
    pairs = list(itertools.combinations(sets.values(), 2))
    for axis, shift in itertools.product(range(3), (1, 2, 4, 64)):
        if shift < base.shape[axis]:
            pairs.append((base, np.roll(base, shift, axis)))
    pairs.append((base[0], base[1]))
    pairs.append((base[0, :211, :211], base[0, :211, :211].T))
    for one, other in pairs:
        agreement = (one == other).mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / one.size**0.5


def test_one_flipped_bit_of_an_index_flips_half_of_the_decisions():
    """Avalanche: over many places, for each bit of either index."""
    rows, columns = np.random.default_rng(0).integers(0, 2**31, (2, 4001))
    before = masks.hashed_keep(KEYS[0], 0.5, rows, columns)
    for bit in (1 << n for n in range(31)):
        for flipped in ((rows ^ bit, columns), (rows, columns ^ bit)):
            share = (masks.hashed_keep(KEYS[0], 0.5, *flipped) != before).mean()
            assert abs(share - 0.5) < 5 * 0.5 / 4001**0.5


def test_decision_depends_on_values_of_indices_only():
    whole = np.asarray(masks.hashed_keep(KEYS[0], 0.3, *grid(5, 7, 11)))
    rows, middle, columns = grid(5, 7, 11)
    part = masks.hashed_keep(KEYS[0], 0.3, rows[2:], middle[:, 3:6], columns[..., 4:])
    np.testing.assert_array_equal(part, whole[2:, 3:6, 4:])
    one = masks.hashed_keep(KEYS[0], 0.3, 4, 2, 9)
    assert bool(one) == whole[4, 2, 9]
    swapped = masks.hashed_keep(KEYS[0], 0.3, 2, 4, columns[0, 0])
    assert (np.asarray(swapped) != whole[4, 2]).any()


def test_typed_and_raw_keys_are_equal():
    raw = masks.hashed_keep(jax.random.PRNGKey(7), 0.5, *grid(11, 13))
    np.testing.assert_array_equal(raw, masks.hashed_keep(KEYS[2], 0.5, *grid(11, 13)))


@pytest.mark.parametrize(
    ("key", "rate", "index", "error", "text"),
    [
        (KEYS[0], 1.0, 0, ValueError, r"must lie in \[0, 1\), not 1.0"),
        (KEYS[0], -0.1, 0, ValueError, "not -0.1"),
        (KEYS[0], float("nan"), 0, ValueError, "not nan"),
        (None, 0.5, 0, ValueError, "needs a PRNG key"),
        (3, 0.5, 0, TypeError, "jax.random.key, not int"),
        (jnp.zeros(2), 0.5, 0, TypeError, "not float32"),
        (jax.random.split(KEYS[0], 3), 0.5, 0, ValueError, r"keys of shape \(3, 2\)"),
        (KEYS[0], 0.5, 0.5, TypeError, "indices must be integers"),
    ],
)
def test_wrong_dropout_is_refused(key, rate, index, error, text):
    with pytest.raises(error, match=text):
        masks.hashed_keep(key, rate, index)


# --- Dropout of any array --------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5)])
def test_dropout_hashes_row_and_column(shape):
    """Rows count through all axes but the last, so reshaped rows stay the same."""
    x = 1 + jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    dropped = masks.hashed_dropout(x, KEYS[1], 0.4)
    width = shape[-1] if shape else 1
    flat = np.asarray(x).reshape(-1, width)
    keep = masks.hashed_keep(KEYS[1], 0.4, *grid(*flat.shape))
    wanted = np.where(keep, flat / np.float32(0.6), 0).reshape(shape)
    np.testing.assert_allclose(dropped, wanted, rtol=1e-6)
    assert dropped.dtype == x.dtype


def test_dropout_keeps_mean_and_scales_gradients_alike():
    x = jnp.ones((101, 103), jnp.bfloat16)
    dropped, pullback = jax.vjp(lambda x: masks.hashed_dropout(x, KEYS[0], 0.25), x)
    (gradient,) = pullback(x)
    assert dropped.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dropped, gradient)
    assert abs(np.asarray(dropped, np.float32).mean() - 1) < 0.03


def test_dropout_at_rate_zero_is_identity():
    x = jnp.array([[1.0, jnp.nan]])
    np.testing.assert_array_equal(masks.hashed_dropout(x, None, 0), x)


def test_dropout_without_key_is_refused():
    with pytest.raises(ValueError, match=r"rate 0.1 needs a PRNG key"):
        masks.hashed_dropout(jnp.ones(3), None, 0.1)


def test_dropout_is_equal_when_sharded():
    """Over eight devices, both axes cut, the same elements are dropped."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    x = jnp.ones((8, 3, 10))
    drop = jax.jit(masks.hashed_dropout, static_argnames="rate")
    sharded = drop(jax.device_put(x, sharding), KEYS[0], rate=0.5)
    np.testing.assert_array_equal(sharded, drop(x, KEYS[0], rate=0.5))
    assert 0 < (np.asarray(sharded) == 0).mean() < 1
