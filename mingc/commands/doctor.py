"""`mingc doctor`."""

from __future__ import annotations

from pathlib import Path

import click
import cloup

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, common, option


@cloup.command(cls=Command)
@click.argument("artifacts", type=PATH, nargs=-1)
@option(
    "--strict",
    is_flag=True,
    help="Exit with 3 when export or serve, or a stage of ARTIFACTS, would not work.",
)
@common
def command(as_json: bool, artifacts: tuple[Path, ...], strict: bool) -> int:
    """Report what works on this machine.

    For each stage of ARTIFACTS it says whether it would be served.
    """
    from mingc.commands.doctor_report import examine
    from mingc.console.report import show

    result = examine(artifacts)
    show(result, as_json=as_json)
    return FOUND_PROBLEMS if strict and not result.is_clean else 0
