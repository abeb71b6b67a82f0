"""A data set of the tests: words to spell backwards, and a tiny configuration for it.

Run as a script it is the command line with that data set: `python toy.py train ...`.
"""

import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import jax
import ml_collections
import pytest
from jax.experimental.compilation_cache import compilation_cache

from transformer_jax.__main__ import main
from transformer_jax.config import default_config
from transformer_jax.data import SOURCES, Example, Source

LETTERS = "abcd"
# Compiled once for all runs of a test module, also in other processes.
CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


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


BACKWARDS = Source(examples, "characters", "symbols")


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


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[None]:
    """Register the data set, and keep what is compiled in a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SOURCES, "backwards", BACKWARDS)
        settings = {**CACHE, "jax_compilation_cache_dir": str(directory / "compiled")}
        before = {name: getattr(jax.config, name) for name in settings}
        for name, value in settings.items():
            jax.config.update(name, value)
        # Jax decides once whether there is a cache.
        compilation_cache.reset_cache()
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


class Called(NamedTuple):
    """What a command left: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def call(*arguments: str, stdin: bytes = b"") -> Called:
    """Run a command in this process, with files of its own as standard streams."""
    names = ("stdin", "stdout", "stderr")
    saved = [os.dup(number) for number in range(3)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in names]
        files[0].write(stdin)
        files[0].seek(0)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        streams = []
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number, name in enumerate(names):
                os.dup2(files[number].fileno(), number)
                mode = "r" if number == 0 else "w"
                errors = "backslashreplace" if number == 2 else "strict"
                binary = stack.enter_context(open(number, f"{mode}b", closefd=False))
                streams.append(io.TextIOWrapper(binary, errors=errors))
                patch.setattr(sys, name, streams[-1])
            code = main(list(arguments))
        finally:
            patch.undo()
            for number, stream in enumerate(streams):
                stream.close()
                os.dup2(saved[number], number)
                os.close(saved[number])
        out, err = (_content(file) for file in files[1:])
    return Called(code, out, err)


def _content(file: IO[bytes]) -> str:
    """What a file holds, line ends as they are."""
    file.seek(0)
    return file.read().decode("utf-8")


if __name__ == "__main__":
    SOURCES["backwards"] = BACKWARDS
    sys.exit(main())
