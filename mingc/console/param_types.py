"""What options take beyond click's own types: lists with commas (callbacks of click), and paths that name something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mingc.errors import ConfigError


class PathParam(click.Path):
    """A `pathlib.Path`. An empty one, as of a variable that is not set, would be the working folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


def names(_: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """`a, b` as two names; None where the option is not given. Raises: ConfigError."""
    return None if text is None else _items(option.opts[0], text)


def numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """`1,2` as two numbers; None where the option is not given. Raises: ConfigError."""
    name = option.opts[0]
    try:
        return None if text is None else tuple(map(int, _items(name, text)))
    except ValueError as error:
        raise ConfigError(
            f"{name} {text}: not a list of whole numbers", where=name, fix="write 1,2,4"
        ) from error


def _items(name: str, text: str) -> tuple[str, ...]:
    """What stands between the commas. Raises: ConfigError where that is nothing."""
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        problem = "names nothing" if not any(items) else f"{text}: an item between its commas is missing"
        raise ConfigError(f"{name} {problem}", where=name, fix="write all items, or leave the option out")
    return items
