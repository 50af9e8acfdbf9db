"""The `mingc` command: the group of all commands, which are loaded when they are asked for, and what errors become."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click
import cloup

from mingc import __version__
from mingc.console.command import Group, HelpFormatter, usage_error
from mingc.console.signals import INTERRUPTED, clean_shutdown
from mingc.errors import MingcError, unexpected

COMMANDS = (
    "export",
    "serve",
    "draw",
    "verify",
    "probe",
    "audit",
    "bench",
    "bundle",
    "voices",
    "doctor",
    "synth",
)  # files of mingc/commands


class _Commands(Group):
    """Loads a command when it is asked for: `mingc --help` needs neither torch nor the halves of the package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS and name not in self.commands:
            self.add_command(import_module(f"mingc.commands.{name}").command, name, _SECTION)
        return super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for name in COMMANDS:
            self.get_command(ctx, name)
        super().format_commands(ctx, formatter)


_SECTION = cloup.Section("Commands")
_SETTINGS = {
    "show_default": True,
    "max_content_width": 100,
    "help_option_names": ["-h", "--help"],
    "formatter_settings": HelpFormatter.settings(col1_max_width=28),
}


@cloup.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="mingc")
def commands() -> None:
    """Compile Ming-flash-omni-2.0 ahead of time and serve what was compiled."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 usage error, 3 problems, 4 lost a rank, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    # A path may contain bytes that are not text: escaped, as on stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with clean_shutdown():
            sys.exit(commands.main(args=words, prog_name="mingc", standalone_mode=False, obj=words) or 0)
    except (click.Abort, KeyboardInterrupt):
        print("mingc: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        sys.exit(_fail(usage_error(error, "mingc"), as_json=as_json, debug=debug))
    except MingcError as error:
        sys.exit(_fail(error, as_json=as_json, debug=debug))
    except Exception as error:
        sys.exit(_fail(unexpected(error, words), as_json=as_json, debug=debug))


def _fail(error: MingcError, *, as_json: bool, debug: bool) -> int:
    from mingc.console.report import show_error

    if debug:
        traceback.print_exception(error)
    show_error(error, as_json=as_json)
    return error.exit_code
