"""What each command passes on from its options, and the exit code that it makes of the result.

The functions behind the commands are replaced; `tests/artifact` runs the real ones.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from mingc_command import mingc_here

import mingc
from mingc.artifacts import hash_process
from mingc.bundles import comparison, pruning, signatures, unpacking
from mingc.cli import main
from mingc.commands import doctor_report
from mingc.commands import export as export_command
from mingc.commands import probe as probe_command
from mingc.console.signals import SIGNALS, clean_shutdown
from mingc.errors import ConfigError, IntegrityError, MingcError, RankError, WorkerError
from mingc.export import plan as export_plan
from mingc.export import run as export_run
from mingc.export.recipe import ExportRecipe
from mingc.export.run import Step
from mingc.export.synthetic import writer
from mingc.media.decoder_pool import DecoderPool
from mingc.media.options import MediaOptions
from mingc.options import options_of
from mingc.probe import baseline, engine_trial, prober
from mingc.prompts.media_decoder import MediaDecoder
from mingc.runtime.service import builder, voice_registration
from mingc.runtime.service.options import EngineOptions
from mingc.server import app, lifecycle, logs
from mingc.verify import engine_run, verification
from mingc.verify.served import record
from mingc.verify.served import verification as served_verification
from mingc.verify.served.verification import ServiceReport
from mingc.verify.verification import VerifyReport


@dataclass(frozen=True)
class Result:
    """What a replaced function returns; `show` prints any dataclass."""

    regressions: tuple[str, ...] = ()


def run(*words: str) -> int:
    """Exit code of `mingc WORDS` in this process."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments that `verify` gets, and the recipe of an export."""
    found: list[dict[str, Any]] = []

    def verify(path: Path, **given: Any) -> VerifyReport:
        found.append({"path": path, **given})
        return REPORT

    def export(recipe: ExportRecipe) -> Result:
        found.append({"recipe": recipe})
        return Result()

    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(export_command, "run_export", export)
    monkeypatch.setattr(probe_command, "run_export", export)
    return found


