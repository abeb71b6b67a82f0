"""Our own systems, as the benchmarks call them: compiled once a shape."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.benchmarks import cost
from transformer_jax.benchmarks.shape import Sources, Symbols
from transformer_jax.benchmarks.timing import Decoding
from transformer_jax.config import ModelConfig, ParallelConfig, TrainConfig
from transformer_jax.data import Bucket
from transformer_jax.decoding import Hypotheses, beam_search, greedy
from transformer_jax.generation import make_step_fn
from transformer_jax.models import build_model
from transformer_jax.objectives import training_loss
from transformer_jax.optimizers import make_optimizer
from transformer_jax.sharding import batch_sharding, make_mesh, replicated
from transformer_jax.training import (
    abstract_state,
    compile_train_steps,
    init_state,
    make_train_step,
)
from transformer_jax.types import Batch, PyTree

# System -> its decoder's self-attention, where that has the weights of softmax.
KIND_SYSTEMS = {"jax-linear": "linear()"}


class JaxDecoder:
    """Ours: one compiled program a shape and a beam; it counts and times compiling."""

    def __init__(
        self, config: ModelConfig, params: PyTree, symbols: Symbols, max_length: int
    ) -> None:
        self._model = build_model(config)
        self._symbols, self._max_length = symbols, max_length
        self._compiled: dict[tuple, Any] = {}
        self.params, self.end_bias = params, 0.0
        self.compile_seconds: list[float] = []

    def prepare(self, sources: Sources, beam_size: int, natural: bool) -> Decoding:
        """Return the call that decodes these sources."""
        bias = jnp.float32(self.end_bias if natural else -jnp.inf)
        arguments = jax.device_put((self.params, *sources, bias))
        compiled = self._program(beam_size, arguments)
        return Decoding(lambda: jax.block_until_ready(compiled(*arguments)), best_rows)

    def _program(self, beam_size: int, arguments: tuple) -> Any:
        shape = (beam_size, arguments[1].shape)
        if shape not in self._compiled:
            start = time.perf_counter()
            generate = functools.partial(self._generate, beam_size)
            self._compiled[shape] = jax.jit(generate).lower(*arguments).compile()
            self.compile_seconds.append(time.perf_counter() - start)
        return self._compiled[shape]

    def _generate(
        self,
        beam_size: int,
        params: PyTree,
        source: jax.Array,
        lengths: jax.Array,
        end_bias: jax.Array,
    ) -> Hypotheses:
        symbols, rows = self._symbols, source.shape[0]
        variables = {"params": params}
        memory = self._model.apply(variables, source, lengths, method="read")
        step_fn = make_step_fn(self._model, variables, memory, symbols)

        def biased_step(tokens: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
            logits, cache = step_fn(tokens, cache)
            return logits.at[:, symbols.end_id].add(end_bias), cache

        strategy = greedy
        if beam_size > 1:
            strategy = functools.partial(
                beam_search,
                beam_size=beam_size,
                num_return=1,
                penalty="average",
                alpha=1.0,
            )
        return strategy(
            biased_step,
            self._model.init_cache(rows, self._max_length),
            jnp.full(rows, symbols.bos_id, jnp.int32),
            max_length=self._max_length,
            end_id=symbols.end_id,
            pad_id=symbols.pad_id,
        )


def best_rows(found: Hypotheses) -> list[list[int]]:
    """Return the tokens of each row's best hypothesis."""
    tokens, lengths = np.asarray(found.tokens), np.asarray(found.lengths)
    return [
        row[:length].tolist()
        for row, length in zip(tokens[:, 0], lengths[:, 0], strict=True)
    ]


class JaxTrainer:
    """Ours: the compiled step that `train` runs, on one device."""

    def __init__(
        self,
        config: ModelConfig,
        params: PyTree,
        symbols: Symbols,
        optimization: TrainConfig,
    ) -> None:
        model = build_model(config)

        self._mesh = make_mesh(ParallelConfig(data=1))
        optimizer = make_optimizer(optimization)
        abstract = abstract_state(model, optimizer, self._mesh)
        state = init_state(model, optimizer, abstract, optimization.seed)
        params = jax.device_put(params, replicated(self._mesh))
        self._state = state._replace(params=params)
        loss = training_loss(model, symbols, optimization)
        self._step = make_train_step(loss, optimizer)
        self.compile_seconds = 0.0

    def prepare(self, batch: Batch) -> Callable[[], float]:
        """Return the call that makes one update."""
        bucket = Bucket(batch.source.shape[1], batch.target.shape[1], len(batch.source))
        start = time.perf_counter()
        steps = compile_train_steps(self._step, self._state, [bucket], self._mesh)
        self.compile_seconds = round(time.perf_counter() - start, 2)
        batch = jax.device_put(batch, batch_sharding(self._mesh))

        def call() -> float:
            self._state, metrics = steps[bucket](self._state, batch)
            return float(metrics.loss / metrics.tokens)

        return call

    def flops(self, batch: Batch) -> int:
        """Return FLOPs of the matrix products of one update."""
        return cost.matmul_flops(self._step, self._state, batch)
