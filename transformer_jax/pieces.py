"""The extra arrays of attention kernels: projections, kernels, features, centroids."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention import Attention, Members, Piece, PieceSizes
from transformer_jax.synthesis import SortLogits, SynthesizedLogits
from transformer_jax.types import HEADS, KEPT, POSITION, RANK

COMPUTED = {"sort_logits": SortLogits, "logits": SynthesizedLogits}


class Pieces(nn.Module):
    """What the kernel of one layer takes besides queries, keys and values.

    Trained arrays are parameters. Drawn and tracked ones lie in the collection KEPT and
    change after a call in which that is mutable: what is drawn comes anew every
    `redraw` calls, by the stream `redraw` (never if that is 0), and centroids follow
    their members.
    """

    attention: Attention
    sizes: PieceSizes
    dtype: Any

    def setup(self) -> None:
        self.made = {
            piece.name: self._made(piece)
            for piece in self.attention.row.pieces
            if not self._given(piece)
        }
        if self._redraw:
            self.age = self.variable(KEPT, "age", jnp.zeros, (), jnp.int32)

    def __call__(
        self,
        x: jax.Array | None = None,
        lengths: jax.Array | None = None,
        *,
        keys: int = 0,
        causal: bool = False,
        projection: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Return the arrays by the names of the kernel's arguments.

        Args:
            x: `[B, T, D]`, what queries are made of, where something is computed of it.
            lengths: int32 `[B]`, of the keys.
            keys: how many there are.
            causal: place t must not depend on places after it.
            projection: `[places, rank]`, the one of all layers.
        """
        found = {}
        for piece in self.attention.row.pieces:
            made = self.made.get(piece.name)
            if made is None:
                made = found[piece.like] if piece.like else projection
            elif piece.origin == "computed":
                made = made(x, keys, lengths, causal)
            elif piece.origin != "trained":
                made = made.value
            found[piece.name] = made
        return found

    def update(self, members: Members | None) -> None:
        """Do what follows a call of training; nothing where KEPT is not mutable."""
        if self.is_initializing() or not self.is_mutable_collection(KEPT):
            return
        for piece in self.attention.row.pieces:
            if piece.origin == "tracked":
                kept = self.made[piece.name]
                kept.value = members.moved(kept.value)
        if self._redraw:
            self.age.value += 1
            for piece in self.attention.row.pieces:
                self._draw_anew(piece, self.made[piece.name])

    @property
    def _redraw(self) -> int:
        """After how many calls arrays are drawn anew."""
        return self.attention.options.get("redraw", 0)

    def _given(self, piece: Piece) -> bool:
        """Tell whether a piece is another one: that of keys, or of all layers."""
        share = self.attention.options.get("share")
        return share == "layer" or (share == "kv" and bool(piece.like))

    def _made(self, piece: Piece) -> Any:
        shape = piece.shape(self.sizes)
        if piece.origin == "computed":
            return COMPUTED[piece.name](self.attention, shape, self.dtype)
        if piece.origin == "trained":
            axes = (HEADS,) * (len(shape) - len(piece.axes)) + piece.axes
            draw = nn.with_logical_partitioning(piece.draw, axes)
            return self.param(piece.name, draw, shape, jnp.float32)
        return self.variable(
            KEPT,
            piece.name,
            lambda: piece.draw(self.make_rng("params"), shape, jnp.float32),
        )

    def _draw_anew(self, piece: Piece, kept: nn.Variable) -> None:
        key, shape = self.make_rng("redraw"), kept.value.shape
        kept.value = jax.lax.cond(
            self.age.value % self._redraw == 0,
            lambda: piece.draw(key, shape, jnp.float32),
            lambda: kept.value,
        )


def layer_projections(
    module: nn.Module, name: str, kinds: list[Attention], places: int
) -> dict[int, jax.Array]:
    """Return the projections that the layers of a stack share, by rank.

    `linformer(share=layer)` has one for keys and values of all heads and layers (Wang
    et al. 2020, section 4).

    Args:
        module: whose parameters they are.
        name: of the parameters, before the rank.
        kinds: those of the layers.
        places: of the longest sequence.
    """
    options = [kind.options for kind in kinds]
    ranks = {each["rank"] for each in options if each.get("share") == "layer"}
    init = nn.initializers.normal(places**-0.5)
    return {
        rank: module.param(
            f"{name}_{rank}",
            nn.with_logical_partitioning(init, (POSITION, RANK)),
            (places, rank),
        )
        for rank in sorted(ranks)
    }
