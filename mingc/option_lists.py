"""Options whose value is a list with commas, as callbacks of click."""

from __future__ import annotations

import click

from mingc.errors import ConfigError


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
