"""What a configuration must not combine, said before any data is read."""

import dataclasses
from collections.abc import Collection
from typing import Any

from transformer_jax.config import (
    MOST_PLACES,
    Config,
    ConfigError,
    DecodeConfig,
    TrainConfig,
)
from transformer_jax.models import CANVASES
from transformer_jax.objectives.attention import check_attention, longest_of
from transformer_jax.objectives.table import OBJECTIVES, Objective

# Strategy -> the settings that it reads, of those that not all read.
_AUTOREGRESSIVE = ("min_length",)
_CANDIDATES = ("length_beam", "rescorer")
OPTIONS = {
    "greedy": _AUTOREGRESSIVE,
    "sample": (*_AUTOREGRESSIVE, "temperature", "top_k", "top_p", "seed"),
    "beam_search": (*_AUTOREGRESSIVE, "beam_size", "penalty", "alpha"),
    "parallel": ("min_length", *_CANDIDATES),
    "overgenerate": ("min_length", *_CANDIDATES),
    "mask_predict": ("min_length", *_CANDIDATES, "passes"),
    "ctc_greedy": (),
    "ctc_beam_search": ("beam_size", "rescorer"),
    "classify": (),
}
# Strategies that write no END.
ENDLESS = ("parallel", "mask_predict", "classify")
# What `decode.strategy` is where the objective shall say.
AUTO = "auto"

# Optimizer -> the settings that it reads, of those that not all read.
OPTIMIZER_OPTIONS = {
    "adamw": ("beta1", "beta2"),
    "adafactor": (),
    "sgd": ("momentum",),
}


def resolved(config: Config) -> Config:
    """Return the configuration with the objective's own strategy in place of "auto".

    Raises:
        ConfigError: there is no such objective.
    """
    if config.decode.strategy != AUTO:
        return config
    strategy = _objective_of(config).strategies[0]
    decode = dataclasses.replace(config.decode, strategy=strategy)
    return dataclasses.replace(config, decode=decode)


def validate(config: Config) -> None:
    """Refuse impossible pairings.

    Raises:
        ConfigError: one sentence that names the fields and a remedy.
    """
    objective = _objective_of(config)
    config = resolved(config)
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
    _check_decoding(config.decode, objective)
    _check_objective(config, objective)
    if config.data.keep_raw and not config.data.distilled:
        raise ConfigError(
            "data.keep_raw does nothing without data.distilled: name a folder of "
            "transformer-jax distill, or set it to False"
        )
    _check_optimizer(config.train)
    _check_corruption(config.train, objective)
    _check_canvas(config)
    _check_lengths(config)
    check_attention(config, *longest_of(config))


def _objective_of(config: Config) -> Objective:
    """The row of OBJECTIVES that a configuration names."""
    objective = OBJECTIVES.get(config.train.objective)
    if objective is None:
        raise ConfigError(
            f"train.objective must be one of {', '.join(OBJECTIVES)}, not "
            f"{config.train.objective!r}"
        )
    return objective


def check_nbest(config: DecodeConfig, nbest: int) -> None:
    """Refuse more hypotheses than a strategy can give.

    Raises:
        ConfigError: one sentence that names the settings and a remedy.
    """
    for field in ("beam_size", "length_beam"):
        if field in OPTIONS[config.strategy]:
            most = getattr(config, field)
            if nbest > most:
                raise ConfigError(
                    f"--nbest={nbest} is more than decode.{field}={most}: raise "
                    f"decode.{field} to {nbest}"
                )
            return
    if nbest == 1 or config.strategy in ("sample", "classify"):
        return
    others = "ctc_beam_search" if "ctc" in config.strategy else "beam_search or sample"
    raise ConfigError(
        f"--nbest={nbest} wants several hypotheses, but decode.strategy "
        f"{config.strategy!r} has one: use {others}"
    )


def _check_decoding(config: DecodeConfig, objective: Objective) -> None:
    """Refuse settings that do nothing, and a length that cannot be."""
    read = OPTIONS[config.strategy]
    idle = {name for names in OPTIONS.values() for name in names if name not in read}
    for name, default in _changed(config, idle).items():
        readers = [each for each in objective.strategies if name in OPTIONS[each]]
        use = f"use decode.strategy={readers[0]}, or " if readers else ""
        raise ConfigError(
            f"decode.{name} does nothing with decode.strategy {config.strategy!r}: "
            f"{use}set it to {default!r}"
        )
    if config.penalty == "none" and (idle := _changed(config, {"alpha"})):
        raise ConfigError(
            "decode.alpha does nothing with decode.penalty 'none': use average or "
            f"gnmt, or set it to {idle['alpha']!r}"
        )
    ends = config.strategy not in ENDLESS
    if config.min_length + ends > config.max_length:
        needed = "and an end do" if ends else "does"
        raise ConfigError(
            f"decode.min_length={config.min_length} {needed} not fit in "
            f"decode.max_length={config.max_length}: change one"
        )


