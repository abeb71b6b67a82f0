"""Batches of hand-made targets, and what stands for a model in tests of objectives."""

import itertools

import jax.numpy as jnp
import numpy as np

from transformer_jax.objectives import OBJECTIVES
from transformer_jax.objectives.passes import Passes
from transformer_jax.parallel_models import Encoded
from transformer_jax.types import Batch

END, BLANK, MASK, OUTPUTS = 2, 7, 8, 8
OPTIONS = {
    "autoregressive": {"label_smoothing": 0.1},
    "parallel": {"label_smoothing": 0.1, "length_weight": 0.5},
    "mask_predict": {"label_smoothing": 0.1, "length_weight": 0.5},
    "overgenerate": {"label_smoothing": 0.1, "fill_weight": 0.3},
    "ctc": {},
}


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, END, 3
    size = 7


def batch_of(targets, sources=None, *, weight=None, places=None):
    """A batch of targets and of sources of given lengths, in NumPy."""
    places = places or 1 + max(map(len, targets))
    rows = len(targets)
    target = np.zeros((rows, places), np.int32)
    for row, symbols in enumerate(targets):
        target[row, : len(symbols)] = symbols
    sources = np.array(sources or [2] * rows, np.int32)
    return Batch(
        source=np.ones((rows, sources.max()), np.int32),
        source_lengths=sources,
        target=target,
        target_lengths=np.array([*map(len, targets)], np.int32),
        weight=np.array(weight or [1] * rows, np.float32),
        index=np.arange(rows, dtype=np.int32),
    )


class Oracle:
    """Stands for a model: says what it was told to, and notes what it was asked."""

    mask_id, blank_id = MASK, BLANK
    length_classes, length_offset = 5, True
    upsample, extra_slots = 2, 0

    def __init__(self, logits=None, length_logits=None):
        self.logits, self.length_logits = logits, length_logits
        self.asked = []

    def slots(self, lengths):
        return self.upsample * lengths + self.extra_slots

    def apply(self, variables, *arguments, method, rngs):
        if method == "encode":
            source, lengths = arguments
            logits = self.length_logits
            if logits is None:
                logits = jnp.zeros((len(source), self.length_classes))
            return Encoded(source, lengths, logits)
        self.asked.append((*arguments[1:], rngs))
        if self.logits is None:
            return jnp.zeros((*arguments[1].shape, OUTPUTS))
        return self.logits


def loss_of(objective, model, batch, *, key=None, params=None, **options):
    options = OPTIONS[objective] | options
    row = OBJECTIVES[objective]
    passes = Passes(model, {"params": params}, key)
    return row.loss(passes, batch, Vocabulary, **options)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def slots_of(size):
    return itertools.product((4, 5, 6, BLANK), repeat=size)


def collapsed(way):
    return [symbol for symbol, _ in itertools.groupby(way) if symbol != BLANK]


def score(logits, way):
    return log_softmax(logits)[range(len(way)), way].sum()
