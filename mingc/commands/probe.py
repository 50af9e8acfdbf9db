"""`mingc probe`."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import cloup

from mingc.commands.export import run_export
from mingc.console.command import FOUND_PROBLEMS, PATH, Command, common, declared, given, option
from mingc.console.progress import step_logger
from mingc.errors import ConfigError
from mingc.probe.options import ProbeOptions

_BASELINE = [option("--baseline", type=PATH, help="Report of --json to compare with.")]
_REPORT = [option("--html", type=PATH, help="Also write the report as one HTML file with charts.")]
_SYNTHETIC = [
    option(
        "--synthetic",
        type=PATH,
        metavar="CONFIG",
        help="Export random weights for this folder of configs first: the stages of --engine, or all but the thinker. "
        "Without ARTIFACT the export is removed after the probe.",
    ),
    option("--jobs", type=int, show_default="1", help="Engines compiled at the same time."),
    option(
        "--cache",
        type=PATH,
        show_default="no cache",
        help="Folder that keeps compiled engines for later exports.",
    ),
]


@cloup.command(cls=Command)
@click.argument("artifact", type=PATH, required=False)
@declared(
    ProbeOptions,
    others={"Comparison": _BASELINE, "Report": _REPORT, "Export of random weights": _SYNTHETIC},
)
@common
def command(
    as_json: bool,
    artifact: Path | None,
    baseline: Path | None,
    synthetic: Path | None,
    jobs: int | None,
    cache: Path | None,
    html: Path | None,
    **_: Any,
) -> int:
    """Time engines and compare them with bounds of this machine.

    Times every engine of ARTIFACT against its roofline bound, a cold start phase by phase, and memory transfers; rows
    that need a device that this machine lacks are marked as not run. Exits with 3 when an engine is slower than in
    --baseline.
    """
    (options,) = given(ProbeOptions, where="mingc probe")
    asked = ProbeOptions(**options)

    from mingc.console.report import show
    from mingc.console.report_page import check_output_path
    from mingc.probe.baseline import read_baseline
    from mingc.probe.html_report import write_html
    from mingc.probe.prober import probe

    earlier = read_baseline(baseline) if baseline is not None else None
    if html is not None:
        check_output_path(html, "--html")
    with ExitStack() as stack:
        if synthetic is not None:
            from mingc.export.synthetic.probe import probe_folder, synthetic_recipe

            artifact = stack.enter_context(probe_folder(artifact))
            recipe = synthetic_recipe(
                synthetic,
                artifact,
                asked.engines,
                asked.batch_sizes,
                jobs=1 if jobs is None else jobs,
                cache=cache,
                compare=asked.compare,
            )
            run_export(recipe)
        elif artifact is None or jobs is not None or cache is not None:
            raise ConfigError(
                "nothing to probe" if artifact is None else "--jobs and --cache are for an export",
                where="mingc probe",
                fix="pass --synthetic CONFIG" + (", or name an ARTIFACT" if artifact is None else " as well"),
            )
        words = click.get_current_context().find_root().obj or []
        command = shlex.join(["mingc", *words])
        result = probe(artifact, asked, step_logger("probe"), baseline=earlier, command=command)
    show(result, as_json=as_json)
    if html is not None:
        write_html(result, html)
    return FOUND_PROBLEMS if result.regressions else 0
