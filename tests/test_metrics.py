"""Edit distance against its definition; WER and PER by hand arithmetic."""

import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from transformer_jax.metrics import ErrorRates, edit_distance, phoneme_errors

SEQUENCES = st.lists(st.sampled_from("abc"), max_size=7)


def phones(text):
    return text.split()


def by_definition(first, second):
    """The recursion itself, read from the end."""

    @functools.cache
    def distance(i, j):
        if not i or not j:
            return i + j
        return min(
            distance(i - 1, j) + 1,
            distance(i, j - 1) + 1,
            distance(i - 1, j - 1) + (first[i - 1] != second[j - 1]),
        )

    return distance(len(first), len(second))


@hypothesis.given(SEQUENCES, SEQUENCES)
@hypothesis.settings(max_examples=200)
def test_edit_distance_equals_its_definition(first, second):
    assert edit_distance(first, second) == by_definition(first, second)


@hypothesis.given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_edit_distance_is_a_metric(first, second, third):
    there = edit_distance(first, second)
    assert there == edit_distance(second, first)
    assert (there == 0) == (first == second)
    assert there <= edit_distance(first, third) + edit_distance(third, second)


def test_edit_distance_of_words_arrays_and_ids():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance(np.array([5, 7, 9], np.int32), [5, 9]) == 1
    assert edit_distance([], "abc") == 3


@pytest.mark.parametrize(
    ("hypothesis_", "wrong"),
    [(phones("R EH K ER D"), 0), (phones("R EH K ER"), 1), ([], 1)],
)
def test_any_reference_counts(hypothesis_, wrong):
    rates = ErrorRates()
    rates.add(hypothesis_, [phones("R AH K AO R D"), phones("R EH K ER D")])
    assert rates.result()["wer"] == 100 * wrong


def test_arrays_are_compared_as_a_whole():
    rates = ErrorRates()
    rates.add(np.array([1, 2]), [np.array([1]), np.array([1, 2])])
    assert rates.result()["wer"] == 0


def test_phonemes_are_counted_against_the_nearest_reference():
    references = [phones("R AH K AO R D"), phones("R EH K ER D")]
    assert phoneme_errors(phones("R EH K ER"), references) == (1, 5)
    assert phoneme_errors(phones("R AH K AO R D"), references) == (0, 6)


def test_of_equally_near_references_the_first_counts():
    short, long = list("ab"), list("abcd")
    assert phoneme_errors(list("abc"), [short, long]) == (1, 2)
    assert phoneme_errors(list("abc"), [long, short]) == (1, 4)


def test_rates_are_sums_over_all_examples():
    rates = ErrorRates()
    rates.add(phones("K AE T"), [phones("K AE T")])
    rates.add(phones("R EH K ER"), [phones("R AH K AO R D"), phones("R EH K ER D")])
    rates.add([], [phones("D AO G")])
    assert rates.result() == {
        "wer": pytest.approx(100 * 2 / 3),
        "per": pytest.approx(100 * (0 + 1 + 3) / (3 + 5 + 3)),
        "words": 3,
    }


@hypothesis.given(st.lists(st.tuples(SEQUENCES, st.lists(SEQUENCES, min_size=1))))
def test_wrong_words_are_those_without_an_equal_reference(examples):
    rates = ErrorRates()
    for hypothesis_, references in examples:
        rates.add(hypothesis_, references)
    lengths = [phoneme_errors(*example)[1] for example in examples]
    hypothesis.assume(sum(lengths))
    wrong = sum(given not in references for given, references in examples)
    assert rates.result()["wer"] == pytest.approx(100 * wrong / len(examples))


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="nothing was added"):
        ErrorRates().result()
    for score in (phoneme_errors, ErrorRates().add):
        with pytest.raises(ValueError, match="at least one reference"):
            score(["T"], [])
