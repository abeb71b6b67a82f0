"""Objectives: how inputs are prepared, what is minimised, which strategies decode it.

`validate` refuses a configuration that cannot work before any data is read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.config import Config, ConfigError
from transformer_jax.losses import cross_entropy
from transformer_jax.types import Batch, PyTree


def teacher_forcing(
    batch: Batch, vocabulary: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return decoder inputs, labels and weights `[B, T]` of an autoregressive decoder.

    The right answer is the decoder's input, one place late (Williams and Zipser 1989):

        target  a b c        inputs  BOS a b c    labels  a b c END    weights  1 1 1 1

    Args:
        batch: T holds the place of END.
        vocabulary: the target's, with `bos_id` and `end_id`.
    """
    place = jnp.arange(batch.target.shape[1])
    last = batch.target_lengths[:, None]
    inputs = jnp.roll(batch.target, 1, axis=1).at[:, 0].set(vocabulary.bos_id)
    labels = jnp.where(place == last, vocabulary.end_id, batch.target)
    weights = jnp.where(place <= last, batch.weight[:, None], 0.0)
    return inputs, labels, weights


def autoregressive(
    apply: Callable[..., jax.Array],
    params: PyTree,
    batch: Batch,
    vocabulary: Any,
    *,
    key: jax.Array | None,
    label_smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum, weight) of -log p(y_t | y_<t, x) over all places, END included.

    Args:
        apply: the model's `apply`.
        params: its parameters.
        batch: rows of weight 0 count nothing.
        vocabulary: the target's.
        key: dropout's PRNG key; None turns dropout off.
        label_smoothing: see `losses.cross_entropy`.
    """
    inputs, labels, weights = teacher_forcing(batch, vocabulary)
    logits = apply(
        {"params": params},
        batch.source,
        batch.source_lengths,
        inputs,
        rngs={} if key is None else {"dropout": key},
    )
    return cross_entropy(logits, labels, weights, label_smoothing=label_smoothing)


class Objective(NamedTuple):
    """A way to train: its loss, and the strategies that can decode what it trained."""

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    strategies: tuple[str, ...]


OBJECTIVES = {"autoregressive": Objective(autoregressive, ("greedy",))}


def validate(config: Config) -> None:
    """Refuse impossible pairings.

    Raises:
        ConfigError: one sentence that names the fields and a remedy.
    """
    objective = OBJECTIVES.get(config.train.objective)
    if objective is None:
        raise ConfigError(
            f"train.objective must be one of {', '.join(OBJECTIVES)}, not "
            f"{config.train.objective!r}"
        )
    if config.decode.use_ema and not config.train.ema_decay:
        raise ConfigError(
            "decode.use_ema wants a moving average, but train.ema_decay is 0: train "
            "with one, or leave it out"
        )
    if config.decode.strategy not in objective.strategies:
        raise ConfigError(
            f"decode.strategy {config.decode.strategy!r} cannot decode the objective "
            f"{config.train.objective!r}: use {', '.join(objective.strategies)}"
        )
    _validate_lengths(config)


def _validate_lengths(config: Config) -> None:
    """Refuse sequences longer than a table of positions."""
    longest = config.model.longest
    lengths = {
        "data.bucket_lengths": config.data.bucket_lengths[-1],
        "decode.max_length": config.decode.max_length,
        "decode.max_source_length": config.decode.max_source_length,
    }
    for name, length in lengths.items():
        if longest is not None and length > longest:
            raise ConfigError(
                f"{name} goes to {length}, but model.positions="
                f"{config.model.positions} ends at model.max_positions={longest}: "
                "raise model.max_positions, or use positions without an end, such as "
                "sinusoidal"
            )
