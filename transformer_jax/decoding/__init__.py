"""Decoding strategies: pure functions of a step function, a canvas or logits.

A strategy knows no network: the caller gives a step function
`(tokens, cache) -> (logits, cache)`, a function that fills a canvas
`(tokens, lengths) -> logits`, or logits.
"""

from transformer_jax.decoding.beam import beam_pieces, beam_search
from transformer_jax.decoding.classify import classify
from transformer_jax.decoding.ctc import collapse, ctc_beam_search, ctc_greedy
from transformer_jax.decoding.hypotheses import Hypotheses, Status, rescored
from transformer_jax.decoding.length import best_lengths, lengths_of_classes
from transformer_jax.decoding.logits import (
    forbid,
    restrict,
    sequence_log_probability,
    with_min_length,
)
from transformer_jax.decoding.mask_predict import mask_predict
from transformer_jax.decoding.parallel import CanvasFunction, overgenerate, parallel
from transformer_jax.decoding.sample import (
    greedy,
    greedy_pieces,
    sample,
    sample_pieces,
)
from transformer_jax.decoding.search import Search, StepFunction, run_search, take_rows

# By the names of `--config.decode.strategy`: what an importer calls ...
STRATEGIES = {
    "greedy": greedy,
    "sample": sample,
    "beam_search": beam_search,
    "parallel": parallel,
    "overgenerate": overgenerate,
    "mask_predict": mask_predict,
    "ctc_greedy": ctc_greedy,
    "ctc_beam_search": ctc_beam_search,
    "classify": classify,
}
# ... and those that go token by token in pieces, for callers that look at the state
# between steps.
PIECES = {
    "greedy": greedy_pieces,
    "sample": sample_pieces,
    "beam_search": beam_pieces,
}

__all__ = [
    "PIECES",
    "STRATEGIES",
    "CanvasFunction",
    "Hypotheses",
    "Search",
    "Status",
    "StepFunction",
    "beam_search",
    "best_lengths",
    "classify",
    "collapse",
    "ctc_beam_search",
    "ctc_greedy",
    "forbid",
    "greedy",
    "lengths_of_classes",
    "mask_predict",
    "overgenerate",
    "parallel",
    "rescored",
    "restrict",
    "run_search",
    "sample",
    "sequence_log_probability",
    "take_rows",
    "with_min_length",
]
