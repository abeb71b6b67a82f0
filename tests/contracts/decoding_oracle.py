"""Fake models that remember their whole prefix, and searches in plain loops."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding import Status

PAD, BOS, END = 0, 1, 2
STATES = 97


def following(state, token):
    """The hash of a prefix with one more token."""
    return (state * 31 + token + 7) % STATES


class Model(NamedTuple):
    """`logits [B, 97, V]`: row b after a prefix of hash h continues by logits[b, h]."""

    logits: np.ndarray

    @property
    def rows(self):
        return self.logits.shape[0]

    @property
    def cache(self):
        """Number of the row, its table, and the hash of its prefix."""
        numbers = jnp.arange(self.rows)
        return numbers, jnp.asarray(self.logits), jnp.zeros(self.rows, jnp.int32)

    def log_probs(self, row, prefix):
        """Float64 `[V]` after BOS and a prefix."""
        state = 0
        for token in (BOS, *prefix):
            state = following(state, token)
        logits = self.logits[row, state].astype(np.float64)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def step_fn(tokens, cache):
    """The step function of every model, with what differs in the cache."""
    row, table, state = cache
    state = following(state, tokens)
    return table[jnp.arange(tokens.shape[0]), state], (row, table, state)


def random_model(seed, *, rows=5, vocab=7, end_bonus=0.0, dtype=jnp.float32):
    """Tokens after END are possible, PAD and BOS never."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(rows, STATES, vocab)).astype(np.float32) * 2
    logits[..., END] += end_bonus
    logits[..., [PAD, BOS]] = -np.inf
    return Model(np.asarray(jnp.asarray(logits, dtype)))


def one_answer_model(answers, vocab):
    """Row b can write answers[b] and nothing else."""
    logits = np.full((len(answers), STATES, vocab), -np.inf, np.float32)
    for row, answer in enumerate(answers):
        state = 0
        for token, written in zip((BOS, *answer), (*answer, END), strict=True):
            state = following(state, token)
            assert np.isneginf(logits[row, state]).all(), "two prefixes share a hash"
            logits[row, state, written] = 3.0
    return Model(logits)


class Found(NamedTuple):
    """One hypothesis of an oracle."""

    tokens: tuple
    score: float
    status: Status


def divisor(penalty, alpha, n):
    return {"none": 1.0, "average": n**alpha, "gnmt": ((5 + n) / 6) ** alpha}[penalty]


def greedy(model, row, max_length):
    """The most probable token, again and again."""
    tokens, score = (), 0.0
    for _ in range(max_length):
        log_probs = model.log_probs(row, tokens)
        token = int(log_probs.argmax())
        score += log_probs[token]
        if token == END:
            return Found(tokens, score, Status.OK if tokens else Status.EMPTY)
        tokens += (token,)
    return Found(tokens, score, Status.UNFINISHED)


def beam_search(model, row, *, beam_size, max_length, penalty, alpha):
    """The documented rule without an early stop; all that was found, best first."""
    live, ended = [((), 0.0)], []
    for _ in range(max_length):
        continuations = [
            (total + gain, tokens, token)
            for tokens, total in live
            for token, gain in enumerate(model.log_probs(row, tokens))
            if gain > -np.inf
        ]
        continuations.sort(key=lambda entry: -entry[0])
        chosen = continuations[: beam_size - len(ended)]
        ended += [(tokens, total) for total, tokens, token in chosen if token == END]
        live = [((*tokens, t), total) for total, tokens, t in chosen if t != END]
    return ranked(ended, live, penalty, alpha)


def brute_force(model, row, *, max_length, penalty, alpha):
    """Every output there is, best first."""
    vocab = model.logits.shape[-1]
    words = [token for token in range(vocab) if token not in (PAD, BOS, END)]
    ended, live = [], []
    for length in range(max_length + 1):
        for tokens in itertools.product(words, repeat=length):
            total = sum(
                model.log_probs(row, tokens[:place])[token]
                for place, token in enumerate(tokens)
            )
            if length < max_length:
                ended.append((tokens, total + model.log_probs(row, tokens)[END]))
            else:
                live.append((tokens, total))
    return ranked(ended, live, penalty, alpha)


def ranked(ended, live, penalty, alpha):
    """Finished ones first, each kind by its score."""

    def scored(entries, end):
        found = [
            Found(
                tokens,
                total / divisor(penalty, alpha, max(1, len(tokens) + end)),
                Status.UNFINISHED if not end else Status.OK if tokens else Status.EMPTY,
            )
            for tokens, total in entries
        ]
        return sorted(found, key=lambda entry: -entry.score)

    return scored(ended, 1) + scored(live, 0)


def rescored(model, row, tokens, status):
    """Sum of log-probabilities of an output, END included where it came."""
    written = list(tokens) + ([] if status == Status.UNFINISHED else [END])
    return sum(
        model.log_probs(row, tokens[:place])[token]
        for place, token in enumerate(written)
    )


def hypotheses_of(found, row):
    """Row of a `Hypotheses` as the oracles give it."""
    host = jax.device_get(found)
    return [
        Found(tuple(tokens[:length].tolist()), float(score), Status(status))
        for tokens, length, score, status in zip(
            *(field[row] for field in host), strict=True
        )
    ]
