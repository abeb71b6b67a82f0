"""The examples in docstrings and in the README run and say the truth."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "transformer_jax").rglob("*.py"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_examples_of_the_readme_run():
    text = (ROOT / "README.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert "assert " in example
        exec(example, names)
    assert "output" in names


def test_wrong_example_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_example.py").write_text('""">>> 1 + 1\n3\n"""')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError):
        test_examples_run("wrong_example")
    assert "Expected:\n    3" in capsys.readouterr().out
