"""Which pairs an objective can learn: (settings, lengths, repeats) -> bool `[pairs]`.

config: the model's settings.
source, target: int `[pairs]`, symbols of each side, END not counted.
repeats: int `[pairs]`, symbols of the target that equal the one before.
"""

import numpy as np

from transformer_jax.config import ModelConfig


def has_class(
    config: ModelConfig, source: np.ndarray, target: np.ndarray, repeats: np.ndarray
) -> np.ndarray:
    """Mark the pairs whose target's length is one of those told apart."""
    del repeats
    classes, offset = config.length_classes, config.length_target == "offset"
    number = target - source + classes // 2 if offset else target
    return (number >= 0) & (number < classes)


def is_class(
    config: ModelConfig, source: np.ndarray, target: np.ndarray, repeats: np.ndarray
) -> np.ndarray:
    """Mark the pairs whose target is one symbol."""
    del config, source, repeats
    return target == 1


def holds_end(
    config: ModelConfig, source: np.ndarray, target: np.ndarray, repeats: np.ndarray
) -> np.ndarray:
    """Mark the pairs whose canvas holds the target and END."""
    del repeats
    return target < config.upsample * source + config.extra_slots


def holds_blanks(
    config: ModelConfig, source: np.ndarray, target: np.ndarray, repeats: np.ndarray
) -> np.ndarray:
    """Mark the pairs with a slot for each symbol and a blank between equal ones."""
    return target + repeats <= config.upsample * source + config.extra_slots
