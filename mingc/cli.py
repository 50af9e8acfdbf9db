"""The `mingc` command: parses options, calls one function, hands its result to `report`. No other logic.

The only file that imports both halves of the package, export and runtime. Torch and the halves are imported inside the
commands, so that `mingc --help` starts at once.
"""

from __future__ import annotations

import gc
import io
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from mingc import __version__
from mingc.artifacts.target import is_rtx, names_cuda_gpu
from mingc.console.param_types import PathParam, names, numbers
from mingc.console.progress import progress, step_logger
from mingc.console.signals import clean_shutdown
from mingc.defaults import (
    BACKEND,
    BATCH_SIZES,
    CACHE_GIGABYTES,
    MAX_MODEL_LEN,
    MODEL_NAME,
    PREFILL_CHUNK_SIZE,
    RTX_BACKEND,
)
from mingc.errors import ConfigError, MingcError, unexpected

if TYPE_CHECKING:
    from mingc.export.pipeline import ExportReport
    from mingc.export.recipe import ExportRecipe
    from mingc.runtime.service.omni import OmniService
    from mingc.runtime.service.startup import StartupClock

EXIT_FOUND_PROBLEMS = 3
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

_PATH = PathParam()


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
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        sys.exit(_fail(_usage_error(error), as_json=as_json, debug=debug))
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


def _usage_error(error: click.ClickException) -> ConfigError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "mingc"
    return ConfigError(error.format_message(), where=path, fix=f"see {path} --help")


def _common(command: Command) -> Command:
    """The options every command has."""
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Write one JSON document to stdout.")
    return as_json(debug(command))


_HTTP_OPTIONS = (
    "host",
    "port",
    "allow_media_hosts",
    "media_root",
    "max_concurrent_requests",
    "max_connections",
    "max_body_bytes",
    "max_total_body_bytes",
    "max_media_bytes",
    "max_speech_characters",
    "header_timeout_s",
    "body_timeout_s",
    "body_idle_timeout_s",
    "write_timeout_s",
    "media_timeout_s",
    "drain_s",
    "shutdown_timeout_s",
    "api_key_file",
    "has_open_metrics",
    "cors_origins",
)
_SETTINGS = {"show_default": True, "max_content_width": 100, "help_option_names": ["-h", "--help"]}


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="mingc")
def commands() -> None:
    """Compile Ming-flash-omni-2.0 ahead of time and serve what was compiled."""


