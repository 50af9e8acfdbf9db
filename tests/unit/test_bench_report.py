"""Figures of runs against values computed by hand, verdicts, and the report in Markdown and in a browser."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chromium import BROWSER, browse

from mingc.bench.baseline import compare, read_baseline
from mingc.bench.figures import Playback, estimates, playback
from mingc.bench.records import BenchFile, ClientState, Finding, Load, Run, Sample, encode, write
from mingc.bench.report import report
from mingc.console.report_page import to_html, to_markdown, write_text
from mingc.errors import ConfigError

CLIENT = ClientState(num_processes=1, busy=0.1, lag_s=0.001, clock_s=1e-9)
HOSTILE = '<script>alert(1)</script> & "quoted" | \udcff'


def run(path: str, load: Load, samples: list[Sample], wall_s: float, repeat: int = 0) -> Run:
    return Run(
        path=path, load=load, repeat=repeat, began="2026-11-27T12:00:00Z", wall_s=wall_s, samples=tuple(samples),
        client=CLIENT,
    )  # fmt: skip


def bench_file(runs: list[Run], **more: object) -> BenchFile:
    fields: dict[str, object] = {
        "command": "mingc bench http://localhost:8000", "date": "2026-11-27T12:00:00Z", "hardware": {"cpu": "A CPU"},
        "versions": {"mingc": "0.1.0"}, "servers": {"http://localhost:8000": {"model": "tiny"}}, "settings": {},
    }  # fmt: skip
    return msgspec.convert({**fields, **more, "runs": runs}, BenchFile, from_attributes=True)


def means(runs: list[Run]) -> dict[str, float]:
    (figures,) = estimates(runs).values()
    return {figure.label: value.mean for figure, value in figures.items()}


def spoken(scheduled: float, times: tuple[float, ...], frames: tuple[int, ...], **more: object) -> Sample:
    base = Sample(
        item="x", server="http://a", scheduled=scheduled, sent=scheduled, ended=scheduled + times[-1], sample_rate=1000,
        audio_times=tuple(scheduled + time for time in times), audio_samples=frames,
    )  # fmt: skip
    return msgspec.structs.replace(base, **more)


def test_figures_of_text_by_hand() -> None:
    first = Sample(
        item="a", server="s", scheduled=1.0, sent=1.5, ended=3.0, token_times=(2.0, 2.1, 2.5), output_tokens=6,
        stages={"queue": 4.0},
    )  # fmt: skip
    second = msgspec.structs.replace(
        first, scheduled=1.5, ended=2.5, token_times=(1.6, 2.4), output_tokens=2, stages={"queue": 8.0}
    )
    failed = Sample(
        item="b", server="s", scheduled=1.0, sent=1.0, ended=9.0, error="refused", token_times=(1.1,)
    )
    found = means([run("text", Load(kind="closed", concurrency=2), [first, second, failed], wall_s=10.0)])
    wanted = {
        "success, %": 200 / 3,
        "requests, 1/s": 0.2,
        "tokens, tok/s": 0.8,
        "first token, median, ms": np.median([1000, 100]),  # since due, not since sent
        "first token, p95, ms": np.quantile([1000, 100], 0.95),
        "time per output token, median, ms": np.median([100, 800]),
        "time per output token, p95, ms": np.quantile([100, 800], 0.95),
        "pause between tokens, p99, ms": np.quantile([100, 400, 800], 0.99),
        "wall, median, ms": 1500,
        "wall, p95, ms": np.quantile([2000, 1000], 0.95),
        "server: queue, median, ms": 6.0,
        "server: queue, p95, ms": np.quantile([4, 8], 0.95),
    }
    assert found == pytest.approx(wanted)


def test_figures_of_speech_by_hand() -> None:
    """Chunks of 0.5 s: one that comes 0.3 s late is one underrun, and what follows is played that much later."""
    late = spoken(0.0, (0.2, 0.4, 1.5, 1.9), (500, 500, 500, 500), ended=2.0)
    even = spoken(1.0, (0.1, 0.2), (500, 500))
    assert playback(late) == Playback(1, pytest.approx(0.3)) and playback(even) == Playback(0, 0.0)
    found = means([run("speech-stream", Load(kind="open", rate=1.0), [late, even], wall_s=2.0)])
    wanted = {
        "success, %": 100.0,
        "requests, 1/s": 1.0,
        "audio, s/s": 1.5,
        "first audio, median, ms": 150.0,
        "first audio, p95, ms": np.quantile([200, 100], 0.95),
        "pause between chunks, p99, ms": np.quantile([200, 1100, 400, 100], 0.99),
        "real-time factor, median": np.median([1.0, 0.2]),
        "real-time factor, p95": np.quantile([1.0, 0.2], 0.95),
        "wall, median, ms": 1100.0,
        "wall, p95, ms": np.quantile([2000, 200], 0.95),
        "underruns per answer": 0.5,
        "continuity, %": 100 * 3.0 / 3.3,
    }
    assert found == pytest.approx(wanted)
    whole = means([run("speech", Load(kind="closed", concurrency=1), [late], wall_s=2.0)])
    assert "underruns per answer" not in whole, "nobody listens to a file before it is there"


def test_figures_of_pictures_by_hand() -> None:
    """Two pictures in one answer, each with an unfinished state; an answer without one; one that failed."""
    two = Sample(item="a", server="s", scheduled=1.0, sent=1.5, ended=9.0, picture_times=(3.0, 4.0, 8.0, 9.0),
                 num_pictures=2, output_tokens=8192)  # fmt: skip
    whole = Sample(
        item="b", server="s", scheduled=0.0, sent=0.0, ended=3.0, picture_times=(3.0,), num_pictures=1
    )
    failed = Sample(
        item="c", server="s", scheduled=0.0, sent=0.0, ended=1.0, error="lost", picture_times=(0.5,)
    )
    found = means([run("picture", Load(kind="open", rate=1.0), [two, whole, failed], wall_s=10.0)])
    wanted = {
        "success, %": 200 / 3,
        "requests, 1/s": 0.2,
        "pictures, 1/s": 0.3,
        "first unfinished picture, median, ms": 2000.0,
        "first unfinished picture, p95, ms": 2000.0,
        "time per picture, median, s": 3.5,
        "time per picture, p95, s": np.quantile([4.0, 3.0], 0.95),
        "wall, median, ms": 5500.0,
        "wall, p95, ms": np.quantile([8000, 3000], 0.95),
    }
    assert found == pytest.approx(wanted)


def test_a_session_has_no_figures_of_tokens() -> None:
    """It counts those of sound, too, and holds back the text of an answer that it began before the turn ended."""
    turn = spoken(1.0, (0.5, 0.6), (500, 500), token_times=(1.4, 1.4), output_tokens=80)
    found = means([run("realtime", Load(kind="closed", concurrency=1), [turn], wall_s=2.0)])
    assert found["first token, median, ms"] == pytest.approx(400)
    assert not [name for name in found if "tokens" in name or "output token" in name]


def test_a_figure_that_a_server_does_not_give_is_absent() -> None:
    uncounted = Sample(item="a", server="s", scheduled=0.0, sent=0.0, ended=1.0, token_times=(0.5, 0.9))
    found = means([run("text", Load(kind="closed", concurrency=1), [uncounted], wall_s=1.0)])
    assert not [name for name in found if "tok/s" in name or "output token" in name or "audio" in name]


def test_a_result_replaces_a_file_and_nothing_else(tmp_path: Path) -> None:
    """Such as /dev/null."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, file):
        write(path, bench_file([]))
    assert pipe.is_fifo() and os.read(end, 10_000) == file.read_bytes()
    os.close(end)
    file.chmod(0o400)
    write(file, bench_file([]))  # what would be lost after a long measurement otherwise
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("pipe", "file")] == []


