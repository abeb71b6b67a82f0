"""Logits, normalised or restricted; and step functions with constraints."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.search import StepFunction, is_integer
from transformer_jax.types import PyTree


def log_probability(
    logits: Float[Array, "M V"], tokens: Int[Array, "M k"]
) -> Float[Array, "M k"]:
    """Return log softmax(logits) at some tokens, in float32 and never above 0.

    NaN where the row has a NaN or +inf, or nothing but -inf.
    """
    logits = logits.astype(jnp.float32)
    top = logits.max(-1, keepdims=True)
    log_total = jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))
    return jnp.take_along_axis(logits, tokens, axis=-1) - top - log_total


def log_softmax(logits: Float[Array, "*places V"]) -> Float[Array, "*places V"]:
    """Return log-probabilities in float32; NaN where nothing is finite."""
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def largest(
    values: Float[Array, "... V"], count: int
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Return the `count` largest and their places; of equal ones the lower first.

    `lax.top_k` ranks -0.0 below 0.0 on some platforms, `argmax` nowhere.
    """
    values = jnp.where(values == 0, jnp.zeros_like(values), values)
    found, places = jax.lax.top_k(values, count)
    return found, places


def restrict(
    logits: Float[Array, "M V"],
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Array, "M V"]:
    """Set the logits of improbable tokens to -inf: first by rank, then by mass.

    top_k keeps the k largest (Fan et al. 2018, section 5.4), of equal ones those of
    lower ids. top_p keeps the fewest of the largest whose probabilities, of those that
    top_k left, sum to at least p (Holtzman et al. 2020, section 3.1).

    Args:
        logits: `[M, V]`, after the temperature.
        top_k: at least 1; more than V keeps all.
        top_p: in (0, 1].

    Raises:
        ValueError: `top_k` or `top_p` lies outside its range.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))
        >>> restrict(logits, top_p=0.6)[0] > -jnp.inf
        Array([False,  True,  True, False], dtype=bool)
    """
    check_restrictions(top_k, top_p)
    if top_k is not None and top_k < logits.shape[-1]:
        ids = largest(logits, top_k)[1]
        logits = _only(logits, ids, jnp.ones(ids.shape, bool))
    if top_p is not None and top_p < 1:
        ordered, ids = largest(logits, logits.shape[-1])
        shares = jax.nn.softmax(ordered.astype(jnp.float32))
        # The mass before a token; the first one stays in any case.
        logits = _only(logits, ids, jnp.cumsum(shares, -1) - shares < top_p)
    return logits


def check_restrictions(top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError where `restrict` would."""
    if top_k is not None and not (is_integer(top_k) and top_k >= 1):
        raise ValueError(
            f"top_k must be an integer from 1 on, not {top_k}: None keeps all"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], not {top_p}: None keeps all")


def _only(
    logits: Float[Array, "M V"], ids: Int[Array, "M k"], kept: Bool[Array, "M k"]
) -> Float[Array, "M V"]:
    """The logits of the ids that are kept, in their places; -inf elsewhere."""
    nothing = jnp.zeros(logits.shape, bool)
    mask = jnp.put_along_axis(nothing, ids, kept, axis=-1, inplace=False)
    return jnp.where(mask, logits, jnp.asarray(-jnp.inf, logits.dtype))


def forbid(step_fn: StepFunction, tokens: Sequence[int]) -> StepFunction:
    """Return the step function of the model that never writes some tokens.

    The probabilities of the others are renormalised: scores are those of this model.

    Raises:
        ValueError: when it is called, if the model has no such token.
    """
    never = np.array(tokens, np.int32)

    def allowed_step(tokens: Array, cache: PyTree) -> tuple[Array, PyTree]:
        logits, cache = step_fn(tokens, cache)
        if ((never < 0) | (never >= logits.shape[1])).any():
            raise ValueError(
                f"forbidden tokens must lie below {logits.shape[1]}, not "
                f"{never.tolist()}"
            )
        return logits.at[:, never].set(-jnp.inf), cache

    return allowed_step


def with_min_length(
    step_fn: StepFunction, cache: PyTree, min_length: int, *, rows: int, end_id: int
) -> tuple[StepFunction, PyTree]:
    """Return the model whose outputs have `min_length` tokens before END, or more.

    Args:
        step_fn: `(tokens [M], cache) -> (logits [M, V], cache)`.
        cache: leaves `[B, ...]`.
        min_length: END is forbidden in as many first steps.
        rows: B.
        end_id: the token that ends an output.

    Returns:
        A step function that renormalises as `forbid` does, and its cache, which counts
        each row's steps.
    """

    def long_step(tokens: Array, state: PyTree) -> tuple[Array, PyTree]:
        inner, written = state
        logits, inner = step_fn(tokens, inner)
        early = written < min_length
        end = jnp.where(early, -jnp.inf, logits[:, end_id]).astype(logits.dtype)
        return logits.at[:, end_id].set(end), (inner, written + 1)

    return long_step, (cache, jnp.zeros(rows, jnp.int32))


def sequence_log_probability(
    logits: Float[Array, "M T V"],
    tokens: Int[Array, "M U"],
    lengths: Int[Array, " M"],
    *,
    end_id: int,
) -> Float[Array, " M"]:
    """Return log p(y), END included, of teacher-forced outputs.

        log p(y) = sum_{t < |y|} log p(y_t | y_<t) + log p(END | y)

    Args:
        logits: `[M, T, V]`, row t given the tokens before t; T is U + 1.
        tokens: `[M, U]`; what stands behind `lengths` changes nothing.
        lengths: `[M]`, tokens before END.
        end_id: the token that ends an output.

    Raises:
        ValueError: T is not U + 1.
    """
    rows, size = tokens.shape
    if logits.shape[1] != size + 1:
        raise ValueError(
            f"{size} tokens and END need {size + 1} rows of logits, not "
            f"{logits.shape[1]}"
        )
    places = jnp.arange(size + 1)[None]
    written = jnp.pad(tokens, ((0, 0), (0, 1)))
    written = jnp.where(places == lengths[:, None], end_id, written)
    flat = written.reshape(rows * (size + 1), 1)
    gains = log_probability(logits.reshape(flat.shape[0], logits.shape[2]), flat)
    gains = gains.reshape(rows, size + 1)
    return jnp.where(places <= lengths[:, None], gains, 0.0).sum(1)
