"""ListOps: nested lists of digits and what they evaluate to, generated.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

Nangia and Bowman 2018; the lengths and rules are those of Long Range Arena (Tay et al.
2021, section 2.2.1), whose generator was read for them: MIN, MAX, MED (the median,
rounded down), SM (the sum modulo 10); a node is a digit with probability 3/4, else an
operator with 2 to 10 arguments; at depth 10 it is a digit. An expression is kept if its
length is between two bounds, both excluded, and if it is new; an operator and its
bracket count one each.

Importing this module imports tensorflow-datasets; `sources` does it when it must.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from transformer_jax.data.prepared import DataSet

OPERATORS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(np.median(values)),
    "SM": lambda values: sum(values) % 10,
}
DIGITS, MOST_ARGUMENTS, DEPTH = 10, 10, 10
DIGIT_PROBABILITY = 0.75
SIZES = {"train": 96_000, "validation": 2_000, "test": 2_000}
# Bounds of the length, by the configuration's name.
LENGTHS = {"long": (500, 2000), "short": (50, 250)}


class _TooLong(Exception):  # noqa: N818 - no error: the expression is drawn again
    """The expression has reached its bound."""


def expressions(low: int, high: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yield expressions and their values, no two alike, without end.

    Args:
        low, high: bounds of the length, excluded.
        seed: of the draws, all by `random.Random.random`, the only one whose sequence
            Python promises to keep.
    """
    draw, seen = random.Random(seed), set()
    while True:
        symbols: list[str] = []
        try:
            value = _grow(draw, 1, symbols, high)
        except _TooLong:
            continue
        text = " ".join(symbols)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if len(symbols) > low and digest not in seen:
            seen.add(digest)
            yield text, value


def _grow(draw: random.Random, depth: int, symbols: list[str], high: int) -> int:
    """Append a node's symbols; return its value."""
    if len(symbols) >= high - 1:
        raise _TooLong
    if depth == DEPTH or draw.random() < DIGIT_PROBABILITY:
        digit = int(draw.random() * DIGITS)
        symbols.append(str(digit))
        return digit
    operator = [*OPERATORS][int(draw.random() * len(OPERATORS))]
    symbols.append(f"[{operator}")
    count = 2 + int(draw.random() * (MOST_ARGUMENTS - 1))
    values = [_grow(draw, depth + 1, symbols, high) for _ in range(count)]
    symbols.append("]")
    if len(symbols) >= high:
        raise _TooLong
    return OPERATORS[operator](values)


class Listops(tfds.core.GeneratorBasedBuilder):
    """One example an expression, in the order of drawing, split by it."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = tuple(tfds.core.BuilderConfig(name=name) for name in LENGTHS)

    def _info(self) -> tfds.core.DatasetInfo:
        low, high = LENGTHS[self.builder_config.name]
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"Nested lists of {low + 1} to {high - 1} symbols",
            features=tfds.features.FeaturesDict(
                {
                    "expression": tfds.features.Text(),
                    "value": tfds.features.ClassLabel(num_classes=DIGITS),
                }
            ),
            homepage="https://arxiv.org/abs/2011.04006",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        # One stream for all, so that no two splits share an expression.
        drawn = expressions(*LENGTHS[self.builder_config.name])
        return {
            split: self._generate_examples(drawn, count)
            for split, count in SIZES.items()
        }

    def _generate_examples(
        self, drawn: Iterator[tuple[str, int]], count: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (text, value) in enumerate(itertools.islice(drawn, count)):
            yield number, {"expression": text, "value": value}


def read(directory: str, split: str, lengths: str) -> list[tuple[str, str]]:
    """Return the expressions of a split and their values, as texts.

    Args:
        directory: where it is prepared when it is not there yet, in minutes.
        split: "train", "validation" or "test".
        lengths: a key of LENGTHS.

    Raises:
        ConfigError: `directory` is unusable or damaged.
        ValueError: there is no such split.
    """
    examples = DataSet(Listops, f"{lengths} ListOps", lengths).read(directory, split)
    return [(each["expression"].decode(), str(each["value"])) for each in examples]