def test_an_open_loop_shares_its_wall_time_equally() -> None:
    """Its answers do not make it longer: the requests per second of its halves differ by their numbers only."""
    samples = [
        Sample(item=str(i), server="s", scheduled=i, sent=i, ended=i + took)
        for i, took in enumerate((1, 9, 1, 9))
    ]
    bounds = {}
    for load in (Load(kind="open", rate=1.0), Load(kind="closed", concurrency=4)):
        ((_, figures),) = estimates([run("text", load, samples, wall_s=10.0)]).items()
        (found,) = [value for figure, value in figures.items() if figure.name == "requests"]
        bounds[load.kind] = (found.mean, found.error)
    assert (
        bounds["open"] == (pytest.approx(0.4), pytest.approx(0, abs=1e-9))
        and (bounds["closed"][1] or 0) > 0.05
    )


def measured(seed: int, slower: float = 1.0, broken: int = 0, num_repeats: int = 3) -> BenchFile:
    """Three loads of text and speech; requests vary by 20 %, repeats by 1 %."""
    random = np.random.default_rng(seed)
    runs = []
    for repeat in range(num_repeats):
        for concurrency in (1, 4, 16):
            load = Load(kind="closed", concurrency=concurrency)
            drift = slower * random.normal(1, 0.01)
            taken = (drift * random.lognormal(0, 0.2, 40) * concurrency**0.4).tolist()
            texts = [
                Sample(item=str(index), server="s", scheduled=0.0, sent=0.0, ended=time, output_tokens=20,
                       token_times=tuple(time * part / 20 for part in range(4, 21)), error="lost" * (index < broken))
                for index, time in enumerate(taken)
            ]  # fmt: skip
            runs.append(run("text", load, texts, sum(taken) / concurrency, repeat))
            speech = [
                spoken(0.0, tuple(time * part / 10 for part in range(1, 11)), (320,) * 10,
                       stages={"queue": time, "prefill": 2 * time})
                for time in taken
            ]  # fmt: skip
            runs.append(run("speech-stream", load, speech, sum(taken) / concurrency, repeat))
    return bench_file(runs, settings={"repeats": num_repeats, "warm-up": 2, "seed": seed})


