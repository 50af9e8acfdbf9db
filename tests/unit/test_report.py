"""Results as tables and as JSON; errors on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import mingc
from mingc.console import report
from mingc.console.report import MAX_COLUMNS, show, show_error
from mingc.errors import MingcError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    stage: str
    seconds: float
    engine_bytes: int
    is_ok: bool = True
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    output: Path
    total_seconds: float
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    secret: str = field(default="for machines", metadata={"shown": False})


RESULT = Result(
    output=Path("artifacts/tiny"),
    total_seconds=12.345,
    notes=("first", "second"),
    rows=(
        Row(stage="thinker", seconds=3.0, engine_bytes=1024),
        Row(stage="cfm", seconds=1e-7, engine_bytes=7),
    ),
)


def shown(result: object, *, as_json: bool = False) -> str:
    stream = io.StringIO()
    show(result, as_json=as_json, stream=stream)
    return stream.getvalue()


def test_without_a_terminal_a_result_is_lines_and_a_table_without_colour() -> None:
    text = shown(RESULT)
    assert "\x1b" not in text
    assert "output         artifacts/tiny" in text
    assert "total seconds  12.3" in text
    assert "first" in text and "second" in text
    assert "for machines" not in text
    header = next(line for line in text.splitlines() if "engine size" in line)
    assert "note" not in header, "an empty column is left out"
    row = next(line for line in text.splitlines() if "thinker" in line)
    assert header.index("engine size") + len("engine size") == row.index("1KiB") + 4, (
        "numbers are right aligned"
    )
    assert "1.00e-07" in text


def test_a_column_is_shown_when_one_row_has_a_value() -> None:
    rows = (RESULT.rows[0], replace(RESULT.rows[1], note="slow"))
    text = shown(replace(RESULT, rows=rows))
    assert "note" in next(line for line in text.splitlines() if "engine size" in line)
    assert "slow" in next(line for line in text.splitlines() if line.strip().startswith("cfm"))


def test_a_column_of_zeros_or_of_no_is_shown() -> None:
    rows = tuple(replace(row, seconds=0.0, engine_bytes=0, is_ok=False) for row in RESULT.rows)
    header = next(
        line for line in shown(replace(RESULT, rows=rows)).splitlines() if line.strip().startswith("stage")
    )
    assert "seconds" in header and "engine size" in header and "ok" in header


def test_json_is_one_document_with_the_field_names() -> None:
    document = json.loads(shown(RESULT, as_json=True))
    assert set(document) == {"output", "total_seconds", "notes", "rows", "secret"}
    assert document["output"] == "artifacts/tiny"
    assert document["rows"][0] == {
        "stage": "thinker",
        "seconds": 3.0,
        "engine_bytes": 1024,
        "is_ok": True,
        "note": None,
    }


def test_no_line_of_a_table_exceeds_100_columns() -> None:
    rows = tuple(Row(stage="stage " * 30, seconds=1.0, engine_bytes=1, note="note " * 60) for _ in range(2))
    result = Result(output=Path("x"), total_seconds=0.0, notes=(), rows=rows)
    assert max(map(len, shown(result).splitlines())) <= MAX_COLUMNS


def test_no_column_is_cut_off_to_keep_the_width() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Wide:
        engine: str
        median_ms: float
        p95_ms: float
        p99_ms: float
        min_ms: float
        no_graph_ms: float
        enqueue_ms: float
        last_column_of_all: float

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Wides:
        rows: tuple[Wide, ...]

    numbers = (111.0, 12.2, 1.33, 0.144, 0.0155, 0.00166, 1777.0)
    names = ("median_ms", "p95_ms", "p99_ms", "min_ms", "no_graph_ms", "enqueue_ms", "last_column_of_all")
    wide = Wide(engine="thinker.prefill T=256 P=2048 +256", **dict(zip(names, numbers, strict=True)))
    text = shown(Wides(rows=(wide,)))
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert all(f" {str(number).removesuffix('.0')} " in text for number in numbers)
    assert wide.engine in text


def test_words_of_a_list_are_not_broken() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Stage:
        stage: str
        graphs: tuple[str, ...]
        backends: tuple[str, ...]
        engines: int
        engine_bytes: int
        weight_bytes: int
        worst_relative_error: float

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Stages:
        stages: tuple[Stage, ...]

    graphs = ("decode_attention", "decode_experts", "embed", "head", "prefill_attention", "prefill_experts")
    stage = Stage(
        stage="thinker",
        graphs=graphs,
        backends=("aoti",),
        engines=7,
        engine_bytes=22105619,
        weight_bytes=3268736,
        worst_relative_error=5.91e-7,
    )
    text = shown(Stages(stages=(stage,)))
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert all(graph in text for graph in graphs) and "5.91e-07" in text


@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_cannot_be_written_is_an_error_naming_stdout(as_json: bool) -> None:
    words = ["doctor", "--json"] if as_json else ["doctor"]
    code = (
        "from mingc.cli import main; import mingc.commands.doctor_report as doctor\n"
        "report = doctor.DoctorReport(can_export=True, can_serve=True, checks=())\n"
        "doctor.examine = lambda artifacts: report\n"
        f"main({words})"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        )
    assert done.returncode == 1, done.stderr
    assert "the result cannot be written: No space left" in done.stderr and "where: stdout" in done.stderr
    assert "bug of mingc" not in done.stderr and "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_closed_stdout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(MingcError, match="stdout is closed"):
        show(MingcError, as_json=True)


def test_an_error_that_cannot_be_written_to_stdout_is_printed_once() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mingc", "nosuch", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("mingc: error: No such command")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_markup_in_a_value_is_not_interpreted() -> None:
    result = Result(output=Path("[red]x[/red]"), total_seconds=0.0, notes=("[bold]",), rows=RESULT.rows)
    assert "[red]x[/red]" in shown(result) and "[bold]" in shown(result)


def test_an_error_goes_to_stderr_and_with_json_also_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    error = MingcError("wrong", where="here", fix="mend it")
    show_error(error, as_json=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "mingc: error: wrong\n  where: here\n  fix: mend it\n"
    show_error(error, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"error": error.to_json()}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "yes"),
        (False, "no"),
        (0.0, "0"),
        (0.00999, "0.00999"),
        (0.01, "0.0100"),
        (-0.5, "-0.500"),
        (99999.4, "99999"),
        (100000.0, "100000"),
        (-123456.0, "-123456"),
        (7, "7"),
        ({"B": 2, "T": None}, "B=2, T="),
        (("a", 1.5), "a, 1.50"),
        (Path("a/b"), "a/b"),
    ],
    ids=repr,
)
def test_values_for_people(value: object, text: str) -> None:
    assert report._text(value) == text


def test_nested_results_are_lines_and_mappings_are_tables() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Inner:
        device: str
        rate_hz: float | None

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Chosen:
        name: str

        def cells(self) -> dict[str, str]:
            return {} if self.name == "passed" else {"chosen": self.name}

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Outer:
        peak: Inner
        stages: dict[str, Inner]
        rows: tuple[Chosen, ...]
        nothing: int | None = None

    result = Outer(
        peak=Inner(device="cpu", rate_hz=None),
        stages={"cfm": Inner(device="gpu", rate_hz=1.0)},
        rows=(Chosen(name="passed"), Chosen(name="failed")),
    )
    lines = [line.split() for line in shown(result).splitlines()]
    assert ["peak", "device", "cpu"] in lines and ["peak", "rate", "hz"] not in [line[:3] for line in lines]
    assert ["name", "device", "rate", "hz"] in lines and ["cfm", "gpu", "1.00"] in lines
    assert ["chosen"] in lines and ["failed"] in lines and ["passed"] not in lines
    assert not any(line[:1] == ["nothing"] for line in lines)
    assert [row["name"] for row in json.loads(shown(result, as_json=True))["rows"]] == ["passed", "failed"]


def test_text_of_other_scripts_stays_readable_in_json() -> None:
    text = shown(Row(stage="感谢", seconds=0.0, engine_bytes=0), as_json=True)
    assert "感谢" in text and text.endswith("}\n") and text.count("\n") > 3


def test_a_wide_terminal_gets_no_wider_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for columns in (300, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal = Terminal()
        rows = tuple(Row(stage="s " * 200, seconds=1.0, engine_bytes=1) for _ in range(2))
        result = Result(output=Path("x"), total_seconds=0.0, notes=(), rows=rows)
        show(result, as_json=False, stream=terminal)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
        assert min(columns, MAX_COLUMNS) - 3 <= max(map(len, plain.splitlines())) <= min(columns, MAX_COLUMNS)


def test_a_result_as_a_whole() -> None:
    """Scalars, then tables: words left, numbers right, flags as words, empty columns left out, titles on top."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Measured:
        name: str
        calls: int | None
        share: float
        is_new: bool
        sizes: tuple[int, ...] = ()
        note: str | None = None

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Whole:
        output: Path
        is_done: bool
        empty: tuple[str, ...]
        first_rows: tuple[Measured, ...]
        more: tuple[Measured, ...] = ()
        last: str = "end"

    first = Measured(name="one", calls=7, share=0.5, is_new=False, sizes=(1, 2))
    other = Measured(name="another name", calls=None, share=1e-3, is_new=True)
    text = shown(Whole(output=Path("a/b"), is_done=False, empty=(), first_rows=(first, other)))
    rule = "─" * 50
    assert text.splitlines() == [
        "output   a/b",
        "is done  no",
        "last     end",
        "",
        "first rows",
        " name           calls     share   is new   sizes ",
        text.splitlines()[6],
        " one                7     0.500   no       1, 2  ",
        " another name           0.00100   yes            ",
    ]
    assert {*text.splitlines()[6]} == {*rule}


