"""Documentation: section references and links resolve, generated pages are up to date, README stays short."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "docs" / "model"
PAGES = {path.stem: path for path in sorted(MODEL.glob("*.md")) if path.stem != "README"}
SOURCES = [
    path
    for folder in ("mingc", "tests", "benchmarks", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu", ".md") and path != Path(__file__)
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "tests" / "data" / "README.md",
]
# `talker.md §8.1`, `spec thinker §7` or a bare `§4`; RFC and PEP sections belong to other documents.
REFERENCE = re.compile(
    rf"\b(?P<other>RFC \d+|PEP \d+) §|\b(?P<page>{'|'.join(PAGES)})(?:\.md\b|(?= §))|§(?P<section>\d+(?:\.\d+)?)"
)
NAMED_FILE = re.compile(r"`((?:mingc|benchmarks|tests|scripts|docs)/[\w/.-]+\.(?:py|md|cu|svg))`")
METRIC = re.compile(r"\bmingc_[a-z_]+_(?:total|seconds|running|waiting|ratio)\b")
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")


def headings(path: Path) -> set[str]:
    """Section numbers of a page: `## 6. Title`, `### 6.1 Title`, and items of numbered lists (item 2 of §6 is 6.2)."""
    found: set[str] = set()
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"#{2,3} (\d+(?:\.\d+)?)[. ]", line):
            section = match[1]
            found.add(section)
        elif (match := re.match(r"(\d+)\. ", line)) and section:
            found.add(f"{section}.{match[1]}")
    return found


SECTIONS = {name: headings(path) for name, path in PAGES.items()}


def unresolved(text: str, own: str | None = None) -> list[str]:
    """Section references without a heading. A bare `§4` belongs to the page named before, else to any page in `text`.

    own: name of the page if `text` is a page of the specification; its bare references are its own.
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


def test_section_references_resolve() -> None:
    for path in SOURCES:
        own = path.stem if path.parent == MODEL and path.stem in PAGES else None
        assert not unresolved(path.read_text(encoding="utf-8"), own), path


def test_an_unknown_section_is_found() -> None:
    assert unresolved("spec: thinker.md §6.1, §99") == ["line 1: thinker §99"]
    assert unresolved("talker.md\n§88") == ["line 2: talker §88"]
    assert unresolved("a reference to nothing: §4") == ["line 1: ? §4"]
    assert not unresolved("(RFC 9639 §8.1)")


def anchors(path: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    """Links in `text`, the text of `path`, to a file or heading that does not exist."""
    found = []
    for match in LINK.finditer(text):
        name, _, anchor = match["target"].partition("#")
        target = path.parent / name if name else path
        if "://" in name:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(match[0])
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_resolve(path: Path) -> None:
    assert not broken_links(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "target", ["docs/nowhere.md", "#no-such-heading", "docs/glossary.md#no-such-heading"]
)
def test_a_broken_link_is_found(target: str) -> None:
    assert broken_links(ROOT / "README.md", f"See [there]({target}).") == [f"[there]({target})"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_documents_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # names old files as well
    for name in NAMED_FILE.findall(path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{name} does not exist"


def script(name: str) -> ModuleType:
    """Import a script of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["backends.md", "cli.md", "deployment.md", "extending.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    path = ROOT / "docs" / name
    expected = script("generate_docs").pages()[path]
    assert path.read_text(encoding="utf-8") == expected, "run python scripts/generate_docs.py"


def test_metrics_named_in_documents_exist() -> None:
    known = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md" and path.parent.name == "docs":
            assert set(METRIC.findall(path.read_text(encoding="utf-8"))) <= known, path.name


def test_the_chart_shows_the_results() -> None:
    """The labels of the bars in the committed picture, and its alternative text."""
    chart = script("draw_chart")
    points = chart.chart_points()
    picture = chart.PICTURE.read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for heights in chart.bars(points).values():
        assert ", ".join(f"{height:.0f}" for height in heights) in readme, "the picture's alternative text"
        for height in heights:
            assert f">{height:.0f}</text>" in picture, "run python scripts/draw_chart.py"


def test_the_speed_tables_show_the_results() -> None:
    points = script("draw_chart").chart_points()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for point in points:
        row = (
            f"| {point.batch} | {point.mingc_ms:.2f} | {point.audio_s_per_s(point.mingc_ms):.0f} "
            f"| {point.torch_graph_ms:.1f} | {point.torch_eager_ms:.0f} |"
        )
        assert row in table
    assert " | ".join(f"{point.mingc_ms:.2f}" for point in points) in readme
    assert " | ".join(f"{point.torch_graph_ms:.1f}" for point in points) in readme


def test_readme_is_short_and_has_no_adjectives_about_speed() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 900
    adjectives = r"(blazing|lightning|ultra|super|really|very)?-?(fast|faster|fastest|quick|rapid|efficient)"
    assert not [word for word in words if re.fullmatch(adjectives, word.strip(".,:;()").lower())]
