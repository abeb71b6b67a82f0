"""The token cache: the same ids as the tokenizers give, however a build ends."""

import json
import logging
import multiprocessing
import shutil

import numpy as np
import pytest

from transformer_jax.data import (
    Example,
    InvalidText,
    TokenCache,
    Vocabulary,
    build_vocabulary,
    make_tokenizer,
    open_cache,
)

EXAMPLES = [
    Example("tea", ("T IY",)),
    Example("beat", ("B IY T", "B EH T", "T")),
    Example("a", ()),
    Example("abate", ("AH B EY T", "EY T")),
]
COLUMNS = (
    "source_tokens",
    "source_offsets",
    "target_tokens",
    "target_offsets",
    "pair_example",
)
SOURCE = make_tokenizer(build_vocabulary("characters", [e.source for e in EXAMPLES]))
TARGET = make_tokenizer(
    build_vocabulary("symbols", [r for e in EXAMPLES for r in e.references])
)


def opened(root, examples=EXAMPLES, **changed):
    settings = {
        "name": "toy",
        "split": "train",
        "source_tokenizer": SOURCE,
        "target_tokenizer": TARGET,
    } | changed
    return open_cache(root, examples=lambda: examples, **settings)


def forbidden():
    raise AssertionError("the cache was built again")


def reopened(root):
    return open_cache(
        root,
        name="toy",
        split="train",
        examples=forbidden,
        source_tokenizer=SOURCE,
        target_tokenizer=TARGET,
    )


def texts(cache):
    """The examples that a cache holds, read back."""
    return [
        Example(
            SOURCE.decode(cache.source(number)),
            tuple(
                TARGET.decode(cache.target(pair))
                for pair in range(cache.num_pairs)
                if cache.example_of(pair) == number
            ),
        )
        for number in range(cache.num_examples)
    ]


def test_what_was_put_in_comes_out(tmp_path):
    for cache in (opened(tmp_path), reopened(tmp_path)):
        assert texts(cache) == EXAMPLES
        assert (cache.num_examples, cache.num_pairs) == (4, 6)
        assert cache.source_lengths.tolist() == [3, 4, 1, 5]
        assert cache.target_lengths.tolist() == [2, 3, 3, 1, 4, 2]
        owners = [cache.example_of(pair) for pair in range(6)]
        assert owners == [0, 1, 1, 1, 3, 3]
        assert TARGET.decode(cache.target(4)) == "AH B EY T"
        assert cache.source(0).dtype == cache.target(0).dtype == np.int32


def test_padded_rows_equal_single_ones(tmp_path):
    cache = opened(tmp_path)
    examples = np.array([3, -1, 0, 3])
    padded, lengths = cache.padded_sources(examples, 7, 99)
    assert padded.shape == (4, 7)
    assert lengths.tolist() == [5, 0, 3, 5]
    for row, length, example in zip(padded, lengths, examples, strict=True):
        assert row[length:].tolist() == [99] * (7 - length)
        if example >= 0:
            assert row[:length].tolist() == cache.source(example).tolist()
    padded, lengths = cache.padded_targets(np.array([4]), 4, 0)
    assert padded.tolist() == [cache.target(4).tolist()]
    with pytest.raises(ValueError, match="item 4 has 4 symbols, more than the 3"):
        cache.padded_targets(np.array([0, 4]), 3, 0)


def test_references_of_an_example_come_together(tmp_path):
    cache = opened(tmp_path)
    examples = np.array([1, -1, 2, 0, 3])
    padded, lengths = cache.padded_references(examples, 3, 5, 99)
    assert padded.shape == (5, 3, 5)
    assert padded.dtype == lengths.dtype == np.int32
    # -1 where there is no such reference, or no example.
    assert lengths.tolist() == [
        *([3, 3, 1], [-1, -1, -1], [-1, -1, -1]),
        *([2, -1, -1], [4, 2, -1]),
    ]
    for row, example in enumerate(examples):
        wanted = EXAMPLES[example].references if example >= 0 else ()
        for place in range(3):
            symbols = TARGET.encode(wanted[place]) if place < len(wanted) else []
            padding = [99] * (5 - len(symbols))
            assert padded[row, place].tolist() == [*symbols, *padding]
    assert cache.most_references == 3
    wider, more = cache.padded_references(examples, 4, 5, 99)
    np.testing.assert_array_equal(wider[:, :3], padded)
    np.testing.assert_array_equal(more[:, 3], -1)
    with pytest.raises(ValueError, match="an example has 3 references, not 2"):
        cache.padded_references(np.array([0, 1]), 2, 5, 99)
    with pytest.raises(ValueError, match="has 4 symbols, more than the 3"):
        cache.padded_references(np.array([3]), 3, 3, 99)


def test_the_longest_reference_of_each_example(tmp_path):
    examples = [*EXAMPLES, Example("a", ())]
    found = opened(tmp_path, examples).longest_references()
    assert found.tolist() == [2, 3, 0, 4, 0]


