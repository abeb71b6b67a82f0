"""Decoding with a trained model: texts in, texts out, in order, none lost."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ConfigError, DecodeConfig
from transformer_jax.data import InvalidText
from transformer_jax.decoding import STRATEGIES, Hypotheses, Status
from transformer_jax.models import Seq2Seq
from transformer_jax.runs import Run
from transformer_jax.sharding import batch_sharding, make_mesh, replicated
from transformer_jax.training import abstract_params
from transformer_jax.types import PyTree

# Batches have few shapes: powers of two times this many rows, up to `decode.rows`.
FEWEST_ROWS = 8


class Output(NamedTuple):
    """What became of one text.

    Attributes:
        text: the best output; empty unless `status` is OK, TRUNCATED or UNFINISHED.
        status: how it came about.
        reason: what is wrong, for people; empty if nothing is.
        score: log-probability, END included.
    """

    text: str
    status: Status
    reason: str
    score: float


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model, ready to decode; make one with `load_model`."""

    run: Run
    step: int
    params: PyTree
    mesh: jax.sharding.Mesh

    @property
    def config(self) -> DecodeConfig:
        """How to decode."""
        return self.run.config.decode

    def decode(self, texts: Sequence[str]) -> list[Output]:
        """Return one output for each text, in order, decoded in batches of one length.

        Results do not depend on which texts are decoded together: rows of a batch do
        not see each other, and padding changes nothing.
        """
        outputs: list[Output | None] = [None] * len(texts)
        readable: dict[int, list[tuple[int, np.ndarray]]] = {}
        for number, text in enumerate(texts):
            try:
                ids = self._read(text)
            except InvalidText as error:
                outputs[number] = Output("", Status.INVALID, str(error), -np.inf)
            else:
                readable.setdefault(self._length(len(ids)), []).append((number, ids))
        for length, entries in sorted(readable.items()):
            for start in range(0, len(entries), self.config.rows):
                part = entries[start : start + self.config.rows]
                numbers, sources = zip(*part, strict=True)
                found = self._decode_batch(sources, length)
                for row, number in enumerate(numbers):
                    outputs[number] = self._written(found, row)
        return outputs

    def _read(self, text: str) -> np.ndarray:
        limit = self.config.max_source_length
        # Told apart before a tokenizer works through megabytes.
        if len(text) > 100 * limit:
            raise InvalidText(f"{len(text)} characters, too long to be read")
        ids = self.run.source_tokenizer.encode(text)
        if len(ids) > limit:
            raise InvalidText(
                f"{len(ids)} symbols, more than decode.max_source_length={limit}"
            )
        return ids

    def _length(self, symbols: int) -> int:
        """The bucket of a source."""
        lengths = [*self.run.config.data.bucket_lengths, self.config.max_source_length]
        return min(length for length in lengths if length >= symbols)

    def _decode_batch(self, sources: tuple[np.ndarray, ...], length: int) -> Hypotheses:
        devices = self.mesh.shape["data"]
        rows = max(FEWEST_ROWS, devices)
        while rows < len(sources):
            rows = min(2 * rows, max(self.config.rows, rows))
        rows = -(-rows // devices) * devices
        pad = self.run.source_tokenizer.vocabulary.pad_id
        padded = np.full((rows, length), pad, np.int32)
        lengths = np.zeros(rows, np.int32)
        for row in range(rows):
            # A filler row repeats the first source: an empty one might never end.
            ids = sources[row] if row < len(sources) else sources[0]
            padded[row, : len(ids)] = ids
            lengths[row] = len(ids)
        arrays = jax.device_put((padded, lengths), batch_sharding(self.mesh))
        return jax.device_get(self._generate(self.params, *arrays))

    @functools.cached_property
    def _generate(self) -> Any:
        """The jitted strategy: (params, source `[B, S]`, lengths) -> Hypotheses."""
        config, vocabulary = self.config, self.run.target_tokenizer.vocabulary
        model = self.run.model()
        strategy = STRATEGIES[config.strategy]

        def generate(
            params: PyTree, source: jax.Array, lengths: jax.Array
        ) -> Hypotheses:
            rows = source.shape[0]
            step_fn = make_step_fn(model, params, source, lengths, vocabulary)
            return strategy(
                step_fn,
                model.init_cache(rows, config.max_length),
                jnp.full(rows, vocabulary.bos_id, jnp.int32),
                max_length=config.max_length,
                end_id=vocabulary.end_id,
                pad_id=vocabulary.pad_id,
            )

        return jax.jit(generate)

    def _written(self, found: Hypotheses, row: int) -> Output:
        status = Status(found.status[row, 0])
        ids = found.tokens[row, 0, : found.lengths[row, 0]]
        reason = {
            Status.UNFINISHED: f"no end within decode.max_length="
            f"{self.config.max_length}",
            Status.EMPTY: "the model's output is empty",
            Status.INFEASIBLE: "the model gives no finite probability",
        }.get(status, "")
        text = self.run.target_tokenizer.decode(ids)
        return Output(text, status, reason, float(found.scores[row, 0]))


def make_step_fn(
    model: Seq2Seq,
    params: PyTree,
    source: jax.Array,
    lengths: jax.Array,
    vocabulary: Any,
) -> Any:
    """Encode a source and return the step function that decodes it.

    PAD, BOS and UNK are no output: their logits are -inf.

    Args:
        model: from `build_model`.
        params: its parameters.
        source: int32 `[B, S]`.
        lengths: int32 `[B]`.
        vocabulary: the target's.
    """
    memory = model.apply({"params": params}, source, lengths, method="read")
    never = np.array([vocabulary.pad_id, vocabulary.bos_id, vocabulary.unk_id])

    def step_fn(tokens: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        logits, cache = model.apply(
            {"params": params}, tokens, cache, memory, method="step"
        )
        return logits.at[:, never].set(-jnp.inf), cache

    return step_fn


def load_model(run: Run, *, step: int | str | None = "best") -> TrainedModel:
    """Read a run's parameters.

    Args:
        run: from `open_run`.
        step: a saved step, "best" (lowest validation loss) or None for the newest.

    Raises:
        CheckpointError: no checkpoint can be read.
        ConfigError: there is no such step, or the vocabulary is not the one it was
            trained with.
    """
    mesh = make_mesh(run.config.parallel)
    wanted = abstract_params(run.model(), mesh)
    checkpoints = run.checkpoints(read_only=True)
    if isinstance(step, int) and step not in (steps := checkpoints.steps()):
        raise ConfigError(f"{run.workdir} has no step {step}: it has {steps}")
    part = "ema" if run.config.decode.use_ema else "params"
    restored = checkpoints.restore_params(wanted, step=step, part=part)
    run.require_vocabulary_of(restored)
    params = jax.device_put(restored.state, replicated(mesh))
    return TrainedModel(run, restored.step, params, mesh)
