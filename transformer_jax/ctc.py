"""Connectionist temporal classification: outputs written on slots with blanks.

A slot sequence collapses to an output by merging equal neighbours, then dropping blanks
(Graves et al. 2006, "Connectionist Temporal Classification"). All paths that collapse
to one output are a lattice, see `lattice`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.lattice import Band, Lattice, best_path, log_likelihood
from transformer_jax.masks import length_mask, or_zero


def ctc_lattice(
    log_probs: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B U"],
    label_lengths: Int[Array, " B"],
    *,
    blank_id: int,
) -> Lattice:
    """Return the lattice of all ways to write labels with blanks and repeats.

        states 0 .. 2U:  -  a  -  b  -  b  -        moves by 0, 1, and 2 from a to b

    States 0, 2, .. 2U are blanks, states 1, 3, .. the labels; a path goes on by 0 or 1,
    or by 2 from a label to another one that differs (Graves et al. 2006, section 4.1).
    A label that is the blank, or lies outside of V, leaves its row no path.

    Args:
        log_probs: `[B, T, V]`, log-softmax of every slot; T is at least 1.
        lengths: `[B]` in 1..T, slots that count.
        labels: `[B, U]`.
        label_lengths: `[B]`, labels that count.
        blank_id: the blank.

    Returns:
        J = 2U + 1 states over T times.
    """
    rows, places = labels.shape
    counted = length_mask(label_lengths, places)
    legal = (labels >= 0) & (labels < log_probs.shape[2]) & (labels != blank_id)
    sound = (legal | ~counted).all(1, keepdims=True)
    labels = jnp.where(counted & legal, labels, jnp.full_like(labels, blank_id))
    differ = jnp.pad(labels[:, 1:] != labels[:, :-1], ((0, 0), (1, 0)))[:, :places]
    # From label to label; never to a blank, nor to the first label.
    jump = _between(jnp.zeros((rows, places + 1), bool), differ)
    anywhere = jnp.ones_like(jump)
    states = jnp.arange(2 * places + 1, dtype=jnp.int32)[None]
    last = 2 * label_lengths.astype(jnp.int32)[:, None]

    def weight(mask: Bool[Array, "..."]) -> Float[Array, "..."]:
        return jnp.where(mask, 0.0, -jnp.inf).astype(log_probs.dtype)

    return Lattice(
        start=weight((states < 2) & sound),
        emit=_emitted(log_probs, lengths, labels, blank_id),
        moves=Band(weight(jnp.stack([anywhere, anywhere, jump], axis=1))),
        end=weight((states == last) | (states == last - 1)),
        lengths=lengths,
    )


def ctc_log_likelihood(
    log_probs: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B U"],
    label_lengths: Int[Array, " B"],
    *,
    blank_id: int,
) -> Float[Array, " B"]:
    """Return log p(labels): the sum over all slot sequences that collapse to them.

        p(y | x) = sum_{a: collapse(a) = y} prod_t p_t(a_t)

    Collapsing merges equal neighbours, then drops blanks (Graves et al. 2006). There is
    such a sequence iff T >= |y| + number of equal neighbours in y.

    Args:
        log_probs: `[B, T, V]`, log-softmax of every slot, blank included. Any float
            type; the sum is taken in float32 or better. Slots behind `lengths` change
            nothing, whatever they hold.
        lengths: `[B]` in 0..T, slots that count.
        labels: `[B, U]`; what stands behind `label_lengths` changes nothing.
        label_lengths: `[B]` in 0..U.
        blank_id: the blank; in 0..V-1, and no label.

    Returns:
        `[B]`; -inf, with gradient 0, where the labels do not fit their slots or hold
        the blank or an id outside of V. The gradient is the posterior probability of
        each symbol in each slot, given the labels.

    Raises:
        ValueError: `blank_id` lies outside the vocabulary.

    Cost: T steps over 2U + 1 states; memory B T (2U + 1).

    Example:
        >>> fair = jnp.log(jnp.full((1, 2, 2), 0.5))  # aa, a-, -a collapse to a
        >>> slots, one = jnp.array([2]), jnp.array([1])
        >>> label = jnp.array([[0]])
        >>> jnp.exp(ctc_log_likelihood(fair, slots, label, one, blank_id=1)).tolist()
        [0.75]
    """
    check_blank(blank_id, log_probs.shape[2])
    log_probs = _with_a_slot(log_probs)
    parts = log_probs, lengths, labels, label_lengths
    likelihood = log_likelihood(ctc_lattice(*parts, blank_id=blank_id))
    return _or_nothing(likelihood, lengths, label_lengths)


def ctc_alignment(
    log_probs: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B U"],
    label_lengths: Int[Array, " B"],
    *,
    blank_id: int,
) -> tuple[Float[Array, " B"], Int[Array, "B T"]]:
    """Return the log-probability and the ids of the best slots that give the labels.

    The arguments are those of `ctc_log_likelihood`. Where they do not fit, the score is
    -inf; there, and where it is NaN, all slots are blank, as slots behind a row's
    length always are.

    Raises:
        ValueError: `blank_id` lies outside the vocabulary.
    """
    check_blank(blank_id, log_probs.shape[2])
    size = log_probs.shape[1]
    log_probs = _with_a_slot(log_probs)
    parts = log_probs, lengths, labels, label_lengths
    score, states = best_path(ctc_lattice(*parts, blank_id=blank_id))
    score = _or_nothing(score, lengths, label_lengths)
    states = states[:, :size]
    # The last blank has no label to its right.
    written = jnp.pad(labels.astype(jnp.int32), ((0, 0), (0, 1)))
    written = jnp.take_along_axis(written, states // 2, axis=1)
    inside = length_mask(lengths, size) & (score > -jnp.inf)[:, None]
    speaks = (states % 2 == 1) & inside
    return score, jnp.where(speaks, written, jnp.full_like(written, blank_id))


def over_outputs(
    function: Callable[..., Any],
    log_probs: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B R U"],
    label_lengths: Int[Array, "B R"],
    *,
    blank_id: int,
) -> Any:
    """Return what a function gives for each of a row's R outputs, `[B, R, ...]`.

    Args:
        function: `ctc_log_likelihood` or `ctc_alignment`; the other arguments are its.
        log_probs: shared by the outputs of a row.
        lengths: likewise.
        labels: `[B, R, U]`.
        label_lengths: `[B, R]`.
        blank_id: the blank.
    """
    each = functools.partial(function, blank_id=blank_id)
    each = jax.vmap(each, in_axes=(None, None, 1, 1), out_axes=1)
    return each(log_probs, lengths, labels, label_lengths)


def check_blank(blank_id: int, size: int) -> None:
    """Raise ValueError unless the blank is one of `size` outputs."""
    if not 0 <= blank_id < size:
        raise ValueError(f"blank_id must lie in 0..{size - 1}, not {blank_id}")


def _emitted(
    log_probs: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B U"],
    blank_id: int,
) -> Float[Array, "B T J"]:
    """Log-probabilities of every state's symbol; 0 in slots that do not count.

    A gather, no product by a one-hot matrix: minus infinity times 0 is NaN.
    """
    rows, size, _ = log_probs.shape
    chosen = jnp.take_along_axis(log_probs, labels[:, None, :], axis=2)
    blank = log_probs[..., blank_id, None]
    blanks = jnp.broadcast_to(blank, (rows, size, labels.shape[1] + 1))
    emitted = _between(blanks, chosen)
    return or_zero(length_mask(lengths, size)[..., None], emitted)


def _between(outer: Array, inner: Array) -> Array:
    """Interleave along the last axis: one of `outer`, of `inner`, .. of `outer`."""
    width = inner.shape[-1]
    pairs = jnp.stack([outer[..., :width], inner], axis=-1)
    pairs = pairs.reshape(*inner.shape[:-1], 2 * width)
    return jnp.concatenate([pairs, outer[..., width:]], axis=-1)


def _with_a_slot(log_probs: Float[Array, "B T V"]) -> Float[Array, "B slots V"]:
    """Add a slot that counts in no row where there is none: a lattice has a time."""
    return jnp.pad(log_probs, ((0, 0), (0, int(not log_probs.shape[1])), (0, 0)))


def _or_nothing(
    score: Float[Array, " B"],
    lengths: Int[Array, " B"],
    label_lengths: Int[Array, " B"],
) -> Float[Array, " B"]:
    """The score; of rows without a slot, in which nothing is written, 0 or -inf."""
    nothing = jnp.where(label_lengths == 0, 0.0, -jnp.inf).astype(score.dtype)
    return jnp.where(lengths > 0, score, nothing)
