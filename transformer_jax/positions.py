"""Positions as vectors, rotations and biases of attention, without parameters.

A bias is a frozen pytree and a callable `bias(i, j) -> [N, t, s]` of positions i
`[t, 1]` and j `[1, s]`: a kernel evaluates it tile by tile, so no array of all pairs is
needed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int32


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
    angles = _angles(_integers("positions", positions), width, max_wavelength)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], width)


def one_hot(positions: ArrayLike, size: int) -> Float32[Array, "... size"]:
    """Encode positions as unit vectors, one axis a position.

        e(p)_q = 1 if p = q else 0

    The simplest code of a position: joined to a token's own unit vector x, a linear map
    of both, [W_I W_P] [x; e] = W_I x + W_P e, adds a vector of the position to the
    token's embedding. Vectors of Vaswani et al. 2017, section 3.5, stand for W_P e.

    Args:
        positions: integers of any shape.
        size: number of positions, 0 to size - 1.

    Returns:
        float32 `[..., size]`; NaN for a position that is none of them.

    Raises:
        TypeError: `positions` are no integers.
    """
    positions = _integers("positions", positions)
    inside = ((positions >= 0) & (positions < size))[..., None]
    units = jax.nn.one_hot(positions, size, dtype=jnp.float32)
    return jnp.where(inside, units, jnp.nan)


def rotary(
    x: Float[Array, "B T N H"], positions: ArrayLike, *, max_wavelength: float = 10000.0
) -> Float[Array, "B T N H"]:
    """Rotate pairs of features by angles that grow with the position.

        y(2i)     = x(2i) cos(p w_i) - x(2i + 1) sin(p w_i)
        y(2i + 1) = x(2i) sin(p w_i) + x(2i + 1) cos(p w_i),
        w_i = max_wavelength^(-2i / H)

    Norms are kept, and the product of a query rotated at i with a key rotated at j
    depends on i - j alone. Su et al. 2021, "RoFormer", equation 34
    (https://arxiv.org/abs/2104.09864), with its adjacent pairs; its m is our p, its
    theta our w, its d our H.

    Args:
        x: queries or keys.
        positions: integers `[T]` or `[B, T]`.
        max_wavelength: bound of the wavelengths over 2 pi; 10000 in the paper.

    Returns:
        the dtype of `x`; angles and products are float32.

    Raises:
        TypeError: `positions` are no integers.
        ValueError: H is odd, `positions` do not fit, or `max_wavelength` is not
            positive.
    """
    positions = _integers("positions", positions)
    B, T, _, H = x.shape
    if positions.shape not in ((T,), (1, T), (B, T)):
        raise ValueError(
            f"positions must be [T] or [B, T] of x {x.shape}, not {positions.shape}"
        )
    angles = _angles(jnp.atleast_2d(positions), H, max_wavelength)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], H // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def alibi_slopes(heads: int) -> Float32[Array, " N"]:
    """Return the slopes of ALiBi, one a head.

        slope(k) = 2^(-8 k / N), k = 1 ... N

    where N is a power of two. Otherwise: those of the greatest power of two M < N, then
    the 1st, 3rd, 5th ... of 2 M heads. Press et al. 2022, "Train Short, Test Long",
    section 3, and the code published with it (https://arxiv.org/abs/2108.12409).

    Raises:
        ValueError: `heads` is below 1.
    """
    if heads < 1:
        raise ValueError(f"slopes need at least one head, not {heads}")
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    slopes += [2.0 ** (-4 * k / power) for k in range(1, 2 * (heads - power), 2)]
    return jnp.asarray(slopes, jnp.float32)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("slopes", "ahead"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Alibi:
    """A bias that falls linearly with the distance.

        bias(i, j) = -slope (i - j)  where j <= i
                     -ahead (j - i)  where j > i

    Press et al. 2022, section 3 (https://arxiv.org/abs/2108.12409), for causal
    attention, which has no j > i. In both directions, `ahead` = `slopes` is blind: it
    cannot tell a sequence from its mirror image. The first author suggests slopes that
    differ (issue 5 of github.com/ofirpress/attention_with_linear_biases).

    Attributes:
        slopes: float `[N]`, as from `alibi_slopes`.
        ahead: float `[N]`, those of later keys; None: the same, -slope |i - j|.
    """

    slopes: Any
    ahead: Any = None

    def __call__(self, i: ArrayLike, j: ArrayLike) -> Float[Array, "N t s"]:
        """Map positions `[t, 1]` and `[1, s]` to the bias."""
        distance = (jnp.asarray(i) - j).astype(self.slopes.dtype)[None]
        ahead = self.slopes if self.ahead is None else self.ahead
        behind, ahead = (x[:, None, None] for x in (self.slopes, ahead))
        return jnp.where(distance < 0, ahead * distance, -behind * distance)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("table",),
    meta_fields=("bidirectional", "max_distance"),
)
@dataclasses.dataclass(frozen=True)
class T5Bias:
    """A learned bias for each bucket of relative positions.

        bias(i, j)[n] = table[t5_bucket(j - i), n]

    Raffel et al. 2020, section 2.1 (https://arxiv.org/abs/1910.10683). One table serves
    all layers of a stack.

    Attributes:
        table: float `[buckets, N]`, learned.
        bidirectional: see `t5_bucket`; static.
        max_distance: likewise.
    """

    table: Any
    bidirectional: bool
    max_distance: int = 128

    def __call__(self, i: ArrayLike, j: ArrayLike) -> Float[Array, "N t s"]:
        """Map positions `[t, 1]` and `[1, s]` to the bias."""
        bucket = t5_bucket(
            jnp.asarray(j) - i,
            buckets=self.table.shape[0],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return self.table[bucket].transpose(2, 0, 1)


def t5_bucket(
    relative: ArrayLike, *, buckets: int, max_distance: int, bidirectional: bool
) -> Int32[Array, "..."]:
    """Number the relative positions j - i by buckets that widen with the distance.

    With n = |j - i| and X = buckets / 2, rounded down:

        n < X:  n
        else:   X + floor((buckets - X) log(n / X) / log(max_distance / X)),
                at most buckets - 1

    Bidirectional: half of the buckets serve j <= i, the other half j > i, each by this
    rule. Otherwise every j > i is in bucket 0. Raffel et al. 2020, section 2.1
    (https://arxiv.org/abs/1910.10683), in the form of the code published with it, but
    in whole numbers: a logarithm rounds differently on each machine.

    Args:
        relative: integers of any shape, key position minus query position.
        buckets: 32 in the paper.
        max_distance: from here on all are in one bucket; 128 in the paper.
        bidirectional: whether keys after the query are told apart.

    Raises:
        TypeError: `relative` are no integers.
        ValueError: there are too few buckets, an odd number of them for two directions,
            or `max_distance` is not beyond the exact ones.
    """
    relative = _integers("relative", relative).astype(jnp.int32)
    if buckets < (4 if bidirectional else 2) or (bidirectional and buckets % 2):
        needs = "an even number from 4 on" if bidirectional else "at least 2"
        raise ValueError(f"buckets must be {needs}, not {buckets}")
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must be beyond the {exact} exact distances, "
            f"not {max_distance}"
        )
    distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    starts = _log_starts(exact, count - exact, max_distance)
    passed = jnp.searchsorted(starts, distance, side="right", method="compare_all")
    bucket = jnp.where(distance < exact, distance, exact + passed)
    return jnp.where(relative > 0, bucket + count, bucket) if bidirectional else bucket


def _log_starts(exact: int, count: int, max_distance: int) -> Int32[Array, "..."]:
    """Where each of `count` log-spaced buckets but the first begins.

    Bucket k holds n >= exact (max_distance / exact)^(k / count), raised to `count`.
    """
    starts, n = [], exact
    for k in range(1, count):
        while n**count < exact ** (count - k) * max_distance**k:
            n += 1
        starts.append(n)
    return jnp.asarray(starts, jnp.int32)


def _integers(name: str, values: ArrayLike) -> Array:
    """The values as an array, if they are integers."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {values.dtype}")
    return values


def _angles(
    positions: Array, width: int, max_wavelength: float
) -> Float32[Array, "... half"]:
    """Position times frequency, for each pair of features: `[..., width / 2]`."""
    if width < 2 or width % 2:
        raise ValueError(
            f"width must be even and positive, because sines pair with cosines: {width}"
        )
    if not max_wavelength > 0:
        raise ValueError(f"max_wavelength must be positive, not {max_wavelength}")
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    frequencies = np.asarray(max_wavelength**-exponents, np.float32)
    frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
    return positions[..., None].astype(jnp.float32) * frequencies
