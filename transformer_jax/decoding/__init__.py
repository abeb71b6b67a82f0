"""Decoding strategies: pure functions of a step function or of logits.

A strategy knows no network: the caller gives a step function
`(tokens, cache) -> (logits, cache)`.
"""

from transformer_jax.decoding.hypotheses import Hypotheses, Status
from transformer_jax.decoding.sample import StepFunction, greedy

# Strategy by its name in `--config.decode.strategy`.
STRATEGIES = {"greedy": greedy}

__all__ = ["STRATEGIES", "Hypotheses", "Status", "StepFunction", "greedy"]
