"""Imports between the packages of metalcore form no cycle: each can be read with those below it alone.

A package here is a directory or a module directly under metalcore/, or under metalcore/msl/. Imports in functions
count, since they only hide a cycle from Python. Imports for type checkers do not count, nor does the extension _C,
which imports nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "metalcore"

Edges = dict[tuple[str, str], list[str]]  # the places of an edge's imports


def imported(node: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """The modules that code imports, and the lines. `from x import y` gives x.y, whatever y is.

    Args:
        package: in which relative imports are resolved.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).split(".")[-1] == "TYPE_CHECKING":
            yield from imported(ast.Module(child.orelse, []), package)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")[: 1 - child.level or None] if child.level else []
            base = ".".join([*parents, *filter(None, [child.module])])
            yield from ((f"{base}.{alias.name}", child.lineno) for alias in child.names)
        else:
            if isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[-1] == "import_module":
                if isinstance(child.args[0], ast.Constant):
                    yield child.args[0].value, child.lineno
            yield from imported(child, package)


def edges_between(root: Path, name: str) -> Edges:
    """The imports between the parts of a package. Its own __init__ is the part "__init__"."""
    parts = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    edges: Edges = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        package = ".".join([name, *inside.parts[:-1]])
        for module, line in imported(ast.parse(path.read_text()), package):
            if module.startswith(f"{name}."):
                part = module.removeprefix(f"{name}.").split(".")[0]
                if part == "_C":
                    continue
                source, target = inside.with_suffix("").parts[0], part if part in parts else "__init__"
                if source != target:
                    edges[source, target].append(f"{path.relative_to(root.parent)}:{line}")
    return edges


def cycle(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The edges of a shortest cycle; none where there is no cycle."""
    targets = defaultdict(list)
    for source, target in sorted(edges):
        targets[source].append(target)
    shortest: list[str] = []
    for start in targets:
        paths, reached = [[start]], {start}
        for path in paths:  # it grows: a breadth-first search
            for target in targets.get(path[-1], ()):
                if target == start and (not shortest or len(path) < len(shortest)):
                    shortest = path
                elif target not in reached:
                    reached.add(target)
                    paths.append([*path, target])
    return list(zip(shortest, shortest[1:] + shortest[:1]))


def show(edges: Edges, chosen: list[tuple[str, str]]) -> str:
    lines = (f"  {source} imports {target}: {', '.join(edges[source, target])}" for source, target in chosen)
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "least"), [("metalcore", 100), ("metalcore.msl", 9)])
def test_packages_form_no_cycle(name, least):
    edges = edges_between(PACKAGE.parent.joinpath(*name.split(".")), name)
    assert len(edges) >= least
    closing = cycle(set(edges))
    assert not closing, f"a cycle of imports between packages:\n{show(edges, closing)}"


def test_a_cycle_is_found(tmp_path):
    package = tmp_path / "example"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text("from .high import run\n")
    (package / "high.py").write_text("from .low.parts import first\nfrom . import _C, missing\n")
    (package / "low" / "parts.py").write_text("""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ..types import Value
else:
    from .. import types
def first():
    from ..high import run
def second():
    importlib.import_module("example.types")
""")
    (package / "types.py").write_text("")
    edges = edges_between(package, "example")
    assert edges == {
        ("__init__", "high"): ["example/__init__.py:1"],
        ("high", "low"): ["example/high.py:1"],
        ("high", "__init__"): ["example/high.py:2"],
        ("low", "types"): ["example/low/parts.py:6", "example/low/parts.py:10"],
        ("low", "high"): ["example/low/parts.py:8"],
    }
    assert cycle(set(edges)) == [("__init__", "high"), ("high", "__init__")]
    assert cycle(set(edges) - {("high", "__init__"), ("low", "high")}) == []
