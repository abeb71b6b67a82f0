"""What every decoding strategy returns."""

import enum
from typing import NamedTuple

import jax


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
        scores: float32 `[B, n]`, log-probability, END included, in beam search over its
            length penalty; -inf if absent or infeasible.
        status: int32 `[B, n]`, a `Status`.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array
    status: jax.Array
