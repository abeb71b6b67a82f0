"""Decoding with a trained model: texts in, texts out, in order, none lost."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.class_generation import ClassGenerator
from transformer_jax.config import ConfigError, DecodeConfig
from transformer_jax.data import InvalidText, Vocabulary
from transformer_jax.decoding import Hypotheses, Status
from transformer_jax.generation import Generator
from transformer_jax.models import CANVASES
from transformer_jax.objectives import check_nbest
from transformer_jax.parallel_generation import ParallelGenerator, Rescorer
from transformer_jax.runs import Run, open_run
from transformer_jax.sharding import make_mesh, replicated
from transformer_jax.training import abstract_variables
from transformer_jax.types import KEPT, PyTree, variables_of


class Hypothesis(NamedTuple):
    """One output of a text: the text, how it came about, its score."""

    text: str
    status: Status
    score: float


class Output(NamedTuple):
    """What became of one text.

    Attributes:
        hypotheses: at least one, best first; its text is empty unless its status is
            OK, TRUNCATED or UNFINISHED.
        reason: what is wrong with the best one, for people; empty if nothing is.
    """

    hypotheses: tuple[Hypothesis, ...]
    reason: str

    @property
    def text(self) -> str:
        """The best text."""
        return self.hypotheses[0].text

    @property
    def status(self) -> Status:
        """How the best text came about."""
        return self.hypotheses[0].status


def invalid(reason: str) -> Output:
    """Return the output of a text that cannot be read."""
    return Output((Hypothesis("", Status.INVALID, -np.inf),), reason)


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model, ready to decode; make one with `load_model`.

    Attributes:
        run: its run.
        step: the step of its parameters.
        generator: decodes batches.
    """

    run: Run
    step: int
    generator: Generator | ParallelGenerator | ClassGenerator

    @property
    def config(self) -> DecodeConfig:
        """How to decode."""
        return self.run.config.decode

    @property
    def variables(self) -> dict[str, PyTree]:
        """Its parameters, and what it keeps besides."""
        return self.generator.variables

    @property
    def rescorer(self) -> Rescorer | None:
        """The model that chooses among candidates, if there is one."""
        parallel = isinstance(self.generator, ParallelGenerator)
        return self.generator.rescorer if parallel else None

    def decode(self, texts: Sequence[str], *, first: int = 0) -> list[Output]:
        """Return one output for each text, in order, decoded in batches of one length.

        Results do not depend on which texts are decoded together: rows of a batch do
        not see each other, and padding changes nothing.

        Args:
            texts: sources.
            first: number of the first text in the whole input; a sample's draws depend
                on the seed and on its text's number.
        """
        outputs: list[Output | None] = [None] * len(texts)
        readable: dict[int, list[tuple[int, np.ndarray]]] = {}
        for number, text in enumerate(texts):
            try:
                ids = self._read(text)
            except InvalidText as error:
                outputs[number] = invalid(str(error))
            else:
                readable.setdefault(self._length(len(ids)), []).append((number, ids))
        for length, entries in sorted(readable.items()):
            # One size for all batches of a length: the last one is filled up.
            rows = self.generator.rows(len(entries))
            for start in range(0, len(entries), rows):
                numbers, sources = zip(*entries[start : start + rows], strict=True)
                batch = self._batch(sources, np.array(numbers) + first, length, rows)
                found = self.generator(*batch)
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

    def _batch(
        self,
        sources: Sequence[np.ndarray],
        numbers: np.ndarray,
        length: int,
        rows: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Padded sources, their lengths and their numbers."""
        # A filler row repeats a source: an empty one might never end.
        chosen = np.resize(np.arange(len(sources)), rows)
        pad = self.run.source_tokenizer.vocabulary.pad_id
        padded = np.full((rows, length), pad, np.int32)
        for row, number in enumerate(chosen):
            padded[row, : len(sources[number])] = sources[number]
        lengths = np.array([len(ids) for ids in sources], np.int32)[chosen]
        return padded, lengths, numbers.astype(np.int32)[chosen]

    def _written(self, found: Hypotheses, row: int) -> Output:
        hypotheses = tuple(
            self._hypothesis(*(field[row, place] for field in found))
            for place, status in enumerate(found.status[row])
            if status != Status.ABSENT
        )
        reason = {
            Status.UNFINISHED: f"no end within decode.max_length="
            f"{self.config.max_length}, or within its canvas",
            Status.EMPTY: "the model's output is empty",
            Status.INFEASIBLE: "the model has no output of finite probability",
        }.get(hypotheses[0].status, "")
        return Output(hypotheses, reason)

    def _hypothesis(
        self, tokens: np.ndarray, length: np.ndarray, score: np.ndarray, status: int
    ) -> Hypothesis:
        text = self.run.target_tokenizer.decode(tokens[:length])
        return Hypothesis(text, Status(status), float(score))


def load_model(
    run: Run, *, step: int | str | None = "best", nbest: int = 1
) -> TrainedModel:
    """Read a run's variables.

    Args:
        run: from `open_run`.
        step: a saved step, "best" (lowest validation loss) or None for the newest.
        nbest: hypotheses that `decode` gives a text, where there are so many.

    Raises:
        CheckpointError: no checkpoint can be read.
        ConfigError: there is no such step, the vocabulary is not the one it was
            trained with or lacks a forbidden symbol, or the strategy cannot give so
            many hypotheses.
    """
    config = run.config.decode
    check_nbest(config, nbest)
    vocabulary = run.target_tokenizer.vocabulary
    forbidden = _ids(vocabulary, config.forbidden)
    mesh = make_mesh(run.config.parallel)
    step, variables = _restored(run, step, mesh)
    options: dict[str, Any] = {"nbest": nbest, "forbidden": forbidden}
    kind = Generator
    if run.config.train.objective == "classification":
        kind = ClassGenerator
    elif run.config.train.objective in CANVASES:
        kind = ParallelGenerator
        options["canvas_lengths"] = run.config.data.bucket_lengths
        if config.rescorer:
            options["rescorer"] = _rescorer(run, mesh)
    generator = kind(run.model(), variables, config, vocabulary, mesh, **options)
    return TrainedModel(run, step, generator)


def _restored(
    run: Run, step: int | str | None, mesh: jax.sharding.Mesh
) -> tuple[int, PyTree]:
    """Read a step of a run: its number and its variables, on every device."""
    abstract = abstract_variables(run.model(), mesh)
    checkpoints = run.checkpoints(read_only=True)
    if isinstance(step, int) and step not in (steps := checkpoints.steps()):
        raise ConfigError(f"{run.workdir} has no step {step}: it has {steps}")
    params = "ema" if run.config.decode.use_ema else "params"
    wanted = {params: abstract.pop("params"), **abstract}
    restored = checkpoints.restore_entries(wanted, step=step)
    run.require_vocabulary_of(restored)
    variables = variables_of(restored.state[params], restored.state.get(KEPT))
    return restored.step, jax.device_put(variables, replicated(mesh))


def _rescorer(run: Run, mesh: jax.sharding.Mesh) -> Rescorer:
    """Read the model that chooses among candidates, at its best step."""
    name = run.config.decode.rescorer
    try:
        other = open_run(name)
    except ConfigError as error:
        raise ConfigError(f"decode.rescorer: {error}") from error
    if other.config.train.objective != "autoregressive":
        raise ConfigError(
            f"decode.rescorer {name} is of train.objective "
            f"{other.config.train.objective!r}: name an autoregressive model"
        )
    if other.vocabulary_hash != run.vocabulary_hash:
        raise ConfigError(
            f"decode.rescorer {name} has other vocabularies than {run.workdir}: name a "
            "model that was trained with the same ones"
        )
    # BOS stands before an output, or END behind it.
    decode, most = run.config.decode, other.config.model.longest
    needed = max(decode.max_length + 1, decode.max_source_length)
    if most is not None and needed > most:
        raise ConfigError(
            f"decode.rescorer {name} has model.max_positions={most}, but "
            f"decode.max_length={decode.max_length}, with an end, and "
            f"decode.max_source_length={decode.max_source_length} need {needed}: lower "
            "these, or name a model of more positions"
        )
    _, variables = _restored(other, "best", mesh)
    return Rescorer(other.model(), variables, other.target_tokenizer.vocabulary)


def _ids(vocabulary: Vocabulary, symbols: Sequence[str]) -> list[int]:
    """The ids of ordinary symbols of the target."""
    ids = {symbol: number for number, symbol in enumerate(vocabulary.symbols)}
    for special in vocabulary.special_ids:
        del ids[vocabulary.symbols[special]]
    for symbol in symbols:
        if symbol not in ids:
            raise ConfigError(
                f"decode.forbidden: {symbol!r} is no symbol of the target, which has "
                f"{' '.join(ids)}"
            )
    return [ids[symbol] for symbol in symbols]
