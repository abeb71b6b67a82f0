"""Fake models that fill a canvas at once, and their decoding in plain loops."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from decoding_oracle import Found

from transformer_jax.decoding import Status

# The mask is beyond the vocabulary: it cannot be written, only be left.
PAD, BLANK, END, MASK = 0, 1, 2, 7
STATES = 97
NONE = Found((), -np.inf, Status.ABSENT)


class Model(NamedTuple):
    """Row b says `logits[b, h]` at a place; h hashes n, the n tokens and the place.

    `logits [B, 97, V]`; `lengths [B, m]` and `scores [B, m]` are the candidates of the
    strategies that are given lengths; the first one is the canvas of the others.
    """

    logits: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray

    def log_probs(self, row, tokens):
        """Float64 `[n, V]` on a canvas of n tokens."""
        told = 13 * len(tokens) + sum(
            (token + 1) * _weight(place) for place, token in enumerate(tokens)
        )
        states = [(told + 31 * place) % STATES for place in range(len(tokens))]
        return log_softmax(self.logits[row, states])

    def predict(self, candidates, poison):
        """The canvas function; behind a row's length `poison` stands for END."""
        table = jnp.asarray(self.logits)
        rows = jnp.repeat(jnp.arange(len(table)), candidates)[:, None]

        def predict(tokens, lengths):
            places = jnp.arange(tokens.shape[1])[None]
            inside = places < lengths[:, None]
            told = jnp.where(inside, (tokens + 1) * _weight(places), 0).sum(1)
            states = ((told + 13 * lengths)[:, None] + 31 * places) % STATES
            behind = jnp.zeros_like(table[rows, states]).at[..., END].set(poison)
            return jnp.where(inside[..., None], table[rows, states], behind)

        return predict


def _weight(place):
    return 7 * place * place + 3 * place + 11


def random_model(seed, *, lengths, words=range(1, 7), dtype=jnp.float32):
    """One of seven symbols, with candidates `lengths [B, m]` of random scores."""
    draw = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int32)
    logits = draw.normal(size=(len(lengths), STATES, MASK)).astype(np.float32) * 2
    logits[..., sorted({*range(MASK)} - {*words})] = -np.inf
    scores = -draw.exponential(size=lengths.shape).astype(np.float32)
    return Model(np.asarray(jnp.asarray(logits, dtype)), lengths, scores)


def log_softmax(logits):
    """In float64; NaN where nothing is finite."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def best_first(entries, count):
    """Finished before unfinished, each by its score; what is not there is ABSENT."""
    sound = [entry for entry in entries if math.isfinite(entry.score)]
    sound.sort(key=lambda entry: (entry.status == Status.UNFINISHED, -entry.score))
    if not sound:
        sound = [NONE._replace(status=Status.INFEASIBLE)]
    return (sound + [NONE] * count)[:count]


def status_of(tokens):
    return Status.OK if len(tokens) else Status.EMPTY


def parallel(model, row, size):
    """Every place of a canvas of masks by its best symbol."""
    found = []
    for n, score in zip(model.lengths[row], model.scores[row], strict=True):
        if 0 <= n <= size:
            log_probs = model.log_probs(row, [MASK] * n)
            tokens = tuple(line.argmax().item() for line in log_probs)
            found.append(
                Found(tokens, score + sum_of_best(log_probs), status_of(tokens))
            )
    return best_first(found, len(model.lengths[row]))


def sum_of_best(log_probs):
    return sum(line.max() for line in log_probs)


def mask_predict(model, row, size, passes):
    """The least certain places of a canvas are hidden and written anew."""
    found = []
    for n in model.lengths[row]:
        if not 1 <= n <= size:
            continue
        tokens, gains = [MASK] * n, [-np.inf] * n
        for time in range(passes):
            hidden = sorted(range(n), key=gains.__getitem__)
            hidden = hidden[: math.floor(n * (passes - time) / passes)]
            for place in hidden:
                tokens[place] = MASK
            log_probs = model.log_probs(row, tokens)
            for place in hidden:
                tokens[place] = log_probs[place].argmax().item()
                gains[place] = log_probs[place].max()
        found.append(Found(tuple(tokens), sum(gains) / n, Status.OK))
    return best_first(found, len(model.lengths[row]))


def overgenerate(log_probs, count):
    """Cut `[n, V]` at the first best END, and where END is most probable besides."""
    places = range(len(log_probs))
    first = [place for place in places if log_probs[place].argmax() == END][:1]
    others = sorted(set(places) - {*first}, key=lambda place: -log_probs[place, END])
    words = np.delete(log_probs, END, axis=1)
    ids = np.delete(np.arange(log_probs.shape[1]), END)

    def cut(stop):
        written = tuple(ids[line.argmax()].item() for line in words[:stop])
        score = sum_of_best(words[:stop])
        if stop == len(words):
            return Found(written, score, Status.UNFINISHED)
        return Found(written, score + log_probs[stop, END], status_of(written))

    found = [cut(stop) for stop in (first or [len(words)]) + others]
    sound = [entry for entry in found if math.isfinite(entry.score)]
    return best_first(sound[:count], count)


def collapse(path):
    """Of equal neighbours one is kept, then blanks are dropped."""
    merged = [symbol for symbol, _ in itertools.groupby(path)]
    return tuple(symbol for symbol in merged if symbol != BLANK)


def outputs(log_probs):
    """Log-probability of every output of slots `[T, V]` that has one, by all paths."""
    found = {}
    possible = [np.flatnonzero(line > -np.inf).tolist() for line in log_probs]
    for path in itertools.product(*possible):
        gain = sum(line[symbol] for line, symbol in zip(log_probs, path, strict=True))
        output = collapse(path)
        found[output] = np.logaddexp(found.get(output, -np.inf), gain)
    return found


def ctc_greedy(log_probs, max_length):
    """The collapsed best path; its score is that of all paths to what is kept."""
    if np.isnan(log_probs).any():
        return best_first([], 1)
    written = collapse(line.argmax().item() for line in log_probs)
    kept = written[:max_length]
    cut = len(kept) < len(written)
    status = Status.UNFINISHED if cut else status_of(kept)
    score = outputs(log_probs).get(kept, -np.inf)
    return best_first([Found(kept, score, status)], 1)


def ctc_beam_search(log_probs, beam_size, count, max_length):
    """Prefixes with the mass of their slots that end by a blank, and by a symbol."""
    if np.isnan(log_probs).any():
        return best_first([], count)
    beam = {(): (0.0, -np.inf)}
    for line in log_probs:
        after = {}

        def add(prefix, *gains, after=after):
            before = after.get(prefix, (-np.inf, -np.inf))
            after[prefix] = tuple(map(np.logaddexp, before, gains))

        for prefix, (by_blank, by_label) in beam.items():
            total = np.logaddexp(by_blank, by_label)
            add(prefix, total + line[BLANK], -np.inf)
            for symbol, gain in enumerate(line):
                again = prefix[-1:] == (symbol,)
                if again:
                    add(prefix, -np.inf, by_label + gain)
                if symbol != BLANK and len(prefix) < max_length:
                    add(
                        (*prefix, symbol),
                        -np.inf,
                        gain + (by_blank if again else total),
                    )
        ranked = sorted(after.items(), key=lambda entry: -np.logaddexp(*entry[1]))
        beam = {
            prefix: gains
            for prefix, gains in ranked[:beam_size]
            if np.logaddexp(*gains) > -np.inf
        }
    exact = outputs(log_probs)
    return best_first(
        [Found(prefix, exact[prefix], status_of(prefix)) for prefix in beam], count
    )
