"""Decoding one continuation a row, token by token."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer_jax.decoding.hypotheses import Hypotheses, Status
from transformer_jax.types import PyTree

# (tokens int32 [M], cache) -> (logits [M, V], cache)
StepFunction = Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]


class _State(NamedTuple):
    """State of the loop after `time` steps."""

    time: jax.Array  # int32 [], tokens written so far
    token: jax.Array  # int32 [B], the last token, input of the next step
    tokens: jax.Array  # int32 [B, T], PAD where nothing is written
    lengths: jax.Array  # int32 [B], tokens before END; grows until END
    scores: jax.Array  # float32 [B], sum of log-probabilities up to and with END
    finished: jax.Array  # bool [B], END has come, or the row is broken
    broken: jax.Array  # bool [B], some step gave no finite best log-probability
    cache: PyTree


def greedy(
    step_fn: StepFunction,
    cache: PyTree,
    start: Int[Array, " B"],
    *,
    max_length: int,
    end_id: int,
    pad_id: int,
) -> Hypotheses:
    """Take the most probable token at every step until END.

    y_t = argmax_v p(v | y_<t), the lowest v where several are equal.

    Args:
        step_fn: `(tokens [B], cache) -> (logits [B, V], cache)`, pure.
        cache: pytree of leaves `[B, ...]`, as the step function wants it at the start.
        start: int32 `[B]`, the first input, BOS as a rule.
        max_length: longest output, END counted; at least 1.
        end_id: the token that ends an output.
        pad_id: fills `tokens` behind the end.

    Returns:
        One hypothesis a row: tokens `[B, 1, max_length]`. Status OK, EMPTY (END came
        first), UNFINISHED (no END within `max_length`) or INFEASIBLE (some step had no
        finite best log-probability: no tokens, score -inf).

    Raises:
        ValueError: `max_length` is below 1.

    Example:
        >>> def count_to_two(tokens, cache):  # 0 -> 1 -> 2 -> END = 3
        ...     return jax.nn.one_hot(tokens + 1, 4) * 9.0, cache
        >>> found = greedy(
        ...     count_to_two, (), jnp.array([0]), max_length=5, end_id=3, pad_id=0)
        >>> found.tokens[0, 0].tolist(), found.lengths.tolist()
        ([1, 2, 0, 0, 0], [[2]])
    """
    if max_length < 1:
        raise ValueError(
            f"max_length counts END: it must be at least 1, not {max_length}"
        )
    rows = start.shape[0]

    def unfinished(state: _State) -> jax.Array:
        return (state.time < max_length) & ~jnp.all(state.finished)

    def advance(state: _State) -> _State:
        logits, cache = step_fn(state.token, state.cache)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        token = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        gain = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
        # No token is best among NaN or where all are excluded: the row ends here.
        broken = state.broken | (~state.finished & ~jnp.isfinite(gain))
        done = state.finished | broken
        written = ~done & (token != end_id)
        return _State(
            time=state.time + 1,
            token=jnp.where(written, token, state.token),
            tokens=state.tokens.at[:, state.time].set(
                jnp.where(written, token, pad_id)
            ),
            lengths=state.lengths + written.astype(jnp.int32),
            scores=state.scores + jnp.where(done, 0.0, gain),
            finished=done | (token == end_id),
            broken=broken,
            cache=cache,
        )

    final = jax.lax.while_loop(
        unfinished,
        advance,
        _State(
            time=jnp.zeros((), jnp.int32),
            token=start.astype(jnp.int32),
            tokens=jnp.full((rows, max_length), pad_id, jnp.int32),
            lengths=jnp.zeros(rows, jnp.int32),
            scores=jnp.zeros(rows, jnp.float32),
            finished=jnp.zeros(rows, bool),
            broken=jnp.zeros(rows, bool),
            cache=cache,
        ),
    )
    return _hypotheses(final, pad_id)


def _hypotheses(final: _State, pad_id: int) -> Hypotheses:
    """Return what the last state holds; of a broken row nothing is left."""
    status = jnp.where(final.lengths == 0, Status.EMPTY, Status.OK)
    status = jnp.where(final.finished, status, Status.UNFINISHED)
    status = jnp.where(final.broken, Status.INFEASIBLE, status).astype(jnp.int32)
    broken = final.broken[:, None]
    return Hypotheses(
        jnp.where(broken, pad_id, final.tokens)[:, None],
        jnp.where(broken, 0, final.lengths[:, None]),
        jnp.where(broken, -jnp.inf, final.scores[:, None]),
        status[:, None],
    )
