"""A report as one HTML file and as Markdown: the JSON in a static template, whose script draws tables and charts.

The file has no external resource, follows the reader's light or dark scheme, and prints.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from mingc.artifacts.codec import encode
from mingc.errors import ConfigError

Cell = str | int | float | None
_SPECIAL = re.compile(r"([\\`*_|<>\[\]])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a line, with the interval from `low` to `high` where there is one. `label` is its tooltip."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines by name. A logarithmic axis shows positive values only, a linear one begins at 0."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, tuple[Point, ...]]
    is_log_x: bool = True
    is_log_y: bool = False
    has_points: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells, one per column; the first cell of a row names it. The cells `better` and `worse` are coloured."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report; one with `is_bad` tells of faults."""

    heading: str
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPage:
    """A whole report. `facts` say what was measured, and where."""

    title: str
    facts: Mapping[str, str]
    sections: tuple[Section, ...] = field(default=())


def check_output_path(path: Path, option: str) -> None:
    """Raises: ConfigError when no file can be written at `path`; called before anything is measured."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = (
            "is a folder"
            if path.is_dir()
            else f"cannot be written: {folder} is no folder that this user may write"
        )
        raise ConfigError(
            f"{path} {why}", where=option, fix="pass the name of a file in a folder that exists"
        )


def write_text(text: str, path: Path) -> None:
    """Write `text` to `path`, atomically, with the rights that a new file has; a device or a pipe stays what it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def to_html(page: ReportPage) -> str:
    """Write the HTML document."""
    return fill(_resource("report_page.html"), page)


def fill(template: str, report: object) -> str:
    """Put the shared style and script, and the JSON of the dataclass `report`, into their places in `template`."""
    figures = json.dumps(_finite(encode(report)), indent=1, allow_nan=False, ensure_ascii=False)
    text = html.escape(_encodable(figures))
    for mark, name in (("{STYLE}", "report_page.css"), ("{LIBRARY}", "report_page.js")):
        template = template.replace(mark, _resource(name))
    return template.replace("{REPORT}", text)


def to_markdown(page: ReportPage) -> str:
    """Write the report without its charts."""
    facts = Table(caption="", columns=("fact", "value"), rows=tuple(page.facts.items()))
    parts = [f"# {_plain(page.title)}", _markdown_table(facts)]
    for section in page.sections:
        parts.append(f"## {_plain(section.heading)}")
        parts.extend(_plain(note) for note in section.notes)
        for table in section.tables:
            parts.extend([f"**{_plain(table.caption)}**"] if table.caption else [])
            parts.append(_markdown_table(table))
    return _encodable("\n\n".join(parts) + "\n")


def _markdown_table(table: Table) -> str:
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    is_number = [all(re.match(r"[-+\d]|$", cell) for cell in column) for column in zip(*rows, strict=True)]
    marks = "|".join("--:" if right and at else "---" for at, right in enumerate(is_number))
    lines = ["| " + " | ".join(row) + " |" for row in (map(_plain, table.columns), *rows)]
    return "\n".join([lines[0], f"|{marks}|", *lines[1:]])


def _plain(cell: Cell) -> str:
    """Text that Markdown shows as it is, in one line."""
    text = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _encodable(text: str) -> str:
    """Replace lone surrogates, which the name of a file has that is not UTF-8, and no reader can show."""
    return text.encode(errors="replace").decode()


def _resource(name: str) -> str:
    return resources.files("mingc.console").joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """Replace figures that JSON cannot express by null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
