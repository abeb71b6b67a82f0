"""The mean of several checkpoints: a float64 sum and one of them in memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.types import PyTree


def mean_params(steps: Sequence[Any], read: Callable[[Any], PyTree]) -> PyTree:
    """Return sum_s read(s) / len(steps), leaf by leaf, as NumPy arrays.

    Summed in float64 and cast back once, so the order of the steps does not matter
    beyond the last rounding (Vaswani et al. 2017, section 6.1, average the last 5 or
    20 checkpoints).

    Args:
        steps: at least one.
        read: gives the arrays of a step, all of the same shapes and types; they are let
            go before the next ones are read.
    """
    total, types = _wide(read(steps[0]))
    for step in steps[1:]:
        _add(total, read(step))
    return jax.tree.map(
        lambda leaf, kind: np.asarray(leaf / len(steps)).astype(kind), total, types
    )


def _wide(params: PyTree) -> tuple[PyTree, PyTree]:
    """Copy arrays to float64; return also what they were."""
    total = jax.tree.map(lambda leaf: np.array(leaf, np.float64), params)
    return total, jax.tree.map(lambda leaf: leaf.dtype, params)


def _add(total: PyTree, params: PyTree) -> None:
    def add(into: np.ndarray, leaf: Any) -> None:
        into += np.asarray(leaf)

    jax.tree.map(add, total, params)
