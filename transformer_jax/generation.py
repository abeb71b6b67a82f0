"""Batches of sources in, hypotheses out: the compiled side of decoding.

A batch is decoded in segments of a few steps. Between two of them finished rows leave
the batch where that pays, so a long output does not hold up the short ones.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import (
    PIECES,
    Hypotheses,
    Search,
    StepFunction,
    forbid,
    run_search,
    take_rows,
    with_min_length,
)
from transformer_jax.decoding.hypotheses import ranked
from transformer_jax.executables import Executables
from transformer_jax.models import Memory, Seq2Seq
from transformer_jax.types import PyTree

# Steps between two looks at what has finished.
SEGMENT = 4


def unwritten_ids(vocabulary: Any) -> list[int]:
    """Return PAD, BOS and UNK, which are no output of any strategy."""
    return [vocabulary.pad_id, vocabulary.bos_id, vocabulary.unk_id]


def make_step_fn(
    model: Seq2Seq, variables: PyTree, memory: Memory, vocabulary: Any
) -> StepFunction:
    """Return the step function that decodes sources which the model has read.

    PAD, BOS and UNK are no output: their logits are -inf.

    Args:
        model: from `build_model`.
        variables: its parameters, and what it keeps besides.
        memory: from the model's `read`.
        vocabulary: the target's.
    """

    def step_fn(tokens: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        return model.apply(variables, tokens, cache, memory, method="step")

    return forbid(step_fn, unwritten_ids(vocabulary))


def make_search(config: DecodeConfig, vocabulary: Any, nbest: int) -> Search:
    """Return the search that a configuration asks for."""
    settings: dict[str, Any] = {}
    if config.strategy == "sample":
        settings = {
            "temperature": config.temperature,
            "top_k": config.top_k or None,
            "top_p": config.top_p,
        }
    elif config.strategy == "beam_search":
        settings = {
            "beam_size": config.beam_size,
            "num_return": nbest,
            "penalty": config.penalty,
            "alpha": config.alpha,
        }
    return PIECES[config.strategy](
        max_length=config.max_length,
        end_id=vocabulary.end_id,
        pad_id=vocabulary.pad_id,
        **settings,
    )


class Generator:
    """Decodes padded batches with one set of variables.

    Attributes:
        variables: its variables.
        executables: what it has compiled.
    """

    def __init__(
        self,
        model: Seq2Seq,
        variables: PyTree,
        config: DecodeConfig,
        vocabulary: Any,
        mesh: jax.sharding.Mesh,
        *,
        nbest: int = 1,
        forbidden: Sequence[int] = (),
    ) -> None:
        """Prepare to decode.

        Args:
            model: from `build_model`.
            variables: its parameters, and what it keeps besides, on every device
                of the mesh.
            config: how to decode.
            vocabulary: the target's.
            mesh: rows are spread over its axis `data`.
            nbest: hypotheses a source.
            forbidden: ids that no output may hold.
        """
        self._model, self.variables = model, variables
        self.executables = Executables(mesh)
        self._config, self._vocabulary = config, vocabulary
        self._forbidden = forbidden
        self._search = make_search(config, vocabulary, nbest)
        # Samples of one source are rows of their own; those of a beam share one.
        self._draws = nbest if config.strategy == "sample" else 1
        # Seconds that a smaller shape would have saved so far.
        self._lost: Counter[tuple[int, int, int]] = Counter()

    def rows(self, wanted: int) -> int:
        """Return the rows of the smallest batch for `wanted`, or of the largest."""
        return self.executables.rows(wanted, self._config.rows)

    def __call__(
        self, source: np.ndarray, lengths: np.ndarray, numbers: np.ndarray
    ) -> Hypotheses:
        """Decode a batch; return NumPy arrays `[B, n, ...]`, best first.

        Args:
            source: int32 `[B, S]`, B from `rows`. A sample's batch has B n rows.
            lengths: int32 `[B]`, at least 1.
            numbers: int32 `[B]`, what a sample's draws depend on besides the seed.
        """
        batch = self.executables.put(source, lengths, numbers)
        memory, state = self._call(self._begin, *batch)
        places, found = np.arange(len(source)), None
        limit, length = self._config.max_length, source.shape[1]
        for until in range(SEGMENT, limit + SEGMENT, SEGMENT):
            # Less what compiling takes: a smaller batch would not save that.
            began = time.perf_counter() - self.executables.compile_seconds
            state, active, now = self._call(
                self._segment, memory, state, np.int32(until)
            )
            active = np.asarray(active)
            seconds = time.perf_counter() - self.executables.compile_seconds - began
            if until >= limit or not active.any():
                break
            before, after = len(active), self.rows(active.sum())
            if after == before:
                continue
            self._lost[before, after, length] += seconds * (1 - after / before)
            if self._pays(before, after, length):
                found = _placed(found, places, now)
                chosen = np.resize(np.flatnonzero(active), after)
                memory, state = self._call(self._take, memory, state, chosen)
                places = places[chosen]
        return _placed(found, places, now)

    def _pays(self, before: int, after: int, length: int) -> bool:
        """Tell whether batches of `before` rows should shrink to `after`.

        They do once the time lost by not doing so exceeds what compiling two programs
        takes: no more than twice the time of knowing beforehand is lost.
        """
        price = 2 * self.executables.compile_seconds / self.executables.compilations
        return self._lost[before, after, length] > price

    def _call(self, piece: Callable, *arguments: Any) -> Any:
        """Run a piece; a segment's state is donated."""
        donate = (2,) if piece == self._segment else ()
        return self.executables.call(piece, self.variables, *arguments, donate=donate)

    def _begin(
        self,
        variables: PyTree,
        source: jax.Array,
        lengths: jax.Array,
        numbers: jax.Array,
    ) -> tuple[Memory, Any]:
        """Read the sources and begin the search."""
        memory = self._model.apply(variables, source, lengths, method="read")
        rows = source.shape[0] * self._draws
        _, cache = self._constrained(variables, memory, rows)
        start = jnp.full(rows, self._vocabulary.bos_id, jnp.int32)
        keys = None
        if self._config.strategy == "sample":
            keys = self._keys(numbers)
        return memory, self._search.begin(cache, start, keys)

    def _segment(
        self, variables: PyTree, memory: Memory, state: Any, until: jax.Array
    ) -> tuple[Any, jax.Array, Hypotheses]:
        """Advance; return the state, which sources are active, and what is found."""
        rows = memory.lengths.shape[0]
        step_fn, _ = self._constrained(variables, memory, rows * self._draws)
        state = run_search(self._search, step_fn, state, until)
        finished = self._search.finished(state).reshape(rows, -1).all(axis=1)
        found = jax.tree.map(
            lambda leaf: leaf.reshape(rows, -1, *leaf.shape[2:]),
            self._search.result(state),
        )
        if self._draws > 1:  # They come in the order of their draws.
            found = ranked(found)
        return state, ~finished, found

    def _take(
        self, variables: PyTree, memory: Memory, state: Any, chosen: jax.Array
    ) -> tuple[Memory, Any]:
        """Keep some of the sources."""
        del variables
        return take_rows((memory, state), chosen, memory.lengths.shape[0])

    def _constrained(
        self, variables: PyTree, memory: Memory, rows: int
    ) -> tuple[StepFunction, PyTree]:
        """The model under the configuration's constraints: step function, first cache.

        Who needs one of them drops the other, which then is never computed.
        """
        step_fn = make_step_fn(self._model, variables, memory, self._vocabulary)
        cache = self._model.init_cache(rows, self._config.max_length)
        if self._forbidden:
            step_fn = forbid(step_fn, self._forbidden)
        if self._config.min_length:
            step_fn, cache = with_min_length(
                step_fn,
                cache,
                self._config.min_length,
                rows=rows,
                end_id=self._vocabulary.end_id,
            )
        return step_fn, cache

    def _keys(self, numbers: jax.Array) -> jax.Array:
        """One key for every draw `[B n]`, of the seed, the source and the draw."""
        seed = jax.random.key(self._config.seed)
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        draws = jnp.arange(self._draws)
        return jax.vmap(lambda key: fold(key, draws))(fold(seed, numbers)).reshape(-1)


def _placed(
    found: Hypotheses | None, places: np.ndarray, now: Hypotheses
) -> Hypotheses:
    """Write what is found now to its places in the batch of the beginning."""
    now = jax.device_get(now)
    if found is None:
        return Hypotheses(*(np.array(field) for field in now))
    for field, news in zip(found, now, strict=True):
        field[places] = news
    return found
