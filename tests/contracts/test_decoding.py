"""The contract of every decoding strategy that writes token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_oracle import (
    BOS,
    END,
    PAD,
    Model,
    greedy,
    hypotheses_of,
    one_answer_model,
    random_model,
    rescored,
    step_fn,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.decoding import (
    PIECES,
    STRATEGIES,
    Status,
    forbid,
    run_search,
    take_rows,
    with_min_length,
)

pytestmark = pytest.mark.usefixtures("strict")

MAX_LENGTH = 6
SETTINGS = {
    "greedy": {},
    "sample": {"temperature": 0.8, "top_p": 0.95},
    "beam_search": {"beam_size": 4, "num_return": 3},
}


def decode(strategy, model, *, cache=None, step_fn=step_fn, **more):
    """Decode all rows of a model, or those of a cache, jitted."""
    cache = model.cache if cache is None else cache
    settings = {"max_length": MAX_LENGTH} | SETTINGS[strategy] | more
    return _jitted(strategy, step_fn, tuple(settings.items()), cache)


def _decode(strategy, step_fn, settings, cache):
    arguments = [step_fn, cache, start_of(cache)]
    if strategy == "sample":
        arguments.append(keys_of(cache))
    return STRATEGIES[strategy](*arguments, end_id=END, pad_id=PAD, **dict(settings))


_jitted = jax.jit(_decode, static_argnums=(0, 1, 2))


def start_of(cache):
    return jnp.full(jax.tree.leaves(cache)[0].shape[0], BOS, jnp.int32)


def keys_of(cache):
    """A key for every row, by the row's number in the model."""
    rows = jax.tree.leaves(cache)[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), rows)


def test_every_strategy_is_under_this_contract():
    # The others are under that of `test_parallel_decoding`.
    assert PIECES.keys() == SETTINGS.keys() < STRATEGIES.keys()


