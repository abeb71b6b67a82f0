"""What sampling promises beyond the contract of every strategy."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_oracle import BOS, END, Model, hypotheses_of, random_model, step_fn
from hypothesis import strategies as st
from test_decoding import decode

from transformer_jax.decoding import Status, restrict, sample

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-30, "top_p": None},
        {"temperature": 1e-4, "top_p": None},
        {"top_k": 1, "top_p": None},
        {"top_p": 1e-6},
    ],
)
def test_the_narrowest_sampling_is_greedy(settings):
    model = random_model(1)
    found = decode("sample", model, **settings)
    for mine, ours in zip(found, decode("greedy", model), strict=True):
        np.testing.assert_allclose(mine, ours, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.8}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),
        # The share is that of what the temperature and top_k have left.
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.7}, [0.7353, 0.2647, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probabilities_say(settings, wanted):
    rows = 4000
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.full((1, 97, 7), -np.inf, np.float32)
    logits[..., 3:] = np.log(shares)
    cache = jax.tree.map(lambda leaf: leaf.repeat(rows, 0), Model(logits).cache)
    found = sample(
        step_fn,
        cache,
        jnp.full(rows, BOS, jnp.int32),
        jax.random.split(jax.random.key(3), rows),
        max_length=1,
        end_id=END,
        pad_id=0,
        **settings,
    )
    drawn = np.asarray(found.tokens)[:, 0, 0]
    found_shares = np.bincount(drawn, minlength=7)[3:] / rows
    # Five standard deviations.
    np.testing.assert_allclose(found_shares, wanted, atol=5 * 0.5 / rows**0.5)
    np.testing.assert_array_equal(found_shares > 0, np.array(wanted) > 0)
    # Scores are the model's own, whatever was drawn from.
    np.testing.assert_allclose(found.scores[:, 0], np.log(shares)[drawn - 3], rtol=1e-5)


def test_another_key_gives_another_output_and_every_step_a_new_draw():
    model = random_model(2, rows=1, end_bonus=-9.0)
    cache = jax.tree.map(lambda leaf: leaf.repeat(50, 0), model.cache)
    # Every state continues alike, so only the draws can differ.
    cache = (cache[0], cache[1].at[:].set(cache[1][:, :1]), cache[2])

    def outputs(seed):
        found = sample(
            step_fn,
            cache,
            jnp.full(50, BOS, jnp.int32),
            jax.random.split(jax.random.key(seed), 50),
            max_length=8,
            end_id=END,
            pad_id=0,
            temperature=3.0,
        )
        return [hypotheses_of(found, row)[0].tokens for row in range(50)]

    first = outputs(0)
    assert first == outputs(0)
    assert len(set(first)) > 45
    assert sum(one != other for one, other in zip(first, outputs(1), strict=True)) > 45
    assert sum(len(set(tokens)) > 1 for tokens in first) > 45


def test_the_hottest_sampling_draws_all_that_may_be():
    """Nothing that is excluded, and nothing breaks."""

    def step(tokens, cache):
        row = jnp.array([[3.0, -jnp.inf, 1e9, -5.0]])
        return jnp.broadcast_to(row, (len(tokens), 4)), cache

    keys = jax.random.split(jax.random.key(0), 64)
    settings = {"max_length": 2, "end_id": 3, "pad_id": 0, "temperature": 1e30}
    found = sample(step, (), jnp.zeros(64, jnp.int32), keys, **settings)
    assert not np.isin(found.status, [Status.INFEASIBLE]).any()
    drawn = np.asarray(found.tokens)[np.asarray(found.lengths) > 0]
    assert {*drawn.ravel().tolist()} == {0, 2}


def test_a_key_for_every_row_is_wanted():
    model = random_model(1)
    keys = jax.random.split(jax.random.key(0), 3)
    start = jnp.full(5, BOS, jnp.int32)
    with pytest.raises(ValueError, match="sample wants one key a row: 3 for 5"):
        sample(step_fn, model.cache, start, keys, max_length=3, end_id=END, pad_id=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"temperature": 0.0},
            "temperature must lie between .*, not 0.0: greedy is its",
        ),
        ({"temperature": -1.0}, "temperature must lie between .* not -1.0"),
        ({"temperature": 1e-38}, "temperature must lie between .* not 1e-38"),
        ({"top_k": 0}, "top_k must be an integer from 1 on, not 0: None keeps all"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], not 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], not 1.5"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        decode("sample", random_model(0), **settings)


finite = st.floats(-8, 8, width=32)


@hypothesis.given(
    logits=st.lists(
        st.one_of(finite, st.just(-np.inf), st.just(1.0)), min_size=1, max_size=9
    ).filter(lambda row: max(row) > -np.inf),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_restrict_equals_plain_loops(logits, top_k, top_p):
    logits = np.array(logits, np.float32)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order[: top_k or len(order)]
    weights = np.exp(logits[kept].astype(np.float64))
    shares = weights / weights.sum()
    before = np.cumsum(shares) - shares
    # Where rounding decides, either answer is right.
    hypothesis.assume(top_p is None or np.abs(before - top_p).min() > 1e-5)
    if top_p is not None and top_p < 1:
        kept = [token for token, mass in zip(kept, before, strict=True) if mass < top_p]
    found = np.asarray(restrict(jnp.asarray(logits)[None], top_k=top_k, top_p=top_p))[0]
    wanted = np.full(len(logits), -np.inf, np.float32)
    wanted[kept] = logits[kept]
    np.testing.assert_array_equal(found, wanted)
