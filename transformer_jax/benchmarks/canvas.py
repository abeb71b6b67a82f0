"""Our models that write all places at once, with the weights of the others."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from transformer_jax.benchmarks.ours import best_rows
from transformer_jax.benchmarks.shape import Shape, Sources
from transformer_jax.benchmarks.timing import Decoding
from transformer_jax.config import DecodeConfig, ModelConfig, ParallelConfig
from transformer_jax.decoding import Hypotheses
from transformer_jax.models import build_model, init_variables
from transformer_jax.parallel_generation import ParallelGenerator
from transformer_jax.sharding import make_mesh
from transformer_jax.types import PyTree

# System -> objective, and strategies: of one candidate, and of several.
CANVAS_SYSTEMS = {
    "jax-parallel": ("parallel", ("parallel", "parallel")),
    "jax-overgenerate": ("overgenerate", ("overgenerate", "overgenerate")),
    "jax-mask_predict": ("mask_predict", ("mask_predict", "mask_predict")),
    "jax-ctc": ("ctc", ("ctc_greedy", "ctc_beam_search")),
}
# Slots of CTC for each symbol of the source.
UPSAMPLE = 2


class CanvasDecoder:
    """Ours, one compiled program a shape and a beam, on `target_length` symbols.

    The weights are those of the autoregressive model; what only these models have is
    drawn by chance. CTC's outputs are as long as its slots say.
    """

    def __init__(
        self,
        system: str,
        config: ModelConfig,
        params: PyTree,
        shape: Shape,
        passes: int,
    ) -> None:
        objective, self._strategies = CANVAS_SYSTEMS[system]
        upsample = UPSAMPLE if objective == "ctc" else 1
        length = shape.target_length
        config = dataclasses.replace(
            config,
            upsample=upsample,
            extra_slots=max(0, length - upsample * shape.source_length),
            length_classes=2 * max(length, shape.source_length),
        )
        self.model = build_model(config, objective)
        self._shape, self._passes, self._upsample = shape, passes, upsample
        self.params = _joined(self.model, params, shape.seed)
        self._compiled: dict[tuple, Any] = {}
        self.compile_seconds: list[float] = []

    def prepare(self, sources: Sources, beam_size: int, natural: bool) -> Decoding:
        """Return the call that decodes these sources; lengths are always fixed."""
        del natural
        arguments = jax.device_put(({"params": self.params}, *sources))
        shape = beam_size, arguments[1].shape
        if shape not in self._compiled:
            start = time.perf_counter()
            decode = jax.jit(self._decode(beam_size))
            self._compiled[shape] = decode.lower(*arguments).compile()
            self.compile_seconds.append(time.perf_counter() - start)
        compiled = self._compiled[shape]
        return Decoding(lambda: jax.block_until_ready(compiled(*arguments)), best_rows)

    def _decode(self, beam_size: int) -> Callable[..., Hypotheses]:
        length, several = self._shape.target_length, beam_size > 1
        strategy = self._strategies[several]
        config = DecodeConfig(
            strategy=strategy,
            beam_size=beam_size,
            length_beam=beam_size,
            passes=self._passes,
            min_length=0 if "ctc" in strategy else length,
            max_length=self._upsample * length,
        )
        mesh = make_mesh(ParallelConfig(data=1))
        generator = ParallelGenerator(
            self.model, {"params": self.params}, config, self._shape.symbols(), mesh
        )
        return functools.partial(generator.decode, size=length)


def _joined(model: nn.Module, params: PyTree, seed: int) -> PyTree:
    """The given parameters where they are, with rows for symbols that they lack."""

    def draw() -> PyTree:
        return nn.unbox(init_variables(model, jax.random.key(seed))["params"])

    def join(drawn: PyTree, given: PyTree) -> PyTree:
        if not isinstance(drawn, dict):
            return drawn.at[: len(given)].set(given) if drawn.ndim else given
        return {
            name: join(part, given[name]) if name in given else part
            for name, part in drawn.items()
        }

    return jax.jit(lambda given: join(draw(), given))(params)
