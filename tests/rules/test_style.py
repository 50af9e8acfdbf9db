"""House style: module docstrings, file names, no swallowed errors, no unpickling of data, stdout for results only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import mingc

PACKAGE = Path(mingc.__file__).parent
CONFORMANCE = PACKAGE.parent / "conformance"
DATA = Path(__file__).parents[1] / "data"
FILES = [path for folder in (PACKAGE, CONFORMANCE) for path in sorted(folder.rglob("*.py"))]
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "process", "base_utils"}


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source(path)))]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent).as_posix()


def test_every_module_has_a_docstring() -> None:
    assert not [
        name_of(path) for path in FILES if source(path).strip() and not ast.get_docstring(nodes(path)[0])
    ]


def test_a_file_is_named_for_the_noun_it_owns() -> None:
    assert not [name_of(path) for path in FILES if path.stem in VAGUE_NAMES]


def test_nothing_is_left_to_do() -> None:
    assert not [name_of(path) for path in FILES if re.search("TODO|FIXME|XXX", source(path))]


def swallows(handler: ast.ExceptHandler) -> bool:
    """`except Exception` must raise, or use the error by name."""
    if handler.type is None:
        return True
    inner = [*ast.walk(handler)]
    return (
        isinstance(handler.type, ast.Name)
        and handler.type.id in ("Exception", "BaseException")
        and not any(isinstance(each, ast.Raise) for each in inner)
        and not any(isinstance(each, ast.Name) and each.id == handler.name for each in inner)
    )


def test_no_error_is_swallowed() -> None:
    assert not [
        f"{name_of(path)}, line {node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]


def find_unpickling(found_in: Iterable[ast.AST]) -> list[str]:
    """Uses of pickle or of functions that unpickle, as `line N: name`.

    The rule: data from files or from the network is never unpickled. A process pool pickles what it sends to its own
    processes, so only export/process_pool.py may have one, and bench/load.py its connections. Weights that the release
    has as pickles are read by torch's restricted unpickler, in export/pickled_weights.py alone.
    """
    found = []
    modules = {"torch": "torch", "numpy": "numpy"}
    for node in found_in:
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


MAY_UNPICKLE = {
    "export/process_pool.py": ("ProcessPoolExecutor",),
    "export/pickled_weights.py": ("torch.load", "torch.save"),
    "bench/load.py": ("multiprocessing.connection",),
}


def test_no_data_is_unpickled() -> None:
    assert not [
        f"{name_of(path)}, {found}"
        for path in FILES
        for found in find_unpickling(nodes(path))
        if not any(each in found for each in MAY_UNPICKLE.get(name_of(path), ()))
    ]
    found_in = nodes(PACKAGE / "export" / "pickled_weights.py")
    given = [each for each in found_in if isinstance(each, ast.keyword) and each.arg == "weights_only"]
    assert [ast.unparse(each.value) for each in given] == ["True"] and len(find_unpickling(found_in)) == 2


@pytest.mark.parametrize(
    "code",
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
def test_the_rule_finds_unpickling(code: str) -> None:
    assert find_unpickling(ast.walk(ast.parse(code)))


def test_the_rule_allows_json_and_safetensors() -> None:
    code = "import json, torch\nfrom safetensors.torch import load_file\njson.loads(text)\ntorch.randn(3)"
    assert not find_unpickling(ast.walk(ast.parse(code)))


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


def test_only_the_command_line_writes_stdout() -> None:
    """stdout carries data: results, and the address of a server that is ready. Messages go to stderr."""
    assert not [
        f"{name_of(path)}, line {node.lineno}"
        for path in FILES
        if name_of(path) not in ("console/report.py", "commands/serve.py")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if not any(keyword.arg == "file" for keyword in node.keywords)
    ]
