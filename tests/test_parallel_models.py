"""Models that write all places at once: padding, directions, what empty places read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, drawn
from trees import named

from transformer_jax.models import build_model
from transformer_jax.parallel_models import ParallelSeq2Seq

B, S, T = 3, 5, 7
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
# What empty places read, what tells the length, and between them other settings.
VARIANTS = {
    "mask": {"decoder_inputs": "mask", "length_from": "pooled"},
    "uniform": {
        "decoder_inputs": "uniform_copy",
        "length_from": "token",
        "positions": "rotary",
        "scan_layers": True,
        **LAYERS,
    },
    "soft": {
        "decoder_inputs": "soft_copy",
        "length_from": "pooled",
        "length_target": "absolute",
        "positions": "learned",
        "max_positions": 9,
        "tied_embeddings": "none",
        "norm_position": "post",
    },
    "sparse": {
        "decoder_inputs": "soft_copy",
        "length_from": "token",
        "extra_global_tokens": 1,
        "encoder_attention": "local(2)",
        "decoder_attention": "local(2)",
        "cross_attention": "local(2)",
        "positions": "t5",
    },
    "slots": {
        "objective": "ctc",
        "decoder_inputs": "uniform_copy",
        "positions": "alibi",
        "scan_layers": True,
        "decoder_attention": "local(1); full()",
        **LAYERS,
    },
}
DRAW = np.random.default_rng(0)
SOURCE = DRAW.integers(3, 11, size=(B, S), dtype=np.int32)
LENGTHS = np.array([5, 2, 4], np.int32)
TOKENS = DRAW.integers(3, 13, size=(B, T), dtype=np.int32)
EMPTY = np.arange(T) % 3 == 1
PLACES = np.array([7, 3, 5], np.int32)
INSIDE = np.arange(T) < PLACES[:, None]


class Built(NamedTuple):
    """A model, its parameters, and what it says of a source and a canvas."""

    model: ParallelSeq2Seq
    params: Any
    # (parameters, source, lengths, tokens, places) -> encoded, logits
    forward: Callable[..., Any]

    @property
    def canvas(self):
        """Tokens with some empty places."""
        return np.where(EMPTY, np.int32(self.model.mask_id), TOKENS)

    def said(self, params=None, source=SOURCE, lengths=LENGTHS, canvas=None):
        """Encoded source and logits, of the usual batch if nothing else is given."""
        canvas = self.canvas if canvas is None else canvas
        params = self.params if params is None else params
        # As NumPy's: every slice of a JAX array is a program of its own.
        return jax.device_get(self.forward(params, source, lengths, canvas, PLACES))


@functools.cache
def build(objective="parallel", **settings):
    model = build_model(dataclasses.replace(TINY, **settings), objective)

    def forward(params, source, lengths, tokens, places):
        apply = functools.partial(model.apply, {"params": params})
        encoded = apply(source, lengths, method="encode")
        return encoded, apply(encoded, tokens, places, method="predict")

    return Built(model, drawn(model, SOURCE, LENGTHS, TOKENS), jax.jit(forward))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def built(variant):
    return build(**VARIANTS[variant])


def assert_same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["uniform", "sparse"])
def test_buckets_and_batch_mates_change_nothing(name):
    """Another bucket of source and canvas, other mates, garbage behind the ends."""
    built = build(**VARIANTS[name])
    encoded, logits = built.said()
    row, length, places = 1, int(LENGTHS[1]), int(PLACES[1])
    source = np.full((2, S + 3), 9, np.int32)
    source[0, :length] = SOURCE[row, :length]
    canvas = np.full((2, T + 2), 8, np.int32)
    canvas[0, :places] = built.canvas[row, :places]
    lengths, ends = np.array([[length, S + 3], [places, T + 2]], np.int32)
    apart, others = jax.device_get(
        built.forward(built.params, source, lengths, canvas, ends)
    )
    assert_same(others[0, :places], logits[row, :places])
    assert_same(apart.memory[0, :length], encoded.memory[row, :length])
    assert_same(apart.length_logits[0], encoded.length_logits[row])


@pytest.mark.parametrize("symbol", [9, "mask"])
def test_padding_changes_nothing(built, symbol):
    """Not even places behind the end that seem to be empty ones."""
    encoded, logits = built.said()
    read = np.arange(S) < LENGTHS[:, None]
    garbage = built.model.mask_id if symbol == "mask" else symbol
    others, found = built.said(
        source=np.where(read, SOURCE, np.int32(9)),
        canvas=np.where(INSIDE, built.canvas, np.int32(garbage)),
    )
    assert_same(found[INSIDE], logits[INSIDE])
    assert_same(others.memory[read], encoded.memory[read])
    if encoded.length_logits is not None:
        assert_same(others.length_logits, encoded.length_logits)


def test_nan_in_padding_is_not_heard(built):
    """An embedding of PAD that is no number, on both sides."""
    source = np.where(np.arange(S) < LENGTHS[:, None], SOURCE, 0)
    canvas = np.where(INSIDE, built.canvas, 0)
    (encoded, logits), (dirty, others) = (
        built.said(with_row(built.params, 0, value), source, canvas=canvas)
        for value in (1.0, np.nan)
    )
    # With tied embeddings PAD's own logit is none.
    assert_same(others[INSIDE][:, 1:], logits[INSIDE][:, 1:])
    assert np.isfinite(logits[INSIDE]).all()
    if encoded.length_logits is not None:
        assert_same(dirty.length_logits, encoded.length_logits)


def with_row(params, row, value):
    """Parameters with one symbol's embedding changed, on both sides."""
    params = dict(params)
    for side in ("source_frontend", "target_frontend"):
        table = params[side]["embedding"]["embedding"].at[row].set(value)
        params[side] = {**params[side], "embedding": {"embedding": table}}
    return params


