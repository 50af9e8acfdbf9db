"""The import walls: who loads what, checked in fresh interpreters and by reading every import statement."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mingc"
HEAVY = ("torch._dynamo", "torch._inductor", "transformers", "onnx", "torch_tensorrt", "mingc.export")
IMPORT_ALL = """
import importlib, json, pkgutil, sys
root = importlib.import_module({root!r})
for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(code: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter that ran `code`, which prints them as JSON in its last line."""
    import json

    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def within(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module an import statement of the file names, wherever it stands; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it absolute"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def typing_only(path: Path) -> set[str]:
    """Modules that are imported under `if TYPE_CHECKING:` only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    found.add(statement.module)
                    found.update(f"{statement.module}.{alias.name}" for alias in statement.names)
                elif isinstance(statement, ast.Import):
                    found.update(alias.name for alias in statement.names)
    return found


def test_the_package_its_command_line_and_the_artifacts_load_without_torch() -> None:
    loaded = modules_after(
        "import json, sys, mingc, mingc.cli, mingc.report, mingc.errors, mingc.doctor, mingc.demo\n"
        "import mingc.artifacts.bundle, mingc.artifacts.contents, mingc.runtime.verify\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    for package in ("torch", "numpy", "rich", "safetensors"):
        assert not within(loaded, package)


def test_all_of_the_runtime_loads_no_compiler_and_no_export() -> None:
    bare = modules_after("import json, sys, torch; print(json.dumps(sorted(sys.modules)))")
    loaded = modules_after(IMPORT_ALL.format(root="mingc.runtime")) - bare
    for package in HEAVY:
        assert not within(loaded, package), f"mingc.runtime loads {package}"


def test_export_loads_no_runtime() -> None:
    loaded = modules_after(IMPORT_ALL.format(root="mingc.export"))
    assert not within(loaded, "mingc.runtime")


def test_the_cpp_engine_loader_is_there_and_loads_no_compiler() -> None:
    """The loader is private to torch; this fails first when a new torch moves it."""
    code = "import json, sys, torch; torch._C._aoti.AOTIModelPackageLoader; print(json.dumps(sorted(sys.modules)))"
    assert not within(modules_after(code), "torch._inductor")


@pytest.mark.parametrize("path", files("artifacts"), ids=lambda path: path.name)
def test_artifacts_use_the_standard_library_only(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        ours = name.startswith(("mingc.artifacts", "mingc.errors", "mingc.machine"))
        assert ours or top in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", files("kernels"), ids=lambda path: path.name)
def test_kernels_import_nothing_of_ours_but_kernels(path: Path) -> None:
    for name in imports(path):
        assert not name.startswith("mingc.") or name.startswith("mingc.kernels"), (
            f"{path.name} imports {name}"
        )


@pytest.mark.parametrize("path", files("dsp"), ids=lambda path: path.name)
def test_signal_code_needs_numpy_only(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        allowed = (
            top in sys.stdlib_module_names or top == "numpy" or name.startswith(("mingc.dsp", "mingc.errors"))
        )
        assert allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("folder, forbidden", [("export", "mingc.runtime"), ("runtime", "mingc.export")])
def test_the_two_halves_never_name_each_other(folder: str, forbidden: str) -> None:
    for path in files(folder):
        for name in imports(path):
            assert not (name + ".").startswith(forbidden + "."), f"{path} imports {name}"


def test_the_runtime_never_names_a_compiler() -> None:
    for path in files("runtime"):
        for name in imports(path) - typing_only(path):
            for package in ("torch._dynamo", "torch._inductor", "torch.export", "transformers", "onnx"):
                assert not (name + ".").startswith(package + "."), f"{path} imports {name}"
        source = path.read_text(encoding="utf-8")
        assert "torch.export" not in source and "torch.compile(" not in source, path


def test_only_the_command_line_knows_both_halves() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        named = imports(path)
        halves = {
            half
            for half in ("mingc.export", "mingc.runtime")
            if any((n + ".").startswith(half + ".") for n in named)
        }
        if halves == {"mingc.export", "mingc.runtime"}:
            assert path == PACKAGE / "cli.py"
