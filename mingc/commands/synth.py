"""`mingc synth`."""

from __future__ import annotations

from pathlib import Path

import click
import cloup

from mingc.console.command import PATH, Command, common, option
from mingc.console.progress import step_logger


@cloup.command(cls=Command)
@click.argument("output", type=PATH)
@option(
    "--config",
    metavar="NAME|FOLDER",
    default="tiny",
    help="`released` or `tiny`, both in a checkout only, or a folder of configs in the released layout.",
)
@option("--layers", type=int, default=None, show_default="the config's", help="Layers of the thinker.")
@option("--seed", type=int, default=0, help="Equal seeds give equal files.")
@common
def command(as_json: bool, output: Path, config: str, layers: int | None, seed: int) -> int:
    """Write a random checkpoint, to try an export of any size.

    The folder OUTPUT gets the released layout.
    """
    from mingc.console.report import show
    from mingc.export.synthetic.writer import synthesize

    show(synthesize(config, output, layers=layers, seed=seed, log=step_logger("synth")), as_json=as_json)
    return 0
