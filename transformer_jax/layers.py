"""Building blocks of the models: projections, norms, feed-forward, attention, stacks.

Dropout is active exactly when a `dropout` key is given to `apply`, so no module carries
a "training" flag. Every parameter names its logical axes (`types.LOGICAL_AXES`).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import ATTENTION
from transformer_jax.masks import hashed_dropout
from transformer_jax.positions import Alibi, T5Bias, alibi_slopes, rotary
from transformer_jax.types import EMBED, HEAD, HEADS, LAYERS, MLP, POSITION, PyTree

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "swiglu": jax.nn.silu}
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Of Raffel et al. 2020, section 2.1.
T5_BUCKETS = 32


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
        kernel_init=nn.with_logical_partitioning(_kernel_init, axes),
        bias_init=nn.with_logical_partitioning(
            nn.initializers.zeros_init(), axes[contract:]
        ),
    )


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
    keys enter a cache rotated.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    dropout: float
    dtype: Any
    rotary: bool = False
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

        `positions` are those of the keys, `[S]` or `[B, S]`; from 0 on by default.
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
        return self.out(kernel(self._rotated(self.query(x)), *key_value, **options))

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

    def _rotated(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Queries or keys `[B, T, N, H]` as they stand at these positions."""
        if not self.rotary:
            return x
        return rotary(x, jnp.arange(x.shape[1]) if positions is None else positions)


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


class Block(nn.Module):
    """Fields and parts that encoder and decoder blocks share."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    activation: str
    norm: str
    norm_position: str
    dropout: float
    attention_dropout: float
    positions: str
    dtype: Any

    def make_self_attention(self) -> MultiHeadAttention:
        """Return an attention sublayer for one sequence, which knows positions."""
        return self.make_attention(rotary=self.positions == "rotary")

    def make_attention(self, *, rotary: bool = False) -> MultiHeadAttention:
        """Return an attention sublayer of this block's sizes."""
        return MultiHeadAttention(
            self.width,
            self.heads,
            self.kv_heads,
            self.head_width,
            self.attention_dropout,
            self.dtype,
            rotary,
        )

    def make_feed_forward(self) -> FeedForward:
        """Return a feed-forward sublayer of this block's sizes."""
        return FeedForward(self.hidden, self.activation, self.dropout, self.dtype)

    def make_norm(self) -> nn.Module:
        """Return a norm of this block's kind."""
        return make_norm(self.norm, self.dtype)

    def add_and_norm(
        self, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array], norm: nn.Module
    ) -> jax.Array:
        """Apply `residual` with this block's dropout and norm position."""
        return residual(
            x, sublayer, norm, self.residual_dropout, position=self.norm_position
        )


class Stack(nn.Module):
    """`length` blocks of one kind, unrolled or scanned, with a remat policy.

    `block.SCANNED` names its methods and how many `shared` arguments each takes. They
    take `(carry, scanned, *shared)` and return `(carry, scanned)`;
    what is scanned holds one entry a layer: a tuple when unrolled, axis 1 of every leaf
    when scanned (axis 0 is the batch).
    """

    block: type[Block]
    fields: Mapping[str, Any]
    length: int
    scan: bool
    remat: str

    def setup(self) -> None:
        block = self.block
        if self.remat != "none":
            block = nn.remat(
                block,
                policy=REMAT_POLICIES[self.remat],
                prevent_cse=not self.scan,
            )
        if self.scan:
            self.layers = self._scanned(block)(**self.fields)
        else:
            self.layers = [block(**self.fields) for _ in range(self.length)]

    def _scanned(self, block: type[nn.Module]) -> type[nn.Module]:
        def lift(shared: int) -> dict[str, Any]:
            return {
                "variable_axes": {"params": 0},
                "split_rngs": {"params": True, "dropout": True},
                "in_axes": (1,) + (nn.broadcast,) * shared,
                "out_axes": 1,
                "length": self.length,
                "metadata_params": {nn.PARTITION_NAME: LAYERS},
            }

        methods = {name: lift(shared) for name, shared in self.block.SCANNED.items()}
        return nn.scan(block, methods=methods)

    def run(
        self, method: str, carry: PyTree, scanned: PyTree, *shared: Any
    ) -> tuple[PyTree, PyTree]:
        """Run one method of every block in turn; return carry and what was scanned."""
        if self.scan:
            return getattr(self.layers, method)(carry, scanned, *shared)
        results = []
        for number, layer in enumerate(self.layers):
            entry = None if scanned is None else scanned[number]
            carry, result = getattr(layer, method)(carry, entry, *shared)
            results.append(result)
        return carry, tuple(results)


class Tower(nn.Module):
    """A stack of blocks, one bias for all its self-attention, and a last norm.

    There is a last norm where norms come first. ALiBi and T5 positions are the bias;
    T5's table is one for all layers.
    """

    BLOCK: ClassVar[type[Block]]
    BIDIRECTIONAL: ClassVar[bool]

    block_fields: Mapping[str, Any]
    layers: int
    scan: bool
    remat: str

    def setup(self) -> None:
        fields = self.block_fields
        self.stack = Stack(self.BLOCK, fields, self.layers, self.scan, self.remat)
        if fields["norm_position"] == "pre":
            self.last_norm = make_norm(fields["norm"], fields["dtype"])
        if fields["positions"] == "t5":
            init = nn.initializers.normal(fields["width"] ** -0.5)
            self.position_table = self.param(
                "position_table",
                nn.with_logical_partitioning(init, (POSITION, HEADS)),
                (T5_BUCKETS, fields["heads"]),
            )

    def bias(self) -> Alibi | T5Bias | None:
        """Return what self-attention adds to its scores."""
        fields = self.block_fields
        if fields["positions"] == "alibi":
            heads = fields["heads"]
            # Other slopes than behind: alike, the two directions could not be told apart.
            ahead = alibi_slopes(2 * heads)[::2] if self.BIDIRECTIONAL else None
            return Alibi(alibi_slopes(heads), ahead)
        if fields["positions"] == "t5":
            return T5Bias(self.position_table, bidirectional=self.BIDIRECTIONAL)
        return None

    def normed(self, x: jax.Array) -> jax.Array:
        """Apply the last norm, if there is one."""
        return self.last_norm(x) if self.block_fields["norm_position"] == "pre" else x
