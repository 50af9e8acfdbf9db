"""`mingc probe --html`: the page holds every figure, fetches nothing, and a browser shows every row."""

from __future__ import annotations

import html
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import BROWSER, browse

from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import EngineCost
from mingc.console.report_page import check_output_path
from mingc.errors import ConfigError
from mingc.probe import html_report
from mingc.probe.html_report import page, write_html
from mingc.probe.report import (
    CacheRate,
    EngineFigures,
    EnginePair,
    Environment,
    FirstRequest,
    Latency,
    PatchEmbed,
    PeakRates,
    ProbeReport,
    Regression,
    StartPhase,
    Transfer,
    roofline_bound,
)

HOSTILE = '<script>alert(1)</script> & "quoted" \'\x00\x1b[31m\udcff'
RATES = PeakRates(
    device="A CPU",
    copy_tb_s=0.009,
    read_tb_s=0.0125,
    matmul_tflop_s=0.12,
    matmul_dtype="float32",
    cache_rates=(CacheRate(num_bytes=1 << 16, read_tb_s=0.05), CacheRate(num_bytes=1 << 21, read_tb_s=0.012)),
)


def engine(
    name: str, median: float, context: int | None = None, backend: str = "aoti", **sizes: int
) -> EngineFigures:
    latency = Latency(
        median_ms=median,
        p95_ms=1.25 * median,
        p99_ms=1.5 * median,
        min_ms=0.75 * median,
        repetitions=7,
        is_captured=False,
        warm_ms=None,
        uncaptured_ms=None,
        enqueue_ms=None,
    )
    return EngineFigures(engine=name, sizes=sizes, context_tokens=context, latency=latency, backend=backend)


ENGINES = (
    engine("talker.step", 1.0234, 256, B=1),
    engine("talker.step", 3.4, 256, B=8),
    engine("talker.prefill", 5.5, 256, T=32),
    engine("talker.prefill", 61.0, 256, T=256),
    engine("cfm.sample", 29.4, B=1),
    engine("cfm.sample", 0.91, B=4),
    engine("thinker.decode_attention", 0.31, 127, B=4, P=8),
    engine("thinker.decode_attention", 0.47, 255, B=4, P=16),
    engine("thinker.embed", 0.011, T=1),
    engine("vision_encoder.encode", 7.0, M=64),
    engine("vision_encoder.encode", 70.0, M=1024),
)
COSTS = {each.title: (10**7 * (index + 1), 3 * 10**5 * (index + 1)) for index, each in enumerate(ENGINES)}
COSTS[ENGINES[8].title] = (0, 4096)


def make_report() -> ProbeReport:
    beside = tuple(
        engine(each.engine, 2 * each.latency.median_ms, each.context_tokens, "onnx", **each.sizes)
        for each in ENGINES[:2]
    )
    bounds = tuple(
        roofline_bound(
            each,
            EngineCost(
                dims=each.sizes, flops=COSTS[each.title][0], weight_bytes=COSTS[each.title][1], state_bytes=0
            ),
            1000,
            RATES,
        )
        for each in ENGINES
    )
    return ProbeReport(
        artifact=HOSTILE,
        model="tiny",
        dtype="float32",
        torch="2.13.0",
        peak_rates=RATES,
        tolerance=0.1,
        engines=ENGINES,
        roofline_bounds=bounds,
        regressions=(Regression(engine=ENGINES[1].title, baseline_ms=2.0, median_ms=3.4, slower_by=0.7),),
        only_here=("new.engine",),
        only_in_baseline=("gone.engine",),
        patch_embed=(
            PatchEmbed(patches=256, conv3d_ms=9.0, linear_ms=3.0, ratio=3.0, relative_difference=1e-7),
        ),
        artifact_sha256="ab" * 32,
        command=f"mingc probe {HOSTILE}",
        environment=Environment(
            measured_at="2026-11-23T08:00:00+00:00",
            mingc="0.1.0",
            python="3.11.7",
            torch="2.13.0",
            onnxruntime="1.32.0",
            cuda=None,
            driver="580.65.06",
            nccl=None,
            system="Linux 6.1 x86_64",
            cpu="A CPU",
            cores=2,
            torch_threads=1,
            memory_gib=15.6,
            gpus=("NVIDIA H200, 141 GiB",),
        ),
        ready_s=6.75,
        cold_start=(
            StartPhase(phase="start the interpreter", seconds=0.25, until_s=0.25),
            StartPhase(phase="import", seconds=4.5, until_s=4.75),
            StartPhase(phase=HOSTILE, seconds=0.0, until_s=4.75),
            StartPhase(phase="load engines", seconds=2.0, until_s=6.75),
        ),
        first_requests=(FirstRequest(request="chat, 2 tokens", first_ms=271.8, second_ms=94.2),),
        transfers=(
            Transfer(transfer="host memory, read", num_bytes=2**28, ms=32.21, gb_s=8.33),
            Transfer(
                transfer="host to GPU, pinned", num_bytes=0, ms=None, gb_s=None, not_run="no CUDA device"
            ),
        ),
        beside_artifact="other",
        beside=(
            EnginePair(
                engine=ENGINES[0].title,
                backend="aoti",
                median_ms=1.0234,
                other_backend="onnx",
                other_median_ms=2.0468,
                ratio=2.0,
            ),
        ),
        beside_engines=beside,
        notes=("a note", "fault of the roof: 1 engine(s) were faster"),
    )


