"""Positions as arrays, without parameters."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float32


def sinusoidal(
    positions: ArrayLike, width: int, *, max_wavelength: float = 10000.0
) -> Float32[Array, "... width"]:
    """Encode positions as sines and cosines of falling frequency, interleaved.

        PE(p, 2i) = sin(p / max_wavelength^(2i / width))
        PE(p, 2i + 1) = cos(p / max_wavelength^(2i / width))

    A shift by k rotates each pair by a fixed angle, so relative positions are a linear
    map; every encoding has the norm sqrt(width / 2). Vaswani et al. 2017, section 3.5
    (https://arxiv.org/abs/1706.03762); their d_model is our `width`.

    Args:
        positions: integers of any shape.
        width: features of an encoding, even.
        max_wavelength: bound of the wavelengths over 2 pi; 10000 in the paper.

    Returns:
        float32 `[..., width]`, whatever the model computes in.

    Raises:
        TypeError: `positions` are no integers.
        ValueError: `width` is odd or not positive, or `max_wavelength` not positive.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, not {positions.dtype}")
    if width < 2 or width % 2:
        raise ValueError(
            f"width must be even and positive, because sines pair with cosines: {width}"
        )
    if not max_wavelength > 0:
        raise ValueError(f"max_wavelength must be positive, not {max_wavelength}")
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    frequencies = np.asarray(max_wavelength**-exponents, np.float32)
    frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, width)
