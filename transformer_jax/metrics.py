"""How far decoded symbols are from the references.

Sequences are of any symbols that compare: phones, words, ids. A text is a sequence of
its characters, so split it first.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

Symbols = Sequence[Any] | np.ndarray


def edit_distance(first: Symbols, second: Symbols) -> int:
    """Count the fewest insertions, deletions and substitutions between sequences.

    d(i, j) = min(d(i-1, j) + 1, d(i, j-1) + 1, d(i-1, j-1) + [a_i != b_j])

    Levenshtein 1966; the algorithm of Wagner and Fischer 1974. Cost: time
    len(first) * len(second), memory len(second).
    """
    first, second = _plain(first), _plain(second)
    row = list(range(len(second) + 1))
    for i, symbol in enumerate(first, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            best = corner if symbol == other else 1 + min(corner, row[j - 1], row[j])
            corner, row[j] = row[j], best
    return row[-1]


def phoneme_errors(
    hypothesis: Symbols, references: Sequence[Symbols]
) -> tuple[int, int]:
    """Return (edit distance to the nearest reference, that reference's length).

    Nearest means the smallest distance; of several it is the first.

    Raises:
        ValueError: there is no reference.
    """
    _check(references)
    scored = [(edit_distance(hypothesis, other), len(other)) for other in references]
    return min(scored, key=lambda pair: pair[0])


class ErrorRates:
    """Adds up errors over examples; every example is added once.

    WER = 100 * words that equal none of their references / words
    PER = 100 * sum of phoneme errors / sum of the nearest references' lengths

    The rule of CMUSphinx g2p-seq2seq (`calc_errors` in g2p.py): each pronunciation
    that the dictionary lists counts as right.
    """

    def __init__(self) -> None:
        self._words = self._wrong = self._errors = self._symbols = 0

    def add(self, hypothesis: Symbols, references: Sequence[Symbols]) -> None:
        """Count one example's best hypothesis; an empty one is simply wrong."""
        errors, symbols = phoneme_errors(hypothesis, references)
        self._words += 1
        # A distance of 0 is the same as equality with any reference.
        self._wrong += errors > 0
        self._errors += errors
        self._symbols += symbols

    def result(self) -> dict[str, float]:
        """Return `wer` and `per` in percent, and `words`, the number of examples.

        Raises:
            ValueError: nothing was added.
        """
        if not self._symbols:
            raise ValueError("no error rate without a reference: nothing was added")
        return {
            "wer": 100.0 * self._wrong / self._words,
            "per": 100.0 * self._errors / self._symbols,
            "words": self._words,
        }


class Accuracy:
    """Counts right classes; every example is added once.

    accuracy = 100 * examples whose class is right / examples
    majority = 100 * examples of the commonest class / examples, what always saying that
    one would reach.
    """

    def __init__(self) -> None:
        self._right, self._classes = 0, collections.Counter()

    def add(self, found: Any, references: Sequence[Any]) -> None:
        """Count one example's best class; any reference is right."""
        _check(references)
        self._right += found in references
        self._classes[references[0]] += 1

    def result(self) -> dict[str, float]:
        """Return `accuracy` and `majority` in percent, and the number of `examples`.

        Raises:
            ValueError: nothing was added.
        """
        count = self._classes.total()
        if not count:
            raise ValueError("no accuracy without an example: nothing was added")
        return {
            "accuracy": 100.0 * self._right / count,
            "majority": 100.0 * max(self._classes.values()) / count,
            "examples": count,
        }


def _check(references: Sequence[Symbols]) -> None:
    """An example without references cannot be scored."""
    if not len(references):
        raise ValueError("an example needs at least one reference to be scored")


def _plain(symbols: Symbols) -> list[Any]:
    """List compare as a whole, which arrays do not."""
    return symbols.tolist() if isinstance(symbols, np.ndarray) else list(symbols)
