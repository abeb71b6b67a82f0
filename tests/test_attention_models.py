"""Models with every kind of attention: decoding, padding, gradients, what is kept."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from tiny import TINY, drawn
from trees import bits, named

from transformer_jax.attention import ATTENTION, parse_layers
from transformer_jax.checkpoints import Checkpoints
from transformer_jax.config import ParallelConfig, TrainConfig
from transformer_jax.data import Bucket
from transformer_jax.models import build_model
from transformer_jax.objectives import training_loss
from transformer_jax.optimizers import make_optimizer
from transformer_jax.sharding import MESH_AXES, batch_sharding, make_mesh
from transformer_jax.training import (
    TrainState,
    abstract_state,
    abstract_variables,
    compile_train_steps,
    init_state,
    make_train_step,
)
from transformer_jax.types import KEPT, Batch, variables_of

B, S, T = 3, 5, 7
CONFIG = dataclasses.replace(TINY, positions="rotary", max_positions=9)
# Encoder, decoder, cross-attention, other settings; every kind wherever it can be.
CASES = {
    "linear": (
        "linear()",
        "linear(feature_map=softplus, chunk_size=3)",
        "linear()",
        {"kv_heads": 1},
    ),
    "favor": (
        "sinkhorn(block_size=2)",
        "favor(features=6, chunk_size=2, redraw=2)",
        "favor(features=4, feature_map=relu, redraw=0)",
        {"positions": "sinusoidal"},
    ),
    "compressed": (
        "linformer(rank=3)",
        "compressed(stride=2)",
        "compressed(stride=2, width=3)",
        {"kv_heads": 1, "remat": "full"},
    ),
    "lsh": (
        "lsh(rounds=1, buckets=4, chunk_size=2)",
        "lsh(rounds=2, buckets=2, chunk_size=3)",
        "linformer(rank=2, share=none)",
        {"positions": "learned"},
    ),
    "routing": (
        "routing(clusters=2)",
        "routing(clusters=3)",
        "linformer(rank=2, share=kv)",
        {"remat": "full"},
    ),
    "synthesizer": (
        "synthesizer(); synthesizer(variant=factorized, rank=2); "
        "synthesizer(variant=random); synthesizer(variant=fixed)",
        "local(3)",
        "full()",
        {"encoder_layers": 4},
    ),
    "mixed": (
        "linformer(rank=3, share=layer); routing(clusters=2)",
        "linear(); favor(features=4, redraw=1)",
        "linformer(rank=2, share=layer)",
        {"encoder_layers": 4, "decoder_layers": 4, "scan_layers": True},
    ),
}
DRAW = np.random.default_rng(0)
SOURCE = jnp.asarray(DRAW.integers(3, 11, size=(B, S)), jnp.int32)
LENGTHS = jnp.array([5, 2, 4])
TARGET = jnp.asarray(DRAW.integers(3, 13, size=(B, T)), jnp.int32)


class Vocabulary:
    pad_id, bos_id, end_id = 0, 1, 2


@functools.cache
def build(name):
    """A model, its full pass, and variables that are all away from zero and one."""
    encoder, decoder, cross, settings = CASES[name]
    config = dataclasses.replace(
        CONFIG,
        encoder_attention=encoder,
        decoder_attention=decoder,
        cross_attention=cross,
        **settings,
    )
    model = build_model(config)
    init = functools.partial(model.init, jax.random.key(0))
    shapes = nn.unbox(jax.eval_shape(init, SOURCE, LENGTHS, TARGET))
    draw = np.random.default_rng(1)

    def value(path, leaf):
        if path[-1].key == "age":
            return jnp.zeros(leaf.shape, leaf.dtype)
        values = 0.35 * draw.normal(size=leaf.shape)
        if path[-1].key == "centroids":
            values /= np.linalg.norm(values, axis=-1, keepdims=True)
        return jnp.asarray(values, leaf.dtype)

    variables = jax.tree_util.tree_map_with_path(value, shapes)
    return model, variables, jax.jit(model.apply)


@pytest.mark.parametrize("name", CASES)
def test_variables_are_laid_out_over_any_mesh(name):
    """Each names its axes, and no two of them are cut by one axis of the mesh."""
    axes = (AxisType.Auto,) * len(MESH_AXES)
    mesh = jax.make_mesh((2, 1, 1, 1), MESH_AXES, axis_types=axes)
    model, variables, _ = build(name)
    abstract = abstract_variables(model, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(variables)
    for leaf in jax.tree.leaves(abstract.get(KEPT)):
        assert leaf.sharding.is_fully_replicated


CANVASES = {
    "linformer(rank=3)": "synthesizer()",
    "sinkhorn(block_size=2)": "synthesizer(variant=factorized)",
    "routing(clusters=2)": "routing(clusters=3)",
}


@pytest.mark.parametrize("decoder", CANVASES)
def test_canvases_are_read_from_both_sides(decoder):
    """Of another length than the source, whatever stands behind a row's places."""
    config = dataclasses.replace(
        CONFIG, decoder_attention=decoder, cross_attention=CANVASES[decoder]
    )
    model = build_model(config, "parallel")
    params = drawn(model, SOURCE, LENGTHS, TARGET)
    kept = nn.unbox(
        jax.eval_shape(model.init, jax.random.key(0), SOURCE, LENGTHS, TARGET)
    ).get(KEPT)
    kept = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape), kept
    )
    places = jnp.array([7, 4, 5])

    @jax.jit
    def predict(canvas):
        apply = functools.partial(model.apply, variables_of(params, kept))
        encoded = apply(SOURCE, LENGTHS, method="encode")
        return apply(encoded, canvas, places, method="predict")

    plain = predict(TARGET)
    behind = np.arange(T) >= places[:, None]
    other = predict(jnp.where(behind, 5, TARGET))
    np.testing.assert_allclose(other[~behind], plain[~behind], rtol=1e-4, atol=1e-5)
    later = predict(TARGET.at[:, 3].set(TARGET[:, 3] % 8 + 3))
    assert np.abs(later - plain)[:, 0].max() > 1e-3


