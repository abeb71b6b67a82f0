"""What every decoding strategy returns."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Status(enum.IntEnum):
    """How a hypothesis came about.

    OK: finished by END. EMPTY: END came first. TRUNCATED: the input was cut by an
    explicit rule. UNFINISHED: no END within the limit. INFEASIBLE: the strategy has no
    output for this input. INVALID: the input cannot be read. ABSENT: fewer hypotheses
    exist than were asked for.
    """

    OK = 0
    EMPTY = 1
    TRUNCATED = 2
    UNFINISHED = 3
    INFEASIBLE = 4
    INVALID = 5
    ABSENT = 6


class Hypotheses(NamedTuple):
    """The n best outputs of each row, best first.

    Attributes:
        tokens: int32 `[B, n, T]`, without END, PAD from `lengths` on.
        lengths: int32 `[B, n]`, tokens before END.
        scores: float32 `[B, n]`, what the strategy ranks by: a log-probability, END
            included, in beam search over its length penalty, in mask-predict the mean
            of its places; -inf if absent or infeasible.
        status: int32 `[B, n]`, a `Status`.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array
    status: jax.Array


def ranked(found: Hypotheses) -> Hypotheses:
    """Return each row's hypotheses best first: unfinished ones after all others.

    A row in which all are absent has one that is INFEASIBLE.
    """
    late = (found.status == Status.UNFINISHED) | (found.scores == -jnp.inf)
    # Of equal ones the first stays first.
    order = jnp.lexsort((-found.scores, late))
    found = Hypotheses(
        *(
            jnp.take_along_axis(
                field, order.reshape(order.shape + (1,) * (field.ndim - 2)), axis=1
            )
            for field in found
        )
    )
    first = (jnp.arange(found.status.shape[1]) == 0)[None]
    nothing = first & (found.status[:, :1] == Status.ABSENT)
    status = jnp.where(nothing, Status.INFEASIBLE, found.status)
    return found._replace(status=status.astype(jnp.int32))


def candidates_ranked(
    tokens: Int[Array, "B n T"],
    lengths: Int[Array, "B n"],
    scores: Float[Array, "B n"],
    *,
    pad_id: int,
    unfinished: Bool[Array, "B n"] | None = None,
) -> Hypotheses:
    """Return candidates best first; one whose score is not finite is none."""
    status = jnp.where(lengths == 0, Status.EMPTY, Status.OK)
    if unfinished is not None:
        status = jnp.where(unfinished, Status.UNFINISHED, status)
    found = Hypotheses(tokens, lengths, scores, status)
    return ranked(_without(found, ~jnp.isfinite(scores), pad_id))


def rescored(
    found: Hypotheses, scores: Float[Array, "B n"], *, pad_id: int
) -> Hypotheses:
    """Return hypotheses by the scores that another model gives them.

    What is none stays none; what the other model cannot score finitely becomes so.
    """
    nothing = (found.scores == -jnp.inf) | ~jnp.isfinite(scores)
    return ranked(_without(found._replace(scores=scores), nothing, pad_id))


def _without(found: Hypotheses, nothing: Bool[Array, "B n"], pad_id: int) -> Hypotheses:
    """Hypotheses of which some are ABSENT, with PAD behind every end."""
    lengths = jnp.where(nothing, 0, found.lengths)
    behind = jnp.arange(found.tokens.shape[2])[None, None] >= lengths[..., None]
    return Hypotheses(
        tokens=jnp.where(behind, pad_id, found.tokens).astype(jnp.int32),
        lengths=lengths.astype(jnp.int32),
        scores=jnp.where(nothing, -jnp.inf, found.scores).astype(jnp.float32),
        status=jnp.where(nothing, Status.ABSENT, found.status).astype(jnp.int32),
    )
