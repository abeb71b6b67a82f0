"""Building blocks of the models: projections, norms, feed-forward, attention.

Dropout is active exactly when a `dropout` key is given to `apply`, so no module carries
a "training" flag. Every parameter names its logical axes (`types.LOGICAL_AXES`).
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import ATTENTION
from transformer_jax.attention.merging import attend_with_extra
from transformer_jax.masks import hashed_dropout
from transformer_jax.patterns import Pattern
from transformer_jax.positions import rotary
from transformer_jax.types import EMBED, HEAD, HEADS, MLP, PyTree

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "swiglu": jax.nn.silu}


class Dropout(nn.Module):
    """Zero a share of the entries while a `dropout` key is given, scale up the rest."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[...]` to `[...]`."""
        if not self.rate or not self.has_rng("dropout"):
            return x
        return hashed_dropout(x, self.make_rng("dropout"), self.rate)


def make_norm(kind: str, dtype: Any) -> nn.Module:
    """Return LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019)."""
    scale = nn.with_logical_partitioning(nn.initializers.ones_init(), (EMBED,))
    if kind == "rms":
        return nn.RMSNorm(dtype=dtype, scale_init=scale)
    bias = nn.with_logical_partitioning(nn.initializers.zeros_init(), (EMBED,))
    return nn.LayerNorm(dtype=dtype, scale_init=scale, bias_init=bias)


def make_projection(
    features: int | tuple[int, ...],
    axes: tuple[str, ...],
    *,
    contract: int = 1,
    use_bias: bool = True,
    dtype: Any = None,
) -> nn.Module:
    """Return a linear map of the last `contract` axes to `features`.

    `axes` names the logical axes of its kernel: inputs, then outputs.
    """
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-contract, 0)),
        use_bias=use_bias,
        dtype=dtype,
        dot_general=_flat_dot_general,
        kernel_init=nn.with_logical_partitioning(_kernel_init, axes),
        bias_init=nn.with_logical_partitioning(
            nn.initializers.zeros_init(), axes[contract:]
        ),
    )


def _flat_dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
    """The product of DenseGeneral on matrices: `[B, T, ...]` as `[B T, ...]`.

    With two axes of rows XLA's CPU compiler transposes what comes back before it
    multiplies, and takes its slower product for it.
    """
    contract = len(dimension_numbers[0][0])
    rows, columns = x.shape[:-contract], kernel.shape[contract:]
    product = jax.lax.dot_general(
        x.reshape(math.prod(rows), -1),
        kernel.reshape(-1, math.prod(columns)),
        (((1,), (0,)), ((), ())),
        **options,
    )
    return product.reshape(*rows, *columns)


