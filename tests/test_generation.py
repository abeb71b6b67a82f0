"""Batches on the devices: the step function, and rows that leave when they have ended.

What decoding promises of texts is tested through the commands.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from transformer_jax import generation
from transformer_jax.config import DecodeConfig, ParallelConfig
from transformer_jax.decoding import PIECES, Status
from transformer_jax.generation import Generator, make_step_fn
from transformer_jax.models import build_model
from transformer_jax.sharding import make_mesh, replicated

MODEL = build_model(TINY)
ROWS, LENGTH, PLACES = 32, 3, 13
SETTINGS = {
    "greedy": {},
    "sample": {"temperature": 0.5, "seed": 3},
    "beam_search": {"beam_size": 3},
}


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, 2, 3


def batch_of(rows):
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, LENGTH + 1, rows).astype(np.int32)
    return draw.integers(4, 11, (rows, LENGTH)).astype(np.int32), lengths


@pytest.fixture(scope="module")
def params():
    """Of a model that ends some outputs early and others late."""
    source, lengths = batch_of(2)
    params = nn.unbox(MODEL.init(jax.random.key(1), source, lengths, source)["params"])
    params = jax.tree.map(lambda leaf: leaf * 3, params)
    table = params["target_frontend"]["embedding"]
    table["embedding"] = table["embedding"].at[Vocabulary.end_id].multiply(3)
    return params


def generator(params, strategy, *, devices=1, nbest=1, forbidden=(), **settings):
    config = DecodeConfig(
        strategy=strategy,
        max_length=PLACES,
        **{**SETTINGS[strategy], **settings},
    )
    mesh = make_mesh(ParallelConfig(data=devices))
    variables = jax.device_put({"params": params}, replicated(mesh))
    return Generator(
        MODEL, variables, config, Vocabulary, mesh, nbest=nbest, forbidden=forbidden
    )


def test_steps_give_the_logits_of_the_model_without_symbols_that_are_no_output(params):
    source, lengths = batch_of(2)
    target = jnp.array([[1, 4, 5], [1, 12, 3]])
    variables = {"params": params}
    whole = np.array(MODEL.apply(variables, source, lengths, target))
    whole[..., [0, 1, 3]] = -np.inf
    memory = MODEL.apply(variables, source, lengths, method="read")
    step_fn = make_step_fn(MODEL, variables, memory, Vocabulary)
    cache = MODEL.init_cache(2, target.shape[1])
    for place in range(target.shape[1]):
        logits, cache = step_fn(target[:, place], cache)
        np.testing.assert_allclose(logits, whole[:, place], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", PIECES)
class TestEveryStrategyInPieces:
    def test_rows_that_leave_change_nothing(self, strategy, params, monkeypatch):
        batch = (*batch_of(ROWS), np.arange(ROWS, dtype=np.int32))
        nbest = 2 if strategy == "sample" else 1
        monkeypatch.setattr(Generator, "_pays", lambda *_: False)
        whole = generator(params, strategy, nbest=nbest, devices=8)
        wanted = whole(*batch)
        assert whole.executables.compilations == 2
        assert min(whole._lost.values()) > 0, "what larger batches cost is not counted"
        assert len({*np.asarray(wanted.lengths)[:, 0]}) > 3, "all end together"
        monkeypatch.setattr(Generator, "_pays", lambda *_: True)
        shrinking = generator(params, strategy, nbest=nbest, devices=8)
        found = shrinking(*batch)
        assert shrinking.executables.compilations > 2, "no row left"
        assert found.tokens.shape == (ROWS, nbest, PLACES)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4)
        for name in ("tokens", "lengths", "status"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))

    def test_constraints_reach_the_search(self, strategy, params):
        source, lengths = batch_of(8)
        made = generator(params, strategy, min_length=5, forbidden=[7, 9])
        found = made(source, lengths, np.arange(8, dtype=np.int32))
        assert not np.isin(found.tokens, [7, 9]).any()
        assert (found.lengths >= 5).all()
        assert made.rows(3) == 8


def test_draws_depend_on_seed_number_and_draw_alone(params):
    source, lengths = (np.repeat(array[:1], 8, axis=0) for array in batch_of(8))

    @functools.cache
    def made(nbest, seed):
        return generator(params, "sample", nbest=nbest, seed=seed, temperature=2.0)

    def drawn(numbers, nbest, seed=3):
        found = made(nbest, seed)(source, lengths, np.array(numbers, np.int32))
        return [
            {tuple(tokens.tolist()) for tokens in row} for row in np.asarray(found[0])
        ]

    three = drawn([0, 1, 2, 3, 4, 5, 6, 7], 3)
    assert drawn([7, 6, 5, 4, 3, 2, 1, 0], 3) == three[::-1]
    first = drawn([0, 1, 2, 3, 4, 5, 6, 7], 1)
    assert all(one < others for one, others in zip(first, three, strict=True))
    assert first != drawn([0, 1, 2, 3, 4, 5, 6, 7], 1, seed=4)
    assert len({min(row) for row in first}) > 4


def test_samples_of_a_source_come_best_first(params):
    source, lengths = batch_of(16)
    made = generator(params, "sample", nbest=5, temperature=2.0)
    found = made(source, lengths, np.arange(16, dtype=np.int32))
    late = found.status == Status.UNFINISHED
    assert late.any()
    assert not late.all()
    for scores, after in zip(found.scores, late, strict=True):
        assert (np.diff(after.astype(int)) >= 0).all()
        for kind in (scores[after], scores[~after]):
            assert (np.diff(kind) <= 0).all()


def test_a_smaller_shape_is_compiled_once_its_lack_has_cost_as_much(params):
    made = generator(params, "greedy")
    made.executables.compilations, made.executables.compile_seconds = 4, 6.0
    made._lost[32, 8, LENGTH] = 2.9
    assert not made._pays(32, 8, LENGTH)
    made._lost[32, 8, LENGTH] += 0.2
    assert made._pays(32, 8, LENGTH)
    assert not made._pays(16, 8, LENGTH)
    assert not made._pays(32, 8, LENGTH + 1)


def test_unfinished_rows_at_the_last_step_have_nowhere_to_go(params, monkeypatch):
    batch = (*batch_of(ROWS), np.arange(ROWS, dtype=np.int32))
    wanted = generator(params, "greedy")(*batch)
    assert 0 < (wanted.status == Status.UNFINISHED).sum() <= 8
    monkeypatch.setattr(generation, "SEGMENT", PLACES)
    monkeypatch.setattr(Generator, "_pays", lambda *_: True)
    for mine, ours in zip(generator(params, "greedy")(*batch), wanted, strict=True):
        np.testing.assert_allclose(mine, ours, rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "most", "wanted", "rows"),
    [
        *((1, 100, 1, 8), (1, 100, 9, 16), (1, 100, 100, 100), (1, 100, 500, 100)),
        *((3, 100, 8, 9), (8, 100, 60, 64), (8, 100, 100, 104)),
        *((1, 5, 1, 5), (1, 1, 7, 1), (8, 1, 1, 8)),
    ],
)
def test_batches_have_few_sizes(params, devices, most, wanted, rows):
    made = generator(params, "greedy", devices=devices, rows=most)
    assert made.rows(wanted) == rows
