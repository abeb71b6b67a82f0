"""Beam search: the best continuations of the best prefixes, with an exact stop."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from transformer_jax.decoding import search
from transformer_jax.decoding.hypotheses import Hypotheses, Status
from transformer_jax.decoding.logits import largest, log_probability
from transformer_jax.decoding.search import Search, StepFunction
from transformer_jax.types import PyTree

# What a sum of log-probabilities is divided by: (n, alpha) -> number; n counts END.
PENALTIES = {
    "none": lambda n, alpha: 1.0,
    "average": lambda n, alpha: n**alpha,
    "gnmt": lambda n, alpha: ((5.0 + n) / 6.0) ** alpha,
}


class _Setup(NamedTuple):
    """What a search is asked for; see `beam_search`."""

    beam_size: int
    num_return: int
    max_length: int
    end_id: int
    pad_id: int
    penalty: str
    alpha: float

    def divisor(self, n: ArrayLike) -> Float[Array, "..."]:
        """The length penalty of n tokens, END counted."""
        n = jnp.maximum(n, 1).astype(jnp.float32)
        penalty = PENALTIES[self.penalty](n, jnp.float32(self.alpha))
        return jnp.broadcast_to(jnp.float32(penalty), n.shape)


class _State(NamedTuple):
    """State after `time` steps. A row has W slots, each live, ended or empty."""

    time: jax.Array  # int32 [], steps taken so far
    token: jax.Array  # int32 [B, W], the last token, input of the next step
    tokens: jax.Array  # int32 [B, W, T], PAD where nothing is written
    lengths: jax.Array  # int32 [B, W], tokens before END; grows until END
    sums: jax.Array  # float32 [B, W], log-probabilities summed; -inf in empty slots
    ended: jax.Array  # bool [B, W], END has come: the slot never changes again
    finished: jax.Array  # bool [B], nothing that is live can change the result
    cache: PyTree  # leaves [B * W, ...]

    def live(self) -> jax.Array:
        """Mark the slots whose prefixes can be continued, `[B, W]`."""
        return ~self.ended & (self.sums > -jnp.inf)


def beam_search(
    step_fn: StepFunction,
    cache: PyTree,
    start: Int[Array, " B"],
    *,
    beam_size: int,
    num_return: int,
    max_length: int,
    end_id: int,
    pad_id: int,
    penalty: str = "none",
    alpha: float = 0.6,
) -> Hypotheses:
    """Keep the best prefixes at every step and return the best finished ones.

        score(y) = sum_t log p(y_t | y_<t) / penalty(n),  n counts END
        none: 1    average: n^alpha    gnmt: ((5 + n) / 6)^alpha

    Wu et al. 2016, section 7 (GNMT, without its coverage penalty). Every step ranks all
    continuations of the live prefixes by their sums and keeps the best
    (beam_size - ended). One that ends by END among them keeps its slot and is never
    displaced; END below them is dropped, so a beam of 1 is `greedy`. A row stops where
    `num_return` have ended and no live sum over the penalty at `max_length`, the most
    it can still score, beats the last of them. Among prefixes that were never dropped
    the result is exact.

    Args:
        step_fn: `(tokens [M], cache) -> (logits [M, V], cache)`, pure; M = B beam_size,
            a row's beams adjacent.
        cache: pytree of leaves `[B, ...]`; they are repeated, and gathered once a step.
        start: int32 `[B]`, the first input, BOS as a rule.
        beam_size: slots of a row, at least 1; may exceed the vocabulary.
        num_return: hypotheses to return, n, at most `beam_size`.
        max_length: longest output, END counted; at least 1.
        end_id: the token that ends an output.
        pad_id: fills `tokens` behind the end.
        penalty: "none", "average" or "gnmt".
        alpha: strength of the penalty, not negative.

    Returns:
        tokens `[B, n, max_length]`, best first, all different. Status OK, EMPTY,
        UNFINISHED (no END within `max_length`; after all finished ones, its score
        divided in the same way), ABSENT (fewer exist), INFEASIBLE (the first of a row
        in which nothing has a finite log-probability).

    Raises:
        ValueError: an argument lies outside its range.

    Cost: beam_size steps' work a step, one copy of the cache included.

    Example:
        >>> def step(tokens, cache):  # END = 1 may follow anything
        ...     return jnp.log(jnp.array([[0.0, 0.4, 0.6]])).repeat(3, 0), cache
        >>> found = beam_search(step, (), jnp.array([0]), beam_size=3, num_return=2,
        ...     max_length=3, end_id=1, pad_id=0)
        >>> found.tokens[0].tolist(), [f"{p:.2f}" for p in jnp.exp(found.scores[0])]
        ([[0, 0, 0], [2, 0, 0]], ['0.40', '0.24'])
    """
    pieces = beam_pieces(
        beam_size=beam_size,
        num_return=num_return,
        max_length=max_length,
        end_id=end_id,
        pad_id=pad_id,
        penalty=penalty,
        alpha=alpha,
    )
    return search.decode(pieces, step_fn, cache, start)


def beam_pieces(
    *,
    beam_size: int,
    num_return: int,
    max_length: int,
    end_id: int,
    pad_id: int,
    penalty: str = "none",
    alpha: float = 0.6,
) -> Search:
    """Return `beam_search` in pieces; the arguments are its own."""
    setup = _Setup(
        beam_size, num_return, max_length, end_id, pad_id, penalty, float(alpha)
    )
    _check(setup)
    return Search(
        begin=functools.partial(_begin, setup),
        advance=functools.partial(_advance, setup),
        finished=lambda state: state.finished,
        result=functools.partial(_hypotheses, setup),
        max_length=max_length,
    )


def _check(setup: _Setup) -> None:
    search.check_max_length(setup.max_length)
    search.check_beam(setup.beam_size, setup.num_return)
    if setup.penalty not in PENALTIES:
        raise ValueError(
            f"penalty must be one of {', '.join(PENALTIES)}, not {setup.penalty!r}"
        )
    # Below 0 a longer output could not gain by its length, and the stop were wrong.
    if not 0 <= setup.alpha < math.inf:
        raise ValueError(f"alpha must not be negative or infinite: {setup.alpha}")


def _begin(setup: _Setup, cache: PyTree, start: Int[Array, " B"], _: Any) -> _State:
    """One live prefix a row, the empty one."""
    shape = (start.shape[0], setup.beam_size)
    first = jnp.arange(setup.beam_size) == 0
    return _State(
        time=jnp.zeros((), jnp.int32),
        token=jnp.broadcast_to(start[:, None], shape),
        tokens=jnp.full((*shape, setup.max_length), setup.pad_id, jnp.int32),
        lengths=jnp.zeros(shape, jnp.int32),
        sums=jnp.broadcast_to(
            jnp.where(first, jnp.float32(0), jnp.float32(-jnp.inf))[None], shape
        ),
        ended=jnp.zeros(shape, bool),
        finished=jnp.zeros(shape[0], bool),
        cache=jax.tree.map(
            lambda leaf: jnp.repeat(leaf, setup.beam_size, axis=0), cache
        ),
    )


def _advance(setup: _Setup, step_fn: StepFunction, state: _State) -> _State:
    logits, cache = step_fn(state.token.reshape(-1), state.cache)
    sums, parents, token = _best_continuations(setup, logits, state)
    kept = state.ended | state.finished[:, None]
    # The j-th best continuation goes to the j-th slot that is not kept.
    rank = jnp.maximum(jnp.cumsum(~state.ended, axis=1) - 1, 0)
    slots = jnp.arange(setup.beam_size, dtype=jnp.int32)[None]
    parents = jnp.where(kept, slots, _take(parents, rank))
    sums = jnp.where(kept, state.sums, _take(sums, rank))
    token = _take(token, rank)
    alive = ~kept & (sums > -jnp.inf)
    written = alive & (token != setup.end_id)
    tokens = _take(state.tokens, parents)
    state = state._replace(
        time=state.time + 1,
        token=jnp.where(written, token, state.token),
        tokens=tokens.at[:, :, state.time].set(
            jnp.where(written, token, _at(tokens, state.time))
        ),
        lengths=_take(state.lengths, parents) + written.astype(jnp.int32),
        sums=sums,
        ended=jnp.where(kept, state.ended, alive & ~written),
        cache=_reordered(cache, parents),
    )
    return state._replace(finished=state.finished | _is_final(setup, state))


def _best_continuations(
    setup: _Setup, logits: Float[Array, "M V"], state: _State
) -> tuple[Float[Array, "B W"], Int[Array, "B W"], Int[Array, "B W"]]:
    """The W largest sums over all live prefixes and tokens, best first.

    Returns sums, slots of the prefixes and tokens; sums of -inf stand for none. Of
    equal ones the lower slot comes first, then the lower token.
    """
    rows, beam_size = state.sums.shape
    # No more than W continuations of one prefix can be among the W best.
    width = min(beam_size, logits.shape[1])
    token = largest(logits.astype(jnp.float32), width)[1]
    gains = log_probability(logits, token)
    # Of a prefix whose distribution is broken nothing goes on.
    gains = jnp.where(jnp.isnan(gains), -jnp.inf, gains)
    sums = state.sums[..., None] + gains.reshape(rows, beam_size, width)
    sums = jnp.where(state.live()[..., None], sums, -jnp.inf)
    sums, places = largest(sums.reshape(rows, beam_size * width), beam_size)
    token = token.reshape(rows, beam_size * width)
    return sums, places // width, _take(token, places)


def _is_final(setup: _Setup, state: _State) -> jax.Array:
    """Mark the rows in which nothing live can enter the result, `[B]`."""
    live = state.live()
    scores = state.sums / setup.divisor(state.lengths + 1)
    scores = jnp.where(state.ended, scores, -jnp.inf)
    last = largest(scores, setup.num_return)[0][:, -1]
    most = jnp.where(live, state.sums, -jnp.inf).max(axis=1)
    most = most / setup.divisor(jnp.full_like(most, setup.max_length))
    return ~live.any(axis=1) | ((last > -jnp.inf) & (last >= most))


def _hypotheses(setup: _Setup, final: _State) -> Hypotheses:
    """Return the best slots: ended ones first, then by their scores."""
    live = final.live()
    count = final.lengths + final.ended.astype(jnp.int32)
    scores = jnp.where(final.ended | live, final.sums / setup.divisor(count), -jnp.inf)
    status = jnp.where(final.lengths == 0, Status.EMPTY, Status.OK)
    status = jnp.where(live, Status.UNFINISHED, status)
    status = jnp.where(final.ended | live, status, Status.ABSENT).astype(jnp.int32)
    order = jnp.lexsort((-scores, ~final.ended))[:, : setup.num_return]
    status, scores = _take(status, order), _take(scores, order)
    absent = status == Status.ABSENT
    nothing = absent[:, :1] & (jnp.arange(setup.num_return) == 0)[None]
    return Hypotheses(
        tokens=jnp.where(absent[..., None], setup.pad_id, _take(final.tokens, order)),
        lengths=jnp.where(absent, 0, _take(final.lengths, order)),
        scores=scores,
        status=jnp.where(nothing, Status.INFEASIBLE, status).astype(jnp.int32),
    )


def _take(array: Array, slots: Int[Array, "B W"]) -> Array:
    """Gather slots within each row: `[B, W, ...]` by `[B, W]`."""
    slots = slots.reshape(slots.shape + (1,) * (array.ndim - 2))
    return jnp.take_along_axis(array, slots, axis=1)


def _at(tokens: Int[Array, "B W T"], time: Int[Array, ""]) -> Int[Array, "B W"]:
    return jax.lax.dynamic_index_in_dim(tokens, time, axis=2, keepdims=False)


def _reordered(cache: PyTree, parents: Int[Array, "B W"]) -> PyTree:
    """Give every slot its prefix's cache: one gather with one index."""
    rows, beam_size = parents.shape
    if beam_size == 1:
        return cache
    index = (jnp.arange(rows) * beam_size)[:, None] + parents
    return jax.tree.map(lambda leaf: leaf[index.reshape(-1)], cache)
