"""The contract of every decoding strategy that writes all places at once."""

import jax
import jax.numpy as jnp
import numpy as np
import parallel_oracle as oracle
import pytest
from decoding_oracle import hypotheses_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from parallel_oracle import BLANK, END, MASK, PAD, random_model

from transformer_jax.decoding import PIECES, STRATEGIES, Status

pytestmark = pytest.mark.usefixtures("strict")

SIZE = 6
# The second candidate of the fourth row fits no canvas.
LENGTHS = [
    *([4, 3, 5], [6, 1, 0], [1, 2, 6], [3, 12, 6]),
    *([5, 4, 2], [2, 6, 4], [6, 5, 4], [3, 2, 1]),
]
SETTINGS = {
    "parallel": {},
    "overgenerate": {"num_return": 3},
    "mask_predict": {"passes": 4},
    "ctc_greedy": {},
    "ctc_beam_search": {"beam_size": 4, "num_return": 3},
}
BY_LENGTH = ("parallel", "mask_predict")
# What the model of each can say, END and blank included, and what no output holds.
WORDS = {
    "parallel": (range(1, 7), [MASK]),
    "mask_predict": (range(1, 7), [MASK]),
    "overgenerate": (range(1, 7), [END]),
    # Few: all paths through the slots are walked, one by one.
    "ctc_greedy": ([BLANK, 3, 5], [BLANK]),
    "ctc_beam_search": ([BLANK, 3, 5], [BLANK]),
}


def model_of(strategy, seed, *, lengths=LENGTHS, dtype=jnp.float32):
    words = WORDS[strategy][0]
    return random_model(seed, lengths=lengths, words=words, dtype=dtype)


def decode(strategy, model, *, size=SIZE, poison=0.0, **more):
    """Decode all rows of a model on a canvas of `size` places, jitted."""
    settings = SETTINGS[strategy] | more
    return _jitted(strategy, size, tuple(settings.items()), model, poison)


def _decode(strategy, size, settings, model, poison):
    model = jax.tree.map(jnp.asarray, model)
    more = dict(settings) | {"pad_id": PAD}
    if strategy != "overgenerate":
        more = {"max_length": size} | more
    candidates = model.lengths.shape[1] if strategy in BY_LENGTH else 1
    # Eager decoding is of the strategy's own operations, not of the fake model's.
    predict = jax.jit(model.predict(candidates, poison))
    if strategy in BY_LENGTH:
        given = [predict, model.lengths]
        if strategy == "parallel":
            given.append(model.scores)
        return STRATEGIES[strategy](*given, mask_id=MASK, **more)
    places = model.lengths[:, 0]
    empty = jnp.full((len(places), size), MASK, jnp.int32)
    more["end_id" if strategy == "overgenerate" else "blank_id"] = (
        END if strategy == "overgenerate" else BLANK
    )
    return STRATEGIES[strategy](predict(empty, places), places, **more)


_jitted = jax.jit(_decode, static_argnums=(0, 1, 2))


def wanted(strategy, model, row, *, size=SIZE, **more):
    """What the plain loops find."""
    settings = SETTINGS[strategy] | more
    if strategy in BY_LENGTH:
        return getattr(oracle, strategy)(model, row, size, **settings)
    log_probs = model.log_probs(row, [MASK] * model.lengths[row, 0])
    if strategy == "overgenerate":
        return oracle.overgenerate(log_probs, settings["num_return"])
    longest = settings.get("max_length", size)
    if strategy == "ctc_greedy":
        return oracle.ctc_greedy(log_probs, longest)
    beam = settings["beam_size"], settings["num_return"]
    return oracle.ctc_beam_search(log_probs, *beam, longest)


def assert_equals_loops(strategy, model, **more):
    found = decode(strategy, model, **more)
    for row in range(len(model.lengths)):
        ours = wanted(strategy, model, row, **more)
        assert_alike(hypotheses_of(found, row), ours)
    return found


def assert_alike(found, others):
    for mine, ours in zip(found, others, strict=True):
        assert (mine.tokens, mine.status) == (ours.tokens, ours.status)
        np.testing.assert_allclose(mine.score, ours.score, rtol=1e-5, atol=1e-6)


def assert_same(found, others, rtol=0.0):
    for mine, ours in zip(found, others, strict=True):
        if mine.dtype == jnp.float32:
            np.testing.assert_allclose(mine, ours, rtol=rtol, atol=0)
        else:
            np.testing.assert_array_equal(mine, ours)


def rows_of(tree, rows):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree)


def test_every_strategy_is_under_a_contract():
    assert not PIECES.keys() & SETTINGS.keys()
    # A class is one symbol; tests/test_classifier.py has its contract.
    others = {"classify"}
    assert PIECES.keys() | SETTINGS.keys() | others == STRATEGIES.keys()


