"""Tokenizers and vocabularies: round trips, strictness, hostile text, files."""

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from etils import epath

from transformer_jax.data import (
    TOKENIZERS,
    InvalidText,
    Vocabulary,
    build_vocabulary,
    make_tokenizer,
)
from transformer_jax.data.tokenizers import SPECIALS

WORDS = ["tea", "Beat", "a-b", "d'or"]
PHONES = ["T IY1", "B IY1 T", "D AO1 R"]


def characters():
    return make_tokenizer(build_vocabulary("characters", WORDS))


def phones():
    return make_tokenizer(build_vocabulary("symbols", PHONES))


def test_ids_are_places_of_sorted_symbols_behind_the_special_ones():
    vocabulary = build_vocabulary("characters", WORDS)
    assert vocabulary.symbols == (*SPECIALS, *sorted("teab-d'or"))
    assert vocabulary.size == 13
    assert [vocabulary.symbols[i] for i in vocabulary.special_ids] == list(SPECIALS)
    ids = characters().encode("tea")
    assert ids.dtype == np.int32
    assert [vocabulary.symbols[i] for i in ids] == ["t", "e", "a"]


def test_the_order_of_texts_changes_nothing():
    assert build_vocabulary("symbols", PHONES) == build_vocabulary(
        "symbols", reversed(PHONES)
    )


@hypothesis.given(st.text(alphabet="teab-d'orTEABDOR", min_size=1))
def test_characters_round_trip_in_lower_case(text):
    tokenizer = characters()
    assert tokenizer.decode(tokenizer.encode(text)) == text.lower()


@hypothesis.given(st.lists(st.sampled_from(["T", "IY1", "B", "D", "AO1"]), min_size=1))
def test_symbols_round_trip(symbols):
    tokenizer = phones()
    ids = tokenizer.encode(" ".join(symbols))
    assert len(ids) == len(symbols)
    assert tokenizer.decode(ids) == " ".join(symbols)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \t\r\n\u00a0\u2003", "empty"),
        ("tex", r"unknown symbol 'x' at position 3"),
        ("\0tea", r"unknown symbol '\\x00' at position 1"),
        ("te\ud800", r"unknown symbol '\\ud800' at position 3"),
        ("t\U0001f600", r"unknown symbol '\\U0001f600' at position 2"),
        ("te\u0301a", r"unknown symbol '\\u0301' at position 3"),
        ("\u202etea", r"unknown symbol '\\u202e' at position 1"),
        ("\u05d0\u05d1", r"unknown symbol '\\u05d0' at position 1"),
        ("te a", r"unknown symbol ' ' at position 3"),
        ("<pad>", r"unknown symbol '<' at position 1"),
        ("tea\r", r"unknown symbol '\\r' at position 4"),
        ("t" * 9_999 + "z", r"unknown symbol 'z' at position 10000"),
        # Lower case makes this capital two characters; the place is the text's.
        ("teta\u0130", r"unknown symbol 'i' at position 5"),
    ],
)
def test_hostile_text_is_refused_with_its_place(text, message):
    with pytest.raises(InvalidText, match=f"^{message}$") as caught:
        characters().encode(text)
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T  IY1", r"unknown symbol '' at position 2"),
        (" T", r"unknown symbol '' at position 1"),
        ("T iy1", r"unknown symbol 'iy1' at position 2"),
        ("T\tIY1", r"unknown symbol 'T\\tIY1' at position 1"),
        ("T <pad>", r"unknown symbol '<pad>' at position 2"),
        ("T <unk>", r"unknown symbol '<unk>' at position 2"),
        ("Q" * 10_000, r"unknown symbol 'Q{20}'\.\.\. at position 1"),
    ],
)
def test_hostile_symbols_are_refused(text, message):
    with pytest.raises(InvalidText, match=f"^{message}$"):
        phones().encode(text)


