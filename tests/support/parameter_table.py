"""The tables of docs/model/parameters.md: every stage parameter with its value and where that comes from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "model" / "parameters.md"


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One row: the values for the tiny and for the released checkpoint, and the source as written."""

    stage: str
    name: str
    tiny: Any
    released: Any
    source: str


def read_rows() -> list[ParameterRow]:
    """All rows in order. A row of another form is an error."""
    rows, stage = [], ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            stage = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "parameter" or set(cells[0]) == {"-"}:
            continue
        values = [re.fullmatch(r"`(.+)`", cell) for cell in cells[1:3]]
        assert len(cells) == 4 and all(values), f"not a row: {line}"
        tiny, released = (json.loads(value[1]) for value in values if value)
        rows.append(ParameterRow(stage=stage, name=cells[0], tiny=tiny, released=released, source=cells[3]))
    return rows


def tiny_parameters() -> dict[str, dict[str, Any]]:
    """Parameters by stage, as in the manifest of the tiny checkpoint."""
    tables: dict[str, dict[str, Any]] = {}
    for row in read_rows():
        assert row.name not in tables.get(row.stage, {}), f"{row.stage}.{row.name} has two rows"
        tables.setdefault(row.stage, {})[row.name] = row.tiny
    return tables