def test_equal_servers_are_not_told_apart() -> None:
    """Two pairs of measurements of one server, with about seventy figures each."""
    files = [measured(seed) for seed in range(4)]
    verdicts = [
        change.verdict
        for old, new in zip(files[::2], files[1::2], strict=True)
        for change in compare(old, new).changes
    ]
    assert len(verdicts) > 120 and {*verdicts} == {"no difference"}


def test_a_server_that_is_slower_or_fails_is_told_by_every_figure_of_it() -> None:
    comparison = compare(measured(1), measured(2, slower=1.5))
    assert comparison.is_worse
    found = {(change.figure.name, change.verdict) for change in comparison.changes}
    for name in (
        "first token, median",
        "wall, median",
        "tokens",
        "first audio, median",
        "server: queue, median",
    ):
        assert (name, "worse") in found and (name, "no difference") not in found, name
    assert ("success", "no difference") in found and "better" not in {verdict for _, verdict in found}
    assert {change.verdict for change in compare(measured(2, slower=1.5), measured(1)).changes} == {
        "better",
        "no difference",
    }
    failing = compare(measured(1), measured(2, broken=8))
    assert {c.verdict for c in failing.changes if c.figure.name == "success" and c.path == "text"} == {
        "worse"
    }


def test_any_drop_of_a_percentage_counts_but_small_changes_of_a_time_do_not() -> None:
    def answered(took: float, failed: int) -> BenchFile:
        samples = [Sample(item=str(i), server="s", scheduled=0.0, sent=0.0, ended=took + i * 1e-6,
                          error="x" * (i < failed)) for i in range(4000)]  # fmt: skip
        return bench_file([run("transcription", Load(kind="open", rate=1.0), samples, wall_s=9.0)])

    changes = compare(answered(1.0, 0), answered(1.02, 60)).changes
    verdicts = {change.figure.name: change.verdict for change in changes}
    assert verdicts == {
        "success": "worse",  # 98.5 %
        "requests": "no difference",
        "wall, median": "no difference",
        "wall, p95": "no difference",
    }


def test_what_differs_between_two_measurements_is_noted() -> None:
    old, new = measured(1), measured(2, num_repeats=1)
    new = msgspec.structs.replace(
        new,
        hardware={"cpu": "Another"},
        runs=(*new.runs, msgspec.structs.replace(new.runs[0], path="image")),
    )
    notes = "\n".join(compare(old, new).notes)
    assert "hardware, cpu: A CPU in the baseline, Another here" in notes and "settings, repeats: 3" in notes
    assert "This run has one repeat" in notes and "Not in the baseline: image c=1" in notes
    assert "seed" not in notes and "ended early" not in notes
    alone = bench_file([run("text", Load(kind="closed", concurrency=1), [old.runs[0].samples[0]], 1.0)])
    assert {change.verdict for change in compare(alone, alone).changes} == {"unknown"}


def test_a_baseline_of_other_loads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write(path, measured(1))
    assert read_baseline(path, ["text"], [Load(kind="closed", concurrency=4)]) == measured(1)
    with pytest.raises(ConfigError) as caught:
        read_baseline(path, ["text"], [Load(kind="closed", concurrency=8)])
    assert caught.value.where == "--baseline" and "text c=16" in caught.value.message
    for text, why in (
        (b"{}", "missing required field"),
        (b"", "truncated"),
        (b'{"schema": 2,', "its schema is 2"),
    ):
        path.write_bytes(text if not text.endswith(b",") else text + encode(measured(1)).split(b",", 1)[1])
        with pytest.raises(ConfigError, match=why):
            read_baseline(path, ["text"], [Load(kind="closed", concurrency=4)])


