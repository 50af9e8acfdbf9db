"""Every measured result says where it is from, and documents and results name each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
# A whole name; where one begins with an ellipsis, the words before it say the rest.
NAMES = re.compile(r"(?<![\w…-])[a-z][\w-]*-h200[\w-]*\.json")


def named(document: Path) -> set[str]:
    return set(NAMES.findall(document.read_text()))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["schema"] == 1
    assert result["benchmark"] and result["date"] and result["figures"]
    assert result["hardware"]["gpu"] and result["hardware"]["count"] >= 1
    assert result["versions"]["torch"] and result["versions"]["cuda"]
    assert "commit" in result, "null where the machine that measured did not know it"
    assert result["command"] or result.get("note"), "without a command a note says how it was measured"


def test_every_result_is_named_in_a_document() -> None:
    known = set().union(*(named(document) for document in DOCUMENTS))
    assert not sorted({path.name for path in RESULTS} - known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_results_that_are_there(document: Path) -> None:
    assert not sorted(named(document) - {path.name for path in RESULTS})
