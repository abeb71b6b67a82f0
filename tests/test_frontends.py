"""Front ends: positions as vectors that are added, and tables that end."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import named

from transformer_jax.frontends import TokenFrontend

VOCAB, WIDTH, PLACES = 11, 6, 7
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(2, 5)))


@functools.cache
def build(positions):
    """A front end and its parameters."""
    frontend = TokenFrontend(VOCAB, WIDTH, positions, PLACES, True, 0.0, jnp.float32)
    return frontend, nn.unbox(frontend.init(jax.random.key(0), TOKENS))


def test_learned_positions_are_rows_of_a_table_that_is_added():
    frontend, variables = build("learned")
    table = variables["params"]["position_table"]
    embedded = variables["params"]["embedding"]["embedding"][TOKENS] * WIDTH**0.5
    assert table.shape == (PLACES, WIDTH)
    assert np.unique(table).size == table.size
    got = frontend.apply(variables, TOKENS)
    np.testing.assert_allclose(got, embedded + table[:5], rtol=1e-5)
    places = jnp.array([[6, 0, 3, 3, 1], [0, 1, 2, 3, 4]])
    got = frontend.apply(variables, TOKENS, places, method="at")
    np.testing.assert_allclose(got, embedded + table[places], rtol=1e-5)


def test_one_hot_positions_times_a_matrix_equal_a_learned_table():
    learned, variables = build("learned")
    one_hot, _ = build("one_hot")
    params = dict(variables["params"])
    params["position_map"] = {"kernel": params.pop("position_table")}
    assert jax.tree.map(jnp.shape, {"params": params}) == jax.tree.map(
        jnp.shape, build("one_hot")[1]
    )
    np.testing.assert_allclose(
        one_hot.apply({"params": params}, TOKENS),
        learned.apply(variables, TOKENS),
        rtol=1e-6,
    )


@pytest.mark.parametrize("positions", ["learned", "one_hot"])
def test_a_table_ends(positions):
    frontend, variables = build(positions)
    apply = functools.partial(frontend.apply, variables)
    longest = jax.ShapeDtypeStruct((2, PLACES), jnp.int32)
    assert jax.eval_shape(apply, longest).shape == (2, PLACES, WIDTH)
    with pytest.raises(ValueError, match=f"a length of 8 is beyond the 7 {positions}"):
        jax.eval_shape(apply, jax.ShapeDtypeStruct((2, PLACES + 1), jnp.int32))
    rows = apply(TOKENS[:, :1], jnp.array([[PLACES], [PLACES - 1]]), method="at")
    assert np.isnan(rows[0]).all()
    assert np.isfinite(rows[1]).all()


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "t5", "none"])
def test_what_has_no_table_has_no_end(positions):
    frontend, variables = build(positions)
    assert list(named(variables)) == ["params/embedding/embedding"]
    places = jnp.array([[5 * PLACES], [0]])
    rows = frontend.apply(variables, TOKENS[:, :1], places, method="at")
    assert np.isfinite(rows).all()
