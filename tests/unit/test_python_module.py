"""Processes of Python modules import nothing from the working folder, and only `module_command` starts them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

import mingc
from mingc.python_module import module_command, module_environment


def test_a_module_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "signal", "mingc", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        module_command("mingc", "--version"), env=module_environment(), capture_output=True, text=True
    )
    assert (done.returncode, mingc.__version__ in done.stdout) == (0, True), done.stderr


def test_a_module_is_found_where_its_parent_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_beside.py").write_text("print('found')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(
        module_command("found_beside"), env=module_environment(), capture_output=True, text=True
    )
    assert done.stdout == "found\n", done.stderr


def test_all_modules_are_started_by_it() -> None:
    root = Path(mingc.__file__).parent
    starts = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "-m"
    }
    assert starts == {"python_module.py"}