@pytest.mark.parametrize("strategy", SETTINGS)
class TestEveryStrategy:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_it_equals_plain_loops(self, strategy, dtype):
        for seed in range(2):
            assert_equals_loops(strategy, model_of(strategy, seed, dtype=dtype))

    def test_shapes_padding_and_order(self, strategy):
        found = decode(strategy, model_of(strategy, 1))
        rows, best, places = found.tokens.shape
        assert (rows, places) == (len(LENGTHS), SIZE)
        assert best == (1 if strategy == "ctc_greedy" else 3)
        assert found.lengths.shape == found.scores.shape == found.status.shape
        assert found.lengths.shape == (rows, best)
        kinds = [field.dtype for field in found]
        assert kinds == [jnp.int32, jnp.int32, jnp.float32, jnp.int32]
        behind = np.arange(places) >= np.asarray(found.lengths)[..., None]
        assert (np.asarray(found.tokens) == PAD)[behind].all()
        written = np.asarray(found.tokens)[~behind]
        assert not np.isin(written, [PAD, *WORDS[strategy][1]]).any()
        late = np.isin(found.status, [Status.UNFINISHED, Status.ABSENT])
        for scores, last in zip(np.asarray(found.scores), late, strict=True):
            assert (np.diff(last.astype(int)) >= 0).all()
            for part in (scores[~last], scores[last & (scores > -np.inf)]):
                assert (np.diff(part) <= 0).all()

    def test_rows_do_not_depend_on_their_mates(self, strategy):
        model = model_of(strategy, 4)
        together = decode(strategy, model)
        for rows in ([3], [4, 4, 2, 0, 1, 7, 3, 0]):
            alone = decode(strategy, rows_of(model, rows))
            assert_same(alone, rows_of(together, rows))

    @pytest.mark.parametrize("poison", [9.0, np.nan, np.inf, -np.inf])
    def test_what_is_said_behind_a_length_changes_nothing(self, strategy, poison):
        model = model_of(strategy, 5)
        assert_same(decode(strategy, model, poison=poison), decode(strategy, model))

    def test_a_larger_canvas_changes_nothing(self, strategy):
        model = model_of(strategy, 6)
        small, large = (decode(strategy, model, size=size) for size in (SIZE, 11))
        assert (np.asarray(large.tokens)[..., SIZE:] == PAD).all()
        large = large._replace(tokens=large.tokens[..., :SIZE])
        assert_same(small, large, rtol=1e-6)

    def test_results_are_those_of_eight_devices(self, strategy):
        model = model_of(strategy, 7)
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        spread = decode(strategy, jax.device_put(model, sharding))
        assert_same(spread, decode(strategy, model))

    def test_eager_is_jitted(self, strategy):
        model, settings = model_of(strategy, 8), SETTINGS[strategy]
        eager = _decode(strategy, SIZE, settings.items(), model, 0.0)
        assert_same(eager, decode(strategy, model), rtol=1e-6)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_row_without_a_finite_probability_is_infeasible(self, strategy, bad):
        model = model_of(strategy, 9, lengths=[[4, 3, 5]] * 8)
        logits = model.logits.copy()
        logits[1] = bad
        found = decode(strategy, model._replace(logits=logits))
        sound = decode(strategy, model)
        best, *others = hypotheses_of(found, 1)
        assert best == ((), -np.inf, Status.INFEASIBLE)
        assert all(other == ((), -np.inf, Status.ABSENT) for other in others)
        assert (np.asarray(found.tokens)[1] == PAD).all()
        neighbours = [0, 2, 3, 4, 5, 6, 7]
        assert_same(rows_of(found, neighbours), rows_of(sound, neighbours))
        assert (np.asarray(sound.status) == Status.OK).any(axis=1).all()

    def test_no_rows_give_no_hypotheses(self, strategy):
        model = model_of(strategy, 5)
        none = rows_of(model, [])
        settings = SETTINGS[strategy].items()
        shapes = [
            jax.eval_shape(
                lambda some: _decode(strategy, SIZE, settings, some, 0.0), some
            )
            for some in (none, model)
        ]
        for mine, ours in zip(*shapes, strict=True):
            assert mine.shape == (0, *ours.shape[1:])

    def test_one_place_is_enough(self, strategy):
        model = model_of(strategy, 10, lengths=[[1], [1], [1]])
        assert_equals_loops(strategy, model, size=1)

    @pytest.mark.parametrize("bad", [0, -1])
    def test_settings_that_count_begin_at_one(self, strategy, bad):
        names = {*SETTINGS[strategy], "max_length"} - {"num_return"}
        if strategy == "overgenerate":
            names = {"num_return"}
        for name in names:
            message = rf"^{name} must be an integer from 1 on, not {bad}"
            with pytest.raises(ValueError, match=message):
                decode(strategy, model_of(strategy, 5), **{name: bad})
