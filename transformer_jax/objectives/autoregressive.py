"""The autoregressive objective: every symbol, given all symbols before it."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.corruption import Corruption, DecoderInputs
from transformer_jax.losses import any_reference, cross_entropy
from transformer_jax.types import Batch, PyTree


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
    model: nn.Module,
    params: PyTree,
    batch: Batch,
    vocabulary: Any,
    *,
    key: jax.Array | None,
    corrupt: Corruption | None = None,
    label_smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum, weight) of -log p(y_t | y_<t, x) over all places, END included.

    With all references of a source in a row: of -log sum_r p(y_r | x).

    Args:
        model: a `Seq2Seq`.
        params: its parameters.
        batch: rows of weight 0 count nothing.
        vocabulary: the target's.
        key: PRNG key of dropout and corruption; None turns both off.
        corrupt: replaces some of the inputs, see `corruption`. With nothing replaced
            the loss is that of teacher forcing, bit for bit.
        label_smoothing: see `losses.cross_entropy`.
    """
    encode_key, decode_key, corruption_key = split_key(key)
    memory = model.apply(
        {"params": params},
        batch.source,
        batch.source_lengths,
        method="encode",
        rngs=dropout(encode_key),
    )
    given = teacher_forcing(batch, vocabulary)
    several = len(given.inputs) // len(batch.source)
    read = memory, batch.source_lengths
    if several > 1:
        read = jax.tree.map(lambda leaf: jnp.repeat(leaf, several, axis=0), read)

    def predict(inputs: jax.Array) -> jax.Array:
        return model.apply(
            {"params": params},
            *read,
            inputs,
            method="predict",
            rngs=dropout(decode_key),
        )

    if corrupt is not None and key is not None:
        given = corrupt(given, predict, corruption_key, vocabulary)
    measured = functools.partial(cross_entropy, label_smoothing=label_smoothing)
    parts = predict(given.inputs), given.labels, given.weights
    if batch.target.ndim == 2:
        return measured(*parts)
    sums, sizes = (x.reshape(-1, several) for x in jax.vmap(measured)(*parts))
    losses = jnp.where(batch.target_lengths >= 0, sums, jnp.inf)
    return any_reference(losses, sizes, batch.weight)


def split_key(key: jax.Array | None) -> Sequence[jax.Array | None]:
    """Return the keys of encoding, decoding and corruption, or None three times.

    There are three in any case, so that a corruption changes no dropout.
    """
    return (None,) * 3 if key is None else jax.random.split(key, 3)


def dropout(key: jax.Array | None) -> dict[str, jax.Array]:
    """Return the `rngs` of a pass with dropout, or without where there is no key."""
    return {} if key is None else {"dropout": key}