REPORT = VerifyReport(
    artifact=Path("x"),
    passed=True,
    checked=3,
    failed=0,
    expected_differences=0,
    files_hashed=1,
    files=(),
    comparisons=(),
)


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 3), (3, 3)])
def test_verify_exits_with_3_when_a_comparison_fails(
    failed: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replace(REPORT, passed=not failed, failed=failed)
    monkeypatch.setattr(verification, "verify", lambda path, **_: report)
    assert run("verify", "x") == code


def test_verify_runs_engines_unless_no_replay_is_given(calls: list[dict[str, Any]]) -> None:
    assert run("verify", "x") == 0
    assert run("verify", "x", "--no-replay") == 0
    assert [each["replay"] for each in calls] == [True, False]


@pytest.mark.parametrize(("regressions", "code"), [((), 0), (("talker.step",), 3)])
def test_probe_exits_with_3_when_an_engine_is_slower_than_the_baseline(
    regressions: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "probe", lambda *_, **__: Result(regressions))
    assert run("probe", "x") == code


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_export_is_for_as_many_ranks_as_asked(ranks: int, calls: list[dict[str, Any]]) -> None:
    assert run("export", "x", "--output", "y", "--tp", str(ranks)) == 0
    assert [each["recipe"].world_size for each in calls] == [ranks]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mingc serve` starts no process that hashes or decodes."""
    monkeypatch.setattr(hash_process, "hash_weights", lambda _: nullcontext("hashes"))
    idle = SimpleNamespace(prepare=lambda: None, close=lambda: None)
    monkeypatch.setattr(DecoderPool, "from_options", lambda *_, **__: idle)


@pytest.fixture
def served_options(
    monkeypatch: pytest.MonkeyPatch, no_processes: None
) -> Iterator[Callable[..., EngineOptions]]:
    """A function that gives the options with which `mingc serve ARTIFACT WORDS` opens the artifact; it then fails."""
    listeners: list[socket.socket] = []
    opened: list[EngineOptions] = []
    bind = lifecycle.bind_socket

    def open_service(
        artifact: Path, options: EngineOptions, clock: object, *, media: MediaDecoder, hashing: object
    ) -> None:
        assert hashing == ("hashes" if options.check_hashes else None)
        opened.append(options)
        raise WorkerError("far enough")

    def bind_socket(host: str, port: int) -> socket.socket:
        listeners.append(bind(host, port))
        return listeners[-1]

    monkeypatch.setattr(builder, "open_service", open_service)
    monkeypatch.setattr(lifecycle, "bind_socket", bind_socket)
    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)

    def options(*words: str) -> EngineOptions:
        assert run("serve", "x", "--port", "0", *words) == 1
        return opened[-1]

    yield options
    for each in listeners:
        each.close()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-queue", "5"], "max_waiting", 5),
        (["--max-queue", "0"], "max_waiting", 0),
        (["--threads", "3"], "num_torch_threads", 3),
        (["--tp", "2"], "tp", 2),
        (["--max-total-tokens", "640"], "max_total_tokens", 640),
        (["--max-speech-seqs", "2"], "max_speech_seqs", 2),
        (["--talker-device", "cuda:2,cuda:3"], "talker_devices", ("cuda:2", "cuda:3")),
        (["--talker-device", "cpu, cpu"], "talker_devices", ("cpu", "cpu")),
        (["--speech-lead", "0"], "speech_lead", 0),
        (["--speech-lead", "7"], "speech_lead", 7),
        (["--step-timeout", "7"], "step_timeout_s", 7.0),
        (["--encoder-cache", str(1 << 30)], "encoder_cache", 1 << 30),
        (["--encoder-cache", "1GiB"], "encoder_cache", 1 << 30),
        (["--step-timeout", "5min"], "step_timeout_s", 300.0),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_names", ("a", "b")),
        (["--parse-special-tokens"], "parse_special_tokens", True),
        (["--no-check-hashes"], "check_hashes", False),
        (["--no-prefix-cache"], "prefix_cache", False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_serve_opens_the_artifact_with_its_options(
    words: list[str], name: str, value: object, served_options: Callable[..., EngineOptions]
) -> None:
    assert getattr(served_options(), name) != value
    assert getattr(served_options(*words), name) == value


def test_serve_decodes_media_within_its_options(
    served_options: Callable[..., EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[MediaOptions, int]] = []

    def from_options(options: MediaOptions, *, num_prepared: int) -> SimpleNamespace:
        pools.append((options, num_prepared))
        return SimpleNamespace(prepare=lambda: None, close=lambda: None)

    monkeypatch.setattr(DecoderPool, "from_options", from_options)
    threads = served_options(
        "--max-media-memory", "1GiB", "--media-decode-timeout", "3"
    ).num_preprocess_threads
    assert pools == [(MediaOptions(max_media_memory=1 << 30, media_decode_timeout_s=3.0), threads)]
    for words in (["--max-media-memory", "0"], ["--media-decode-timeout", "inf"]):
        assert run("serve", "x", *words) == 2


def test_a_port_in_use_is_reported_before_the_artifact_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        builder, "open_service", lambda *_, **__: pytest.fail("loaded before the port was bound")
    )
    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("serve", "x", "--port", str(taken.getsockname()[1])) == 2
    assert "the port is in use" in capsys.readouterr().err


def test_a_lost_rank_exits_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(artifacts: object) -> None:
        raise RankError("rank 1 ended")

    monkeypatch.setattr(doctor_report, "examine", examine)
    assert run("doctor") == 4


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.EDQUOT, errno.EIO]
)
def test_a_fault_of_the_environment_is_not_reported_as_a_bug(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(artifacts: object) -> None:
        raise OSError(number, os.strerror(number), "/some/folder")

    monkeypatch.setattr(doctor_report, "examine", examine)
    assert run("doctor", "--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == f"{os.strerror(number)}: /some/folder" and "bug" not in error["fix"]


def test_handlers_of_the_caller_are_back_after_a_command(calls: list[dict[str, Any]]) -> None:
    own = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    try:
        with clean_shutdown():
            assert all(signal.getsignal(number) != signal.default_int_handler for number in SIGNALS)
        assert all(signal.getsignal(number) == signal.default_int_handler for number in SIGNALS)
        assert run("verify", "x") == 0
        assert all(signal.getsignal(number) == signal.default_int_handler for number in SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, own, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_parent_ignores_stays_ignored(number: signal.Signals) -> None:
    """`nohup` and background jobs of shells."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with clean_shutdown():
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


_POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from mingc.host.parent_watchdog import watch_pool_owner

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=watch_pool_owner) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_workers_end_with_the_owner_of_their_pool(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_POOL, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        try:
            number = int(owner.stdout.readline())
            worker = os.pidfd_open(number)
        finally:
            owner.kill()
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    try:
        assert poll.poll(30_000), "the worker outlives the owner of its pool"
    finally:
        if not poll.poll(0):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)


@pytest.mark.parametrize(
    ("words", "cache"),
    [
        ([], Path("home/mingc/engines")),
        (["--cache", "kept"], Path("kept")),
        (["--no-cache"], None),
    ],
    ids=["by default", "in a folder", "not at all"],
)
def test_export_keeps_engines_where_it_is_asked_to(
    words: list[str],
    cache: Path | None,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert run("export", "x", "--output", "y", *words) == 0
    (call,) = calls
    assert call["recipe"].cache == (tmp_path / cache if cache == Path("home/mingc/engines") else cache)


EXPORT_OPTIONS: dict[str, tuple[list[str], object]] = {
    "checkpoint": ([], Path("x")),
    "output": ([], Path("y")),
    "target": (["--target", "cuda"], "cuda"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "world_size": (["--tp", "4"], 4),
    "stages": (["--stages", "cfm, talker"], ("cfm", "talker")),
    "jobs": (["--jobs", "3"], 3),
    "cache": (["--cache", "z"], Path("z")),
    "cache_gigabytes": (["--cache-limit", "0.5"], 0.5),
    "force": (["--force"], True),
    "max_model_len": (["--max-model-len", "2048"], 2048),
    "batch_sizes": (["--batch-sizes", "1,3"], (1, 3)),
    "prefill_chunk_size": (["--prefill-chunk-size", "48"], 48),
    "model_name": (["--model-name", "mine"], "mine"),
    "synthetic": (["--synthetic"], True),
    "quantize": (["--quantize", "cfm=fp8", "--quantize", "thinker=int4"], ("cfm=fp8", "thinker=int4")),
    "autotune": (["--no-autotune"], False),
    "backend": (["--backend", "aoti", "--backend", "aoti:cfm"], ("aoti", "aoti:cfm")),
}


@pytest.mark.parametrize("name", ["checkpoint", *options_of(ExportRecipe)])
def test_every_option_of_export_reaches_the_recipe(name: str, calls: list[dict[str, Any]]) -> None:
    """None is ignored, and what is not asked for stays as the documentation says."""
    words, value = EXPORT_OPTIONS[name]
    assert run("export", "x", "--output", "y", *words) == 0
    recipe = calls[-1]["recipe"]
    assert getattr(recipe, name) == value
    if words:
        assert run("export", "x", "--output", "y") == 0
        usual = calls[-1]["recipe"]
        assert getattr(usual, name) != value
        changed = {
            each.name for each in fields(usual) if getattr(usual, each.name) != getattr(recipe, each.name)
        }
        assert changed == {name}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"engines": None, "batch_sizes": None, "context": 256, "repetitions": None, "tolerance": 0.1}),
        (["--engine", "cfm, talker.step"], {"engines": ("cfm", "talker.step")}),
        (["--batch", "1,8"], {"batch_sizes": (1, 8)}),
        (["--context", "17"], {"context": 17}),
        (["--repetitions", "5"], {"repetitions": 5}),
        (["--tolerance", "0.25"], {"tolerance": 0.25}),
        (
            ["--compare", "patch-embed"],
            {"compare": "patch-embed", "has_cold_start": True, "has_transfers": True},
        ),
        (["--beside", "y"], {"beside": Path("y")}),
        (["--no-cold-start"], {"has_cold_start": False, "has_transfers": True}),
        (["--no-transfers"], {"has_cold_start": True, "has_transfers": False}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_probe_times_what_it_is_asked_to(
    words: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def probe(artifact: Path, options: object, log: object, *, baseline: object, command: str) -> Result:
        asked.append((artifact, options, baseline))
        assert command == " ".join(["mingc probe x", *map(shlex.quote, words)])
        return Result()

    monkeypatch.setattr(prober, "probe", probe)
    assert run("probe", "x", *words) == 0
    ((artifact, options, baseline),) = asked
    assert (artifact, baseline) == (Path("x"), None)
    assert {name: getattr(options, name) for name in expected} == expected


def test_probe_of_random_weights_exports_them_and_keeps_the_folder_that_is_named(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probed: list[Path] = []

    def probe(artifact: Path, *_: object, **__: object) -> Result:
        probed.append(artifact)
        return Result()

    monkeypatch.setattr(prober, "probe", probe)
    configs = Path(mingc.__file__).parents[1] / "tests" / "data" / "tiny-ming"
    words = ["--synthetic", str(configs), "--engine", "cfm", "--jobs", "2", "--cache", "z"]
    assert run("probe", str(tmp_path / "named"), *words) == 0
    assert run("probe", *words) == 0
    named, unnamed = (each["recipe"] for each in calls)
    assert probed == [named.output, unnamed.output] and named.output == tmp_path / "named"
    assert not unnamed.output.exists() and unnamed.output != named.output
    for recipe in (named, unnamed):
        assert (recipe.checkpoint, recipe.synthetic, recipe.stages) == (configs, True, ("cfm",))
        assert (recipe.jobs, recipe.cache) == (2, Path("z"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"config": "tiny", "layers": None, "seed": 0}),
        (["--config", "released"], {"config": "released"}),
        (["--layers", "3"], {"layers": 3}),
        (["--seed", "7"], {"seed": 7}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_synth_writes_what_it_is_asked_to(
    words: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def synthesize(config: str, output: Path, **given: object) -> Result:
        asked.append({"config": config, "output": output, **given})
        return Result()

    monkeypatch.setattr(writer, "synthesize", synthesize)
    assert run("synth", "y", *words) == 0
    assert {name: asked[0][name] for name in (*expected, "output")} == {**expected, "output": Path("y")}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("passes", "code"), [(True, 0), (False, 3)])
def test_a_server_that_checks_itself_opens_its_port_only_when_it_passes(
    passes: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = SimpleNamespace(info=SimpleNamespace(model="tiny"))
    checked: list[tuple[object, Path]] = []
    served: list[object] = []

    listeners: list[socket.socket] = []
    bind = lifecycle.bind_socket

    def bind_socket(host: str, port: int) -> socket.socket:
        listeners.append(bind(host, port))
        return listeners[-1]

    def check_service(given: object, artifact: Path) -> ServiceReport:
        checked.append((given, artifact))
        return ServiceReport(
            passed=passes, checked=5, failed=int(not passes), worst_error=0.0, comparisons=()
        )

    def serve(app: object, listener: socket.socket, *, announce: Callable[[str], None]) -> bool:
        served.append(app)
        announce("http://127.0.0.1:1")
        return True

    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)
    monkeypatch.setattr(builder, "open_service", lambda *_, **__: service)
    monkeypatch.setattr(lifecycle, "bind_socket", bind_socket)
    monkeypatch.setattr(served_verification, "check_service", check_service)
    monkeypatch.setattr(app, "create_app", lambda given, *_: given)
    monkeypatch.setattr(lifecycle, "serve", serve)
    assert run("serve", "x", "--port", "0", "--self-check") == code
    listeners[0].close()
    assert checked == [(service, Path("x"))] and served == [service] * passes
    out, err = capsys.readouterr()
    assert "checked" in err and out == ("http://127.0.0.1:1\n" if passes else "")
    gc.collect()
    assert gc.get_freeze_count() == 0, "what the service holds can be collected again"


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("in_order", "code"), [(True, 0), (False, 130)])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_server_announces_its_address_and_says_how_it_ended(
    in_order: bool,
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = SimpleNamespace(info=SimpleNamespace(model="tiny"))
    levels: list[tuple[str, str]] = []

    def serve(app: object, listener: socket.socket, *, announce: Callable[[str], None]) -> bool:
        host, port = listener.getsockname()
        listener.close()
        announce(f"http://{host}:{port}")
        return in_order

    monkeypatch.setattr(logs, "configure_logging", lambda *given: levels.append(given))
    monkeypatch.setattr(builder, "open_service", lambda *_, **__: service)
    monkeypatch.setattr(served_verification, "check_service", lambda *_: pytest.fail("not asked for"))
    monkeypatch.setattr(app, "create_app", lambda given, *_: given)
    monkeypatch.setattr(lifecycle, "serve", serve)
    words = ["--log-level", "warning", "--log-format", "json", *["--json"] * as_json]
    assert run("serve", "x", "--port", "0", *words) == code
    assert levels == [("info", "json"), ("warning", "json")], "errors of the command line are JSON, too"
    out, _ = capsys.readouterr()
    document = json.loads(out) if as_json else {"url": out.strip(), "model": "tiny", "startup_s": {}}
    assert document.keys() == {"url", "model", "startup_s"} and document["model"] == "tiny"
    assert document["url"].startswith("http://127.0.0.1:") and not document["url"].endswith(":0")


def test_a_signature_is_asked_for_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, str]] = []

    def require_signature(artifact: Path, key: str) -> str:
        asked.append((artifact, key))
        raise IntegrityError("signed with another key")

    monkeypatch.setattr(signatures, "require_signature", require_signature)
    monkeypatch.setattr(logs, "configure_logging", lambda *_: None)
    monkeypatch.setattr(builder, "open_service", lambda *_, **__: pytest.fail("loaded before the signature"))
    assert run("serve", "x", "--port", "0", "--require-signature", "key.pub") == 1
    assert asked == [(Path("x"), "key.pub")] and "signed with another key" in capsys.readouterr().err
    assert run("serve", "x", "--port", "0", "--require-signature", "key.pub", "--no-check-hashes") == 2
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "module", "name", "given", "options"),
    [
        (["bundle", "unpack", "b", "o"], unpacking, "unpack", ("b", "o"), {"replace_existing": False}),
        (["bundle", "unpack", "b", "o", "--share"], unpacking, "unpack", ("b", "o"), {"is_shared": True}),
        (["bundle", "unpack", "b", "o", "--force"], unpacking, "unpack", ("b", "o"), {"replace_existing": True}),
        (["bundle", "unpack", "b", "o", "--no-share"], unpacking, "unpack", ("b", "o"), {"is_shared": False}),
        (["bundle", "prune", "f"], pruning, "prune", ("f",), {"is_dry": False, "has_cache": False}),
        (["bundle", "prune", "f", "--dry-run"], pruning, "prune", ("f",), {"is_dry": True, "has_cache": False}),
        (["bundle", "prune", "f", "--cache"], pruning, "prune", ("f",), {"is_dry": False, "has_cache": True}),
        (["bundle", "keygen", "k"], signatures, "generate_keys", ("k",), {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_command_passes_its_words_on(
    words: list[str],
    module: Any,
    name: str,
    given: tuple[str, ...],
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def replaced(*arguments: object, **keywords: object) -> Result:
        asked.append((arguments, keywords))
        return Result()

    monkeypatch.setattr(module, name, replaced)
    assert run(*words) == 0
    ((arguments, keywords),) = asked
    assert arguments == tuple(map(Path, given))
    assert {key: keywords[key] for key in options} == options


@pytest.mark.parametrize(("is_same", "code"), [(True, 0), (False, 3)])
def test_bundle_diff_exits_with_3_when_something_differs(
    is_same: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, Path]] = []

    @dataclass(frozen=True)
    class Difference:
        is_same: bool

    def diff(first: Path, second: Path) -> Difference:
        asked.append((first, second))
        return Difference(is_same)

    monkeypatch.setattr(comparison, "diff", diff)
    assert run("bundle", "diff", "a", "b") == code
    assert asked == [(Path("a"), Path("b"))]


def test_doctor_examines_every_artifact_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def examine(artifacts: object) -> Result:
        asked.append(artifacts)
        return Result()

    monkeypatch.setattr(doctor_report, "examine", examine)
    assert run("doctor") == run("doctor", "a", "b") == 0
    assert asked == [(), (Path("a"), Path("b"))]


def test_bundles_are_signed_and_their_signatures_checked_with_the_key_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    def replaced(*arguments: object) -> Result:
        asked.append(arguments)
        return Result()

    monkeypatch.setattr(signatures, "sign_bundle", replaced)
    monkeypatch.setattr(signatures, "verify_signature", replaced)
    assert run("bundle", "sign", "b", "--secret-key", "k", "--comment", "1.0") == 0
    assert run("bundle", "sign", "b", "--secret-key", "k") == 0
    assert run("bundle", "verify-signature", "b", "--public-key", "RWQ") == 0
    assert asked == [(Path("b"), Path("k"), "1.0"), (Path("b"), Path("k"), None), (Path("b"), "RWQ")]


def test_an_export_replays_records_and_reports_its_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def run_plan(
        plan: SimpleNamespace,
        replay: object,
        progress: Callable[[Step], None],
        record: object,
        timer: object,
        open_voices: object,
    ) -> Result:
        asked.append((plan.recipe.output, replay, record, timer, open_voices))
        progress(Step(name="engine", subject="cfm.sample", done=0, total=2, seconds=None))
        progress(Step(name="engine", subject="cfm.sample", done=1, total=2, seconds=3.25))
        return Result()

    class Plan(SimpleNamespace):
        def __str__(self) -> str:
            return "y, for cpu: 1 engines, 1 at a time\nvoices: none"

    monkeypatch.setattr(export_plan, "plan_export", lambda recipe: Plan(recipe=recipe))
    monkeypatch.setattr(export_run, "run", run_plan)
    assert run("export", "x", "--output", "y", "--json") == 0
    assert asked == [
        (
            Path("y"),
            engine_run.run_engine,
            record.record_goldens,
            engine_trial.time_engines,
            voice_registration.open_voices,
        )
    ]
    out, err = capsys.readouterr()
    assert "export: 1/2 engine cfm.sample 3.2 s" in err.splitlines() and "0/2" not in err
    assert "export: y, for cpu: 1 engines, 1 at a time" in err.splitlines() and "export: voices: none" in err
    assert err.startswith("export: x --output y --cache ") and "--jobs" not in err, (
        "only what is not the default"
    )
    assert json.loads(out) == {"regressions": []}


def test_verify_reports_its_steps_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(path: Path, *, progress: Callable[[str], None], **_: object) -> VerifyReport:
        progress("hashes")
        return replace(REPORT, passed=False, checked=9, failed=4, expected_differences=2)

    monkeypatch.setattr(verification, "verify", verify)
    assert run("verify", "x", "--json") == 3
    out, err = capsys.readouterr()
    assert err.splitlines() == ["verify: hashes", "verify: 9 comparisons, 4 failed, 2 expected differences"]
    assert json.loads(out)["failed"] == 4


def test_probe_compares_with_the_baseline_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def probe(*_: object, baseline: object, command: str) -> Result:
        given.append(baseline)
        return Result()

    monkeypatch.setattr(baseline, "read_baseline", lambda path: f"read {path}")
    monkeypatch.setattr(prober, "probe", probe)
    assert run("probe", "x", "--baseline", "before.json") == 0
    assert given == ["read before.json"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MingcError("m"), 1),
        (ConfigError("m"), 2),
        (IntegrityError("m"), 1),
        (WorkerError("m"), 1),
        (RankError("m"), 4),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("m"), 2),
        (RuntimeError("m"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_kind_of_failure_has_its_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(artifacts: object) -> None:
        raise error

    monkeypatch.setattr(doctor_report, "examine", examine)
    assert run("doctor") == code
    out, err = capsys.readouterr()
    assert out == "" and err.lstrip().startswith("mingc: interrupted" if code == 130 else "mingc: error: ")
    monkeypatch.setattr(sys, "argv", ["mingc", "doctor", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    assert bool(capsys.readouterr().out) is (code != 130), "the error is a JSON object on stdout"


@pytest.mark.parametrize("option", ["--name", "--consent", "--words", "--description"])
def test_texts_of_voices_are_utf8(option: str) -> None:
    texts = {"--name": "a", "--consent": "b", "--words": "c", option: os.fsdecode(b"d\xff")}
    done = mingc_here("voices", "add", "none", "none", __file__, *itertools.chain(*texts.items()))
    assert done.code == 2 and option in done.stderr and "not UTF-8" in done.stderr
