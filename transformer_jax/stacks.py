"""Blocks in a row: what encoder and decoder share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
from flax.core import FrozenDict

from transformer_jax.attention import Attention
from transformer_jax.layers import (
    FeedForward,
    MultiHeadAttention,
    make_norm,
    residual,
)
from transformer_jax.pieces import layer_projections
from transformer_jax.positions import Alibi, T5Bias, alibi_slopes
from transformer_jax.types import HEADS, KEPT, LAYERS, POSITION, PyTree

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Of Raffel et al. 2020, section 2.1.
T5_BUCKETS = 32


class Common(NamedTuple):
    """What all layers of a stack use.

    Attributes:
        bias: what self-attention adds to its scores, or None.
        projections: of self-attention, by rank (`pieces.layer_projections`).
        cross_projections: of cross-attention likewise.
    """

    bias: Any = None
    projections: Mapping[int, jax.Array] = FrozenDict()
    cross_projections: Mapping[int, jax.Array] = FrozenDict()


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
    # The kinds of self-attention and of cross-attention.
    kind: Attention = Attention()
    cross_kind: Attention = Attention()
    # Places of the longest sequence, and of the longest memory.
    places: int = 0
    # Places before the sequence that hold extra tokens.
    extra: int = 0
    # Whether a place attends to those before it and to itself alone.
    causal: bool = False

    def make_self_attention(self) -> MultiHeadAttention:
        """Return an attention sublayer for one sequence, which knows positions."""
        rotary = self.positions == "rotary"
        return self._make_attention(
            rotary=rotary, attention=self.kind, extra=self.extra
        )

    def make_cross_attention(self) -> MultiHeadAttention:
        """Return an attention sublayer for a memory."""
        return self._make_attention(attention=self.cross_kind)

    def _make_attention(self, **fields: Any) -> MultiHeadAttention:
        """Return an attention sublayer of this block's sizes."""
        return MultiHeadAttention(
            self.width,
            self.heads,
            self.kv_heads,
            self.head_width,
            self.attention_dropout,
            self.dtype,
            places=self.places,
            **fields,
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


class Turn(nn.Module):
    """Blocks of several variants, one after the other: what a scan repeats."""

    block: type[Block]
    fields: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...]

    def setup(self) -> None:
        self.blocks = [self.block(**self.fields, **each) for each in self.variants]


def _turn_of(block: type[Block]) -> type[Turn]:
    """A `Turn` with the methods of a block, for a scan to lift."""

    def method(name: str) -> Callable[..., Any]:
        def run(self: Turn, carry: PyTree, scanned: Any, *shared: Any) -> Any:
            return _in_turn(self.blocks, name, carry, scanned, *shared)

        run.__name__ = name
        return run

    return type("Turn", (Turn,), {name: method(name) for name in block.SCANNED})


