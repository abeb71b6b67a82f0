"""Batches on the devices, all places at once: what a result does not depend on.

What a strategy finds in given logits is tested under its contract.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TINY, drawn

from transformer_jax.config import DecodeConfig, ParallelConfig
from transformer_jax.decoding import Status
from transformer_jax.models import build_model
from transformer_jax.objectives import OBJECTIVES
from transformer_jax.parallel_generation import ParallelGenerator, Rescorer
from transformer_jax.sharding import make_mesh, replicated

# The longest canvas of unknown length is cut by one place.
ROWS, LENGTH, PLACES = 8, 4, 7
FORBIDDEN = [7, 9]
# Strategy -> settings with several hypotheses and what constraints there are.
SETTINGS = {
    "parallel": {"length_beam": 3, "min_length": 2},
    "overgenerate": {"length_beam": 3, "min_length": 2},
    "mask_predict": {"length_beam": 3, "min_length": 2, "passes": 3},
    "ctc_greedy": {},
    "ctc_beam_search": {"beam_size": 4},
}
PARALLEL = [*SETTINGS]
CONFIG = dataclasses.replace(TINY, upsample=2, length_classes=8)


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, 2, 3


NEVER = [0, 1, 3, *FORBIDDEN]


def sources(rows, length=LENGTH, seed=1):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, LENGTH + 1, rows).astype(np.int32)
    ids = draw.integers(4, 11, (rows, LENGTH)).astype(np.int32)
    padding = ((0, 0), (0, length - LENGTH))
    return np.pad(ids, padding, constant_values=5), lengths


def objective_of(strategy):
    return next(name for name, row in OBJECTIVES.items() if strategy in row.strategies)


def model_of(strategy):
    """A model that can be decoded by a strategy, and its parameters."""
    return trained_for(objective_of(strategy))


@functools.cache
def trained_for(objective):
    model = build_model(CONFIG, objective)
    params = drawn(model, *sources(2), sources(2)[0], scale=0.7)
    # Biases make all places alike.
    return model, jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (path[-1].key != "bias"), params
    )


def generator(strategy, *, devices=1, nbest, **options):
    model, params = model_of(strategy)
    config = DecodeConfig(
        strategy=strategy, max_length=PLACES, **SETTINGS.get(strategy, {})
    )
    mesh = make_mesh(ParallelConfig(data=devices))
    variables = jax.device_put({"params": params}, replicated(mesh))
    parts = model, variables, config, Vocabulary, mesh
    return ParallelGenerator(*parts, nbest=nbest, forbidden=FORBIDDEN, **options)


@functools.cache
def decoded(strategy):
    """A generator, and what it finds in the usual sources."""
    made = generator(strategy, nbest=nbest_of(strategy), canvas_lengths=(3, 20))
    return made, made(*sources(ROWS), np.arange(ROWS))


def nbest_of(strategy):
    return 1 if strategy == "ctc_greedy" else 3


@functools.cache
def said_by(objective):
    """Compiled: parameters, sources, canvases -> encoded sources, logits."""
    model, _ = trained_for(objective)

    @jax.jit
    def forward(params, source, lengths, *canvas):
        several = len(canvas[0]) // ROWS
        encoded = model.apply({"params": params}, source, lengths, method="encode")
        repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, several, 0), encoded)
        given = repeated, *canvas
        return encoded, model.apply({"params": params}, *given, method="predict")

    return forward


def log_probs(strategy, tokens, places):
    """What the model says of canvases: `[rows, T, V]`, under the constraints."""
    _, params = model_of(strategy)
    forward, canvas = said_by(objective_of(strategy)), (tokens, places)
    encoded, logits = jax.device_get(forward(params, *sources(ROWS), *canvas))
    logits = logits.copy()
    logits[..., NEVER] = -np.inf
    if strategy == "overgenerate":
        logits[:, : SETTINGS[strategy]["min_length"], Vocabulary.end_id] = -np.inf
    else:
        logits[..., Vocabulary.end_id] = -np.inf
    return encoded, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("strategy", PARALLEL)
class TestEveryStrategy:
    def test_mates_buckets_and_devices_change_nothing(self, strategy):
        """Twice the rows in another order, a wider bucket, one canvas, 8 devices."""
        _, wanted = decoded(strategy)
        wide = generator(strategy, nbest=nbest_of(strategy), devices=8)
        (ids, lengths), (others, more) = sources(ROWS, 6), sources(ROWS, 6, seed=2)
        order = np.random.default_rng(0).permutation(2 * ROWS)
        source = np.concatenate([ids, others])[order]
        lengths = np.concatenate([lengths, more])[order]
        found = wide(source, lengths, np.arange(2 * ROWS))
        places = np.argsort(order)[:ROWS]
        count = min(found.tokens.shape[2], wanted.tokens.shape[2])
        assert not found.tokens[places, :, count:].any()
        np.testing.assert_array_equal(
            found.tokens[places, :, :count], wanted.tokens[:, :, :count]
        )
        np.testing.assert_array_equal(found.lengths[places], wanted.lengths)
        np.testing.assert_array_equal(found.status[places], wanted.status)
        np.testing.assert_allclose(
            found.scores[places], wanted.scores, rtol=1e-4, atol=1e-5
        )

    def test_outputs_keep_the_constraints(self, strategy):
        _, found = decoded(strategy)
        assert found.tokens.shape[:2] == (ROWS, nbest_of(strategy))
        assert found.tokens.shape[2] <= PLACES
        there = found.status != Status.ABSENT
        assert there[:, 0].all()
        assert there.mean() > 0.6
        inside = np.arange(found.tokens.shape[2]) < found.lengths[..., None]
        # Neither END nor an empty place nor a blank either.
        symbols = found.tokens[inside]
        assert not np.isin(symbols, [*NEVER, Vocabulary.end_id]).any()
        assert symbols.max() < CONFIG.target_vocab
        assert (found.tokens[~inside] == Vocabulary.pad_id).all()
        if "min_length" in SETTINGS[strategy]:
            ended = there & (found.status != Status.UNFINISHED)
            assert found.lengths[ended].min() == 2
        assert len({tuple(row) for row in found.tokens[:, 0].tolist()}) > ROWS // 2

    def test_the_best_come_first_and_few_are_the_first_of_many(
        self, strategy, monkeypatch
    ):
        made, found = decoded(strategy)
        monkeypatch.setattr(made, "_nbest", 1)
        few = made(*sources(ROWS), np.arange(ROWS))
        for field, whole in zip(few, found, strict=True):
            np.testing.assert_array_equal(field, whole[:, :1])
        late = (found.status == Status.UNFINISHED) | (found.status == Status.ABSENT)
        assert (np.diff(late.astype(int), axis=1) >= 0).all()
        for scores, after in zip(found.scores, late, strict=True):
            assert (np.diff(scores[~after]) <= 0).all()
        # Nothing was compiled anew. Lengths are told before canvases are filled.
        told = strategy in ("parallel", "mask_predict")
        assert made.executables.compilations == 1 + told


def test_batches_have_few_sizes():
    made = generator("parallel", nbest=1, devices=3)
    assert [made.rows(wanted) for wanted in (1, 9, 500)] == [9, 18, 258]


def test_canvases_have_few_sizes():
    """Those given, as far as they are below the longest output."""
    assert decoded("parallel")[0]._sizes == (3, PLACES)
    assert generator("parallel", nbest=1)._sizes == (PLACES,)


# --- Scores ----------------------------------------------------------------------


def test_parallel_scores_are_those_of_the_length_and_the_symbols():
    _, found = decoded("parallel")
    places = found.lengths.reshape(-1)
    tokens = found.tokens.reshape(len(places), -1)
    empty = np.full(tokens.shape, model_of("parallel")[0].mask_id)
    encoded, said = log_probs("parallel", empty, places)
    _, lengths = sources(ROWS)
    classes = lengths[:, None] + np.arange(8) - 4
    legal = (classes >= 2) & (classes <= PLACES)
    logits = np.where(legal, encoded.length_logits, -np.inf)
    of_lengths = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for number, (symbols, length) in enumerate(zip(tokens, places, strict=True)):
        row, place = divmod(number, 3)
        if found.status[row, place] == Status.ABSENT:
            continue
        score = said[number, range(length), symbols[:length]].sum()
        score += of_lengths[row, classes[row] == length].item()
        np.testing.assert_allclose(found.scores[row, place], score, rtol=1e-4)
        assert (said[number, :length].argmax(1) == symbols[:length]).all()
    # The candidates are the most probable lengths.
    best = np.sort(of_lengths, axis=1)[:, :-4:-1]
    for row, tried in enumerate(found.lengths):
        mine = [of_lengths[row, classes[row] == length].item() for length in tried]
        np.testing.assert_allclose(np.sort(mine)[::-1], best[row], rtol=1e-5)


def test_overgenerate_scores_are_those_of_the_symbols_and_of_the_end():
    _, found = decoded("overgenerate")
    _, lengths = sources(ROWS)
    empty = np.full((ROWS, 2 * LENGTH), model_of("overgenerate")[0].mask_id)
    _, said = log_probs("overgenerate", empty, 2 * lengths)
    statuses = set()
    for row, place in np.ndindex(found.scores.shape):
        status, length = found.status[row, place], found.lengths[row, place]
        statuses.add(status)
        if status == Status.ABSENT:
            continue
        symbols = found.tokens[row, place, :length]
        score = said[row, range(length), symbols].sum()
        if status == Status.UNFINISHED:
            assert length == min(2 * lengths[row], PLACES)
        else:
            score += said[row, length, Vocabulary.end_id]
        np.testing.assert_allclose(found.scores[row, place], score, rtol=1e-4)
    assert statuses == {Status.OK, Status.UNFINISHED, Status.ABSENT}
    for row, length in enumerate(lengths):
        best = said[row, : min(2 * length, PLACES)].argmax(1)
        endless = (best != Vocabulary.end_id).all()
        assert endless == (Status.UNFINISHED in found.status[row])


@pytest.mark.parametrize("strategy", ["ctc_greedy", "ctc_beam_search"])
def test_ctc_scores_are_the_likelihood_of_the_output(strategy):
    """Against optax."""
    _, found = decoded(strategy)
    _, lengths = sources(ROWS)
    model, several = model_of(strategy)[0], nbest_of(strategy)
    empty = np.full((ROWS, 2 * LENGTH), model.mask_id)
    _, said = log_probs(strategy, empty, 2 * lengths)
    size = found.tokens.shape[2]
    places = found.lengths.reshape(-1, 1)
    slots = 2 * np.repeat(lengths, several)[:, None]
    wanted = -jax.jit(functools.partial(optax.ctc_loss, blank_id=model.blank_id))(
        np.maximum(np.repeat(said, several, axis=0), -1e5),
        np.float32(np.arange(2 * LENGTH) >= slots),
        found.tokens.reshape(-1, size),
        np.float32(np.arange(size) >= places),
    )
    there = found.status.reshape(-1) != Status.ABSENT
    assert there.sum() > ROWS // 2
    scores = found.scores.reshape(-1)
    np.testing.assert_allclose(scores[there], wanted[there], rtol=1e-4, atol=1e-4)


# --- Another model chooses -------------------------------------------------------


def test_another_model_chooses_among_the_candidates(monkeypatch):
    """By its own log-probability, END included, of what it can say."""
    made, plain = decoded("parallel")
    other = build_model(CONFIG)
    params = drawn(other, *sources(2), sources(2)[0], scale=0.5, seed=4)
    variables = {"params": params}
    monkeypatch.setattr(made, "rescorer", Rescorer(other, variables, Vocabulary))
    found = made(*sources(ROWS), np.arange(ROWS))
    ids, lengths = (np.repeat(array, 3, axis=0) for array in sources(ROWS))
    tokens = found.tokens.reshape(3 * ROWS, -1)
    inputs = np.pad(tokens, ((0, 0), (1, 0)), constant_values=Vocabulary.bos_id)
    logits = np.array(jax.jit(other.apply)(variables, ids, lengths, inputs))
    logits[..., [0, 1, 3]] = -np.inf
    said = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for number, symbols in enumerate(tokens):
        row, place = divmod(number, 3)
        length = found.lengths[row, place]
        written = [*symbols[:length], Vocabulary.end_id]
        score = said[number, range(length + 1), written].sum()
        np.testing.assert_allclose(found.scores[row, place], score, rtol=1e-4)
        assert found.status[row, place] == Status.OK
    assert (np.diff(found.scores, axis=1) <= 0).all()
    # The same candidates, in another order.
    ours, theirs = (
        [{tuple(tokens) for tokens in row} for row in each.tokens.tolist()]
        for each in (found, plain)
    )
    assert ours == theirs
    assert (found.tokens[:, 0] != plain.tokens[:, 0]).any()
