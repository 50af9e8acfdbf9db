"""`mingc bench`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import cloup

from mingc.bench.options import BenchOptions
from mingc.console.command import (
    FOUND_PROBLEMS,
    INTERRUPTED,
    PATH,
    TEXT,
    Command,
    common,
    declared,
    given,
    option,
)
from mingc.console.progress import progress

_RESULT = [option("--output", type=PATH, help="Write the result as JSON to this file.")]


@cloup.command(cls=Command)
@click.argument("url", type=TEXT, nargs=-1, required=True)
@declared(BenchOptions, others={"Result": _RESULT})
@common
def command(as_json: bool, url: tuple[str, ...], output: Path | None, **_: Any) -> int:
    """Measure what users of a server feel.

    Sends requests to the OpenAI-compatible server at URL, ours or another, or to several that share them, and names
    what would make the figures wrong. No request is sent twice. OPENAI_API_KEY is the key. Ctrl-C ends it and keeps
    what was measured. Exits with 3 when figures may be wrong.
    """
    (options,) = given(BenchOptions, where="mingc bench")
    asked = BenchOptions(**options)

    from mingc.bench.bench import bench
    from mingc.bench.records import encode, write

    words = click.get_current_context().find_root().obj or []
    with progress("bench") as show_progress:
        file = bench(
            url,
            asked,
            show_progress,
            command=shlex.join(["mingc", *words]),
            key=os.environ.get("OPENAI_API_KEY", ""),
        )
    if output is not None:
        write(output, file)
    if as_json:
        sys.stdout.write(encode(file).decode() + "\n")
    for finding in file.findings:
        print(f"{finding.trap}: {finding.where}: {finding.message}", file=sys.stderr)
    if not all(run.is_complete for run in file.runs):
        return INTERRUPTED
    return FOUND_PROBLEMS if file.findings else 0