def test_every_kind_is_in_a_model():
    kinds = {
        kind.kind
        for *texts, _ in CASES.values()
        for text in texts
        for kind in parse_layers(text)
    }
    assert kinds == ATTENTION.keys()


@pytest.mark.parametrize("name", CASES)
def test_token_by_token_equals_the_full_pass(name):
    """So no place sees a later one: a step knows nothing of them."""
    model, variables, forward = build(name)

    @jax.jit
    def decode(variables):
        memory = model.apply(variables, SOURCE, LENGTHS, method="read")

        def step(cache, tokens):
            logits, cache = model.apply(variables, tokens, cache, memory, method="step")
            return cache, logits

        logits = jax.lax.scan(step, model.init_cache(B, T), TARGET.T)[1]
        return logits.swapaxes(0, 1)

    full = forward(variables, SOURCE, LENGTHS, TARGET)
    np.testing.assert_allclose(decode(variables), full, rtol=1e-4, atol=1e-5)
    cache = jax.eval_shape(lambda: model.init_cache(B, T))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {B}


@pytest.mark.parametrize("name", CASES)
def test_neither_padding_nor_other_rows_change_a_row(name):
    _, variables, forward = build(name)
    behind = np.arange(S) >= np.array(LENGTHS)[:, None]
    source = jnp.where(behind, 3 + (SOURCE + 1) % 8, SOURCE)
    plain = forward(variables, SOURCE, LENGTHS, TARGET)
    padded = forward(variables, source, LENGTHS, TARGET)
    np.testing.assert_allclose(padded, plain, rtol=1e-5, atol=1e-6)
    others = source.at[0].set(4)
    found = forward(variables, others, LENGTHS.at[0].set(1), TARGET.at[0].set(5))
    np.testing.assert_allclose(found[1:], plain[1:], rtol=1e-5, atol=1e-6)
    assert np.abs(found[0] - plain[0]).max() > 0.01


# --- Training --------------------------------------------------------------------


def batch_of(rows=B, filler=0):
    weight = np.arange(rows + filler) < rows
    draw = np.random.default_rng(2)
    lengths = np.tile([[5, 2, 4], [6, 1, 3]], 3)[:, : len(weight)] * weight
    return Batch(
        source=draw.integers(3, 11, (9, S), np.int32)[: len(weight)],
        source_lengths=np.int32(lengths[0]),
        target=draw.integers(3, 13, (9, T), np.int32)[: len(weight)],
        target_lengths=np.int32(lengths[1]),
        weight=np.float32(weight),
        index=np.arange(len(weight), dtype=np.int32),
    )


