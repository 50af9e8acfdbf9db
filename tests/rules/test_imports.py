"""Import rules: which sub-package may import which, no cycles, and what each process loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mingc"
CONFORMANCE = ROOT / "conformance"
COMPILERS = ("torch._dynamo", "torch._inductor", "transformers", "onnx", "torch_tensorrt")

# Every sub-package and what of mingc it may import besides itself; the longest matching prefix of a module counts.
# Modules without an entry of their own belong to the package above them.
ALLOWED: dict[str, tuple[str, ...]] = {
    "mingc.errors": (),
    "mingc.options": ("mingc.errors",),
    "mingc.plugins": ("mingc.errors",),
    "mingc.python_module": (),
    # The machine and what it has: GPUs, libraries, memory, the parent process.
    "mingc.host": (),
    "mingc.host.machine": ("mingc.artifacts.target",),
    "mingc.dtypes": ("mingc.artifacts",),
    "mingc.numerics": ("mingc.artifacts",),  # error measure and tolerances that export and verify share
    "mingc.artifacts.target": (),  # the GPU table: data that every package may read
    "mingc.artifacts": ("mingc.artifacts.target", "mingc.errors", "mingc.python_module"),
    "mingc.console.signals": (),
    "mingc.console": ("mingc.artifacts", "mingc.errors", "mingc.options", "mingc.python_module"),
    "mingc.console.child_main": ("mingc.cli", "mingc.host"),
    # Loads the commands by name.
    "mingc.cli": ("mingc", "mingc.console", "mingc.console.signals", "mingc.errors"),
    "mingc.commands": (),
    # kernels/triton and kernels/cuda hold GPU code; the files beside them dispatch to it.
    "mingc.kernels.chunk_layout": (),
    "mingc.kernels.triton": (
        "mingc.artifacts.target",
        "mingc.host.machine",
        "mingc.kernels.chunk_layout",
        "mingc.kernels.cuda",
    ),
    "mingc.kernels.cuda": ("mingc.artifacts.target", "mingc.host.machine"),
    # What a server runs where no engine samples; its GPU code is loaded by exports alone.
    "mingc.kernels.sample_tokens": ("mingc.kernels.dispatch", "mingc.kernels.triton"),
    "mingc.kernels.dispatch": ("mingc.artifacts.target", "mingc.host.machine"),
    "mingc.kernels": (
        "mingc.kernels.chunk_layout",
        "mingc.kernels.dispatch",
        "mingc.kernels.triton",
        "mingc.kernels.cuda",
    ),
    # Inside the export, from the interface of a stage up to recipe → plan → run.
    "mingc.export.pickled_weights": ("mingc.errors",),
    "mingc.export.checkpoint": ("mingc.dtypes", "mingc.errors", "mingc.export.pickled_weights"),
    "mingc.export.config_fields": ("mingc.errors", "mingc.export.checkpoint"),
    "mingc.export.defaults": (),
    "mingc.export.stage": ("mingc.artifacts", "mingc.export.defaults", "mingc.export.checkpoint"),
    "mingc.export.process_pool": ("mingc.artifacts", "mingc.errors", "mingc.host"),
    "mingc.export.cost": ("mingc.artifacts",),
    "mingc.export.weights": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.checkpoint",
        "mingc.export.stage",
        "mingc.kernels",
    ),
    "mingc.export.layers": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.checkpoint",
        "mingc.export.config_fields",
        "mingc.export.stage",
        "mingc.export.weights",
        "mingc.kernels",
        "mingc.kernels.chunk_layout",
        "mingc.kernels.sample_tokens",
    ),
    "mingc.export.assets": (
        "mingc.artifacts",
        "mingc.errors",
        "mingc.export.checkpoint",
        "mingc.export.stage",
        "mingc.host",
        "mingc.media.dsp",
    ),
    "mingc.export.checks": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.checkpoint",
        "mingc.export.layers",
        "mingc.export.stage",
        "mingc.export.weights",
        "mingc.numerics",
    ),
    "mingc.export.stages": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.assets",
        "mingc.export.checkpoint",
        "mingc.export.config_fields",
        "mingc.export.checks",
        "mingc.export.layers",
        "mingc.export.stage",
        "mingc.export.weights",
        "mingc.kernels",
        "mingc.kernels.chunk_layout",
        "mingc.plugins",
    ),
    "mingc.export.compile": (
        "mingc.artifacts",
        "mingc.artifacts.target",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.stage",
        "mingc.host",
        "mingc.host.machine",
        "mingc.kernels",
        "mingc.kernels.dispatch",
        "mingc.kernels.triton",
        "mingc.plugins",
    ),
    "mingc.export.recipe": (
        "mingc.artifacts",
        "mingc.artifacts.target",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.defaults",
        "mingc.export.compile",  # the backends
        "mingc.export.stage",
        "mingc.export.stages",
        "mingc.options",
    ),
    "mingc.export.synthetic": (
        "mingc.artifacts",
        "mingc.errors",
        "mingc.export.assets",
        "mingc.export.checkpoint",
        "mingc.export.pickled_weights",
        "mingc.export.recipe",
        "mingc.export.stage",
        "mingc.export.stages",
        "mingc.export.weights",
    ),
    "mingc.export.source": (
        "mingc.export.checkpoint",
        "mingc.export.recipe",
        "mingc.export.synthetic",
    ),
    "mingc.export.autotune": (
        "mingc.artifacts",
        "mingc.artifacts.target",
        "mingc.errors",
        "mingc.export.compile",
        "mingc.export.process_pool",
        "mingc.export.recipe",
        "mingc.export.stage",
        "mingc.host.machine",
        "mingc.kernels",
        "mingc.kernels.dispatch",
        "mingc.kernels.triton",
    ),
    "mingc.export.tasks": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.export.autotune",
        "mingc.export.checkpoint",
        "mingc.export.checks",
        "mingc.export.compile",
        "mingc.export.cost",
        "mingc.export.process_pool",
        "mingc.export.recipe",
        "mingc.export.source",
        "mingc.export.stage",
        "mingc.export.stages",
        "mingc.export.weights",
        "mingc.kernels.triton",
    ),
    "mingc.export": (  # preflight, plan, schedule, run, report
        "mingc",
        "mingc.artifacts",
        "mingc.artifacts.target",
        "mingc.errors",
        "mingc.export.assets",
        "mingc.export.autotune",
        "mingc.export.checkpoint",
        "mingc.export.checks",
        "mingc.export.config_fields",
        "mingc.export.process_pool",
        "mingc.export.recipe",
        "mingc.export.source",
        "mingc.export.stage",
        "mingc.export.stages",
        "mingc.export.tasks",
        "mingc.export.weights",
        "mingc.host",
        "mingc.host.machine",
        "mingc.kernels.triton",
    ),
    "mingc.text": (),
    "mingc.media.dsp": (),
    # A prompt holds decoded media, so media come after it; the runtime knows a decoder by its interface there.
    "mingc.prompts": ("mingc.artifacts", "mingc.errors"),
    "mingc.media": (
        "mingc.artifacts",
        "mingc.errors",
        "mingc.host",
        "mingc.media.dsp",
        "mingc.options",
        "mingc.prompts",
        "mingc.python_module",
    ),
    # Inside the runtime, from what everything shares up to the service.
    "mingc.runtime": ("mingc.errors", "mingc.prompts"),
    "mingc.runtime.engines": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.host",
        "mingc.host.machine",
        "mingc.kernels.cuda",
        "mingc.plugins",
    ),
    "mingc.runtime.distributed": ("mingc.errors", "mingc.host.machine", "mingc.runtime.engines"),
    "mingc.runtime.encoders": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.host",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.engines",
    ),
    "mingc.runtime.thinker": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.kernels.sample_tokens",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.distributed",
        "mingc.runtime.engines",
    ),
    "mingc.runtime.thinker.ranks": (
        "mingc.artifacts",
        "mingc.errors",
        "mingc.host",
        "mingc.python_module",
        "mingc.runtime.distributed",
        "mingc.runtime.engines",
        "mingc.runtime.thinker",
    ),
    "mingc.runtime.grammar": ("mingc.errors", "mingc.prompts", "mingc.python_module", "mingc.runtime"),
    "mingc.runtime.talker": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.media.dsp",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.engines",
    ),
    "mingc.runtime.images": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.engines",
    ),
    "mingc.runtime.service": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.host",
        "mingc.host.machine",
        "mingc.media.dsp",
        "mingc.options",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.encoders",
        "mingc.runtime.engines",
        "mingc.runtime.grammar",
        "mingc.runtime.images",
        "mingc.runtime.talker",
        "mingc.runtime.thinker",
        "mingc.runtime.thinker.ranks",
        "mingc.text",
    ),
    # What every kind of session shares; a folder for each kind beside it; the app knows them all.
    "mingc.server.stages": (),  # names that clients read too
    "mingc.server": (
        "mingc",
        "mingc.console.signals",
        "mingc.errors",
        "mingc.options",
        "mingc.runtime",
        "mingc.server.stages",
    ),
    # A client: it knows a server by HTTP.
    "mingc.bench": (
        "mingc",
        "mingc.console",
        "mingc.errors",
        "mingc.host",
        "mingc.options",
        "mingc.server.stages",
        "mingc.text",
    ),
    "mingc.server.http": (
        "mingc",
        "mingc.errors",
        "mingc.host",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.server",
    ),
    "mingc.server.websocket": ("mingc.errors", "mingc.runtime", "mingc.server", "mingc.server.http"),
    "mingc.server.realtime": (
        "mingc.errors",
        "mingc.media",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.server",
        "mingc.server.http",
        "mingc.server.websocket",
    ),
    "mingc.server.app": (
        "mingc.errors",
        "mingc.runtime",
        "mingc.server",
        "mingc.server.http",
        "mingc.server.page",
        "mingc.server.realtime",
        "mingc.server.websocket",
    ),
    "mingc.server.page": (),
    "mingc.verify": (
        "mingc.artifacts",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.host.machine",
        "mingc.media",
        "mingc.media.dsp",
        "mingc.numerics",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.encoders",
        "mingc.runtime.engines",
        "mingc.runtime.images",
        "mingc.runtime.service",
        "mingc.runtime.talker",
        "mingc.runtime.thinker",
        "mingc.text",
    ),
    "mingc.probe": (
        "mingc",
        "mingc.artifacts",
        "mingc.console",
        "mingc.dtypes",
        "mingc.errors",
        "mingc.host",
        "mingc.host.machine",
        "mingc.options",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.engines",
        "mingc.runtime.service",
    ),
    # A client: it knows a server by its address alone.
    "mingc.audit": ("mingc.bench", "mingc.console", "mingc.errors", "mingc.media.dsp", "mingc.text"),
    "mingc.bundles": ("mingc", "mingc.artifacts", "mingc.artifacts.target", "mingc.errors"),
    "mingc.deploy": (
        "mingc.artifacts",
        "mingc.errors",
        "mingc.media",
        "mingc.options",
        "mingc.prompts",
        "mingc.runtime",
        "mingc.runtime.service",
        "mingc.server",
        "mingc.server.app",
        "mingc.server.http",
        "mingc.text",
    ),
}
# In no wheel: it knows what a server and `mingc verify` know, and the package does not know it.
ALLOWED["conformance"] = (
    *ALLOWED["mingc.verify"],
    "mingc.console",
    "mingc.console.signals",
    "mingc.runtime.thinker.ranks",
    "mingc.verify",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for folder in (PACKAGE, CONFORMANCE) for path in sorted(folder.rglob("*.py"))
}
# Only the commands know export, runtime, verify and probe together.
UNRESTRICTED = (
    "mingc",
    "mingc.__main__",
    *(module for module in MODULES if (module + ".").startswith("mingc.commands.")),
)


def package_of(module: str) -> str:
    """The entry of ALLOWED that `module` falls under; `mingc` itself for a name outside all of them."""
    candidates = [name for name in ALLOWED if (module + ".").startswith(name + ".")]
    return max(candidates, key=len, default="mingc")


_IMPORTERS = ("import_module", "__import__", "run_module")
# Files that import what a caller or another distribution names.
_IMPORT_BY_NAME = (
    "mingc",
    "mingc.cli",
    "mingc.plugins",
    "mingc.media.libraries",
    "mingc.host.tensorrt_library",
)


def constant_text(node: ast.expr, constants: dict[str, str]) -> str | None:
    """The value of an expression of literals, names of constants, `+`, `%`, f-strings, `join` and `format`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    parts: list[str | None]
    if isinstance(node, ast.JoinedStr):
        parts = [constant_text(each, constants) for each in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.FormattedValue):
        return constant_text(node.value, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [constant_text(node.left, constants), constant_text(node.right, constants)]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        left = constant_text(node.left, constants)
        items = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        parts = [constant_text(each, constants) for each in items]
        return None if left is None or None in parts else left % tuple(parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        own = constant_text(node.func.value, constants)
        items = node.args
        if node.func.attr == "join" and items and isinstance(items[0], ast.Tuple | ast.List):
            items = items[0].elts
        parts = [constant_text(each, constants) for each in items]
        if own is not None and None not in parts:
            if node.func.attr == "join":
                return own.join(map(str, parts))
            if node.func.attr == "format":
                return own.format(*parts)
    return None


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Texts that names are bound to anywhere in the file; the last one counts."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        else:
            continue
        text = constant_text(node.value, found) if node.value is not None else None
        if text is not None:
            found.update({each.id: text for each in targets if isinstance(each, ast.Name)})
    return found


def importers_of(tree: ast.Module) -> set[str]:
    """Names of functions that import a module, with other names that the file gives them."""
    found = {*_IMPORTERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update(alias.asname for alias in node.names if alias.name in _IMPORTERS and alias.asname)
        elif isinstance(node, ast.Assign):
            value = getattr(node.value, "attr", None) or getattr(node.value, "id", None)
            if value in found:
                found.update(each.id for each in node.targets if isinstance(each, ast.Name))
    return found


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Every module that an import of the file names, with its line; `from a import b` is a.b if a module.

    `import_module("a.b")` and `__import__("a.b")` are imports as well, and so are names made of constants. A name that
    is unknown before the program runs counts as `?`, and then every module that a text of the file names counts too.
    """
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants, importers = constants_of(tree), importers_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append((full if full in MODULES else node.module, node.lineno))
        elif (
            isinstance(node, ast.Call)
            and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in importers
        ):
            name = node.args[0] if node.args else next((each.value for each in node.keywords), None)
            text = constant_text(name, constants) if name is not None else None
            found.append((text or "?", node.lineno))
    if any(name == "?" for name, _ in found):
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found.extend(
            (node.value, node.lineno) for node in texts if node.value in MODULES and "." in node.value
        )
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import importlib\nimportlib.import_module('mingc.export.recipe')",
        "import importlib\nimportlib.import_module(name='mingc.export.recipe')",
        "from importlib import import_module as load\nload('mingc.export.recipe')",
        "import importlib\nload = importlib.import_module\nload('mingc.export.recipe')",
        "__import__('mingc.export.recipe')",
        "import builtins\nbuiltins.__import__('mingc.export.recipe')",
        "NAME = 'recipe'\n__import__(f'mingc.export.{NAME}')",
        "HALF: str = 'mingc.export'\n__import__(HALF + '.recipe')",
        "HALF = 'export'\n__import__('mingc.%s.%s' % (HALF, 'recipe'))",
        "__import__('mingc.{}.recipe'.format('export'))",
        "__import__('.'.join(('mingc', 'export', 'recipe')))",
        "import runpy\nrunpy.run_module('mingc.export.recipe')",
        "from mingc.export import recipe",
        "def late():\n    if True:\n        import mingc.export.recipe",
    ],
)
def test_an_import_is_found_in_every_form(code: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code, encoding="utf-8")
    assert "mingc.export.recipe" in {name for name, _ in imported(path)}


def test_an_import_by_a_variable_name_is_found_with_the_modules_that_texts_name(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def load(name):\n    return __import__(name)\n\n\nload('mingc.export.recipe')\n", encoding="utf-8"
    )
    assert imported(path) == [("?", 2), ("mingc.export.recipe", 5)]


def test_few_modules_import_by_a_variable_name() -> None:
    found = {module for module, path in MODULES.items() if "?" in {name for name, _ in imported(path)}}
    assert found == {*_IMPORT_BY_NAME}


def test_every_form_of_an_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import mingc.cli\nfrom mingc import cli\n\n\ndef late():\n    from mingc.errors import ConfigError\n"
        "    import importlib\n    importlib.import_module('mingc.export.recipe')\n",
        encoding="utf-8",
    )
    assert [*sorted(imported(path))] == [
        ("importlib", 7),
        ("mingc.cli", 1),
        ("mingc.cli", 2),
        ("mingc.errors", 6),
        ("mingc.export.recipe", 8),
    ]


@cache
def typing_only_lines(path: Path) -> set[int]:
    """Lines of imports under `if TYPE_CHECKING:`, which no process runs."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            lines.update(statement.lineno for statement in node.body)
    return lines


def test_a_module_imports_only_what_its_package_may() -> None:
    for module in (name for name in MODULES if name not in UNRESTRICTED):
        package = package_of(module)
        assert package in ALLOWED, f"{module} belongs to no package of ALLOWED"
        for name, line in imported(MODULES[module]):
            if name.split(".")[0] in ("mingc", "conformance") and package_of(name) != package:
                assert package_of(name) in ALLOWED[package], (
                    f"{module}, line {line}: imports {name}, which {package} may not"
                )


def test_the_command_line_does_not_need_the_checkout() -> None:
    names = [name for module in UNRESTRICTED for name, _ in imported(MODULES[module])]
    assert not [name for name in names if name.split(".")[0] == "conformance"]


def test_a_package_is_allowed_only_what_it_imports() -> None:
    """A wall with an entry too many has a hole that nobody needs."""
    needed: dict[str, set[str]] = {package: set() for package in ALLOWED}
    for module in (name for name in MODULES if name not in UNRESTRICTED):
        needed[package_of(module)].update(package_of(name) for name, _ in imported(MODULES[module]))
    unneeded = {package: {*allowed} - needed[package] for package, allowed in ALLOWED.items()}
    del unneeded["conformance"]  # what `mingc verify` may, and a little more
    assert not {package: names for package, names in unneeded.items() if names}


def test_the_table_of_packages_has_no_cycle() -> None:
    done: set[str] = set()

    def visit(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, f"cycle: {' -> '.join((*path, package))}"
        if package not in done:
            for other in ALLOWED.get(package, ()):
                # Modules directly in mingc/runtime are its shared base, not the packages below.
                visit(other, (*path, package))
            done.add(package)

    for package in ALLOWED:
        if package != "mingc.console.child_main":  # runs the command line, as mingc/__main__.py does
            visit(package, ())


def folder_of(module: str) -> str:
    """The package whose folder holds the file of `module`."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_no_two_folders_import_each_other() -> None:
    """Of two folders of which neither contains the other, one may import the other; imports in functions count too."""
    arrows: dict[tuple[str, str], str] = {}
    for module, path in MODULES.items():
        skipped = typing_only_lines(path)
        for name, line in imported(path):
            if name in MODULES and line not in skipped:
                arrows.setdefault((folder_of(module), folder_of(name)), f"{module}, line {line}: {name}")
    mutual = [
        f"{place}; {arrows[to, of]}"
        for (of, to), place in sorted(arrows.items())
        if of < to and (to, of) in arrows and not (to + ".").startswith(of + ".")
    ]
    assert not mutual, "\n".join(mutual)


@pytest.mark.parametrize("folder", ["mingc", "conformance", "benchmarks", "tests/support"])
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    """Imports inside functions count as well: two files that need each other are one."""
    root = ROOT / folder
    names = {
        (module_name(path) if folder in ("mingc", "conformance") else path.stem): path
        for path in sorted(root.rglob("*.py"))
    }
    arrows = {}
    for name, path in names.items():
        skipped = typing_only_lines(path)
        found = {other for other, line in imported(path) if line not in skipped}
        arrows[name] = found & (names.keys() - {name})
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in sorted(arrows[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in names:
        visit(name, ())


@cache
def modules_after(code: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter after `code`."""
    result = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def import_all(package: str) -> str:
    return (
        "import importlib, pkgutil\n"
        f"root = importlib.import_module({package!r})\n"
        "for module in pkgutil.walk_packages(root.__path__, root.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )


CPP_LOADER = "import torch; torch._C._aoti.AOTIModelPackageLoader"


def within(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def test_a_server_without_traces_loads_no_opentelemetry() -> None:
    names = modules_after(
        "import mingc.server.app; assert mingc.server.app.Traces.from_environment() is None"
    )
    assert not within(names, "opentelemetry") and "mingc.server.tracing" in names


def test_schedulers_load_without_torch() -> None:
    """They are plain Python over page and slot numbers (docs/architecture.md)."""
    schedulers = ("thinker.scheduler", "thinker.prefill_policy", "talker.scheduler", "kv_cache")
    loaded = modules_after("import " + ", ".join(f"mingc.runtime.{name}" for name in schedulers))
    for package in ("torch", "numpy"):
        assert not within(loaded, package)


def test_the_command_line_and_the_artifacts_load_without_torch() -> None:
    loaded = modules_after(
        "import mingc, mingc.cli, mingc.console.report, mingc.errors, mingc.commands.doctor_report\n"
        "import mingc.artifacts.artifact, mingc.bench.options, mingc.bundles.inspection, mingc.verify.verification"
    )
    for package in ("torch", "numpy", "rich", "safetensors", "msgspec"):
        assert not within(loaded, package)


@pytest.mark.parametrize("client", ["mingc.bench", "mingc.audit"])
def test_the_benchmark_and_the_audit_are_clients(client: str) -> None:
    loaded = modules_after(import_all(client))
    for package in ("torch", "mingc.runtime", "mingc.artifacts.artifact", "mingc.server.http"):
        assert not within(loaded, package)


def test_the_runtime_loads_no_compiler_no_export_no_verify_and_no_probe() -> None:
    loaded = modules_after(import_all("mingc.runtime")) - modules_after(CPP_LOADER)
    for package in (*COMPILERS, "mingc.export", "mingc.verify", "mingc.probe"):
        assert not within(loaded, package), f"mingc.runtime loads {package}"


def test_export_loads_no_runtime() -> None:
    loaded = modules_after(import_all("mingc.export"))
    for package in ("mingc.runtime", "mingc.verify", "mingc.probe"):
        assert not within(loaded, package)


def test_the_cpp_engine_loader_exists_and_loads_no_compiler() -> None:
    """The loader is private to torch; this fails first when a new torch moves it."""
    assert not within(modules_after(CPP_LOADER), "torch._inductor")


def test_the_runtime_names_no_compiler() -> None:
    for name, path in MODULES.items():
        if not name.startswith("mingc.runtime"):
            continue
        for module, line in imported(path):
            for package in (*COMPILERS, "torch.export"):
                assert not within({module}, package) or line in typing_only_lines(path), (
                    f"{name}, {line}: {module}"
                )
        source = path.read_text(encoding="utf-8")
        assert "torch.export" not in source and "torch.compile(" not in source, name


@pytest.mark.parametrize(
    ("package", "libraries"), [("mingc.artifacts", ["mingc"]), ("mingc.media.dsp", ["mingc", "numpy"])]
)
def test_a_package_uses_few_libraries(package: str, libraries: list[str]) -> None:
    """Beside the standard library."""
    for name, path in MODULES.items():
        for module, line in imported(path) if name.startswith(package) else ():
            top = module.split(".")[0]
            assert top in (*libraries, *sys.stdlib_module_names), f"{name}, line {line}: imports {module}"


def _defined(path: Path) -> set[str]:
    """Names that a module defines or imports at its top level."""
    names: set[str] = set()
    nodes: list[ast.AST] = [*ast.parse(path.read_text(encoding="utf-8")).body]
    while nodes:
        match node := nodes.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)  # what is inside is not the module's
            case ast.Import() | ast.ImportFrom():
                names |= {each.asname or each.name.split(".")[0] for each in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                nodes += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize(
    "path",
    [path for folder in ("benchmarks", "tests/gpu") for path in sorted((ROOT / folder).glob("*.py"))],
    ids=lambda path: path.name,
)
def test_what_needs_a_gpu_imports_names_that_exist(path: Path) -> None:
    """Nothing else imports these files where there is no GPU, and mypy checks the packages only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            known = _defined(MODULES[node.module])
            absent = {each.name for each in node.names} - known
            absent -= {name for name in absent if f"{node.module}.{name}" in MODULES}
            assert not absent, f"line {node.lineno}: {node.module} has no {', '.join(absent)}"
