"""The list of mutants fits the code, and `scripts/mutate` distinguishes killed, hanging and surviving mutants."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MUTATE = load_script()
AREAS = MUTATE.read_mutants().areas


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_mutant_fits_the_code(area) -> None:  # type: ignore[no-untyped-def]
    """The text that a mutant replaces occurs as stated, and the result is Python, so nothing in the list rots."""
    problems = []
    for mutant in area.mutants:
        try:
            text = mutant.apply(ROOT)
            if mutant.file.endswith(".py"):
                compile(text, mutant.file, "exec", dont_inherit=True)
        except (MUTATE.MutantError, SyntaxError) as error:
            problems.append(f"{mutant.id}: {error}")
        if not mutant.seen.strip() or (mutant.equivalent is not None and len(mutant.equivalent) < 20):
            problems.append(f"{mutant.id}: says neither what a user would see nor why it is equivalent")
    assert not problems


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_the_tests_of_an_area_exist(area) -> None:  # type: ignore[no-untyped-def]
    for tests in (area.tests, *(mutant.tests for mutant in area.mutants)):
        assert not [name for name in tests if not (ROOT / name.partition("::")[0]).exists()]


def test_the_list_covers_all_areas() -> None:
    real = [mutant for area in AREAS for mutant in area.mutants if mutant.equivalent is None]
    assert len(real) >= 250


def make_checkout(root: Path) -> Path:
    """A package with one function, a test of it, and one mutant of each kind."""
    files = {
        "mingc/__init__.py": "",
        "mingc/count.py": "def count(limit):\n    n = 0\n    while n < limit:\n        n += 1\n    return n\n",
        "tests/test_count.py": (
            "from mingc.count import count\n\n\ndef test_it_counts():\n    assert count(3) == 3\n"
        ),
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
        "tests/mutants/areas.toml": (
            "preload = ['pytest']\n[area.counting]\ntitle = 'counting'\ntests = ['tests/test_count.py']\n"
        ),
        "tests/mutants/counting.toml": """
[[mutant]]
id = "one-more"
file = "mingc/count.py"
find = "n < limit"
replace = "n <= limit"
seen = "one more"

[[mutant]]
id = "endless"
file = "mingc/count.py"
find = "n += 1"
replace = "n += 0"
seen = "nothing"

[[mutant]]
id = "negative-limits"
file = "mingc/count.py"
find = "n = 0"
replace = "n = min(0, limit)"
seen = "counts of negative limits"

[[mutant]]
id = "no-bug"
file = "mingc/count.py"
find = "n < limit"
replace = "limit > n"
seen = "nothing"
equivalent = "the same comparison, written the other way round"
""",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def run_script(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "mutate.py"), "--root", str(root), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.exhaustive
def test_killed_hanging_and_surviving_mutants_are_distinguished(tmp_path: Path) -> None:
    root = make_checkout(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    done = run_script(root, "--timeout", "15")
    outcomes = {
        line.split(": ")[1]: line.split()[0] for line in done.stdout.splitlines() if " s  counting: " in line
    }
    assert outcomes == {"one-more": "killed", "endless": "timeout", "negative-limits": "survived"}
    assert "counting: 2 of 3 killed (67 %), 1 by timeout, 1 equivalent" in done.stdout
    assert done.returncode == 3
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert after == before, "the checkout was written to"


def test_nothing_runs_when_the_tests_fail_without_a_mutant(tmp_path: Path) -> None:
    root = make_checkout(tmp_path)
    (root / "tests" / "test_count.py").write_text("def test_wrong():\n    assert 0\n", encoding="utf-8")
    done = run_script(root, "--id", "one-more")
    assert done.returncode == 1
    assert "counting: the tests fail without any mutant" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('find = "n += 1"', 'find = "n -= 1"', "endless: its text is not in mingc/count.py"),
        ('find = "n += 1"', 'find = "n"', "endless: its text occurs"),
        ('id = "endless"', 'id = "one-more"', "ids that occur twice: one-more"),
        ('seen = "one more"', 'seen = "one more"\nsees = "typo"', "one-more: unknown keys sees"),
    ],
    ids=["gone", "several", "twice", "unknown key"],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    root = make_checkout(tmp_path)
    path = root / "tests" / "mutants" / "counting.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    done = run_script(root, "--list")
    assert done.returncode == 1
    assert problem in done.stderr


def test_mutants_are_selected_by_area_id_and_change(tmp_path: Path) -> None:
    root = make_checkout(tmp_path)
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True, timeout=30)
    assert run_script(root, "--list", "--changed-since", "HEAD").stdout == ""
    with (root / "mingc" / "count.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert len(run_script(root, "--list", "--changed-since", "HEAD").stdout.splitlines()) == 4
    assert len(run_script(root, "--list", "--area", "counting", "--id", "endless").stdout.splitlines()) == 1
    refused = run_script(root, "--list", "--id", "unknown")
    assert refused.returncode == 1 and "no mutant unknown" in refused.stderr
