"""The house style that a machine can hold: sizes, docstrings, errors that are not swallowed, no pickle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mingc

PACKAGE = Path(mingc.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "process", "base_utils"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_what_it_is(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if source.strip():
        assert ast.get_docstring(tree(path)), "a module starts with what it does"
    assert path.stem not in VAGUE_NAMES, "name a file for the noun it owns"
    assert "TODO" not in source and "FIXME" not in source and "XXX" not in source


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_error_is_swallowed(path: Path) -> None:
    """`except Exception` must raise, end the process, or hand the error on by name."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        if isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            used = node.name is not None and any(
                isinstance(inner, ast.Name) and inner.id == node.name for inner in ast.walk(node)
            )
            assert raises or used, f"line {node.lineno}: except {node.type.id} goes on without the error"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_unpickles(path: Path) -> None:
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in ("pickle", "cPickle", "dill", "joblib", "marshal", "shelve"), (
                name
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in ("load", "save"), f"line {node.lineno}: torch.{node.attr}"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", "allow_pickle"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_stdout_is_written_by_the_command_line_only(path: Path) -> None:
    """stdout is data: results, and the address that a server prints when it is ready. Talk goes to stderr."""
    if path.name in ("report.py", "cli.py", "demo.py", "server.py"):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert any(keyword.arg == "file" for keyword in node.keywords), (
                f"line {node.lineno}: print to stdout"
            )
