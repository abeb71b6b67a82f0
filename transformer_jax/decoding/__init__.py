"""Decoding strategies: pure functions of a step function or of logits.

A strategy knows no network: the caller gives a step function
`(tokens, cache) -> (logits, cache)`.
"""

from transformer_jax.decoding.beam import beam_pieces, beam_search
from transformer_jax.decoding.hypotheses import Hypotheses, Status
from transformer_jax.decoding.logits import forbid, restrict, with_min_length
from transformer_jax.decoding.sample import (
    greedy,
    greedy_pieces,
    sample,
    sample_pieces,
)
from transformer_jax.decoding.search import Search, StepFunction, run_search, take_rows

# By the names of `--config.decode.strategy`: what an importer calls ...
STRATEGIES = {"greedy": greedy, "sample": sample, "beam_search": beam_search}
# ... and the same in pieces, for callers that look at the state between steps.
PIECES = {
    "greedy": greedy_pieces,
    "sample": sample_pieces,
    "beam_search": beam_pieces,
}

__all__ = [
    "PIECES",
    "STRATEGIES",
    "Hypotheses",
    "Search",
    "Status",
    "StepFunction",
    "beam_search",
    "forbid",
    "greedy",
    "restrict",
    "run_search",
    "sample",
    "take_rows",
    "with_min_length",
]
