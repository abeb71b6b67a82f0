"""Token ids of a whole split in memory-mapped files, made once.

A cache is a folder of five flat arrays and one JSON file with their sizes:

    source_tokens, source_offsets    ids of example e: tokens[offsets[e]:offsets[e + 1]]
    target_tokens, target_offsets    ids of pair p, likewise
    pair_example                     the example that pair p belongs to, never falling

An *example* is a source with all its references; a *pair* is a source with one of them.
"""

import functools
import hashlib
import json
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from transformer_jax.data.sources import Example
from transformer_jax.data.tokenizers import InvalidText, PathLike, Tokenizer

_FORMAT = 1
_DESCRIPTION = "cache.json"
_COLUMNS = (
    "source_tokens",
    "source_offsets",
    "target_tokens",
    "target_offsets",
    "pair_example",
)


class TokenCache:
    """The token ids of one split, read from memory-mapped files.

    Attributes:
        fingerprint: SHA-256 of the contents, to recognise the same data again.
    """

    def __init__(self, folder: PathLike) -> None:
        """Open a folder that `open_cache` built.

        Raises:
            OSError, ValueError: the folder is missing, incomplete or damaged.
        """
        folder = pathlib.Path(folder)
        try:
            description = json.loads((folder / _DESCRIPTION).read_text("utf-8"))
            self.fingerprint: str = description["fingerprint"]
            sizes = {name: description["bytes"][name] for name in _COLUMNS}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{_DESCRIPTION} lacks {error}") from error
        for name, size in sizes.items():
            found = (folder / f"{name}.npy").stat().st_size
            if found != size:
                raise ValueError(f"{name}.npy has {found} bytes instead of {size}")
        columns = {name: _mapped(folder / f"{name}.npy") for name in _COLUMNS}
        self._source_tokens = columns["source_tokens"]
        self._source_offsets = columns["source_offsets"]
        self._target_tokens = columns["target_tokens"]
        self._target_offsets = columns["target_offsets"]
        self._pair_example = columns["pair_example"]

    @property
    def num_examples(self) -> int:
        """Number of sources."""
        return len(self._source_offsets) - 1

    @property
    def num_pairs(self) -> int:
        """Number of (source, reference) pairs."""
        return len(self._target_offsets) - 1

    @functools.cached_property
    def source_lengths(self) -> np.ndarray:
        """int32 `[examples]`, symbols of each source."""
        return np.diff(self._source_offsets).astype(np.int32)

    @functools.cached_property
    def target_lengths(self) -> np.ndarray:
        """int32 `[pairs]`, symbols of each pair's reference, END not counted."""
        return np.diff(self._target_offsets).astype(np.int32)

    @functools.cached_property
    def pair_source_lengths(self) -> np.ndarray:
        """int32 `[pairs]`, symbols of each pair's source."""
        return self.source_lengths[self._pair_example]

    @functools.cached_property
    def target_repeats(self) -> np.ndarray:
        """int32 `[pairs]`, symbols of each reference that equal the one before."""
        tokens, offsets = self._target_tokens, self._target_offsets
        same = np.zeros(len(tokens) + 1, np.int32)
        same[1:-1] = tokens[1:] == tokens[:-1]
        # Not the first symbol of a reference.
        same[offsets[:-1]] = 0
        before = np.concatenate([[0], np.cumsum(same)])
        return (before[offsets[1:]] - before[offsets[:-1]]).astype(np.int32)

    def source(self, example: int) -> np.ndarray:
        """Return the int32 ids of an example's source."""
        start, stop = self._source_offsets[example : example + 2]
        return np.asarray(self._source_tokens[start:stop], np.int32)

    def target(self, pair: int) -> np.ndarray:
        """Return the int32 ids of a pair's reference."""
        start, stop = self._target_offsets[pair : pair + 2]
        return np.asarray(self._target_tokens[start:stop], np.int32)

    def example_of(self, pair: Any) -> Any:
        """Return the example of a pair, or of each in an array of pairs."""
        return self._pair_example[pair]

    def padded_sources(
        self, examples: np.ndarray, length: int, pad: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 `[B, length]` sources and `[B]` lengths; -1 gives pads alone.

        Raises:
            ValueError: a source is longer than `length`.
        """
        return _padded(self._source_tokens, self._source_offsets, examples, length, pad)

    def padded_targets(
        self, pairs: np.ndarray, length: int, pad: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 `[B, length]` references and `[B]` lengths, likewise."""
        return _padded(self._target_tokens, self._target_offsets, pairs, length, pad)

    def padded_references(
        self, examples: np.ndarray, count: int, length: int, pad: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return up to `count` references of each example, and their lengths.

        Returns:
            int32 `[B, count, length]` and `[B, count]`; -1 is the length of one that
            does not exist.

        Raises:
            ValueError: an example has more references, or one is longer than `length`.
        """
        chosen = np.maximum(examples, 0)
        first = self._first_pair[chosen]
        sizes = np.where(examples < 0, 0, self._first_pair[chosen + 1] - first)
        if sizes.size and sizes.max() > count:
            raise ValueError(f"an example has {sizes.max()} references, not {count}")
        places = np.arange(count)
        pairs = np.where(places < sizes[:, None], first[:, None] + places, -1)
        padded, lengths = self.padded_targets(pairs.reshape(-1), length, pad)
        lengths = np.where(pairs.reshape(-1) < 0, -1, lengths)
        shape = (len(examples), count)
        return padded.reshape(*shape, length), lengths.reshape(shape).astype(np.int32)

    def longest_references(self) -> np.ndarray:
        """Return int32 `[examples]`, symbols of each one's longest reference, or 0."""
        longest = np.zeros(self.num_examples, np.int32)
        np.maximum.at(longest, self._pair_example, self.target_lengths)
        return longest

    @functools.cached_property
    def most_references(self) -> int:
        """The most references that an example has."""
        return int(np.diff(self._first_pair).max(initial=0))

    @functools.cached_property
    def _first_pair(self) -> np.ndarray:
        """The first pair of every example, and the number of pairs."""
        return np.searchsorted(self._pair_example, np.arange(self.num_examples + 1))


def open_cache(
    root: PathLike,
    *,
    name: str,
    split: str,
    examples: Callable[[], Iterable[Example]],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
) -> TokenCache:
    """Open the cache of a split, and build it first when there is none.

    The folder's name depends on all arguments except what `examples` returns, so other
    contents need another `name`. A damaged cache is built again, with a warning.
    Processes may build at the same time: the first one to finish wins.

    Args:
        root: folder of all caches; made when missing.
        name: the data set.
        split: the part of it.
        examples: gives the split's examples; called only to build.
        source_tokenizer: writes the sources.
        target_tokenizer: writes the references.

    Raises:
        InvalidText: an example cannot be written; the message says which.
        OSError: the root cannot be written.
    """
    hashes = [each.vocabulary.hash() for each in (source_tokenizer, target_tokenizer)]
    key = json.dumps([name, split, *hashes, _FORMAT]).encode()
    label = f"{name}-{split}-{hashlib.sha256(key).hexdigest()[:16]}"
    folder = pathlib.Path(root) / label
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        try:
            return TokenCache(folder)
        except (OSError, ValueError) as error:
            logging.warning("building the damaged %s again: %s", folder, error)
            _remove(folder)
    new = _beside(folder)
    try:
        _build(new, label, examples(), source_tokenizer, target_tokenizer)
        # The mapped files stay open, whatever becomes of their names.
        cache = TokenCache(new)
        try:
            new.rename(folder)
        except OSError:
            # Another process has put its equal cache there.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return cache


def _build(
    folder: pathlib.Path,
    label: str,
    examples: Iterable[Example],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
) -> None:
    """Write the columns one example at a time, then the description."""
    types = (
        np.min_scalar_type(source_tokenizer.vocabulary.size - 1),
        np.int64,
        np.min_scalar_type(target_tokenizer.vocabulary.size - 1),
        np.int64,
        np.int32,
    )
    columns = [
        _Column(folder / f"{name}.npy", np.dtype(dtype))
        for name, dtype in zip(_COLUMNS, types, strict=True)
    ]
    source_tokens, source_offsets, target_tokens, target_offsets, owner = columns
    try:
        source_offsets.append([0])
        target_offsets.append([0])
        for number, example in enumerate(examples):
            try:
                source_tokens.append(source_tokenizer.encode(example.source))
                source_offsets.append([source_tokens.length])
                for reference in example.references:
                    target_tokens.append(target_tokenizer.encode(reference))
                    target_offsets.append([target_tokens.length])
                    owner.append([number])
            except InvalidText as error:
                raise InvalidText(f"example {number} of {label}: {error}") from error
    finally:
        for column in columns:
            column.close()
    digests = "".join(column.digest for column in columns)
    description = {
        "bytes": {
            name: column.path.stat().st_size
            for name, column in zip(_COLUMNS, columns, strict=True)
        },
        "fingerprint": hashlib.sha256(digests.encode()).hexdigest(),
    }
    with (folder / _DESCRIPTION).open("w", encoding="utf-8") as file:
        json.dump(description, file)
        _flush(file)


class _Column:
    """A flat .npy file that grows at its end."""

    def __init__(self, path: pathlib.Path, dtype: np.dtype) -> None:
        self.path = path
        self.length = 0
        self._dtype = dtype
        self._hash = hashlib.sha256()
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: Any) -> None:
        """Add values at the end."""
        data = np.asarray(values, self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.length += len(values)

    def close(self) -> None:
        """Complete the header and put the file on disk."""
        with self._file as file:
            file.seek(0)
            self._write_header()
            _flush(file)

    @property
    def digest(self) -> str:
        """SHA-256 of the values."""
        return self._hash.hexdigest()

    def _write_header(self) -> None:
        # The format pads a header so that the first axis can grow in place.
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


def _mapped(path: pathlib.Path) -> np.ndarray:
    """Open a flat array without reading it."""
    column = np.load(path, mmap_mode="r")
    if column.ndim != 1:
        raise ValueError(f"{path.name} is no flat array")
    # Slices of a plain view are several times faster than those of np.memmap.
    return column.view(np.ndarray)


def _padded(
    tokens: np.ndarray, offsets: np.ndarray, rows: np.ndarray, length: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Gather ragged rows into int32 `[B, length]`, and tell their lengths `[B]`."""
    starts = offsets[np.maximum(rows, 0)]
    sizes = offsets[np.where(rows < 0, 0, rows + 1)] - starts
    if sizes.size and sizes.max() > length:
        worst = int(sizes.argmax())
        raise ValueError(
            f"item {rows[worst]} has {sizes[worst]} symbols, more than the {length} "
            "places of its bucket"
        )
    inside = np.arange(length) < sizes[:, None]
    padded = np.full(inside.shape, pad, np.int32)
    padded[inside] = tokens[(starts[:, None] + np.arange(length))[inside]]
    return padded, sizes.astype(np.int32)


def _beside(folder: pathlib.Path) -> pathlib.Path:
    """Make a new folder on the same disk; `tempfile` would hide it from others."""
    path = folder.with_name(f"{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
    path.mkdir()
    return path


def _flush(file: Any) -> None:
    """Put a file's contents on disk, so that a later rename cannot precede them."""
    file.flush()
    os.fsync(file.fileno())


def _remove(folder: pathlib.Path) -> None:
    """Take a folder away in one step, then delete it."""
    away = _beside(folder)
    try:
        folder.rename(away / "cache")
    except FileNotFoundError:
        pass  # Another process took it.
    finally:
        shutil.rmtree(away, ignore_errors=True)
