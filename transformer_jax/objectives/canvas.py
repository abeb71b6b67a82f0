"""Objectives of models that write all places of a canvas at once.

Each returns (sum, weight) of what its strategy maximises; rows of weight 0 count
nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax import losses
from transformer_jax.corruption import Corruption, DecoderInputs
from transformer_jax.ctc import ctc_alignment, over_outputs
from transformer_jax.decoding.length import length_class
from transformer_jax.decoding.logits import log_softmax
from transformer_jax.masks import length_mask, lowest_places
from transformer_jax.objectives.autoregressive import references_of
from transformer_jax.objectives.passes import Passes
from transformer_jax.parallel_models import Encoded, ParallelSeq2Seq
from transformer_jax.types import Batch

Sums = tuple[jax.Array, jax.Array]


def known_length(batch: Batch, mask_id: int) -> DecoderInputs:
    """Return a canvas of the target's length: empty places, their labels and weights.

        target  a b c        inputs  _ _ _ _    labels  a b c .    weights  1 1 1 0

    Args:
        batch: T holds the place of END, which is not written here.
        mask_id: an empty place.
    """
    labels = batch.target[:, :-1]
    inside = length_mask(batch.target_lengths, labels.shape[1])
    weights = jnp.where(inside, batch.weight[:, None], 0.0)
    return DecoderInputs(jnp.full_like(labels, mask_id), labels, weights)


def parallel(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
    label_smoothing: float,
    length_weight: float,
) -> Sums:
    """Return (sum, weight) of -log p(y_t | x, |y|) - length_weight log p(|y| | x).

    Gu et al. 2018, section 3. A row's length counts as much as its tokens that count,
    so that the sums of parts of a batch add up.
    """
    encoded = passes.encode(batch.source, batch.source_lengths)
    given = known_length(batch, passes.model.mask_id)

    def predict(inputs: jax.Array, *, keep: bool = False) -> jax.Array:
        return passes.predict(encoded, inputs, batch.target_lengths, keep=keep)

    if corrupt is not None and passes.key is not None:
        given = corrupt(given, predict, passes.key, vocabulary)
    logits = predict(given.inputs, keep=True)
    total, weight = _of_tokens(logits, given, label_smoothing)
    of_lengths = _of_lengths(passes.model, encoded, batch, given)
    return total + length_weight * of_lengths, weight


def mask_predict(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
    label_smoothing: float,
    length_weight: float,
) -> Sums:
    """Return (sum, weight) of -log p(y_t | x, |y|, shown symbols) over hidden places.

    Ghazvininejad et al. 2019, section 2.2: of n symbols floor(u n) + 1 are hidden, u
    uniform in [0, 1), all choices equally probable. Without a key the draws depend on
    the example's number alone. The length is trained as in `parallel`.
    """
    del corrupt, vocabulary
    encoded = passes.encode(batch.source, batch.source_lengths)
    empty = known_length(batch, passes.model.mask_id)
    draw_key = jax.random.key(0) if passes.key is None else passes.key
    keys = jax.vmap(jax.random.fold_in, (None, 0))(draw_key, batch.index)
    places = empty.inputs.shape[1]
    draws = jax.vmap(lambda key: jax.random.uniform(key, (places + 1,)))(keys)
    lengths = batch.target_lengths
    count = jnp.floor(draws[:, 0] * lengths).astype(jnp.int32) + 1
    inside = length_mask(lengths, places)
    hidden = lowest_places(draws[:, 1:], inside, count)
    given = DecoderInputs(
        jnp.where(hidden | ~inside, empty.inputs, empty.labels),
        empty.labels,
        jnp.where(hidden, empty.weights, 0.0),
    )
    logits = passes.predict(encoded, given.inputs, lengths, keep=True)
    total, weight = _of_tokens(logits, given, label_smoothing)
    of_lengths = _of_lengths(passes.model, encoded, batch, given)
    return total + length_weight * of_lengths, weight


def _of_tokens(logits: jax.Array, given: DecoderInputs, smoothing: float) -> Sums:
    """What the symbols of a canvas count."""
    return losses.cross_entropy(
        logits, given.labels, given.weights, label_smoothing=smoothing
    )


def _of_lengths(
    model: ParallelSeq2Seq, encoded: Encoded, batch: Batch, given: DecoderInputs
) -> jax.Array:
    """Sum of -log p(|y| | x), each as often as the row has symbols that count."""
    classes = length_class(
        batch.target_lengths,
        batch.source_lengths,
        classes=model.length_classes,
        offset=model.length_offset,
    )
    # An empty target has a length, too.
    tokens = jnp.maximum(given.weights.sum(1), batch.weight)
    return losses.cross_entropy(encoded.length_logits, classes, tokens)[0]


def overlong(
    batch: Batch,
    lengths: jax.Array,
    size: int,
    *,
    mask_id: int,
    end_id: int,
    fill: float,
) -> DecoderInputs:
    """Return a canvas longer than the target: END stands in all places behind it.

        target  a b c        inputs  _ _ _ _ _ _    labels  a b c END END END
                             weights  1 1 1 1 fill fill

    A row whose target and END do not fit counts nothing.

    Args:
        batch: the targets.
        lengths: int32 `[B]`, places of each row's canvas.
        size: places of the widest one.
        mask_id: an empty place.
        end_id: what ends an output.
        fill: weight of the places behind the first END.
    """
    cut = batch.target[:, :size]
    target = jnp.pad(cut, ((0, 0), (0, size - cut.shape[1])))
    place, last = jnp.arange(size)[None], batch.target_lengths[:, None]
    weights = jnp.where(place <= last, 1.0, fill) * batch.weight[:, None]
    inside = (place < lengths[:, None]) & (last < lengths[:, None])
    return DecoderInputs(
        jnp.full_like(target, mask_id),
        jnp.where(place < last, target, end_id),
        jnp.where(inside, weights, 0.0),
    )


def overgenerate(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
    label_smoothing: float,
    fill_weight: float,
) -> Sums:
    """Return (sum, weight) of -log p(y_t | x) on a canvas that is cut at END.

    Places behind the first END should hold END as well and count `fill_weight`.
    """
    del corrupt
    model = passes.model
    lengths = _slots(model, batch)
    given = overlong(
        batch,
        lengths,
        model.slots(batch.source.shape[1]),
        mask_id=model.mask_id,
        end_id=vocabulary.end_id,
        fill=fill_weight,
    )
    encoded = passes.encode(batch.source, batch.source_lengths)
    logits = passes.predict(encoded, given.inputs, lengths, keep=True)
    return _of_tokens(logits, given, label_smoothing)


def _slots(model: ParallelSeq2Seq, batch: Batch) -> jax.Array:
    """Places of each row's canvas; filler rows have none."""
    return jnp.where(batch.weight > 0, model.slots(batch.source_lengths), 0)


