"""Measured results: every file records where it comes from, and documents cite only files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mingc.bench.records import read

ROOT = Path(__file__).parents[2]
# README and docs cite every file of `results`; notes may cite the files of `archive` as well.
RESULTS, ARCHIVE = (sorted((ROOT / "benchmarks" / name).glob("*.json")) for name in ("results", "archive"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = sorted((ROOT / "benchmarks").glob("*.md"))
# A whole file name; one that begins with an ellipsis continues the name before it.
NAMES = re.compile(r"(?<![\w…-])(?:[a-z][\w-]*-(?:h100|h200|cpu)[\w-]*|bundle-cpu)\.json")
COMMIT = re.compile(r"[0-9a-f]{7,40}")


def named(document: Path) -> set[str]:
    return set(NAMES.findall(document.read_text(encoding="utf-8")))


def test_a_result_records_its_provenance() -> None:
    for path in (*RESULTS, *ARCHIVE):
        try:
            check_provenance(path)
        except Exception as error:
            raise AssertionError(f"{path.name}: {error!r}") from error


def no_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check_provenance(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_json)
    assert result["schema"] == 1
    if "runs" in result:
        file = read(path)
        assert file.command.startswith("mingc bench ") and COMMIT.fullmatch(file.versions.get("commit", ""))
        assert file.date and file.runs and file.hardware["cpu"]
        return
    assert result["benchmark"] and result["date"] and result["figures"]
    assert result["versions"]["torch"]
    if "-cpu-" in path.stem:
        assert result["hardware"]["cpu"] and result["hardware"]["cores"] >= 1
    elif path.stem not in ("backends-cpu", "bundle-cpu"):  # on a CPU
        assert result["hardware"]["gpu"] and result["hardware"]["count"] >= 1
        assert result["versions"]["cuda"]
    assert COMMIT.fullmatch(result["commit"] or ""), "no commit"
    # A command that can be run at that commit, not a description of a script that is gone.
    assert (result["command"] or "").startswith(("python benchmarks/", "mingc ")), "no command"


def test_every_result_is_cited() -> None:
    known = set().union(*(named(page) for page in PAGES))
    assert not sorted({path.name for path in RESULTS} - known)


def test_a_document_cites_existing_results() -> None:
    for document in (*PAGES, *NOTES):
        files = [*RESULTS, *ARCHIVE] if document in NOTES else RESULTS
        assert not sorted(named(document) - {path.name for path in files}), document
