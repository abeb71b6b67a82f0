"""Mask-predict: write all places, then the least certain ones again and again."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.decoding.hypotheses import Hypotheses, candidates_ranked
from transformer_jax.decoding.parallel import CanvasFunction, best_tokens
from transformer_jax.decoding.search import check_count
from transformer_jax.masks import length_mask, lowest_places


def mask_predict(
    predict: CanvasFunction,
    lengths: Int[Array, "B m"],
    *,
    passes: int,
    max_length: int,
    mask_id: int,
    pad_id: int,
) -> Hypotheses:
    """Write all places at once, then hide the least certain ones and write them anew.

        pass t = 0 .. passes - 1 hides the floor(n (passes - t) / passes) places of the
        lowest scores and fills them by their most probable symbols

    A place's score is the log-probability it was last filled with; a hypothesis' score
    is their mean (Ghazvininejad et al. 2019, sections 3.1 and 3.3; T is `passes`). The
    first pass hides everything: with one pass the tokens are those of `parallel`.

    Args:
        predict: `(tokens [M, T], lengths [M]) -> logits [M, T, V]`, pure.
        lengths: candidates of each row; one below 1, or beyond T, is none.
        passes: at least 1.
        max_length: T, places of the canvas.
        mask_id: what stands in a hidden place; no output.
        pad_id: fills `tokens` behind the end.

    Returns:
        m hypotheses a row, best first, none with a hidden place. Status OK, ABSENT (no
        such candidate), INFEASIBLE (the first of a row in which nothing has a finite
        score).

    Raises:
        ValueError: `passes` or `max_length` is below 1.

    Cost: `passes` calls of `predict`.
    """
    check_count("max_length", max_length)
    check_count("passes", passes)
    flat = lengths.reshape(-1)
    inside = length_mask(flat, max_length)

    def rewrite(state: Any, time: Array) -> tuple[Any, None]:
        tokens, gains = state
        hidden = lowest_places(gains, inside, hidden_count(flat, time, passes))
        tokens = jnp.where(hidden, mask_id, tokens)
        written, anew = best_tokens(predict(tokens, flat))
        tokens = jnp.where(hidden, written, tokens)
        return (tokens, jnp.where(hidden, anew, gains)), None

    first = (
        jnp.full((flat.shape[0], max_length), mask_id, jnp.int32),
        jnp.full((flat.shape[0], max_length), -jnp.inf, jnp.float32),
    )
    (tokens, gains), _ = jax.lax.scan(rewrite, first, jnp.arange(passes))
    sums = jnp.where(inside, gains, 0.0).sum(1).reshape(lengths.shape)
    possible = (lengths >= 1) & (lengths <= max_length)
    means = sums / jnp.maximum(lengths, 1).astype(jnp.float32)
    return candidates_ranked(
        tokens.reshape(*lengths.shape, max_length),
        lengths,
        jnp.where(possible, means, -jnp.inf),
        pad_id=pad_id,
    )


def hidden_count(
    lengths: Int[Array, "*rows"], time: Int[Array, ""], passes: int
) -> Int[Array, "*rows"]:
    """Return how many of n places pass `time` hides: all at first, then fewer."""
    return lengths * (passes - time) // passes
