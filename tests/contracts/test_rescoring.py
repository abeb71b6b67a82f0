"""Hypotheses put in order, by their own scores or by those of another model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_oracle import Found, hypotheses_of
from parallel_oracle import END, NONE, PAD, log_softmax

from transformer_jax.decoding import (
    Hypotheses,
    Status,
    rescored,
    sequence_log_probability,
)
from transformer_jax.decoding.hypotheses import ranked

pytestmark = pytest.mark.usefixtures("strict")

_rescored = jax.jit(rescored, static_argnames="pad_id")
_ranked = jax.jit(ranked)
_log_probability = jax.jit(sequence_log_probability, static_argnames="end_id")
OK, EMPTY, UNFINISHED = Status.OK, Status.EMPTY, Status.UNFINISHED
NOTHING = NONE._replace(status=Status.INFEASIBLE)


def packed(rows, places=3):
    """Hypotheses of rows of `Found`."""
    tokens = [[[*one.tokens, *[PAD] * places][:places] for one in row] for row in rows]
    lengths = [[len(one.tokens) for one in row] for row in rows]
    return Hypotheses(
        jnp.array(tokens, jnp.int32),
        jnp.array(lengths, jnp.int32),
        jnp.array([[one.score for one in row] for row in rows], jnp.float32),
        jnp.array([[one.status for one in row] for row in rows], jnp.int32),
    )


class TestRanked:
    def test_finished_ones_come_first_and_absent_ones_last(self):
        late = Found((3, 3), -1.0, UNFINISHED)
        later = Found((4, 3), -2.0, UNFINISHED)
        row = [later, NONE, Found((3,), -9.0, OK), late, Found((), -4.0, EMPTY)]
        found = _ranked(packed([row]))
        assert hypotheses_of(found, 0) == [row[4], row[2], late, later, NONE]

    def test_of_equal_ones_the_first_stays_first(self):
        row = [Found((token,), -0.0 if token % 2 else 0.0, OK) for token in (5, 4, 3)]
        found = hypotheses_of(_ranked(packed([row])), 0)
        assert [one.tokens for one in found] == [(5,), (4,), (3,)]

    def test_a_row_of_none_has_one_that_is_infeasible(self):
        found = _ranked(packed([[NONE, NONE], [NONE, Found((3,), -1.0, OK)]]))
        assert hypotheses_of(found, 0) == [NOTHING, NONE]
        assert hypotheses_of(found, 1) == [Found((3,), -1.0, OK), NONE]


class TestRescored:
    ROWS = (
        [Found((3,), -1.0, OK), Found((4, 5), -2.0, OK), Found((), -3.0, EMPTY)],
        [Found((6,), -1.0, OK), Found((3, 3, 3), -1.5, UNFINISHED), NONE],
        [NOTHING, NONE, NONE],
    )

    def rescored(self, *scores):
        scores = jnp.array(scores, jnp.float32)
        found = _rescored(packed(self.ROWS), scores, pad_id=PAD)
        kinds = [field.dtype for field in found]
        assert kinds == [jnp.int32, jnp.int32, jnp.float32, jnp.int32]
        return [hypotheses_of(found, row) for row in range(3)], found

    def test_the_other_scores_give_the_order(self):
        found, _ = self.rescored([-7, -5, -6], [-8, -4, -1], [-1, -2, -3])
        one, two, three = self.ROWS[0]
        assert found[0] == [
            two._replace(score=-5.0),
            three._replace(score=-6.0),
            one._replace(score=-7.0),
        ]
        # What has no end stays behind; what was none gets no score.
        six, cut, none = self.ROWS[1]
        assert found[1] == [six._replace(score=-8.0), cut._replace(score=-4.0), none]
        assert found[2] == list(self.ROWS[2])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_has_no_finite_score_is_none(self, bad):
        found, raw = self.rescored([-7, bad, -6], [bad, bad, bad], [bad, bad, bad])
        one, _, three = self.ROWS[0]
        assert found[0] == [
            three._replace(score=-6.0),
            one._replace(score=-7.0),
            NONE,
        ]
        assert found[1] == [NOTHING, NONE, NONE]
        assert found[2] == [NOTHING, NONE, NONE]
        behind = np.arange(3) >= np.asarray(raw.lengths)[..., None]
        assert (np.asarray(raw.tokens)[behind] == PAD).all()


class TestSequenceLogProbability:
    OUTPUTS = ((3, 5), (), (4,), (6, 6, 3), (3, 2))

    @staticmethod
    def told(places=4):
        """Logits of five outputs of up to three tokens."""
        draw = np.random.default_rng(places)
        return draw.normal(size=(5, places, 7)).astype(np.float32) * 2

    def score(self, logits, *, filler=PAD):
        places = logits.shape[1] - 1
        tokens = [[*one, *[filler] * places][:places] for one in self.OUTPUTS]
        lengths = [len(one) for one in self.OUTPUTS]
        return _log_probability(
            jnp.asarray(logits),
            jnp.array(tokens, jnp.int32),
            jnp.array(lengths, jnp.int32),
            end_id=END,
        )

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_it_is_the_sum_of_a_loop_with_end(self, dtype):
        logits = np.asarray(jnp.asarray(self.told(), dtype))
        found = self.score(logits)
        assert found.dtype == jnp.float32
        for row, output in enumerate(self.OUTPUTS):
            log_probs = log_softmax(logits[row])
            written = enumerate((*output, END))
            wanted = sum(log_probs[place, token] for place, token in written)
            np.testing.assert_allclose(found[row], wanted, rtol=1e-5)

    @pytest.mark.parametrize("filler", [END, 6, -1, 99])
    def test_what_stands_behind_an_end_changes_nothing(self, filler):
        logits = self.told()
        wanted = self.score(logits)
        for row, output in enumerate(self.OUTPUTS):
            logits[row, len(output) + 1 :] = np.nan
        found = self.score(logits, filler=filler)
        np.testing.assert_array_equal(found, wanted)

    def test_what_cannot_be_written_has_no_finite_score(self):
        logits = self.told()
        wanted = self.score(logits)
        logits[0, 1, 5] = -np.inf
        logits[1, 0] = np.nan
        logits[2, 1] = -np.inf
        found = self.score(logits)
        assert not np.isfinite(found[:3]).any()
        np.testing.assert_array_equal(found[3:], wanted[3:])

    def test_no_rows_have_no_score(self):
        none = functools.partial(jnp.zeros, dtype=jnp.int32)
        logits = jnp.zeros((0, 4, 7))
        found = sequence_log_probability(logits, none((0, 3)), none(0), end_id=END)
        assert found.shape == (0,)

    @pytest.mark.parametrize("places", [3, 5])
    def test_logits_that_do_not_fit_are_refused(self, places):
        message = f"^3 tokens and END need 4 rows of logits, not {places}"
        tokens = jnp.zeros((5, 3), jnp.int32)
        lengths = jnp.zeros(5, jnp.int32)
        logits = jnp.asarray(self.told(places))
        with pytest.raises(ValueError, match=message):
            sequence_log_probability(logits, tokens, lengths, end_id=END)