def _check_objective(config: Config, objective: Objective) -> None:
    """Refuse settings of other objectives."""
    if config.data.references == "all" and not objective.references:
        able = [name for name, row in OBJECTIVES.items() if row.references]
        raise ConfigError(
            f"data.references 'all' is not for train.objective "
            f"{config.train.objective!r}: use each, or train {' or '.join(able)}"
        )
    rows = OBJECTIVES.values()
    options = {name for row in rows for name in row.options} - {*objective.options}
    shape = {name for row in rows for name in row.shape} - {*objective.shape}
    for section, idle in (("train", options), ("model", shape)):
        for name, default in _changed(getattr(config, section), idle).items():
            raise ConfigError(
                f"{section}.{name} does nothing with train.objective "
                f"{config.train.objective!r}: set it to {default!r}"
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


def _check_corruption(config: TrainConfig, objective: Objective) -> None:
    """Refuse a corruption of other objectives, and settings that it does not use."""
    possible = ("none", *objective.corruptions)
    if config.corruption not in possible:
        raise ConfigError(
            f"train.corruption {config.corruption!r} is not for train.objective "
            f"{config.objective!r}: use {' or '.join(possible)}"
        )
    schedule = {"keep_start", "keep_schedule", "keep_scale", "keep_floor"}
    unused = {
        "none": schedule | {"corruption_choice"},
        "random_replacement": {"corruption_choice"},
        "glancing": {"corruption_choice"},
    }.get(config.corruption, set())
    if config.keep_schedule == "constant":
        unused = unused | {"keep_scale", "keep_start"}
    if config.keep_start < config.keep_floor and "keep_start" not in unused:
        raise ConfigError(
            f"train.keep_start={config.keep_start} lies below train.keep_floor="
            f"{config.keep_floor}, so that nothing changes: lower the floor, or use "
            "train.keep_schedule=constant"
        )
    for name, default in _changed(config, unused).items():
        raise ConfigError(
            f"train.{name} does nothing with train.corruption "
            f"{config.corruption!r} and train.keep_schedule {config.keep_schedule!r}: "
            f"choose others, or set it to {default!r}"
        )


def _check_canvas(config: Config) -> None:
    """Refuse a canvas without an end, or whose places cannot be told apart."""
    model = config.model
    if config.train.objective not in CANVASES:
        return
    source, canvas = longest_of(config)
    if max(source, canvas) > MOST_PLACES:
        raise ConfigError(
            f"the longest source has {source} places and its canvas {canvas}, more "
            f"than {MOST_PLACES}: lower model.upsample, model.extra_slots, "
            "data.bucket_lengths or decode.max_source_length"
        )
    added = ("sinusoidal", "learned", "one_hot")
    inputs = model.decoder_inputs
    alike = {
        "mask": model.positions not in added,
        "uniform_copy": model.positions == "none",
        # Behind the last source place all distances grow alike.
        "soft_copy": model.positions == "none",
    }
    if alike[inputs]:
        which = "last empty places" if inputs == "soft_copy" else "empty places"
        others = "" if model.positions == "none" else ", or other decoder_inputs"
        raise ConfigError(
            f"model.positions={model.positions} leaves the {which} of "
            f"model.decoder_inputs={inputs} all alike: use "
            f"{', '.join(added)} positions{others}"
        )


def _changed(record: Any, names: Collection[str]) -> dict[str, Any]:
    """Those of a record's fields that have not their defaults, with the defaults."""
    return {
        item.name: item.default
        for item in dataclasses.fields(record)
        if item.name in names and getattr(record, item.name) != item.default
    }


def _check_lengths(config: Config) -> None:
    """Refuse sequences longer than a table of positions."""
    longest = config.model.longest
    lengths = {
        "data.bucket_lengths": config.data.bucket_lengths[-1],
        "decode.max_length": config.decode.max_length,
        "decode.max_source_length": config.decode.max_source_length,
        "the canvas of model.upsample and model.extra_slots": longest_of(config)[1],
    }
    for name, length in lengths.items():
        if longest is not None and length > longest:
            raise ConfigError(
                f"{name} goes to {length}, but model.positions="
                f"{config.model.positions} ends at model.max_positions={longest}: "
                "raise model.max_positions, or use positions without an end, such as "
                "sinusoidal"
            )
