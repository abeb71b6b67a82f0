"""What decoding of slots with blanks promises beyond the contract of every strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_oracle import Found, hypotheses_of
from parallel_oracle import (
    BLANK,
    PAD,
    best_first,
    collapse,
    ctc_beam_search,
    log_softmax,
    outputs,
    status_of,
)
from test_parallel_decoding import assert_alike

from transformer_jax.ctc import ctc_log_likelihood
from transformer_jax.decoding import STRATEGIES, Status
from transformer_jax.decoding import collapse as collapse_slots

pytestmark = pytest.mark.usefixtures("strict")

ROWS, SLOTS = 5, 5
LENGTHS = [5, 3, 4, 2, 1]
# Prefixes of two symbols on five slots: more than are outputs, as repeats take slots.
ALL = 1 + 2 + 4 + 8 + 16 + 32
IDS = {"blank_id": BLANK, "pad_id": PAD}


@functools.cache
def decoder(strategy, **settings):
    return jax.jit(functools.partial(STRATEGIES[strategy], **IDS, **settings))


def random_logits(seed, *, impossible=0.0):
    """`[5, 5, 4]` without PAD; some symbols of a slot, but not all, never come."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(ROWS, SLOTS, 4)).astype(np.float32) * 2
    never = draw.random(logits.shape) < impossible
    keep = draw.integers(1, 4, (ROWS, SLOTS, 1))
    np.put_along_axis(never, keep, False, axis=-1)
    logits[never] = -np.inf
    logits[..., PAD] = -np.inf
    return logits


def decode(strategy, logits, *, max_length=SLOTS, **settings):
    decode = decoder(strategy, max_length=max_length, **settings)
    return decode(jnp.asarray(logits), jnp.array(LENGTHS, jnp.int32))


def test_a_thousand_random_paths_collapse_as_in_a_loop():
    draw = np.random.default_rng(1)
    slots = draw.integers(1, 4, (1000, 11)).astype(np.int32)
    lengths = draw.integers(0, 12, 1000).astype(np.int32)
    tokens, counts = collapse_slots(jnp.asarray(slots), jnp.asarray(lengths), **IDS)
    assert tokens.dtype == counts.dtype == jnp.int32
    for path, length, mine, count in zip(
        slots.tolist(), lengths, tokens.tolist(), counts.tolist(), strict=True
    ):
        wanted = collapse(path[:length])
        assert mine == [*wanted, *[PAD] * (11 - len(wanted))]
        assert count == len(wanted)


def test_greedy_collapses_the_best_path_and_tells_the_likelihood_of_the_output():
    statuses = set()
    for seed in range(6):
        logits = random_logits(seed, impossible=0.3)
        found = decode("ctc_greedy", logits, max_length=3)
        for row, length in enumerate(LENGTHS):
            (mine,) = hypotheses_of(found, row)
            log_probs = log_softmax(logits[row, :length])
            path = collapse(log_probs.argmax(1).tolist())
            assert mine.tokens == path[:3]
            likelihood = outputs(log_probs)[path[:3]]
            np.testing.assert_allclose(mine.score, likelihood, rtol=1e-5, atol=1e-6)
            cut = Status.UNFINISHED if len(path) > 3 else status_of(path)
            assert mine.status == cut
            statuses.add(mine.status)
    assert statuses == {Status.OK, Status.EMPTY, Status.UNFINISHED}


def test_greedy_marks_what_it_cuts():
    logits = np.full((ROWS, SLOTS, 4), -9, np.float32)
    logits[:, range(SLOTS), [2, 3, 2, 3, 3]] = 0
    found = decode("ctc_greedy", logits, max_length=3)
    cut = np.asarray(found.status)[:, 0] == Status.UNFINISHED
    assert cut.tolist() == [length > 3 for length in LENGTHS]
    assert hypotheses_of(found, 0)[0].tokens == (2, 3, 2)


@pytest.mark.parametrize("longest", [2, SLOTS])
@pytest.mark.parametrize("impossible", [0.0, 0.4])
def test_a_beam_of_all_prefixes_is_brute_force(longest, impossible):
    beam = {"beam_size": ALL, "num_return": ALL}
    for seed in range(3):
        logits = random_logits(seed, impossible=impossible)
        found = decode("ctc_beam_search", logits, max_length=longest, **beam)
        for row, length in enumerate(LENGTHS):
            wanted = brute_force(logits[row, :length], longest, ALL)
            assert_alike(hypotheses_of(found, row), wanted)


