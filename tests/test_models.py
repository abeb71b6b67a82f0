"""Whole models: order, padding, causality, decoding, sizes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY
from trees import named

from transformer_jax.config import ConfigError
from transformer_jax.models import Seq2Seq, build_model

B, S, T = 3, 5, 7
CONFIG = dataclasses.replace(TINY, encoder_layers=2, decoder_layers=2, dropout=0.1)
SMALL = {"encoder_layers": 1, "decoder_layers": 1}
# Every kind of positions, between them every other setting.
VARIANTS = {
    "plain": {},
    "post": {"norm_position": "post", "positions": "rotary", "scan_layers": True},
    "grouped": {
        "positions": "learned",
        "max_positions": 9,
        "kv_heads": 1,
        "head_width": 6,
        "decoder_layers": 1,
    },
    "gated": {
        "positions": "alibi",
        "activation": "swiglu",
        "norm": "rms",
        "tied_embeddings": "none",
    },
    "scanned": {
        "positions": "t5",
        "scan_layers": True,
        "remat": "dots",
        "kv_heads": 1,
    },
    "one_hot": {"positions": "one_hot", "max_positions": 9, **SMALL},
    "none": {"positions": "none", **SMALL},
    "sparse": {
        "encoder_attention": "local(1) | global_tokens(1); full()",
        "decoder_attention": "local(2)",
        "cross_attention": "~local(1)",
        "extra_global_tokens": 2,
        "positions": "rotary",
    },
    "sparse and scanned": {
        "encoder_attention": "local(1); strided(2)",
        "decoder_attention": "per_head((local(1), chunked(2))); local(2, dilation=2)",
        "cross_attention": "local(3)",
        "scan_layers": True,
        "positions": "alibi",
        "extra_global_tokens": 1,
    },
}
DRAW = np.random.default_rng(0)
SOURCE = jnp.asarray(DRAW.integers(3, 11, size=(B, S)), jnp.int32)
LENGTHS = jnp.array([5, 2, 4])
TARGET = jnp.asarray(DRAW.integers(3, 13, size=(B, T)), jnp.int32)


class Built(NamedTuple):
    """A model, parameters that are all away from zero and one, the full pass."""

    model: Seq2Seq
    variables: Any
    forward: Callable[..., jax.Array]


@functools.cache
def build(**settings):
    model = build_model(dataclasses.replace(CONFIG, **settings))
    init = functools.partial(model.init, jax.random.key(0))
    shapes = nn.unbox(jax.eval_shape(init, SOURCE, LENGTHS, TARGET))
    draw = np.random.default_rng(1)
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(0.35 * draw.normal(size=leaf.shape), leaf.dtype),
        shapes,
    )
    return Built(model, variables, jax.jit(model.apply))


@pytest.fixture(scope="module", params=VARIANTS)
def built(request):
    return build(**VARIANTS[request.param])


def test_token_by_token_equals_the_full_pass(built):
    """In step, and then each row one place further from a time of its own."""
    model, variables, forward = built
    full = forward(variables, SOURCE, LENGTHS, TARGET)
    rows, times = jnp.arange(B), jnp.array([4, 0, 6])

    @jax.jit
    def decode(variables):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")

        def step(cache, tokens):
            logits, after = model.apply(variables, tokens, cache, memory, method="step")
            return after, (logits, cache)

        _, (logits, caches) = jax.lax.scan(step, model.init_cache(B, T), TARGET.T)
        cache = jax.tree.map(lambda leaf: leaf[times, rows], caches)
        return logits.swapaxes(0, 1), step(cache, TARGET[rows, times])[1][0]

    in_step, apart = decode(variables)
    np.testing.assert_allclose(in_step, full, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(apart, full[rows, times], rtol=1e-4, atol=1e-5)


def test_later_targets_change_no_logits(built):
    _, variables, forward = built
    full = forward(variables, SOURCE, LENGTHS, TARGET)
    changed = forward(variables, SOURCE, LENGTHS, TARGET.at[:, 4:].set(3))
    np.testing.assert_allclose(changed[:, :4], full[:, :4], rtol=1e-5, atol=1e-6)
    assert np.abs(changed - full)[:, 4:].max() > 0.01


def test_caches_begin_with_the_batch(built):
    cache = built.model.init_cache(4, T)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {4}


def test_padding_and_batch_mates_change_nothing(built):
    _, variables, forward = built
    together = forward(variables, SOURCE, LENGTHS, TARGET)
    row, length = 1, int(LENGTHS[1])
    # Another bucket, other mates, garbage in the padding.
    source = jnp.full((2, S + 3), 9, jnp.int32).at[0, :length].set(SOURCE[row, :length])
    target = jnp.full((2, T + 2), 9, jnp.int32).at[0, :T].set(TARGET[row])
    apart = forward(variables, source, jnp.array([length, S + 3]), target)
    np.testing.assert_allclose(apart[0, :T], together[row], rtol=1e-4, atol=1e-5)


def test_layers_of_several_patterns_are_scanned_in_turn():
    """Two turns of two patterns equal four unrolled layers."""
    settings = {
        "encoder_attention": "local(1); full()",
        "decoder_attention": "local(1); strided(2)",
        "cross_attention": "full()",
        "encoder_layers": 4,
        "decoder_layers": 4,
    }
    model, variables, forward = build(**settings)
    *_, scanned = build(**settings, scan_layers=True)
    params = dict(variables["params"])
    for side in ("encoder", "decoder"):
        params[side] = dict(params[side])
        stack = params[side]["stack"]
        turn = {
            f"blocks_{n}": jax.tree.map(
                lambda *leaves: jnp.stack(leaves),
                *(stack[f"layers_{layer}"] for layer in (n, n + 2)),
            )
            for n in range(2)
        }
        params[side]["stack"] = {"layers": turn}
    np.testing.assert_allclose(
        scanned({"params": params}, SOURCE, LENGTHS, TARGET),
        forward(variables, SOURCE, LENGTHS, TARGET),
        rtol=1e-4,
        atol=1e-5,
    )
    assert len(model.init_cache(B, T)[1]) == 4


def test_turns_that_do_not_come_out_even_are_unrolled():
    config = dataclasses.replace(
        CONFIG,
        encoder_layers=3,
        decoder_layers=1,
        scan_layers=True,
        encoder_attention="local(1); full()",
    )
    shapes = jax.eval_shape(
        build_model(config).init, jax.random.key(0), SOURCE, LENGTHS, TARGET
    )
    stack = nn.meta.unbox(shapes)["params"]["encoder"]["stack"]
    assert sorted(stack) == ["layers_0", "layers_1", "layers_2"]


@pytest.mark.parametrize("causal", [False, True])
def test_extra_tokens_attend_all_unless_the_source_is_causal(causal):
    """What place 0 knows of the last source symbol comes through the extra token."""
    # No edges lead from place 0 to the last one.
    pattern = "local(0)" if causal else "chunked(2)"
    model, variables, _ = build(
        encoder_attention=pattern, extra_global_tokens=1, positions="none"
    )

    @jax.jit
    def encode(source):
        return model.apply(variables, source, jnp.full(B, S), method="encode")

    whole, other = map(np.asarray, (encode(SOURCE), encode(SOURCE.at[:, -1].set(3))))
    assert (np.abs(other - whole)[:, 0].max() > 1e-4) == (not causal)
    assert whole.shape[1] == S


@pytest.mark.parametrize("positions", ["rotary", "alibi", "t5"])
def test_scanned_layers_know_positions_as_unrolled_ones_do(positions):
    """Other kinds are added before the first layer."""
    settings = {"positions": positions, "decoder_layers": 1}
    _, variables, unrolled = build(**settings)
    *_, scanned = build(**settings, scan_layers=True)
    params = jax.tree.map(lambda leaf: leaf, variables["params"])
    for tower in ("encoder", "decoder"):
        layers = params[tower]["stack"]
        leaves = jax.tree.map(lambda *x: jnp.stack(x), *layers.values())
        params[tower]["stack"] = {"layers": leaves}
    np.testing.assert_allclose(
        scanned({"params": params}, SOURCE, LENGTHS, TARGET),
        unrolled(variables, SOURCE, LENGTHS, TARGET),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("positions", "tables"),
    [
        ("learned", {"source_frontend": S, "target_frontend": T}),
        ("one_hot", {"source_frontend": S, "target_frontend": T}),
        ("rotary", {}),
        # Distances -4 to 4, with two numbers for each; and 0 to 6 back.
        ("t5", {"encoder": 2 * S - 1, "decoder": T}),
    ],
)
def test_gradients_reach_every_parameter(positions, tables):
    model, variables, _ = build(positions=positions, max_positions=9, **SMALL)

    @jax.jit
    @jax.grad
    def gradient(variables):
        logits = model.apply(variables, SOURCE, LENGTHS, TARGET)
        return jax.nn.log_softmax(logits)[..., 3].sum()

    found = named(gradient(variables)["params"])
    reached = {}
    for name, leaf in found.items():
        assert leaf.any(), name
        if "position" in name:
            reached[name.split("/")[0]] = int(leaf.any(1).sum())
    assert reached == tables


def test_encoder_and_decoder_have_biases_of_their_own_directions():
    for positions in ("alibi", "t5"):
        model, variables, _ = build(positions=positions, **SMALL)
        bound = model.bind(variables)
        encoder, decoder = bound.encoder.bias(), bound.decoder.bias()
        if positions == "alibi":
            assert (encoder.ahead != encoder.slopes).all()
            assert decoder.ahead is None
        else:
            assert (encoder.bidirectional, decoder.bidirectional) == (True, False)
            assert encoder.table.shape == decoder.table.shape == (32, CONFIG.heads)


def test_encoding_then_predicting_is_the_whole():
    """With dropout as well: one key makes the same choices."""
    model, variables, _ = build(**SMALL)

    @jax.jit
    def both(variables, key):
        apply = functools.partial(model.apply, variables, rngs={"dropout": key})
        memory = apply(SOURCE, LENGTHS, method="encode")
        parts = apply(memory, LENGTHS, TARGET, method="predict")
        return parts, apply(SOURCE, LENGTHS, TARGET)

    parts, whole = both(variables, jax.random.key(3))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)


def test_beams_read_their_own_memory():
    """A row's beams are adjacent and read the memory of one source."""
    model, variables, _ = build(positions="rotary", **SMALL)

    @functools.partial(jax.jit, static_argnums=0)
    def step(beams):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")
        tokens = jnp.repeat(TARGET[:, 0], beams)
        cache = model.init_cache(beams * B, T)
        return model.apply(variables, tokens, cache, memory, method="step")[0]

    np.testing.assert_allclose(step(2), jnp.repeat(step(1), 2, axis=0), rtol=1e-5)


