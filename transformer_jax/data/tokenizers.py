"""Vocabularies, and the tokenizers that turn text into ids and back.

A tokenizer is strict: a symbol that it does not know is refused with its place, never
replaced, and a text that spells a special symbol never becomes that symbol's id.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from etils import epath

from transformer_jax.run_directory import write_text

PathLike = str | os.PathLike[str]

# The special symbols that `build_vocabulary` puts first; their ids are fields.
SPECIALS = ("<pad>", "<bos>", "<end>", "<unk>")


class InvalidText(ValueError):  # noqa: N818 - a verdict about the text, shown as such
    """A text that the vocabulary cannot write; the message says what and where."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The symbols of one side of a task; a symbol's id is its place.

    Attributes:
        kind: the tokenizer that the symbols belong to, a key of `TOKENIZERS`.
        symbols: every symbol, special ones included, no two alike.
        pad_id, bos_id, end_id, unk_id: the ids of the special symbols.

    Raises:
        ValueError: the kind is unknown, symbols repeat, or special ids are illegal.
    """

    kind: str
    symbols: tuple[str, ...]
    pad_id: int
    bos_id: int
    end_id: int
    unk_id: int

    def __post_init__(self) -> None:
        if self.kind not in TOKENIZERS:
            raise ValueError(
                f"unknown tokenizer {self.kind!r}: one of {', '.join(TOKENIZERS)}"
            )
        if len(set(self.symbols)) < self.size:
            raise ValueError("the symbols of a vocabulary must differ")
        if len(set(self.special_ids)) < len(SPECIALS):
            raise ValueError(f"the special ids must differ, not {self.special_ids}")
        if not all(0 <= number < self.size for number in self.special_ids):
            raise ValueError(
                f"the special ids {self.special_ids} must be below {self.size}"
            )

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.symbols)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that no text may use: PAD, BOS, END, UNK."""
        return (self.pad_id, self.bos_id, self.end_id, self.unk_id)

    def to_json(self) -> str:
        """Return the vocabulary as one canonical line of ASCII JSON."""
        fields = dataclasses.asdict(self)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is damaged or describes no vocabulary.
        """
        fields = json.loads(text)
        wanted = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != set(wanted):
            raise ValueError(f"the fields must be {', '.join(wanted)}")
        symbols = fields.pop("symbols")
        if not isinstance(symbols, list) or not all(type(s) is str for s in symbols):
            raise ValueError("the symbols must be a list of texts")
        for name, value in fields.items():
            if type(value) is not wanted[name]:
                raise ValueError(f"{name} must be {wanted[name].__name__}")
        return cls(symbols=tuple(symbols), **fields)

    def hash(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()

    def save(self, path: PathLike) -> None:
        """Write the vocabulary; the file is either the old or the new one, whole."""
        path = epath.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: PathLike) -> "Vocabulary":
        """Read a saved vocabulary.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged.
        """
        try:
            return cls.from_json(epath.Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no vocabulary: {error}; restore the file"
            ) from error


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    vocabulary: Vocabulary

    def encode(self, text: str) -> np.ndarray:
        """Return int32 `[length]` ids, without special symbols.

        Raises:
            InvalidText: the text is blank or holds an unknown symbol.
        """

    def decode(self, ids: Any) -> str:
        """Return the text of ids; a special one appears as it is spelled.

        Raises:
            ValueError: an id lies outside the vocabulary.
        """


class _TableTokenizer:
    """A tokenizer that looks symbols up; subclasses say what a symbol is."""

    separator: str

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._ids = {
            symbol: number
            for number, symbol in enumerate(vocabulary.symbols)
            if number not in vocabulary.special_ids
        }

    @staticmethod
    def split(text: str) -> Iterator[tuple[int, str]]:
        """Yield (place, symbol); places count from 1."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        """Return int32 `[length]` ids, without special symbols."""
        if not text.strip():
            raise InvalidText("empty")
        ids = []
        for place, symbol in self.split(text):
            number = self._ids.get(symbol)
            if number is None:
                raise InvalidText(
                    f"unknown symbol {_shown(symbol)} at position {place}"
                )
            ids.append(number)
        return np.array(ids, np.int32)

    def decode(self, ids: Any) -> str:
        """Return the text of ids; a special one appears as it is spelled."""
        numbers = np.asarray(ids, np.int64)
        size = self.vocabulary.size
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < size:
            raise ValueError(f"ids must be between 0 and {size - 1}, not {numbers}")
        symbols = self.vocabulary.symbols
        return self.separator.join(symbols[number] for number in numbers.tolist())


class CharacterTokenizer(_TableTokenizer):
    """Lower-cases the text; every character is a symbol."""

    separator = ""

    @staticmethod
    def split(text: str) -> Iterator[tuple[int, str]]:
        """Yield (place in the text as given, lower-case character)."""
        for place, character in enumerate(text, 1):
            # A few characters become several in lower case.
            for symbol in character.lower():
                yield place, symbol


class SymbolTokenizer(_TableTokenizer):
    """Symbols stand between single spaces, such as phones: `K AE1 T`."""

    separator = " "

    @staticmethod
    def split(text: str) -> Iterator[tuple[int, str]]:
        """Yield (number of the symbol, symbol)."""
        return enumerate(text.split(" "), 1)


TOKENIZERS = {"characters": CharacterTokenizer, "symbols": SymbolTokenizer}


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer that a vocabulary belongs to."""
    return TOKENIZERS[vocabulary.kind](vocabulary)


def build_vocabulary(kind: str, texts: Iterable[str]) -> Vocabulary:
    """Collect the symbols of texts, sorted, behind the special ones.

    Raises:
        InvalidText: a text is blank, has an empty symbol (two spaces in a row), or
            spells a special symbol.
        ValueError: the kind is unknown.
    """
    if kind not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {kind!r}: one of {', '.join(TOKENIZERS)}")
    split = TOKENIZERS[kind].split
    found: set[str] = set()
    for text in texts:
        if not text.strip():
            raise InvalidText("empty")
        found.update(symbol for _, symbol in split(text))
    if forbidden := found.intersection(("", *SPECIALS)):
        raise InvalidText(f"a text holds the symbol {_shown(min(forbidden))}")
    # The special ids are the fields behind the symbols, in the order of SPECIALS.
    return Vocabulary(kind, (*SPECIALS, *sorted(found)), *range(len(SPECIALS)))


def _shown(symbol: str) -> str:
    """Return a symbol in quotes, harmless in any terminal, cut when long."""
    return ascii(symbol) if len(symbol) <= 20 else ascii(symbol[:20]) + "..."
