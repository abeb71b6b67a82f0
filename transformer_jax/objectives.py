"""Objectives: how inputs are prepared, what is minimised, which strategies decode it.

`validate` refuses a configuration that cannot work before any data is read.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.reach import first_edges
from transformer_jax.config import Config, ConfigError, DecodeConfig, TrainConfig
from transformer_jax.corruption import Corruption, DecoderInputs, corruption_at
from transformer_jax.losses import cross_entropy
from transformer_jax.models import read_patterns
from transformer_jax.patterns import causal
from transformer_jax.types import Batch, PyTree

# (params, batch, ...) -> (sum, weight)
Loss = Callable[..., tuple[jax.Array, jax.Array]]


def teacher_forcing(batch: Batch, vocabulary: Any) -> DecoderInputs:
    """Return inputs, labels and weights `[B, T]` of an autoregressive decoder.

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
    return DecoderInputs(inputs, labels, weights)


def autoregressive(
    apply: Callable[..., jax.Array],
    params: PyTree,
    batch: Batch,
    vocabulary: Any,
    *,
    key: jax.Array | None,
    label_smoothing: float,
    corrupt: Corruption | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum, weight) of -log p(y_t | y_<t, x) over all places, END included.

    Args:
        apply: the model's `apply`.
        params: its parameters.
        batch: rows of weight 0 count nothing.
        vocabulary: the target's.
        key: PRNG key of dropout and corruption; None turns both off.
        label_smoothing: see `losses.cross_entropy`.
        corrupt: replaces some of the inputs, see `corruption`. With nothing replaced
            the loss is that of teacher forcing, bit for bit.
    """
    # Three keys in any case, so that a corruption changes no dropout.
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    encode_key, decode_key, corruption_key = keys
    memory = apply(
        {"params": params},
        batch.source,
        batch.source_lengths,
        method="encode",
        rngs=_dropout(encode_key),
    )

    def predict(inputs: jax.Array) -> jax.Array:
        return apply(
            {"params": params},
            memory,
            batch.source_lengths,
            inputs,
            method="predict",
            rngs=_dropout(decode_key),
        )

    given = teacher_forcing(batch, vocabulary)
    if corrupt is not None and key is not None:
        given = corrupt(given, predict, corruption_key, vocabulary)
    return cross_entropy(
        predict(given.inputs),
        given.labels,
        given.weights,
        label_smoothing=label_smoothing,
    )


def _dropout(key: jax.Array | None) -> dict[str, jax.Array]:
    return {} if key is None else {"dropout": key}


def training_loss(model: nn.Module, vocabulary: Any, config: TrainConfig) -> Loss:
    """Return the loss that training minimises: (params, batch, key, step) -> sums.

    Args:
        model: from `build_model`.
        vocabulary: the target's.
        config: names the objective, its smoothing and its corruption.
    """
    objective = OBJECTIVES[config.objective]

    def loss(params: PyTree, batch: Batch, key: Any, step: Any) -> Any:
        return objective.loss(
            model.apply,
            params,
            batch,
            vocabulary,
            key=key,
            label_smoothing=config.label_smoothing,
            corrupt=corruption_at(config, step),
        )

    return loss


def validation_loss(model: nn.Module, vocabulary: Any, config: TrainConfig) -> Loss:
    """Return the loss without dropout, smoothing and wrong inputs: (params, batch)."""
    objective = OBJECTIVES[config.objective]

    def loss(params: PyTree, batch: Batch) -> Any:
        return objective.loss(
            model.apply, params, batch, vocabulary, key=None, label_smoothing=0.0
        )

    return loss


class Objective(NamedTuple):
    """A way to train: its loss, and the strategies that can decode what it trained."""

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    strategies: tuple[str, ...]


OBJECTIVES = {
    "autoregressive": Objective(autoregressive, ("greedy", "sample", "beam_search"))
}

# Strategy -> the settings that it reads, of those that not all read.
OPTIONS = {
    "greedy": (),
    "sample": ("temperature", "top_k", "top_p", "seed"),
    "beam_search": ("beam_size", "penalty", "alpha"),
}


# Optimizer -> the settings that it reads, of those that not all read.
OPTIMIZER_OPTIONS = {
    "adamw": ("beta1", "beta2"),
    "adafactor": (),
    "sgd": ("momentum",),
}


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
    if config.decode.strategy not in OPTIONS:
        raise ConfigError(
            f"decode.strategy must be one of {', '.join(OPTIONS)}, not "
            f"{config.decode.strategy!r}"
        )
    if config.decode.strategy not in objective.strategies:
        raise ConfigError(
            f"decode.strategy {config.decode.strategy!r} cannot decode the objective "
            f"{config.train.objective!r}: use {', '.join(objective.strategies)}"
        )
    _check_decoding(config.decode)
    _check_optimizer(config.train)
    _check_corruption(config.train)
    _check_lengths(config)
    _check_attention(config)


def check_nbest(config: DecodeConfig, nbest: int) -> None:
    """Refuse more hypotheses than a strategy can give.

    Raises:
        ConfigError: one sentence that names the settings and a remedy.
    """
    if nbest > 1 and config.strategy == "greedy":
        raise ConfigError(
            f"--nbest={nbest} wants several hypotheses, but decode.strategy 'greedy' "
            "has one: use beam_search or sample"
        )
    if config.strategy == "beam_search" and nbest > config.beam_size:
        raise ConfigError(
            f"--nbest={nbest} is more than decode.beam_size={config.beam_size}: widen "
            "the beam"
        )


def _check_decoding(config: DecodeConfig) -> None:
    """Refuse settings that do nothing, and a length that cannot be."""
    for strategy, options in OPTIONS.items():
        idle = _changed(config, set(options) - set(OPTIONS[config.strategy]))
        for name, default in idle.items():
            raise ConfigError(
                f"decode.{name} does nothing with decode.strategy "
                f"{config.strategy!r}: use decode.strategy={strategy}, or set it to "
                f"{default!r}"
            )
    if config.penalty == "none" and (idle := _changed(config, {"alpha"})):
        raise ConfigError(
            "decode.alpha does nothing with decode.penalty 'none': use average or "
            f"gnmt, or set it to {idle['alpha']!r}"
        )
    if config.min_length >= config.max_length:
        raise ConfigError(
            f"decode.min_length={config.min_length} and an end do not fit in "
            f"decode.max_length={config.max_length}: change one"
        )


def _check_optimizer(config: TrainConfig) -> None:
    """Refuse settings of another optimiser."""
    for optimizer, options in OPTIMIZER_OPTIONS.items():
        idle = set(options) - set(OPTIMIZER_OPTIONS[config.optimizer])
        for name, default in _changed(config, idle).items():
            raise ConfigError(
                f"train.{name} does nothing with train.optimizer {config.optimizer!r}: "
                f"use train.optimizer={optimizer}, or set it to {default!r}"
            )


def _check_corruption(config: TrainConfig) -> None:
    """Refuse settings of a corruption that does not use them."""
    schedule = {"keep_schedule", "keep_scale", "keep_floor"}
    unused = {
        "none": schedule | {"corruption_choice"},
        "random_replacement": {"corruption_choice"},
    }.get(config.corruption, set())
    if config.keep_schedule == "constant":
        unused = unused | {"keep_scale"}
    for name, default in _changed(config, unused).items():
        raise ConfigError(
            f"train.{name} does nothing with train.corruption "
            f"{config.corruption!r} and train.keep_schedule {config.keep_schedule!r}: "
            f"choose others, or set it to {default!r}"
        )


def _changed(record: Any, names: Collection[str]) -> dict[str, Any]:
    """Those of a record's fields that have not their defaults, with the defaults."""
    return {
        item.name: item.default
        for item in dataclasses.fields(record)
        if item.name in names and getattr(record, item.name) != item.default
    }


def _check_attention(config: Config) -> None:
    """Refuse patterns that do not parse, or leave a place of the longest nothing."""
    longest = config.data.bucket_lengths[-1]
    source = max(longest, config.decode.max_source_length)
    target = max(longest, config.decode.max_length)
    sides = {
        "encoder_attention": (source, source),
        "decoder_attention": (target, target),
        "cross_attention": (target, source),
    }
    for field, (rows, columns) in sides.items():
        for pattern in read_patterns(config.model, field):
            if field == "decoder_attention":
                pattern &= causal()
            heads = range(pattern.heads or 1)
            # A head may be silent at a place where another is not.
            of_heads = (
                first_edges(pattern.of_head(n), rows, columns, 0) for n in heads
            )
            first = functools.reduce(np.minimum, (keys for keys, _ in of_heads))
            if (dead := np.flatnonzero(first == columns)).size:
                raise ConfigError(
                    f"model.{field} {str(pattern)!r} leaves place {dead[0]} nothing to "
                    "attend: join another pattern to it by |"
                )


def _check_lengths(config: Config) -> None:
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
