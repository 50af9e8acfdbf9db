"""Declared options: units, ranges, texts of every form, and the words that give a value back."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from mingc.cli import main
from mingc.deploy.options import DeployOptions
from mingc.errors import ConfigError
from mingc.export.recipe import ExportRecipe
from mingc.media.options import MediaOptions
from mingc.options import (
    BYTES,
    GIGABYTES,
    REQUIRED,
    SECONDS,
    Unit,
    changed_words,
    check,
    option,
    options_of,
    parse,
)
from mingc.probe.options import ProbeOptions
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions

KINDS = (DeployOptions, EngineOptions, ExportRecipe, MediaOptions, ProbeOptions, ServeOptions)
ALL = [each for kind in KINDS for each in options_of(kind).values()]


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = option(1 << 20, "--size", unit=BYTES, least=1, most=1 << 40, help="A size.")
    wait_s: float = option(2.0, "--wait", unit=SECONDS, above=0, help="A time.")
    share: float = option(0.5, "--share", least=0, most=1, help="A share.")
    count: int | None = option(None, "--count", least=1, help="A number.")
    ranks: int = option(1, "--ranks", choices=(1, 2, 4), help="A choice.")
    sizes: tuple[int, ...] = option((1, 2), "--sizes", help="Numbers.")
    names: tuple[str, ...] = option((), "--name", repeats=True, help="Texts.")
    folder: Path | None = option(None, "--folder", help="A path.")
    is_fast: bool = option(True, "--fast/--slow", help="A flag.")
    depth: int = option(3, least=0, help="Only in Python.")
    other: int = 0

    def __post_init__(self) -> None:
        check(self, *(["other is odd"] if self.other % 2 else []), where="here", fix="mend it")


def parsed(with_flags: bool = True, **given: Any) -> tuple[dict[str, Any], list[str]]:
    problems: list[str] = []
    return parse(Options, given, problems, with_flags=with_flags), problems


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        (BYTES, "128MiB", 134_217_728),
        (BYTES, "1GiB", 1_073_741_824),
        (BYTES, "1.5 GiB", 1_610_612_736),
        (BYTES, "96mib", 100_663_296),
        (BYTES, "2KiB", 2048),
        (BYTES, "1TiB", 1 << 40),
        (BYTES, "20GB", 20_000_000_000),
        (BYTES, "3MB", 3_000_000),
        (BYTES, "7kB", 7000),
        (BYTES, "5B", 5),
        (GIGABYTES, "20GB", 20),
        (GIGABYTES, "500MB", 0.5),
        (GIGABYTES, "1TB", 1000),
        (GIGABYTES, "1GiB", 1.073741824),
        (SECONDS, "30s", 30),
        (SECONDS, "5min", 300),
        (SECONDS, "2h", 7200),
        (SECONDS, "500ms", 0.5),
        (SECONDS, "1.5s", 1.5),
        (SECONDS, "30", None),
        (BYTES, "1000", None),
        (BYTES, "MiB", None),
        (BYTES, "-1MiB", None),
    ],
)
def test_a_quantity_is_a_number_with_its_unit(unit: Unit, text: str, value: float | None) -> None:
    assert unit.parse(text) == (value if value is None else pytest.approx(value, rel=1e-15))


@pytest.mark.parametrize("text", ["5m", "5 parsecs", "1K"])
def test_a_unit_that_does_not_exist_is_refused_with_all_that_do(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of the units h, min, s, ms"):
        SECONDS.parse(text)


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (BYTES, 134_217_728, "128MiB"),
        (BYTES, 1 << 40, "1TiB"),
        (BYTES, 5 << 30, "5GiB"),
        (BYTES, 20_000_000_000, "20GB"),
        (BYTES, 1536, "1536B"),
        (BYTES, 1500, "1500B"),
        (BYTES, 0, "0B"),
        (GIGABYTES, 20, "20GB"),
        (GIGABYTES, 0.5, "0.5GB"),
        (SECONDS, 7200, "2h"),
        (SECONDS, 90, "90s"),
        (SECONDS, 60.0, "1min"),
        (SECONDS, 0.5, "0.5s"),
    ],
)
def test_a_quantity_is_shown_in_the_largest_unit_that_divides_it(unit: Unit, value: float, text: str) -> None:
    assert unit.text(value) == text


def test_texts_and_values_are_parsed_alike() -> None:
    texts, none = parsed(
        size="2KiB", wait_s="1min", share="1", count="3", ranks="2", sizes="4, 8", names=("a,b", "c"), folder="d",
        is_fast="no", depth="7",
    )  # fmt: skip
    values, also_none = parsed(
        size=2048, wait_s=60, share=1, count=3, ranks=2, sizes=[4, 8], names=["a,b", "c"], folder=Path("d"),
        is_fast=False, depth=7,
    )  # fmt: skip
    assert texts == values and none == also_none == []
    assert texts == {
        **{"size": 2048, "wait_s": 60.0, "share": 1.0, "count": 3, "ranks": 2, "sizes": (4, 8), "depth": 7},
        **{"names": ("a,b", "c"), "folder": Path("d"), "is_fast": False},
    }
    assert [type(texts[name]) for name in ("size", "wait_s", "share")] == [int, float, float]
    assert parsed(count=None, folder=None) == ({"count": None, "folder": None}, [])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("size", "big", "--size big: not a whole number, nor one with a unit: TiB, TB, GiB"),
        ("size", "0.3B", "--size 0.3B: not a whole number"),
        ("size", "3m", "--size 3m: m is not one of the units TiB,"),
        ("size", 2.5, "--size 2.5: not a whole number"),
        ("size", True, "--size True: not a whole number"),
        ("wait_s", "x", "--wait x: not a number, nor one with a unit: h, min, s, ms"),
        ("share", "half", "--share half: not a number"),
        ("count", "1.5", "--count 1.5: not a whole number"),
        ("count", [1], "--count [1]: not a whole number"),
        ("ranks", None, "--ranks None: not a whole number"),
        ("sizes", "1,two", "--sizes 1,two: not a whole number"),
        ("sizes", "1,,2", "--sizes 1,,2: an item is empty"),
        ("sizes", "", "--sizes: is empty"),
        ("sizes", 3, "--sizes 3: not a list"),
        ("folder", "", "--folder: the path is empty"),
        ("folder", 3, "--folder 3: not a text"),
        ("is_fast", "maybe", "--fast maybe: not true or false"),
        ("depth", "x", "depth x: not a whole number"),
    ],
)
def test_a_text_of_another_type_is_refused_by_the_name_that_was_used(
    name: str, value: object, says: str
) -> None:
    found, (problem,) = parsed(**{name: value})
    assert problem.startswith(says) and found == {}
    _, (in_python,) = parsed(with_flags=False, **{name: value})
    assert in_python.startswith(f"{name}={value!r}: ")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("size", 0, "--size 0B: must be from 1B to 1TiB"),
        ("size", 1 << 41, "--size 2TiB: must be from 1B to 1TiB"),
        ("size", 10**400, "--size 1000"),
        ("wait_s", 0, "--wait 0s: must be above 0s"),
        ("wait_s", math.nan, "--wait nan: must be a finite number"),
        ("wait_s", math.inf, "--wait inf: must be a finite number"),
        ("share", 1.5, "--share 1.5: must be from 0 to 1"),
        ("count", 0, "--count 0: must be at least 1"),
        ("ranks", 3, "--ranks 3: must be one of 1, 2, 4"),
        ("depth", -1, "depth -1: must be at least 0"),
    ],
)
def test_a_value_outside_of_its_range_is_refused(name: str, value: float, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**{name: value})
    assert caught.value.message.startswith(says)
    assert (caught.value.where, caught.value.fix) == ("here", "mend it")


def test_the_bounds_of_a_range_are_in_it() -> None:
    Options(size=1, share=0, count=1, ranks=4, depth=0)
    Options(size=1 << 40, share=1, wait_s=1e-9, count=None)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Options(size=0, ranks=3, other=1)
    assert caught.value.message.splitlines() == [
        "--size 0B: must be from 1B to 1TiB",
        "--ranks 3: must be one of 1, 2, 4",
        "other is odd",
    ]


def test_the_words_of_options_are_those_that_change_a_default() -> None:
    assert changed_words(Options()) == changed_words(Options(is_fast=False), {"is_fast": False}) == []
    assert changed_words(Options(), {"is_fast": False}) == ["--fast"]
    changed = Options(
        size=1 << 30, names=("a", "b c"), sizes=(4, 8), is_fast=False, folder=Path("d"), depth=9
    )
    assert changed_words(changed) == [
        *("--size", "1GiB", "--sizes", "4,8", "--name", "a", "--name", "b c", "--folder", "d", "--slow"),
    ]


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.label)
def test_every_declared_default_is_in_its_range_and_can_be_written(each: Any) -> None:
    assert each.help.endswith("."), "help is a sentence"
    assert each.flag is None or each.group, "an option of the command line is in a group"
    if each.item in (int, float) and not each.is_list:
        bounds = (each.least, each.above, *each.choices)
        assert any(bound is not None for bound in bounds), "a number has a range"
    if each.default not in (REQUIRED, None, ()):
        assert each.problems(each.default) == []
        assert each.parse(each.text(each.default) if not each.repeats else each.default) == each.default


NO_SUCH_MACHINE = ("inf", "-inf", "nan", "1e300", str(10**30), str(-(10**30)))


@pytest.mark.parametrize("kind", [ServeOptions, MediaOptions, EngineOptions, DeployOptions])
def test_no_server_is_started_with_a_number_that_no_machine_has(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    required = {name: "x" for name, each in options_of(kind).items() if each.default is REQUIRED}
    for name, each in options_of(kind).items():
        if each.item not in (int, float):
            continue
        for text in NO_SUCH_MACHINE:
            with pytest.raises(ConfigError) as caught:
                kind(**required, **{name: float(text)})
            assert each.label in caught.value.message and each.range in caught.value.message
            if each.flag is None:
                continue
            with pytest.raises(SystemExit) as exited:
                main(["serve", "nowhere", f"{each.flag}={text}"])
            error = capsys.readouterr().err
            assert exited.value.code == 2 and each.flag in error and "Traceback" not in error


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_is_declared_twice(kind: type) -> None:
    flags = [word for each in options_of(kind).values() if each.flag for word in each.flag.split("/")]
    assert len({*flags}) == len(flags)
    assert {*options_of(kind)} <= {each.name for each in fields(kind)}
