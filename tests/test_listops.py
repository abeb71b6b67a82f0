"""ListOps: the rules, the values, and that no two splits share an expression."""

import itertools

import numpy as np
import pytest

from transformer_jax.data import SOURCES, Example, listops


def median(values):
    """The middle one, or the mean of the two middle ones, rounded down."""
    ranked, middle = sorted(values), len(values) // 2
    if len(values) % 2:
        return ranked[middle]
    return (ranked[middle - 1] + ranked[middle]) // 2


VALUES = {
    "MIN": min,
    "MAX": max,
    "MED": median,
    "SM": lambda values: sum(values) % 10,
}


def value_of(symbols):
    """Evaluate by another way than the generator: from the inmost brackets out."""
    symbols = list(symbols)
    while len(symbols) > 1:
        end = symbols.index("]")
        start = max(n for n in range(end) if symbols[n].startswith("["))
        values = [int(symbol) for symbol in symbols[start + 1 : end]]
        assert 2 <= len(values) <= 10
        symbols[start : end + 1] = [str(VALUES[symbols[start][1:]](values))]
    return int(symbols[0])


def depth_of(symbols):
    depths = np.cumsum([(s[0] == "[") - (s == "]") for s in symbols])
    # Digits are one deeper than the operator above them.
    return depths.max() + 1


@pytest.mark.parametrize(("low", "high", "count"), [(4, 40, 400), (500, 2000, 5)])
def test_expressions_follow_the_rules(low, high, count):
    found = list(itertools.islice(listops.expressions(low, high), count))
    assert len({text for text, _ in found}) == count
    lengths, depths = [], []
    for text, value in found:
        symbols = text.split(" ")
        assert value_of(symbols) == value
        lengths.append(len(symbols))
        depths.append(depth_of(symbols))
    assert low < min(lengths) <= max(lengths) < high
    assert max(depths) <= 10
    if count > 5:
        assert {min(lengths), max(lengths)} == {low + 1, high - 1}
        assert {value for _, value in found} == {*range(10)}
    else:
        assert max(depths) == 10


def test_three_quarters_of_the_nodes_are_digits():
    """Counted where no bound interferes: below the root of all that is drawn."""
    symbols = []
    draw = listops.random.Random(3)
    while len(symbols) < 20_000:
        listops._grow(draw, 9, symbols, 10**9)
    operators = sum(symbol[0] == "[" for symbol in symbols)
    # At depth 9 a node is an operator with probability 1/4, and has 6 arguments.
    roots = len(symbols) - 7 * operators
    assert 0.22 < operators / roots < 0.28


def test_splits_are_drawn_one_after_the_other(tmp_path, monkeypatch, capsys):
    sizes = {"train": 30, "validation": 8, "test": 9}
    monkeypatch.setattr(listops, "SIZES", sizes)
    found = {
        split: SOURCES["listops_short"].examples(str(tmp_path), split)
        for split in ("test", "validation", "train")
    }
    assert capsys.readouterr().err == f"preparing short ListOps in {tmp_path}\n"
    whole = [
        Example(text, (str(value),))
        for text, value in itertools.islice(listops.expressions(50, 250), 47)
    ]
    assert found["train"] + found["validation"] + found["test"] == whole
    assert len(found["validation"]) == 8
