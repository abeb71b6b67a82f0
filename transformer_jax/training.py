"""The training step: state, gradient, one global division, compiled for each bucket."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from transformer_jax.data import Bucket
from transformer_jax.models import init_variables
from transformer_jax.objectives import TrainingLoss, ValidationLoss
from transformer_jax.sharding import batch_sharding, param_shardings, replicated
from transformer_jax.types import KEPT, Batch, PyTree, variables_of


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
        step: int32 [], updates made so far.
        params: the model's parameters.
        opt_state: the optimiser's state.
        key: the run's PRNG key; step t draws from fold_in(key, t).
        ema: moving average of the parameters, or None.
        attention: the collection KEPT, by its name, as checkpoints have it; equal on
            all devices, None if the model has none.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    key: jax.Array
    ema: PyTree = None
    attention: PyTree = None

    @property
    def variables(self) -> dict[str, PyTree]:
        """What the model is applied with."""
        return variables_of(self.params, self.attention)


class StepMetrics(NamedTuple):
    """Scalars of one update: loss summed over tokens, tokens, norm of the gradient."""

    loss: jax.Array
    tokens: jax.Array
    gradient_norm: jax.Array


def abstract_variables(model: nn.Module, mesh: Mesh) -> dict[str, PyTree]:
    """Return shapes, types and shardings of a model's variables."""
    boxed = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    whole = replicated(mesh)
    shardings = jax.tree.map(lambda _: whole, nn.unbox(boxed))
    shardings["params"] = param_shardings(mesh, boxed["params"])
    return _with_shardings(nn.unbox(boxed), shardings)


def abstract_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    ema: bool = False,
) -> TrainState:
    """Return shapes, types and shardings of a training state, with or without EMA.

    What the optimiser keeps for a parameter lies as the parameter does if it has the
    same shape; smaller things, such as Adafactor's sums, are on every device.
    """
    variables = abstract_variables(model, mesh)
    params = variables["params"]
    whole = replicated(mesh)
    opt_state = jax.eval_shape(optimizer.init, params)
    shardings = optax.tree.map_params(
        optimizer,
        lambda leaf, param: param.sharding if leaf.shape == param.shape else whole,
        opt_state,
        params,
        transform_non_params=lambda _: whole,
    )
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        params=params,
        opt_state=_with_shardings(opt_state, shardings),
        key=jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole),
        ema=params if ema else None,
        attention=variables.get(KEPT),
    )


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    variables: PyTree | None = None,
) -> TrainState:
    """Return the state before the first step, each array made where it belongs.

    Args:
        model: from `build_model`.
        optimizer: makes its state for the parameters.
        abstract: from `abstract_state`.
        seed: of the run's key, and of the initial variables.
        variables: the initial ones; None means drawn.
    """

    def init(variables: PyTree | None) -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(seed))
        if variables is None:
            variables = nn.unbox(init_variables(model, init_key))
        step, params = jnp.zeros((), jnp.int32), variables["params"]
        ema = None if abstract.ema is None else jax.tree.map(jnp.copy, params)
        opt_state, kept = optimizer.init(params), variables.get(KEPT)
        return TrainState(step, params, opt_state, run_key, ema, kept)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(variables)


