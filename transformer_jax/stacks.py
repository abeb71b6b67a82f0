"""Blocks in a row: what encoder and decoder share."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax

from transformer_jax.layers import (
    FeedForward,
    MultiHeadAttention,
    make_norm,
    residual,
)
from transformer_jax.positions import Alibi, T5Bias, alibi_slopes
from transformer_jax.types import HEADS, LAYERS, POSITION, PyTree

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Of Raffel et al. 2020, section 2.1.
T5_BUCKETS = 32


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
            # Not the slopes behind: the two directions could not be told apart.
            ahead = alibi_slopes(2 * heads)[::2] if self.BIDIRECTIONAL else None
            return Alibi(alibi_slopes(heads), ahead)
        if fields["positions"] == "t5":
            return T5Bias(self.position_table, bidirectional=self.BIDIRECTIONAL)
        return None

    def normed(self, x: jax.Array) -> jax.Array:
        """Apply the last norm, if there is one."""
        return self.last_norm(x) if self.block_fields["norm_position"] == "pre" else x
