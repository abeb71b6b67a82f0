"""Sums over all paths through a monotone lattice: one scan, several semirings.

A path visits one state j_t at each time t = 0 .. T-1. Its weight is the product

    start[j_0] emit[0, j_0] prod_{t>0} move[j_{t-1}, j_t] emit[t, j_t] end[j_{T-1}]

All weights are given as logarithms; -inf forbids. What is summed how is a semiring:
log-sum-exp gives likelihoods, max the best path, counting the number of paths. Moves
are a band (`Band`: CTC) or any matrix (`Dense`: directed acyclic graphs). Sums are
taken in float32, or in float64 where a weight is float64.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from transformer_jax.masks import or_zero


class Band(NamedTuple):
    """Moves by 0, 1, .. K-1 states: `weights[b, d, j]` of arriving in j from j - d."""

    weights: Float[Array, "B K J"]

    def arrivals(
        self, values: Array, times: Callable, zero: Any
    ) -> Num[Array, "B K J"]:
        """Return what comes to each state by each move, where `values` is before."""
        return jnp.stack(self._by_move(values, times, zero), axis=1)

    def split(
        self, before: Float[Array, "B J"], here: Float[Array, "B J"]
    ) -> tuple[Float[Array, "B K J"], Float[Array, "B J"]]:
        """Divide what is in each state among the moves that lead there.

        Args:
            before: log-sums at the time before.
            here: what to divide, posteriors of the states; 0 where nothing arrives.

        Returns:
            The part of each move, in the shape of `weights`, and its sum over the moves
            that leave a state: the posteriors at the time before.
        """
        # The softmax of `arrivals`, one array a move: XLA's CPU code for their stack
        # takes three times as long.
        terms = self._by_move(before, jnp.add, -jnp.inf)
        top = _finite(functools.reduce(jnp.maximum, terms))
        parts = [jnp.exp(term - top) for term in terms]
        unit = here / jnp.maximum(sum(parts), 1)
        shares = [part * unit for part in parts]
        left = sum(_shifted(share, -move, 0.0) for move, share in enumerate(shares))
        return jnp.stack(shares, axis=1), left

    def predecessor(self, state: Array, choice: Array) -> Int[Array, " B"]:
        """Return the state that `arrivals` has at place `choice` of its axis K."""
        return state - choice

    def _by_move(self, values: Array, times: Callable, zero: Any) -> list[Array]:
        moves = range(self.weights.shape[1])
        return [times(_shifted(values, d, zero), self.weights[:, d]) for d in moves]


class Dense(NamedTuple):
    """Moves by any matrix: `weights[b, i, j]` of going from i to j."""

    weights: Float[Array, "B J J"]

    def arrivals(
        self, values: Array, times: Callable, zero: Any
    ) -> Num[Array, "B J J"]:
        """Return what comes to each state from each, where `values` is before."""
        del zero
        return times(values[:, :, None], self.weights)

    def split(
        self, before: Float[Array, "B J"], here: Float[Array, "B J"]
    ) -> tuple[Float[Array, "B J J"], Float[Array, "B J"]]:
        """Divide what is in each state among its predecessors; see `Band.split`."""
        terms = self.arrivals(before, jnp.add, -jnp.inf)
        shares = _softmax(terms) * here[:, None]
        return shares, shares.sum(2)

    def predecessor(self, state: Array, choice: Array) -> Int[Array, " B"]:
        """Return the state that `arrivals` has at place `choice` of its axis K."""
        del state
        return choice


class Lattice(NamedTuple):
    """Log-weights of a batch of lattices, of any float types.

    Attributes:
        start: `[B, J]`, of beginning in a state.
        emit: `[B, T, J]`, of being in a state at a time; T is at least 1.
        moves: `Band` or `Dense`, of going from one state to the next.
        end: `[B, J]`, of ending in a state.
        lengths: integers `[B]` in 1..T, times that count; what is emitted later
            changes nothing, whatever it is.
    """

    start: Float[Array, "B J"]
    emit: Float[Array, "B T J"]
    moves: Band | Dense
    end: Float[Array, "B J"]
    lengths: Int[Array, " B"]


class Semiring(NamedTuple):
    """What paths are summed by.

    Attributes:
        zero: sum of no path.
        times: joins the parts of a path.
        add: (values, axis) -> sum over paths.
        lift: log-weight -> value.
    """

    zero: Any
    times: Callable
    add: Callable
    lift: Callable


def _log_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Log-sum-exp for which the sum of nothing is -inf, without a NaN behind it."""
    top = x.max(axis, keepdims=True)
    total = jnp.exp(x - _finite(top)).sum(axis)
    # The largest summand is 1, or there is none.
    return jnp.log(jnp.maximum(total, 1)) + top.squeeze(axis)


