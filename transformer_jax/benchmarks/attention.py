"""Attention kernels on one pattern: time, FLOPs and temporary memory, side by side.

Ours in tiles and ours dense, `jax.nn` with its window or a mask, and PyTorch's scaled
dot product and FlexAttention on the same mask; every system in turn. FLOPs are counted
in the program's products, bytes are what XLA's compiler plans.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention import cudnn, dot_product_attention
from transformer_jax.benchmarks import torch_attention
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
from transformer_jax.patterns import Pattern, parse_layers
from transformer_jax.patterns.base import check_head_count

COLUMNS = (
    *("pass", "system", "p50_ms", "p95_ms", "gflop", "temp_mb", "speedup", "error"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bench attention` measures."""

    SYSTEMS: ClassVar = ("jax", "jax-dense", "jax-nn", "torch-sdpa", "torch-flex")

    patterns: str = setting("causal() & local(128)", 'Patterns, separated by ";".')
    lengths: tuple[int, ...] = setting((4096, 16384), "Positions, T = S.")
    batch: int = setting(1, "Rows, B.")
    heads: int = setting(8, "Query heads, N.")
    kv_heads: int = setting(0, "Key/value heads, K; 0: as many as heads.", low=0)
    width: int = setting(64, "Head width, H.")
    dtype: str = setting("float32", "Of the arrays.", choices=("float32", "bfloat16"))
    block: int = setting(0, "Positions of a tile of ours; 0 chooses.", low=0)
    passes: tuple[str, ...] = setting(
        PASSES, "forward, or backward too.", choices=PASSES
    )
    systems: tuple[str, ...] = setting(SYSTEMS, "Who is measured.", choices=SYSTEMS)
    gigabytes: float = setting(8.0, "Leave out what would need more memory.", low=0)
    rounds: int = setting(5, "Rounds; in each, every system is measured in turn.")
    seconds: float = setting(1.0, "A turn repeats its call for this long.", low=0)
    pause: float = setting(0.3, "Seconds of rest before each turn.", low=0)
    seed: int = setting(0, "Seed of the arrays.", low=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--heads={self.heads} is no multiple of --kv_heads={self.kv_heads}"
            )
        self.parsed()

    def parsed(self) -> tuple[Pattern, ...]:
        """Return the patterns.

        Raises:
            ConfigError: one does not parse.
        """
        try:
            patterns = parse_layers(self.patterns)
            for pattern in patterns:
                check_head_count(pattern, self.heads)
        except ValueError as error:
            raise ConfigError(f"--patterns: {error}") from None
        return patterns


@dataclasses.dataclass(frozen=True)
class Case:
    """One pattern and length."""

    settings: Settings
    pattern: Pattern
    length: int

    @functools.cached_property
    def arrays(self) -> list[np.ndarray]:
        """Query, key, value and the output's cotangent, `[B, T, N or K, H]`."""
        rng = np.random.default_rng(self.settings.seed)
        heads = (self.settings.heads, *(self.settings.kv_heads,) * 2)
        shape = self.settings.batch, self.length
        return [
            rng.normal(size=(*shape, n, self.settings.width)).astype(np.float32)
            for n in (*heads, heads[0])
        ]

    def gigabytes(self) -> float:
        """Return about what dense scores and their mask take, forward and backward."""
        # Three arrays of 4 bytes.
        return 3 * 4e-9 * self.settings.batch * self.settings.heads * self.length**2


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything; return all numbers."""
    about, results = machine(), []
    for pattern in settings.parsed():
        for length in settings.lengths:
            density = pattern.density(length, length)
            say(f"{pattern}, {length} positions, {density:.2%} of the edges")
            say_row(COLUMNS)
            case = Case(settings, pattern, length)
            for name in settings.passes:
                results.extend(_measure(case, name))
    return {
        "benchmark": "attention",
        "machine": about,
        "settings": dataclasses.asdict(settings),
        "results": results,
    }


def _measure(case: Case, name: str) -> Iterator[dict[str, Any]]:
    """One row a system."""
    settings, prepared = case.settings, {}
    for system in settings.systems:
        try:
            prepared[system] = _prepare(case, system, name)
            prepared[system].call()
        except Exception as error:  # Compilers and what they wrap: whatever it is.
            prepared.pop(system, None)
            text = str(error).strip().partition("\n")[0]
            say(f"missing: {system}: {text or type(error).__name__}")
    measured = measure(prepared, settings, tokens=settings.batch * case.length)
    wanted = None
    for system, each in prepared.items():
        output = each.output(each.call())
        wanted = output if wanted is None else wanted
        row = {
            "pattern": str(case.pattern),
            "length": case.length,
            "pass": name,
            "system": system,
            **measured[system].summary(),
            **each.facts,
            "error": float(f"{np.abs(output - wanted).max():.1e}"),
            "speedup": speedup(measured, system),
        }
        say_row(COLUMNS, row)
        yield row


def _prepare(case: Case, system: str, name: str) -> Prepared:
    dense = system in ("jax-dense", "torch-sdpa") or (
        system == "jax-nn"
        and (jax.default_backend() != "gpu" or cudnn.window_of(case.pattern) is None)
    )
    if dense and case.gigabytes() > case.settings.gigabytes:
        raise MemoryError(f"would need {case.gigabytes():.0f} GB (--gigabytes)")
    if system.startswith("torch"):
        return Prepared(*torch_attention.prepare(case, system, name), {})
    arrays = [jnp.asarray(x, case.settings.dtype) for x in case.arrays]
    return compiled(ON_JAX[system](case), arrays[:3], arrays[3], name)


def _tiled(case: Case) -> Callable[..., jax.Array]:
    settings = case.settings
    return functools.partial(
        dot_product_attention,
        pattern=case.pattern,
        block_size=settings.block or None,
        implementation=None if jax.default_backend() == "tpu" else "xla",
    )


def _dense(case: Case) -> Callable[..., jax.Array]:
    return functools.partial(
        dot_product_attention, pattern=case.pattern, implementation="reference"
    )


def _jax_nn(case: Case) -> Callable[..., jax.Array]:
    """`jax.nn`: a window, by cuDNN on a GPU, if the pattern is one; else a mask."""
    backend = "cudnn" if jax.default_backend() == "gpu" else "xla"
    found = cudnn.window_of(case.pattern)
    if found is None:
        edges = jnp.asarray(case.pattern.dense(case.length, case.length))
        mask = edges.reshape(1, -1, case.length, case.length)
        return functools.partial(jax.nn.dot_product_attention, mask=mask)
    is_causal, window = found
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=is_causal,
        local_window_size=window,
        implementation=backend,
    )


ON_JAX = {"jax": _tiled, "jax-dense": _dense, "jax-nn": _jax_nn}
