"""Patterns taken apart: disjoint parts that together are the pattern."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pattern_oracle import ATOMS, COMPOUNDS, texts

from transformer_jax.attention.sparse.parts import partition
from transformer_jax.patterns import local, parse, per_head
from transformer_jax.patterns.ranges import EMPTY, FULL

LONG = "local(128) | strided(128) | global_tokens(4) | random_blocks(3, 64)"


def computed(part, rows, columns, offset):
    """How often each edge of the pattern is among the tiles of a part."""
    found = np.zeros((rows, columns), int)
    queries, keys = part.permutation
    for row, key_tiles, states in zip(
        part.rows, part.columns, part.states, strict=True
    ):
        i = queries[row]
        for tile, state in zip(key_tiles, states, strict=True):
            assert (tile == -1) == (state == EMPTY)
            if tile == -1:
                continue
            j = keys[tile]
            edges = (i >= 0)[:, None] & (j >= 0)[None, :]
            allowed = edges & part.pattern.allowed(i[:, None], j[None, :])
            assert state != FULL or allowed.all()
            t, s = np.nonzero(allowed)
            found[i[t] - offset, j[s]] += 1
    return found


def check(pattern, rows, columns, block, offset):
    parts = partition(pattern, rows, columns, block=block, query_offset=offset)
    total = sum(
        (computed(part, rows, columns, offset) for part in parts),
        np.zeros((rows, columns), int),
    )
    # No edge twice, none left out, none too many.
    wanted = pattern.dense(rows, columns, query_offset=offset)
    np.testing.assert_array_equal(total, wanted)


@pytest.mark.parametrize(
    ("rows", "columns", "block", "offset"),
    [(19, 23, 4, 0), (23, 17, 5, 9), (8, 8, 16, 0), (1, 7, 3, 6)],
)
@pytest.mark.parametrize("text", ATOMS + COMPOUNDS)
def test_parts_are_disjoint_and_complete(text, rows, columns, block, offset):
    check(parse(text), rows, columns, block, offset)


@settings(max_examples=60, deadline=None)
@given(
    text=texts(),
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    block=st.integers(1, 9),
    offset=st.integers(0, 8),
)
def test_parts_of_any_union_are_disjoint_and_complete(
    text, rows, columns, block, offset
):
    check(parse(text), rows, columns, block, offset)


@pytest.mark.parametrize("text", ["strided(4096)", "local(1, dilation=99999)"])
def test_periods_beyond_the_length_cost_nothing(text):
    (part,) = partition(parse(text), 64, 64, block=16)
    assert part.columns.shape == (4, 1)
    check(parse(text), 9, 11, 4, 3)


@pytest.mark.parametrize(
    "text",
    ["local(1073741824, 0)", "local(1048576, dilation=1048576)", "strided(5, 9999)"],
)
def test_windows_beyond_the_length_are_cut(text):
    check(parse(text), 9, 11, 4, 3)


def test_nothing_is_left_where_there_is_nothing():
    assert partition(local(2), 0, 5, block=4) == ()
    assert partition(local(2), 5, 0, block=4) == ()
    assert partition(parse("~full()"), 5, 7, block=4) == ()


@pytest.mark.parametrize(
    ("text", "waste"),
    [
        # In residues, chunks and lists of blocks, tiles are full.
        ("strided(128)", 1.01),
        # Half of a triangle is empty.
        ("causal() & strided(64)", 2.0),
        ("chunked(128)", 1.01),
        ("random_blocks(3, 64)", 1.01),
        ("global_tokens(4)", 1.01),
        ("fixed(128, 8)", 1.03),
        # A band has triangles at its ends.
        ("local(128)", 1.51),
        (LONG, 1.25),
    ],
)
def test_tiles_hold_few_edges_but_those_of_the_pattern(text, waste):
    length = 4096
    parts = partition(parse(text), length, length, block=128)
    edges = np.count_nonzero(parse(text).dense(length, length))
    assert sum(part.edges for part in parts) <= waste * edges


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="block must be at least 1, not 0"):
        partition(local(1), 3, 3, block=0)
    with pytest.raises(ValueError, match=r"of each apart, of_head\(n\)"):
        partition(per_head((local(1),)), 3, 3, block=2)
