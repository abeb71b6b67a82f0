"""The contract of every decoding strategy that is a function of a step function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding import STRATEGIES, Status

pytestmark = pytest.mark.usefixtures("strict")

PAD, BOS, END, VOCAB = 0, 1, 2, 7
ROWS, MAX_LENGTH = 5, 6


def table_model(seed, end_bonus=0.0):
    """A model whose next token depends on the row's own table, place and last token."""
    draw = np.random.default_rng(seed)
    tables = draw.normal(size=(ROWS, MAX_LENGTH, VOCAB, VOCAB)).astype(np.float32) * 2
    tables[..., [PAD, BOS]] = -np.inf
    tables[..., END] += end_bonus

    def step_fn(tokens, cache):
        table, place = cache
        rows = jnp.arange(tokens.shape[0])
        return table[rows, place, tokens], (table, place + 1)

    return step_fn, (jnp.asarray(tables), jnp.zeros(ROWS, jnp.int32)), tables


def run(strategy, step_fn, cache, max_length=MAX_LENGTH):
    rows = jax.tree.leaves(cache)[0].shape[0]
    start = jnp.full(rows, BOS, jnp.int32)
    return STRATEGIES[strategy](
        step_fn, cache, start, max_length=max_length, end_id=END, pad_id=PAD
    )


def oracle_greedy(table, max_length):
    """One row, with plain loops: tokens, score, whether END came."""
    token, tokens, score = BOS, [], 0.0
    for place in range(max_length):
        logits = table[place, token].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        token = int(log_probs.argmax())
        score += log_probs[token]
        if token == END:
            return tokens, score, True
        tokens.append(token)
    return tokens, score, False


@pytest.mark.parametrize("end_bonus", [-9.0, 0.0, 3.0, 99.0])
def test_greedy_equals_plain_loops(end_bonus):
    step_fn, cache, tables = table_model(3, end_bonus)
    found = run("greedy", step_fn, cache)
    for row, table in enumerate(tables):
        tokens, score, ended = oracle_greedy(table, MAX_LENGTH)
        length = int(found.lengths[row, 0])
        assert found.tokens[row, 0, :length].tolist() == tokens
        np.testing.assert_allclose(found.scores[row, 0], score, rtol=1e-5, atol=1e-6)
        status = Status.EMPTY if not tokens else Status.OK
        assert found.status[row, 0] == (status if ended else Status.UNFINISHED)


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestEveryStrategy:
    def test_shapes_and_padding(self, strategy):
        step_fn, cache, _ = table_model(1)
        found = run(strategy, step_fn, cache)
        rows, best, places = found.tokens.shape
        assert (rows, places) == (ROWS, MAX_LENGTH)
        assert found.lengths.shape == found.scores.shape == found.status.shape
        assert found.lengths.shape == (ROWS, best)
        behind = np.arange(places) >= np.asarray(found.lengths)[..., None]
        assert (np.asarray(found.tokens) == PAD)[behind].all()
        assert not np.isin(found.tokens, [END, BOS]).any()

    def test_score_is_the_rescored_output(self, strategy):
        step_fn, cache, _ = table_model(2)
        found = run(strategy, step_fn, cache)
        token, total = jnp.full(ROWS, BOS, jnp.int32), np.zeros(ROWS)
        for place in range(MAX_LENGTH):
            logits, cache = step_fn(token, cache)
            ended = found.lengths[:, 0] == place
            token = jnp.where(ended, END, found.tokens[:, 0, place])
            log_probs = jax.nn.log_softmax(logits)[jnp.arange(ROWS), token]
            total += np.where(found.lengths[:, 0] >= place, log_probs, 0)
        np.testing.assert_allclose(found.scores[:, 0], total, rtol=1e-5)

    def test_rows_do_not_depend_on_their_mates(self, strategy):
        step_fn, cache, _ = table_model(4)
        together = run(strategy, step_fn, cache)
        for row in range(ROWS):
            alone = run(
                strategy, step_fn, jax.tree.map(lambda x, r=row: x[r : r + 1], cache)
            )
            for mine, ours in zip(alone, together, strict=True):
                np.testing.assert_allclose(mine[0], ours[row], rtol=1e-6)

    def test_one_place_is_enough_for_an_empty_output(self, strategy):
        step_fn, cache, _ = table_model(5, end_bonus=99.0)
        found = run(strategy, step_fn, cache, max_length=1)
        assert (found.status == Status.EMPTY).all()
        assert (found.lengths == 0).all()

    def test_no_place_is_refused(self, strategy):
        step_fn, cache, _ = table_model(5)
        with pytest.raises(
            ValueError, match="max_length counts END: it must be at least 1"
        ):
            run(strategy, step_fn, cache, max_length=0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_row_without_a_best_token_is_infeasible(self, strategy, bad):
        step_fn, cache, _ = table_model(6)
        broken = (cache[0].at[1].set(bad), cache[1])
        found, sound = (run(strategy, step_fn, c) for c in (broken, cache))
        assert found.status[1, 0] == Status.INFEASIBLE
        assert (found.lengths[1, 0], found.scores[1, 0]) == (0, -np.inf)
        assert (found.tokens[1] == PAD).all()
        for row in (0, 2, 3, 4):
            np.testing.assert_array_equal(found.tokens[row], sound.tokens[row])

    def test_is_jit_able_with_the_same_result(self, strategy):
        step_fn, cache, _ = table_model(6)
        eager = run(strategy, step_fn, cache)
        jitted = jax.jit(lambda cache: run(strategy, step_fn, cache))(cache)
        for mine, ours in zip(eager, jitted, strict=True):
            np.testing.assert_allclose(mine, ours, rtol=1e-6)
