"""Output of a result dataclass: tables for people, or one JSON document. Independent of the result types.

Scalar fields become lines `name  value`; a tuple of dataclasses (or a mapping to dataclasses) becomes a table with one
column per field. Units are part of the field names (`_seconds`, `_bytes`) and so of the headers. A field with
`metadata={"shown": False}` appears in the JSON only; a row with a method `cells` selects its own columns, and
appears in the JSON only when the method returns none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mingc.artifacts.codec import encode
from mingc.errors import MingcError

if TYPE_CHECKING:
    from rich.console import Console

MAX_COLUMNS = 100
_MAX_NAME = 52  # the first column is not narrowed below this width


def show(result: object, *, as_json: bool, stream: IO[str] | None = None) -> None:
    """Write `result`, a dataclass instance, to `stream` (stdout by default).

    Raises: MingcError when it cannot be written.
    """
    stream = stream or sys.stdout
    if stream is None:  # Python sets it to None for a closed descriptor
        raise MingcError("the result cannot be written: stdout is closed", fix="open or redirect stdout")
    try:
        _show(result, stream, as_json=as_json)
    except OSError as error:
        _abandon(stream)
        raise MingcError(
            f"the result cannot be written: {error.strerror}",
            where=stream.name.strip("<>"),
            fix="free space there, or redirect the output",
        ) from error


def _show(result: object, stream: IO[str], *, as_json: bool) -> None:
    if as_json:
        stream.write(to_json(result) + "\n")
        stream.flush()
        return
    console = _console(stream)
    lines, tables = _split(result)
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        console.print(f"{name:{width}}  {value}", markup=False, highlight=False, soft_wrap=True)
    for title, rows in tables:
        _print_table(console, title, rows)
    stream.flush()


def show_error(error: MingcError, *, as_json: bool) -> None:
    """Write an error to stderr and, with `as_json`, also as an object to stdout."""
    print(f"mingc: error: {error.message}", file=sys.stderr)
    if error.where:
        print(f"  where: {error.where}", file=sys.stderr)
    if error.fix:
        print(f"  fix: {error.fix}", file=sys.stderr)
    if as_json:
        try:
            print(json.dumps({"error": error.to_json()}, ensure_ascii=False, indent=1), flush=True)
        except OSError:  # already on stderr
            _abandon(sys.stdout)


def _abandon(stream: IO[str]) -> None:
    """Redirect `stream` to the null device: Python flushes it at exit, which would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def to_json(result: object) -> str:
    """JSON document of a result for `--json`: field names of the dataclass, paths as strings."""
    return json.dumps(encode(result), ensure_ascii=False, indent=1, default=str)


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    if stream.isatty():
        console = Console(file=stream, no_color=bool(os.environ.get("NO_COLOR")) or None)
        console.width = min(console.width, MAX_COLUMNS)
        return console
    return Console(file=stream, width=MAX_COLUMNS, force_terminal=False, no_color=True)


def _split(result: object) -> tuple[list[tuple[str, str]], list[tuple[str, list[dict[str, Any]]]]]:
    """The scalar lines and the tables of a result, in field order."""
    assert dataclasses.is_dataclass(result) and not isinstance(result, type)
    lines: list[tuple[str, str]] = []
    tables: list[tuple[str, list[dict[str, Any]]]] = []
    for field in dataclasses.fields(result):
        if not field.metadata.get("shown", True):
            continue
        value, title = getattr(result, field.name), _words(field.name)
        if isinstance(value, Mapping) and any(dataclasses.is_dataclass(item) for item in value.values()):
            tables.append((title, [{"name": key, **_row(item)} for key, item in value.items()]))
        elif isinstance(value, Sequence) and value and dataclasses.is_dataclass(value[0]):
            rows = [row for item in value if (row := _row(item))]
            if rows:
                tables.append((title, rows))
        elif isinstance(value, (tuple, list)):
            lines.extend((title if i == 0 else "", _text(item)) for i, item in enumerate(value))
        elif dataclasses.is_dataclass(value):
            lines.extend(
                (f"{title} {_words(key)}", _text(item))
                for key, item in _row(value).items()
                if item is not None
            )
        elif value is not None:
            lines.append((title, _text(value)))
    return lines, tables


def _row(item: object) -> dict[str, Any]:
    assert dataclasses.is_dataclass(item)
    if hasattr(item, "cells"):
        cells: dict[str, Any] = item.cells()
        return cells
    return {
        field.name: getattr(item, field.name)
        for field in dataclasses.fields(item)
        if field.metadata.get("shown", True)
    }


def _print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = [name for name in rows[0] if any(row[name] not in (None, "", ()) for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    texts = [[_words(name), *(_text(row[name]) for row in rows)] for name in names]
    for name, width in zip(names, _widths(texts, console.width), strict=True):
        is_number = all(isinstance(row[name], (int, float, type(None))) for row in rows)
        is_flag = any(isinstance(row[name], bool) for row in rows)
        table.add_column(
            _words(name),
            justify="right" if is_number and not is_flag else "left",
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*(Text(_text(row[name])) for name in names))
    console.print(f"\n{title}", markup=False, highlight=False, style="bold")
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths for a table of `width`; each longest word stays whole if all of them fit.

    Remaining space goes to the columns in order; missing space is taken from the widest ones. rich would narrow a
    single column and then cut off the last ones.
    """
    preferred = [max(map(len, texts)) for texts in columns]
    widths = [max(len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    widths[0] = min(preferred[0], _MAX_NAME)
    space = width - (3 * len(columns) - 1) - sum(widths)  # a blank at both sides, one between columns
    for index, most in enumerate(preferred):
        more = max(0, min(most - widths[index], space))
        widths[index] += more
        space -= more
    while space < 0 and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
        space += 1
    return widths


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: object) -> str:
    """Human-readable value: three significant digits for small or large floats, no quotes."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e5 else f"{value:.2f}"
    if isinstance(value, (str, int, Path)):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence):
        return ", ".join(_text(item) for item in value)
    return str(value)
