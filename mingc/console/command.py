"""Parts of every command: help in groups, options from declarations, `--json` and `--debug`, exit codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup
from click.core import ParameterSource
from cloup.styling import IStyle

from mingc.errors import ConfigError
from mingc.options import REQUIRED, Option, options_of, parse, refuse

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

FOUND_PROBLEMS = 3  # exit code of a command that ran to its end and found problems

# Stand-ins for a blank and a hyphen at which a line must not end.
_KEPT = {" ": "\u00a0", "-": "\u2011"}
_NOTE = re.compile(r"\[[^\[\]]+\]$")  # such as [default: 128MiB]


class PathParam(click.Path):
    """Option type of a `pathlib.Path`. Refuses an empty path (an unset variable), which would be the working folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


class TextParam(click.types.StringParamType):
    """Type of a text that is kept or encoded. Refuses bytes that are not UTF-8, which Python holds as surrogates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("it is not UTF-8 text.", param, ctx)
        return text


PATH = PathParam()
TEXT = TextParam()


def usage_error(error: click.ClickException, program: str) -> ConfigError:
    """What click found wrong in the command line of `program`."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else program
    return ConfigError(error.format_message(), where=path, fix=f"see {path} --help")


class HelpFormatter(cloup.HelpFormatter):
    """Ends lines between words only, not at a hyphen inside the name of an option or inside a short default."""

    def write_text(self, text: str, style: IStyle = lambda text: text) -> None:
        super().write_text(_kept(text, self.available_width), style)

    def write_tabular_dl(self, rows: Sequence[Any], *widths: int) -> None:
        texts = [(first, second if isinstance(second, str) else second(widths[-1])) for first, second in rows]
        super().write_tabular_dl([(first, _kept(second, widths[-1])) for first, second in texts], *widths)

    def write(self, *strings: str) -> None:
        for plain, kept in _KEPT.items():
            strings = tuple(each.replace(kept, plain) for each in strings)
        super().write(*strings)


def _kept(text: str, width: int) -> str:
    """Replace the blanks and hyphens of `text` that must not end a line of `width` by marks."""
    note = _NOTE.search(text)
    if note is not None and len(note[0]) <= width:
        text = text[: note.start()] + note[0].replace(" ", _KEPT[" "])
    return text.replace("-", _KEPT["-"])


class Context(cloup.Context):
    """The context of a command, whose help `HelpFormatter` writes."""

    formatter_class = HelpFormatter


class _Option(cloup.Option):
    """An option whose help says what its default means as `on`, `off` or words."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        if self.is_bool_flag and self.secondary_opts:
            extra["default"] = "on" if self.default else "off"
        elif isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra


def option(*names: str, **settings: Any) -> Decorator:
    """Add an option that no dataclass declares."""
    return cloup.option(*names, cls=_Option, **settings)


class Command(cloup.Command):
    """One command."""

    context_class = Context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:  # click leaves the command out of some errors
            error.ctx = error.ctx or ctx
            raise


class Group(cloup.Group):
    """A command with sub-commands."""

    context_class = Context


def common(command: Function) -> Function:
    """Add the options that every command has."""
    for each in (
        click.option("--json", "as_json", is_flag=True, help="Write one JSON document to stdout."),
        click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors."),
    ):
        command = each(command)
    return command


def declared(
    *kinds: type,
    defaults: Mapping[str, Any] | None = None,
    others: Mapping[str, Sequence[Decorator]] | None = None,
) -> Decorator:
    """Add the options that the fields of `kinds` declare, in their groups; `given` makes values of them.

    Args:
        kinds: dataclasses with fields made by `mingc.options.option`.
        defaults: defaults of this command that differ from the declared ones, by name of the field.
        others: further options of the groups.
    """
    groups: dict[str, list[Decorator]] = {}
    for kind in kinds:
        for each in options_of(kind).values():
            if each.flag is not None:
                default = (defaults or {}).get(each.name, each.default)
                groups.setdefault(each.group, []).append(_click_option(each, default))
    for title, options in (others or {}).items():
        groups.setdefault(title, []).extend(options)

    def decorate(command: Any) -> Any:
        for title, options in reversed(groups.items()):
            command = cloup.option_group(title, *options)(command)
        return command

    return decorate


def _click_option(declaration: Option, default: Any) -> Decorator:
    """Make the option of click. Its value is the text that was given; `given` parses it."""
    assert declaration.flag is not None
    if declaration.kind is bool:
        return option(
            declaration.flag, declaration.name, is_flag=True, default=default, help=declaration.help
        )
    settings: dict[str, Any] = {"required": default is REQUIRED}
    if default not in (None, REQUIRED, ()):
        settings["default"] = (
            [*map(declaration.text, default)] if declaration.repeats else declaration.text(default)
        )
    return option(
        declaration.flag,
        declaration.name,
        type=str,
        metavar=declaration.placeholder,
        multiple=declaration.repeats,
        show_default=declaration.shown_default or True,
        help=declaration.help,
        **settings,
    )


def given(*kinds: type, where: str) -> list[dict[str, Any]]:
    """Values of the options of the running command that its user has given, by field, for each of `kinds`.

    Raises: ConfigError with every value that cannot be parsed.
    """
    context = click.get_current_context()
    found, problems = [], list[str]()
    for kind in kinds:
        texts = {
            name: context.params[name]
            for name in options_of(kind)
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        found.append(parse(kind, texts, problems, with_flags=True))
    refuse(problems, where=where, fix=f"see {where} --help")
    return found
