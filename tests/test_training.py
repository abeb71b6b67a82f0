"""The training step: what a token weighs on any devices and micro-batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from tiny import TINY
from trees import bits, named

from transformer_jax.checkpoints import Checkpoints
from transformer_jax.config import ParallelConfig, TrainConfig
from transformer_jax.data import Bucket
from transformer_jax.models import build_model
from transformer_jax.objectives import training_loss, validation_loss
from transformer_jax.optimizers import make_optimizer
from transformer_jax.sharding import MESH_AXES, batch_sharding, make_mesh
from transformer_jax.training import (
    abstract_state,
    compile_losses,
    compile_train_steps,
    init_state,
    make_train_step,
)
from transformer_jax.types import Batch

ROWS, LENGTH, STEPS = 16, 4, 5
BUCKET = Bucket(LENGTH, LENGTH, ROWS)
TRAIN = TrainConfig(learning_rate=0.01, warmup=2, schedule="constant")


class Vocabulary:
    pad_id, bos_id, end_id = 0, 1, 2


def model_of(dropout):
    config = dataclasses.replace(TINY, dropout=dropout, attention_dropout=dropout)
    return build_model(config)


def batch_of(seed, filler=3):
    draw = np.random.default_rng(seed)
    weight = np.arange(ROWS) < ROWS - filler
    lengths = draw.integers(1, LENGTH, size=(2, ROWS)) * weight
    ids = draw.integers(3, 11, size=(2, ROWS, LENGTH))
    return Batch(
        source=np.int32(ids[0]),
        source_lengths=np.int32(lengths[0]),
        target=np.int32(ids[1]),
        target_lengths=np.int32(lengths[1]),
        weight=np.float32(weight),
        index=np.arange(ROWS, dtype=np.int32),
    )


def loss_of(model, smoothing=0.1):
    config = dataclasses.replace(TRAIN, label_smoothing=smoothing)
    return training_loss(model, Vocabulary, config)


@functools.cache
def first_state(devices):
    """The state before training, to be copied: a compiled step donates what it gets."""
    mesh, optimizer = make_mesh(ParallelConfig(data=devices)), make_optimizer(TRAIN)
    model = model_of(0.0)
    return init_state(model, optimizer, abstract_state(model, optimizer, mesh), 0)


@functools.cache
def compiled_step(devices, dropout=0.1, accumulation=1):
    loss, optimizer = loss_of(model_of(dropout)), make_optimizer(TRAIN)
    step = make_train_step(loss, optimizer, accumulation=accumulation)
    mesh = make_mesh(ParallelConfig(data=devices))
    return compile_train_steps(step, first_state(devices), [BUCKET], mesh)[BUCKET]


def put(batch, devices):
    sharding = batch_sharding(make_mesh(ParallelConfig(data=devices)))
    return jax.device_put(batch, sharding)


def train(batches, devices, **settings):
    """Metrics of every step, and the last parameters, named."""
    state, values = jax.tree.map(jnp.copy, first_state(devices)), []
    for batch in batches:
        state, metrics = compiled_step(devices, **settings)(state, put(batch, devices))
        values.append([float(value) for value in metrics])
    assert int(state.step) == len(batches)
    return np.array(values), named(jax.device_get(state.params))


BATCHES = [batch_of(number) for number in range(STEPS)]


def test_eight_devices_train_as_one_does():
    one, params = train(BATCHES, 1)
    eight, others = train(BATCHES, 8)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    assert len({*one[:, 0]}) == STEPS
    for name, leaf in params.items():
        np.testing.assert_allclose(
            others[name], leaf, rtol=1e-3, atol=1e-5, err_msg=name
        )


def test_micro_batches_change_nothing_but_memory():
    whole, _ = train(BATCHES, 8, dropout=0.0)
    cut, _ = train(BATCHES, 8, dropout=0.0, accumulation=2)
    np.testing.assert_allclose(cut, whole, rtol=1e-4)


def test_gradient_is_the_mean_over_tokens():
    """Told by its norm: that of the gradient of the global mean."""
    loss, params = loss_of(model_of(0.0)), jax.device_get(first_state(8).params)

    def mean(params, batch):
        total, weight = loss(params, None, batch, None, None)
        return total / weight[0]

    @jax.jit
    def wanted(params, batch):
        value, gradient = jax.value_and_grad(mean)(params, batch)
        return value, optax.tree.norm(gradient)

    found, _ = train(BATCHES[:1], 8, dropout=0.0)
    value, norm = wanted(params, BATCHES[0])
    np.testing.assert_allclose(found[0, 2], norm, rtol=1e-4)
    np.testing.assert_allclose(found[0, 0] / found[0, 1], value, rtol=1e-5)


def test_filler_rows_alone_change_nothing():
    metrics, after = train([batch_of(0, filler=ROWS)], 8)
    assert not metrics.any()
    for name, leaf in named(jax.device_get(first_state(8).params)).items():
        np.testing.assert_array_equal(after[name], leaf, err_msg=name)


def test_another_shape_is_an_error_not_a_compilation():
    short = jax.tree.map(lambda x: x[: ROWS // 2], batch_of(0))
    with pytest.raises(TypeError, match="compiled"):
        train([short], 1)


def test_evaluation_has_neither_dropout_nor_smoothing():
    mesh = make_mesh(ParallelConfig())
    variables, batch = first_state(8).variables, batch_of(1)
    noisy = validation_loss(model_of(0.5), Vocabulary, TRAIN)
    compiled = compile_losses(noisy, variables, [BUCKET], mesh)[BUCKET]
    plain = jax.jit(loss_of(model_of(0.0), smoothing=0.0))
    params = jax.device_get(variables["params"])
    total, (weight, _) = plain(params, None, batch, None, None)
    np.testing.assert_allclose(
        compiled(variables, put(batch, 8)), (total, weight), rtol=1e-5
    )


def test_first_parameters_do_not_depend_on_the_devices():
    one, eight = (jax.device_get(first_state(n).params) for n in (1, 8))
    for name, leaf in named(one).items():
        np.testing.assert_array_equal(named(eight)[name], leaf, err_msg=name)


# --- The moving average ----------------------------------------------------------

# Below the decay that the warm-up has after three updates, 4 / 13.
DECAY = 0.3


@functools.cache
def averaging_step():
    """The update of `compiled_step(1)`, with a moving average, and its first state."""
    state = first_state(1)
    state = state._replace(ema=jax.tree.map(jnp.copy, state.params))
    loss, optimizer = loss_of(model_of(0.1)), make_optimizer(TRAIN)
    step = make_train_step(loss, optimizer, ema_decay=DECAY)
    mesh = make_mesh(ParallelConfig(data=1))
    return compile_train_steps(step, state, [BUCKET], mesh)[BUCKET], state


def test_moving_average_is_that_of_a_loop():
    step, first = averaging_step()
    state = jax.tree.map(jnp.copy, first)
    expected = {n: np.float64(x) for n, x in named(jax.device_get(first.ema)).items()}
    for count, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, put(batch, 1))
        decay = min(DECAY, (1 + count) / (10 + count))
        params = named(jax.device_get(state.params))
        for name, leaf in named(jax.device_get(state.ema)).items():
            expected[name] = decay * expected[name] + (1 - decay) * params[name]
            np.testing.assert_allclose(
                leaf, expected[name], rtol=1e-5, atol=1e-7, err_msg=f"{count} {name}"
            )
    assert max(abs(expected[name] - params[name]).max() for name in params) > 1e-3
    # Training itself does not notice.
    _, others = train(BATCHES, 1)
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, others[name], err_msg=name)


def test_no_moving_average_is_kept_unless_asked_for():
    model, optimizer = model_of(0.0), make_optimizer(TRAIN)
    mesh = make_mesh(ParallelConfig())
    for state in (abstract_state(model, optimizer, mesh), first_state(1)):
        assert jax.tree.leaves(state.ema) == []
    with_average = abstract_state(model, optimizer, mesh, ema=True)
    described = [
        {n: (x.shape, x.dtype, x.sharding) for n, x in named(tree).items()}
        for tree in (with_average.params, with_average.ema)
    ]
    assert described[0] == described[1]


# --- Adafactor -------------------------------------------------------------------


def adafactor_setup():
    """A model most of whose matrices are factored, and its first state."""
    sizes = {"source_vocab": 37, "target_vocab": 41, "width": 32, "heads": 1}
    config = dataclasses.replace(TINY, **sizes)
    train = dataclasses.replace(TRAIN, optimizer="adafactor", learning_rate=0.05)
    model, optimizer = build_model(config), make_optimizer(train)
    mesh = make_mesh(ParallelConfig(data=8))
    return model, optimizer, mesh, abstract_state(model, optimizer, mesh)


def test_adafactor_trains_and_is_saved_on_eight_devices(tmp_path):
    model, optimizer, mesh, abstract = adafactor_setup()
    state = init_state(model, optimizer, abstract, 0)
    step = make_train_step(loss_of(model), optimizer)
    step = compile_train_steps(step, state, [BUCKET], mesh)[BUCKET]
    batch = put(BATCHES[0], 8)
    losses = []
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
            if int(state.step) == 2:
                checkpoints.save(2, state, {})
    assert losses[-1] < 0.8 * losses[0]
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        resumed = checkpoints.restore(abstract).state
    for _ in range(STEPS - 2):
        resumed, _ = step(resumed, batch)
    for leaf, other in zip(
        jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True
    ):
        assert bits(leaf) == bits(other)


def test_adafactor_keeps_far_less_than_adam():
    model, _, mesh, abstract = adafactor_setup()
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
        for state in (abstract, abstract_state(model, make_optimizer(TRAIN), mesh))
    ]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    assert sizes[0] < parameters / 4
    assert sizes[1] > 2 * parameters


def test_smaller_state_than_the_parameter_is_on_every_device():
    """A mesh that splits parameters: the sums have other axes than those."""
    config = dataclasses.replace(TINY, source_vocab=40, target_vocab=48, width=64)
    train = dataclasses.replace(TRAIN, optimizer="adafactor")
    axes = (AxisType.Auto,) * len(MESH_AXES)
    mesh = jax.make_mesh((1, 4, 1, 2), MESH_AXES, axis_types=axes)
    optimizer = make_optimizer(train)
    state = abstract_state(build_model(config), optimizer, mesh)
    params = named(state.params)
    split = 0
    for name, leaf in named(state.opt_state).items():
        whose = [path for path in params if name.endswith(f"/{path}")]
        same = bool(whose) and leaf.shape == params[whose[0]].shape
        if same:
            assert leaf.sharding == params[whose[0]].sharding
            split += not leaf.sharding.is_fully_replicated
        else:
            assert leaf.sharding.is_fully_replicated, name
    assert split