@hypothesis.given(st.text(alphabet=st.characters(codec=None, categories=None)))
def test_any_text_gives_ordinary_ids_or_one_line(text):
    for tokenizer in (characters(), phones()):
        message, ids = "", []
        try:
            ids = tokenizer.encode(text).tolist()
        except InvalidText as error:
            message = str(error)
        assert bool(ids) != bool(message)
        assert message.isprintable()
        assert len(message) < 300
        assert set(ids).isdisjoint(tokenizer.vocabulary.special_ids)


def test_long_text_is_encoded():
    assert len(characters().encode("Tea" * 3_334)) == 10_002


def test_decode_spells_special_symbols_and_refuses_other_numbers():
    tokenizer = phones()
    vocabulary = tokenizer.vocabulary
    ids = [vocabulary.unk_id, *tokenizer.encode("T"), vocabulary.pad_id]
    assert tokenizer.decode(ids) == "<unk> T <pad>"
    assert tokenizer.decode([]) == ""
    for wrong in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=f"between 0 and {vocabulary.size - 1}"):
            tokenizer.decode([4, wrong])


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("symbols", "T <end>", "'<end>'"),
        ("symbols", "T  D", "''"),
        ("symbols", " ", "empty"),
        ("characters", "", "empty"),
    ],
)
def test_no_vocabulary_of_texts_that_cannot_be_written(kind, text, message):
    with pytest.raises(InvalidText, match=message):
        build_vocabulary(kind, ["T D", text])


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="unknown tokenizer 'words': one of char"):
        build_vocabulary("words", ["a"])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_saved_vocabulary_is_the_same(kind, tmp_path):
    vocabulary = build_vocabulary(kind, ["a \u00e9 \ud800 \U0001f600 \u4e09 \0"])
    path = tmp_path / "new folder" / "source.json"
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    assert Vocabulary.load(path).hash() == vocabulary.hash()
    assert [file.name for file in path.parent.iterdir()] == ["source.json"]


def test_a_vocabulary_may_lie_in_an_object_store(tmp_path):
    def opened(original, path, mode):
        assert path.startswith("gs://bucket/run/")
        return original(tmp_path / path.rpartition("/")[2], mode)

    vocabulary = build_vocabulary("characters", WORDS)
    path = epath.Path("gs://bucket/run/vocabulary/source.json")
    with epath.testing.mock_epath(open=opened, makedirs=lambda *_, **__: None):
        vocabulary.save(path)
        assert Vocabulary.load(path) == vocabulary
    assert [file.name for file in tmp_path.iterdir()] == ["source.json"]


def test_the_hash_tells_vocabularies_apart():
    one = build_vocabulary("characters", ["a b"])
    others = [
        build_vocabulary("characters", ["a c"]),
        build_vocabulary("symbols", ["a b"]),
        Vocabulary(one.kind, one.symbols, 3, 1, 2, 0),
    ]
    assert len({one.hash(), *(other.hash() for other in others)}) == 4
    assert len(one.hash()) == 64


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "source.json"
    old = build_vocabulary("characters", ["old"])
    old.save(path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        build_vocabulary("characters", ["new"]).save(path)
    assert Vocabulary.load(path) == old
    assert len(list(tmp_path.iterdir())) == 1


def _good() -> dict:
    return json.loads(build_vocabulary("characters", ["ab"]).to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        build_vocabulary("characters", ["ab"]).to_json()[:-7],
        "\u00e9",
        "[" * 100_000,
        "null",
        "{}",
        json.dumps(_good() | {"more": 1}),
        json.dumps(_good() | {"symbols": "<pad>"}),
        json.dumps(_good() | {"symbols": [*_good()["symbols"], 1]}),
        json.dumps(_good() | {"symbols": [*_good()["symbols"], "a"]}),
        json.dumps(_good() | {"pad_id": True}),
        json.dumps(_good() | {"pad_id": 6}),
        json.dumps(_good() | {"pad_id": -1}),
        json.dumps(_good() | {"pad_id": 1}),
        json.dumps(_good() | {"kind": "words"}),
    ],
)
def test_a_damaged_file_is_named(text, tmp_path):
    path = tmp_path / "source.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"source\.json is no vocabulary: "):
        Vocabulary.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source\.json"):
        Vocabulary.load(tmp_path / "source.json")
