"""Optimisers and learning-rate schedules by name, all of them optax's."""

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import TrainConfig
from transformer_jax.types import PyTree

# Optax says 128, which leaves out attention: a head is narrower.
LEAST_FACTORED = 32


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate as a function of the step, warmed up linearly.

    rsqrt: rate * min(t / warmup, sqrt(warmup / t)) (Vaswani et al. 2017, section 5.3,
    scaled to peak at `learning_rate`); cosine: to zero at `steps` (Loshchilov and
    Hutter 2017); constant.
    """
    peak, warmup = config.learning_rate, config.warmup
    if config.schedule == "cosine":
        steps = max(config.steps, warmup + 1)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = _inverse_square_root(peak, max(warmup, 1))
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    return optax.join_schedules([rise, after], [warmup])


def _inverse_square_root(peak: float, warmup: int) -> optax.Schedule:
    def schedule(steps_after_warmup: jax.Array) -> jax.Array:
        return peak * jnp.sqrt(warmup / jnp.maximum(warmup + steps_after_warmup, 1))

    return schedule


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return clipping, then AdamW, Adafactor or SGD with momentum.

    AdamW: Loshchilov and Hutter 2019. Adafactor: Shazeer and Stern 2018, without
    momentum; matrices of 32 rows and columns or more (attention's: those of a head)
    keep one sum a row and one a column in place of a moment a weight, and every array's
    step is multiplied by its root mean square (section 8, at least 1e-3), so that the
    learning rate is relative: 1e-2 is usual.

    Weight decay spares vectors: biases, and the scales of norms.
    """
    schedule = make_schedule(config)
    if config.optimizer == "sgd":
        update = optax.chain(
            optax.add_decayed_weights(config.weight_decay, mask=_matrices),
            optax.sgd(schedule, momentum=config.momentum or None),
        )
    elif config.optimizer == "adafactor":
        update = optax.adafactor(
            schedule,
            min_dim_size_to_factor=LEAST_FACTORED,
            # Optax decays by the bare rate here; in AdamW by that times the schedule.
            weight_decay_rate=lambda step: config.weight_decay * schedule(step),
            weight_decay_mask=_matrices,
        )
    else:
        update = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_matrices,
        )
    if not config.clip:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def _matrices(params: PyTree) -> PyTree:
    """Mark kernels and embeddings; by name, since scanned biases are matrices too."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )
