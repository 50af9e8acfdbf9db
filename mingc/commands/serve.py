"""`mingc serve`."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from mingc.console.command import FOUND_PROBLEMS, PATH, Command, common, declared, given, option
from mingc.console.progress import step_logger
from mingc.console.signals import INTERRUPTED
from mingc.errors import ConfigError
from mingc.media.options import MediaOptions
from mingc.options import changed_words
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions

if TYPE_CHECKING:
    from mingc.runtime.service.omni import OmniService
    from mingc.runtime.service.startup_clock import StartupClock

log = logging.getLogger("mingc.startup")

_CHECKS = [
    option(
        "--require-signature",
        "public_key",
        metavar="PUBKEY",
        help="Serve only a bundle signed with this key: a file, or the line that minisign prints.",
    ),
    option(
        "--self-check",
        "is_self_checked",
        is_flag=True,
        help="Replay the recorded requests before the port opens.",
    ),
]
_LOGS = [
    option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Lowest level that is logged; access lines are info, access lines of health probes debug.",
    ),
    option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Format of log lines on stderr.",
    ),
]
_DEFAULTS = {"check_hashes": True}  # replicas of a deployment do not read all files again


class _Serve(Command):
    """With `--log-format json` errors of the command line are JSON lines, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--log-format=json" in args or ("--log-format", "json") in pairwise(args):
            from mingc.server.logs import configure_logging

            configure_logging("info", "json")
        return super().parse_args(ctx, args)


@cloup.command(cls=_Serve)
@click.argument("artifact", type=PATH)
@declared(
    ServeOptions,
    MediaOptions,
    EngineOptions,
    defaults=_DEFAULTS,
    others={"Checks before serving": _CHECKS, "Logs": _LOGS},
)
@common
def command(
    as_json: bool,
    artifact: Path,
    log_level: Any,
    log_format: Any,
    is_self_checked: bool,
    public_key: str | None,
    **_: Any,
) -> int:
    """Serve an artifact over an OpenAI-compatible HTTP interface.

    ARTIFACT is a folder or a packed bundle. The address is printed on stdout when the server is ready.

    After SIGTERM requests are served for --drain-seconds, then the port is closed (after Ctrl-C at once). Running
    requests may continue for --shutdown-timeout; a second signal stops the server at once. When a rank of the thinker
    dies or hangs, running chats get an error, and the server exits with code 4. With --self-check it exits with 3 when
    an answer differs from the recorded one.
    """
    from mingc.runtime.service.startup_clock import StartupClock

    clock = StartupClock()
    of_http, of_media, of_engines = given(ServeOptions, MediaOptions, EngineOptions, where="mingc serve")
    http, media = ServeOptions(**of_http), MediaOptions(**of_media)
    engines = EngineOptions(**_DEFAULTS | of_engines)
    context = click.get_current_context()
    with clock.phase("import"), _frozen(context), _installed():
        from mingc.artifacts.hash_process import hash_weights
        from mingc.media.decoder_pool import DecoderPool
        from mingc.server.api_keys import ApiKeys
        from mingc.server.connections import connection_limit
        from mingc.server.lifecycle import bind_socket, serve
        from mingc.server.logs import configure_logging
        from mingc.server.tracing import Traces

    configure_logging(log_level, log_format)
    if public_key is not None:
        _require_signature(artifact, public_key, is_hashed=engines.check_hashes)
    keys, traces = ApiKeys(http.api_key_file), Traces.from_environment()
    connection_limit(http.max_connections)  # fails before anything slow
    listener = bind_socket(http.host, http.port)
    changed = [word for each in (http, media, engines) for word in changed_words(each, _DEFAULTS)]
    step_logger("serve")(" ".join([str(artifact), *changed]))
    # Other processes begin before torch is imported, which takes seconds.
    hashing = context.with_resource(hash_weights(artifact)) if engines.check_hashes else None
    decoders = DecoderPool.from_options(media, num_prepared=engines.num_preprocess_threads)
    context.call_on_close(decoders.close)
    decoders.prepare()
    with clock.phase("import"), _frozen(context), _installed():
        from mingc.runtime.service.builder import open_service
        from mingc.server.app import create_app

    service = open_service(artifact, engines, clock, media=decoders, hashing=hashing)
    if is_self_checked and not _is_as_recorded(service, artifact, clock):
        return FOUND_PROBLEMS
    # Start-up objects live as long as the process: a full collection would traverse them while every stream waits.
    with clock.phase("collect garbage"):
        gc.collect()
        gc.freeze()

    def announce(url: str) -> None:
        document = {"url": url, "model": service.info.model, "startup_s": clock.seconds}
        print(json.dumps(document) if as_json else url, flush=True)
        log.info("serving %s at %s, ready in %.1f s", service.info.model, url, clock.total_s)

    ended_in_order = serve(create_app(service, http, keys, traces), listener, announce=announce)
    return 0 if ended_in_order else INTERRUPTED


@contextmanager
def _frozen(context: click.Context) -> Iterator[None]:
    """Objects that the block makes live as long as the command: the collector traverses them neither now nor later."""
    context.call_on_close(gc.unfreeze)  # engines remove their unpacked files when they are collected
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _installed() -> Iterator[None]:
    """Raises: ConfigError instead of ImportError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"a library of the server cannot be imported: {error}",
            where="mingc serve",
            fix="pip install 'mingc[serve]'",
        ) from error


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