@commands.command("export")
@click.argument("checkpoint", type=_PATH)
@click.option("--output", type=_PATH, required=True, help="Folder of the artifact to write.")
@click.option(
    "--target",
    metavar="cpu|cuda[:smNN]|rtx:smNN,…",
    default="cpu",
    help="Device the engines are for. RTX cards, such as rtx:sm86,sm89,sm120, need not be in this machine; the GPU for "
    "cuda must be, and cuda:smNN refuses other GPUs.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Weights and arithmetic."
)
@click.option("--tp", type=int, default=1, help="Tensor-parallel ranks of the thinker: 1, 2, 4 or 8.")
@click.option(
    "--stages",
    callback=names,
    show_default="all that the checkpoint holds",
    help="Names of stages, separated by commas.",
)
@click.option(
    "--jobs",
    type=int,
    default=1,
    help="Engines compiled at the same time; on CUDA spread over all GPUs of one model.",
)
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@click.option(
    "--cache",
    type=_PATH,
    default=None,
    show_default="$XDG_CACHE_HOME/mingc/engines",
    help="Folder that keeps compiled engines for later exports, keyed by everything that affects their code.",
)
@click.option(
    "--cache-limit",
    "cache_gigabytes",
    type=float,
    default=CACHE_GIGABYTES,
    help="Gigabytes that the cache may hold; above it the least recently used engines are removed.",
)
@click.option("--no-cache", is_flag=True, help="Compile every engine, and keep none.")
@click.option(
    "--max-model-len", type=int, default=MAX_MODEL_LEN, help="Longest request, prompt and answer, in tokens."
)
@click.option(
    "--prefill-chunk-size", type=int, default=PREFILL_CHUNK_SIZE, help="Tokens of one prefill chunk."
)
@click.option(
    "--batch-sizes",
    callback=numbers,
    default=",".join(map(str, BATCH_SIZES)),
    help="Numbers of requests in one step, separated by commas; on CUDA each has its own engines.",
)
@click.option(
    "--synthetic", is_flag=True, help="Read only configs and sample random weights, to measure speed."
)
@click.option(
    "--quantize",
    multiple=True,
    metavar="fp8|STAGE=fp8|thinker=int4",
    help="Store weights in fewer bits, for all stages that support it or for STAGE; may be given several times.",
)
@click.option(
    "--autotune/--no-autotune",
    default=True,
    help="On CUDA, time configurations of the expert kernels first and use the fastest.",
)
@click.option(
    "--backend",
    multiple=True,
    default=(BACKEND,),
    show_default=f"{BACKEND}; for RTX cards {RTX_BACKEND}",
    metavar="NAME[:STAGE,…]",
    help="Compiler of all engines, or of the engines of STAGE; may be given several times. `auto`: time all installed "
    "backends, and keep the fastest engines.",
)
@click.option("--model-name", default=MODEL_NAME, help="Name of the model that a server reports.")
@_common
def export_command(
    as_json: bool, tp: int, cache: Path | None, no_cache: bool, target: str, **options: Any
) -> int:
    """Compile CHECKPOINT, a folder in the released layout, into an artifact.

    When an interrupted export is run again with the same command, it compiles only engines that are not in the cache.
    """
    from mingc.artifacts.file_cache import cache_folder
    from mingc.console.report import show
    from mingc.export.recipe import ExportRecipe

    if no_cache and cache is not None:
        raise ConfigError(
            "--cache and --no-cache contradict each other", where="mingc export", fix="pass one of them"
        )
    kept = None if no_cache else cache or cache_folder() / "engines"
    is_default = click.get_current_context().get_parameter_source("backend") is ParameterSource.DEFAULT
    if is_default and is_rtx(target):
        options["backend"] = (RTX_BACKEND,)
    if names_cuda_gpu(target):  # importing torch takes seconds
        from mingc.export.checks.preflight import resolve_target

        target = resolve_target(target)
    recipe = ExportRecipe(world_size=tp, cache=kept, target=target, **options)
    show(_export(recipe), as_json=as_json)
    return 0


def _export(recipe: ExportRecipe) -> ExportReport:
    from mingc.console.report import show
    from mingc.export.pipeline import export_artifact
    from mingc.probe.engine_trial import time_engines
    from mingc.verify.engine_run import run_engine
    from mingc.verify.served.record import record_goldens

    show(recipe, as_json=False, stream=sys.stderr)
    with progress("export") as report_step:
        return export_artifact(
            recipe,
            run_engine,
            lambda step: report_step(step.done, step.total, f"{step.name} {step.subject}", step.seconds),
            record_goldens,
            time_engines,
        )


@commands.command("synth")
@click.argument("output", type=_PATH)
@click.option(
    "--config",
    default="tiny",
    help="`released` or `tiny`, both in a checkout only, or a folder of configs in the released layout.",
)
@click.option("--layers", type=int, default=None, show_default="the config's", help="Layers of the thinker.")
@click.option("--seed", type=int, default=0, help="Equal seeds give equal files.")
@_common
def synth_command(as_json: bool, output: Path, config: str, layers: int | None, seed: int) -> int:
    """Write a random checkpoint in the released layout to the folder OUTPUT, to try an export of any size."""
    from mingc.console.report import show
    from mingc.export.checkpoint_writer import synthesize

    show(synthesize(config, output, layers=layers, seed=seed, log=step_logger("synth")), as_json=as_json)
    return 0


