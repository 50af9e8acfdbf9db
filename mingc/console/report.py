"""Output of a result dataclass: tables for people, or one JSON document. Independent of the result types.

Scalar fields become lines `name  value`; a tuple of dataclasses (or a mapping to dataclasses) becomes a table with one
column per field. No name, number or path is broken at the end of a line: a table that is too wide is continued below,
with its first column again. Fields that end in `_bytes` are shown with a unit; other units are part of the field names,
and so of the headers. A field with `metadata={"shown": False}` appears in the JSON only; a row with a method `cells`
selects its own columns, and appears in the JSON only when the method returns none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mingc.artifacts.codec import encode
from mingc.errors import MingcError, printable

if TYPE_CHECKING:
    from rich.console import Console

MAX_COLUMNS = 100
_MAX_NAME = 52  # the first column is not narrowed below this width
_UNIT_NAMES = {"mb": "MB", "gb": "GB", "gb s": "GB/s", "tb s": "TB/s", "gflop": "GFLOP", "tflop s": "TFLOP/s"}
_UNITS = re.compile(r"\b(?:[gt]b s|tflop s|gflop|[mg]b)\b")


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
        text = _wrapped(
            f"{name:{width}}  {value}", " " * (width + 2), console.width if stream.isatty() else None
        )
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for title, rows in tables:
        _print_table(console, title, rows)
    stream.flush()


def show_error(error: MingcError, *, as_json: bool) -> None:
    """Write an error to stderr and, with `as_json`, also as an object to stdout."""
    width = _console(sys.stderr).width if sys.stderr.isatty() else None
    for label, text in (
        ("mingc: error", error.message.replace("\n", "\n  ")),
        ("  where", error.where),
        ("  fix", error.fix),
    ):
        if text:
            print(_wrapped(f"{label}: {text}", "    ", width), file=sys.stderr)
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


def _wrapped(text: str, indent: str, width: int | None) -> str:
    """Wrap `text` between words to lines of `width`, and indent all but the first; None: unchanged."""
    if width is None:
        return text
    if len(indent) + max(map(len, text.split()), default=0) > width:
        indent = "  "
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
        drop_whitespace=True,
    )  # fmt: skip
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    if stream.isatty():
        console = Console(file=stream, no_color=bool(os.environ.get("NO_COLOR")) or None)
        console.width = min(console.width, MAX_COLUMNS)
        return console
    return Console(file=stream, width=MAX_COLUMNS, force_terminal=False, no_color=True)


def _split(result: object) -> tuple[list[tuple[str, str]], list[tuple[str, list[dict[str, Any]]]]]:
    """Split a result into scalar lines and tables, in field order."""
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
            lines.extend((title if i == 0 else "", _text(item, field.name)) for i, item in enumerate(value))
        elif dataclasses.is_dataclass(value):
            lines.extend(
                (f"{title} {_words(key)}", _text(item, key))
                for key, item in _row(value).items()
                if item is not None
            )
        elif value is not None:
            lines.append((title, _text(value, field.name)))
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
    names = [name for name in rows[0] if any(row[name] not in (None, "", ()) for row in rows)]
    texts = {name: [_words(name), *(_text(row[name], name) for row in rows)] for name in names}
    console.print(f"\n{title}", markup=False, highlight=False, style="bold")
    least = {name: max(len(word) for text in texts[name] for word in text.split() or [""]) for name in names}
    # The first column also keeps names of several words whole.
    whole = min(max(map(len, texts[names[0]])), _MAX_NAME, console.width * 2 // 3)
    least[names[0]] = max(least[names[0]], whole)
    for index, part in enumerate(_parts(least, console.width)):
        _print_part(console, part, rows, texts, is_continued=index > 0)


def _parts(least: Mapping[str, int], width: int) -> list[dict[str, int]]:
    """Columns with their least widths for each of several tables of `width`; the first column is in all of them."""
    first, *others = least
    parts = [{first: least[first]}]
    for name in others:
        if len(parts[-1]) > 1 and _width([*parts[-1].values(), least[name]]) > width:
            parts.append({first: least[first]})
        parts[-1][name] = least[name]
    return parts


def _width(widths: Sequence[int]) -> int:
    """Width of a table: a blank at both sides of a column, one between two."""
    return sum(widths) + 3 * len(widths) - 1


def _print_part(
    console: Console,
    least: Mapping[str, int],
    rows: list[dict[str, Any]],
    texts: Mapping[str, Sequence[str]],
    *,
    is_continued: bool,
) -> None:
    """Print the columns of `least`, which get the remaining space in their order.

    A continued table has no rows without a value of their own.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    space = console.width - _width([*least.values()])
    for name, width in least.items():
        more = max(0, min(max(map(len, texts[name])) - width, space))
        space -= more
        values = [row[name] for row in rows]
        is_number = all(
            isinstance(value, int | float | None) and not isinstance(value, bool) for value in values
        )
        table.add_column(_words(name), justify="right" if is_number else "left", width=width + more)
    for first, *others in zip(*(texts[name][1:] for name in least), strict=True):
        if any(others) or not is_continued:
            table.add_row(*map(Text, (first, *others)))
    whole = console.width
    console.width = max(whole, _width([*least.values()]))  # a single long word is not cut either
    console.print(table)
    console.width = whole


def _words(name: str) -> str:
    """Turn a field's name into words. A size is shown with its unit, so its name does not say `bytes`."""
    words = [word for word in name.split("_") if word != "num" or not _is_size(name)]
    has_noun = "size" in words
    text = " ".join("size" if word == "bytes" else word for word in words if word != "bytes" or not has_noun)
    return _UNITS.sub(lambda found: _UNIT_NAMES[found[0]], text)


def _is_size(name: str) -> bool:
    return "bytes" in name.split("_")


def _text(value: object, name: str = "") -> str:
    """Write the value of the field `name` for people: no quotes, floats with three significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and _is_size(name):
        return _size(value)
    if isinstance(value, float):
        return f"{value:.0f}" if value == 0 or abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
    if isinstance(value, (str, int, Path)):
        return printable(str(value))  # a client may have written it
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item, name)}" for key, item in value.items())
    if isinstance(value, Sequence):
        return ", ".join(_text(item, name) for item in value)
    return str(value)


def _size(num_bytes: int) -> str:
    """Bytes with a unit and about three significant digits."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= factor:
            value = num_bytes / factor
            return f"{value:.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"
    return f"{num_bytes}B"
