"""House style: module docstrings, file names, no swallowed errors, no unpickling of data, stdout for results only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mingc

PACKAGE = Path(mingc.__file__).parent
CONFORMANCE = PACKAGE.parent / "conformance"
DATA = Path(__file__).parents[1] / "data"
FILES = [path for folder in (PACKAGE, CONFORMANCE) for path in sorted(folder.rglob("*.py"))]
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "process", "base_utils"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_has_a_docstring_and_a_specific_name(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if source.strip():
        assert ast.get_docstring(tree(path)), "no module docstring"
    assert path.stem not in VAGUE_NAMES, "name a file for the noun it owns"
    assert "TODO" not in source and "FIXME" not in source and "XXX" not in source


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_error_is_swallowed(path: Path) -> None:
    """`except Exception` must raise, or use the error by name."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"line {node.lineno}: bare except"
        if isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            used = node.name is not None and any(
                isinstance(inner, ast.Name) and inner.id == node.name for inner in ast.walk(node)
            )
            assert raises or used, f"line {node.lineno}: except {node.type.id} ignores the error"


def find_unpickling(source: str) -> list[str]:
    """Uses of pickle or of functions that unpickle, as `line N: name`.

    The rule: data from files or from the network is never unpickled. A process pool pickles what it sends to its own
    processes, so only export/process_pool.py may have one, and bench/load.py its connections.
    """
    found = []
    modules = {"torch": "torch", "numpy": "numpy"}
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            modules.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{modules.get(node.value.id, node.value.id)}.{node.attr}"]
        elif isinstance(node, ast.Attribute):
            names = [f"?.{node.attr}"]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = ["allow_pickle"]
        found += [f"line {getattr(node, 'lineno', '?')}: {name}" for name in names if unpickles(name)]
    return found


def unpickles(name: str) -> bool:
    """Whether the dotted `name` is pickle, or a function that may unpickle."""
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    return (
        first in PICKLE_MODULES
        or name in PICKLE_FUNCTIONS
        or name == "allow_pickle"
        or last in ("ProcessPoolExecutor", "broadcast_object_list", "all_gather_object", "read_pickle")
        or name.startswith(("multiprocessing.connection", "multiprocessing.managers", "multiprocessing.Pool"))
    )


PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLE_FUNCTIONS = {"torch.load", "torch.save", "torch.package", "torch.hub", "numpy.load", "numpy.save"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_data_is_unpickled(path: Path) -> None:
    found = find_unpickling(path.read_text(encoding="utf-8"))
    if name_of(path) == "export/process_pool.py":
        found = [each for each in found if "ProcessPoolExecutor" not in each]
    if name_of(path) == "bench/load.py":
        found = [each for each in found if "multiprocessing.connection" not in each]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy as np\nnp.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load",
        "from pickle import loads as read",
        "def f():\n    import shelve",
        "read(path, allow_pickle=True)",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import torch.distributed as dist\ndist.broadcast_object_list(values)",
        "from multiprocessing.connection import Client",
    ],
)
def test_the_rule_finds_unpickling(source: str) -> None:
    assert find_unpickling(source)


def test_the_rule_allows_json_and_safetensors() -> None:
    source = "import json, torch\nfrom safetensors.torch import load_file\njson.loads(text)\ntorch.randn(3)"
    assert not find_unpickling(source)


def test_reading_checkpoints_and_goldens_unpickles_nothing() -> None:
    """The interpreter's audit event of the unpickler, while files of tests/data are read."""
    code = """
import sys
from pathlib import Path
import torch, numpy, safetensors.numpy, safetensors.torch, tokenizers
from mingc.export.checkpoint import open_checkpoint
from conformance.golden_files import read_document, read_tensors
seen = []
sys.addaudithook(lambda event, arguments: seen.append(arguments) if event == "pickle.find_class" else None)
data = Path(sys.argv[1])
for path in sorted(data.glob("*.safetensors")):
    assert read_tensors(path)
for path in sorted(data.glob("*.json")):
    assert read_document(path)
open_checkpoint(data / "tiny-ming")
assert not seen, seen
import pickle
pickle.loads(pickle.dumps(Path("x")))
assert seen, "the hook sees no unpickling"
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(DATA)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_command_line_writes_stdout(path: Path) -> None:
    """stdout carries data: results, and the address of a server that is ready. Messages go to stderr."""
    if name_of(path) in ("console/report.py", "commands/serve.py", "demo.py"):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert any(keyword.arg == "file" for keyword in node.keywords), (
                f"line {node.lineno}: print to stdout"
            )