@commands.command("serve")
@click.argument("artifact", type=_PATH)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=int, default=8000, help="TCP port; 0 lets the system choose.")
@click.option(
    "--tp",
    type=int,
    default=None,
    show_default="the artifact's",
    help="Ranks of the thinker; refused unless the artifact has that many.",
)
@click.option(
    "--allow-media-host",
    "allow_media_hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Fetch http(s) media from this host; may be given several times. `*`: from every public address.",
)
@click.option(
    "--media-root", type=_PATH, default=None, show_default="none", help="Read local media under this folder."
)
@click.option(
    "--self-check",
    "is_self_checked",
    is_flag=True,
    help="Replay the recorded requests before the port opens.",
)
@click.option(
    "--max-concurrent-requests", type=int, default=256, help="Requests inside the server before a 503."
)
@click.option(
    "--max-connections",
    type=int,
    default=None,
    show_default="by `ulimit -n`, at most 4096",
    help="Open connections; a further one closes the connection that has been idle longest.",
)
@click.option("--max-body-bytes", type=int, default=128 << 20, help="Largest request body.")
@click.option(
    "--max-total-body-bytes",
    type=int,
    default=512 << 20,
    help="Bodies and media of all requests together before a 503.",
)
@click.option(
    "--max-media-bytes",
    type=int,
    default=96 << 20,
    help="Total size of the decoded media files of one request.",
)
@click.option(
    "--max-media-memory",
    type=int,
    default=384 << 20,
    help="Bytes of memory that decoding the media of one request may take.",
)
@click.option(
    "--media-decode-timeout",
    "media_decode_timeout_s",
    type=float,
    default=60.0,
    help="Seconds for decoding one image, clip or video.",
)
@click.option(
    "--max-speech-characters", type=int, default=32_768, help="Longest `input` of a speech request."
)
@click.option(
    "--header-timeout",
    "header_timeout_s",
    type=float,
    default=10.0,
    help="Seconds for the headers of a request.",
)
@click.option(
    "--body-timeout", "body_timeout_s", type=float, default=60.0, help="Seconds for the body of a request."
)
@click.option(
    "--body-idle-timeout",
    "body_idle_timeout_s",
    type=float,
    default=15.0,
    help="Seconds between two parts of a body.",
)
@click.option(
    "--write-timeout",
    "write_timeout_s",
    type=float,
    default=60.0,
    help="Seconds that a client may go without reading its response.",
)
@click.option(
    "--media-timeout", "media_timeout_s", type=float, default=30.0, help="Seconds to fetch one media URL."
)
@click.option("--max-queue", type=int, default=128, help="Chats that may wait for the thinker before a 503.")
@click.option(
    "--max-total-tokens",
    type=int,
    default=None,
    show_default="by free memory",
    help="Capacity of the KV pages of all requests together, in tokens.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    help="Reuse KV pages of earlier requests for prompts that begin with the same tokens and media, and token ids of "
    "the same texts.",
)
@click.option(
    "--encoder-cache",
    type=int,
    default=512 << 20,
    help="Bytes of host memory that keep embeddings of images, videos and clips for reuse; 0: none.",
)
@click.option(
    "--max-speech-seqs",
    type=int,
    default=None,
    show_default="the talker's largest batch",
    help="Speech segments that each talker generates at the same time; with --speech-lead it may exceed a batch.",
)
@click.option(
    "--talker-device",
    "talker_devices",
    callback=names,
    metavar="DEVICE,…",
    show_default="the first device of the thinker",
    help="Devices of the talkers, one per talker (cuda:2,cuda:3); one talker speaks each answer.",
)
@click.option(
    "--speech-lead",
    type=int,
    default=3,
    help="Patches of 0.32 s that streamed speech may be ahead of its playback; 0: no limit.",
)
@click.option(
    "--threads", type=int, default=None, show_default="1 on CUDA, else torch's choice", help="CPU threads."
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=float,
    default=60.0,
    help="Seconds that a thinker step may take before its ranks count as lost.",
)
@click.option(
    "--drain-seconds",
    "drain_s",
    type=float,
    default=2.0,
    help="Seconds that the port stays open after SIGTERM, while /ready answers 503; 0: none.",
)
@click.option(
    "--shutdown-timeout",
    "shutdown_timeout_s",
    type=float,
    default=5.0,
    help="Seconds that running requests may continue after the port is closed or a rank is lost.",
)
@click.option(
    "--api-key-file",
    type=_PATH,
    default=None,
    show_default="none",
    help="File of accepted API keys, one per line, reread when it changes; MINGC_API_KEYS adds more (with commas).",
)
@click.option(
    "--open-metrics/--no-open-metrics",
    "has_open_metrics",
    default=False,
    help="Answer /metrics without an API key.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin call the server; may be given several times; `*`: all.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Lowest level that is logged; access lines are info, those of health probes debug.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", help="Format of log lines on stderr."
)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    show_default="the artifact's",
    help="Name of the model for clients; may be given several times, the first appears in responses.",
)
@click.option(
    "--parse-special-tokens",
    is_flag=True,
    help="Recognise special tokens in the text of requests, for clients that may write roles and turns. "
    "Otherwise they are plain text.",
)
@click.option(
    "--check-hashes/--no-check-hashes", default=True, help="Compare the hash of every file before loading."
)
@click.option(
    "--require-signature",
    "public_key",
    metavar="PUBKEY",
    show_default="none",
    help="Serve only a bundle signed with this key: a file, or the line that minisign prints.",
)
@_common
def serve_command(
    as_json: bool,
    artifact: Path,
    log_level: Any,
    log_format: Any,
    is_self_checked: bool,
    public_key: str | None,
    **options: Any,
) -> int:
    """Serve ARTIFACT, a folder or a packed bundle, over an OpenAI-compatible HTTP interface.

    Prints its address on stdout when it is ready. After SIGTERM requests are served for --drain-seconds, then the port
    is closed (after Ctrl-C at once). Running requests may continue for --shutdown-timeout seconds; a second signal
    stops the server at once. When a rank of the thinker dies or hangs, running chats get an error, and the server exits
    with code 4. With --self-check it exits with 3 when an answer differs from the recorded one.
    """
    from mingc.runtime.service.startup import StartupClock

    clock = StartupClock()
    from mingc.server.options import ServeOptions

    http = ServeOptions(**{name: options.pop(name) for name in _HTTP_OPTIONS})
    with clock.phase("import"):
        from mingc.console.report import show
        from mingc.media.decoder_pool import DecoderPool
        from mingc.media.options import MediaOptions
        from mingc.runtime.service.builder import open_service
        from mingc.runtime.service.options import EngineOptions
        from mingc.server.api_keys import ApiKeys
        from mingc.server.app import create_app
        from mingc.server.connections import connection_limit
        from mingc.server.lifecycle import bind_socket, serve
        from mingc.server.logs import configure_logging

    media = MediaOptions(
        max_media_memory=options.pop("max_media_memory"),
        media_decode_timeout_s=options.pop("media_decode_timeout_s"),
    )
    engines = EngineOptions(
        max_waiting=options.pop("max_queue"),
        num_torch_threads=options.pop("threads"),
        talker_devices=options.pop("talker_devices") or (),
        **options,
    )
    configure_logging(log_level, log_format)
    for resolved in (http, media, engines):
        show(resolved, as_json=False, stream=sys.stderr)
    if public_key is not None:
        _require_signature(artifact, public_key, is_hashed=engines.check_hashes)
    keys = ApiKeys(http.api_key_file)
    connection_limit(http.max_connections)  # fails before anything slow
    listener = bind_socket(http.host, http.port)
    decoders = DecoderPool.from_options(media, num_prepared=engines.num_preprocess_threads)
    service = open_service(artifact, engines, clock, media=decoders)
    if is_self_checked and not _is_as_recorded(service, artifact, clock):
        return EXIT_FOUND_PROBLEMS
    # Start-up objects live as long as the process: a full collection would traverse them for a tenth of a second, while
    # every stream waits.
    with clock.phase("collect garbage"):
        gc.collect()
        gc.freeze()

    def announce(url: str) -> None:
        document = {"url": url, "model": service.info.model, "startup_s": clock.seconds}
        print(json.dumps(document) if as_json else url, flush=True)

    try:
        ended_in_order = serve(create_app(service, http, keys), listener, announce=announce)
    finally:
        gc.unfreeze()  # engines remove their unpacked files when they are collected
    return 0 if ended_in_order else EXIT_INTERRUPTED