@functools.cache
def compiled_gradient(name):
    """(params, kept, batch, seed) -> loss and what is kept, gradient."""
    loss = training_loss(build(name)[0], Vocabulary, TrainConfig())
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda *parts, seed=0: gradient(*parts, jax.random.key(seed), jnp.int32(0))


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_every_parameter_and_the_kept_moves_on(name):
    variables = build(name)[1]
    params, kept = variables["params"], variables.get(KEPT)
    gradient, batch = compiled_gradient(name), batch_of()
    (_, (_, once)), found = gradient(params, kept, batch)
    for path, leaf in named(found).items():
        assert np.isfinite(leaf).all(), path
        assert leaf.any(), path
    assert jax.tree.structure(once) == jax.tree.structure(kept)
    twice = gradient(params, once, batch, seed=1)[0][1][1]
    first, second = named(kept), named(twice)
    for path, leaf in named(once).items():
        changes = [not np.array_equal(x[path], leaf) for x in (first, second)]
        wanted = [True, True]
        if path.endswith("logits") or "cross_attention" in path:
            wanted = [False, False]
        elif path.endswith("projection") and name == "favor":
            wanted = [False, True]
        assert changes == wanted, path


def test_centroids_move_by_their_members_alone():
    """By at most a thousandth of the way; filler rows and padding are no members."""
    params, kept = (build("routing")[1][part] for part in ("params", KEPT))
    gradient = compiled_gradient("routing")
    batch, filled = batch_of(), batch_of(filler=3)
    behind = np.arange(T) >= batch.target_lengths[:, None]
    padded = batch._replace(target=np.where(behind, 7, batch.target))
    found, *others = (
        named(gradient(params, kept, each)[0][1][1]) for each in (batch, filled, padded)
    )
    for path, leaf in named(kept).items():
        assert 0 < np.abs(found[path] - leaf).max() < 2e-3
        for other in others:
            np.testing.assert_allclose(other[path], found[path], atol=1e-6)


def state_after(devices):
    """The state of the model with centroids after two steps on so many devices."""
    model = build("routing")[0]
    config = TrainConfig(learning_rate=0.01, warmup=1)
    mesh, optimizer = make_mesh(ParallelConfig(data=devices)), make_optimizer(config)
    abstract = abstract_state(model, optimizer, mesh)
    state = init_state(model, optimizer, abstract, 0)
    loss = training_loss(model, Vocabulary, config)
    step = make_train_step(loss, optimizer)
    bucket = Bucket(S, T, 8)
    step = compile_train_steps(step, state, [bucket], mesh)[bucket]
    batch = jax.device_put(batch_of(8), batch_sharding(mesh))
    for _ in range(2):
        state, _ = step(state, batch)
    return abstract, state


def test_the_kept_is_equal_on_all_devices_and_comes_back_bit_for_bit(tmp_path):
    abstract, state = state_after(4)
    for leaf in jax.tree.leaves(state.attention):
        assert len({bits(shard.data) for shard in leaf.addressable_shards}) == 1
    single = named(state_after(1)[1].attention)
    for path, leaf in named(state.attention).items():
        np.testing.assert_allclose(leaf, single[path], atol=1e-5, err_msg=path)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        restored = checkpoints.restore(abstract).state
    for one, other in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        assert bits(one) == bits(other)
    assert type(restored) is TrainState
    assert restored.variables == variables_of(restored.params, restored.attention)


def test_micro_batches_move_what_is_kept_one_after_the_other():
    """The second one sees the centroids that the first one has left."""
    model, variables, _ = build("routing")
    loss = training_loss(model, Vocabulary, TrainConfig())
    optimizer = make_optimizer(TrainConfig(learning_rate=0.0))
    params, kept = variables["params"], variables[KEPT]
    key = jax.random.key(3)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), key, None, kept)
    step = jax.jit(make_train_step(loss, optimizer, accumulation=2))
    batch = batch_of(8)
    found = named(step(state, batch)[0].attention)
    keys = jax.random.split(jax.random.fold_in(key, 0), 2)
    for number in range(2):
        half = jax.tree.map(lambda x, n=number: x[n::2], batch)
        kept = jax.jit(loss)(params, kept, half, keys[number], jnp.int32(0))[1][1]
    for path, leaf in named(kept).items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-6, atol=1e-7)
