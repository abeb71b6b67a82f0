"""What beam search promises, over penalties, beams, vocabularies and precisions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_oracle import (
    BOS,
    END,
    PAD,
    STATES,
    Model,
    beam_search,
    brute_force,
    divisor,
    following,
    greedy,
    hypotheses_of,
    random_model,
    rescored,
    step_fn,
)
from test_decoding import decode, start_of

from transformer_jax.decoding import PIECES, STRATEGIES, Status, run_search

pytestmark = pytest.mark.usefixtures("strict")

PENALTIES = [("none", 0.6), ("average", 1.0), ("average", 0.4), ("gnmt", 0.6)]
MAX_LENGTH = 5


def found_by(model, **settings):
    return decode("beam_search", model, **{"max_length": MAX_LENGTH} | settings)


def assert_same(mine, wanted):
    assert [(m.tokens, m.status) for m in mine] == [
        (w.tokens, w.status) for w in wanted
    ]
    np.testing.assert_allclose(
        [m.score for m in mine], [w.score for w in wanted], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
@pytest.mark.parametrize(
    ("beam_size", "dtype"),
    [*((size, jnp.float32) for size in range(1, 9)), (5, jnp.bfloat16)],
)
def test_every_beam_equals_plain_loops_that_never_stop_early(
    penalty, alpha, beam_size, dtype
):
    settings = {"beam_size": beam_size, "penalty": penalty, "alpha": alpha}
    # Vocabularies of 4 to 9, END and two impossible tokens among them.
    sizes = {"rows": 8, "vocab": 4 + beam_size % 6, "dtype": dtype}
    for bonus in (0.0, 2.0):
        model = random_model(beam_size, end_bonus=bonus, **sizes)
        found = found_by(model, num_return=(beam_size + 1) // 2, **settings)
        for row in range(model.rows):
            wanted = beam_search(model, row, max_length=MAX_LENGTH, **settings)
            mine = hypotheses_of(found, row)
            there = [one for one in mine if one.status != Status.ABSENT]
            assert_same(there, wanted[: len(mine)])
            assert len({one.tokens for one in there}) == len(there) > 0
            for one in there:
                assert_rescored(model, row, one, penalty, alpha)


def assert_rescored(model, row, one, penalty, alpha):
    n = len(one.tokens) + (one.status != Status.UNFINISHED)
    wanted = rescored(model, row, one.tokens, one.status) / divisor(penalty, alpha, n)
    np.testing.assert_allclose(one.score, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_beam_of_one_is_greedy(penalty, alpha, dtype):
    for bonus in (-9.0, 0.0, 3.0):
        model = random_model(20, rows=8, end_bonus=bonus, dtype=dtype)
        found = found_by(model, beam_size=1, num_return=1, penalty=penalty, alpha=alpha)
        plain = decode("greedy", model, max_length=MAX_LENGTH)
        for one, other in zip(found, plain, strict=True):
            if one is not found.scores:
                np.testing.assert_array_equal(one, other)
        for row in range(model.rows):
            wanted = greedy(model, row, MAX_LENGTH)
            n = len(wanted.tokens) + (wanted.status != Status.UNFINISHED)
            score = wanted.score / divisor(penalty, alpha, n)
            np.testing.assert_allclose(
                found.scores[row, 0], score, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(("penalty", "alpha"), [*PENALTIES, ("average", 3.0)])
def test_a_beam_as_wide_as_all_outputs_finds_the_best(penalty, alpha):
    model = random_model(30, rows=8, vocab=5)
    settings = {"max_length": 4, "penalty": penalty, "alpha": alpha}
    # Two tokens and END: 2^4 outputs of four tokens, 2^4 - 1 shorter ones.
    found = found_by(model, beam_size=31, num_return=31, **settings)
    for row in range(model.rows):
        wanted = brute_force(model, row, **settings)
        assert len(wanted) == 31
        assert_same(hypotheses_of(found, row), wanted)


def test_more_slots_than_outputs_are_absent():
    model = random_model(31, rows=2, vocab=4)
    found = found_by(model, beam_size=8, num_return=8, max_length=2)
    for row in range(2):
        mine = hypotheses_of(found, row)
        # END, a END, and a a without an end.
        assert [one.status for one in mine[3:]] == [Status.ABSENT] * 5
        assert {one.tokens for one in mine[:3]} == {(), (3,), (3, 3)}
        assert mine[2].status == Status.UNFINISHED


def chain(*steps, vocab=6):
    """One row whose probabilities are given for some prefixes."""
    logits = np.full((1, STATES, vocab), -np.inf, np.float32)
    for prefix, shares in steps:
        state = 0
        for token in (BOS, *prefix):
            state = following(state, token)
        for token, share in shares.items():
            logits[0, state, token] = np.log(share)
    return Model(logits)


A, B = 3, 4


def test_an_end_that_is_second_best_is_no_output_of_a_beam_of_one():
    model = chain(((), {A: 0.6, END: 0.4}), ((A,), {B: 0.5, END: 0.5 - 1e-3}))
    (best,) = hypotheses_of(found_by(model, beam_size=1, num_return=1, max_length=2), 0)
    assert best.tokens == (A, B)
    assert best.status == Status.UNFINISHED


def test_what_has_ended_is_never_displaced():
    # END is second at first; later both live prefixes are better than it.
    model = chain(
        ((), {A: 0.7, END: 0.2, B: 0.1}),
        ((A,), {A: 0.5, B: 0.5}),
        ((A, A), {END: 1.0}),
        ((A, B), {END: 1.0}),
    )
    found = found_by(model, beam_size=2, num_return=2)
    tokens = [one.tokens for one in hypotheses_of(found, 0)]
    assert tokens == [(A, A), ()]


@pytest.mark.parametrize(
    ("penalty", "steps"), [("none", 2), ("average", 4), ("gnmt", 4)]
)
def test_the_search_goes_on_exactly_while_something_can_win(penalty, steps):
    # (A) ends with 0.36 after two steps; (B B B) would end with 0.3 after four.
    model = chain(
        ((), {A: 0.6, B: 0.4}),
        ((A,), {END: 0.6, A: 0.4}),
        ((B,), {B: 0.9, END: 0.1}),
        ((B, B), {B: 0.9, END: 0.1}),
        ((B, B, B), {END: 0.93, B: 0.07}),
        ((A, A), {A: 1.0}),
        ((A, A, A), {A: 1.0}),
    )
    pieces = PIECES["beam_search"](
        beam_size=2,
        num_return=1,
        max_length=4,
        end_id=END,
        pad_id=PAD,
        penalty=penalty,
        alpha=1.0,
    )
    state = pieces.begin(model.cache, start_of(model.cache), None)
    state = run_search(pieces, step_fn, state, 4)
    assert int(state.time) == steps
    (best,) = hypotheses_of(pieces.result(state), 0)
    assert best.tokens == ((A,) if penalty == "none" else (B, B, B))


def test_a_prefix_without_a_distribution_is_dropped_alone():
    model = chain(((), {A: 0.6, B: 0.4}), ((B,), {END: 1.0}))
    state = following(following(0, BOS), A)
    model.logits[0, state] = np.nan
    found = hypotheses_of(found_by(model, beam_size=2, num_return=2), 0)
    assert [one.tokens for one in found] == [(B,), ()]
    assert [one.status for one in found] == [Status.OK, Status.ABSENT]


@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0)])
def test_zeros_of_both_signs_tie(zeros):
    """Then greedy, a beam of one and the narrowest sampling agree."""

    def step(tokens, cache):
        row = jnp.array([[*zeros, -1.0]])
        return jnp.broadcast_to(row, (len(tokens), 3)), cache

    start = jnp.zeros(1, jnp.int32)
    settings = {"max_length": 3, "end_id": 2, "pad_id": 0}
    keys = jax.random.split(jax.random.key(0), 1)
    beam = {"beam_size": 1, "num_return": 1}
    found = [
        STRATEGIES["greedy"](step, (), start, **settings),
        STRATEGIES["beam_search"](step, (), start, **beam, **settings),
        STRATEGIES["sample"](step, (), start, keys, top_k=1, **settings),
    ]
    assert [one.tokens[0, 0].tolist() for one in found] == [[0, 0, 0]] * 3


def test_a_cache_may_hold_keys():
    """Any array with rows is a leaf."""
    keys = jax.random.split(jax.random.key(0), 2)

    def step(tokens, cache):
        logits = jax.vmap(lambda key: jax.random.normal(key, (4,)))(cache)
        return logits, cache

    start = jnp.zeros(2, jnp.int32)
    settings = {"beam_size": 2, "num_return": 1, "max_length": 3, "pad_id": 0}
    search = functools.partial(STRATEGIES["beam_search"], step, end_id=3, **settings)
    whole, alone = search(keys, start), search(keys[1:], start[1:])
    np.testing.assert_array_equal(whole.tokens[1:], alone.tokens)


def test_ties_go_to_the_lower_token():
    model = chain(((), {A: 0.5, B: 0.5}), *(((t,), {END: 0.5, A: 0.5}) for t in (A, B)))
    found = found_by(model, beam_size=3, num_return=2, max_length=2)
    assert [one.tokens for one in hypotheses_of(found, 0)] == [(A,), (B,)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"beam_size": 0, "num_return": 0},
            "beam_size must be an integer from 1 on, not 0",
        ),
        ({"num_return": 5}, "num_return must .* between 1 and beam_size 4, not 5"),
        ({"num_return": 0}, "num_return must .* between 1 and beam_size 4, not 0"),
        ({"penalty": "gmnt"}, "penalty must be one of none, average, gnmt, not 'gmnt'"),
        ({"alpha": -0.5}, "alpha must not be negative or infinite: -0.5"),
        ({"alpha": float("nan")}, "alpha must not be negative or infinite: nan"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        found_by(random_model(0), **settings)


def test_the_cache_is_gathered_once_a_step_by_one_index():
    model = random_model(1)
    cache = {"big": jnp.zeros((model.rows, 1000)), "row": model.cache}

    def wider(tokens, cache):
        logits, row = step_fn(tokens, cache["row"])
        return logits, cache | {"row": row}

    def search(cache):
        return decode("beam_search", model, step_fn=wider, cache=cache)

    equations = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            equations.append(equation)
            for value in equation.params.values():
                for inner in value if isinstance(value, list | tuple) else [value]:
                    if hasattr(inner, "jaxpr"):
                        walk(inner.jaxpr)
                    elif hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(search)(cache).jaxpr)
    big = [
        equation
        for equation in equations
        if equation.primitive.name == "gather"
        and equation.outvars[0].aval.shape == (model.rows * 4, 1000)
    ]
    assert len(big) == 1


def test_oracles_agree_with_each_other():
    model = random_model(40, rows=3, vocab=5)
    for row, (penalty, alpha) in itertools.product(range(3), PENALTIES):
        settings = {"max_length": 3, "penalty": penalty, "alpha": alpha}
        assert_same(
            beam_search(model, row, beam_size=15, **settings),
            brute_force(model, row, **settings),
        )
