"""`mingc verify`."""

from __future__ import annotations

from pathlib import Path

import click
import cloup

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, common, option
from mingc.console.progress import step_logger


@cloup.command(cls=Command)
@click.argument("artifact", type=PATH)
@option(
    "--no-replay", is_flag=True, help="Check file hashes only, without versions and engines; needs no torch."
)
@common
def command(as_json: bool, artifact: Path, no_replay: bool) -> int:
    """Check that an artifact is complete and computes correctly.

    Compares the hash of every file, and on this machine the outputs of every engine with those recorded at export.
    Exits with 3 when anything is out of tolerance.
    """
    from mingc.console.report import show
    from mingc.verify.verification import verify

    log = step_logger("verify")
    result = verify(artifact, replay=not no_replay, progress=log)
    show(result, as_json=as_json)
    log(
        f"{result.checked} comparisons, {result.failed} failed, {result.expected_differences} expected differences"
    )
    return 0 if result.passed else FOUND_PROBLEMS
