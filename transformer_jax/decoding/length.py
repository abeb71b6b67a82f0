"""Lengths of outputs that are written at once, and what their places copy.

A length is predicted as a class: class c of C stands for the length c itself, or, as an
offset, for |x| + c - C / 2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.logits import largest, log_softmax
from transformer_jax.decoding.search import check_count
from transformer_jax.masks import length_mask


def length_class(
    lengths: Int[Array, " B"],
    source_lengths: Int[Array, " B"],
    *,
    classes: int,
    offset: bool,
) -> Int[Array, " B"]:
    """Return the class of each length, the nearest one where it has none."""
    middle = source_lengths - classes // 2 if offset else jnp.zeros_like(lengths)
    return jnp.clip(lengths - middle, 0, classes - 1)


def lengths_of_classes(
    source_lengths: Int[Array, " B"], *, classes: int, offset: bool
) -> Int[Array, "B C"]:
    """Return the length that each class stands for; it may be negative."""
    places = jnp.arange(classes, dtype=source_lengths.dtype)[None]
    if not offset:
        return jnp.broadcast_to(places, (source_lengths.shape[0], classes))
    return source_lengths[:, None] + places - classes // 2


def best_lengths(
    logits: Float[Array, "B C"],
    lengths: Int[Array, "B C"],
    count: int,
    *,
    shortest: int,
    longest: int,
) -> tuple[Int[Array, "B m"], Float[Array, "B m"]]:
    """Return the most probable lengths within bounds and their log-probabilities.

    p(length) is the softmax over the classes within the bounds, so a row's candidates
    differ, and their probabilities are those of a model that can give no other length.

    Args:
        logits: `[B, C]`.
        lengths: `[B, C]`, the length of every class, no two alike in a row.
        count: m, at least 1; may exceed C.
        shortest: least length.
        longest: greatest length.

    Returns:
        Lengths `[B, m]` and log-probabilities float32 `[B, m]`, best first; -inf, with
        length 0, where there are no more lengths within the bounds, or where the
        row's logits are not finite.

    Raises:
        ValueError: `count` is below 1.
    """
    check_count("count", count)
    legal = (lengths >= shortest) & (lengths <= longest)
    log_probs = log_softmax(jnp.where(legal, logits, -jnp.inf))
    # NaN, where nothing is legal or a logit is infinite, is no candidate either.
    log_probs = jnp.where(legal & (log_probs > -jnp.inf), log_probs, -jnp.inf)
    missing = max(count - logits.shape[1], 0)
    found, places = largest(log_probs, count - missing)
    chosen = jnp.take_along_axis(lengths, places, axis=1)
    chosen = jnp.where(found > -jnp.inf, chosen, jnp.zeros_like(chosen))
    padded = ((0, 0), (0, missing))
    return jnp.pad(chosen, padded), jnp.pad(found, padded, constant_values=-jnp.inf)


def copy_places(
    source_lengths: Int[Array, " B"], lengths: Int[Array, " B"], size: int
) -> Int[Array, "B size"]:
    """Return the source place that each output place copies, spread evenly.

        i -> round((S - 1) / (T - 1) i), halves to even;  0 where T is 1

    The uniform copy of Gu et al. 2018, section 3.2, but from the first place to the
    last one: theirs is round(S / T i). Computed in integers, so no rounding differs
    between devices. Behind a row's length the last place is repeated.

    Args:
        source_lengths: S, `[B]`, in 1..2^16.
        lengths: T, `[B]`, at most 2^16.
        size: places to return.
    """
    # Unsigned, a product of two such lengths has room.
    last = jnp.maximum(lengths - 1, 1)[:, None].astype(jnp.uint32)
    places = jnp.minimum(jnp.arange(size, dtype=jnp.uint32)[None], last)
    spread = places * jnp.maximum(source_lengths - 1, 0)[:, None].astype(jnp.uint32)
    whole, rest = spread // last, spread % last
    up = (2 * rest > last) | ((2 * rest == last) & (whole % 2 == 1))
    copied = (whole + up.astype(whole.dtype)).astype(lengths.dtype)
    return jnp.where(lengths[:, None] > 1, copied, jnp.zeros_like(copied))


def soft_copy_weights(
    source_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"],
    source_size: int,
    size: int,
    sharpness: Float[Array, ""],
) -> Float[Array, "B size source_size"]:
    """Return how much of each source place each output place copies.

        w_ij = softmax_j(-tau |i / T - j / S|)

    The soft copy of Wei et al. 2019, "Imitation Learning for Non-Autoregressive Neural
    Machine Translation", but on normalised positions: theirs is of |i - j|. Source
    places from S on count nothing; of an empty source nothing is copied.

    Args:
        source_lengths: S, `[B]`.
        lengths: T, `[B]`.
        source_size: padded places of the source.
        size: places to return.
        sharpness: tau, float32 [].
    """

    def normalised(places: int, total: Array) -> Array:
        steps = jnp.arange(places, dtype=jnp.float32)[None]
        return steps / jnp.maximum(total, 1).astype(jnp.float32)[:, None]

    here, there = normalised(size, lengths), normalised(source_size, source_lengths)
    scores = -sharpness * jnp.abs(here[:, :, None] - there[:, None, :])
    inside = length_mask(source_lengths, source_size)
    weights = jax.nn.softmax(scores, axis=2, where=inside[:, None])
    return jnp.where(inside[:, None], weights, jnp.zeros_like(weights))
