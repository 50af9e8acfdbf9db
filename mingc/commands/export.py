"""`mingc export`, and the export itself for commands that need an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from mingc.artifacts.target import is_rtx, names_cuda_gpu
from mingc.console.command import PATH, Command, common, declared, given, option
from mingc.console.progress import progress, step_logger
from mingc.errors import ConfigError
from mingc.export.recipe import RTX_BACKEND, ExportRecipe
from mingc.options import changed_words

if TYPE_CHECKING:
    from mingc.export.report import ExportReport

_NO_CACHE = option("--no-cache", is_flag=True, help="Compile every engine, and keep none.")


@cloup.command(cls=Command)
@click.argument("checkpoint", type=PATH)
@declared(ExportRecipe, others={"Cache of engines": [_NO_CACHE]})
@common
def command(as_json: bool, checkpoint: Path, no_cache: bool, **_: Any) -> int:
    """Compile a checkpoint into an artifact.

    CHECKPOINT is a folder in the released layout. When an interrupted export is run again with the same command, it
    compiles only engines that are not in the cache.
    """
    from mingc.artifacts.file_cache import cache_folder
    from mingc.console.report import show

    (options,) = given(ExportRecipe, where="mingc export")
    if no_cache and "cache" in options:
        raise ConfigError(
            "--cache and --no-cache contradict each other", where="mingc export", fix="pass one of them"
        )
    if not no_cache:
        options.setdefault("cache", cache_folder() / "engines")
    target = options.get("target", "cpu")
    if is_rtx(target):
        options.setdefault("backend", (RTX_BACKEND,))
    if names_cuda_gpu(target):  # importing torch takes seconds
        from mingc.export.preflight import resolve_target

        options["target"] = resolve_target(target)
    show(run_export(ExportRecipe(checkpoint=checkpoint, **options)), as_json=as_json)
    return 0


def run_export(recipe: ExportRecipe) -> ExportReport:
    """Export with what other packages provide: replay, timer, registration of voices, recorder. Progress: stderr."""
    from mingc.export.plan import plan_export
    from mingc.export.run import run
    from mingc.probe.engine_trial import time_engines
    from mingc.runtime.service.voice_registration import open_voices
    from mingc.verify.engine_run import run_engine
    from mingc.verify.served.record import record_goldens

    log = step_logger("export")
    log(" ".join([str(recipe.checkpoint), *changed_words(recipe)]))
    plan = plan_export(recipe)
    for line in str(plan).splitlines():
        log(line)
    with progress("export") as report_step:
        return run(
            plan,
            run_engine,
            lambda step: report_step(step.done, step.total, f"{step.name} {step.subject}", step.seconds),
            record_goldens,
            time_engines,
            open_voices,
        )
