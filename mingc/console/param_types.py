"""Option types beyond click's own: comma-separated lists (click callbacks), and paths that must not be empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mingc.errors import ConfigError


class PathParam(click.Path):
    """Option type of a `pathlib.Path`. Refuses an empty path (an unset variable), which would be the working folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


def names(_: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Parse `a, b` as two names; None if the option is not given. Raises: ConfigError."""
    return None if text is None else _items(option.opts[0], text)


def numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Parse `1,2` as two numbers; None if the option is not given. Raises: ConfigError."""
    name = option.opts[0]
    try:
        return None if text is None else tuple(map(int, _items(name, text)))
    except ValueError as error:
        raise ConfigError(
            f"{name} {text}: not a list of whole numbers", where=name, fix="write 1,2,4"
        ) from error


def _items(name: str, text: str) -> tuple[str, ...]:
    """Items between the commas. Raises: ConfigError for an empty item."""
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        problem = "is empty" if not any(items) else f"{text}: an item is empty"
        raise ConfigError(f"{name} {problem}", where=name, fix="write all items, or leave the option out")
    return items
