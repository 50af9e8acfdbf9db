"""The `mingc` command: parses options, calls one function, hands its result to `report`. No other logic.

The one file that knows both halves of the package, export and runtime. Torch and the halves are imported
inside the commands, so that `mingc --help` comes at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from mingc import __version__
from mingc.errors import ConfigError, MingcError

EXIT_FAILED = 1
EXIT_ASKED_WRONGLY = 2
EXIT_FOUND_PROBLEMS = 3
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 asked wrongly, 3 found problems, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    try:
        sys.exit(commands.main(args=words, prog_name="mingc", standalone_mode=False) or 0)
    except (click.Abort, KeyboardInterrupt):
        print("mingc: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        sys.exit(_fail(_usage_error(error), as_json=as_json, debug=debug))
    except MingcError as error:
        sys.exit(_fail(error, as_json=as_json, debug=debug))
    except Exception as error:
        bug = MingcError(
            f"this is a bug of mingc: {type(error).__name__}: {error}",
            where=" ".join(["mingc", *words]),
            fix="run again with --debug and report the traceback",
        )
        bug.__cause__ = error
        sys.exit(_fail(bug, as_json=as_json, debug=debug))


def _fail(error: MingcError, *, as_json: bool, debug: bool) -> int:
    from mingc.report import show_error

    if debug:
        traceback.print_exception(error)
    show_error(error, as_json=as_json)
    return error.exit_code


def _usage_error(error: click.ClickException) -> ConfigError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "mingc"
    return ConfigError(error.format_message(), where=path, fix=f"see {path} --help")


def _common(command: Command) -> Command:
    """The options every command has."""
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Write one JSON document to stdout.")
    return as_json(debug(command))


_SETTINGS = {"show_default": True, "max_content_width": 100, "help_option_names": ["-h", "--help"]}


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="mingc")
def commands() -> None:
    """Compile Ming-flash-omni-2.0 ahead of time and serve what was compiled."""


@commands.command("export")
@click.argument("checkpoint", type=_PATH)
@click.option("--output", type=_PATH, required=True, help="Folder of the artifact to write.")
@click.option(
    "--target", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Device the engines are for."
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Weights and arithmetic."
)
@click.option("--tp", type=int, default=1, help="Tensor-parallel ranks of the thinker: 1, 2, 4 or 8.")
@click.option(
    "--stages", default=None, show_default="all that the checkpoint holds", help="Names, with commas."
)
@click.option("--jobs", type=int, default=1, help="Engines compiled at the same time.")
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@click.option(
    "--cache", type=_PATH, default=None, show_default="no cache", help="Folder of engines to use again."
)
@click.option(
    "--context-tokens", type=int, default=4096, help="Longest request, prompt and answer, in tokens."
)
@click.option("--prefill-tokens", type=int, default=256, help="Tokens of one prefill chunk.")
@click.option("--max-batch", type=int, default=8, help="Largest batch of one step.")
@click.option("--model-name", default="ming-omni", help="Name that a server will announce.")
@_common
def export_command(as_json: bool, tp: int, stages: str | None, **options: Any) -> int:
    """Compile CHECKPOINT, a folder in the released layout, into an artifact."""
    from mingc.export.recipe import ExportRecipe

    names = tuple(name.strip() for name in stages.split(",") if name.strip()) if stages is not None else None
    recipe = ExportRecipe(world_size=tp, stages=names, **options)
    from mingc.export.pipeline import export_bundle
    from mingc.progress import progress
    from mingc.report import show
    from mingc.runtime.replay import replay

    show(recipe, as_json=False, stream=sys.stderr)
    with progress("export") as told:
        result = export_bundle(
            recipe,
            replay,
            lambda step: told(step.done, step.total, f"{step.name} {step.subject}", step.seconds),
        )
    show(result, as_json=as_json)
    return 0


@commands.command("verify")
@click.argument("artifact", type=_PATH)
@click.option(
    "--against",
    type=_PATH,
    default=None,
    show_default="the artifact's own goldens only",
    help="Folder of golden files to replay as well.",
)
@click.option("--no-replay", is_flag=True, help="Check hashes only; needs no torch.")
@_common
def verify_command(as_json: bool, artifact: Path, against: Path | None, no_replay: bool) -> int:
    """Tell whether ARTIFACT is whole and computes what it should on this machine.

    Exits with 3 when anything is out of tolerance.
    """
    from mingc.report import show
    from mingc.runtime.verify import verify

    def told(step: str) -> None:
        print(f"verify: {step}", file=sys.stderr, flush=True)

    result = verify(artifact, against=against, replay=not no_replay, told=told)
    show(result, as_json=as_json)
    return 0 if result.passed else EXIT_FOUND_PROBLEMS


@commands.group("bundle")
def bundle_commands() -> None:
    """Look at artifacts."""


@bundle_commands.command("inspect")
@click.argument("artifact", type=_PATH)
@_common
def inspect_command(as_json: bool, artifact: Path) -> int:
    """Show what ARTIFACT holds and what it was built for. Needs no torch."""
    from mingc.artifacts.bundle import open_bundle
    from mingc.artifacts.contents import read_contents
    from mingc.report import show

    show(read_contents(open_bundle(artifact)), as_json=as_json)
    return 0


@commands.command("doctor")
@click.option("--strict", is_flag=True, help="Exit with 3 when export or serve would not work.")
@_common
def doctor_command(as_json: bool, strict: bool) -> int:
    """Tell what would work on this machine."""
    from mingc.doctor import examine
    from mingc.report import show

    result = examine()
    show(result, as_json=as_json)
    return EXIT_FOUND_PROBLEMS if strict and not result.is_clean else 0