@pytest.mark.parametrize("end_bonus", [-9.0, 0.0, 3.0, 99.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_equals_plain_loops(end_bonus, dtype):
    model = random_model(3, end_bonus=end_bonus, dtype=dtype)
    found = decode("greedy", model)
    for row in range(model.rows):
        (mine,), wanted = hypotheses_of(found, row), greedy(model, row, MAX_LENGTH)
        assert (mine.tokens, mine.status) == (wanted.tokens, wanted.status)
        np.testing.assert_allclose(mine.score, wanted.score, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", PIECES)
class TestEveryStrategy:
    def test_shapes_padding_and_order(self, strategy):
        model = random_model(1)
        found = decode(strategy, model)
        rows, best, places = found.tokens.shape
        assert (rows, places) == (model.rows, MAX_LENGTH)
        assert best == SETTINGS[strategy].get("num_return", 1)
        assert found.lengths.shape == found.scores.shape == found.status.shape
        assert found.lengths.shape == (rows, best)
        assert found.scores.dtype == jnp.float32
        behind = np.arange(places) >= np.asarray(found.lengths)[..., None]
        assert (np.asarray(found.tokens) == PAD)[behind].all()
        assert not np.isin(found.tokens, [END, BOS]).any()
        unfinished = np.asarray(found.status) == Status.UNFINISHED
        for scores, late in zip(np.asarray(found.scores), unfinished, strict=True):
            assert (np.diff(late.astype(int)) >= 0).all()
            assert (np.diff(scores[~late]) <= 0).all()
            assert (np.diff(scores[late]) <= 0).all()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_score_is_the_rescored_output(self, strategy, dtype):
        model = random_model(2, dtype=dtype)
        found = decode(strategy, model)
        for row in range(model.rows):
            for mine in hypotheses_of(found, row):
                wanted = rescored(model, row, mine.tokens, mine.status)
                np.testing.assert_allclose(mine.score, wanted, rtol=1e-5)

    def test_a_model_of_one_answer_gives_it(self, strategy):
        answers = [(3, 4, 5), (), (6,), (5, 5, 3, 6, 4)]
        found = decode(strategy, one_answer_model(answers, vocab=7))
        for row, answer in enumerate(answers):
            best, *others = hypotheses_of(found, row)
            status = Status.OK if answer else Status.EMPTY
            assert best == (answer, 0.0, status)
            assert all(other == ((), -np.inf, Status.ABSENT) for other in others)

    def test_rows_do_not_depend_on_their_mates(self, strategy):
        model = random_model(4)
        together = decode(strategy, model)
        for rows in ([0], [3, 1], [4, 4, 2, 0, 1, 3, 0]):
            cache = take_rows(model.cache, jnp.array(rows), model.rows)
            alone = decode(strategy, model, cache=cache)
            for mine, ours in zip(alone, together, strict=True):
                np.testing.assert_array_equal(mine, np.asarray(ours)[rows])

    def test_results_are_those_of_eight_devices(self, strategy):
        model = random_model(4, rows=8)
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        cache = jax.device_put(model.cache, sharding)
        ours, mine = decode(strategy, model, cache=cache), decode(strategy, model)
        for one, many in zip(mine, ours, strict=True):
            np.testing.assert_array_equal(one, many)

    def test_a_longer_limit_changes_no_finished_row(self, strategy):
        model = random_model(8, end_bonus=2.0)
        short, long = (decode(strategy, model, max_length=n) for n in (5, 11))
        finished = np.isin(short.status, [Status.OK, Status.EMPTY]).all(axis=1)
        assert finished.any()
        np.testing.assert_array_equal(
            np.asarray(short.tokens)[finished], np.asarray(long.tokens)[finished, :, :5]
        )
        np.testing.assert_array_equal(
            np.asarray(short.scores)[finished], np.asarray(long.scores)[finished]
        )

    def test_one_place_is_enough_for_an_empty_output(self, strategy):
        found = decode(strategy, random_model(5, end_bonus=99.0), max_length=1)
        assert (found.status[:, 0] == Status.EMPTY).all()
        assert (found.lengths[:, 0] == 0).all()

    def test_no_place_is_refused(self, strategy):
        with pytest.raises(
            ValueError, match="max_length counts END: it must be an integer from 1 on"
        ):
            decode(strategy, random_model(5), max_length=0)

    def test_no_rows_give_no_hypotheses(self, strategy):
        cache = take_rows(random_model(5).cache, jnp.zeros(0, jnp.int32), 5)
        found = decode(strategy, random_model(5), cache=cache)
        best = SETTINGS[strategy].get("num_return", 1)
        assert found.tokens.shape == (0, best, MAX_LENGTH)
        again = take_rows(cache, jnp.zeros(0, jnp.int32), 0)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(again)} == {0}

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_row_without_a_best_token_is_infeasible(self, strategy, bad):
        model = random_model(6)
        logits = model.logits.copy()
        logits[1] = bad
        found, sound = decode(strategy, Model(logits)), decode(strategy, model)
        best, *others = hypotheses_of(found, 1)
        assert best == ((), -np.inf, Status.INFEASIBLE)
        assert all(other == ((), -np.inf, Status.ABSENT) for other in others)
        assert (np.asarray(found.tokens)[1] == PAD).all()
        for row in (0, 2, 3, 4):
            assert hypotheses_of(found, row) == hypotheses_of(sound, row)

    def test_eager_is_jitted(self, strategy):
        model = random_model(6)
        settings = SETTINGS[strategy] | {"max_length": MAX_LENGTH}
        eager = _decode(strategy, step_fn, settings.items(), model.cache)
        for mine, ours in zip(eager, decode(strategy, model), strict=True):
            np.testing.assert_allclose(mine, ours, rtol=1e-6)

    def test_pieces_with_rows_taken_out_give_the_same(self, strategy):
        model = random_model(9, end_bonus=1.0)
        settings = SETTINGS[strategy] | {"max_length": MAX_LENGTH}
        pieces = PIECES[strategy](end_id=END, pad_id=PAD, **settings)
        keys = keys_of(model.cache) if strategy == "sample" else None
        state = pieces.begin(model.cache, start_of(model.cache), keys)
        state = run_search(pieces, step_fn, state, 3)
        assert int(state.time) <= 3
        rows = jnp.array([4, 1])
        state = take_rows(state, rows, model.rows)
        found = pieces.result(run_search(pieces, step_fn, state, MAX_LENGTH))
        wanted = decode(strategy, model)
        for mine, ours in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, np.asarray(ours)[np.array(rows)])

    def test_it_stops_when_all_rows_have_finished(self, strategy):
        model = one_answer_model([(3, 4), (5,)], vocab=7)
        settings = SETTINGS[strategy] | {"max_length": 50}
        pieces = PIECES[strategy](end_id=END, pad_id=PAD, **settings)
        keys = keys_of(model.cache) if strategy == "sample" else None
        state = pieces.begin(model.cache, start_of(model.cache), keys)
        assert int(run_search(pieces, step_fn, state, 50).time) == 3

    def test_forbidden_tokens_never_come(self, strategy):
        model = random_model(10)
        before = decode(strategy, model)
        assert np.isin(before.tokens, [3, 5]).any()
        found = decode(strategy, model, step_fn=forbid(step_fn, [3, 5]))
        assert not np.isin(found.tokens, [3, 5]).any()
        logits = model.logits.copy()
        logits[..., [3, 5]] = -np.inf
        for mine, ours in zip(found, decode(strategy, Model(logits)), strict=True):
            np.testing.assert_array_equal(mine, ours)

    @pytest.mark.parametrize("token", [-1, 7])
    def test_what_the_model_has_not_cannot_be_forbidden(self, strategy, token):
        model = random_model(10)
        assert model.logits.shape[-1] == 7
        with pytest.raises(ValueError, match=rf"must lie below 7, not \[3, {token}\]"):
            decode(strategy, model, step_fn=forbid(step_fn, [3, token]))

    def test_no_output_is_shorter_than_the_least_length(self, strategy):
        model = random_model(11, end_bonus=4.0)
        assert (np.asarray(decode(strategy, model).lengths) < 3).any()
        longer, cache = with_min_length(
            step_fn, model.cache, 3, rows=model.rows, end_id=END
        )
        found = decode(strategy, model, step_fn=longer, cache=cache)
        assert (np.asarray(found.lengths) >= 3).all()
        assert (np.asarray(found.status)[:, 0] == Status.OK).any()
