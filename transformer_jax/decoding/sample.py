"""Decoding one continuation a row, token by token: the best one, or one by chance."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.decoding import search
from transformer_jax.decoding.hypotheses import Hypotheses, Status
from transformer_jax.decoding.logits import (
    check_restrictions,
    log_probability,
    restrict,
)
from transformer_jax.decoding.search import Search, StepFunction
from transformer_jax.types import PyTree

# Beyond these float32 has no room for a quotient.
TEMPERATURES = (1e-30, 1e30)


class _State(NamedTuple):
    """State of the search after `time` steps."""

    time: jax.Array  # int32 [], tokens written so far
    token: jax.Array  # int32 [B], the last token, input of the next step
    tokens: jax.Array  # int32 [B, T], PAD where nothing is written
    lengths: jax.Array  # int32 [B], tokens before END; grows until END
    scores: jax.Array  # float32 [B], sum of log-probabilities up to and with END
    finished: jax.Array  # bool [B], END has come, or the row is broken
    broken: jax.Array  # bool [B], some step's choice had no finite log-probability
    keys: Any  # [B], one PRNG key a row, or None
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
    pieces = greedy_pieces(max_length=max_length, end_id=end_id, pad_id=pad_id)
    return search.decode(pieces, step_fn, cache, start)


def sample(
    step_fn: StepFunction,
    cache: PyTree,
    start: Int[Array, " B"],
    keys: Any,
    *,
    max_length: int,
    end_id: int,
    pad_id: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Hypotheses:
    """Draw every token from the model's distribution, sharpened and cut, until END.

    y_t ~ softmax(restrict(logits / temperature)), see `logits.restrict`: temperature
    first, then top_k, then top_p. The draw of step t comes from fold_in(the row's key,
    t), so a row's output depends on its own key alone. Its score is the sum of the
    model's own log-probabilities, neither tempered nor cut.

    Args:
        step_fn: as in `greedy`.
        cache: as in `greedy`.
        start: int32 `[B]`.
        keys: `[B]`, one PRNG key a row.
        max_length: longest output, END counted; at least 1.
        end_id: the token that ends an output.
        pad_id: fills `tokens` behind the end.
        temperature: between 1e-30 and 1e30; towards 0 it becomes `greedy`.
        top_k: draw among as many most probable tokens; None among all. 1 is `greedy`.
        top_p: draw among the fewest tokens with this share of the probability.

    Returns:
        One hypothesis a row, as `greedy`.

    Raises:
        ValueError: `max_length`, `temperature`, `top_k` or `top_p` lies outside its
            range, or the number of keys is not that of rows.
    """
    if len(keys) != len(start):
        raise ValueError(f"sample wants one key a row: {len(keys)} for {len(start)}")
    pieces = sample_pieces(
        max_length=max_length,
        end_id=end_id,
        pad_id=pad_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return search.decode(pieces, step_fn, cache, start, keys)


def greedy_pieces(*, max_length: int, end_id: int, pad_id: int) -> Search:
    """Return `greedy` in pieces; the arguments are its own."""
    return _search(_most_probable, max_length, end_id, pad_id)


def sample_pieces(
    *,
    max_length: int,
    end_id: int,
    pad_id: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Search:
    """Return `sample` in pieces; the arguments are its own."""
    low, high = TEMPERATURES
    if not low <= temperature <= high:
        raise ValueError(
            f"temperature must lie between {low} and {high}, not {temperature}: greedy "
            "is its limit at 0"
        )
    check_restrictions(top_k, top_p)

    def draw(logits: Array, state: _State) -> Int[Array, " B"]:
        top = logits.max(-1, keepdims=True)
        # Below the best one nothing overflows, but to what is never drawn.
        logits = (logits - jnp.where(jnp.isfinite(top), top, 0.0)) / temperature
        cut = restrict(logits, top_k=top_k, top_p=top_p)
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.time)
        return jax.vmap(jax.random.categorical)(keys, cut)

    return _search(draw, max_length, end_id, pad_id)


def _most_probable(logits: Float[Array, "B V"], _: _State) -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1)


def _search(
    choose: Callable[[Float[Array, "B V"], _State], Int[Array, " B"]],
    max_length: int,
    end_id: int,
    pad_id: int,
) -> Search:
    """The search that writes what `choose` takes of the logits."""
    search.check_max_length(max_length)
    return Search(
        begin=functools.partial(_begin, max_length=max_length, pad_id=pad_id),
        advance=functools.partial(
            _advance, choose=choose, end_id=end_id, pad_id=pad_id
        ),
        finished=lambda state: state.finished,
        result=functools.partial(_hypotheses, pad_id=pad_id),
        max_length=max_length,
    )


def _begin(
    cache: PyTree, start: Int[Array, " B"], keys: Any, *, max_length: int, pad_id: int
) -> _State:
    rows = start.shape[0]
    return _State(
        time=jnp.zeros((), jnp.int32),
        token=start,
        tokens=jnp.full((rows, max_length), pad_id, jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        scores=jnp.zeros(rows, jnp.float32),
        finished=jnp.zeros(rows, bool),
        broken=jnp.zeros(rows, bool),
        keys=keys,
        cache=cache,
    )


def _advance(
    step_fn: StepFunction,
    state: _State,
    *,
    choose: Callable[[Float[Array, "B V"], _State], Int[Array, " B"]],
    end_id: int,
    pad_id: int,
) -> _State:
    logits, cache = step_fn(state.token, state.cache)
    token = choose(logits.astype(jnp.float32), state).astype(jnp.int32)
    gain = log_probability(logits, token[:, None])[:, 0]
    # No token is best among NaN or where all are excluded: the row ends here.
    broken = state.broken | (~state.finished & ~jnp.isfinite(gain))
    done = state.finished | broken
    written = ~done & (token != end_id)
    return state._replace(
        time=state.time + 1,
        token=jnp.where(written, token, state.token),
        tokens=state.tokens.at[:, state.time].set(jnp.where(written, token, pad_id)),
        lengths=state.lengths + written.astype(jnp.int32),
        scores=state.scores + jnp.where(done, 0.0, gain),
        finished=done | (token == end_id),
        broken=broken,
        cache=cache,
    )


def _hypotheses(final: _State, *, pad_id: int) -> Hypotheses:
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