class FeedForward(nn.Module):
    """Two linear maps with a nonlinearity between, place by place.

    relu, gelu: W2 f(W1 x + b1) + b2 (Vaswani et al. 2017, section 3.3);
    swiglu: W2 (silu(W1 x) * W3 x) (Shazeer 2020).
    """

    hidden: int
    activation: str
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, D]`."""
        gated = self.activation == "swiglu"
        widen = {"use_bias": not gated, "dtype": self.dtype}
        hidden = make_projection(self.hidden, (EMBED, MLP), **widen)(x)
        hidden = ACTIVATIONS[self.activation](hidden)
        if gated:
            hidden *= make_projection(self.hidden, (EMBED, MLP), **widen)(x)
        hidden = Dropout(self.dropout)(hidden)
        return make_projection(x.shape[-1], (MLP, EMBED), **widen)(hidden)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) around one kernel.

    The kernel is the row `attention` of the ATTENTION table. Key projections have no
    bias: softmax cancels it, and its rounding errors would be amplified by Adam. With
    `rotary`, queries and keys are rotated by their positions (`positions.rotary`), so
    keys enter a cache rotated. `pattern` tells the edges, None all. The first `extra`
    places are tokens outside of the sequence (`attend_with_extra`), of calls alone:
    there is no such cache.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    dropout: float
    dtype: Any
    rotary: bool = False
    pattern: Pattern | None = None
    extra: int = 0
    attention: str = "dot_product"

    def setup(self) -> None:
        axes = (EMBED, HEADS, HEAD)
        kv = (self.kv_heads, self.head_width)
        self.query = make_projection(
            (self.heads, self.head_width), axes, dtype=self.dtype
        )
        self.key = make_projection(kv, axes, use_bias=False, dtype=self.dtype)
        self.value = make_projection(kv, axes, dtype=self.dtype)
        self.out = make_projection(
            self.width, (HEADS, HEAD, EMBED), contract=2, dtype=self.dtype
        )

    def project(
        self, memory: jax.Array, positions: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Map `[B, S, D]` to key and value `[B, S, K, H]`.

        `positions` are those of the keys, `[S]` or `[B, S]`; from 0 on by default,
        after the extra tokens, which have none.
        """
        return self._rotated(self.key(memory), positions), self.value(memory)

    def __call__(
        self, x: jax.Array, key_value: tuple[jax.Array, jax.Array], **options: Any
    ) -> jax.Array:
        """Attend from `[B, T, D]` to projected keys and values.

        `options` go to the kernel: `is_causal`, `key_value_seq_lengths`, ...
        """
        if self.dropout and self.has_rng("dropout"):
            options["dropout_rate"] = self.dropout
            options["dropout_rng"] = self.make_rng("dropout")
        kernel = ATTENTION[self.attention].kernel
        arrays = (self._rotated(self.query(x)), *key_value)
        options["pattern"] = self.pattern
        if not self.extra:
            return self.out(kernel(*arrays, **options))
        causal = self.pattern is not None and self.pattern.is_causal
        causal = causal or options.get("is_causal", False)
        attended = attend_with_extra(
            kernel, *arrays, self.extra, sequence_is_causal=causal, **options
        )
        return self.out(attended)

    def step(
        self, x: jax.Array, cache: PyTree, **options: Any
    ) -> tuple[jax.Array, PyTree]:
        """Attend from one new place `[M, 1, D]` to itself and all places before.

        `options` go to the kernel's step: `bias`.
        """
        positions = cache.position[:, None]
        key, value = self.project(x, positions)
        query = self._rotated(self.query(x), positions)
        step = ATTENTION[self.attention].step
        attended, cache = step(query, key, value, cache, **options)
        return self.out(attended), cache

    def fill(self, memory: jax.Array, lengths: jax.Array) -> PyTree:
        """Project `[B, S, D]` once, for `read`; rows hold `lengths` places `[B]`."""
        fill = ATTENTION[self.attention].fill
        return fill(*self.project(memory), lengths, pattern=self.pattern)

    def read(self, x: jax.Array, filled: PyTree, positions: jax.Array) -> jax.Array:
        """Attend from `[B, T, D]` at positions `[B, T]` to what `fill` returned."""
        read = ATTENTION[self.attention].read
        return self.out(read(self.query(x), filled, positions=positions))

    def _rotated(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Queries or keys `[B, T, N, H]` as they stand at these positions."""
        if not self.rotary:
            return x
        if positions is None:
            # Turned by the angle 0, an extra token is as without a position.
            positions = jnp.maximum(jnp.arange(x.shape[1]) - self.extra, 0)
        return rotary(x, positions)


def residual(
    x: jax.Array,
    sublayer: Callable[[jax.Array], jax.Array],
    norm: nn.Module,
    dropout: nn.Module,
    *,
    position: str,
) -> jax.Array:
    """Add & Norm around a sublayer.

    post: norm(x + dropout(f(x))) (Vaswani et al. 2017, section 3.1);
    pre: x + dropout(f(norm(x))) (Xiong et al. 2020).
    """
    if position == "pre":
        return x + dropout(sublayer(norm(x)))
    return norm(x + dropout(sublayer(x)))
