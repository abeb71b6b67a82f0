"""A data set of the tests: words to spell backwards, and a tiny configuration for it.

Run as a script it is the command line with that data set: `python toy.py train ...`.
"""

import itertools
import sys

import ml_collections

from transformer_jax.config import default_config
from transformer_jax.data import SOURCES, Example, Source

LETTERS = "abcd"


def examples(directory: str, split: str) -> list[Example]:
    """All words of one to four letters, every fifth for validation, next for test."""
    del directory
    words = [
        "".join(letters)
        for length in (1, 2, 3, 4)
        for letters in itertools.product(LETTERS, repeat=length)
    ]
    place = {"validation": (0,), "test": (1,), "train": (2, 3, 4)}[split]
    chosen = [word for number, word in enumerate(words) if number % 5 in place]
    return [Example(word, _references(word)) for word in chosen]


def _references(word: str) -> tuple[str, ...]:
    """The word backwards; a word that ends in `dd` may drop one of them."""
    backwards = " ".join(word[::-1].upper())
    return (backwards, backwards[2:]) if word.endswith("dd") else (backwards,)


def register() -> None:
    """Add the data set to the table of sources."""
    SOURCES["backwards"] = Source(examples, "characters", "symbols")


def get_config() -> ml_collections.ConfigDict:
    """Settings that train in seconds; a config file of the tests."""
    config = default_config()
    config.data.source = "backwards"
    config.data.bucket_lengths = (4, 8)
    config.data.tokens_per_batch = 128
    config.model.width = 16
    config.model.heads = 2
    config.model.feed_forward = 32
    config.model.encoder_layers = 1
    config.model.decoder_layers = 1
    config.train.steps = 12
    config.train.warmup = 2
    config.train.log_every = 4
    config.train.evaluate_every = 6
    config.train.save_every = 3
    config.decode.max_length = 8
    config.decode.max_source_length = 8
    config.decode.rows = 32
    return config


if __name__ == "__main__":
    from transformer_jax.__main__ import main

    register()
    sys.exit(main())
