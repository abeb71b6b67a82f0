"""Decoding speed, beside `transformers` and CTranslate2 with the same weights.

Ours are autoregressive, with softmax or with linear attention in the decoder
(`jax-linear`), and those that write all places at once (`jax-ctc`, ...); for these a
beam is several lengths, ends, or prefixes. Every system decodes the same sources in
turn (`timing.interleaved`). Lengths are fixed (END forbidden: all write `target_length`
tokens) or natural: END comes where weights that are fitted for it say, at about three
quarters of the source's length; those whose outputs are others have fixed ones alone.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from transformer_jax.benchmarks import peers, timing
from transformer_jax.benchmarks.canvas import CANVAS_SYSTEMS, CanvasDecoder
from transformer_jax.benchmarks.lengths import fit_end
from transformer_jax.benchmarks.marian import make_marian
from transformer_jax.benchmarks.ours import KIND_SYSTEMS, JaxDecoder
from transformer_jax.benchmarks.report import machine, say, say_row
from transformer_jax.benchmarks.shape import (
    Shape,
    draw_params,
    draw_sources,
    parse_depth,
    setting,
)
from transformer_jax.benchmarks.timing import Decoding
from transformer_jax.config import ModelConfig
from transformer_jax.models import build_model
from transformer_jax.run_directory import one_line
from transformer_jax.training import count_parameters

LENGTHS = ("fixed", "natural")
# Ours that have the weights of `jax`, but not its outputs.
OTHERS = (*KIND_SYSTEMS, *CANVAS_SYSTEMS)
COLUMNS = (
    *("lengths", "strategy", "batch", "depth", "system", "p50_ms", "p95_ms"),
    *("tokens_per_second", "mean_length", "same_outputs", "speedup"),
)
# A larger batch must raise the throughput by this factor to be worth a larger one yet.
WORTH = 1.02
# Natural lengths, as a share of the source's.
SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Settings(Shape):
    """What `bench decode` measures."""

    SYSTEMS: ClassVar = (
        *("jax", "transformers", "ctranslate2", "ctranslate2-int8"),
        *OTHERS,
    )

    depths: tuple[str, ...] = setting(("6-6", "12-1"), "Encoder-decoder layers.")
    batches: tuple[int, ...] = setting((1, 8, 32), "Batch sizes.")
    largest: tuple[int, ...] = setting(
        (64, 128, 256), "Batches to try, rising, for the largest that pays."
    )
    beam: int = setting(4, "Beam size, beside greedy.", low=2)
    lengths: tuple[str, ...] = setting(
        LENGTHS, "fixed, natural or both.", choices=LENGTHS
    )
    systems: tuple[str, ...] = setting(SYSTEMS, "Who is measured.", choices=SYSTEMS)
    passes: int = setting(10, "Passes of jax-mask_predict.")
    seconds: float = setting(1.0, "A turn repeats its call for this long.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for depth in self.depths:
            parse_depth(depth)


class Case(NamedTuple):
    """What is measured in one go, all systems and depths in turn."""

    lengths: str
    beam_size: int
    batch: int | None  # None: each system's own largest batch that pays.

    @property
    def strategy(self) -> str:
        """Its name in reports."""
        return "greedy" if self.beam_size == 1 else f"beam_{self.beam_size}"


Key = tuple[str, str]  # depth, system


class Bench:
    """All systems at all depths, and what they wrote."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ours: dict[str, JaxDecoder] = {}
        self._systems: dict[Key, Any] = {}
        self.parameters: dict[str, int] = {}
        self.missing = list(filter(None, map(peers.why_missing, settings.systems)))
        for line in self.missing:
            say(f"missing: {line}")
        self._names = [s for s in settings.systems if peers.why_missing(s) is None]
        for depth in settings.depths:
            self._load(depth)

    def _load(self, depth: str) -> None:
        shape = self._settings
        config = shape.model_config(*parse_depth(depth))
        params = draw_params(config, shape.symbols(), shape.seed)
        self.parameters[depth] = count_parameters(params)
        ours = JaxDecoder(config, params, shape.symbols(), shape.target_length)
        if "natural" in shape.lengths:
            self._fit_lengths(ours, config)
        self._ours[depth] = ours
        model = None
        for name in self._names:
            if peers.PACKAGES[name] and model is None:
                model = self._marian(config, ours)
            self._systems[depth, name] = self._system(name, config, ours, model)

    def _fit_lengths(self, ours: JaxDecoder, config: ModelConfig) -> None:
        """Make outputs end, on sources that are not measured."""
        shape = self._settings
        sources = draw_sources(shape, max(shape.batches), shape.rounds, varied=True)
        decoding = ours.prepare(sources, 1, natural=False)
        ours.params, ours.end_bias = fit_end(
            build_model(config),
            ours.params,
            shape.symbols(),
            sources,
            np.array(decoding.outputs(decoding.call())),
            SHARE * sources.lengths * shape.target_length / shape.source_length,
        )

    def _marian(self, config: ModelConfig, ours: JaxDecoder) -> Any:
        shape, symbols = self._settings, self._settings.symbols()
        return make_marian(
            config,
            ours.params,
            symbols,
            max_length=max(shape.source_length, shape.target_length) + 1,
            end_bias=ours.end_bias,
            never=(symbols.pad_id, symbols.unk_id),
        )

    def _system(
        self, name: str, config: ModelConfig, ours: JaxDecoder, model: Any
    ) -> Any:
        settings, symbols = self._settings, self._settings.symbols()
        length = settings.target_length
        if name == "jax":
            return ours
        if name in KIND_SYSTEMS:
            kind = KIND_SYSTEMS[name]
            config = dataclasses.replace(config, decoder_attention=kind)
            return JaxDecoder(config, ours.params, symbols, length)
        if name in CANVAS_SYSTEMS:
            return CanvasDecoder(name, config, ours.params, settings, settings.passes)
        if name == "transformers":
            return peers.TransformersDecoder(model, symbols, length)
        kind = "int8" if name.endswith("int8") else "float32"
        return peers.CTranslate2Decoder(model, length, kind)

    def prepare(self, key: Key, case: Case, batch: int, number: int) -> Decoding:
        """Return the call of one system in one round."""
        natural = case.lengths == "natural"
        sources = draw_sources(self._settings, batch, number, varied=natural)
        return self._systems[key].prepare(sources, case.beam_size, natural)

    def cases(self) -> Iterator[Case]:
        """Everything that is measured, in order."""
        settings = self._settings
        for lengths in settings.lengths:
            for beam_size in (1, settings.beam):
                for batch in (*settings.batches, None):
                    yield Case(lengths, beam_size, batch)

    def _written(self, name: str, output: list[int]) -> int:
        """Tokens that were decoded for an output, END counted where it came.

        A canvas has `target_length`, whatever CTC merges.
        """
        length = self._settings.target_length
        return length if name in CANVAS_SYSTEMS else min(len(output) + 1, length)

    def largest_batch(self, key: Key, case: Case) -> int:
        """Climb while a larger batch raises the throughput and fits in memory."""
        best, best_rate = max(self._settings.batches), 0.0
        for batch in self._settings.largest:
            try:
                decoding = self.prepare(key, case, batch, 0)
                decoding.call()
                start = time.perf_counter()
                result = decoding.call()
                seconds = time.perf_counter() - start
            except (MemoryError, RuntimeError) as error:
                say(f"batch {batch} of {' '.join(key)}: {one_line(error)}")
                break
            outputs = decoding.outputs(result)
            rate = sum(self._written(key[1], row) for row in outputs) / seconds
            if rate < WORTH * best_rate:
                break
            best, best_rate = batch, rate
        return best

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """Measure one case; return one result a system and depth."""
        systems = [
            key
            for key in self._systems
            if case.lengths == "fixed" or key[1] not in OTHERS
        ]
        batches = {key: case.batch or self.largest_batch(key, case) for key in systems}
        outputs: dict[Key, list] = {key: [] for key in systems}

        def job(key: Key, number: int) -> timing.Job:
            decoding = self.prepare(key, case, batches[key], number)

            def count(result: Any) -> int:
                outputs[key].append(decoding.outputs(result))
                return sum(self._written(key[1], row) for row in outputs[key][-1])

            return timing.Job(decoding.call, count)

        for key in systems:
            job(key, 0).call()  # Compiles, and fills caches.
        measured = timing.interleaved(
            {key: functools.partial(job, key) for key in systems},
            rounds=self._settings.rounds,
            seconds=self._settings.seconds,
            pause=self._settings.pause,
        )
        return [
            self._result(key, case, batches[key], measured, outputs) for key in systems
        ]

    def _result(
        self, key: Key, case: Case, batch: int, measured: dict, outputs: dict
    ) -> dict[str, Any]:
        depth, name = key
        lengths = [self._written(name, row) for rows in outputs[key] for row in rows]
        result = {
            "lengths": case.lengths,
            "strategy": case.strategy,
            "batch": batch,
            "largest": case.batch is None,
            "depth": depth,
            "system": name,
            "parameters": self.parameters[depth],
            **measured[key].summary(),
            "mean_length": round(float(np.mean(lengths)), 2),
        }
        ours = (depth, "jax")
        if name != "jax" and ours in measured:
            if name not in OTHERS:
                result["same_outputs"] = _same(outputs[key], outputs[ours])
            result["speedup"] = timing.ratio(measured[ours], measured[key])
        return result

    def compilations(self) -> dict[str, Any]:
        """Return how often ours was compiled, and for how long in all."""
        seconds = [
            s
            for (_, name), system in self._systems.items()
            if not peers.PACKAGES[name]
            for s in system.compile_seconds
        ]
        return {"count": len(seconds), "seconds": round(sum(seconds), 2)}


def _same(theirs: list, ours: list) -> float:
    """Return the share of rows that both wrote which are equal."""
    rounds = zip(theirs, ours, strict=True)
    pairs = [pair for both in rounds for pair in zip(*both, strict=False)]
    return round(float(np.mean([a == b for a, b in pairs])), 3)


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything; return all numbers."""
    about = machine()
    bench = Bench(settings)
    results = []
    say_row(COLUMNS)
    for case in bench.cases():
        for result in bench.measure(case):
            say_row(COLUMNS, result)
            results.append(result)
    return {
        "benchmark": "decode",
        "machine": about,
        "settings": dataclasses.asdict(settings),
        "missing": bench.missing,
        "compilations": bench.compilations(),
        "results": results,
    }
