"""Static patterns: edges, block states, algebra, text and pictures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pattern_oracle import ATOMS, COMPOUNDS, dense, texts

from transformer_jax import patterns
from transformer_jax.patterns import (
    causal,
    chunked,
    full,
    local,
    parse,
    per_head,
    rule,
    strided,
)

pytestmark = pytest.mark.usefixtures("strict")

ROWS, COLUMNS, OFFSET = 19, 23, 4


def nearer(i, j, reach):
    """A rule for the tests."""
    return abs(i - j) < reach


@functools.cache
def edges(text):
    """What the oracle says, `[ROWS, COLUMNS]`."""
    return dense(text, ROWS, COLUMNS, OFFSET)


@pytest.mark.parametrize("text", ATOMS + COMPOUNDS)
def test_edges_are_those_of_the_table(text):
    pattern = parse(text)
    found = pattern.dense(ROWS, COLUMNS, query_offset=OFFSET)
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, edges(text))
    # As arrays of JAX, in 32 bits and while tracing, they are the same.
    i = jnp.arange(ROWS, dtype=jnp.int32)[:, None] + OFFSET
    j = jnp.arange(COLUMNS, dtype=jnp.int32)[None, :]
    traced = jnp.broadcast_to(jax.jit(pattern.allowed)(i, j), found.shape)
    np.testing.assert_array_equal(traced, found)
    assert isinstance(pattern.allowed(np.arange(3), np.arange(3)), np.ndarray)


@pytest.mark.parametrize("text", ATOMS + COMPOUNDS)
def test_text_and_pattern_are_inverses(text):
    pattern = parse(text)
    assert parse(str(pattern)) == pattern
    assert hash(parse(str(pattern))) == hash(pattern)
    assert str(parse(str(pattern))) == str(pattern)


@settings(max_examples=60, deadline=None)
@given(text=texts(), height=st.integers(1, 9), width=st.integers(1, 9))
def test_block_states_never_contradict_the_edges(text, height, width):
    pattern = parse(text)
    assert parse(str(pattern)) == pattern
    allowed = pattern.dense(ROWS, COLUMNS, query_offset=OFFSET)
    rows = np.arange(0, ROWS, height)[:, None]
    columns = np.arange(0, COLUMNS, width)[None, :]
    row_stops = np.minimum(rows + height, ROWS)
    column_stops = np.minimum(columns + width, COLUMNS)
    states = pattern.block_states(
        rows + OFFSET, row_stops + OFFSET, columns, column_stops
    )
    assert states.dtype == np.int8
    for (r, c), state in np.ndenumerate(states):
        tile = allowed[rows[r, 0] : row_stops[r, 0], columns[0, c] : column_stops[0, c]]
        truth = 2 * tile.all() if tile.all() == tile.any() else 1
        # An atom knows; where parts of a compound meet, 1 may stand for either.
        assert state == truth or (state == 1 and text not in ATOMS)


def test_a_rectangle_without_edges_is_empty():
    assert causal().block_states(3, 3, 0, 2) == 0
    assert causal().block_states(5, 7, 2, 2) == 0
    assert causal().block_states([5, 0], [7, 2], 0, 4).tolist() == [2, 1]
    with pytest.raises(TypeError, match="positions must be integers, not float64"):
        causal().block_states(0, 2.5, 0, 1)


def test_algebra_makes_one_pattern_of_nested_ones():
    one, other, third = local(2), causal(), strided(3)
    assert (one | other) | third == one | (other | third)
    assert ~~one == one
    assert str(one & (other | third)) == "local(2) & (causal() | strided(3))"
    with pytest.raises(TypeError):
        one & "causal()"


def test_operators_distribute_over_heads():
    heads = per_head((local(1), local(2)))
    assert heads & causal() == per_head((local(1) & causal(), local(2) & causal()))
    assert causal() | heads == per_head((causal() | local(1), causal() | local(2)))
    assert ~heads == per_head((~local(1), ~local(2)))
    assert parse(str(heads)) == heads
    found = heads.dense(5, 6, num_heads=2)
    assert found.shape == (2, 5, 6)
    np.testing.assert_array_equal(found[1], local(2).dense(5, 6))
    assert heads.block_states(0, 3, 0, 3, head=1) == 2
    assert heads.block_states(0, 3, 0, 3, head=0) == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: per_head(()), "a pattern for each head, not none"),
        (lambda: per_head((per_head((local(1),)),)), "within per_head"),
        (
            lambda: per_head((local(1),) * 2) & per_head((local(1),) * 3),
            "2 and 3 heads do not combine",
        ),
        (
            lambda: per_head((local(1),) * 2).dense(2, 2, num_heads=3),
            "2 heads, but there are 3",
        ),
        (lambda: local(-1), "left must be at least 0, not -1"),
        (lambda: local(1, dilation=0), "dilation must be at least 1"),
        (lambda: strided(0), "stride must be at least 1"),
        (lambda: patterns.fixed(3, 4), "summary must be at most the block, 3, not 4"),
        (lambda: patterns.global_tokens(()), "at least one position"),
        (lambda: patterns.global_tokens((2, -1)), "must be at least 0, not -1"),
        (lambda: rule(lambda i, j: i > j), "a function of a module, not"),
        (lambda: causal().dense(-1, 3), "query_length must be at least 0"),
    ],
)
def test_what_is_no_pattern_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("value", [1.0, "3", True, None])
def test_sizes_are_integers(value):
    with pytest.raises(TypeError, match="must be an integer, not"):
        patterns.chunked(value)


def test_equal_patterns_are_one_value_to_jit():
    traces = []

    @functools.partial(jax.jit, static_argnames="pattern")
    def run(x, pattern):
        traces.append(pattern)
        return x

    for _ in range(2):
        run(jnp.zeros(1), pattern=causal() & (local(3) | rule(nearer, 2)))
    assert len(traces) == 1


def test_a_rule_is_what_its_function_says():
    pattern = rule(nearer, 3)
    np.testing.assert_array_equal(pattern.dense(6, 7), local(2).dense(6, 7))
    assert pattern.block_states(0, 1, 5, 6) == 1
    assert pattern == rule(nearer, 3) != rule(nearer, 2)
    assert str(pattern).endswith("test_patterns.nearer, 3)")
    with pytest.raises(ValueError, match="column 1"):
        parse(str(pattern))


def test_random_blocks_draw_distinct_earlier_blocks_whatever_the_length():
    count, block, blocks = 3, 2, 40
    pattern = patterns.random_blocks(count, block, seed=5)
    drawn = np.stack(pattern.drawn(np.arange(blocks)), 1)
    for b, row in enumerate(drawn):
        chosen = row[row >= 0]
        assert len(set(chosen)) == len(chosen) == min(count, b)
        assert (chosen < b).all()
    whole = pattern.dense(blocks * block, blocks * block)
    np.testing.assert_array_equal(whole, whole.T)
    np.testing.assert_array_equal(pattern.dense(31, 17), whole[:31, :17])
    assert (patterns.random_blocks(count, block, seed=6).dense(80, 80) != whole).any()
    # Nothing is drawn more often than chance allows: 37 blocks of 3 draws each.
    assert np.bincount(drawn[drawn >= 0]).max() < 20


@pytest.mark.parametrize("block", [None, 1, 4, 50])
def test_density_counts_edges_or_tiles(block):
    pattern = per_head((causal() & local(3), strided(5)))
    found = pattern.density(ROWS, COLUMNS, block=block)
    size = block or 1
    tiles = [
        [
            edges[r : r + size, c : c + size].any()
            for r in range(0, ROWS, size)
            for c in range(0, COLUMNS, size)
        ]
        for edges in pattern.dense(ROWS, COLUMNS)
    ]
    assert found == pytest.approx(np.mean(tiles), abs=1e-12)
    assert pattern.density(0, 3) == 0


def test_a_drawing_has_a_line_a_query():
    assert (causal() & local(1)).draw(3, 4) == "#...\n##..\n.##."
    assert per_head((local(0), causal())).draw(2, 2) == "#.\n.#\n\n#.\n##"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("local(2", "column 6", "was never closed"),
        ("  local(2", "column 6, at '(2'", "was never closed"),
        ("per_head((full(),)) & per_head((full(), full()))", "column 1", "1 and 2"),
        ("chunked(8589934592)", "column 1", "size must be below 2^31"),
        ("lokal(2)", "column 1, at 'lokal(2)'", "legal names are causal, chunked"),
        ("local(2) | window(3)", "column 12, at 'window(3)'", "global_tokens"),
        ("local()", "column 1", "left"),
        ("causal() & local(2, dilation=0)", "column 12", "dilation must be at least 1"),
        ("local(2.5)", "column 7, at '2.5)'", "an argument is an integer, not 2.5"),
        ("causal() and local(2)", "column 1", "by &, | and ~, not by and, or, not"),
        ("not causal()", "column 1", "by &, | and ~, not by and, or, not"),
        ("causal", "column 1", "this is no pattern"),
        ("", "column 1, at its end", "a pattern is missing; full()"),
        ("__import__('os')", "column 1", "legal names"),
        ("per_head((local(1), per_head((full(),))))", "column 1", "within per_head"),
        ("local(1, 2, 3, 4)", "column 1", "local"),
    ],
)
def test_a_text_with_an_error_shows_the_place_and_the_names(text, place, words):
    with pytest.raises(ValueError, match="pattern") as caught:
        parse(text)
    message = str(caught.value)
    assert place in message
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["~" * 3000 + "causal()", "causal() & " * 3000 + "causal()"]
)
def test_a_text_without_end_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="nested too deeply") as caught:
        parse(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (causal(), True),
        (local(3), False),
        (local(3, 0), True),
        (local(3) & causal(), True),
        (local(3, 0) | strided(2), False),
        (local(3, 0) | causal(), True),
        (~causal(), False),
        (~(~causal() | strided(2)), True),
        (~(~causal() & strided(2)), False),
        (~(full() & ~causal()), True),
        (strided(3, 0) | chunked(1), True),
        (chunked(2), False),
        (per_head((causal(), local(1, 0))), True),
    ],
)
def test_what_is_plainly_causal_reaches_nothing_ahead(pattern, expected):
    assert pattern.is_causal == expected
    if expected:
        assert not np.triu(pattern.dense(9, 9), 1).any()


def test_a_pattern_has_no_truth():
    """Or `local(3) and causal()` would be causal() without a word."""
    with pytest.raises(TypeError, match=r"join patterns by &, \| and ~"):
        _ = local(3) and causal()
