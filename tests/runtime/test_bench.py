"""`mingc bench` against stand-in servers: every path, the shapes of other servers, and every trap."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_service import TEXT_ONLY, FakeService
from server_thread import eventually, fake_server, run_server
from stand_in_server import CHUNK, CHUNKS, RATE, stand_in, wav

from mingc.bench.bench import bench
from mingc.bench.load import poisson
from mingc.bench.options import BenchOptions
from mingc.bench.paths import PATHS
from mingc.bench.records import BenchFile, ClientState, Item, Load, Run, Sample, encode, read
from mingc.bench.traps import find_traps
from mingc.errors import BenchError, ConfigError

# A busy machine stops the clients of a test now and then, which is what `client` says; it has a test of its own.
_OF_THE_MACHINE = {"client"}
# Differences of the moments that the stand-in sends.
STAGES = {"preprocess_queue": 1.0, "preprocess": 2.0, "encode": 4.0, "queue": 1.0, "prefill": 12.0}


def measure(url: str, *urls: str, **options: Any) -> BenchFile:
    given: dict[str, Any] = {
        "concurrency": (2,),
        "rounds": 2,
        "repeats": 1,
        "tokens": 12,
        "words": 20,
        "clip": 0.5,
        "seed": 1,
    }
    asked = BenchOptions(**{**given, "picture": 64, **options})
    return bench((url, *urls), asked, lambda *_: None, command="mingc bench")


def traps(file: BenchFile) -> set[str]:
    return {each.trap for each in file.findings} - _OF_THE_MACHINE


@pytest.mark.parametrize(
    ("paths", "loads", "rounds"),
    [(("text",), (1, 3), 2), (tuple(each for each in PATHS if each != "text"), (2,), 1)],
)
def test_every_path_of_a_good_server_is_measured_and_nothing_is_found(
    paths: tuple[str, ...], loads: tuple[int, ...], rounds: int
) -> None:
    with stand_in() as (url, server):
        file = measure(url, paths=paths, concurrency=loads, rounds=rounds)
    assert [(run.path, run.load.concurrency) for run in file.runs] == [*itertools.product(paths, loads)]
    assert traps(file) == set()
    # Fields are found, then each load has a warm-up. No request is sent twice.
    assert len(server.bodies) == len(paths) * (1 + sum(loads) * (1 + rounds))
    assert len({json.dumps(each) for each in server.bodies}) == len(server.bodies)
    for run in file.runs:
        assert [each.error for each in run.samples] == [""] * rounds * run.load.concurrency
        for each in run.samples:
            times = (*each.token_times, *each.audio_times, *each.picture_times)
            assert times and all(each.sent < at <= each.ended <= run.wall_s for at in times)
            assert each.scheduled <= each.sent
            if run.path in ("text", "image", "clip", "spoken"):
                assert (each.output_tokens, len(each.token_times), each.fixed_tokens) == (12, 12, 12)
                assert each.stages == STAGES
                assert (each.prompt_tokens, each.cached_tokens, each.finish_reason) == (90, 16, "length")
            if run.path in ("speech", "speech-stream", "spoken"):
                assert (each.sample_rate, each.header_rate) == (RATE, RATE)
            if run.path == "realtime":
                assert (each.sample_rate, each.header_rate) == (24_000, None)
            assert (len(each.picture_times), each.num_pictures) == (
                (2, 1) if run.path == "picture" else (0, 0)
            )
            if run.path == "transcription":
                assert each.text.startswith("a clip of ")
            else:
                assert sum(each.audio_samples) in (0, CHUNKS * CHUNK)
    assert msgspec.json.decode(encode(file), type=BenchFile) == file


# Fault, and words of the findings by path; `flat` needs two loads.
FAULTS: dict[str, dict[str, str]] = {
    "blob": {
        "text": "texts came in one piece",
        "speech-stream": "sounds came in one piece",
        "picture": "came together with the finished one",
    },
    "header": {"speech": "1.84 × as long", "spoken": "1.84 × as long"},
    "equal": {"text": "got the same text", "speech": "got the same sound", "picture": "got the same picture"},
    "flat": {"text": "a cap on concurrent requests"},
    "lengths": {"text": "all were asked for 12"},
    "plain lengths": {"text": "no length is fixed"},
    "cache": {"text": "up to 80 tokens", "image": "pictures or clips"},
    "flood": {"text": ""},
}


def test_bad_servers_are_found_out() -> None:
    def found(fault: str) -> BenchFile:
        # A busy machine takes some blobs apart, so there are enough of them for a majority.
        options: dict[str, Any] = {"flat": {"concurrency": (1, 4)}, "blob": {"rounds": 10}}.get(fault, {})
        with stand_in(fault=fault) as (url, _):
            return measure(url, paths=tuple(FAULTS[fault]), **options)

    with ThreadPoolExecutor(3) as pool:  # most of their time is waiting
        files = dict(zip(FAULTS, pool.map(found, FAULTS), strict=True))
    # A client that cannot follow its server says so itself.
    assert "client" in {each.trap for each in files.pop("flood").findings}
    for fault, file in files.items():
        assert traps(file) == {fault.split()[-1]}, fault
        for path, words in FAULTS[fault].items():
            assert any(path in each.where.split() and words in each.message for each in file.findings), path


def test_other_servers_are_understood() -> None:
    """Pieces of sound with a header each; base64 in `content`; events of speech in two forms; a whole picture."""
    shapes: dict[tuple[str, str], set[str]] = {
        # Its fields are ignored, not refused, and a text is one piece.
        ("sglang", ""): {"blob", "lengths"},
        ("sglang", "blob"): {"blob", "lengths"},
        ("vllm", ""): set(),
        ("vllm", "header"): {"header"},
    }

    def found(shape: tuple[str, str]) -> BenchFile:
        with stand_in(*shape) as (url, _):
            return measure(url, paths=("spoken", "speech-stream", "picture"))

    with ThreadPoolExecutor(4) as pool:
        files = dict(zip(shapes, pool.map(found, shapes), strict=True))
    for (shape, fault), file in files.items():
        assert traps(file) == shapes[shape, fault], (shape, fault)
        for run in file.runs:
            for each in run.samples:
                assert (
                    not each.error
                    and (run.path == "spoken") == (each.text != "")
                    and "UklGR" not in each.text
                )
                if run.path == "picture":
                    assert (len(each.picture_times), each.num_pictures) == (1, 1)
                    continue
                assert sum(each.audio_samples) == CHUNKS * CHUNK
                assert len(each.audio_samples) == (1 if (fault, run.path) == ("blob", "spoken") else CHUNKS)


def test_a_server_that_stalls_cannot_hide_in_an_open_loop() -> None:
    """Requests that were due while it stood still count from when they were due."""
    with stand_in(fault="stall") as (url, server):
        file = measure(url, paths=("text",), rates=(25.0,), duration=2.0, tokens=2, seed=3)
        assert server.stalled
    (run,) = file.runs
    late = [each.ended - each.scheduled for each in run.samples]
    assert len(run.samples) > 20 and not any(each.error for each in run.samples)
    # In 0.6 s, 25 requests a second make about fifteen due. The server is answering one of them.
    assert sum(each > 0.3 for each in late) >= 4 and max(late) > 0.6


def test_processes_without_a_client_are_not_busy() -> None:
    with stand_in() as (url, _):
        file = measure(url, paths=("text",), concurrency=(1,), rounds=1, client_processes=3)
    assert 0 < file.runs[0].client.busy < 1


def test_servers_share_the_requests_of_several_client_processes() -> None:
    with stand_in() as (first, one), stand_in() as (second, other):
        file = measure(
            f"{first}/v1/", second, paths=("text",), concurrency=(3,), rounds=2, client_processes=2
        )
        assert sorted((len(one.bodies), len(other.bodies))) == [5, 6]  # fields found, 3 to warm up, 6
    assert file.runs[0].client.num_processes == 2 and len({each.item for each in file.runs[0].samples}) == 6
    assert {each.server for each in file.runs[0].samples} == {first, second} == file.servers.keys()


def test_a_closed_loop_ends_after_its_duration_and_every_client_has_sent_one_request() -> None:
    """An answer of the stand-in takes longer than a millisecond, so no client sends a second one."""
    with stand_in() as (url, server):
        file = measure(url, paths=("text",), rounds=50, duration=0.001)
    (run,) = file.runs
    assert len(run.samples) == 2 and run.is_complete and file.is_complete and len(server.bodies) == 5


def test_arrivals_are_poisson() -> None:
    times = poisson(50.0, 5, 400.0, "seed")
    gaps = [after - before for before, after in zip(times[::5], times[5::5], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert all(len({*times[place : place + 5]}) == 1 for place in range(0, len(times), 5))
    assert abs(mean - 0.1) < 0.01
    # Its standard deviation is its mean, which no even spacing has.
    assert abs((sum((each - mean) ** 2 for each in gaps) / len(gaps)) ** 0.5 - 0.1) < 0.01


def _run(client: ClientState, lateness: float = 0.0) -> Run:
    samples = tuple(
        Sample(item=f"{i}", server="", scheduled=i, sent=i + lateness, ended=i + 0.5, first_byte=i + 0.1)
        for i in range(5)
    )
    load = Load(kind="open", rate=1.0)
    return Run(path="transcription", load=load, repeat=0, began="", wall_s=6, samples=samples, client=client)


@pytest.mark.parametrize(
    ("state", "lateness", "words"),
    [
        ({}, 0.0, None),
        ({"lag_s": 0.009}, 0.009, None),  # a tenth of the latency of 0.1 s
        ({"busy": 0.97}, 0.0, "computed 97% of the time"),
        ({"lag_s": 0.03}, 0.0, "was up to 30 ms late"),
        ({}, 0.04, "left up to 40 ms after"),
        ({"clock_s": 0.015}, 0.0, "steps of 15 ms"),
    ],
)
def test_a_client_that_is_the_limit_is_found_out(
    state: dict[str, float], lateness: float, words: str | None
) -> None:
    client = ClientState(**{"num_processes": 1, "busy": 0.5, "lag_s": 0.001, "clock_s": 1e-9, **state})  # type: ignore[arg-type]
    found = [each.message for each in find_traps([_run(client, lateness)]) if each.trap == "client"]
    assert (words is None) == (found == []) and all(str(words) in each for each in found)


def test_an_answer_that_fails_is_no_figure_and_is_named() -> None:
    with stand_in() as (url, server):
        server.app.router.routes.insert(0, _failing_after(server, 4))
        file = measure(url, paths=("text",))
    assert [bool(each.error) for each in file.runs[0].samples].count(True) == 3
    assert any(each.trap == "failed" and "3 of 4" in each.message for each in file.findings)


def test_an_answer_of_another_shape_is_named_and_paths_that_a_server_lacks_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stand_in(fault="failed") as (url, _), pytest.raises(BenchError, match="another shape than OpenAI"):
        measure(url, paths=("text",))
    with run_server(lambda: FakeService(TEXT_ONLY)) as url:
        file = measure(url, concurrency=(1,), rounds=1)
    assert [run.path for run in file.runs] == ["text"]
    left_out = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "is left out" in line]
    assert left_out == [each for each in PATHS if each != "text"]


def test_a_turn_that_the_server_ends_counts_from_the_last_word() -> None:
    """The silence that the server waits for is part of it; the microphone goes on."""
    with fake_server() as (url, _):
        file = measure(url, paths=("realtime",), concurrency=(1,), rounds=1, server_vad=True)
    (sample,) = file.runs[0].samples
    assert not sample.error and sample.audio_times[0] - sample.scheduled > 0.2 and sample.audio_s > 0.9


def _failing_after(server: Any, count: int) -> Any:
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: Any) -> Any:
        if len(server.bodies) < count:
            return await server._chat(request)
        return JSONResponse({"error": {"message": "no room"}}, status_code=503)

    return Route("/v1/chat/completions", answer, methods=["POST"])


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 60), (signal.SIGKILL, 0.5)])
def test_a_signal_leaves_what_was_measured(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """SIGINT every answer until then, SIGKILL the loads that were complete."""
    output = tmp_path / "result.json"
    with stand_in() as (url, server):
        command = [sys.executable, "-m", "mingc", "bench", url, "--path", "text", "--tokens", "4"]
        process = subprocess.Popen(
            [*command, "--rate", "40", "--duration", f"{seconds}s", "--repeats", "100", "--output", output],
            stderr=subprocess.PIPE,
        )
        # Nine requests come before the load; most of the others are answered.
        eventually(lambda: output.exists() if number == signal.SIGKILL else len(server.bodies) >= 60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number), errors
    file = read(output)
    assert not file.is_complete and all(run.is_complete == (number == signal.SIGKILL) for run in file.runs)
    samples = [each for run in file.runs for each in run.samples]
    assert len(samples) >= 5 and not any(each.error for each in samples)
    group = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    assert group.stdout == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": ("video",)}, "there is no such path"),
        ({"fields": "[1]"}, "must be a JSON object"),
        ({"concurrency": (0,)}, "at least 1"),
        ({"repeats": 0}, "--repeats 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchOptions(**options)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchError, match="does not answer"):
        measure("http://127.0.0.1:9")
    with pytest.raises(BenchError, match="no address"):
        measure("ftp://x")
    with stand_in() as (url, _), pytest.raises(BenchError, match="status 404"):
        measure(f"{url}/nowhere", paths=("text",))


def test_speech_of_a_data_set_is_transcribed_after_the_load() -> None:
    """By another server; its voice is that of the item's clip. Texts are as long as the model wants."""
    items = [
        Item(id="a", path="speech", text="one", clip=wav(b"\0\0", 16_000), clip_text="so", expected="one"),
        Item(
            id="b", path="text", messages=({"role": "user", "content": "two"},), expected="2", max_tokens=40
        ),
    ]
    asked = BenchOptions(concurrency=(1, 2), repeats=1, tokens=12)
    with stand_in() as (url, server), stand_in() as (other, transcriber):
        asked = replace(asked, transcriber=other)
        file = bench((url,), asked, lambda *_: None, command="", items=items)
        bodies = server.bodies
    assert [(run.path, [each.item for each in run.samples]) for run in file.runs] == [
        ("speech", ["a"]),
        ("speech", ["a"]),
        ("text", ["b"]),
        ("text", ["b"]),
    ]
    spoken, text = file.runs[0].samples[0], file.runs[2].samples[0]
    assert (
        spoken.text == f"a clip of {44 + 2 * CHUNKS * CHUNK} bytes was heard here"
        and len(transcriber.bodies) == 2
    )
    assert (text.fixed_tokens, text.output_tokens) == (0, 5 + len(json.dumps([*items[1].messages])) % 7)
    voices = [each for each in bodies if each.get("ref_text") == "so"]
    assert [each["ref_audio"].partition(",")[0] for each in voices] == ["data:audio/wav;base64"] * 2
    # Two loads had the same items.
    assert traps(file) == {"repeated"}