def _softmax(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Shares along axis 1; zeros where all is -inf.

    Divided by their own sum, they add up to 1 also where a sum of logarithms is large
    and coarse: an error here would multiply from time to time.
    """
    parts = jnp.exp(x - _finite(x.max(1, keepdims=True)))
    return parts / jnp.maximum(parts.sum(1, keepdims=True), 1)


def _saturating_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sum that ends at the largest number: infinity times no path would be NaN."""
    return jnp.minimum(x.sum(axis), jnp.finfo(x.dtype).max)


LOG = Semiring(-jnp.inf, jnp.add, _log_sum, lambda x: x)
MAX = Semiring(-jnp.inf, jnp.add, jnp.max, lambda x: x)
COUNT = Semiring(
    0.0, jnp.multiply, _saturating_sum, lambda x: (x > -jnp.inf).astype(x.dtype)
)


def count_paths(lattice: Lattice) -> Float[Array, " B"]:
    """Return the number of paths whose weight is not 0.

    Exact up to 2^24 (float64: 2^53), rounded beyond; never above the largest number.
    """
    return _scan(COUNT, _wide(lattice))[0]


def best_path(lattice: Lattice) -> tuple[Float[Array, " B"], Int[Array, "B T"]]:
    """Return the largest log-weight of a path and its states (Viterbi 1967).

    Back-pointers are stored, so of equal paths it is one, never a mixture. Behind a
    row's length the last state is repeated; without a path the score is -inf and the
    states mean nothing.

    Cost: as `log_likelihood`.
    """
    lattice = _wide(lattice)

    def choice(before: Array, terms: Array) -> Int[Array, "B J"]:
        del before
        return jnp.argmax(terms, axis=1).astype(jnp.int32)

    score, final, choices = _scan(MAX, lattice, choice)
    last = jnp.argmax(final + lattice.end, axis=1).astype(jnp.int32)

    def back(state: Array, inputs: Any) -> tuple[Array, Array]:
        chosen, time = inputs
        chosen = jnp.take_along_axis(chosen, state[:, None], axis=1)[:, 0]
        before = jnp.maximum(lattice.moves.predecessor(state, chosen), 0)
        return jnp.where(time < lattice.lengths, before, state), state

    first, states = jax.lax.scan(back, last, (choices, _later(lattice)), reverse=True)
    return score, jnp.concatenate([first[None], states]).T


def log_likelihood(lattice: Lattice) -> Float[Array, " B"]:
    """Return the logarithm of the sum over all paths, -inf where there is none.

    The gradient with respect to a log-weight is the posterior probability that a path
    uses it, by one pass back over the stored sums (Rabiner 1989, section III); it is 0
    in rows without a path. Its own derivatives are right, too; JAX refuses forward mode
    alone.

    Cost: time T times the size of `moves`, memory B T J.
    """
    return _log_likelihood(_wide(lattice))


@jax.custom_vjp
def _log_likelihood(lattice: Lattice) -> Float[Array, " B"]:
    return _scan(LOG, lattice)[0]


def _likelihood_forward(lattice: Lattice) -> tuple[Array, Any]:
    total, final, sums = _scan(LOG, lattice, lambda before, terms: before)
    return total, (lattice, total, final, sums)


def _likelihood_backward(residuals: Any, gradient: Array) -> tuple[Lattice]:
    lattice, total, final, sums = residuals
    possible = (total != -jnp.inf)[:, None]
    last = or_zero(possible, _softmax(final + lattice.end) * gradient[:, None])

    def back(carry: Any, inputs: Any) -> tuple[Any, Array]:
        """From the posteriors of the states at one time to those at the time before."""
        here, of_moves = carry
        before, time = inputs
        inside = (time < lattice.lengths)[:, None]
        emitted = or_zero(inside, here)
        shares, left = lattice.moves.split(before, emitted)
        return (jnp.where(inside, left, here), of_moves + shares), emitted

    first = (last, jnp.zeros_like(lattice.moves.weights))
    (start, of_moves), emitted = jax.lax.scan(
        back, first, (sums, _later(lattice)), reverse=True
    )
    emit = jnp.moveaxis(jnp.concatenate([start[None], emitted]), 0, 1)
    return (Lattice(start, emit, type(lattice.moves)(of_moves), last, None),)


_log_likelihood.defvjp(_likelihood_forward, _likelihood_backward)


def _scan(
    ring: Semiring,
    lattice: Lattice,
    keep: Callable = lambda before, terms: None,
) -> tuple[Array, Array, Any]:
    """Sum over all paths, time after time.

    Args:
        ring: how to sum.
        lattice: over what; of one float type.
        keep: (sums before a step `[B, J]`, the step's summands `[B, K, J]`) -> what to
            keep of the step.

    Returns:
        The sum over all paths `[B]`; over those to each state at the row's last time,
        `[B, J]`; and what was kept, `[T - 1, ...]`.
    """
    emit = jnp.moveaxis(ring.lift(lattice.emit), 1, 0)
    moves = type(lattice.moves)(ring.lift(lattice.moves.weights))

    def step(before: Array, inputs: Any) -> tuple[Array, Any]:
        emitted, time = inputs
        terms = moves.arrivals(before, ring.times, ring.zero)
        arrived = ring.times(ring.add(terms, 1), emitted)
        inside = (time < lattice.lengths)[:, None]
        return jnp.where(inside, arrived, before), keep(before, terms)

    first = ring.times(ring.lift(lattice.start), emit[0])
    final, kept = jax.lax.scan(step, first, (emit[1:], _later(lattice)))
    return ring.add(ring.times(final, ring.lift(lattice.end)), 1), final, kept


def _wide(lattice: Lattice) -> Lattice:
    """The lattice with all weights of one type, float32 or better."""
    weights = jax.tree.leaves(lattice._replace(lengths=None))
    exact = any(leaf.dtype == jnp.float64 for leaf in weights)
    wide = jnp.float64 if exact else jnp.float32
    cast = jax.tree.map(lambda leaf: leaf.astype(wide), lattice._replace(lengths=None))
    return cast._replace(lengths=lattice.lengths.astype(jnp.int32))


def _later(lattice: Lattice) -> Int[Array, " steps"]:
    """All times but the first."""
    return jnp.arange(1, lattice.emit.shape[1], dtype=jnp.int32)


def _finite(log_weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """0 in place of -inf, so that differences are no NaN."""
    return or_zero(log_weight != -jnp.inf, log_weight)


def _shifted(values: Num[Array, "B J"], by: int, zero: Any) -> Num[Array, "B J"]:
    """Move values to higher states, or to lower ones if `by` is negative."""
    ahead, behind = max(by, 0), max(-by, 0)
    size = values.shape[1]
    padded = jnp.pad(values, ((0, 0), (ahead, behind)), constant_values=zero)
    return padded[:, behind : behind + size]
