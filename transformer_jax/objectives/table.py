"""The objectives: what is minimised, what it may be combined with, what decodes it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.corruption import corruption_at
from transformer_jax.objectives import canvas, fitting
from transformer_jax.objectives.autoregressive import autoregressive
from transformer_jax.objectives.classification import classification
from transformer_jax.objectives.passes import Passes
from transformer_jax.types import Batch, PyTree, variables_of

Sums = tuple[jax.Array, jax.Array]
# (passes, batch, vocabulary, *, corrupt, options) -> (sum, weight)
ObjectiveLoss = Callable[..., Sums]
# (params, kept, batch, key, step) -> (sum, (weight, kept))
TrainingLoss = Callable[..., tuple[jax.Array, tuple[jax.Array, PyTree]]]
# (variables, batch) -> (sum, weight)
ValidationLoss = Callable[[PyTree, Batch], Sums]


class Objective(NamedTuple):
    """A way to train.

    Attributes:
        loss: what is minimised.
        strategies: those that can decode what it trained; the first by default.
        options: settings of `train` that the loss reads, of those that not all read.
        shape: settings of `model` likewise.
        corruptions: those of `train.corruption` that make sense.
        references: whether a row may be an example with all its references.
        fits: (model's settings, source lengths, target lengths, equal neighbours in
            the targets) -> bool `[pairs]`, which can be learned; None where all can.
        unfit: what is said of those that cannot.
    """

    loss: ObjectiveLoss
    strategies: tuple[str, ...]
    options: tuple[str, ...]
    shape: tuple[str, ...] = ()
    corruptions: tuple[str, ...] = ()
    references: bool = False
    fits: Callable[..., np.ndarray] | None = None
    unfit: str = ""


# Of models with a decoder.
_DECODER = (
    *("decoder_layers", "decoder_attention", "cross_attention"),
    "tied_embeddings",
)
_LENGTH = (
    *_DECODER,
    "decoder_inputs",
    "length_from",
    "length_target",
    "length_classes",
)
_SLOTS = (*_DECODER, "decoder_inputs", "upsample", "extra_slots")
_BEYOND = (
    "have a length beyond those told apart and count as the nearest: raise "
    "model.length_classes"
)
_LEFT_OUT = (
    "do not fit the canvas of model.upsample |x| + model.extra_slots places and count "
    "nothing: raise one of these"
)

OBJECTIVES = {
    "autoregressive": Objective(
        autoregressive,
        ("greedy", "sample", "beam_search"),
        ("label_smoothing",),
        _DECODER,
        corruptions=("scheduled_sampling", "random_replacement"),
        references=True,
    ),
    "parallel": Objective(
        canvas.parallel,
        ("parallel",),
        ("label_smoothing", "length_weight"),
        _LENGTH,
        corruptions=("glancing",),
        fits=fitting.has_class,
        unfit=_BEYOND,
    ),
    "overgenerate": Objective(
        canvas.overgenerate,
        ("overgenerate",),
        ("label_smoothing", "fill_weight"),
        _SLOTS,
        fits=fitting.holds_end,
        unfit=_LEFT_OUT,
    ),
    "mask_predict": Objective(
        canvas.mask_predict,
        ("mask_predict", "parallel"),
        ("label_smoothing", "length_weight"),
        _LENGTH,
        fits=fitting.has_class,
        unfit=_BEYOND,
    ),
    "ctc": Objective(
        canvas.ctc,
        ("ctc_greedy", "ctc_beam_search"),
        (),
        _SLOTS,
        corruptions=("glancing",),
        references=True,
        fits=fitting.holds_blanks,
        unfit=_LEFT_OUT,
    ),
    "classification": Objective(
        classification,
        ("classify",),
        ("label_smoothing",),
        ("pooling",),
        fits=fitting.is_class,
        unfit=(
            "have targets of other than one symbol and count nothing: choose data "
            "whose targets are classes"
        ),
    ),
}


def training_loss(
    model: nn.Module, vocabulary: Any, config: TrainConfig
) -> TrainingLoss:
    """Return what training minimises.

    (params, kept, batch, key, step) -> (sum, (weight, kept)), `kept` being the
    collection KEPT before and after, or None if the model has none.

    Args:
        model: from `build_model`.
        vocabulary: the target's.
        config: names the objective, its options and its corruption.
    """
    bound = _with_options(config)

    def loss(params: PyTree, kept: PyTree, batch: Batch, key: Any, step: Any) -> Any:
        passes = Passes(model, variables_of(params, kept), key)
        corrupt = corruption_at(config, step)
        total, weight = bound(passes, batch, vocabulary, corrupt=corrupt)
        return total, (weight, passes.kept)

    return loss


def validation_loss(
    model: nn.Module, vocabulary: Any, config: TrainConfig
) -> ValidationLoss:
    """Return the loss without dropout, smoothing and corruption.

    (variables, batch) -> (sum, weight).
    """
    bound = _with_options(dataclasses.replace(config, label_smoothing=0.0))

    def loss(variables: PyTree, batch: Batch) -> Any:
        return bound(Passes(model, variables, None), batch, vocabulary)

    return loss


def _with_options(config: TrainConfig) -> ObjectiveLoss:
    """The loss of the objective that is named, with the settings that it reads."""
    objective = OBJECTIVES[config.objective]
    options = {name: getattr(config, name) for name in objective.options}
    return functools.partial(objective.loss, **options)
