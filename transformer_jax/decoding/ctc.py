"""Reading an output off slots with blanks: the best slots, or the best prefixes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.ctc import check_blank, ctc_log_likelihood, over_outputs
from transformer_jax.decoding.hypotheses import Hypotheses, candidates_ranked
from transformer_jax.decoding.logits import largest, log_softmax
from transformer_jax.decoding.search import check_beam, check_count
from transformer_jax.masks import length_mask


def collapse(
    slots: Int[Array, "B T"], lengths: Int[Array, " B"], *, blank_id: int, pad_id: int
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Merge equal neighbours, then drop blanks (Graves et al. 2006, section 3.1).

        a a - a b b -   ->   a a b

    Args:
        slots: `[B, T]`.
        lengths: `[B]`, slots that count.
        blank_id: the blank.
        pad_id: fills the outputs behind their ends.

    Returns:
        Outputs `[B, T]` and their lengths `[B]`.
    """
    inside = length_mask(lengths, slots.shape[1])
    fresh = jnp.pad(slots[:, 1:] != slots[:, :-1], ((0, 0), (1, 0)), constant_values=1)
    kept = fresh & (slots != blank_id) & inside
    # A stable sort brings what is kept to the front, in order.
    order = jnp.argsort(~kept, axis=1)
    counts = kept.sum(1).astype(jnp.int32)
    written = length_mask(counts, slots.shape[1])
    tokens = jnp.take_along_axis(slots, order, axis=1)
    return jnp.where(written, tokens, pad_id).astype(jnp.int32), counts


def ctc_greedy(
    logits: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    *,
    max_length: int,
    blank_id: int,
    pad_id: int,
) -> Hypotheses:
    """Take every slot's most probable symbol and collapse them (best path decoding).

    Graves et al. 2006, section 3.2. The score is not that of the slots but the
    log-likelihood of the output, summed over all slots that give it.

    Args:
        logits: `[B, T, V]`, of symbols and blank.
        lengths: `[B]`, slots that count.
        max_length: longest output; a longer one is cut.
        blank_id: the blank.
        pad_id: fills `tokens` behind the end.

    Returns:
        One hypothesis a row: tokens `[B, 1, min(T, max_length)]`. Status OK, EMPTY
        (all blank), UNFINISHED (cut), INFEASIBLE (no finite probability).

    Raises:
        ValueError: `max_length` is below 1, or `blank_id` lies outside of V.
    """
    check_count("max_length", max_length)
    check_blank(blank_id, logits.shape[2])
    log_probs = log_softmax(logits)
    slots = jnp.argmax(logits, axis=2).astype(jnp.int32)
    tokens, counts = collapse(slots, lengths, blank_id=blank_id, pad_id=pad_id)
    width = min(logits.shape[1], max_length)
    cut = counts > width
    counts = jnp.minimum(counts, width)
    scores = ctc_log_likelihood(
        log_probs, lengths, tokens[:, :width], counts, blank_id=blank_id
    )
    return candidates_ranked(
        tokens[:, None, :width],
        counts[:, None],
        scores[:, None],
        pad_id=pad_id,
        unfinished=cut[:, None],
    )


class _Prefixes(NamedTuple):
    """The W best prefixes after some slots; what is none has the probability 0."""

    tokens: jax.Array  # int32 [B, W, U], PAD behind the end
    lengths: jax.Array  # int32 [B, W]
    last: jax.Array  # int32 [B, W], the last symbol, -1 at first
    by_blank: jax.Array  # float32 [B, W], log p of slots that end by a blank
    by_label: jax.Array  # float32 [B, W], log p of slots that end by the last symbol

    def total(self) -> jax.Array:
        """Log-probability of a prefix, `[B, W]`."""
        return jnp.logaddexp(self.by_blank, self.by_label)


def ctc_beam_search(
    logits: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    *,
    beam_size: int,
    num_return: int,
    max_length: int,
    blank_id: int,
    pad_id: int,
) -> Hypotheses:
    """Keep the most probable prefixes from slot to slot, equal ones merged.

    Prefix beam search (Hannun et al. 2014, algorithm 1, without a language model). The
    score of an output is its exact log-likelihood (`ctc.ctc_log_likelihood`), also
    where some of its slots were dropped on the way; the order is by that.

    Args:
        logits: `[B, T, V]`, of symbols and blank.
        lengths: `[B]`, slots that count.
        beam_size: prefixes to keep, W; may exceed the vocabulary.
        num_return: hypotheses to return, n, at most W.
        max_length: longest output.
        blank_id: the blank.
        pad_id: fills `tokens` behind the end.

    Returns:
        tokens `[B, n, min(T, max_length)]`, best first, all different. Status OK,
        EMPTY, ABSENT (fewer exist), INFEASIBLE (the first of a row in which nothing has
        a finite probability).

    Raises:
        ValueError: an argument lies outside its range.

    Cost: T steps over W V continuations and W^2 U comparisons a row.
    """
    check_count("max_length", max_length)
    check_beam(beam_size, num_return)
    check_blank(blank_id, logits.shape[2])
    rows, size, _ = logits.shape
    width = min(size, max_length)
    log_probs = log_softmax(logits)
    first = _first(rows, beam_size, width, pad_id)

    def step(prefixes: _Prefixes, inputs: Any) -> tuple[_Prefixes, None]:
        slot, time = inputs
        inside = time < lengths
        return _advance(prefixes, slot, inside, blank_id), None

    slots = (jnp.moveaxis(log_probs, 1, 0), jnp.arange(size))
    final, _ = jax.lax.scan(step, first, slots)
    parts = log_probs, lengths, final.tokens, final.lengths
    scores = over_outputs(ctc_log_likelihood, *parts, blank_id=blank_id)
    scores = jnp.where(final.total() > -jnp.inf, scores, -jnp.inf)
    found = candidates_ranked(final.tokens, final.lengths, scores, pad_id=pad_id)
    return Hypotheses(*(field[:, :num_return] for field in found))