def _texts(*texts: str, counters: dict[str, float] | None = None) -> Run:
    samples = tuple(
        Sample(item=f"{place}", server="", scheduled=place, sent=place, ended=place + 1, text=each)
        for place, each in enumerate(texts)
    )
    idle = ClientState(num_processes=1, busy=0.0, lag_s=0.0, clock_s=0.0)
    return Run(path="transcription" if counters else "text", load=Load(kind="open", rate=1.0), repeat=0, began="",
               wall_s=99, samples=samples, client=idle, counters=counters or {})  # fmt: skip


@pytest.mark.parametrize(
    ("copies", "others", "is_found"), [(4, 36, False), (5, 35, True), (1, 3, False), (2, 2, True)]
)
def test_a_tenth_of_the_answers_may_be_equal(copies: int, others: int, is_found: bool) -> None:
    """Prompts of one kind may well have a common answer; of few prompts not two."""
    texts = ["an answer of many characters"] * copies + [
        f"another answer, number {each}" for each in range(others)
    ]
    found = [each.message for each in find_traps([_texts(*texts)]) if each.trap == "equal"]
    assert [each.split()[0] for each in found] == [str(copies)] * is_found


@pytest.mark.parametrize(
    ("counter", "value", "words"),
    [
        ("mingc_prefix_cache_hit_tokens_total", 193, "193 tokens of 3 prompts"),
        ('vllm:prefix_cache_hits_total{model_name="m"}', 2000, "2000 tokens of 3 prompts"),
        ('sglang:cached_tokens_total{model_name="m"}', 193, "193 tokens of 3 prompts"),
        ("mingc_prefix_cache_hit_tokens_total", 192, None),  # 64 of each prompt: the template
        ("mingc_prefix_cache_evicted_pages_total", 5000, None),
        ("mingc_encoder_cache_hits_total", 1, "did not encode 1 pictures"),
        ("mingc_encoder_cache_misses_total", 9, None),
    ],
)
def test_hits_of_a_cache_are_seen_in_the_counters(counter: str, value: float, words: str | None) -> None:
    """Where the usage of an answer does not tell them."""
    found = [
        each.message
        for each in find_traps([_texts("a", "b", "c", counters={counter: value})])
        if each.trap == "cache"
    ]
    assert (words is None) == (found == []) and all(str(words) in each for each in found)


