"""The products of attention, in a form that compilers take as it is."""

import math

import jax.numpy as jnp
from jaxtyping import Array


def product(equation: str, a: Array, b: Array) -> Array:
    """Multiply matrices over leading batch axes, in 32 or 64 bits.

    A side with more than one axis of its own, or batch axes elsewhere, is transposed
    first by XLA, the scores too.

    Args:
        equation: an einsum with three letters a side: b stands for the leading axes,
            q for all rows of a key/value head, `[G, q]`, whose array is `a`.
        a: `[..., K, G, q, x]`.
        b: `[..., K, s, x]`, or as `a`.

    Returns:
        `[..., K, G, q, x]`, or `[..., K, s, x]` where the equation ends so.
    """
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    lead = a.shape[:-3]
    flat = (
        x.reshape(*lead, math.prod(x.shape[len(lead) : -1]), x.shape[-1])
        for x in (a, b)
    )
    out = jnp.einsum(equation.replace("b", "..."), *flat, preferred_element_type=wide)
    rows = a.shape[-3:-1] if "->bq" in equation else out.shape[-2:-1]
    return out.reshape(*lead, *rows, out.shape[-1])
