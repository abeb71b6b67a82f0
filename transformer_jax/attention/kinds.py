"""What a row of the ATTENTION table is."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CAPABILITIES = {
    "bias": "the argument of that name",
    "causal": "`is_causal`",
    "cross": "keys of another sequence",
    "decode": "`init_cache` and `step`: place after place",
    "dropout": "`dropout_rate` and `dropout_rng`",
    "exact_mask": "any boolean `mask`",
    "gqa": "fewer key/value heads",
    "memory": "`fill` and `read`: a sequence that is projected once",
    "padding": "`key_value_seq_lengths`",
    "pattern": "a static `pattern`",
    "query_lengths": "`query_seq_lengths`, which change what valid queries get",
    "residual": "`return_residual`",
    "segments": "segment ids",
}


class PieceSizes(NamedTuple):
    """What the shape of a piece may depend on.

    Attributes: heads N, kv_heads K, head_width H, `places` of the longest sequence, and
    the `options` of the kind, by name.
    """

    heads: int
    kv_heads: int
    head_width: int
    places: int
    options: Mapping[str, Any]


class Piece(NamedTuple):
    """An extra array that a kernel takes, for a module to make.

    Attributes:
        name: the kernel's argument.
        shape: its shape, from `PieceSizes`.
        draw: `(key, shape, dtype)` -> its first value; None if it is computed.
        origin: "trained" by gradients; "drawn" at random, now and then anew; "tracked":
            it follows what the kernel returns besides the output; "computed" from the
            layer's inputs.
        axes: logical names of the last axes of a trained piece; one before them is
            HEADS.
        by_place: of which places it has a row or a column each: "keys", "both" or, for
            any length, "".
        like: the piece that stands for it where keys and values share one.
    """

    name: str
    shape: Callable[[PieceSizes], tuple[int, ...]]
    draw: Callable[..., Any] | None
    origin: str
    axes: tuple[str, ...] = ()
    by_place: str = ""
    like: str = ""


class Option(NamedTuple):
    """A number or a word that a kind's text may give, such as `rank=256`.

    Attributes:
        default: its value without; None where that depends on the others.
        low: the least number; None of words.
        choices: the legal words; none of numbers.
        multiple: what an integer is a multiple of; 0 means nothing.
    """

    default: Any
    low: float | None = None
    choices: tuple[str, ...] = ()
    multiple: int = 0


class AttentionKind(NamedTuple):
    """A row of the table.

    Attributes:
        kernel: the pure function.
        capabilities: what it can do, keys of CAPABILITIES.
        pieces: extra arrays that it takes.
        init_cache: makes an empty cache of `batch` rows and `max_length` positions.
        step: appends one position to the cache and attends from it.
        fill: makes the cache of a whole sequence, to be read only.
        read: attends to all that a cache holds.
        options: what its text may set, by name.
        arrays: its first arguments.
        paper: authors and year.
        file: where it is, below `transformer_jax/attention`.
        cost: products of numbers of a head, forward and without causality, where a
            pattern allows all: Python in T, S, H, V and options.
    """

    kernel: Callable[..., Any]
    capabilities: frozenset[str]
    pieces: tuple[Piece, ...]
    init_cache: Callable[..., Any] | None
    step: Callable[..., Any] | None
    fill: Callable[..., Any] | None
    read: Callable[..., Any] | None
    options: Mapping[str, Option]
    arrays: tuple[str, ...]
    paper: str
    file: str
    cost: str


def taken(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some values by name that a function has arguments for."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}