def ctc(
    passes: Passes,
    batch: Batch,
    vocabulary: Any,
    *,
    corrupt: Corruption | None = None,
) -> Sums:
    """Return (sum, weight) of -log p(y | x), summed over all alignments.

    Libovicky and Helcl 2018. Targets that do not fit their slots count nothing.
    """
    model = passes.model
    encoded = passes.encode(batch.source, batch.source_lengths)
    lengths = _slots(model, batch)
    size = model.slots(batch.source.shape[1])
    references, sizes = references_of(batch)
    # END is not written on slots.
    targets = references[..., :-1], sizes
    inputs = jnp.full((len(batch.source), size), model.mask_id, jnp.int32)

    def predict(inputs: jax.Array, *, keep: bool = False) -> jax.Array:
        return passes.predict(encoded, inputs, lengths, keep=keep)

    def align(logits: jax.Array) -> jax.Array:
        """The best slots of the best reference."""
        parts = log_softmax(logits), lengths, *targets
        scores, slots = over_outputs(ctc_alignment, *parts, blank_id=model.blank_id)
        scores = jnp.where(sizes >= 0, scores, -jnp.inf)
        best = jnp.argmax(scores, axis=1)[:, None, None]
        return jnp.take_along_axis(slots, best, axis=1)[:, 0]

    if corrupt is not None and passes.key is not None:
        places = length_mask(lengths, size).astype(jnp.float32)
        # The labels are those of `align`, which depend on what the model says.
        given = DecoderInputs(inputs, inputs, places)
        given = corrupt(given, predict, passes.key, vocabulary, align=align)
        inputs = given.inputs
    return losses.ctc(
        predict(inputs, keep=True),
        lengths,
        *targets,
        batch.weight,
        blank_id=model.blank_id,
    )
