"""Options whose value is a list with commas, as callbacks of click."""

from __future__ import annotations

import click

from mingc.errors import ConfigError


def names(_: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """`a, b` as two names; None where the option is not given."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """`1,2` as two numbers; None where the option is not given. Raises: ConfigError."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        name = option.opts[0]
        raise ConfigError(
            f"{name} {text}: not a list of whole numbers", where=name, fix="write 1,2,4"
        ) from error
