"""Batches of sources in, hypotheses out, for models that write all places at once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import (
    CanvasFunction,
    Hypotheses,
    best_lengths,
    ctc_beam_search,
    ctc_greedy,
    lengths_of_classes,
    mask_predict,
    overgenerate,
    parallel,
    rescored,
    sequence_log_probability,
)
from transformer_jax.executables import Executables
from transformer_jax.generation import unwritten_ids
from transformer_jax.models import Seq2Seq
from transformer_jax.parallel_models import Encoded, ParallelSeq2Seq
from transformer_jax.types import PyTree


class Rescorer:
    """An autoregressive model that chooses among the candidates of another one.

    Args:
        model: from `build_model`.
        variables: its parameters, and what it keeps besides, on every device.
        vocabulary: the target's, the same as the other model's.
    """

    def __init__(self, model: Seq2Seq, variables: PyTree, vocabulary: Any) -> None:
        self._model, self.variables, self._vocabulary = model, variables, vocabulary

    def __call__(
        self,
        variables: PyTree,
        source: jax.Array,
        lengths: jax.Array,
        found: Hypotheses,
    ) -> Hypotheses:
        """Return hypotheses of sources `[B, S]` by log p(y), END included."""
        rows, count, size = found.tokens.shape
        tokens = found.tokens.reshape(rows * count, size)
        start = jnp.full((len(tokens), 1), self._vocabulary.bos_id, jnp.int32)
        inputs = jnp.concatenate([start, tokens], axis=1)
        memory = self._model.apply(variables, source, lengths, method="encode")
        memory, lengths = (jnp.repeat(x, count, axis=0) for x in (memory, lengths))
        logits = self._model.apply(variables, memory, lengths, inputs, method="predict")
        scores = sequence_log_probability(
            logits.at[..., np.array(unwritten_ids(self._vocabulary))].set(-jnp.inf),
            tokens,
            found.lengths.reshape(-1),
            end_id=self._vocabulary.end_id,
        )
        scores = scores.reshape(rows, count)
        return rescored(found, scores, pad_id=self._vocabulary.pad_id)


class ParallelGenerator:
    """Decodes padded batches with one set of variables, all places at once.

    Attributes:
        variables: its variables.
        executables: what it has compiled.
        rescorer: chooses among the candidates, or None.
    """

    def __init__(
        self,
        model: ParallelSeq2Seq,
        variables: PyTree,
        config: DecodeConfig,
        vocabulary: Any,
        mesh: jax.sharding.Mesh,
        *,
        nbest: int = 1,
        forbidden: Sequence[int] = (),
        rescorer: Rescorer | None = None,
        canvas_lengths: Sequence[int] = (),
    ) -> None:
        """Prepare to decode.

        Args:
            model: from `build_model`.
            variables: its parameters, and what it keeps besides, on every device of
                the mesh.
            config: how to decode.
            vocabulary: the target's.
            mesh: rows are spread over its axis `data`.
            nbest: hypotheses a source.
            forbidden: ids that no output may hold.
            rescorer: chooses among the candidates.
            canvas_lengths: rising sizes of canvases, so that few are compiled; the
                longest is `decode.max_length` in any case.
        """
        self._model, self.variables = model, variables
        self._config, self._vocabulary = config, vocabulary
        self._nbest, self.rescorer = nbest, rescorer
        ids = unwritten_ids(vocabulary)
        if config.strategy != "overgenerate":
            ids.append(vocabulary.end_id)
        self._forbidden = np.array([*ids, *forbidden], np.int32)
        limit = config.max_length
        shorter = [length for length in canvas_lengths if length < limit]
        self._sizes = (*shorter, limit)
        self.executables = Executables(mesh)

    def rows(self, wanted: int) -> int:
        """Return the rows of the smallest batch for `wanted`, or of the largest."""
        return self.executables.rows(wanted, self._config.rows)

    def __call__(
        self, source: np.ndarray, lengths: np.ndarray, numbers: np.ndarray
    ) -> Hypotheses:
        """Decode a batch; return NumPy arrays `[B, n, ...]`, best first.

        Args:
            source: int32 `[B, S]`, B from `rows`.
            lengths: int32 `[B]`, at least 1.
            numbers: not used: nothing is drawn.
        """
        del numbers
        batch = self.executables.put(source, lengths)
        call = self.executables.call
        if self._model.length_from:
            encoded, sizes, scores = call(self._measure, self.variables, *batch)
            widest = int(np.asarray(sizes).max())
            size = next(size for size in self._sizes if size >= widest)
            found = call(self._write, self.variables, encoded, sizes, scores, size=size)
        else:
            found = call(self._fill, self.variables, *batch)
        if self.rescorer is not None:
            found = call(self.rescorer, self.rescorer.variables, *batch, found)
        return Hypotheses(*(np.asarray(field)[:, : self._nbest] for field in found))

    def decode(
        self, variables: PyTree, source: jax.Array, lengths: jax.Array, *, size: int
    ) -> Hypotheses:
        """Return all candidates of sources `[B, S]`, as one pure function.

        Where lengths are predicted, the canvas has `size` places, and no candidate is
        longer; the call itself looks at the lengths first, and takes a canvas for them.
        """
        if not self._model.length_from:
            return self._fill(variables, source, lengths)
        measured = self._measure(variables, source, lengths)
        return self._write(variables, *measured, size=size)

    def _measure(
        self, variables: PyTree, source: jax.Array, lengths: jax.Array
    ) -> tuple[Encoded, jax.Array, jax.Array]:
        """Read the sources; return candidates' lengths `[B, m]` and their scores."""
        config, model = self._config, self._model
        encoded = model.apply(variables, source, lengths, method="encode")
        told = lengths_of_classes(
            lengths, classes=model.length_classes, offset=model.length_offset
        )
        shortest = max(config.min_length, config.strategy == "mask_predict")
        found = best_lengths(
            encoded.length_logits,
            told,
            config.length_beam,
            shortest=shortest,
            longest=config.max_length,
        )
        return encoded, *found

    def _write(
        self,
        variables: PyTree,
        encoded: Encoded,
        lengths: jax.Array,
        scores: jax.Array,
        *,
        size: int,
    ) -> Hypotheses:
        """Fill canvases of `size` places."""
        canvas = {
            "max_length": size,
            "mask_id": self._model.mask_id,
            "pad_id": self._vocabulary.pad_id,
        }
        predict = self._canvas_function(variables, encoded, lengths.shape[1])
        if self._config.strategy == "mask_predict":
            return mask_predict(predict, lengths, passes=self._config.passes, **canvas)
        return parallel(predict, lengths, scores, **canvas)

    def _fill(
        self, variables: PyTree, source: jax.Array, lengths: jax.Array
    ) -> Hypotheses:
        """Fill canvases whose size follows the sources'."""
        model, config = self._model, self._config
        encoded = model.apply(variables, source, lengths, method="encode")
        size = model.slots(source.shape[1])
        slots = model.slots(lengths)
        empty = jnp.full((len(source), size), model.mask_id, jnp.int32)
        logits = self._canvas_function(variables, encoded, 1)(empty, slots)
        ids = {"pad_id": self._vocabulary.pad_id}
        if config.strategy == "overgenerate":
            ids["end_id"] = end = self._vocabulary.end_id
            logits = logits.at[:, : config.min_length, end].set(-jnp.inf)
            logits = logits[:, : config.max_length]
            slots = jnp.minimum(slots, config.max_length)
            return overgenerate(logits, slots, num_return=config.length_beam, **ids)
        ids |= {"blank_id": model.blank_id, "max_length": config.max_length}
        if config.strategy == "ctc_greedy":
            return ctc_greedy(logits, slots, **ids)
        beam = {"beam_size": config.beam_size, "num_return": config.beam_size}
        return ctc_beam_search(logits, slots, **beam, **ids)

    def _canvas_function(
        self, variables: PyTree, encoded: Encoded, candidates: int
    ) -> CanvasFunction:
        """The model under the configuration's constraints, for so many a source."""
        if candidates > 1:
            encoded = jax.tree.map(
                lambda leaf: jnp.repeat(leaf, candidates, axis=0), encoded
            )

        def predict(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            logits = self._model.apply(
                variables, encoded, tokens, lengths, method="predict"
            )
            return logits.at[..., self._forbidden].set(-jnp.inf)

        return predict
