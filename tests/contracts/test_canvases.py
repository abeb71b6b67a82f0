"""What strategies that fill a canvas promise beyond the contract of them all."""

import jax
import jax.numpy as jnp
import numpy as np
import parallel_oracle as oracle
import pytest
from decoding_oracle import hypotheses_of
from parallel_oracle import END, MASK, PAD
from test_parallel_decoding import (
    LENGTHS,
    assert_alike,
    assert_equals_loops,
    decode,
    model_of,
)

from transformer_jax.decoding import STRATEGIES, Status

pytestmark = pytest.mark.usefixtures("strict")


class TestParallel:
    def test_candidates_that_are_none_do_not_come(self):
        lengths = [[4, 3, 2], [-1, 7, 2], [9, -2, 8], *LENGTHS[3:]]
        model = model_of("parallel", 11, lengths=lengths)
        model.scores[0] = [-np.inf, -0.5, np.nan]
        found = assert_equals_loops("parallel", model)
        assert found.lengths[:3].tolist() == [[3, 0, 0], [2, 0, 0], [0, 0, 0]]
        assert found.status[2].tolist() == [Status.INFEASIBLE] + [Status.ABSENT] * 2


class TestMaskPredict:
    def test_one_pass_gives_the_tokens_of_parallel(self):
        model = model_of("parallel", 13)
        once = decode("mask_predict", model, passes=1)
        written = decode("parallel", model)
        for row in range(len(LENGTHS)):
            mine, ours = (
                {one.tokens for one in hypotheses_of(found, row)}
                for found in (once, written)
            )
            # An empty canvas is an output of `parallel` alone; here it is ABSENT.
            assert mine == ours

    @pytest.mark.parametrize("passes", [2, 10])
    def test_any_number_of_passes_equals_plain_loops(self, passes):
        model = model_of("mask_predict", 14)
        found = assert_equals_loops("mask_predict", model, passes=passes)
        assert not np.isin(found.tokens, MASK).any()

    @pytest.mark.parametrize("passes", [3, 10])
    def test_what_is_hidden_follows_the_schedule(self, passes):
        lengths = np.array([[7, 4], [1, 6]], np.int32)
        model = model_of("mask_predict", 15, lengths=lengths)
        predict, seen = model.predict(2, 0.0), []

        def watched(tokens, lengths):
            jax.debug.callback(seen.append, tokens, ordered=True)
            return predict(tokens, lengths)

        @jax.jit
        def decoded(lengths):
            settings = {"max_length": 7, "mask_id": MASK, "pad_id": PAD}
            return STRATEGIES["mask_predict"](
                watched, lengths, passes=passes, **settings
            )

        found = decoded(lengths)
        jax.effects_barrier()
        inside = np.arange(7) < lengths.reshape(-1, 1)
        hidden = [((np.asarray(canvas) == MASK) & inside).sum(1) for canvas in seen]
        schedule = [
            [n * (passes - time) // passes for n in lengths.reshape(-1).tolist()]
            for time in range(passes)
        ]
        assert np.array(hidden).tolist() == schedule
        assert not np.isin(found.tokens, MASK).any()

    def test_no_canvas_has_no_output(self):
        lengths = [[-1, 0, 7]] * len(LENGTHS)
        found = decode("mask_predict", model_of("mask_predict", 17, lengths=lengths))
        nothing = oracle.best_first([], 3)
        assert hypotheses_of(found, 0) == nothing


# What a canvas says, `|` is END; what is written before the first END; its status.
SAID = [
    ("345|63", (3, 4, 5), Status.OK),
    ("34|5|6", (3, 4), Status.OK),
    ("|3456|", (), Status.EMPTY),
    ("55655|", (5, 5, 6, 5, 5), Status.OK),
    ("||||||", (), Status.EMPTY),
    ("345634", (3, 4, 5, 6, 3, 4), Status.UNFINISHED),
]


def said(text):
    """Logits `[n, 7]` of a canvas whose best symbols these are."""
    draw = np.random.default_rng(len(text))
    logits = draw.normal(size=(len(text), 7)).astype(np.float32)
    logits[:, PAD] = -np.inf
    ids = [END if letter == "|" else int(letter) for letter in text]
    logits[np.arange(len(text)), ids] += 9
    return logits


def overgenerated(rows, count, *, end_id=END):
    """Hypotheses of each row of logits."""
    logits = jnp.asarray(np.stack(rows))
    lengths = jnp.full(len(rows), logits.shape[1], jnp.int32)
    settings = {"num_return": count, "end_id": end_id, "pad_id": PAD}
    found = _overgenerate(logits, lengths, **settings)
    return [hypotheses_of(found, row) for row in range(len(rows))]


_overgenerate = jax.jit(
    STRATEGIES["overgenerate"], static_argnames=("num_return", "end_id", "pad_id")
)


class TestOvergenerate:
    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_it_cuts_at_the_first_end_and_others(self, count):
        rows = [said(text) for text, *_ in SAID]
        outputs = overgenerated(rows, count)
        for found, logits, (text, written, status) in zip(
            outputs, rows, SAID, strict=True
        ):
            ours = oracle.overgenerate(oracle.log_softmax(logits), count)
            assert_alike(found, ours)
            assert (written, status) in [one[::2] for one in found]
            real = [one.tokens for one in found if one.status != Status.ABSENT]
            assert len({*real}) == len(real) == min(count, 6 + ("|" not in text))

    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_no_end_lies_behind_a_place_that_says_nothing(self, count):
        logits = said("34|563")
        logits[4], logits[0, END] = np.nan, -np.inf
        found, *_ = overgenerated([logits] * len(SAID), count)
        assert_alike(found, oracle.overgenerate(oracle.log_softmax(logits), count))
        assert found[0].tokens == (3, 4)
        real = [len(one.tokens) for one in found if one.status == Status.OK]
        assert {*real} <= {1, 2, 3}
        assert len(real) == min(count, 3)

    @pytest.mark.parametrize("end", [-1, 7])
    def test_an_end_that_is_no_symbol_is_refused(self, end):
        with pytest.raises(ValueError, match=f"^end_id must lie in 0..6, not {end}"):
            overgenerated([said("34|")], 1, end_id=end)
