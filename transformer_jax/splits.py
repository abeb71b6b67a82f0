"""The data that a configuration names: its examples, and their token ids."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence

from transformer_jax.config import Config, ConfigError
from transformer_jax.data import (
    SOURCES,
    Example,
    Source,
    TokenCache,
    Tokenizer,
    data_directory,
    open_cache,
)
from transformer_jax.data.distilled import Distillation
from transformer_jax.vocabularies import build_tokenizers, vocabulary_hash


def find_source(config: Config) -> Source:
    """Return the row of SOURCES that a configuration names.

    Raises:
        ConfigError: there is no such row.
    """
    name = config.data.source
    if name not in SOURCES:
        raise ConfigError(
            f"data.source must be one of {', '.join(SOURCES)}, not {name!r}"
        )
    return SOURCES[name]


def read_examples(config: Config, split: str) -> Sequence[Example]:
    """Return the real examples of a split, in their order.

    Raises:
        ConfigError: the data cannot be read.
    """
    directory = data_directory(config.data.directory)
    with _usable(directory):
        return find_source(config).examples(str(directory), split)


def new_tokenizers(config: Config) -> list[Tokenizer]:
    """Build the vocabularies from the training split.

    Raises:
        ConfigError: the data cannot be read.
    """
    directory = data_directory(config.data.directory)
    print(f"reading {config.data.source} in {directory}", file=sys.stderr, flush=True)
    return build_tokenizers(find_source(config), read_examples(config, "train"))


def open_split(
    config: Config, split: str, tokenizers: tuple[Tokenizer, Tokenizer]
) -> TokenCache:
    """Return the token ids of a split, prepared when they are missing.

    Args:
        config: with `data.distilled` the training split's references are those of a
            teacher.
        split: "train", "validation" or "test".
        tokenizers: of sources and references.

    Raises:
        ConfigError: the data cannot be read, or the teacher's is not for it.
        InvalidText: the tokenizers cannot write it.
    """
    data = config.data
    name, distillation = data.source, None
    if data.distilled and split == "train":
        distillation = Distillation(data.distilled)
        distillation.require_fit(data.source, vocabulary_hash(tokenizers))
        name += f"-{distillation.name}" + "-raw" * data.keep_raw

    def examples() -> Sequence[Example]:
        raw = read_examples(config, split)
        if distillation is None:
            return raw
        return distillation.examples(raw, keep_raw=data.keep_raw)

    directory = data_directory(data.directory)
    with _usable(directory):
        return open_cache(
            directory / "tokens",
            name=name,
            split=split,
            examples=examples,
            source_tokenizer=tokenizers[0],
            target_tokenizer=tokenizers[1],
        )


@contextlib.contextmanager
def _usable(directory: pathlib.Path) -> Iterator[None]:
    """Name the data directory in what goes wrong with it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.directory {directory} cannot be used ({error}): choose another "
            "one, or mend its permissions or its disk"
        ) from error