REPORT = make_report()


class Reader(HTMLParser):
    """Collects what a page refers to, and the text of the element that holds the report."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures = ""
        self._is_report = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._is_report = ("id", "report") in attributes

    def handle_endtag(self, tag: str) -> None:
        self._is_report = False

    def handle_data(self, data: str) -> None:
        if self._is_report:
            self.figures += data


def read(report: ProbeReport) -> Reader:
    reader = Reader()
    reader.feed(page(report))
    return reader


def test_the_page_holds_every_figure_of_the_report() -> None:
    """Texts that look like markup included: this is what a reader without scripts sees."""
    recorded = json.loads(json.dumps(encode(REPORT)).replace(r"\udcff", "?"))  # of a name that is not UTF-8
    assert json.loads(read(REPORT).figures) == recorded


def test_the_page_asks_for_nothing_and_texts_cannot_become_markup() -> None:
    reader = read(REPORT)
    assert [tag for tag, _ in reader.tags].count("script") == 1, "the one of the template"
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "form", "base"), tag
        assert not {"src", "href", "srcset", "style", "onload", "onclick"} & attributes.keys()
    (policy,) = [
        attributes["content"]
        for _, attributes in reader.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert str(policy).startswith("default-src 'none';") and "http" not in str(policy)
    template = page(replace(REPORT, artifact="", command="", cold_start=()))
    assert "innerHTML" not in template and "document.write" not in template and "eval(" not in template


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_json_cannot_express_is_left_out(value: float) -> None:
    found = json.loads(read(replace(REPORT, ready_s=value)).figures)
    assert found["ready_s"] is None and found["model"] == "tiny"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "probe.html"
    write_html(REPORT, path)
    assert path.read_text(encoding="utf-8") == page(REPORT)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    monkeypatch.setattr(html_report, "page", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_html(REPORT, path)
    assert [each.name for each in tmp_path.iterdir()] == ["probe.html"]
    assert path.read_text(encoding="utf-8").endswith("</html>\n")


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_output_path(tmp_path / "probe.html", "--html")
    for path in (tmp_path, tmp_path / "none" / "probe.html"):
        with pytest.raises(ConfigError) as caught:
            check_output_path(path, "--html")
        assert caught.value.where == "--html" and str(path) in caught.value.message


# What the browser made of the page, and every text, point and line that lies outside its chart.
MEASURE = """<script>
const outside = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  for (const each of svg.querySelectorAll("text, circle, rect, polyline, line")) {
    const own = each.getBoundingClientRect();
    if (own.left < box.left - 0.5 || own.right > box.right + 0.5
        || own.top < box.top - 0.5 || own.bottom > box.bottom + 0.5)
      outside.push(each.outerHTML);
  }
}
const rows = [...document.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
document.title = JSON.stringify({charts: document.querySelectorAll("svg").length, outside, rows,
  heads: [...document.querySelectorAll("h2")].map((each) => each.textContent),
  points: document.querySelectorAll("circle").length, width: document.documentElement.scrollWidth});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_a_browser_shows_every_row_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "probe.html"
    write_html(REPORT, path)
    _, log = browse(path, tmp_path / "profile")
    assert "CONSOLE" not in log, log
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    shown, _ = browse(path, tmp_path / "profile")
    title = re.search(r"<title>(\{.*?\})</title>", shown, re.DOTALL)
    assert title is not None, shown[:500]
    found = json.loads(html.unescape(title[1]))
    assert found["outside"] == [] and found["width"] <= 1200 and found["charts"] == 7
    assert found["points"] == len(ENGINES) + len(ENGINES) - 1, "one engine counts no operations"
    cells = [cell for row in found["rows"] for cell in row]
    for each in ENGINES:
        sizes = [f"{name}={size}" for name, size in each.sizes.items()]
        context = [] if each.context_tokens is None else [f"+{each.context_tokens}"]
        name = " ".join([each.engine, *sizes, *context])
        row = next(row for row in found["rows"] if row[0] == name and "aoti" in row)
        assert f"{each.latency.median_ms:.4g}" in row and cells.count(name) >= 2, "latency and roofline"
    assert "no CUDA device" in cells and "8.33" in cells and "NVIDIA H200, 141 GiB" in cells
    assert {"Cold start", "Roofline", "Memory rates", "Notes", "Slower than the baseline"} <= {
        *found["heads"]
    }


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_parts_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "probe.html"
    bare = {"regressions": (), "cold_start": (), "first_requests": (), "transfers": (), "patch_embed": ()}
    alone = {"beside": (), "beside_engines": (), "roofline_bounds": (), "only_here": (), "ready_s": None}
    write_html(replace(REPORT, tolerance=None, environment=None, **bare, **alone), path)  # type: ignore[arg-type]
    shown, log = browse(path, tmp_path / "profile")
    assert "CONSOLE" not in log, log
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", shown) == ["Latency of engines", "Notes"]
