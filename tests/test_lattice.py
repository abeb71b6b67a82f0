"""Lattices: all paths enumerated, finite differences, and counts by a formula."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lattice_oracle as oracle
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from transformer_jax.lattice import (
    Band,
    Dense,
    Lattice,
    best_path,
    count_paths,
    log_likelihood,
)

pytestmark = pytest.mark.usefixtures("strict")

TIMES, STATES = 4, 7
LENGTHS = (4, 1, 3)
ROWS = len(LENGTHS)


class Answers(NamedTuple):
    """All that can be asked of a lattice; every field begins with its rows."""

    count: Any
    total: Any
    score: Any
    states: Any
    gradients: dict[str, Any]  # of `total`, by the names of the weights


def answers(lattice, scale=None):
    """Ask all at once; `scale` of each row multiplies the gradients."""
    scale = np.ones(lattice.lengths.shape, np.float32) if scale is None else scale
    return jax.device_get(_answers(lattice, scale))


@jax.jit
def _answers(lattice, scale):
    def scaled(lattice):
        total = log_likelihood(lattice)
        return jnp.sum(total * scale.astype(total.dtype)), total

    found, total = jax.grad(scaled, has_aux=True, allow_int=True)(lattice)
    gradients = found._replace(moves=found.moves.weights)._asdict()
    del gradients["lengths"]
    return Answers(count_paths(lattice), total, *best_path(lattice), gradients)


def assert_same(found, wanted, **tolerance):
    """Compare two answers, or gradients, by name."""
    places = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, value), other in zip(places, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(other, value, err_msg=name, **tolerance)


def part(tree, places):
    """The same places of every array's first axis."""
    return jax.tree.map(lambda leaf: leaf[places], tree)


def weights(draw, *shape, forbidden=0.2):
    """Log-weights, some of them -inf."""
    values = draw.normal(size=shape) * 2
    return np.where(draw.random(shape) < forbidden, -np.inf, values)


def cast(lattice, dtype):
    floats = jax.tree.map(
        lambda leaf: np.asarray(leaf, dtype), lattice._replace(lengths=None)
    )
    return floats._replace(lengths=lattice.lengths)


def draw_lattice(kind, dtype=np.float32, seed=0):
    """Rows of different lengths; `dense` is a graph whose edges lead forward."""
    draw = np.random.default_rng(seed)
    if kind == "band":
        moves = Band(weights(draw, ROWS, 3, STATES))
    else:
        forward = np.triu(np.ones((STATES, STATES), bool), 1)
        moves = Dense(np.where(forward, weights(draw, ROWS, STATES, STATES), -np.inf))
    lattice = Lattice(
        start=weights(draw, ROWS, STATES),
        emit=weights(draw, ROWS, TIMES, STATES, forbidden=0.1),
        moves=moves,
        end=weights(draw, ROWS, STATES),
        lengths=np.array(LENGTHS, np.int32),
    )
    return cast(lattice, dtype)


both_kinds = pytest.mark.parametrize("kind", ["band", "dense"])


@both_kinds
def test_all_paths_are_counted_summed_and_compared(kind):
    lattice = draw_lattice(kind)
    found = answers(lattice)
    for row in range(ROWS):
        enumerated = list(oracle.paths(lattice, row).values())
        assert len(enumerated) > 1
        assert found.count[row] == len(enumerated)
        total = oracle.log_sum(enumerated)
        assert found.total[row] == pytest.approx(total, rel=1e-5)
        assert found.score[row] == pytest.approx(max(enumerated), rel=1e-5)


@both_kinds
def test_best_path_is_a_path_of_its_weight(kind):
    lattice = draw_lattice(kind)
    found = answers(lattice)
    for row, length in enumerate(LENGTHS):
        states = found.states[row]
        weight = oracle.weight(lattice, row, states[:length])
        assert found.score[row] == pytest.approx(weight, rel=1e-5)
        assert (states[length:] == states[length - 1]).all()