def test_an_error_without_place_or_fix_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(MingcError("wrong"), as_json=False)
    assert capsys.readouterr().err == "mingc: error: wrong\n"
    show_error(MingcError("wrong", fix="mend it"), as_json=False)
    assert capsys.readouterr().err == "mingc: error: wrong\n  fix: mend it\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    engine: str
    file: Path
    first_ms: float
    second_ms: float
    third_ms: float
    fourth_ms: float
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    rows: tuple[Measurement, ...]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_table_that_is_too_wide_is_continued_below_with_every_word_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    row = Measurement(
        engine="thinker.prefill_attention T=256", file=Path("engines/thinker/prefill_attention.pt2"),
        first_ms=1111.25, second_ms=2222.25, third_ms=3333.25, fourth_ms=4444.25, note="some words more",
    )  # fmt: skip
    terminal = Terminal()
    show(Measurements(rows=(row,)), as_json=False, stream=terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert max(map(len, text.splitlines())) <= max(columns, len(str(row.file)) + len(row.engine) + 5)
    for word in (row.engine, str(row.file), "1111", "2222", "3333", "4444", "some", "words"):
        assert word in text
    parts = sum(line.lstrip().startswith("engine ") for line in text.splitlines())
    assert parts == text.count(row.engine) > 1, "every part names its rows"


def test_a_continued_table_lacks_rows_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    row = Measurement(
        engine="thinker.prefill", file=Path("engines/thinker/prefill_attention.pt2"),
        first_ms=1.0, second_ms=2.0, third_ms=3.0, fourth_ms=4.0,
    )  # fmt: skip
    noted = replace(row, engine="thinker.decode", note="a/note/as/long/as/the/rest/of/the/terminal")
    terminal = Terminal()
    show(Measurements(rows=(row, noted)), as_json=False, stream=terminal)
    assert terminal.getvalue().count("thinker.decode") == 3
    assert terminal.getvalue().count("thinker.prefill ") == 2, "it has no note"


def test_a_long_line_on_a_terminal_ends_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    path = Path("a/very/long/path/that/is/longer/than/the/terminal")
    notes = ("decode_attention, decode_experts, prefill_attention",)
    terminal = Terminal()
    show(replace(RESULT, output=path, notes=notes, rows=()), as_json=False, stream=terminal)
    lines = terminal.getvalue().splitlines()
    assert str(path) in terminal.getvalue()
    assert [line.split() for line in lines[-3:]] == [
        ["notes", "decode_attention,"], ["decode_experts,"], ["prefill_attention"],
    ]  # fmt: skip
    assert shown(replace(RESULT, output=path, notes=notes, rows=())).count("\n") == 3, "as it is in a file"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (22_105_619, "21.1MiB"),
        (1 << 30, "1GiB"),
        (500 << 30, "500GiB"),
    ],
)
def test_a_size_has_a_unit(num_bytes: int, text: str) -> None:
    row = Row(stage="cfm", seconds=1.0, engine_bytes=num_bytes)
    table = shown(replace(RESULT, rows=(row,)))
    assert text in table.split() and "engine size" in table
    assert f'"engine_bytes": {num_bytes}' in shown(row, as_json=True)


