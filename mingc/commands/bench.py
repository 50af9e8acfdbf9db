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
from mingc.bench.paths import PATHS
from mingc.console.command import (
    FOUND_PROBLEMS,
    PATH,
    TEXT,
    Command,
    common,
    declared,
    given,
    option,
)
from mingc.console.progress import progress
from mingc.console.signals import INTERRUPTED

_DATA = [
    option(
        "--data",
        metavar="[KIND:]FILE",
        show_default="built-in texts, pictures and clips",
        type=TEXT,
        help="Items to send, each once a run, instead of --path, --words, --picture, --clip and --rounds: JSONL of "
        "your own, or a file of seedtts, gsm8k or mmmu (docs/bench.md). Answers are scored.",
    )
]
_RESULT = [
    option("--output", type=PATH, help="Write the result as JSON to this file."),
    option("--html", type=PATH, help="Also write the report as one HTML file with charts."),
    option("--baseline", type=PATH, help="Result of --output to compare with: a verdict for each figure."),
]


@cloup.command(cls=Command)
@click.argument("url", type=TEXT, nargs=-1, required=True)
@declared(BenchOptions, others={"Data": _DATA, "Result": _RESULT})
@common
def command(
    as_json: bool,
    url: tuple[str, ...],
    data: str | None,
    output: Path | None,
    html: Path | None,
    baseline: Path | None,
    **_: Any,
) -> int:
    """Measure what users of a server feel.

    Sends requests to the OpenAI-compatible server at URL, ours or another, or to several that share them, and names
    what would make the figures wrong. No request is sent twice. OPENAI_API_KEY is the key. Ctrl-C ends it and keeps
    what was measured. Prints the report as Markdown. Exits with 3 when figures may be wrong, or worse than in
    --baseline.
    """
    (options,) = given(BenchOptions, where="mingc bench")
    asked = BenchOptions(**options)

    import msgspec

    from mingc.bench.baseline import compare, read_baseline
    from mingc.bench.bench import bench
    from mingc.bench.datasets import read_data_set
    from mingc.bench.records import encode, write
    from mingc.bench.report import report
    from mingc.bench.scores import score
    from mingc.console.report_page import check_output_path, to_html, to_markdown, write_text

    for path, name in ((output, "--output"), (html, "--html")):
        if path is not None:
            check_output_path(path, name)
    given_data = None if data is None else read_data_set(data)
    items = () if given_data is None else given_data.items
    paths = [item.path for item in items] or asked.paths or PATHS
    before = None if baseline is None else read_baseline(baseline, [*paths], asked.loads)
    words = click.get_current_context().find_root().obj or []
    with progress("bench") as show_progress:
        file = bench(
            url,
            asked,
            show_progress,
            command=shlex.join(["mingc", *words]),
            key=os.environ.get("OPENAI_API_KEY", ""),
            items=items,
            keep=lambda file: None if output is None else write(output, file),  # it may be killed
        )
    if given_data is not None:
        scores = score(given_data.items, given_data.judge, file.runs)
        file = msgspec.structs.replace(file, scores={given_data.name: scores} if scores else {})
    if output is not None:
        write(output, file)
    comparison = None if before is None else compare(before, file)
    page = report(file, comparison)
    if html is not None:
        write_text(to_html(page), html)
    sys.stdout.write(encode(file).decode() + "\n" if as_json else to_markdown(page))
    for finding in file.findings:
        print(f"{finding.trap}: {finding.where}: {finding.message}", file=sys.stderr)
    if not file.is_complete:
        return INTERRUPTED
    is_worse = comparison is not None and comparison.is_worse
    return FOUND_PROBLEMS if file.findings or is_worse else 0
