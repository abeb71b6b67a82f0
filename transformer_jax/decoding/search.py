"""Searches that write one token a step, in pieces that a caller can stop between."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.types import PyTree

# (tokens int32 [M], cache) -> (logits [M, V], cache)
StepFunction = Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]


class Search(NamedTuple):
    """A strategy as four pure functions of its state.

    A state is a named tuple with a field `time`, int32 [], the steps taken so far. All
    its other leaves begin with B or a multiple of it, so rows can be taken out of it
    (`take_rows`).

    Attributes:
        begin: (cache of leaves `[B, ...]`, start `[B]`, keys `[B]` or None) -> state.
        advance: (step_fn, state) -> state after one more step.
        finished: state -> bool `[B]`, what no further step changes.
        result: state -> Hypotheses.
        max_length: steps after which `result` is final in any case.
    """

    begin: Callable[[PyTree, Any, Any], Any]
    advance: Callable[[StepFunction, Any], Any]
    finished: Callable[[Any], Bool[Array, " B"]]
    result: Callable[[Any], Hypotheses]
    max_length: int


def run_search(
    search: Search, step_fn: StepFunction, state: Any, until: ArrayLike
) -> Any:
    """Advance to step `until`, or to where every row has finished or has no room."""
    last = jnp.minimum(until, search.max_length)

    def going_on(state: Any) -> Bool[Array, ""]:
        return (state.time < last) & ~jnp.all(search.finished(state))

    return jax.lax.while_loop(
        going_on, lambda state: search.advance(step_fn, state), state
    )


def decode(
    search: Search,
    step_fn: StepFunction,
    cache: PyTree,
    start: Int[Array, " B"],
    keys: Any = None,
) -> Hypotheses:
    """Run a search from its beginning to its result."""
    state = search.begin(cache, start.astype(jnp.int32), keys)
    return search.result(run_search(search, step_fn, state, search.max_length))


def take_rows(tree: PyTree, rows: Int[Array, " R"], count: int) -> PyTree:
    """Gather rows of every leaf.

    Args:
        tree: leaves `[count * n, ...]`, n of them to a row and adjacent; those without
            an axis stay as they are.
        rows: which rows to take, in this order.
        count: rows that the tree has.
    """

    def take(leaf: Array) -> Array:
        if not leaf.ndim:
            return leaf
        each, shape = leaf.shape[0] // max(count, 1), leaf.shape[1:]
        taken = leaf.reshape(count, each, *shape)[rows]
        return taken.reshape(len(rows) * each, *shape)

    return jax.tree.map(take, tree)


def is_integer(value: Any) -> bool:
    """Tell whether something counts, as 2.0 does not."""
    return hasattr(value, "__index__")


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless something is counted, and more than nothing."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an integer from 1 on, not {value}")


def check_beam(beam_size: int, num_return: int) -> None:
    """Raise ValueError unless so many can be returned of so many."""
    check_count("beam_size", beam_size)
    if not is_integer(num_return) or not 1 <= num_return <= beam_size:
        raise ValueError(
            f"num_return must be an integer between 1 and beam_size {beam_size}, not "
            f"{num_return}"
        )


def check_max_length(max_length: int) -> None:
    """Raise ValueError unless there is room for END."""
    if not is_integer(max_length) or max_length < 1:
        raise ValueError(
            f"max_length counts END: it must be an integer from 1 on, not {max_length}"
        )
