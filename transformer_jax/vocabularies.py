"""The vocabularies in a working directory: one file a side, made once, then read."""

from collections.abc import Sequence

from etils import epath

from transformer_jax.config import ConfigError
from transformer_jax.data import (
    Example,
    Source,
    Tokenizer,
    Vocabulary,
    build_vocabulary,
    make_tokenizer,
)

SIDES = ("source", "target")


def load_tokenizers(workdir: epath.Path) -> list[Tokenizer]:
    """Return the tokenizers of a run, source and target.

    Raises:
        ConfigError: a vocabulary is missing or damaged.
    """
    tokenizers = []
    for side in SIDES:
        path = _file(workdir, side)
        try:
            tokenizers.append(make_tokenizer(Vocabulary.load(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the vocabulary {path} cannot be read ({error}): restore it"
            ) from error
    return tokenizers


def build_tokenizers(source: Source, examples: Sequence[Example]) -> list[Tokenizer]:
    """Collect the symbols of a source's examples."""
    vocabularies = (
        build_vocabulary(source.source_tokenizer, (each.source for each in examples)),
        build_vocabulary(
            source.target_tokenizer,
            (text for each in examples for text in each.references),
        ),
    )
    return list(map(make_tokenizer, vocabularies))


def save_tokenizers(tokenizers: Sequence[Tokenizer], workdir: epath.Path) -> None:
    """Write the vocabularies of source and target."""
    (workdir / "vocabulary").mkdir(parents=True, exist_ok=True)
    for side, tokenizer in zip(SIDES, tokenizers, strict=True):
        tokenizer.vocabulary.save(_file(workdir, side))


def vocabulary_hash(tokenizers: Sequence[Tokenizer]) -> str:
    """Return both vocabularies' hashes as one."""
    return "-".join(each.vocabulary.hash() for each in tokenizers)


def _file(workdir: epath.Path, side: str) -> epath.Path:
    return workdir / "vocabulary" / f"{side}.json"
