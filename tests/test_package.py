"""What a stranger gets: quick imports, checked shapes, no paths of another machine."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import method_table
import pytest

from transformer_jax.attention import ATTENTION
from transformer_jax.commands import COMMANDS
from transformer_jax.data import SOURCES
from transformer_jax.decoding import STRATEGIES
from transformer_jax.objectives import OBJECTIVES

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "transformer_jax").rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


@pytest.mark.parametrize("module", ["attention", "decoding", "losses"])
def test_maths_imports_jax_only(module):
    code = f"import sys, transformer_jax.{module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jax" in loaded
    assert not loaded & {"tensorflow", "matplotlib", "flax", "optax", "orbax"}
    assert "tensorflow_datasets" not in loaded


def test_shapes_are_checked_under_test(request):
    option = request.config.getoption("--jaxtyping-packages")
    *names, checker = option.split(",")
    assert checker == "beartype.beartype"
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"pyproject.toml names {name}, which does not exist"
        assert type(spec.loader).__module__.startswith("jaxtyping"), name


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_no_path_of_a_machine():
    listing = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    # Put together here, so that this file passes its own test.
    places = [f"/{folder}/" for folder in ("work", "tmp/w", "home", "root")]
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.name} names {place}"
        for path in files
        if path.is_file()
        for place in places
        if place in path.read_text(errors="replace")
    ]
    assert found == []


def test_readme_names_every_module_and_member():
    text = (ROOT / "README.md").read_text()
    tree = text.partition("\ntransformer_jax/\n")[2].partition("```")[0]
    parts = {path.relative_to(ROOT / "transformer_jax").parts for path in MODULES}
    modules = {f"{names[0]}/" if names[1:] else names[0] for names in parts}
    assert modules - {*tree.split()} == {"__init__.py"}
    members = text.partition("## What there is")[2].partition("## ")[0]
    for name in [*ATTENTION, *OBJECTIVES, *STRATEGIES, *SOURCES]:
        assert f"`{name}`" in members
    for command in COMMANDS:
        assert f"transformer-jax {command} " in text


def lines_without_docstring(node: ast.AST) -> int:
    length = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is None:
        return length
    return length - (node.body[0].end_lineno - node.body[0].lineno + 1)


def test_files_and_functions_stay_short():
    long = []
    for path in MODULES:
        text = path.read_text()
        if text.count("\n") > LONGEST_FILE:
            long.append(f"{path.name} has {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = lines_without_docstring(node)
                if lines > LONGEST_FUNCTION:
                    long.append(f"{path.name}: {node.name} has {lines} lines")
    assert MODULES
    assert long == []


def test_readme_holds_the_attention_table():
    text = method_table.README.read_text()
    assert method_table.written(text) == text, "run python tests/method_table.py"