def test_equal_neighbours_are_counted_within_references(tmp_path):
    """Not across: one reference ends as the next one begins."""
    references = [("T T T", "T"), ("T IY IY", "IY T IY"), ("T T B B",)]
    examples = [Example("tea", each) for each in references]
    found = opened(tmp_path, examples).target_repeats
    assert found.tolist() == [2, 0, 1, 0, 2]
    assert found.dtype == np.int32


def test_sources_alone_need_no_reference(tmp_path):
    cache = opened(tmp_path, [Example("tea", ()), Example("a", ())])
    assert (cache.num_examples, cache.num_pairs) == (2, 0)
    padded, lengths = cache.padded_targets(np.array([-1, -1]), 2, 5)
    assert padded.tolist() == [[5, 5], [5, 5]]
    assert lengths.tolist() == [0, 0]


@pytest.mark.parametrize(("size", "bytes_each"), [(256, 1), (257, 2)])
def test_ids_are_stored_in_the_smallest_type(size, bytes_each, tmp_path):
    symbols = tuple(chr(0x4E00 + number) for number in range(size - 4))
    vocabulary = Vocabulary("characters", (*"PBEU", *symbols), 0, 1, 2, 3)
    cache = opened(
        tmp_path,
        [Example("".join(symbols), ())],
        source_tokenizer=make_tokenizer(vocabulary),
    )
    assert cache.source(0).tolist() == list(range(4, size))
    (path,) = tmp_path.glob("*/source_tokens.npy")
    assert np.load(path).itemsize == bytes_each


def test_every_part_of_the_key_has_its_own_cache(tmp_path):
    opened(tmp_path)
    other = make_tokenizer(build_vocabulary("characters", ["beat it"]))
    opened(tmp_path, name="other")
    opened(tmp_path, split="test")
    opened(tmp_path, source_tokenizer=other)
    wider = make_tokenizer(build_vocabulary("symbols", ["AH B EH EY IY T UW"]))
    opened(tmp_path, target_tokenizer=wider)
    assert len(list(tmp_path.iterdir())) == 5


def test_the_fingerprint_is_of_the_contents(tmp_path):
    one = opened(tmp_path / "one").fingerprint
    assert opened(tmp_path / "two").fingerprint == one
    assert opened(tmp_path / "three", EXAMPLES[::-1]).fingerprint != one
    # The same symbols, cut into other pairs.
    moved = [*EXAMPLES[:2], Example("a", ("AH B EY T",)), Example("abate", ("EY T",))]
    assert opened(tmp_path / "four", moved).fingerprint != one


def _truncate(folder):
    path = folder / "target_tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(folder):
    with (folder / "target_offsets.npy").open("ab") as file:
        file.write(b"\0" * 8)


def _flip_size(folder):
    path = folder / "cache.json"
    description = json.loads(path.read_text())
    description["bytes"]["source_tokens"] += 1
    path.write_text(json.dumps(description))


DAMAGES = {
    "truncated column": _truncate,
    "longer column": _lengthen,
    "flipped size": _flip_size,
    "missing column": lambda folder: (folder / "pair_example.npy").unlink(),
    "missing description": lambda folder: (folder / "cache.json").unlink(),
    "empty description": lambda folder: (folder / "cache.json").write_text(""),
    "other description": lambda folder: (folder / "cache.json").write_text("[1]"),
    "no folder": lambda folder: (shutil.rmtree(folder), folder.write_text("file")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_built_again_with_a_warning(damage, tmp_path, caplog):
    opened(tmp_path)
    (folder,) = tmp_path.iterdir()
    DAMAGES[damage](folder)
    with pytest.raises((OSError, ValueError)):
        TokenCache(folder)
    with caplog.at_level(logging.WARNING):
        assert texts(opened(tmp_path)) == EXAMPLES
    (record,) = caplog.records
    assert folder.name in record.getMessage()
    assert texts(reopened(tmp_path)) == EXAMPLES
    assert list(tmp_path.iterdir()) == [folder]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield EXAMPLES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_build_do_no_harm(tmp_path):
    opened(tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / f"{folder.name}.123.abcdef")
    (tmp_path / f"{folder.name}.123.abcdef" / "cache.json").unlink()
    assert texts(opened(tmp_path)) == EXAMPLES
    assert texts(reopened(tmp_path)) == EXAMPLES


def test_an_example_that_cannot_be_written_is_named(tmp_path):
    examples = [*EXAMPLES, Example("tea", ("T", "T Q"))]
    with pytest.raises(InvalidText, match=r"example 4 of toy-train.*'Q' at position 2"):
        opened(tmp_path, examples)


def test_of_two_builders_at_once_both_end_well(tmp_path):
    """The second one finishes while the first is still reading its examples."""

    def slow():
        yield EXAMPLES[0]
        assert texts(opened(tmp_path)) == EXAMPLES
        yield from EXAMPLES[1:]

    first = opened(tmp_path, slow())
    assert texts(first) == EXAMPLES
    assert len(list(tmp_path.iterdir())) == 1


def _build(root, barrier, answers):
    barrier.wait(60)
    answers.put(texts(opened(root)))


@pytest.mark.slow
def test_of_many_processes_at_once_all_end_well(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_build, args=(tmp_path, barrier, answers))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [EXAMPLES] * 3
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 1
