"""Whole models: order, padding, causality, decoding, sizes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from transformer_jax.config import ConfigError
from transformer_jax.models import build_model

B, S, T = 3, 5, 7
CONFIG = dataclasses.replace(TINY, encoder_layers=2, decoder_layers=2, dropout=0.1)
VARIANTS = {
    "plain": {},
    "post": {"norm_position": "post", "scan_layers": True},
    "grouped": {"kv_heads": 1, "head_width": 6, "decoder_layers": 1},
    "gated": {"activation": "swiglu", "norm": "rms", "tied_embeddings": "none"},
    "scanned": {"scan_layers": True, "remat": "dots", "kv_heads": 1},
}
DRAW = np.random.default_rng(0)
SOURCE = jnp.asarray(DRAW.integers(3, 11, size=(B, S)), jnp.int32)
LENGTHS = jnp.array([5, 2, 4])
TARGET = jnp.asarray(DRAW.integers(3, 13, size=(B, T)), jnp.int32)


@functools.cache
def build(**settings):
    """A model and parameters that are all away from zero and one."""
    model = build_model(dataclasses.replace(CONFIG, **settings))
    init = jax.jit(model.init)
    variables = nn.unbox(init(jax.random.key(0), SOURCE, LENGTHS, TARGET))
    leaves, tree = jax.tree.flatten(variables)
    draw = np.random.default_rng(1)
    leaves = [leaf + jnp.float32(0.1 * draw.normal(size=leaf.shape)) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)


@pytest.fixture(scope="module", params=VARIANTS)
def built(request):
    return build(**VARIANTS[request.param])


def test_token_by_token_equals_the_full_pass(built):
    model, variables = built
    full = jax.jit(model.apply)(variables, SOURCE, LENGTHS, TARGET)

    @jax.jit
    def decode(variables):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")

        def step(cache, tokens):
            logits, cache = model.apply(variables, tokens, cache, memory, method="step")
            return cache, logits

        _, logits = jax.lax.scan(step, model.init_cache(B, T), TARGET.T)
        return logits.swapaxes(0, 1)

    np.testing.assert_allclose(decode(variables), full, rtol=1e-4, atol=1e-5)


def test_caches_begin_with_the_batch(built):
    model, _ = built
    assert {leaf.shape[0] for leaf in jax.tree.leaves(model.init_cache(4, T))} == {4}


def test_padding_and_batch_mates_change_nothing(built):
    model, variables = built
    apply = jax.jit(model.apply)
    together = apply(variables, SOURCE, LENGTHS, TARGET)
    row, length = 1, int(LENGTHS[1])
    # Another bucket, other mates, garbage in the padding.
    source = jnp.full((2, S + 3), 9, jnp.int32).at[0, :length].set(SOURCE[row, :length])
    target = jnp.full((2, T + 2), 9, jnp.int32).at[0, :T].set(TARGET[row])
    apart = apply(variables, source, jnp.array([length, S + 3]), target)
    np.testing.assert_allclose(apart[0, :T], together[row], rtol=1e-4, atol=1e-5)


def test_beams_read_their_own_memory():
    """A row's beams are adjacent and read the memory of one source."""
    model, variables = build()

    @functools.partial(jax.jit, static_argnums=0)
    def step(beams):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")
        tokens = jnp.repeat(TARGET[:, 0], beams)
        cache = model.init_cache(beams * B, T)
        return model.apply(variables, tokens, cache, memory, method="step")[0]

    np.testing.assert_allclose(step(2), jnp.repeat(step(1), 2, axis=0), rtol=1e-5)


def test_logits_do_not_see_later_targets():
    """Through the inputs as embeddings: d logits[t] / d input[u] = 0 for u > t."""
    model, variables = build()
    source, lengths, target = SOURCE[:1], LENGTHS[:1], TARGET[:1]

    @jax.jit
    def jacobian(states):
        memory = model.apply(variables, source, lengths, method="encode")

        def total(states):
            bound = model.bind(variables)
            return bound.decoder(states, memory, lengths).sum((0, 2))

        return jax.jacrev(total)(states)

    seen = np.abs(jacobian(model.bind(variables).target_frontend(target))).sum((1, 3))
    assert not np.triu(seen, 1).any()
    assert np.diag(seen).all()
    assert np.tril(seen)[-1].all()


class TestWordOrder:
    """The lecture notes' example: who hit whom depends on positions alone."""

    WORDS = ("张三", "打了", "李四")
    ONE, OTHER = ("张三", "打了", "李四"), ("李四", "打了", "张三")

    def encode(self, positions, sentence):
        model, variables = build(positions=positions)
        ids = jnp.array([[3 + self.WORDS.index(word) for word in sentence]])
        encode = jax.jit(functools.partial(model.apply, method="encode"))
        memory = encode(variables, ids, jnp.array([3]))[0]
        return dict(zip(sentence, np.asarray(memory), strict=True))

    def test_without_positions_the_encoder_is_permutation_equivariant(self):
        one, other = (self.encode("none", s) for s in (self.ONE, self.OTHER))
        for word in self.WORDS:
            np.testing.assert_allclose(one[word], other[word], rtol=1e-4, atol=1e-5)

    def test_with_positions_it_is_not(self):
        one, other = (self.encode("sinusoidal", s) for s in (self.ONE, self.OTHER))
        for word in self.WORDS:
            assert np.abs(one[word] - other[word]).max() > 0.01


def test_bfloat16_computes_coarsely_and_keeps_float32_parameters():
    model, variables = build()
    exact = jax.jit(model.apply)(variables, SOURCE, LENGTHS, TARGET)
    coarse_model = build_model(dataclasses.replace(CONFIG, dtype="bfloat16"))
    coarse = jax.jit(coarse_model.apply)(variables, SOURCE, LENGTHS, TARGET)
    assert coarse.dtype == jnp.bfloat16
    np.testing.assert_allclose(coarse.astype(jnp.float32), exact, atol=0.1)
    init = functools.partial(coarse_model.init, jax.random.key(0))
    boxed = jax.eval_shape(init, SOURCE, LENGTHS, TARGET)
    assert {leaf.dtype for leaf in jax.tree.leaves(boxed)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("tied", "tables"), [("none", 3), ("target", 2), ("all", 1)])
def test_tied_embeddings_share_their_matrix(tied, tables):
    config = dataclasses.replace(CONFIG, source_vocab=13, tied_embeddings=tied)
    shapes = jax.eval_shape(
        build_model(config).init, jax.random.key(0), SOURCE, LENGTHS, TARGET
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    assert sizes.count(13 * 8) == tables


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_vocab": 0}, "source_vocab and model.target_vocab are unknown"),
        ({"tied_embeddings": "all"}, "source has 11 symbols and the target 13"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_model(dataclasses.replace(CONFIG, **settings))
