"""The classes of a sequence, as outputs of one symbol."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.decoding.hypotheses import Hypotheses, candidates_ranked
from transformer_jax.decoding.logits import largest, log_softmax
from transformer_jax.decoding.search import check_count


def classify(
    logits: Float[Array, "B C"], *, num_return: int = 1, pad_id: int
) -> Hypotheses:
    """Return the most probable classes of each row, best first.

        score(c) = log softmax(logits)[c]

    Args:
        logits: `[B, C]`; -inf is no class.
        num_return: n; where there are fewer classes, the others are ABSENT.
        pad_id: stands where there is no class.

    Returns:
        outputs of one symbol, `[B, n, 1]`.

    Raises:
        ValueError: `num_return` is less than 1.
    """
    check_count("num_return", num_return)
    missing = max(0, num_return - logits.shape[1])
    logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    scores, classes = largest(log_softmax(logits), num_return)
    lengths = jnp.ones(classes.shape, jnp.int32)
    return candidates_ranked(classes[..., None], lengths, scores, pad_id=pad_id)