def test_a_place_reads_both_sides_of_itself(built, variant):
    """As far as the pattern says: the neighbours, or all places of the canvas."""
    _, logits = built.said()
    place = 3
    canvas = built.canvas.copy()
    canvas[:, place] = canvas[:, place] % 9 + 4
    assert not EMPTY[place]
    change = np.abs(built.said(canvas=canvas)[1] - logits).max(-1)
    near = np.abs(np.arange(T) - place) <= 2 if variant == "sparse" else True
    # Of row 1 the place lies behind its end.
    read = INSIDE & near & (place < PLACES)[:, None]
    assert (change[read] > 1e-5).all()
    assert (change[INSIDE & ~read] < 1e-6).all()
    assert read[0, place - 1]
    assert read[0, place + 1]


def test_an_empty_place_reads_its_own_vector_or_the_source(built, variant):
    params = with_row(built.params, built.model.mask_id, 5.0)
    change = np.abs(built.said(params)[1] - built.said()[1])[INSIDE].max()
    assert (change > 0.01) == (variant == "mask")
    assert change == 0 or variant == "mask"


def test_sizes_and_names_of_symbols(built, variant):
    encoded, logits = built.said()
    outputs = 13 + (variant == "slots")
    assert logits.shape == (B, T, outputs)
    assert built.model.mask_id == outputs
    tables = named(built.params["target_frontend"])
    assert tables["embedding/embedding"].shape[0] == outputs + 1
    if variant == "slots":
        assert built.model.blank_id == 13
        assert encoded.length_logits is None
    else:
        assert encoded.length_logits.shape == (B, TINY.length_classes)
    assert {len(leaf) for leaf in jax.tree.leaves(encoded)} == {B}
    settings = {"extra_global_tokens": 0, "length_from": "pooled"} | VARIANTS[variant]
    extra = settings["extra_global_tokens"] + (settings["length_from"] == "token")
    assert ("extra_tokens" in built.params["encoder"]) == (extra > 0)
    if extra:
        assert len(built.params["encoder"]["extra_tokens"]) == extra
    assert encoded.memory.shape == (B, S, TINY.width)


def test_pooled_lengths_are_told_by_the_mean_of_the_memory():
    built = build(**VARIANTS["mask"])
    encoded, _ = built.said()
    kernel = built.params["length_output"]["kernel"]
    for row, length in enumerate(LENGTHS):
        mean = np.asarray(encoded.memory)[row, :length].mean(0)
        assert_same(encoded.length_logits[row], mean @ kernel)


def test_other_lengths_are_told_by_the_first_extra_token():
    built = build(**VARIANTS["sparse"])

    @jax.jit
    def first(params):
        def read(model):
            features = model.source_frontend(SOURCE)
            return model.encoder.with_extra(features, LENGTHS)[0][:, 0]

        return built.model.apply({"params": params}, method=read)

    kernel = built.params["length_output"]["kernel"]
    assert_same(built.said()[0].length_logits, first(built.params) @ kernel)


def test_a_length_token_reads_the_whole_source():
    """Even where the symbols themselves see but their neighbours."""
    built = build(**VARIANTS["sparse"])
    encoded, _ = built.said()
    for place in range(S):
        source = SOURCE.copy()
        source[:, place] = source[:, place] % 7 + 4
        lengths = built.said(source=source)[0].length_logits
        change = np.abs(lengths - encoded.length_logits).max(-1)
        assert ((change > 1e-5) == (place < LENGTHS)).all()


def test_shown_symbols_are_read_as_they_are():
    """Only empty places copy: of a full canvas all kinds of inputs say the same."""
    settings = VARIANTS["mask"]
    mask, copies = (
        build(**settings),
        build(**settings | {"decoder_inputs": "soft_copy"}),
    )
    params = {**mask.params, "sharpness": jnp.float32(5.0)}
    full = mask.said(canvas=TOKENS)[1], copies.said(params, canvas=TOKENS)[1]
    assert_same(full[0][INSIDE], full[1][INSIDE])
    some = mask.said()[1], copies.said(params)[1]
    assert np.abs(some[0] - some[1])[INSIDE].max() > 0.01


def test_patterns_reach_as_far_as_they_say():
    """Through the encoder, then across."""
    built = build(
        decoder_inputs="mask",
        encoder_attention="local(1)",
        cross_attention="local(1)",
        decoder_attention="local(0)",
    )
    place = 2
    source = SOURCE.copy()
    source[0, place] = source[0, place] % 7 + 4
    change = np.abs(built.said(source=source)[1] - built.said()[1])[0].max(-1)
    near = np.abs(np.arange(T) - place) <= 2
    assert ((change > 1e-5) == near).all()


def test_gradients_reach_every_parameter():
    built = build(**VARIANTS["sparse"])

    @jax.jit
    @jax.grad
    def gradient(params):
        encoded, logits = built.forward(params, SOURCE, LENGTHS, built.canvas, PLACES)
        return sum(jax.nn.log_softmax(x)[..., 3].sum() for x in (encoded[2], logits))

    found = jax.device_get(gradient(built.params))
    for name, leaf in named(found).items():
        assert leaf.any(), name
        assert np.isfinite(leaf).all(), name


def test_slots_follow_the_source():
    model = build_model(dataclasses.replace(TINY, upsample=3, extra_slots=2), "ctc")
    assert model.slots(4) == 14
    np.testing.assert_array_equal(model.slots(LENGTHS), [17, 8, 14])
