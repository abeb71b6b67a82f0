"""The largest places: as `top_k`, mapped, cut by devices or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from transformer_jax.selection import largest_places

X = jax.random.normal(jax.random.key(0), (8, 2, 4, 16)).at[0, 0, 0].set(1.0)
COUNT = 5
WANTED = jax.lax.top_k(X, COUNT)[1]
largest = functools.partial(largest_places, count=COUNT)
MESH = jax.make_mesh((4, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
SHARE = jax.P("rows")


def by_hand(x):
    return np.argsort(-np.asarray(x), axis=-1, kind="stable")[..., :COUNT]


@pytest.mark.parametrize(
    "way",
    [
        largest,
        jax.jit(largest),
        jax.vmap(largest),
        jax.vmap(jax.vmap(largest, 1, 1)),
        jax.jit(jax.shard_map(largest, mesh=MESH, in_specs=SHARE, out_specs=SHARE)),
    ],
)
def test_every_way_finds_the_same_and_of_equal_ones_the_first(way):
    np.testing.assert_array_equal(way(X), by_hand(X))


def test_one_row_is_enough():
    np.testing.assert_array_equal(largest(X[1, 1, 1]), by_hand(X[1, 1, 1]))


@pytest.mark.parametrize("spec", [SHARE, jax.P("rows", None, "heads"), jax.P("heads")])
def test_rows_stay_on_their_devices(spec):
    sharding = jax.NamedSharding(MESH, spec)
    compiled = jax.jit(largest, in_shardings=sharding).lower(X).compile()
    assert "all-gather" not in compiled.as_text()
    found = compiled(jax.device_put(X, sharding))
    np.testing.assert_array_equal(found, by_hand(X))
    assert found.sharding.spec[: len(spec)] == tuple(spec)


def test_no_gradient_goes_through_a_choice():
    def total(x):
        return jnp.take_along_axis(x, largest(x), -1).sum()

    gradient = jax.grad(total)(X)
    np.testing.assert_array_equal(gradient.sum(-1), np.full(X.shape[:-1], COUNT))