@both_kinds
def test_gradients_are_the_posteriors(kind):
    lattice = draw_lattice(kind)
    scale = np.array([1.0, -2.0, 0.5], np.float32)
    found = answers(lattice, scale).gradients
    wanted = {
        name: share * np.reshape(scale, (ROWS, *(1,) * (share.ndim - 1)))
        for name, share in oracle.posteriors(lattice).items()
    }
    assert_same(found, wanted, atol=1e-5)
    inside = np.arange(TIMES) < np.array(LENGTHS)[:, None]
    each_time = np.sum(found["emit"], axis=2)
    np.testing.assert_allclose(each_time, inside * scale[:, None], atol=1e-5)


@both_kinds
def test_derivatives_equal_finite_differences(kind):
    """The first by every weight, the second along one direction."""
    with jax.enable_x64(True):
        lattice = draw_lattice(kind, np.float64)
        vector, restore = ravel_pytree(lattice._replace(lengths=None))

        def function(vector):
            return log_likelihood(restore(vector)._replace(lengths=lattice.lengths))

        totals = jax.jit(jax.vmap(function))
        gradient = jax.jit(jax.grad(lambda vector: function(vector).sum()))
        vector, step = np.asarray(vector), 1e-6 * np.eye(vector.size)
        slopes = np.sum(totals(vector + step) - totals(vector - step), axis=1) / 2e-6
        found = np.asarray(gradient(vector))
        np.testing.assert_allclose(found, slopes, atol=1e-8)
        assert not found[vector == -np.inf].any()
        along = np.random.default_rng(1).normal(size=vector.size)
        ahead, behind = (gradient(vector + h * along) for h in (1e-6, -1e-6))
        second = jax.jit(lambda at: jax.jvp(gradient, [at], [along])[1])(vector)
        np.testing.assert_allclose(second, (ahead - behind) / 2e-6, atol=1e-7)


@both_kinds
@pytest.mark.parametrize("field", ["start", "emit", "moves", "end"])
def test_row_without_a_path_leaves_others_alone(kind, field):
    lattice = draw_lattice(kind)

    def forbid(leaf):
        leaf = leaf.copy()
        leaf[(0, 2) if field == "emit" else 0] = -np.inf
        return leaf

    dead = lattice._replace(**{field: jax.tree.map(forbid, getattr(lattice, field))})
    assert not oracle.paths(dead, 0)
    scale = np.array([np.inf, 1, 1], np.float32)
    found, alive = answers(dead, scale), answers(lattice)
    assert found.count[0] == 0
    assert found.total[0] == found.score[0] == -jnp.inf
    assert not any(gradient[0].any() for gradient in found.gradients.values())
    assert_same(part(found, slice(1, None)), part(alive, slice(1, None)), rtol=0)


@both_kinds
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_what_is_emitted_behind_the_length_changes_nothing(kind, junk):
    lattice = draw_lattice(kind)
    behind = np.arange(TIMES) >= lattice.lengths[:, None]
    dirty = np.where(behind[..., None], np.float32(junk), lattice.emit)
    assert_same(answers(lattice._replace(emit=dirty)), answers(lattice), rtol=0)


