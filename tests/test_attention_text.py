"""One grammar names patterns and kinds of attention."""

import re

import pytest

from transformer_jax import patterns
from transformer_jax.attention import ATTENTION, Attention, parse, parse_layers


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "dot_product"])
def test_a_kind_alone_has_its_defaults(name):
    found = parse(f"{name}()")
    assert (found.kind, found.pattern, str(found)) == (name, None, f"{name}()")
    defaults = {word: each.default for word, each in ATTENTION[name].options.items()}
    assert found.options == defaults
    assert hash(found) == hash(parse(f" {name}( ) "))


@pytest.mark.parametrize(
    "text",
    [
        "linformer(rank=32, share=layer)",
        "favor(features=64, feature_map=relu)",
        "routing(clusters=8, window=16)",
        "sinkhorn(temperature=0.5)",
        "causal() & local(4)",
        "full()",
    ],
)
def test_text_and_value_are_inverses(text):
    found = parse(text)
    assert str(found) == text
    assert parse(str(found)) == found


def test_patterns_stand_under_dot_product():
    assert parse("full()") == Attention()
    assert parse("local(3)") == Attention(pattern=patterns.local(3))
    assert parse("sinkhorn(temperature=1)").options["temperature"] == 1.0
    layers = parse_layers("linear(); local(2)")
    assert [str(each) for each in layers] == ["linear()", "local(2)"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("linear() & local(3)", "linear(...) stands alone"),
        ("routing(8)", "routing takes clusters, window, by name"),
        ("routing(**{})", "by name"),
        ("routing(groups=8)", "no option 'groups', but clusters, window"),
        ("routing(clusters=0)", "clusters must be an integer of at least 1"),
        ("routing(clusters=2.0)", "clusters must be an integer"),
        ("routing(clusters=True)", "clusters must be an integer"),
        ("routing(clusters=None)", "clusters must be an integer"),
        ("sinkhorn(temperature=1e999)", "temperature must be a number"),
        ("linformer(share=all)", "share must be one of none, head, kv, layer"),
        ("liner()", "also linear, favor, linformer"),
        ("", "a pattern is missing"),
        ("dot_product()", "this is no pattern"),
        ("linear(", "was never closed"),
    ],
)
def test_what_does_not_parse_is_told_in_one_line(text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        parse(text)
    assert "\n" not in str(refused.value)
