"""Words that every module shares: axis letters, the batch, logical axis names.

Axis letters, in shapes and in einsum strings:

    B  batch (examples)          N  query heads          D  model width
    T  query or target length    K  key/value heads      F  feed-forward width
    S  key or source length      H  head width           V  vocabulary
    L  layers                    M  decoded rows (B W)     W  slots of a beam
    n  hypotheses of a row
"""

from typing import Any, NamedTuple

# A pytree of arrays, such as parameters or a decoding cache.
PyTree = Any

# Logical axis names: what a parameter's or an activation's axis means. One rules table
# in `sharding.py` maps them to mesh axes.
BATCH = "batch"
LENGTH = "length"
POSITION = "position"
EMBED = "embed"
HEADS = "heads"
HEAD = "head"
MLP = "mlp"
VOCAB = "vocab"
LAYERS = "layers"
RANK = "rank"
# Mesh axes over which a batch and heads are cut.
BATCH_MESH_AXES = ("data", "fsdp")
HEADS_MESH_AXES = ("model",)
LOGICAL_AXES = (BATCH, LENGTH, POSITION, EMBED, HEADS, HEAD, MLP, VOCAB, LAYERS, RANK)
# The Flax collection of what attention keeps (non-trainable variables): arrays drawn at
# random and centroids that follow the data, equal on all devices.
KEPT = "attention"


def variables_of(params: PyTree, kept: PyTree | None) -> dict[str, PyTree]:
    """Return a model's variables; `kept` None means that it keeps nothing."""
    return {"params": params} | ({} if kept is None else {KEPT: kept})


class Batch(NamedTuple):
    """One batch of padded pairs; padding stands on the right.

    Attributes:
        source: int32 `[B, S]`, source ids, PAD from `source_lengths` on.
        source_lengths: int32 `[B]`, at least 1 in rows of weight 1, else 0.
        target: int32 `[B, T]`, target ids without BOS and END, PAD from
            `target_lengths` on. T counts the place of END: `target_lengths` < T. Or
            `[B, R, T]`, up to R references of which any is right.
        target_lengths: int32 `[B]` or `[B, R]`, symbols of the target without END; -1
            where there is no such reference.
        weight: float32 `[B]`, 1 for an example, 0 for a filler row.
        index: int32 `[B]`, number of the example in its split, -1 in a filler row.
    """

    source: Any
    source_lengths: Any
    target: Any
    target_lengths: Any
    weight: Any
    index: Any