FILE = msgspec.structs.replace(
    measured(2, slower=1.5, broken=1),
    command=HOSTILE,
    findings=(Finding(trap="blob", where="speech-stream c=4", message=HOSTILE),),
    scores={"gsm8k": {"accuracy, %": 93.2}},
)


def test_markdown() -> None:
    text = to_markdown(report(FILE, compare(measured(1), FILE)))
    assert text.encode(), "no lone surrogates"
    assert "\\<script\\>alert(1)\\</script\\>" in text and "<" not in text.replace("\\<", "")
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")
    tables = [block.splitlines() for block in re.split(r"\n\n", text) if block.startswith("|")]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, table[0]
    (figures,) = [
        table for table in tables if "c=16" in table[0] and any("output token" in line for line in table)
    ]
    success = next(line for line in figures if line.startswith("| success, %"))
    assert re.fullmatch(r"\| success, % \|( 97.5 ± 0 \(9[0-9.]+–100\) \|){3}", success)
    (overview,) = [table for table in tables if table[0].startswith("| path | load |")]
    assert [line.split(" | ")[:2] for line in overview[2:]] == [
        [f"| {path}", f"c={clients}"] for clients in (1, 4, 16) for path in ("text", "speech-stream")
    ]
    place = overview[0].split(" | ").index("first audio, median / p95, ms")
    assert (
        re.fullmatch(r"\d+ / \d+", overview[3].split(" | ")[place]) and overview[2].split(" | ")[place] == ""
    )
    assert "| gsm8k | accuracy, % | 93.2 |" in text and "| worse |" in text
    slower = next(
        line for line in text.splitlines() if line.startswith("| text c=1 | wall, median, ms | worse |")
    )
    assert re.search(r"\| \+(4|5)\d\.\d % \|$", slower), slower  # half as slow again


def test_the_chart_of_a_spread_has_the_quantiles_of_the_answers() -> None:
    samples = [Sample(item=str(i), server="s", scheduled=0.0, sent=0.0, ended=i / 10) for i in range(11)]
    page = report(bench_file([run("transcription", Load(kind="open", rate=1.0), samples, wall_s=1.0)]))
    (chart,) = [each for s in page.sections for each in s.charts if "share of answers" in each.title]
    (points,) = chart.series.values()
    assert {round(point.y): point.x for point in points}.items() >= {
        0: 0,
        50: 500,
        90: 900,
        100: 1000,
    }.items()


# What the browser made of the page, and every text, point and line that lies outside its chart.
MEASURE = """<script>
const outside = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  for (const each of svg.querySelectorAll("text, circle, polyline, line")) {
    const own = each.getBoundingClientRect();
    if (own.left < box.left - 0.5 || own.right > box.right + 0.5
        || own.top < box.top - 0.5 || own.bottom > box.bottom + 0.5)
      outside.push(each.outerHTML);
  }
}
document.title = JSON.stringify({outside, charts: document.querySelectorAll("svg").length,
  names: [...document.querySelectorAll("svg")].filter((each) => !each.getAttribute("aria-label")).length,
  heads: [...document.querySelectorAll("h2")].map((each) => each.textContent),
  rows: [...document.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent)),
  scopes: [...document.querySelectorAll("th")].every((each) => each.scope),
  width: document.documentElement.scrollWidth, inner: innerWidth});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [500, 1400])  # headless windows are at least 500 wide
def test_a_browser_shows_every_figure(tmp_path: Path, width: int) -> None:
    page = report(FILE, compare(measured(1), FILE))
    text = to_html(page)
    assert not re.findall(r"(?:src|href|url)\s*[=(]", text.split('<pre id="report">')[0])
    path = tmp_path / "bench.html"
    write_text(text.replace("</body>", MEASURE + "</body>"), path)
    shown, log = browse(path, tmp_path / "profile", width)
    assert "CONSOLE" not in log, log
    title = re.search(r"<title>(\{.*?\})</title>", shown, re.DOTALL)
    assert title is not None, shown[:500]
    found = json.loads(html.unescape(title[1]))
    assert (
        found["outside"] == []
        and found["names"] == 0
        and found["width"] <= found["inner"]
        and found["scopes"]
    )
    assert found["charts"] == sum(len(section.charts) for section in page.sections) > 15
    assert found["heads"] == [section.heading for section in page.sections]
    wanted = [
        [str(cell or "") for cell in row] for s in page.sections for table in s.tables for row in table.rows
    ]
    rows = found["rows"][len(page.facts) :]
    assert rows == [[cell.replace("\udcff", "?") for cell in row] for row in wanted]
