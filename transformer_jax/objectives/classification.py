"""The classification objective: what a sequence is."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.corruption import Corruption
from transformer_jax.losses import cross_entropy
from transformer_jax.objectives.passes import Passes
from transformer_jax.types import Batch


def classification(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
    label_smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum, weight) of -log p(y | x), y being the only symbol of the target.

    Targets of more or fewer symbols count nothing.
    """
    del vocabulary, corrupt
    logits = passes.classify(batch.source, batch.source_lengths)
    weights = jnp.where(batch.target_lengths == 1, batch.weight, 0.0)
    return cross_entropy(
        logits[:, None],
        batch.target[:, :1],
        weights[:, None],
        label_smoothing=label_smoothing,
    )
