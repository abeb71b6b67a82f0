"""Building blocks of the models: norms, feed-forward, attention.

Dropout is active exactly when a `dropout` key is given to `apply`, so no module carries
a "training" flag. Every parameter names its logical axes (`types.LOGICAL_AXES`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import (
    Attention,
    AttentionKind,
    PieceSizes,
    attend_with_extra,
)
from transformer_jax.attention.kinds import taken
from transformer_jax.masks import hashed_dropout, length_mask, or_zero
from transformer_jax.pieces import Pieces
from transformer_jax.positions import rotary
from transformer_jax.projections import make_projection
from transformer_jax.types import EMBED, HEAD, HEADS, MLP, PyTree

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

    `attention` tells the kernel, a row of the ATTENTION table, and what it is set to;
    what the kernel takes besides queries, keys and values is in `pieces`. Key
    projections have no bias: softmax cancels it, and its rounding errors would be
    amplified by Adam. With `rotary`, queries and keys are rotated by their positions
    (`positions.rotary`), so keys enter a cache rotated. The first `extra` places are
    tokens outside of the sequence (`attend_with_extra`), of calls alone: there is no
    such cache. `places` are those of the longest sequence, for kernels with a row
    per position.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    dropout: float
    dtype: Any
    rotary: bool = False
    attention: Attention = Attention()
    extra: int = 0
    places: int = 0

    def setup(self) -> None:
        axes = (EMBED, HEADS, HEAD)
        arrays = self.attention.row.arrays
        kv = (self.kv_heads, self.head_width)
        if {"query", "query_key"} & {*arrays}:
            self.query = make_projection(
                (self.heads, self.head_width), axes, dtype=self.dtype
            )
        if "key" in arrays:
            self.key = make_projection(kv, axes, use_bias=False, dtype=self.dtype)
        self.value = make_projection(kv, axes, dtype=self.dtype)
        self.out = make_projection(
            self.width, (HEADS, HEAD, EMBED), contract=2, dtype=self.dtype
        )
        options = self.attention.options
        sizes = PieceSizes(
            self.heads, self.kv_heads, self.head_width, self.places, options
        )
        self.pieces = Pieces(self.attention, sizes, self.dtype)

    def project(
        self, memory: jax.Array, positions: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Map `[B, S, D]` to value and, where there is one, key `[B, S, K, H]`.

        `positions` are those of the keys, `[S]` or `[B, S]`; from 0 on by default,
        after the extra tokens, which have none.
        """
        found = {"value": self.value(memory)}
        if "key" in self.attention.row.arrays:
            found["key"] = self._rotated(self.key(memory), positions)
        return found

    def __call__(
        self,
        x: jax.Array,
        projected: Mapping[str, jax.Array],
        *,
        projections: Mapping[int, jax.Array] = MappingProxyType({}),
        **options: Any,
    ) -> jax.Array:
        """Attend from `[B, T, D]` to what `project` returned.

        `options` go to the kernel if they say anything: `is_causal`,
        `key_value_seq_lengths`, ...; `projections` are those of all layers, by rank.
        """
        kind, row = self.attention, self.attention.row
        if self.dropout and self.has_rng("dropout"):
            options["dropout_rate"] = self.dropout
            options["dropout_rng"] = self.make_rng("dropout")
        pieces = self.pieces(
            x,
            options.get("key_value_seq_lengths"),
            keys=projected["value"].shape[1],
            causal=options.get("is_causal", False),
            projection=projections.get(kind.options.get("rank")),
        )
        options = _given_options(row, options, pattern=kind.pattern)
        settings = taken(row.kernel, {**kind.options, **pieces})
        arrays = self._arranged(x, projected)
        if self.extra:
            # Kinds that can do this, those with a residual, take no pieces.
            causal = kind.pattern is not None and kind.pattern.is_causal
            causal = causal or options.get("is_causal", False)
            return self.out(
                attend_with_extra(
                    row.kernel,
                    *arrays,
                    self.extra,
                    sequence_is_causal=causal,
                    **options,
                )
            )
        found = row.kernel(*arrays, **settings, **options)
        attended, members = found if type(found) is tuple else (found, None)
        self.pieces.update(members)
        return self.out(attended)

    def step(
        self, x: jax.Array, cache: PyTree, **options: Any
    ) -> tuple[jax.Array, PyTree]:
        """Attend from one new place `[M, 1, D]` to itself and all places before.

        `options` go to the kernel's step if they say anything: `bias`.
        """
        row, positions = self.attention.row, cache.position[:, None]
        arrays = self._arranged(x, self.project(x, positions), positions)
        options = _given_options(row, options)
        attended, cache = row.step(*arrays, cache, **self.pieces(), **options)
        return self.out(attended), cache

    def fill(
        self,
        memory: jax.Array,
        lengths: jax.Array,
        projections: Mapping[int, jax.Array] = MappingProxyType({}),
    ) -> PyTree:
        """Project `[B, S, D]` once, for `read`; rows hold `lengths` places `[B]`."""
        kind, fill = self.attention, self.attention.row.fill
        pieces = self.pieces(projection=projections.get(kind.options.get("rank")))
        settings = {"pattern": kind.pattern, **kind.options, **pieces}
        arrays = self.project(memory)
        return fill(arrays["key"], arrays["value"], lengths, **taken(fill, settings))

    def read(self, x: jax.Array, filled: PyTree, positions: jax.Array) -> jax.Array:
        """Attend from `[B, T, D]` at positions `[B, T]` to what `fill` returned."""
        read = self.attention.row.read
        settings = taken(read, {"positions": positions, **self.pieces()})
        return self.out(read(self.query(x), filled, **settings))

    def _arranged(
        self,
        x: jax.Array,
        projected: Mapping[str, jax.Array],
        positions: jax.Array | None = None,
    ) -> list[jax.Array]:
        """The kernel's first arguments."""
        return [
            self._rotated(self.query(x), positions)
            if name.startswith("query")
            else projected[name]
            for name in self.attention.row.arrays
        ]

    def _rotated(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Queries or keys `[B, T, N, H]` as they stand at these positions."""
        if not self.rotary:
            return x
        if positions is None:
            # Turned by the angle 0, an extra token is as without a position.
            positions = jnp.maximum(jnp.arange(x.shape[1]) - self.extra, 0)
        return rotary(x, positions)


def mean_of(states: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the mean `[B, D]` of the valid places of states `[B, S, D]`."""
    inside = length_mask(lengths, states.shape[1])[..., None]
    count = jnp.maximum(lengths, 1)[:, None].astype(states.dtype)
    return or_zero(inside, states).sum(1) / count


def empty_cache(
    attention: Attention, batch: int, max_length: int, **sizes: Any
) -> PyTree:
    """Return an empty cache for the step of a kind, with its settings.

    Args:
        attention: the kind.
        batch, max_length: rows and positions.
        sizes: heads, kv_heads, head_width, dtype.
    """
    make = attention.row.init_cache
    settings = {"pattern": attention.pattern, **attention.options, **sizes}
    return make(batch, max_length, **taken(make, settings))


def _given_options(
    row: AttentionKind, options: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Drop options that are None or False: a kernel refuses what it does not know.

    So is the length of the queries where it changes nothing that counts.
    """
    said = {
        name: value
        for name, value in {**options, **more}.items()
        if value is not None and value is not False
    }
    if "query_lengths" not in row.capabilities:
        said.pop("query_seq_lengths", None)
    return said


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
