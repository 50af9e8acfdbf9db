"""`python -m conformance ARTIFACT --reference DIR`, from the root of the checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import click

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, usage_error
from mingc.console.progress import step_logger
from mingc.console.report import show, show_error
from mingc.console.signals import INTERRUPTED, clean_shutdown
from mingc.errors import MingcError


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("artifact", type=PATH)
@click.option(
    "--reference", type=PATH, required=True, help="Folder of golden files in the format of tests/data."
)
@click.option(
    "--json",
    "document",
    type=click.File("w", encoding="utf-8", lazy=False),
    help="Write the report as one JSON document to this file (`-`: stdout) instead of a table to stdout.",
)
def main(artifact: Path, reference: Path, document: TextIO | None) -> None:
    """Compare ARTIFACT with values of the official modules, and with everything that it records itself.

    Exits with 0 when all comparisons pass, 1 when the artifact cannot be used here, 2 for a wrong command line, 3 when
    a comparison is out of tolerance.
    """
    log = step_logger("conformance")
    try:
        with clean_shutdown():
            from conformance.check import check_conformance  # imports torch

            report = check_conformance(artifact, reference, progress=log)
            show(report, as_json=document is not None, stream=document)
    except MingcError as error:
        show_error(error, as_json=False)
        sys.exit(error.exit_code)
    log(
        f"{report.checked} comparisons, {report.failed} failed, {report.expected_differences} expected differences"
    )
    sys.exit(0 if report.passed else FOUND_PROBLEMS)


def run() -> None:
    """Run the command line and exit, with 130 after a signal."""
    try:
        main(prog_name="python -m conformance", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        print("conformance: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        wrong = usage_error(error, "python -m conformance")
        show_error(wrong, as_json=False)
        sys.exit(wrong.exit_code)


if __name__ == "__main__":
    run()