def test_logits_do_not_see_later_targets():
    """Through the inputs as embeddings: d logits[t] / d input[u] = 0 for u > t."""
    model, variables, _ = build(**SMALL)
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

    def encode(self, positions):
        """Each word's vector in the one sentence, and in the other."""
        model, variables, _ = build(positions=positions, **SMALL)
        sentences = (self.ONE, self.OTHER)
        ids = [[3 + self.WORDS.index(word) for word in words] for words in sentences]
        encode = jax.jit(functools.partial(model.apply, method="encode"))
        memories = encode(variables, jnp.array(ids), jnp.array([3, 3]))
        return (
            [memory[words.index(word)] for word in self.WORDS]
            for words, memory in zip(sentences, memories, strict=True)
        )

    def test_without_positions_the_encoder_is_permutation_equivariant(self):
        for one, other in zip(*self.encode("none"), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "t5"])
    def test_with_positions_it_is_not(self, positions):
        """Not even mirror images are alike, as they would be to distances alone."""
        for one, other in zip(*self.encode(positions), strict=True):
            assert np.abs(one - other).max() > 0.001


@pytest.mark.parametrize("name", ["post", "scanned"])
def test_bfloat16_computes_coarsely_and_keeps_float32_parameters(name):
    settings = VARIANTS[name]
    _, variables, forward = build(**settings)
    exact = forward(variables, SOURCE, LENGTHS, TARGET)
    coarse_model, _, coarse_forward = build(dtype="bfloat16", **settings)
    coarse = coarse_forward(variables, SOURCE, LENGTHS, TARGET)
    assert coarse.dtype == jnp.bfloat16
    np.testing.assert_allclose(coarse.astype(jnp.float32), exact, atol=0.1)
    init = functools.partial(coarse_model.init, jax.random.key(0))
    boxed = jax.eval_shape(init, SOURCE, LENGTHS, TARGET)
    assert {leaf.dtype for leaf in jax.tree.leaves(boxed)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["post", "grouped", "scanned", "one_hot"])
def test_bfloat16_steps_stay_bfloat16(name):
    model, variables, _ = build(dtype="bfloat16", **VARIANTS[name])

    def step(variables):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")
        cache = model.init_cache(B, T)
        return model.apply(variables, TARGET[:, 0], cache, memory, method="step")

    leaves = jax.tree.leaves(jax.eval_shape(step, variables))
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16", "int32"}


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