def _require_signature(artifact: Path, public_key: str, *, is_hashed: bool) -> None:
    from mingc.bundles.signatures import require_signature

    if not is_hashed:
        raise ConfigError(
            "a signature proves nothing about files whose hashes are not compared",
            where="--require-signature",
            fix="leave --no-check-hashes out",
        )
    step_logger("serve")(f"signature: {require_signature(artifact, public_key)}")


def _is_as_recorded(service: OmniService, artifact: Path, clock: StartupClock) -> bool:
    """Replay the recorded requests on `service`, which is closed when an answer differs."""
    from mingc.console.report import show
    from mingc.verify.served.verification import check_service

    with clock.phase("replay the recorded requests"):
        report = check_service(service, artifact)
    show(report, as_json=False, stream=sys.stderr)
    return report.passed


@commands.command("verify")
@click.argument("artifact", type=_PATH)
@click.option(
    "--no-replay", is_flag=True, help="Check file hashes only, without versions and engines; needs no torch."
)
@_common
def verify_command(as_json: bool, artifact: Path, no_replay: bool) -> int:
    """Check that ARTIFACT is complete and computes correct results on this machine.

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
    return 0 if result.passed else EXIT_FOUND_PROBLEMS


@commands.command("probe")
@click.argument("artifact", type=_PATH, required=False)
@click.option(
    "--engine",
    "engines",
    callback=names,
    show_default="all",
    help="Stages (cfm) or graphs (cfm.sample) to time, separated by commas.",
)
@click.option(
    "--batch",
    "batch_sizes",
    callback=numbers,
    show_default="all",
    help="Numbers of requests in a call, separated by commas.",
)
@click.option("--context", type=int, default=256, help="Tokens in the KV cache of every request.")
@click.option("--repetitions", type=int, show_default="200, CPU: 3 to 10", help="Timed calls per engine.")
@click.option("--baseline", type=_PATH, show_default="none", help="Report of --json to compare with.")
@click.option(
    "--tolerance", type=float, default=0.1, help="Fraction by which a median may exceed the baseline's."
)
@click.option(
    "--compare", type=click.Choice(["patch-embed"]), help="Also time the patch embedding as a convolution."
)
@click.option(
    "--beside",
    type=_PATH,
    show_default="none",
    help="Artifact of the same model (may be ARTIFACT itself) whose engines are timed alternately with these.",
)
@click.option(
    "--html", type=_PATH, show_default="none", help="Also write the report as one HTML file with charts."
)
@click.option(
    "--cold-start/--no-cold-start",
    "has_cold_start",
    default=True,
    help="Serve ARTIFACT in a process of its own first, and time each phase until it is ready.",
)
@click.option(
    "--transfers/--no-transfers",
    "has_transfers",
    default=True,
    help="Measure memory rates: of the host, between host and GPU, between GPUs.",
)
@click.option(
    "--synthetic",
    type=_PATH,
    metavar="CONFIG",
    show_default="none",
    help="Export random weights for this folder of configs first: the stages of --engine, or all but the thinker. "
    "Without ARTIFACT the export is removed after the probe.",
)
@click.option(
    "--jobs", type=int, show_default="1", help="With --synthetic: engines compiled at the same time."
)
@click.option(
    "--cache",
    type=_PATH,
    show_default="no cache",
    help="With --synthetic: folder that keeps compiled engines for later exports.",
)
@_common
def probe_command(
    as_json: bool,
    artifact: Path | None,
    baseline: Path | None,
    synthetic: Path | None,
    jobs: int | None,
    cache: Path | None,
    html: Path | None,
    **options: Any,
) -> int:
    """Time every engine of ARTIFACT and compare it with the roofline bounds of this machine.

    Also times a cold start, phase by phase, and memory transfers; rows that need a device that this machine lacks are
    marked as not run. Exits with 3 when an engine is slower than in --baseline.
    """
    from mingc.console.report import show
    from mingc.probe.baseline import read_baseline
    from mingc.probe.html_report import check_html_path, write_html
    from mingc.probe.prober import ProbeOptions, probe

    asked = ProbeOptions(**options)
    earlier = read_baseline(baseline) if baseline is not None else None
    if html is not None:
        check_html_path(html)
    with ExitStack() as stack:
        if synthetic is not None:
            from mingc.export.probe_recipe import probe_folder, synthetic_recipe

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
            _export(recipe)
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
    return EXIT_FOUND_PROBLEMS if result.regressions else 0


@commands.group("bundle")
def bundle_commands() -> None:
    """Look at artifacts; pack them into one file, sign, verify and unpack it."""


@bundle_commands.command("inspect")
@click.argument("artifact", type=_PATH)
@_common
def inspect_command(as_json: bool, artifact: Path) -> int:
    """Show what ARTIFACT contains and what it was built for. Needs no torch."""
    from mingc.artifacts.artifact import open_artifact
    from mingc.artifacts.inspection import summarize
    from mingc.console.report import show

    show(summarize(open_artifact(artifact)), as_json=as_json)
    return 0


@bundle_commands.command("pack")
@click.argument("artifact", type=_PATH)
@click.argument("output", type=_PATH)
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@click.option(
    "--with-wheels",
    "wheels",
    type=_PATH,
    show_default="none",
    help="Add the wheels in this folder, for machines and images without a network.",
)
@click.option(
    "--with-tensorrt",
    "takes_tensorrt",
    is_flag=True,
    help="Let --with-wheels add NVIDIA's TensorRT libraries, which have NVIDIA's licence.",
)
@click.option(
    "--model-licence", type=_PATH, show_default="none", help="Add this file as the licence of the weights."
)
@click.option(
    "--oci",
    type=_PATH,
    show_default="none",
    help="Also write the bundle to this new folder as an OCI image layout, one uncompressed layer per file.",
)
@_common
def pack_command(
    as_json: bool,
    artifact: Path,
    output: Path,
    force: bool,
    wheels: Path | None,
    takes_tensorrt: bool,
    model_licence: Path | None,
    oci: Path | None,
) -> int:
    """Write the folder ARTIFACT to the one file OUTPUT.

    Files are stored uncompressed at multiples of 4,096 bytes, and `mingc serve OUTPUT` maps weights inside the file. A
    start script, a systemd unit, a Containerfile for each target, licences and an SBOM are added below bundle/. To
    continue an interrupted pack, run the same command again.
    """
    from mingc.artifacts.artifact import open_unchecked
    from mingc.bundles.deployment import deployment_files
    from mingc.bundles.oci import check_new, write_oci
    from mingc.bundles.packing import pack
    from mingc.console.report import show

    log = step_logger("pack")
    if oci is not None:
        check_new(oci)
    manifest = open_unchecked(artifact).manifest
    extras = deployment_files(manifest, wheels, model_licence, takes_tensorrt=takes_tensorrt)
    report = pack(artifact, output, extras, replace_existing=force, log=log)
    if oci is not None:
        show(write_oci(output, oci, log=log), as_json=False, stream=sys.stderr)
    show(report, as_json=as_json)
    return 0


@bundle_commands.command("unpack")
@click.argument("bundle", type=_PATH)
@click.argument("output", type=_PATH)
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@click.option(
    "--share/--no-share",
    "is_shared",
    default=True,
    help="Link files of 1 MiB or more to .mingc-files next to OUTPUT, so that equal weights are on disk once.",
)
@_common
def unpack_command(as_json: bool, bundle: Path, output: Path, force: bool, is_shared: bool) -> int:
    """Write the files of the packed BUNDLE to the folder OUTPUT, comparing every hash.

    The folder appears only when it is complete. To continue an interrupted unpack, run the same command again.
    """
    from mingc.bundles.unpacking import unpack
    from mingc.console.report import show

    report = unpack(bundle, output, replace_existing=force, is_shared=is_shared, log=step_logger("unpack"))
    show(report, as_json=as_json)
    return 0


@bundle_commands.command("keygen")
@click.argument("key", type=_PATH)
@_common
def keygen_command(as_json: bool, key: Path) -> int:
    """Write a new key pair for signatures: the secret key KEY, without a password, and next to it the public key:
    NAME.pub for NAME.key, else KEY.pub.

    Keys of `minisign -G` may be used as well.
    """
    from mingc.bundles.signatures import generate_keys
    from mingc.console.report import show

    show(generate_keys(key), as_json=as_json)
    return 0


@bundle_commands.command("sign")
@click.argument("bundle", type=_PATH)
@click.option(
    "--secret-key",
    type=_PATH,
    required=True,
    help="Secret key in minisign's format; MINGC_SIGN_PASSWORD has its password, if it has one.",
)
@click.option(
    "--comment", show_default="model and version", help="Line that the signature covers, such as a version."
)
@_common
def sign_command(as_json: bool, bundle: Path, secret_key: Path, comment: str | None) -> int:
    """Sign BUNDLE, packed or unpacked: Ed25519 in minisign's format over bundle.json, which has all hashes."""
    from mingc.bundles.signatures import sign_bundle
    from mingc.console.report import show

    show(sign_bundle(bundle, secret_key, comment), as_json=as_json)
    return 0


