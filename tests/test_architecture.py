"""Which module may import which. The rules are read off the syntax trees, imports inside functions included."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

import batchgen
from batchgen.errors import RowErrorCode
from batchgen.io.schemas import RESULTS

ROOT = Path(batchgen.__file__).parent
README = ROOT.parent / "README.md"
PLANNING = ("scheduler", "planner", "prompt_table", "prefix_tree", "block_manager", "cache_tiers")
NO_NUMBA = tuple(f"batchgen.engine.{name}" for name in PLANNING)
LEAVES = ("batchgen.report", "batchgen.compare", "batchgen.compare_view", "batchgen.session", "batchgen.integrations")
BELOW_ENGINE = ("batchgen.text", "batchgen.io", "batchgen.models", "batchgen.spec")
Graph = Mapping[str, frozenset[str]]


def import_graph(root: Path) -> Graph:
    """Every module of the package in `root` with the full names of all that it imports."""
    files = {module_name(root, path): path for path in sorted(root.rglob("*.py"))}
    return {name: frozenset(imported_names(path, name, files)) for name, path in files.items()}


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute_source(node, name, path)
            # `from package import module` imports the module; of `from module import name` only the module counts.
            for full in (f"{source}.{alias.name}" for alias in node.names):
                yield full if full in modules else source


def absolute_source(node: ast.ImportFrom, name: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def reachable(graph: Graph, start: str) -> set[str]:
    """All that is loaded with `start`: what it imports, what those import, and the packages around them."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        waiting += graph.get(module, ())
        waiting += [module.rpartition(".")[0]] if "." in module else []
    return seen


def violations(graph: Graph) -> list[str]:
    """One line for each import that breaks a rule."""
    edges = [(module, target) for module, targets in graph.items() for target in sorted(targets)]
    return [f"{m} imports {t}" for m, t in edges if not allowed(m, t)] + [
        f"{module} loads numba" for module in NO_NUMBA if module in graph and "numba" in reachable(graph, module)
    ]


def allowed(module: str, target: str) -> bool:
    if within(target, "batchgen.cli"):
        return within(module, "batchgen.__main__")
    if within(target, "batchgen.job_plan", "batchgen.plan_view"):
        return within(module, "batchgen.cli", "batchgen.plan_view")
    if within(target, *LEAVES):
        return within(module, "batchgen.cli", *LEAVES)
    if within(module, "batchgen.kernels") and within(target, "batchgen"):
        return within(target, "batchgen.kernels")
    if within(module, "batchgen.engine"):
        return not within(target, "batchgen.io")
    if within(module, *BELOW_ENGINE) and within(target, "batchgen.engine"):
        return target == "batchgen.engine.types"
    return True


def test_the_package_keeps_the_import_rules():
    graph = import_graph(ROOT)
    assert "batchgen.engine.types" in graph["batchgen.spec"]  # the graph is not empty by mistake
    assert violations(graph) == []


def write_package(folder: Path, files: Mapping[str, str]) -> Path:
    root = folder / "batchgen"
    for name, text in {"__init__.py": "", "engine/__init__.py": "", "kernels/__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"kernels/a.py": "import batchgen.errors"}, "batchgen.kernels.a imports batchgen.errors"),
        ({"kernels/a.py": "from ..errors import X", "errors.py": ""}, "batchgen.kernels.a imports batchgen.errors"),
        ({"kernels/a.py": "from .. import errors", "errors.py": ""}, "batchgen.kernels.a imports batchgen.errors"),
        ({"engine/a.py": "def f():\n    from batchgen.io import table"}, "batchgen.engine.a imports batchgen.io"),
        ({"runner.py": "from batchgen import cli", "cli.py": ""}, "batchgen.runner imports batchgen.cli"),
        (
            {"runner.py": "from batchgen import job_plan", "job_plan.py": ""},
            "batchgen.runner imports batchgen.job_plan",
        ),
        ({"runner.py": "from batchgen import report", "report.py": ""}, "batchgen.runner imports batchgen.report"),
        ({"io/a.py": "import batchgen.compare"}, "batchgen.io.a imports batchgen.compare"),
        ({"text/a.py": "import batchgen.engine.engine"}, "batchgen.text.a imports batchgen.engine.engine"),
        ({"engine/planner.py": "import numba.cuda"}, "batchgen.engine.planner loads numba"),
        (
            {"engine/scheduler.py": "from batchgen import kernels", "kernels/__init__.py": "import numba"},
            "batchgen.engine.scheduler loads numba",
        ),
        (
            {"engine/planner.py": "import batchgen.kernels.b", "kernels/__init__.py": "from numba import njit"},
            "batchgen.engine.planner loads numba",
        ),
    ],
)
def test_each_rule_is_noticed(tmp_path, files, expected):
    assert violations(import_graph(write_package(tmp_path, files))) == [expected]


def test_allowed_imports_are_not_refused(tmp_path):
    files = {
        "kernels/b.py": "from . import c\nimport numba",
        "kernels/c.py": "from batchgen.kernels.b import f",
        "engine/engine.py": "import batchgen.kernels.b",
        "engine/types.py": "import numpy",
        "io/a.py": "from batchgen.engine.types import X\nfrom batchgen.errors import Y",
        "__main__.py": "from batchgen.cli import main",
        "cli.py": "from batchgen.compare import f",
        "compare.py": "from batchgen.report.figures import f",
    }
    assert violations(import_graph(write_package(tmp_path, files))) == []


@pytest.mark.parametrize("module", ["batchgen", "batchgen.cli", "batchgen.spec"])
def test_heavy_libraries_are_loaded_on_use_only(module):
    code = f"import sys, {module}; print(*{{'numba', 'polars', 'pyarrow', 'tokenizers'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_readme_explains_every_error_code_and_every_column() -> None:
    text = README.read_text("utf-8")
    codes = text.split("| error code |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", codes, re.M) == list(get_args(RowErrorCode))
    columns = text.split("| column | type | |")[1].split("\n\n")[0]
    named = [name for cell in re.findall(r"^\| (`[^|]*) \|", columns, re.M) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(RESULTS.names)
