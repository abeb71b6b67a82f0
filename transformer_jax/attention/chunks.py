"""Sequences in chunks of as many places."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array


def chunked(
    x: Array, size: int, axis: int, fill: ArrayLike = 0, *, length: int | None = None
) -> Array:
    """Cut an axis into `[chunks, size]`, filled up at its end.

    `length` is how many places there shall be: the others are cut off, or filled.
    """
    axis %= x.ndim
    length = x.shape[axis] if length is None else length
    x = jax.lax.slice_in_dim(x, 0, min(length, x.shape[axis]), axis=axis)
    chunks = -(-length // size)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, chunks * size - x.shape[axis])
    x = jnp.pad(x, widths, constant_values=fill)
    return x.reshape(*x.shape[:axis], chunks, size, *x.shape[axis + 1 :])


def with_before(x: Array, axis: int, back: int, fill: ArrayLike = 0) -> Array:
    """Set each chunk of `[chunks, size]` behind the `back` chunks before it."""
    axis %= x.ndim
    widths = [(0, 0)] * x.ndim
    widths[axis] = (back, 0)
    padded = jnp.pad(x, widths, constant_values=fill)
    count = x.shape[axis]
    parts = [
        jax.lax.slice_in_dim(padded, n, n + count, axis=axis) for n in range(back + 1)
    ]
    return jnp.concatenate(parts, axis + 1)