def make_train_step(
    loss: TrainingLoss,
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    ema_decay: float = 0.0,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the update `(state, batch) -> (state, metrics)`.

    g = sum_r d loss_sum(r) / d params / sum_r weight(r), over all rows r of the global
    batch: neither devices nor micro-batches change what a token weighs.

    Args:
        loss: sums over a batch, from `training_loss`.
        optimizer: turns the gradient into an update.
        accumulation: micro-batches that the batch is cut into, to save memory; must
            divide the rows.
        ema_decay: d of the moving average, see `moving_average`; unused without one.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)

    def sums(
        params: PyTree, kept: PyTree, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Return (sum, weight, gradient), and what the model keeps afterwards."""
        (total, (weight, kept)), grads = gradient(params, kept, batch, key, step)
        return (total, weight, grads), kept

    def all_sums(state: TrainState, batch: Batch) -> tuple[PyTree, PyTree]:
        params, kept, step = state.params, state.attention, state.step
        key = jax.random.fold_in(state.key, step)
        if accumulation == 1:
            return sums(params, kept, batch, key, step)

        def add(before: PyTree, micro: tuple[Batch, jax.Array]) -> tuple[PyTree, None]:
            total, kept = before
            part, kept = sums(params, kept, *micro, step)
            return (jax.tree.map(jnp.add, total, part), kept), None

        keys = jax.random.split(key, accumulation)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(sums, params, kept, batch, key, step)[0],
        )
        parts = _micro_batches(batch, accumulation), keys
        return jax.lax.scan(add, (zeros, kept), parts)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        (total, weight, grads), kept = all_sums(state, batch)
        # A batch of filler rows alone changes nothing.
        grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1.0), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(total, weight, optax.tree.norm(grads))
        step, ema = state.step + 1, state.ema
        if ema is not None:
            ema = moving_average(ema, params, step, ema_decay)
        return TrainState(step, params, opt_state, state.key, ema, kept), metrics

    return train_step


def moving_average(
    ema: PyTree, params: PyTree, step: jax.Array, decay: float
) -> PyTree:
    """Return the exponential moving average of the parameters after `step` updates.

        ema <- d_t ema + (1 - d_t) params,  d_t = min(decay, (1 + t) / (10 + t))

    so that the first steps forget the initial parameters fast (the warm-up of
    TensorFlow's ExponentialMovingAverage). Averaged iterates: Polyak and Juditsky 1992.
    """
    time = step.astype(jnp.float32)
    decay = jnp.minimum(decay, (1 + time) / (10 + time))
    return optax.incremental_update(params, ema, 1 - decay)


def compile_train_steps(
    step: Callable, state: TrainState, buckets: Iterable[Bucket], mesh: Mesh
) -> dict[Bucket, Callable]:
    """Compile the update once a bucket; another shape is an error, never a stall.

    The state given to a compiled step is donated.
    """
    whole = replicated(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole))
    return _compile_each(jitted, state, buckets, mesh)


def compile_losses(
    loss: ValidationLoss, variables: PyTree, buckets: Iterable[Bucket], mesh: Mesh
) -> dict[Bucket, Callable]:
    """Compile a loss `(variables, batch) -> sums` once a bucket."""
    jitted = jax.jit(loss, out_shardings=replicated(mesh))
    return _compile_each(jitted, variables, buckets, mesh)


def abstract_batch(bucket: Bucket, mesh: Mesh) -> Batch:
    """Return shapes, types and shardings of a bucket's batch."""
    rows = batch_sharding(mesh)

    def array(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((bucket.rows, *shape), dtype, sharding=rows)

    return Batch(
        source=array(jnp.int32, bucket.source_length),
        source_lengths=array(jnp.int32),
        target=array(jnp.int32, *bucket.target_shape),
        target_lengths=array(jnp.int32, *bucket.lengths_shape),
        weight=array(jnp.float32),
        index=array(jnp.int32),
    )


def _compile_each(
    jitted: Any, first: PyTree, buckets: Iterable[Bucket], mesh: Mesh
) -> dict[Bucket, Callable]:
    """Trace bucket after bucket; XLA compiles several at once, without the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {
            bucket: pool.submit(
                jitted.lower(first, abstract_batch(bucket, mesh)).compile
            )
            for bucket in buckets
        }
        return {bucket: compiled.result() for bucket, compiled in waiting.items()}


def count_parameters(params: PyTree) -> int:
    """Return how many numbers the parameters are."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _with_shardings(abstract: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        abstract,
        shardings,
    )


def _micro_batches(batch: Batch, count: int) -> Batch:
    """Cut rows into `[count, rows / count, ...]`; every device keeps its own rows."""
    return jax.tree.map(
        lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch
    )