def _first(rows: int, beam_size: int, width: int, pad_id: int) -> _Prefixes:
    """The empty prefix, alone."""
    shape = (rows, beam_size)
    alone = jnp.broadcast_to(jnp.arange(beam_size)[None] == 0, shape)
    return _Prefixes(
        tokens=jnp.full((*shape, width), pad_id, jnp.int32),
        lengths=jnp.zeros(shape, jnp.int32),
        last=jnp.full(shape, -1, jnp.int32),
        by_blank=jnp.where(alone, jnp.float32(0), jnp.float32(-jnp.inf)),
        by_label=jnp.full(shape, -jnp.inf, jnp.float32),
    )


def _advance(
    now: _Prefixes,
    slot: Float[Array, "B V"],
    inside: Bool[Array, " B"],
    blank_id: int,
) -> _Prefixes:
    """The best prefixes after one more slot; rows that are over stay."""
    rows, beam_size = now.lengths.shape
    total, stay = now.total(), jnp.maximum(now.last, 0)
    by_blank = total + slot[:, blank_id, None]
    by_label = now.by_label + jnp.take_along_axis(slot, stay, axis=1)
    grown = _grown(now, total, slot, blank_id)
    # A prefix that is another one with one symbol more is reached from there, too.
    parent = _parents(now)
    reached = jnp.take_along_axis(
        grown, jnp.broadcast_to(stay[:, None, :], parent.shape), axis=2
    )
    reached = jnp.where(parent, reached, -jnp.inf).max(1)
    by_label = jnp.logaddexp(by_label, reached)
    rank = jnp.arange(beam_size)[None, :, None]
    place = jnp.arange(rows)[:, None, None], rank, stay[:, None, :]
    grown = grown.at[place].min(jnp.where(parent, -jnp.inf, jnp.inf))
    # No more than W continuations of one prefix can be among the W best.
    width = min(beam_size, slot.shape[1])
    gains, added = largest(grown, width)
    gains = gains.reshape(rows, beam_size * width)
    scores = jnp.concatenate([jnp.logaddexp(by_blank, by_label), gains], axis=1)
    _, places = largest(scores, beam_size)
    old = places < beam_size
    from_grown = jnp.maximum(places - beam_size, 0)
    source = jnp.where(old, places, from_grown // width)

    def take(array: Array) -> Array:
        index = source.reshape(source.shape + (1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, index, axis=1)

    new = jnp.take_along_axis(added.reshape(gains.shape), from_grown, axis=1)
    gain = jnp.take_along_axis(gains, from_grown, axis=1)
    tokens, lengths = take(now.tokens), take(now.lengths)
    here = jnp.arange(tokens.shape[2])[None, None] == lengths[..., None]
    after = _Prefixes(
        tokens=jnp.where(here & ~old[..., None], new[..., None], tokens),
        lengths=lengths + (~old).astype(jnp.int32),
        last=jnp.where(old, take(now.last), new),
        by_blank=jnp.where(old, take(by_blank), -jnp.inf),
        by_label=jnp.where(old, take(by_label), gain),
    )
    return jax.tree.map(
        lambda one, other: jnp.where(
            inside.reshape(rows, *(1,) * (one.ndim - 1)), one, other
        ),
        after,
        now,
    )


def _grown(
    now: _Prefixes, total: Array, slot: Float[Array, "B V"], blank_id: int
) -> Float[Array, "B W V"]:
    """Log-probabilities of each prefix with each symbol more.

    Only behind a blank can a symbol follow itself.
    """
    symbols = jnp.arange(slot.shape[1], dtype=jnp.int32)[None, None]
    same = symbols == now.last[..., None]
    grown = slot[:, None] + jnp.where(same, now.by_blank[..., None], total[..., None])
    full = now.lengths >= now.tokens.shape[2]
    return jnp.where((symbols == blank_id) | full[..., None], -jnp.inf, grown)


def _parents(now: _Prefixes) -> Bool[Array, "B W W"]:
    """Tell of prefixes i and k whether k is i with one symbol more, `[B, i, k]`."""
    longer = now.lengths[:, None, :] == now.lengths[:, :, None] + 1
    places = jnp.arange(now.tokens.shape[2])[None, None]
    behind = places >= now.lengths[..., None]
    same = (now.tokens[:, :, None] == now.tokens[:, None, :]) | behind[:, :, None]
    return longer & same.all(3)
