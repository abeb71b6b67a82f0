"""Kinds of attention beside one another: time, FLOPs and temporary memory by length.

They compute different things, so nothing is compared but the cost. What a layer would
compute of its inputs, such as logits, is drawn.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention import Attention, PieceSizes, parse_layers
from transformer_jax.attention.kinds import taken
from transformer_jax.benchmarks.programs import (
    PASSES,
    Prepared,
    compiled,
    measure,
    speedup,
)
from transformer_jax.benchmarks.report import machine, say, say_row
from transformer_jax.benchmarks.shape import check_settings, setting
from transformer_jax.config import ConfigError

COLUMNS = ("length", "pass", "p50_ms", "p95_ms", "gflop", "temp_mb", "speedup", "kind")
KINDS = (
    "full(); local(128); linear(); favor(features=128); linformer(rank=128); "
    "compressed(); lsh(rounds=2, buckets=32); routing(clusters=32); sinkhorn(); "
    "synthesizer()"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bench kinds` measures."""

    kinds: str = setting(KINDS, 'Patterns and kinds of attention, separated by ";".')
    lengths: tuple[int, ...] = setting((1024, 4096, 16384), "Positions, T = S.")
    batch: int = setting(1, "Rows, B.")
    heads: int = setting(8, "Heads, N = K.")
    width: int = setting(64, "Head width, H.")
    causal: int = setting(0, "1: with causality, of the kinds that know it.", low=0)
    passes: tuple[str, ...] = setting(
        PASSES, "forward, or backward too.", choices=PASSES
    )
    gigabytes: float = setting(8.0, "Leave out what would need more memory.", low=0)
    rounds: int = setting(5, "Rounds; in each, every kind is measured in turn.")
    seconds: float = setting(1.0, "A turn repeats its call for this long.", low=0)
    pause: float = setting(0.3, "Seconds of rest before each turn.", low=0)
    seed: int = setting(0, "Seed of the arrays.", low=0)

    def __post_init__(self) -> None:
        check_settings(self)
        self.parsed()

    def parsed(self) -> tuple[Attention, ...]:
        """Return the kinds, with causality only those that know it.

        Raises:
            ConfigError: one does not parse, or none is left.
        """
        try:
            found = parse_layers(self.kinds)
        except ValueError as error:
            raise ConfigError(f"--kinds: {error}") from None
        if self.causal:
            found = tuple(x for x in found if "causal" in x.row.capabilities)
        if not found:
            raise ConfigError(f"--kinds={self.kinds} has no kind that knows causality")
        return found


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything; return all numbers."""
    about, results = machine(), []
    say_row(COLUMNS)
    for length in settings.lengths:
        for name in settings.passes:
            results.extend(_measure(settings, length, name))
    return {
        "benchmark": "kinds",
        "machine": about,
        "settings": dataclasses.asdict(settings),
        "results": results,
    }


def _measure(settings: Settings, length: int, name: str) -> Iterator[dict[str, Any]]:
    """One row a kind."""
    prepared = {}
    for kind in settings.parsed():
        try:
            prepared[str(kind)] = _prepare(settings, kind, length, name)
        except MemoryError as error:
            say(f"missing: {kind} at {length} positions: {error}")
    if not prepared:
        return
    measured = measure(prepared, settings, tokens=settings.batch * length)
    for text, each in prepared.items():
        row = {
            "kind": text,
            "length": length,
            "pass": name,
            **measured[text].summary(),
            **each.facts,
            "speedup": speedup(measured, text),
        }
        say_row(COLUMNS, row)
        yield row


def _prepare(settings: Settings, kind: Attention, length: int, name: str) -> Prepared:
    """Compile a kind's kernel at a length.

    Raises:
        MemoryError: it would take more than may be.
    """
    pairs = settings.batch * settings.heads * length**2
    # Scores of all pairs, forward and backward: three arrays of 4 bytes.
    quadratic = kind.kind == "synthesizer" or str(kind) == "full()"
    if quadratic and 12e-9 * pairs > settings.gigabytes:
        raise MemoryError(f"would need {12e-9 * pairs:.0f} GB (--gigabytes)")
    arrays = _arrays(settings, kind, length)
    return compiled(_kernel(settings, kind), arrays[:-1], arrays[-1], name)


def _kernel(settings: Settings, kind: Attention) -> Any:
    """The kernel as a function of arrays alone, which returns the output alone."""
    options = dict(kind.options)
    if kind.pattern is not None:
        options["pattern"] = kind.pattern
    if settings.causal:
        options["is_causal"] = True
    kernel = functools.partial(kind.row.kernel, **taken(kind.row.kernel, options))

    def attend(*arrays: jax.Array) -> jax.Array:
        output = kernel(*arrays)
        return output[0] if isinstance(output, tuple) else output

    return attend


def _arrays(settings: Settings, kind: Attention, length: int) -> list[jax.Array]:
    """What the kernel takes, and the cotangent of its output."""
    heads, width = settings.heads, settings.width
    shape = settings.batch, length, heads, width
    rng = np.random.default_rng(settings.seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    arrays = [normal(*shape) for _ in kind.row.arrays]
    sizes = PieceSizes(heads, heads, width, length, kind.options)
    for number, piece in enumerate(kind.row.pieces):
        if piece.draw is None:
            arrays.append(normal(settings.batch, *piece.shape(sizes)))
        else:
            key = jax.random.key(number)
            arrays.append(piece.draw(key, piece.shape(sizes), jnp.float32))
    return [*arrays, normal(*shape)]
