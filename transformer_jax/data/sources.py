"""Where examples come from: one row a data set."""

import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple


class Example(NamedTuple):
    """One text to transform and every output that counts as right."""

    source: str
    references: tuple[str, ...]


class Source(NamedTuple):
    """A data set.

    Attributes:
        examples: (directory, split) -> the split's examples, always in the same order;
            prepares the data set in the directory when it is not there yet. The
            splits are "train", "validation" and "test".
        source_tokenizer: kind of the source's tokenizer, a key of `TOKENIZERS`.
        target_tokenizer: kind of the references' tokenizer.
    """

    examples: Callable[[str, str], list[Example]]
    source_tokenizer: str
    target_tokenizer: str


def _cmudict(directory: str, split: str) -> list[Example]:
    """Words and their phones without stress digits."""
    # Imported late: it takes half a second, and only this function needs it.
    from transformer_jax.data import cmudict

    entries = cmudict.read(directory, split)
    return [Example(*entry) for entry in cmudict.without_stress(entries)]


def _cmudict_stress(directory: str, split: str) -> list[Example]:
    """Words and their phones with stress digits."""
    from transformer_jax.data import cmudict

    return [Example(*entry) for entry in cmudict.read(directory, split)]


def _listops(lengths: str) -> Callable[[str, str], list[Example]]:
    """Nested lists of these lengths, and the digits that they evaluate to."""

    def examples(directory: str, split: str) -> list[Example]:
        from transformer_jax.data import listops

        pairs = listops.read(directory, split, lengths)
        return [Example(text, (value,)) for text, value in pairs]

    return examples


SOURCES = {
    "cmudict": Source(_cmudict, "characters", "symbols"),
    "cmudict_stress": Source(_cmudict_stress, "characters", "symbols"),
    "listops": Source(_listops("long"), "symbols", "symbols"),
    "listops_short": Source(_listops("short"), "symbols", "symbols"),
}


def data_directory(setting: str) -> pathlib.Path:
    """Return where data sets are kept: the setting, or the user's cache folder."""
    if setting:
        return pathlib.Path(setting).expanduser()
    # The XDG specification has relative paths ignored.
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = pathlib.Path.home() / ".cache"
    return cache / "transformer_jax"