def _in_turn(
    blocks: Sequence[Block], method: str, carry: PyTree, scanned: Any, *shared: Any
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Run one method of every block; return carry and what each scanned."""
    results = []
    for number, block in enumerate(blocks):
        entry = None if scanned is None else scanned[number]
        carry, result = getattr(block, method)(carry, entry, *shared)
        results.append(result)
    return carry, tuple(results)


class Stack(nn.Module):
    """`length` blocks, unrolled or scanned, with a remat policy.

    Blocks differ by their `variants`, which repeat in turn; they are scanned over whole
    turns, and unrolled where that does not come out even. `block.SCANNED` names their
    methods and how many `shared` arguments each takes. They take `(carry, scanned,
    *shared)` and return `(carry, scanned)`; what is scanned is a tuple: an entry a
    layer when unrolled, an entry a variant when scanned, whose leaves hold its layers
    on axis 1 (axis 0 is the batch).
    """

    block: type[Block]
    fields: Mapping[str, Any]
    length: int
    scan: bool
    remat: str
    variants: tuple[Mapping[str, Any], ...] = (FrozenDict(),)

    def setup(self) -> None:
        block = self.block
        scanned = is_scanned(self.scan, self.length, self.variants)
        if self.remat != "none":
            block = nn.remat(
                block,
                policy=REMAT_POLICIES[self.remat],
                prevent_cse=not scanned,
            )
        if not scanned:
            self.layers = [
                block(**self.fields, **self.variants[n % len(self.variants)])
                for n in range(self.length)
            ]
        elif len(self.variants) == 1:
            self.layers = self._scanned(block)(**self.fields, **self.variants[0])
        else:
            turn = self._scanned(_turn_of(block))
            self.layers = turn(block, self.fields, self.variants)

    def _scanned(self, block: type[nn.Module]) -> type[nn.Module]:
        def lift(shared: int) -> dict[str, Any]:
            return {
                "variable_axes": {"params": 0, KEPT: 0},
                "split_rngs": {"params": True, "dropout": True, "redraw": True},
                "in_axes": (1,) + (nn.broadcast,) * shared,
                "out_axes": 1,
                "length": self.length // len(self.variants),
                "metadata_params": {nn.PARTITION_NAME: LAYERS},
            }

        methods = {name: lift(shared) for name, shared in self.block.SCANNED.items()}
        return nn.scan(block, methods=methods)

    def run(
        self, method: str, carry: PyTree, scanned: PyTree, *shared: Any
    ) -> tuple[PyTree, PyTree]:
        """Run one method of every block in turn; return carry and what was scanned."""
        if not is_scanned(self.scan, self.length, self.variants):
            return _in_turn(self.layers, method, carry, scanned, *shared)
        if len(self.variants) > 1:
            return getattr(self.layers, method)(carry, scanned, *shared)
        return _in_turn((self.layers,), method, carry, scanned, *shared)


def is_scanned(scan: bool, length: int, variants: Sequence[Any]) -> bool:
    """Tell whether a stack is scanned: it is to be, and whole turns fill it."""
    return scan and length % len(variants) == 0


class Tower(nn.Module):
    """A stack of blocks, one bias for all its self-attention, and a last norm.

    There is a last norm where norms come first. ALiBi and T5 positions are the bias;
    T5's table is one for all layers.
    """

    BLOCK: ClassVar[type[Block]]

    block_fields: Mapping[str, Any]
    layers: int
    scan: bool
    remat: str
    # Fields that change from layer to layer, in turn.
    variants: tuple[Mapping[str, Any], ...] = (FrozenDict(),)

    def setup(self) -> None:
        fields = self.block_fields
        self.stack = Stack(
            self.BLOCK, fields, self.layers, self.scan, self.remat, self.variants
        )
        if fields["norm_position"] == "pre":
            self.last_norm = make_norm(fields["norm"], fields["dtype"])
        if fields["positions"] == "t5":
            init = nn.initializers.normal(fields["width"] ** -0.5)
            self.position_table = self.param(
                "position_table",
                nn.with_logical_partitioning(init, (POSITION, HEADS)),
                (T5_BUCKETS, fields["heads"]),
            )
        kinds = {
            name: [each[name] for each in self.variants if name in each]
            for name in ("kind", "cross_kind")
        }
        self.projections, self.cross_projections = (
            layer_projections(self, f"{name}_projection", each, fields.get("places", 0))
            for name, each in kinds.items()
        )

    def common(self) -> Common:
        """Return what all layers use."""
        return Common(self.bias(), dict(self.projections), dict(self.cross_projections))

    def bias(self) -> Alibi | T5Bias | None:
        """Return what self-attention adds to its scores."""
        fields = self.block_fields
        causal = fields.get("causal", False)
        if fields["positions"] == "alibi":
            heads = fields["heads"]
            # Not the slopes behind: the two directions could not be told apart.
            ahead = None if causal else alibi_slopes(2 * heads)[::2]
            return Alibi(alibi_slopes(heads), ahead)
        if fields["positions"] == "t5":
            return T5Bias(self.position_table, bidirectional=not causal)
        return None

    def normed(self, x: jax.Array) -> jax.Array:
        """Apply the last norm, if there is one."""
        return self.last_norm(x) if self.block_fields["norm_position"] == "pre" else x
