"""Mutation testing: plant bugs one at a time, run the tests of their area, report which bugs no test notices.

Bugs ("mutants") are data: `tests/mutants/AREA.toml`; `tests/mutants/areas.toml` names the tests of each area. A mutant
is planted in a temporary copy of the checkout, never in the checkout itself. This process imports the slow libraries
once and forks a child per mutant. Run it through `scripts/mutate`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.02
_BASELINE_TIMEOUT_S = 900.0
# The warning: this process has imported plugins of pytest before pytest could look at them.
_PYTEST_WORDS = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)
_MUTANT_KEYS = {"id", "file", "find", "replace", "seen", "occurrence", "equivalent", "tests"}

Outcome = Literal["killed", "timeout", "survived", "equivalent"]


class MutantError(Exception):
    """The list of mutants does not fit the code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One planted bug.

    Attributes:
        file: path inside the checkout.
        find, replace: text of the file and what stands there instead. `find` occurs once, or `occurrence` says which
            one of several is meant, from 1.
        seen: what a user would see.
        equivalent: why no test can notice it; None for a bug.
        tests: tests to run instead of the area's.
    """

    area: str
    id: str
    file: str
    find: str
    replace: str
    seen: str
    occurrence: int | None = None
    equivalent: str | None = None
    tests: tuple[str, ...] = ()

    def apply(self, root: Path) -> str:
        """The text of the file with the bug. Raises: MutantError when `find` does not occur as stated."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(self.find)
        if count == 0:
            raise self.error(
                f"its text is not in {self.file}: adapt `find` to the new code, or delete the mutant"
            )
        if self.occurrence is None and count > 1:
            raise self.error(
                f"its text occurs {count} times in {self.file}: make `find` longer, or add `occurrence`"
            )
        if self.occurrence is not None and not (count > 1 and 1 <= self.occurrence <= count):
            raise self.error(
                f"`occurrence` is {self.occurrence}, but its text occurs {count} times in {self.file}"
            )
        if self.find == self.replace:
            raise self.error("`find` and `replace` are equal")
        start = -1
        for _ in range(self.occurrence or 1):
            start = text.index(self.find, start + 1)
        return text[:start] + self.replace + text[start + len(self.find) :]

    def error(self, problem: str) -> MutantError:
        return MutantError(f"tests/mutants/{self.area}.toml: {self.id}: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Mutants of one part of the code, and the tests that ought to notice them.

    `keywords` selects among these tests, as pytest's `-k` does.
    """

    name: str
    title: str
    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    keywords: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutants:
    """The whole list. `preload`: modules that the parent process imports once for all mutants."""

    areas: tuple[Area, ...]
    preload: tuple[str, ...]


def read_mutants(root: Path = ROOT) -> Mutants:
    """Read `tests/mutants`. Raises: MutantError when a file is wrong."""
    folder = root / "tests" / "mutants"
    table = tomllib.loads((folder / "areas.toml").read_text(encoding="utf-8"))
    areas = []
    for name, given in table["area"].items():
        entries = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]
        mutants = tuple(_read_mutant(name, entry) for entry in entries)
        tests, keywords = tuple(given["tests"]), given.get("keywords", "")
        areas.append(Area(name=name, title=given["title"], tests=tests, mutants=mutants, keywords=keywords))
    unlisted = {path.stem for path in folder.glob("*.toml")} - {"areas", *table["area"]}
    if unlisted:
        raise MutantError(f"tests/mutants/areas.toml: no area {', '.join(sorted(unlisted))}")
    ids = [mutant.id for area in areas for mutant in area.mutants]
    twice = sorted({each for each in ids if ids.count(each) > 1})
    if twice:
        raise MutantError(f"tests/mutants: ids that occur twice: {', '.join(twice)}")
    return Mutants(areas=tuple(areas), preload=tuple(table.get("preload", ())))


def _read_mutant(area: str, entry: dict[str, Any]) -> Mutant:
    if unknown := entry.keys() - _MUTANT_KEYS:
        raise MutantError(f"tests/mutants/{area}.toml: {entry.get('id')}: unknown keys {', '.join(unknown)}")
    return Mutant(area=area, **{**entry, "tests": tuple(entry.get("tests", ()))})


@dataclass(slots=True)
class _Report:
    """Results of one area."""

    area: Area
    seconds: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def ids(self, outcome: Outcome) -> list[str]:
        return [mutant.id for mutant in self.area.mutants if self.outcomes.get(mutant.id) == outcome]


@dataclass(slots=True)
class _Child:
    """A running test session. `pid` is also the id of its process group."""

    pid: int
    log: Path
    deadline: float
    started: float


class Runner:
    """Runs test sessions in copies of the checkout, each in a forked child.

    Args:
        root: the checkout; never written to.
        folder: an empty folder for the copies.
    """

    def __init__(self, root: Path, folder: Path, *, num_copies: int, timeout_s: float) -> None:
        self._root = root
        self._folder = folder
        self._timeout_s = timeout_s
        self.keywords = ""  # of the area that is run
        self._original = folder / "original"  # stays as it is while the checkout may change
        self._copies = [folder / f"copy{index}" for index in range(num_copies)]

    def prepare(self) -> None:
        """Copy the checkout once. Other copies than the first follow in `spread`."""
        for name in _checkout_files(self._root):
            target = self._original / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, target)
        shutil.copytree(self._original, self._copies[0])

    def test_baseline(self, tests: Sequence[str]) -> tuple[bool, Path]:
        """Run `tests` on the unchanged code: whether they pass, and the log."""
        child = self._start(self._copies[0], [tests], "baseline", _BASELINE_TIMEOUT_S, writes_bytecode=True)
        code = self._wait([child])[0][1]
        return code == 0, child.log

    def spread(self) -> None:
        """Make the other copies equal to the first one, with the bytecode that its tests have left."""
        for copy in self._copies[1:]:
            if copy.exists():
                shutil.rmtree(copy)
            shutil.copytree(self._copies[0], copy)

    def run(self, mutants: Iterable[tuple[Mutant, Sequence[str]]]) -> Iterator[tuple[Mutant, Outcome, float]]:
        """Run each mutant with its tests; yields results in the order in which they end."""
        waiting = iter(mutants)
        free = list(self._copies)
        running: dict[int, tuple[_Child, Path, Mutant]] = {}
        while True:
            while free and (following := next(waiting, None)) is not None:
                mutant, tests = following
                copy = free.pop()
                path = copy / mutant.file
                # A time of its own: bytecode compiled from the original must not be taken for it.
                path.write_text(mutant.apply(self._original), encoding="utf-8")
                os.utime(path, (1, 1))
                child = self._start(
                    copy, _own_tests_first(mutant, tests), mutant.id, self._timeout_s, writes_bytecode=False
                )
                running[child.pid] = child, copy, mutant
            if not running:
                return
            for child, code in self._wait([child for child, _, _ in running.values()]):
                _, copy, mutant = running.pop(child.pid)
                shutil.copy2(self._original / mutant.file, copy / mutant.file)
                free.append(copy)
                outcome: Outcome = "timeout" if code is None else "survived" if code == 0 else "killed"
                if code == 5:
                    raise MutantError(f"{mutant.id}: pytest found no test")
                yield mutant, outcome, time.monotonic() - child.started

    def _start(
        self,
        copy: Path,
        parts: Sequence[Sequence[str]],
        name: str,
        timeout_s: float,
        *,
        writes_bytecode: bool,
    ) -> _Child:
        log = self._folder / f"{name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setsid()
                code = _run_pytest(copy, parts, self.keywords, log, writes_bytecode=writes_bytecode)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return _Child(pid, log, time.monotonic() + timeout_s, time.monotonic())

    def _wait(self, children: Sequence[_Child]) -> list[tuple[_Child, int | None]]:
        """Wait until one or more of `children` end: each with its exit code, None for one beyond its time limit."""
        while True:
            ended: list[tuple[_Child, int | None]] = []
            for child in children:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    ended.append((child, os.waitstatus_to_exitcode(status)))
                elif time.monotonic() > child.deadline:
                    ended.append((child, None))
                else:
                    continue
                # Processes that the tests have started and that are still there end as well.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                if not pid:
                    os.waitpid(child.pid, 0)
            if ended:
                return ended
            time.sleep(_POLL_S)


def _run_pytest(
    copy: Path, parts: Sequence[Sequence[str]], keywords: str, log: Path, *, writes_bytecode: bool
) -> int:
    """Run tests of the checkout `copy` in this forked child, part after part until one fails.

    Returns pytest's exit code.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    if not writes_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = not writes_bytecode
    assert not [name for name in sys.modules if name.partition(".")[0] == "mingc"], (
        "the parent loads no code under test"
    )
    temporary = tempfile.mkdtemp(dir=log.parent)
    import pytest

    try:
        for number, part in enumerate(each for each in parts if each):
            code = int(
                pytest.main([*_PYTEST_WORDS, "-k", keywords, "--basetemp", f"{temporary}/{number}", *part])
            )
            if code:
                return code
        return 0
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _own_tests_first(mutant: Mutant, tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of `tests` that are named after the mutant's module, and the others: most mutants end in the first."""
    stem = Path(mutant.file).stem
    own = [test for test in tests if Path(test.partition("::")[0]).stem.endswith(f"_{stem}")]
    return own, [test for test in tests if test not in own]


def _checkout_files(root: Path) -> list[str]:
    """Files that git knows or would add; without git, all of them."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise MutantError(f"git {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def select(mutants: Mutants, given: argparse.Namespace, root: Path) -> list[tuple[Area, list[Mutant]]]:
    """The areas and mutants that the options name. Raises: MutantError for unknown ones."""
    areas = {area.name for area in mutants.areas}
    ids = {mutant.id for area in mutants.areas for mutant in area.mutants}
    for kind, wanted, known in (("area", given.area, areas), ("mutant", given.id, ids)):
        if missing := sorted(set(wanted) - known):
            raise MutantError(f"no {kind} {', '.join(missing)}; --list shows all")
    changed: set[str] | None = None
    if given.changed_since:
        changed = set(_git(root, "diff", "--name-only", given.changed_since).splitlines())
    selected = []
    for area in mutants.areas:
        if given.area and area.name not in given.area:
            continue
        chosen = [
            mutant
            for mutant in area.mutants
            if (not given.id or mutant.id in given.id)
            and (changed is None or {mutant.file, f"tests/mutants/{area.name}.toml", *area.tests} & changed)
        ]
        if chosen:
            selected.append((area, chosen))
    return selected


def run_area(
    runner: Runner, area: Area, chosen: Sequence[Mutant], stored: ResultFile | None, *, show_logs: bool
) -> _Report:
    """Baseline, then the mutants of one area. Raises: MutantError when the tests fail on the unchanged code."""
    report = _Report(area)
    runner.keywords = area.keywords
    started = time.monotonic()
    real = [mutant for mutant in chosen if mutant.equivalent is None]
    tests = dict.fromkeys(each for mutant in real for each in (mutant.tests or area.tests))
    if tests:
        passed, log = runner.test_baseline(list(tests))
        if not passed:
            tail = "".join(log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-40:])
            raise MutantError(f"{area.name}: the tests fail without any mutant:\n{tail}")
        runner.spread()
    report.outcomes.update({mutant.id: "equivalent" for mutant in chosen if mutant.equivalent is not None})
    for mutant, outcome, seconds in runner.run((mutant, mutant.tests or area.tests) for mutant in real):
        report.outcomes[mutant.id] = outcome
        if stored is not None:
            stored.add(mutant, outcome, seconds)
        print(f"{outcome:9} {seconds:6.1f} s  {area.name}: {mutant.id}", flush=True)
        if outcome == "survived":
            print(f"          {mutant.file}: {mutant.seen}", flush=True)
        elif show_logs:
            print(
                (runner._folder / f"{mutant.id}.log").read_text(encoding="utf-8", errors="replace"),
                flush=True,
            )
    report.seconds = time.monotonic() - started
    killed, survived = len(report.ids("killed")) + len(report.ids("timeout")), len(report.ids("survived"))
    print(
        f"{area.name}: {killed} of {killed + survived} killed ({100 * killed / max(1, killed + survived):.0f} %), "
        f"{len(report.ids('timeout'))} by timeout, {len(report.ids('equivalent'))} equivalent, {report.seconds:.0f} s",
        flush=True,
    )
    return report


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one mutant: at which commit, and the seconds that it took."""

    outcome: Outcome
    commit: str
    seconds: float


class ResultFile:
    """The stored outcome of every mutant that was run; several processes may add to it.

    Equivalent mutants are not run. Mutants that have left the list are dropped.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._commit = _git(root, "rev-parse", "HEAD").strip()
        self._areas = read_mutants(root).areas

    def read(self) -> dict[str, Result]:
        """All results by id."""
        if not self._path.exists():
            return {}
        document = json.loads(self._path.read_text(encoding="utf-8"))
        return {
            name: Result(*values)
            for figure in document["figures"]
            for name, values in figure["results"].items()
        }

    def add(self, mutant: Mutant, outcome: Outcome, seconds: float) -> None:
        """Store one result."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = self.read() | {mutant.id: Result(outcome, self._commit, round(seconds, 1))}
            self._path.write_text(json.dumps(self._document(results), indent=1) + "\n", encoding="utf-8")
        self._path.with_suffix(".lock").unlink(missing_ok=True)

    def _document(self, results: dict[str, Result]) -> dict[str, Any]:
        import torch

        return {
            "schema": 1,
            "benchmark": "mutation",
            "commit": self._commit,
            "command": f"scripts/mutate --json benchmarks/results/{self._path.name}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "figures": [self._figure(area, results) for area in self._areas],
        }

    def _figure(self, area: Area, results: dict[str, Result]) -> dict[str, Any]:
        real = [mutant.id for mutant in area.mutants if mutant.equivalent is None]
        known = {name: results[name] for name in real if name in results}

        def named(outcome: Outcome) -> list[str]:
            return [name for name, each in known.items() if each.outcome == outcome]

        return {
            "name": "mutants",
            "area": area.name,
            "title": area.title,
            "mutants": len(real),
            "killed": len(named("killed")) + len(named("timeout")),
            "killed_by_timeout": named("timeout"),
            "survived": named("survived"),
            "not_run": [name for name in real if name not in known],
            "equivalent": [mutant.id for mutant in area.mutants if mutant.equivalent is not None],
            "results": {name: [each.outcome, each.commit, each.seconds] for name, each in known.items()},
        }


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--area", action="append", default=[], help="only this area; may be repeated")
    parser.add_argument("--id", action="append", default=[], help="only this mutant; may be repeated")
    parser.add_argument(
        "--changed-since", metavar="REV", help="only mutants whose file or tests changed since REV"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per mutant (default 120)")
    parser.add_argument("--json", type=Path, help="add the outcomes to this file, after each mutant")
    parser.add_argument(
        "--open", action="store_true", help="with --json: only mutants that it has not as killed"
    )
    parser.add_argument(
        "--show-logs", action="store_true", help="print what pytest printed for killed mutants"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    given = parser.parse_args(words)
    if given.open and not given.json:
        parser.error("--open needs --json")
    if given.jobs < 1 or given.timeout <= 0:
        parser.error("--jobs and --timeout are above 0")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 all killed, 3 some survived, 1 the list or the tests are broken."""
    given = _parse(words)
    root = given.root.resolve()
    try:
        mutants = read_mutants(root)
        stored = ResultFile(given.json, root) if given.json else None
        selected = select(mutants, given, root)
        if given.open and stored is not None:
            known = stored.read()
            selected = [
                (
                    area,
                    [each for each in chosen if each.id not in known or known[each.id].outcome == "survived"],
                )
                for area, chosen in selected
            ]
        misfits = _misfits(root, selected)
        for problem in misfits.values():
            print(f"error: {problem}", file=sys.stderr)
        if given.list:
            for _, chosen in selected:
                for mutant in chosen:
                    note = f" (equivalent: {mutant.equivalent})" if mutant.equivalent else ""
                    print(f"{mutant.area}: {mutant.id}: {mutant.file}: {mutant.seen}{note}")
            return 1 if misfits else 0
        if given.json and _git(root, "status", "--porcelain", "mingc", "tests").strip():
            raise MutantError("--json names a commit: commit mingc/ and tests/ first")
        for name in mutants.preload:
            importlib.import_module(name)
        reports = []
        with tempfile.TemporaryDirectory(prefix="mingc-mutants-") as folder:
            runner = Runner(root, Path(folder), num_copies=given.jobs, timeout_s=given.timeout)
            runner.prepare()
            for area, chosen in selected:
                fitting = [mutant for mutant in chosen if mutant.id not in misfits]
                reports.append(run_area(runner, area, fitting, stored, show_logs=given.show_logs))
    except MutantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    killed = sum(len(each.ids("killed")) + len(each.ids("timeout")) for each in reports)
    survived = sum(len(each.ids("survived")) for each in reports)
    print(f"killed {killed} of {killed + survived} ({100 * killed / max(1, killed + survived):.1f} %)")
    if misfits:
        return 1
    return 3 if survived else 0


def _misfits(root: Path, selected: Sequence[tuple[Area, Sequence[Mutant]]]) -> dict[str, MutantError]:
    """The mutants that do not fit the code, by id."""
    found = {}
    for _, chosen in selected:
        for mutant in chosen:
            try:
                mutant.apply(root)
            except MutantError as error:
                found[mutant.id] = error
    return found


if __name__ == "__main__":
    sys.exit(main())
