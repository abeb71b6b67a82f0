"""Pictures: a PNG and what it says, or one line that says why not."""

import json

import pytest
from command_line import assert_refused
from toy import call

from transformer_jax.patterns import PATTERNS, parse
from transformer_jax.visualize import GALLERY


def test_gallery_shows_every_constructor(tmp_path):
    path = tmp_path / "gallery.png"
    called = call("draw", "patterns", f"--output={path}", "--length=20", "--block=5")
    assert called.code == 0, called.err
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = json.loads(called.out)
    assert printed["output"] == str(path)
    assert [each["pattern"] for each in printed["patterns"]] == [
        str(parse(text)) for text in GALLERY.values()
    ]
    for name in {*PATTERNS} - {"per_head"}:
        assert any(f"{name}(" in text for text in GALLERY.values())
    for each in printed["patterns"]:
        assert each["density"] <= each["blocks"] <= 1


def test_own_patterns_are_drawn(tmp_path):
    path = tmp_path / "own.png"
    flags = ["--patterns=local(2); causal() & strided(4)", f"--output={path}"]
    called = call("draw", "patterns", *flags, "--length=16", "--block=4")
    one, other = json.loads(called.out)["patterns"]
    assert one["density"] == round(parse("local(2)").density(16, 16), 4)
    # Sixteen places in four residues: blocks of a triangle each, ten of sixteen.
    assert (other["blocks"], other["computed"]) == (0.625, 0.25)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["which picture?", "draw patterns"]),
        (["heads"], ["'heads' is no picture"]),
        (["patterns", "--patterns=lokal(2)"], ["--patterns", "column 1", "local"]),
        (["patterns", "--patterns=per_head((full(),))"], ["one by one"]),
        (["patterns", "--length=0"], ["length"]),
        (["patterns", "--output={tmp}/none/x.png"], ["--output", "No such file"]),
    ],
)
def test_what_cannot_be_drawn_is_refused(flags, words, tmp_path):
    called = call("draw", *(flag.format(tmp=tmp_path) for flag in flags))
    assert_refused(called, *words)
