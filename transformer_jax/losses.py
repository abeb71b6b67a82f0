"""Losses; every one returns (sum, weight), so that a mean is divided once, globally.

Means of means are wrong as soon as batches, devices or micro-batches hold different
numbers of tokens: add up sums and weights, then divide.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.ctc import ctc_log_likelihood, over_outputs
from transformer_jax.masks import length_mask, or_zero


def cross_entropy(
    logits: Float[Array, "*places V"],
    labels: Int[Array, "*places"],
    weights: Float[Array, "*places"],
    *,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the weighted sum of cross-entropies and the sum of weights.

    loss = -(1 - e) log p[label] - e / V sum_v log p[v],  p = softmax(logits), with
    e = `label_smoothing` (Szegedy et al. 2016, section 7, uniform over all V).

    Args:
        logits: `[..., V]`, any float type; the sum is taken in float32 or better.
        labels: integers `[...]` in 0..V-1.
        weights: `[...]`; a place of weight 0 counts nothing, whatever stands there.
        label_smoothing: share e given to the uniform distribution, 0 <= e < 1.

    Returns:
        Two scalars: the sum over places of weight times loss, in nats, and the sum of
        the weights.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
        >>> total, weight = cross_entropy(logits, jnp.array([0]), jnp.array([2.0]))
        >>> print(f"{total / weight:.4f}")
        0.6931
    """
    counted = weights > 0
    # Selected before any arithmetic: what is not finite there has no gradient either.
    logits = jnp.where(counted[..., None], logits, jnp.zeros_like(logits))
    labels = jnp.where(counted, labels, jnp.zeros_like(labels))
    if logits.dtype != jnp.float64:
        logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = log_total - chosen
    if label_smoothing:
        uniform = log_total - jnp.mean(logits, axis=-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    weights = weights.astype(loss.dtype)
    return jnp.sum(loss * weights), jnp.sum(weights)


def ctc(
    logits: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    labels: Int[Array, "B R U"],
    label_lengths: Int[Array, "B R"],
    weights: Float[Array, " B"],
    *,
    blank_id: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of -log sum_r p(labels_r) over rows, and their number of labels.

    p is that of `ctc.ctc_log_likelihood` (Graves et al. 2006); any of a row's R
    references is right. A reference that does not fit its slots has probability 0; a
    row in which none fits counts nothing, neither in the sum nor in the weight. NaN in
    slots that count is heard, as a sum that is NaN.

    Args:
        logits: `[B, T, V]`, any float type; the sum is taken in float32 or better.
        lengths: `[B]`, slots that count; what stands behind them changes nothing.
        labels: `[B, R, U]`.
        label_lengths: `[B, R]`; -1 where there is no such reference.
        weights: `[B]`; a row of weight 0 counts nothing, whatever stands there.
        blank_id: the blank, no label.

    Returns:
        Two scalars: the sum over rows of weight times loss, in nats, and the sum of
        weight times labels, the mean of the references that fit; references without
        labels weigh as one.

    Example:
        >>> logits, labels = jnp.zeros((1, 2, 2)), jnp.array([[[0]]])
        >>> slots, one, weight = jnp.array([2]), jnp.array([[1]]), jnp.array([1.0])
        >>> total, count = ctc(logits, slots, labels, one, weight, blank_id=1)
        >>> print(f"{total:.4f} {count}")
        0.2877 1.0
    """
    # Selected before any arithmetic: what is not finite there has no gradient either.
    slots = length_mask(lengths, logits.shape[1]) & (weights > 0)[:, None]
    logits = or_zero(slots[..., None], logits)
    if logits.dtype != jnp.float64:
        logits = logits.astype(jnp.float32)
    counted = jnp.maximum(label_lengths, 0)
    parts = jax.nn.log_softmax(logits), lengths, labels, counted
    of_each = over_outputs(ctc_log_likelihood, *parts, blank_id=blank_id)
    of_each = jnp.where(label_lengths >= 0, of_each, -jnp.inf)
    sizes = jnp.maximum(label_lengths, 1).astype(of_each.dtype)
    return any_reference(-of_each, sizes, weights.astype(of_each.dtype))


def any_reference(
    losses: Float[Array, "B R"],
    sizes: Float[Array, "B R"],
    weights: Float[Array, " B"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of -log sum_r exp(-loss_r) over rows, and the sum of their sizes.

    Args:
        losses: `[B, R]`, -log p of each reference; inf where it is impossible. NaN is
            heard, as a sum that is NaN.
        sizes: `[B, R]`; a row's is the mean of its possible references.
        weights: `[B]`; a row of weight 0, or with nothing possible, counts nothing.
    """
    possible = losses != jnp.inf
    counted = (weights > 0) & possible.any(1)
    # Selected before any arithmetic, so that no gradient is a NaN.
    top = or_zero(counted, losses.min(1))
    shared = possible & counted[:, None]
    shares = or_zero(shared, jnp.exp(or_zero(shared, top[:, None] - losses)))
    total = top - jnp.log(jnp.where(counted, shares.sum(1), jnp.ones_like(top)))
    size = or_zero(possible, sizes).sum(1)
    size /= jnp.maximum(possible.sum(1), 1).astype(size.dtype)
    weights = or_zero(counted, weights)
    return jnp.sum(total * weights), jnp.sum(size * weights)
