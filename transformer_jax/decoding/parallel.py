"""Writing all places of an output at once, given its length, or cut at its end."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.hypotheses import Hypotheses, candidates_ranked
from transformer_jax.decoding.logits import largest, log_softmax
from transformer_jax.decoding.search import check_count
from transformer_jax.masks import length_mask

# (tokens int32 [M, T], lengths int32 [M]) -> logits [M, T, V] of every place; M is B m,
# a row's candidates adjacent.
CanvasFunction = Callable[[jax.Array, jax.Array], jax.Array]


def parallel(
    predict: CanvasFunction,
    lengths: Int[Array, "B m"],
    length_scores: Float[Array, "B m"],
    *,
    max_length: int,
    mask_id: int,
    pad_id: int,
) -> Hypotheses:
    """Write every place of an empty canvas by its most probable symbol, in one pass.

        score(y) = log p(|y|) + sum_t max_v log p(y_t = v | |y|)

    Gu et al. 2018, "Non-Autoregressive Neural Machine Translation", section 3; with
    several lengths a row, the model itself chooses among its candidates.

    Args:
        predict: `(tokens [M, T], lengths [M]) -> logits [M, T, V]`, pure.
        lengths: candidates of each row, such as those of `length.best_lengths`; one
            below 0, or beyond T, is none.
        length_scores: their log-probabilities; -inf for none.
        max_length: T, places of the canvas.
        mask_id: what stands in an empty place.
        pad_id: fills `tokens` behind the end.

    Returns:
        m hypotheses a row, best first. Status OK, EMPTY (length 0), ABSENT (no such
        candidate), INFEASIBLE (the first of a row in which nothing has a finite score).

    Raises:
        ValueError: `max_length` is below 1.

    Example:
        >>> def predict(tokens, lengths):  # says 4 everywhere
        ...     return jax.nn.one_hot(jnp.full(tokens.shape, 4), 6) * 9.0
        >>> found = parallel(predict, jnp.array([[2]]), jnp.array([[0.0]]),
        ...     max_length=3, mask_id=6, pad_id=0)
        >>> found.tokens[0, 0].tolist(), found.lengths.tolist()
        ([4, 4, 0], [[2]])
    """
    check_count("max_length", max_length)
    flat = lengths.reshape(-1)
    empty = jnp.full((flat.shape[0], max_length), mask_id, jnp.int32)
    tokens, gains = best_tokens(predict(empty, flat))
    inside = length_mask(flat, max_length)
    sums = jnp.where(inside, gains, 0.0).sum(1).reshape(lengths.shape)
    possible = (lengths >= 0) & (lengths <= max_length)
    return candidates_ranked(
        tokens.reshape(*lengths.shape, max_length),
        lengths,
        jnp.where(possible, length_scores + sums, -jnp.inf),
        pad_id=pad_id,
    )


def overgenerate(
    logits: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    *,
    num_return: int,
    end_id: int,
    pad_id: int,
) -> Hypotheses:
    """Cut an over-long output, written in one pass, at its end.

    One hypothesis is cut at the first place whose most probable symbol is END, the
    others at the places where END is most probable besides.

        score(y) = sum_{t < |y|} max_{v not END} log p_t(v) + log p_{|y|}(END)

    Args:
        logits: `[B, T, V]`.
        lengths: `[B]`, places of each row's canvas.
        num_return: n, ends to try; at least 1.
        end_id: the symbol that ends an output.
        pad_id: fills `tokens` behind the end.

    Returns:
        n hypotheses a row, best first: tokens `[B, n, T]`. Status OK, EMPTY (END came
        first), UNFINISHED (END is nowhere most probable: all places, without END, after
        all others), ABSENT (fewer places than n), INFEASIBLE (the first of a row in
        which nothing has a finite score).

    Raises:
        ValueError: `num_return` is below 1, or `end_id` lies outside of V.
    """
    check_count("num_return", num_return)
    rows, size, symbols = logits.shape
    if not 0 <= end_id < symbols:
        raise ValueError(f"end_id must lie in 0..{symbols - 1}, not {end_id}")
    tokens = jnp.argmax(logits.at[..., end_id].set(-jnp.inf), axis=2)
    scores, worth, unfinished = _cuts(logits, tokens, lengths, end_id)
    chosen = largest(worth, min(num_return, size + 1))[1]
    missing = ((0, 0), (0, num_return - chosen.shape[1]))

    def at_chosen(values: Array, nothing: Any) -> Array:
        taken = jnp.take_along_axis(values, chosen, axis=1)
        return jnp.pad(taken, missing, constant_values=nothing)

    return candidates_ranked(
        jnp.broadcast_to(tokens[:, None], (rows, num_return, size)),
        jnp.pad(chosen, missing),
        at_chosen(scores, -jnp.inf),
        pad_id=pad_id,
        unfinished=at_chosen(unfinished, False),
    )


def _cuts(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    end_id: int,
) -> tuple[Float[Array, "B U"], Float[Array, "B U"], Bool[Array, "B U"]]:
    """Score of each cut before place 0 .. T, what it is chosen by, and if END lacks."""
    log_probs = log_softmax(logits)
    inside = length_mask(lengths, tokens.shape[1])
    gains = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    before = jnp.cumsum(jnp.where(inside, gains, 0.0), axis=1)
    before = jnp.pad(before, ((0, 0), (1, 0)))
    ending = jnp.where(inside, log_probs[..., end_id], -jnp.inf)
    ending = jnp.pad(ending, ((0, 0), (0, 1)), constant_values=-jnp.inf)
    ends = (jnp.argmax(logits, axis=2) == end_id) & inside
    some = ends.any(1)
    first = jnp.where(some, jnp.argmax(ends, axis=1), lengths)[:, None]
    cuts = jnp.arange(before.shape[1])[None]
    unfinished = (cuts == first) & ~some[:, None]
    scores = before + jnp.where(unfinished, 0.0, ending)
    worth = jnp.where(cuts == first, jnp.inf, ending)
    # A place without a finite probability leaves none to what goes beyond it.
    return scores, jnp.where(jnp.isfinite(scores), worth, -jnp.inf), unfinished


def best_tokens(
    logits: Float[Array, "M T V"],
) -> tuple[Int[Array, "M T"], Float[Array, "M T"]]:
    """Return each place's most probable symbol, the lowest of equals, and its log p."""
    log_probs = log_softmax(logits)
    tokens = jnp.argmax(logits, axis=2)
    gains = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    return tokens.astype(jnp.int32), gains
