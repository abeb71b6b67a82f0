"""Losses; every one returns (sum, weight), so that a mean is divided once, globally.

Means of means are wrong as soon as batches, devices or micro-batches hold different
numbers of tokens: add up sums and weights, then divide.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