@bundle_commands.command("verify-signature")
@click.argument("bundle", type=_PATH)
@click.option("--public-key", required=True, help="Public key: a file, or the line that minisign prints.")
@_common
def verify_signature_command(as_json: bool, bundle: Path, public_key: str) -> int:
    """Check the signature of BUNDLE, packed or unpacked, and the hash of every file. Needs no torch."""
    from mingc.bundles.signatures import verify_signature
    from mingc.console.report import show

    show(verify_signature(bundle, public_key), as_json=as_json)
    return 0


@bundle_commands.command("diff")
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
@_common
def diff_command(as_json: bool, first: Path, second: Path) -> int:
    """Show the differences between two artifacts or bundles: settings, files, bytes that an upgrade must transfer.

    Exits with 3 when something differs. Reads manifests only.
    """
    from mingc.bundles.comparison import diff
    from mingc.console.report import show

    report = diff(first, second)
    show(report, as_json=as_json)
    return 0 if report.is_same else EXIT_FOUND_PROBLEMS


@bundle_commands.command("prune")
@click.argument("folder", type=_PATH)
@click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be removed.")
@click.option(
    "--cache", "has_cache", is_flag=True, help="Also remove the copies that servers of packed bundles made."
)
@_common
def prune_command(as_json: bool, folder: Path, is_dry: bool, has_cache: bool) -> int:
    """Remove everything that no bundle in FOLDER uses: stored files, and leftovers of interrupted packs and unpacks."""
    from mingc.bundles.pruning import prune
    from mingc.console.report import show

    show(prune(folder, is_dry=is_dry, has_cache=has_cache), as_json=as_json)
    return 0


