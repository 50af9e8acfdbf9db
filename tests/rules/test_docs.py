"""Documentation: section references and links resolve, generated pages are up to date, README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "docs" / "model"
PAGES = {path.stem: path for path in sorted(MODEL.glob("*.md")) if path.stem != "README"}
SOURCES = [
    path
    for folder in ("mingc", "tests", "benchmarks", "docs/model")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu", ".md") and path != Path(__file__)
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
# `talker.md §8.1`, `spec thinker §7` or a bare `§4`; RFC and PEP sections belong to other documents.
REFERENCE = re.compile(
    rf"\b(?P<other>RFC \d+|PEP \d+) §|\b(?P<page>{'|'.join(PAGES)})(?:\.md\b|(?= §))|§(?P<section>\d+(?:\.\d+)?)"
)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")


def headings(path: Path) -> set[str]:
    """Section numbers of a page: `## 6. Title` and `### 6.1 Title`."""
    return set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)[. ]", path.read_text(encoding="utf-8"), re.M))


SECTIONS = {name: headings(path) for name, path in PAGES.items()}


def unresolved(text: str, own: str | None = None) -> list[str]:
    """Section references without a heading. A bare `§4` is of the page named just before, else of any named in `text`.

    own: the page that `text` is, whose bare references are its own.
    """
    named = {match["page"] for match in REFERENCE.finditer(text) if match["page"]}
    page, named_at, missing, skip = own, 0, [], False
    for match in REFERENCE.finditer(text):
        if match["other"]:
            skip = True
        elif match["page"]:
            page, named_at = match["page"], match.start()
        elif skip:
            skip = False
        else:
            far = text.count("\n", named_at, match.start()) > 2
            candidates = named if far or page is None else {page}
            if own:
                candidates = {page, own}
            if not any(match["section"] in SECTIONS[each] for each in candidates if each):
                line = text.count("\n", 0, match.start()) + 1
                missing.append(f"line {line}: {page or '?'} §{match['section']}")
    return missing


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_section_references_resolve(path: Path) -> None:
    own = path.stem if path.parent == MODEL and path.stem in PAGES else None
    assert not unresolved(path.read_text(encoding="utf-8"), own)


def test_an_unknown_section_is_found() -> None:
    assert unresolved("spec: thinker.md §6.1, §99") == ["line 1: thinker §99"]
    assert unresolved("talker.md\n§88") == ["line 2: talker §88"]
    assert unresolved("a reference to nothing: §4") == ["line 1: ? §4"]
    assert not unresolved("(RFC 9639 §8.1)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_resolve(path: Path) -> None:
    for match in LINK.finditer(path.read_text(encoding="utf-8")):
        target = match["target"].split("#")[0]
        if target and "://" not in target:
            assert (path.parent / target).exists(), f"{match[0]} leads nowhere"
