"""Attention as compiled programs: what is timed, and what is known of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.benchmarks import cost
from transformer_jax.benchmarks.timing import Job, Measured, interleaved, ratio

PASSES = ("forward", "backward")


class Prepared(NamedTuple):
    """A system's call for one pass, and what is known of its program.

    Attributes:
        call: returns what it computes.
        output: of that -> the output as NumPy.
        facts: FLOPs and bytes, where they are known.
    """

    call: Callable[[], Any]
    output: Callable[[Any], np.ndarray]
    facts: dict[str, Any]


def compiled(
    attend: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    cotangent: jax.Array,
    name: str,
) -> Prepared:
    """Compile a pass of attention: forward, or backward with all gradients."""
    if name == "forward":
        function, arguments = (lambda *x: (attend(*x),)), arrays
    else:

        def function(cotangent: jax.Array, *x: jax.Array) -> tuple[jax.Array, ...]:
            output, pullback = jax.vjp(attend, *x)
            return output, *pullback(cotangent)

        arguments = (cotangent, *arrays)
    program = jax.jit(function).lower(*arguments).compile()
    memory = program.memory_analysis()
    return Prepared(
        call=lambda: jax.block_until_ready(program(*arguments)),
        output=lambda result: np.asarray(result[0], np.float32),
        facts={
            "gflop": float(f"{cost.matmul_flops(function, *arguments) / 1e9:.4g}"),
            "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
        },
    )


def measure(
    prepared: Mapping[str, Prepared], settings: Any, *, tokens: int
) -> dict[str, Measured]:
    """Time the calls in turn, `settings` saying how long; each computes `tokens`."""

    def job(each: Prepared) -> Callable[[int], Job]:
        return lambda number: Job(each.call, lambda _: tokens)

    return interleaved(
        {name: job(each) for name, each in prepared.items()},
        rounds=settings.rounds,
        seconds=settings.seconds,
        pause=settings.pause,
    )


def speedup(measured: Mapping[str, Measured], name: str) -> float | None:
    """Return how much faster the first one is."""
    return ratio(measured[next(iter(measured))], measured[name])
