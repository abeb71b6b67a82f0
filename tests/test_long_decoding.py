"""Decoding far beyond a window: a small cache, and the tokens of the full pass."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tiny import TINY

from transformer_jax.decoding import Status, beam_search, forbid, greedy
from transformer_jax.models import build_model

LENGTH, SOURCE, BOS, END = 2048, 4, 1, 2
WINDOW = 64
SCALE = 3.0


@functools.cache
def built():
    """A model with a window, weights that make outputs vary, and a source."""
    config = dataclasses.replace(
        TINY,
        decoder_attention=f"local({WINDOW})",
        decoder_layers=2,
        positions="sinusoidal",
        tied_embeddings="none",
    )
    model = build_model(config)
    source = jnp.arange(3, 3 + SOURCE)[None]
    lengths = jnp.array([SOURCE])
    params = nn.unbox(model.init(jax.random.key(0), source, lengths, source))
    # Larger than at the start of training: what is read must sway what is written.
    params = jax.tree.map(lambda leaf: SCALE * leaf if leaf.ndim > 1 else leaf, params)
    memory = model.apply(params, source, lengths, method="read")

    def step(tokens, cache):
        return model.apply(params, tokens, cache, memory, method="step")

    @jax.jit
    def log_probabilities(tokens):
        """Of a whole output at once, over all edges with a mask."""
        inputs = jnp.concatenate([jnp.array([BOS]), tokens[:-1]])[None]
        logits = model.apply(params, source, lengths, inputs)[0]
        return jax.nn.log_softmax(logits.at[:, END].set(-jnp.inf))

    return model, forbid(step, [END]), log_probabilities


SETTINGS = {"max_length": LENGTH, "end_id": END, "pad_id": 0}


def test_the_cache_does_not_know_the_length():
    model, *_ = built()
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(1, length)))
        for length in (LENGTH, 8 * LENGTH)
    ]
    assert sizes[0] == sizes[1]
    assert {
        leaf.shape[2]
        for leaf in jax.tree.leaves(model.init_cache(1, LENGTH))
        if leaf.ndim > 2
    } == {WINDOW + 1}


def test_greedy_takes_the_best_token_of_the_full_pass():
    model, step, log_probabilities = built()
    decode = jax.jit(functools.partial(greedy, step, **SETTINGS))
    found = decode(model.init_cache(1, LENGTH), jnp.array([BOS]))
    tokens = found.tokens[0, 0]
    assert int(found.lengths[0, 0]) == LENGTH
    assert len(np.unique(tokens[-300:])) > 3, "an output that is stuck proves little"
    wanted = log_probabilities(tokens)
    taken = np.take_along_axis(np.asarray(wanted), np.asarray(tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(taken, wanted.max(1), rtol=0, atol=1e-3)
    np.testing.assert_allclose(found.scores[0, 0], taken.sum(), rtol=1e-4)


def test_scores_of_a_beam_are_those_of_the_full_pass():
    model, step, log_probabilities = built()
    decode = jax.jit(
        functools.partial(beam_search, step, beam_size=2, num_return=2, **SETTINGS)
    )
    found = decode(model.init_cache(1, LENGTH), jnp.array([BOS]))
    assert (np.asarray(found.status) == Status.UNFINISHED).all()
    for tokens, score in zip(found.tokens[0], found.scores[0], strict=True):
        wanted = np.asarray(log_probabilities(tokens))
        total = np.take_along_axis(wanted, np.asarray(tokens)[:, None], 1).sum()
        np.testing.assert_allclose(score, total, rtol=1e-4)
