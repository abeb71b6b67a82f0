"""Objectives: how inputs are prepared, what is minimised, which strategies decode it.

`validate` refuses a configuration that cannot work before any data is read.
"""

from transformer_jax.objectives.autoregressive import teacher_forcing
from transformer_jax.objectives.table import (
    OBJECTIVES,
    Objective,
    TrainingLoss,
    ValidationLoss,
    training_loss,
    validation_loss,
)
from transformer_jax.objectives.validation import (
    OPTIONS,
    check_nbest,
    resolved,
    validate,
)

__all__ = [
    "OBJECTIVES",
    "OPTIONS",
    "Objective",
    "TrainingLoss",
    "ValidationLoss",
    "check_nbest",
    "resolved",
    "teacher_forcing",
    "training_loss",
    "validate",
    "validation_loss",
]