def brute_force(logits, longest, count):
    """The outputs that are short enough, best first."""
    entries = [
        Found(output, score, status_of(output))
        for output, score in outputs(log_softmax(logits)).items()
        if len(output) <= longest
    ]
    return best_first(entries, count)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_narrow_beam_is_that_of_a_loop_with_exact_scores(width):
    beam = {"beam_size": width, "num_return": width}
    for seed in range(5):
        logits = random_logits(seed, impossible=0.25 * (seed % 2))
        found = decode("ctc_beam_search", logits, max_length=3, **beam)
        for row, length in enumerate(LENGTHS):
            log_probs = log_softmax(logits[row, :length])
            mine = hypotheses_of(found, row)
            assert_alike(mine, ctc_beam_search(log_probs, width, width, 3))
            real = [one.tokens for one in mine if one.status != Status.ABSENT]
            assert len({*real}) == len(real)
            assert max(map(len, real)) <= 3


def test_scores_are_the_likelihoods_of_the_lattice():
    logits = jnp.asarray(random_logits(7))
    beam = {"beam_size": 5, "num_return": 5}
    found = decode("ctc_beam_search", logits, max_length=3, **beam)
    log_probs = jax.nn.log_softmax(logits)
    lengths = jnp.array(LENGTHS, jnp.int32)
    likelihood = jax.jit(functools.partial(ctc_log_likelihood, blank_id=BLANK))
    for place in range(5):
        written = found.tokens[:, place], found.lengths[:, place]
        scores = np.asarray(likelihood(log_probs, lengths, *written))
        real = np.asarray(found.status[:, place]) != Status.ABSENT
        assert real.sum() >= 2
        mine = np.asarray(found.scores[:, place])
        np.testing.assert_allclose(mine[real], scores[real], rtol=1e-5)


def test_a_prefix_that_died_comes_back_once():
    # The fourth slot leaves `3` alive, but not `3 2`; the fifth makes it from `3` anew.
    early = [[0, 1, 0, 0], [0, 0, 1, 2], [0, 1, 3, 2]]
    shares = np.array([*early, [0, 0, 0, 1], [0, 2, 5, 1]])
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(shares), (ROWS, SLOTS, 4)).astype(np.float32)
    beam = {"beam_size": ALL, "num_return": ALL}
    found = decode("ctc_beam_search", logits, **beam)
    mine = hypotheses_of(found, 0)
    assert (3, 2) in [one.tokens for one in mine]
    assert_alike(mine, brute_force(logits[0], SLOTS, ALL))


@pytest.mark.parametrize("strategy", ["ctc_greedy", "ctc_beam_search"])
def test_no_slots_give_an_empty_output(strategy):
    beam = {} if strategy == "ctc_greedy" else {"beam_size": 2, "num_return": 2}
    lengths = jnp.zeros(ROWS, jnp.int32)
    decode = decoder(strategy, max_length=3, **beam)
    found = decode(jnp.asarray(random_logits(3)), lengths)
    best, *others = hypotheses_of(found, 0)
    assert best == ((), 0.0, Status.EMPTY)
    assert all(other.status == Status.ABSENT for other in others)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blank_id": 4}, r"blank_id must lie in 0\.\.3, not 4"),
        ({"blank_id": -1}, r"blank_id must lie in 0\.\.3, not -1"),
        ({"num_return": 0}, "num_return must be an integer between 1 and beam_size 3"),
        ({"num_return": 4}, "num_return must be an integer between 1 and beam_size 3"),
    ],
)
def test_arguments_out_of_range_are_refused(settings, message):
    beam = {"beam_size": 3, "num_return": 2, "max_length": 2} | IDS | settings
    logits, lengths = jnp.zeros((1, 2, 4)), jnp.array([2])
    with pytest.raises(ValueError, match=message):
        STRATEGIES["ctc_beam_search"](logits, lengths, **beam)
    if "blank_id" in settings:
        greedy = {"max_length": 2} | IDS | settings
        with pytest.raises(ValueError, match=message):
            STRATEGIES["ctc_greedy"](logits, lengths, **greedy)