def test_the_length_of_a_sound_is_compared_with_what_the_server_says() -> None:
    sample = Sample(item="a", server="", scheduled=0, sent=0, ended=1, audio_times=(0.5,), audio_samples=(44_100,),
                    sample_rate=24_000, header_rate=24_000, stated_audio_s=1.0)  # fmt: skip
    idle = ClientState(num_processes=1, busy=0.0, lag_s=0.0, clock_s=0.0)
    load = Load(kind="closed", concurrency=1)
    run = Run(path="speech", load=load, repeat=0, began="", wall_s=1, samples=(sample,), client=idle)
    (found,) = find_traps([run])
    assert found.trap == "header" and "the ratio is 1.84" in found.message
    long = msgspec.structs.replace(sample, item="b", sample_rate=44_100, header_rate=44_100, audio_samples=(88_200,),
                                   stated_audio_s=None)  # fmt: skip
    short = msgspec.structs.replace(long, item="c", audio_samples=(44_100,))
    runs = [
        msgspec.structs.replace(
            run, load=Load(kind="closed", concurrency=many), samples=(each,), wall_s=1 / many
        )
        for many, each in ((1, long), (2, short))
    ]
    assert [(each.trap, "2.0 s (c=1), 1.0 s (c=2)" in each.message) for each in find_traps(runs)] == [
        ("lengths", True)
    ]
