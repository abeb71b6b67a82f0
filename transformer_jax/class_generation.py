"""Batches of sources in, classes out."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.classifier import Classifier
from transformer_jax.config import DecodeConfig
from transformer_jax.decoding import Hypotheses, classify
from transformer_jax.executables import Executables
from transformer_jax.generation import unwritten_ids
from transformer_jax.types import PyTree


class ClassGenerator:
    """Classifies padded batches with one set of variables.

    Attributes:
        variables: its variables.
        executables: what it has compiled.
    """

    def __init__(
        self,
        model: Classifier,
        variables: PyTree,
        config: DecodeConfig,
        vocabulary: Any,
        mesh: jax.sharding.Mesh,
        *,
        nbest: int = 1,
        forbidden: Sequence[int] = (),
    ) -> None:
        """Prepare to classify.

        Args:
            model: from `build_model`.
            variables: its parameters, and what it keeps besides, on every device of the
                mesh.
            config: how many rows a batch has at most.
            vocabulary: the target's, whose symbols are the classes.
            mesh: rows are spread over its axis `data`.
            nbest: classes a source.
            forbidden: ids that are no class.
        """
        self._model, self.variables = model, variables
        self._config, self._vocabulary, self._nbest = config, vocabulary, nbest
        ids = [*unwritten_ids(vocabulary), vocabulary.end_id, *forbidden]
        self._forbidden = np.array(ids, np.int32)
        self.executables = Executables(mesh)

    def rows(self, wanted: int) -> int:
        """Return the rows of the smallest batch for `wanted`, or of the largest."""
        return self.executables.rows(wanted, self._config.rows)

    def __call__(
        self, source: np.ndarray, lengths: np.ndarray, numbers: np.ndarray
    ) -> Hypotheses:
        """Classify a batch; return NumPy arrays `[B, n, ...]`, best first.

        Args:
            source: int32 `[B, S]`, B from `rows`.
            lengths: int32 `[B]`, at least 1.
            numbers: not used: nothing is drawn.
        """
        del numbers
        batch = self.executables.put(source, lengths)
        found = self.executables.call(self._classify, self.variables, *batch)
        return Hypotheses(*map(np.asarray, found))

    def _classify(
        self, variables: PyTree, source: jax.Array, lengths: jax.Array
    ) -> Hypotheses:
        logits = self._model.apply(variables, source, lengths)
        logits = logits.at[:, self._forbidden].set(-np.inf)
        pad = self._vocabulary.pad_id
        return classify(logits, num_return=self._nbest, pad_id=pad)