@commands.command("doctor")
@click.argument("artifacts", type=_PATH, nargs=-1)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 3 when export or serve, or a stage of ARTIFACTS, would not work.",
)
@_common
def doctor_command(as_json: bool, artifacts: tuple[Path, ...], strict: bool) -> int:
    """Report what works on this machine and, for each stage of ARTIFACTS, whether it would be served."""
    from mingc.console.report import show
    from mingc.doctor import examine

    result = examine(artifacts)
    show(result, as_json=as_json)
    return EXIT_FOUND_PROBLEMS if strict and not result.is_clean else 0


@commands.command("demo")
@click.option("--output", type=_PATH, default=Path("demo"), help="Folder of the artifact and the answer.")
@click.option(
    "--checkpoint",
    type=_PATH,
    default=None,
    show_default="tests/data/tiny-ming",
    help="Checkpoint to export.",
)
@click.option("--force", is_flag=True, help="Export again even if the artifact is there.")
@_common
def demo_command(as_json: bool, output: Path, checkpoint: Path | None, force: bool) -> int:
    """Export a tiny model, serve it, and request an answer about a picture and a spoken clip."""
    from mingc.console.report import show
    from mingc.demo import run_demo

    show(run_demo(output, checkpoint=checkpoint, again=force), as_json=as_json)
    return 0


@commands.command("plan")
@click.option("--listeners", type=int, default=0, help="Concurrent listeners of generated speech.")
@click.option("--chats", type=int, default=0, help="Answers that are written concurrently.")
@click.option("--gpu", default="h200", help="GPU model; only measured models are known.")
@click.option(
    "--thinker",
    default="fp8",
    metavar="fp8|int4|tp2|tp4",
    help="How the thinker is exported: quantized on one GPU, or bfloat16 on two or four.",
)
@click.option("--prompt-tokens", type=int, default=1024, help="Mean length of a prompt.")
@click.option("--answer-tokens", type=int, default=300, help="Mean length of an answer.")
@click.option("--token-rate", type=float, default=20.0, help="Tokens per second that every answer must get.")
@click.option(
    "--utilisation", type=float, default=0.7, help="Share of the measured capacity that is planned for."
)
@_common
def plan_command(as_json: bool, **load: Any) -> int:
    """Compute replicas and GPUs for a load from measured figures, with all assumptions. Needs no GPU."""
    from mingc.console.report import show
    from mingc.plan import Load, plan

    show(plan(Load(**load)), as_json=as_json)
    return 0
