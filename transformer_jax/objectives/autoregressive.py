"""The autoregressive objective: every symbol, given all symbols before it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.corruption import Corruption, DecoderInputs
from transformer_jax.losses import any_reference, cross_entropy
from transformer_jax.objectives.passes import Passes
from transformer_jax.types import Batch


def references_of(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the references `[B, R, T]` of every row and their lengths `[B, R]`."""
    if batch.target.ndim == 3:
        return batch.target, batch.target_lengths
    return batch.target[:, None], batch.target_lengths[:, None]


def teacher_forcing(batch: Batch, vocabulary: Any) -> DecoderInputs:
    """Return inputs, labels and weights `[M, T]` of an autoregressive decoder.

    The right answer is the decoder's input, one place late (Williams and Zipser 1989):

        target  a b c        inputs  BOS a b c    labels  a b c END    weights  1 1 1 1

    Args:
        batch: T holds the place of END; M is B, or B R with the references adjacent.
        vocabulary: the target's, with `bos_id` and `end_id`.
    """
    references, lengths = references_of(batch)
    weight = jnp.repeat(batch.weight, lengths.shape[1])[:, None]
    target = references.reshape(-1, references.shape[2])
    place = jnp.arange(target.shape[1])
    last = lengths.reshape(-1, 1)
    inputs = jnp.roll(target, 1, axis=1).at[:, 0].set(vocabulary.bos_id)
    labels = jnp.where(place == last, vocabulary.end_id, target)
    # A reference that does not exist has the length -1: not even its END counts.
    weights = jnp.where(place <= last, weight, 0.0)
    return DecoderInputs(inputs, labels, weights)


def autoregressive(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
    label_smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum, weight) of -log p(y_t | y_<t, x) over all places, END included.

    With all references of a source in a row: of -log sum_r p(y_r | x).

    Args:
        passes: of a `Seq2Seq`.
        batch: rows of weight 0 count nothing.
        vocabulary: the target's.
        corrupt: replaces some of the inputs, see `corruption`. With nothing replaced
            the loss is that of teacher forcing, bit for bit.
        label_smoothing: see `losses.cross_entropy`.
    """
    memory = passes.encode(batch.source, batch.source_lengths)
    given = teacher_forcing(batch, vocabulary)
    several = len(given.inputs) // len(batch.source)
    read = memory, batch.source_lengths
    if several > 1:
        read = jax.tree.map(lambda leaf: jnp.repeat(leaf, several, axis=0), read)

    # Padding on the right changes no place before it, but would move centroids.
    sizes = None if passes.kept is None else (given.weights > 0).sum(1)

    def predict(inputs: jax.Array, *, keep: bool = False) -> jax.Array:
        return passes.predict(*read, inputs, sizes, keep=keep)

    if corrupt is not None and passes.key is not None:
        given = corrupt(given, predict, passes.key, vocabulary)
    measured = functools.partial(cross_entropy, label_smoothing=label_smoothing)
    parts = predict(given.inputs, keep=True), given.labels, given.weights
    if batch.target.ndim == 2:
        return measured(*parts)
    sums, counts = (x.reshape(-1, several) for x in jax.vmap(measured)(*parts))
    losses = jnp.where(batch.target_lengths >= 0, sums, jnp.inf)
    return any_reference(losses, counts, batch.weight)