def test_one_time_is_a_softmax():
    lattice = draw_lattice("dense")
    one = lattice._replace(emit=lattice.emit[:, :1], lengths=np.ones(ROWS, np.int32))
    weight = lattice.start + lattice.emit[:, 0] + lattice.end
    found = answers(one)
    np.testing.assert_allclose(found.total, jax.nn.logsumexp(weight, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(found.states[:, 0], weight.argmax(1))
    shares = np.exp(weight - found.total[:, None])
    np.testing.assert_allclose(found.gradients["emit"][:, 0], shares, atol=1e-6)


def test_vmap_changes_nothing():
    lattices = [draw_lattice("band", seed=seed) for seed in (2, 3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *lattices)
    found = jax.device_get(jax.vmap(_answers)(stacked, np.ones((2, ROWS), np.float32)))
    for place, lattice in enumerate(lattices):
        assert_same(part(found, place), answers(lattice), rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    dtype = jnp.bfloat16
    coarse = cast(draw_lattice("band"), dtype)
    found, wanted = answers(coarse), answers(cast(coarse, jnp.float32))
    assert found.total.dtype == found.score.dtype == jnp.float32
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), wanted.gradients)
    assert_same(found, wanted._replace(gradients=rounded), rtol=1e-6)
    assert {x.dtype for x in found.gradients.values()} == {jnp.dtype(dtype)}


def test_one_float64_weight_makes_all_float64():
    lattice = draw_lattice("band")
    totals = [
        oracle.log_sum(list(oracle.paths(lattice, row).values())) for row in range(ROWS)
    ]
    with jax.enable_x64(True):
        found = answers(
            lattice._replace(
                end=lattice.end.astype(np.float64),
                lengths=np.array(LENGTHS, np.int64),
            )
        )
        np.testing.assert_allclose(found.total, totals, rtol=1e-13)
        assert found.gradients["end"].dtype == jnp.float64
        assert found.gradients["emit"].dtype == jnp.float32


def logarithm(allowed):
    return np.where(allowed, np.float32(0), np.float32(-np.inf))


def graph(size, times, moves):
    """One row in which all weights are 1: from the first state to the last."""
    state = np.arange(size)[None]
    return Lattice(
        start=logarithm(state == 0),
        emit=np.zeros((1, times, size), np.float32),
        moves=moves,
        end=logarithm(state == size - 1),
        lengths=np.array([times], np.int32),
    )


def forward_graph(size, times):
    """Every edge leads forward: a path is a choice of the vertices between."""
    return graph(size, times, Dense(logarithm(np.triu(np.ones((1, size, size)), 1))))


def stair(size, times):
    """Every move is by 0 or 1 state: a path chooses the moves that go on."""
    return graph(size, times, Band(logarithm(np.ones((1, 2, size)))))


def test_paths_are_counted_by_a_formula():
    choices = math.comb(11 - 2, 5 - 2)
    found = answers(forward_graph(11, 5))
    assert found.count[0] == choices
    assert found.total[0] == pytest.approx(math.log(choices), rel=1e-6)
    # By 0 or 1 state: 5 of the 8 moves go on.
    assert answers(stair(6, 9)).count[0] == math.comb(8, 5)


def test_count_saturates():
    everywhere = graph(3, 200, Dense(logarithm(np.ones((1, 3, 3)))))
    emit = logarithm(np.ones((1, 200, 3)) * [1, 0, 1])
    for lattice in (everywhere, everywhere._replace(emit=emit)):
        assert jax.jit(count_paths)(lattice)[0] == np.finfo(np.float32).max


def test_of_equal_paths_the_best_is_one():
    for lattice in (
        forward_graph(11, 5),
        stair(6, 9),
    ):
        found = answers(lattice)
        assert found.count[0] > 1
        assert found.score[0] == 0
        assert oracle.weight(lattice, 0, found.states[0]) == 0


def test_no_matrix_a_time_is_stored():
    """What is kept for the way back grows by T J and J J, not by T J J."""
    size, times = 53, 37
    lattice = forward_graph(size, times)

    def function(weights):
        return log_likelihood(lattice._replace(moves=Dense(weights)))

    _, back = jax.vjp(function, lattice.moves.weights)
    kept = sum(leaf.size for leaf in jax.tree.leaves(back))
    assert times * size < kept < 4 * (times * size + size**2)


def test_oracle_knows_a_lattice_by_hand():
    """Two states, two times, moves by 0 or 1; every weight another prime."""
    lattice = Lattice(
        start=np.log([[2, 3]]),
        emit=np.log([[[5, 7], [11, 13]]]),
        moves=Band(np.array([[np.log([17, 19]), [-np.inf, np.log(23)]]])),
        end=np.log([[29, 31]]),
        lengths=np.array([2], np.int32),
    )
    wanted = {
        (0, 0): 2 * 5 * 17 * 11 * 29,
        (0, 1): 2 * 5 * 23 * 13 * 31,
        (1, 1): 3 * 7 * 19 * 13 * 31,
    }
    assert oracle.paths(lattice, 0).keys() == wanted.keys()
    for states in itertools.product(range(2), repeat=2):
        value = math.log(wanted[states]) if states in wanted else -math.inf
        assert oracle.weight(lattice, 0, states) == pytest.approx(value, rel=1e-12)
    total = oracle.log_sum(list(oracle.paths(lattice, 0).values()))
    assert total == pytest.approx(math.log(sum(wanted.values())), rel=1e-12)