def test_a_list_has_its_name_once(capsys: pytest.CaptureFixture[str]) -> None:
    show(replace(RESULT, notes=("one", "two", "three"), rows=()), as_json=False)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.split()[-1] in ("one", "two", "three")
    ]
    assert [line.split() for line in lines] == [["notes", "one"], ["two"], ["three"]]
    assert len({line.index(line.split()[-1]) for line in lines}) == 1


def test_an_error_in_another_script_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(MingcError("模型 fehlt für alle"), as_json=True)
    assert "模型 fehlt für alle" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "has_colour"), [(None, True), ("", True), ("1", False)])
def test_a_terminal_has_colours_unless_the_user_wants_none(
    value: str | None, has_colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert report._console(Terminal()).no_color is not has_colour


@pytest.mark.parametrize("is_result", [True, False])
def test_an_output_that_cannot_be_written_is_left_alone_at_exit(
    is_result: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still in the buffer goes nowhere; flushing it at exit would fail again."""
    with Path("/dev/full").open("w") as full:
        if is_result:
            with pytest.raises(MingcError, match="cannot be written: No space left on device") as caught:
                show(RESULT, as_json=True, stream=full)
            assert caught.value.where == "/dev/full"
        else:
            monkeypatch.setattr(sys, "stdout", full)
            show_error(MingcError("x"), as_json=True)
        full.write("more")
        full.flush()


def test_texts_of_clients_cannot_command_the_terminal() -> None:
    """Clients choose the notes of voices, which `mingc voices list` shows."""
    hostile = "\x1b[2J\x9b0m\x07\u202e\ud800"
    row = Row(stage="a", seconds=1.0, engine_bytes=1, note=hostile)
    for result in (row, replace(RESULT, rows=(row,), notes=(hostile,))):
        shown = io.StringIO()
        show(result, as_json=False, stream=shown)
        assert r"\x1b[2J\x9b0m\x07\u202e\ud800" in shown.getvalue()
        assert shown.getvalue().replace("\n", "").isprintable()
