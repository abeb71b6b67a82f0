"""The products of attention, in a form that compilers take as it is."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def wide_dtype(x: Array) -> Any:
    """Return the type in which scores and sums of an array are computed."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def product(equation: str, left: Array, right: Array) -> Array:
    """Multiply batches of matrices, summed in float32 (float64 for float64).

    XLA transposes an operand, even the scores, unless batch axes lead and each side has
    one axis of its own; so `[G, q]` is one axis here.

    Args:
        equation: "bqh,bsh->bqs" for scores, "bqs,bsh->bqh" for means of values, or
            "bqs,bqh->bsh" for gradients of keys and values. b stands for `[..., K]`, q
            for `[G, q]`.
        left: `[..., K, G, q, x]`.
        right: `[..., K, s, x]`, or as `left`.

    Returns:
        `[..., K, G, q, x]`, or `[..., K, s, x]` where the equation ends so.
    """
    lead = left.shape[:-3]
    flat = (
        x.reshape(*lead, math.prod(x.shape[len(lead) : -1]), x.shape[-1])
        for x in (left, right)
    )
    equation = equation.replace("b", "...")
    out = jnp.einsum(equation, *flat, preferred_element_type=wide_dtype(left))
    rows = left.shape[-3:-1] if "->...q" in equation else out.shape[-2:-1]
    return out.reshape(*lead, *rows, out.shape[-1])
