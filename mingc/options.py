"""Declaration of options: the fields of frozen dataclasses, from which everything else about an option is derived.

A field declared with `option` carries its name on the command line, unit, range, help and group. The commands, the
range checks, the arguments of Ray Serve and docs/cli.md read them from there. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mingc.errors import ConfigError

REQUIRED = dataclasses.MISSING
_KEY = "option"
_MAX_EXACT = 1 << 53  # below it a float holds every whole number
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """How numbers of a quantity are written. A number without a unit counts in the unit of the field.

    Attributes:
        metavar: name of the quantity in help.
        factors: what each unit is in the unit of the field, the largest first.
    """

    metavar: str
    factors: Mapping[str, float]

    def parse(self, text: str) -> float | None:
        """Return the number that `128MiB` stands for; None for a text without a unit. Raises: ValueError."""
        found = _QUANTITY.fullmatch(text.strip())
        if found is None:
            return None
        names = {name.lower(): factor for name, factor in self.factors.items()}
        if found[2].lower() not in names:
            raise ValueError(f"{found[2]} is not one of the units {', '.join(self.factors)}")
        return float(found[1]) * names[found[2].lower()]

    def text(self, value: float) -> str:
        """Write the value with the largest unit that divides it, such as 128MiB."""
        if not -math.inf < value < math.inf:
            return str(value)
        for name, factor in self.factors.items():
            if isinstance(factor, int) and value and abs(value) < _MAX_EXACT and value % factor == 0:
                return f"{int(value // factor)}{name}"
        return f"{value}{next(name for name, factor in self.factors.items() if factor == 1)}"


BYTES = Unit(
    metavar="SIZE",
    factors={"TiB": 1 << 40, "TB": 10**12, "GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}
    | {"KiB": 1 << 10, "kB": 1000, "B": 1},
)
GIGABYTES = Unit(
    metavar="SIZE", factors={"TB": 1000, "GB": 1, "MB": 1e-3, "TiB": 2**40 / 1e9, "GiB": 2**30 / 1e9}
)
MOST_BYTES = 1 << 44  # 16 TiB: no machine has so much, and clocks and counters work up to there
MOST_SECONDS = 1000 * 3600
SECONDS = Unit(metavar="DURATION", factors={"h": 3600, "min": 60, "s": 1, "ms": 1e-3})


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A declared field of a dataclass.

    Attributes:
        name, kind, default: of the field.
        flag: name on the command line, `--yes/--no` for a flag that can be switched off; None: not on the command line.
        least, above, most: the range of a number: at least, more than, at most. None is always allowed where the field
            allows it.
        choices: the allowed values; empty: all in the range.
        metavar: what stands for the value in help, where the type does not say it.
        shown_default: what the default means, where the value does not say it.
        repeats: the command line takes the option once for each item; otherwise commas separate the items.
    """

    name: str = ""
    kind: Any = None
    default: Any
    flag: str | None
    help: str
    group: str = ""
    unit: Unit | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()
    metavar: str | None = None
    shown_default: str | None = None
    repeats: bool = False

    @property
    def label(self) -> str:
        """Name for messages: the option on the command line, or the field."""
        return (self.flag or self.name).partition("/")[0]

    @property
    def item(self) -> Any:
        """The type of a value, without None, or of an item of a list."""
        kind = self.kind
        if self.may_be_none:
            (kind,) = (each for each in kind.__args__ if each is not type(None))
        return kind.__args__[0] if typing.get_origin(kind) is tuple else kind

    @property
    def may_be_none(self) -> bool:
        """Whether None is a value."""
        return isinstance(self.kind, types.UnionType)

    @property
    def is_list(self) -> bool:
        """Whether the value is a tuple."""
        return any(typing.get_origin(each) is tuple for each in (self.kind, *typing.get_args(self.kind)))

    @property
    def placeholder(self) -> str:
        """What stands for the value in help."""
        if self.metavar is not None:
            return self.metavar
        if self.choices:
            return f"[{'|'.join(map(str, self.choices))}]"
        if self.unit is not None:
            return self.unit.metavar
        word = {int: "N", float: "NUMBER", Path: "PATH"}.get(self.item, "TEXT")
        return f"{word},…" if self.is_list and not self.repeats else word

    @property
    def range(self) -> str:
        """The allowed values in words, such as `at least 1`; empty for all."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.least is not None and self.most is not None:
            return f"from {self.text(self.least)} to {self.text(self.most)}"
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return " and ".join(f"{word} {self.text(bound)}" for word, bound in bounds if bound is not None)

    def text(self, value: Any) -> str:
        """Write the value as a user would."""
        if isinstance(value, tuple):
            return ",".join(map(self.text, value))
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float) and abs(value) < _MAX_EXACT and value.is_integer():
            value = int(value)
        if self.unit is not None and isinstance(value, int | float):
            return self.unit.text(value)
        return str(value)

    def parse(self, value: Any) -> Any:
        """Parse a text, or a value of a config file. Raises: ValueError with the reason."""
        if value is None and self.may_be_none:
            return None
        if not self.is_list:
            return _parsed(value, self.item, self.unit)
        if not isinstance(value, str | list | tuple):
            raise ValueError("not a list")
        items = [str(each).strip() for each in (value.split(",") if isinstance(value, str) else value)]
        if not all(items) and not self.repeats:
            raise ValueError("an item is empty" if any(items) else "is empty")
        return tuple(_parsed(each, self.item, self.unit) for each in items)

    def problems(self, value: Any) -> list[str]:
        """Say in one sentence that a value is outside of the range; empty for a valid value."""
        if value is None or isinstance(value, bool):
            return []
        if isinstance(value, float) and not math.isfinite(value):
            return [
                f"{self.label} {self.text(value)}: must be a finite number{self.range and ', '}{self.range}"
            ]
        if self.choices:
            is_good = value in self.choices
        elif isinstance(value, int | float):
            is_good = (
                (self.least is None or value >= self.least)
                and (self.above is None or value > self.above)
                and (self.most is None or value <= self.most)
            )
        else:
            is_good = True
        return [] if is_good else [f"{self.label} {self.text(value)}: must be {self.range}"]


def _parsed(value: Any, kind: Any, unit: Unit | None) -> Any:
    """Parse `value` as a bool, int, float, text or path. Raises: ValueError."""
    if kind is bool:
        if str(value).lower() not in _TRUE + _FALSE:
            raise ValueError("not true or false")
        return str(value).lower() in _TRUE
    if kind in (str, Path):
        if not isinstance(value, str | os.PathLike):  # an empty line of a config file would be "None"
            raise ValueError("not a text")
        if kind is Path and str(value) == "":  # an unset variable, which would be the working folder
            raise ValueError("the path is empty")
        return kind(value)
    noun = "whole number" if kind is int else "number"
    number = unit.parse(value) if unit is not None and isinstance(value, str) else None
    value = value if number is None else number
    try:
        if isinstance(value, str) and ("_" in value or not value.isascii()):  # digits that Python would take
            raise TypeError
        if isinstance(value, bool) or (
            kind is int and isinstance(value, float) and (number is None or value % 1)
        ):
            raise TypeError
        return kind(value)
    except (TypeError, ValueError) as error:
        example = "" if unit is None else f", nor one with a unit: {', '.join(unit.factors)}"
        raise ValueError(f"not a {noun}{example}") from error


def option(default: Any, flag: str | None = None, **told: Any) -> Any:
    """A dataclass field that is an option, `told` as the attributes of `Option`. `REQUIRED`: it has no default."""
    return dataclasses.field(default=default, metadata={_KEY: Option(default=default, flag=flag, **told)})


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """The declared fields of a dataclass by name."""
    hints = typing.get_type_hints(kind)
    return {
        each.name: dataclasses.replace(each.metadata[_KEY], name=each.name, kind=hints[each.name])
        for each in dataclasses.fields(kind)
        if _KEY in each.metadata
    }


def check(options: Any, *others: str, where: str, fix: str) -> None:
    """Raise a ConfigError that names all options outside of their ranges, and the `others` that are wrong."""
    kind: type = type(options)
    problems = [
        problem
        for each in options_of(kind).values()
        for problem in each.problems(getattr(options, each.name))
    ]
    refuse([*dict.fromkeys([*problems, *others])], where=where, fix=fix)


def refuse(problems: Collection[str], *, where: str, fix: str) -> None:
    """Raise a ConfigError with all `problems`, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems), where=where, fix=fix)


def parse(kind: type, given: Mapping[str, Any], problems: list[str], *, with_flags: bool) -> dict[str, Any]:
    """Values of the options `given` by name. Adds to `problems` why others cannot be parsed.

    With `with_flags` a problem names the option as the command line does, otherwise as Python does; there the text
    `none` means None.
    """
    found = {}
    for name, value in given.items():
        each = options_of(kind)[name]
        if value == "none" and each.may_be_none and not with_flags:
            value = None
        try:
            found[name] = each.parse(value)
        except ValueError as error:
            shown = f"{each.label} {value}".rstrip() if with_flags else f"{name}={value!r}"
            problems.append(f"{shown}: {error}")
    return found


def changed_words(options: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Words of a command line for all options that differ from their defaults, which `defaults` may replace."""
    kind: type = type(options)
    words = []
    for each in options_of(kind).values():
        value = getattr(options, each.name)
        if each.flag is None or value == defaults.get(each.name, each.default):
            continue
        on, _, off = each.flag.partition("/")
        if isinstance(value, bool):
            words.append(on if value else off)
        elif each.repeats:
            words += [word for item in value for word in (on, each.text(item))]
        else:
            words += [on, each.text(value)]
    return words
