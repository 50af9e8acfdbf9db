"""`mingc probe --html`: every figure of the JSON is on the page, drawn where its axes say, and nothing is fetched.

The page is read by an XML parser, and by headless Chromium where there is one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from mingc.artifacts.manifest import EngineCost
from mingc.console.report import to_json
from mingc.errors import ConfigError
from mingc.probe import html_report
from mingc.probe.charts import Point, Roof, Series, line_chart, number, roofline_chart
from mingc.probe.html_report import check_html_path, page, write_html
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
ESCAPED = '<script>alert(1)</script> & "quoted" \'\\x00\\x1b[31m\\udcff'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
DOCUMENT: dict[str, Any] = json.loads(to_json(REPORT))


@pytest.fixture(scope="module")
def root() -> Element:
    text = page(REPORT)
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.partition("\n")[2])


def charts(root: Element) -> dict[str, Element]:
    return {each.attrib["aria-label"]: each for each in root.iter("svg")}


def of_class(svg: Element, name: str) -> list[Element]:
    return [each for each in svg.iter() if each.get("class") == name]


def figure(drawn: Element, name: str) -> float:
    return float(drawn.attrib[name])


def along(svg: Element, axis: str, value: float) -> float:
    """Position of `value` by the labels of the axis alone: the outer two ticks, logarithms between them."""
    ticks = [each for each in svg.iter("text") if each.get(f"data-{axis}-tick")]
    assert ticks, "an axis has labels"
    for tick in ticks:
        assert float(str(tick.text).replace(",", "")) == pytest.approx(
            figure(tick, f"data-{axis}-tick"), rel=5e-3
        )
    # The label of a horizontal line lies 4 below it.
    places = [
        (figure(each, f"data-{axis}-tick"), figure(each, axis) - (4 if axis == "y" else 0)) for each in ticks
    ]
    (low, start), (high, end) = places[0], places[-1]
    if low == high:
        assert value == low, "one label places its own value only"
        return start
    return start + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (end - start)


def rows_of(root: Element) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def test_latencies_are_drawn_where_the_axes_say(root: Element) -> None:
    """Against the document of --json: each engine is one point of its stage, at its batch, at its median."""
    expected: Counter[tuple[str, float, float]] = Counter()
    for row in [*DOCUMENT["engines"], *DOCUMENT["beside_engines"]]:
        sizes = row["sizes"]
        size = next(sizes[dim] for dim in ("B", "T", "M") if dim in sizes)
        expected[row["engine"].partition(".")[0], float(size), row["latency"]["median_ms"]] += 1
    drawn: Counter[tuple[str, float, float]] = Counter()
    for name, svg in charts(root).items():
        if not name.startswith("Latency of "):
            continue
        stage = name.split()[2]
        labels = [each.text for each in of_class(svg, "label")]
        assert labels[1] == "latency, ms" and labels[0] == name.partition(" against ")[2]
        for point in of_class(svg, "point"):
            x, y = figure(point, "data-x"), figure(point, "data-y")
            drawn[stage, x, y] += 1
            assert figure(point, "cx") == pytest.approx(along(svg, "x", x), abs=0.05)
            assert figure(point, "cy") == pytest.approx(along(svg, "y", y), abs=0.05)
            assert number(y) in "".join(point.itertext()), "the tooltip has the figure"
        medians = {figure(each, "data-y"): figure(each, "cy") for each in of_class(svg, "point")}
        assert len(of_class(svg, "range")) == len(of_class(svg, "point"))
        for range_, (median, _) in zip(of_class(svg, "range"), medians.items(), strict=True):
            assert figure(range_, "y1") == pytest.approx(along(svg, "y", 0.75 * median), abs=0.05), (
                "the fastest"
            )
    assert drawn == expected
    stages = {row["engine"].partition(".")[0] for row in DOCUMENT["engines"]}
    assert {"".join(each.itertext()) for each in root.iter("h3")} >= stages


def test_series_are_named_after_graph_sizes_and_backend(root: Element) -> None:
    svg = charts(root)["Latency of talker against requests in a call (B)"]
    assert [each.text for each in of_class(svg, "legend")] == ["step +256 (aoti)", "step +256 (onnx, beside)"]
    assert len(of_class(svg, "line")) == 2
    one, other = of_class(svg, "line")
    assert one.attrib["stroke"] != other.attrib["stroke"]
    svg = charts(root)["Latency of thinker against requests in a call (B)"]
    assert [each.text for each in of_class(svg, "legend")] == [
        "decode_attention P=8 +127 (aoti)",
        "decode_attention P=16 +255 (aoti)",
    ]
    assert "Latency of vision_encoder against size M" in charts(root)
    assert "Latency of thinker against new tokens of a request (T)" in charts(root)


def test_the_roofline_has_every_engine_below_the_measured_roofs(root: Element) -> None:
    svg = charts(root)["Roofline: achieved operations against arithmetic intensity"]
    assert [each.text for each in of_class(svg, "label")] == [
        "arithmetic intensity, FLOP/byte",
        "achieved, GFLOP/s",
    ]
    expected = Counter()
    for row in DOCUMENT["roofline_bounds"]:
        if row["flops"]:
            num_bytes = row["weight_bytes"] + row["state_bytes"] + row["io_bytes"]
            median = next(each.latency.median_ms for each in ENGINES if each.title == row["engine"])
            expected[round(row["flops"] / num_bytes, 6), round(row["flops"] / (median / 1e3) / 1e9, 6)] += 1
    points = of_class(svg, "point")
    assert Counter((round(figure(p, "data-x"), 6), round(figure(p, "data-y"), 6)) for p in points) == expected
    for point in points:
        assert figure(point, "cx") == pytest.approx(along(svg, "x", figure(point, "data-x")), abs=0.05)
        assert figure(point, "cy") == pytest.approx(along(svg, "y", figure(point, "data-y")), abs=0.05)
    roofs = of_class(svg, "roof")
    assert [figure(each, "data-slope") for each in roofs] == [12.5, 50.0], "GB/s: main memory, and the cache"
    assert {figure(each, "data-peak") for each in roofs} == {120.0}, "GFLOP/s"
    for roof in roofs:
        corners = [tuple(map(float, pair.split(","))) for pair in roof.attrib["points"].split()]
        slope, peak = figure(roof, "data-slope"), figure(roof, "data-peak")
        assert corners[1] == pytest.approx((along(svg, "x", peak / slope), along(svg, "y", peak)), abs=0.05)
        assert corners[2][1] == corners[1][1], "flat beyond the bend"
        rise = along(svg, "x", 1.0), along(svg, "y", slope)  # at one FLOP a byte
        share = (rise[0] - corners[0][0]) / (corners[1][0] - corners[0][0])
        assert rise[1] == pytest.approx(corners[0][1] + share * (corners[1][1] - corners[0][1]), abs=0.1)
    entries = sorted(of_class(svg, "legend"), key=lambda each: figure(each, "y"))
    legend = [str(each.text) for each in entries]
    assert legend[:4] == ["talker", "cfm", "thinker", "vision_encoder"]
    assert legend[4:] == ["memory 12.5 GB/s, 120 GFLOP/s", "memory 50 GB/s, 120 GFLOP/s"]
    samples = sorted(
        (figure(each, "cy") if each.tag == "circle" else figure(each, "y1"), each.tag)
        for each in of_class(svg, "sample")
    )
    assert [tag for _, tag in samples] == ["circle"] * 4 + ["line"] * 2, "points are not joined, roofs are"
    left_out = [text for each in root.iter("p") if (text := "".join(each.itertext())).startswith("Not drawn")]
    assert left_out == ["Not drawn, as they count no operations: thinker.embed T=1."]


def test_bars_of_the_cold_start_follow_each_other_to_the_sum(root: Element) -> None:
    svg = charts(root)["Phases of the cold start"]
    assert [each.text for each in of_class(svg, "label")] == ["seconds since the process was created"]
    bars = of_class(svg, "bar")
    assert [(figure(each, "data-from"), figure(each, "data-to")) for each in bars] == [
        (0.0, 0.25),
        (0.25, 4.75),
        (4.75, 4.75),
        (4.75, 6.75),
    ]
    ticks = [
        (figure(each, "data-x-tick"), figure(each, "x"))
        for each in svg.iter("text")
        if each.get("data-x-tick")
    ]
    (low, start), (high, end) = ticks[0], ticks[-1]
    assert low == 0 and high >= 6.75
    for bar in bars:
        first, width = figure(bar, "data-from"), figure(bar, "data-to") - figure(bar, "data-from")
        assert figure(bar, "x") == pytest.approx(start + first / high * (end - start), abs=0.05)
        assert figure(bar, "width") == pytest.approx(max(1.0, width / high * (end - start)), abs=0.05)
    rows = rows_of(root)
    assert ["import", "4.5", "4.75"] in rows and ["sum", "6.75", "6.75"] in rows
    assert ["chat, 2 tokens", "272", "94.2"] in rows


def test_tables_have_every_figure_with_its_unit(root: Element) -> None:
    rows = rows_of(root)
    for row in DOCUMENT["engines"]:
        median = number(row["latency"]["median_ms"])
        named = [each for each in rows if len(each) == 12 and each[0].startswith(row["engine"])]
        (cells,) = (each for each in named if each[2] == median)
        assert cells[1] == "aoti" and cells[9] == "7" and cells[10] == "no"
        assert cells[3:6] == [number(row["latency"][name]) for name in ("p95_ms", "p99_ms", "min_ms")]
    for bound in DOCUMENT["roofline_bounds"]:
        (cells,) = (each for each in rows if len(each) == 10 and each[0] == bound["engine"])
        assert cells[1] == number(bound["flops"] / 1e9) and cells[9] == number(100 * bound["roofline"])
        assert cells[2] == number((bound["weight_bytes"] + 1000) / 1e6)
        assert cells[5] == number(1e3 * bound["achieved_tb_s"]) and cells[6] in ("50", "12.5")
    assert ["talker.step B=8 +256", "2", "3.4", "70"] in rows, "the regression, in per cent"
    assert ["talker.step B=1 +256", "aoti", "1.02", "onnx", "2.05", "2"] in rows
    assert ["host memory, read", "268", "32.2", "8.33", ""] in rows
    assert ["host to GPU, pinned", "", "", "", "not run: no CUDA device"] in rows
    assert ["256", "9", "3", "3", "1.00e-07"] in rows
    heads = {cell for row in rows for cell in row}
    assert heads >= {
        "median, ms",
        "GB/s",
        "GFLOP/s",
        "of the roof, %",
        "slower by, %",
        "until, s",
        "baseline, ms",
    }
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["artifact"] == ESCAPED and facts["artifact sha256"] == "ab" * 32
    assert facts["command"] == f"mingc probe {ESCAPED}"
    assert facts["memory, read"] == "12.5 GB/s" and facts["memory, copy"] == "9 GB/s"
    assert facts["matmul, float32"] == "120 GFLOP/s" and facts["GPUs"] == "NVIDIA H200, 141 GiB"
    assert (
        facts["versions"] == "mingc 0.1.0, Python 3.11.7, torch 2.13.0, ONNX Runtime 1.32.0, driver 580.65.06"
    )
    texts = ["".join(each.itertext()) for each in (*root.iter("p"), *root.iter("li"))]
    assert "1 engine(s) are slower by more than 10 %." in texts
    assert "Not in the baseline: new.engine" in texts and "Only in it: gone.engine" in texts
    assert "a note" in texts and any(text.startswith("fault of the roof") for text in texts)


def test_the_page_asks_for_nothing_and_runs_nothing(root: Element) -> None:
    tags = {each.tag for each in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use", "a"}
    text = page(REPORT)
    assert not re.search(r"https?://|url\(|@import|\son\w+=", text)
    assert "default-src 'none'" in text and "<script" not in text
    assert "\x00" not in text and "\x1b" not in text
    text.encode("utf-8")


def check_box(svg: Element) -> None:
    """Every coordinate lies in the view box; texts by an estimate of 7 a letter."""
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for each in svg.iter():
        xs = [figure(each, name) for name in ("x", "x1", "x2", "cx") if name in each.attrib]
        ys = [figure(each, name) for name in ("y", "y1", "y2", "cy") if name in each.attrib]
        for pair in each.get("points", "").split():
            xs.append(float(pair.split(",")[0]))
            ys.append(float(pair.split(",")[1]))
        if each.tag == "rect":
            xs.append(xs[0] + figure(each, "width"))
            ys.append(ys[0] + figure(each, "height"))
        if each.tag == "text" and "transform" not in each.attrib:
            length = 7 * len(str(each.text))
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[each.attrib["text-anchor"]]
            xs += [xs[0] - shift * length, xs[0] + (1 - shift) * length]
        assert all(0 <= x <= width for x in xs) and all(0 <= y <= height for y in ys), ElementTree.tostring(
            each
        )


def test_nothing_is_drawn_outside_a_chart(root: Element) -> None:
    found = charts(root)
    assert len(found) == 2 + 6
    for svg in found.values():
        check_box(svg)


def test_figures_of_any_size_are_drawn_inside(root: Element) -> None:
    """A single engine, times from nanoseconds to minutes, and more series than colours."""
    many = tuple(
        engine(f"stage.graph_with_a_long_name_{index}", 3.7e-6 * 9**index, B=1 + 37 * index)
        for index in range(12)
    )
    for engines in (many[:1], many, many[-1:]):
        bounds = tuple(
            roofline_bound(
                each, EngineCost(dims=each.sizes, flops=7, weight_bytes=3, state_bytes=0), 0, RATES
            )
            for each in engines
        )
        start = (StartPhase(phase="all of it " * 20, seconds=1e-3, until_s=1e-3),)
        text = page(
            replace(REPORT, engines=engines, beside_engines=(), roofline_bounds=bounds, cold_start=start)
        )
        found = charts(ElementTree.fromstring(text.partition("\n")[2]))
        assert len(found) == 3
        for svg in found.values():
            check_box(svg)
            assert len(of_class(svg, "point")) in (0, len(engines))


def points(*values: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(Point(x=x, y=y, label="") for x, y in values)


LOGARITHMIC = {
    "lines": lambda series: line_chart("t", "x", "y", series),
    "roofline": lambda series: roofline_chart("t", "x", "y", series, (Roof(name="r", slope=2.0, peak=8.0),)),
}


@pytest.mark.parametrize("chart", LOGARITHMIC)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_has_no_place_on_a_logarithmic_axis_is_left_out_and_counted(chart: str, value: float) -> None:
    good = points((1.0, 2.0), (4.0, 3.0))
    mixed = Series(name="a", points=(*good, *points((value, 1.0), (1.0, value), (value, value))))
    svg = LOGARITHMIC[chart]((mixed, Series(name="b", points=points((2.0, value)))))
    check_box(svg)
    drawn = [(figure(each, "data-x"), figure(each, "data-y")) for each in of_class(svg, "point")]
    assert drawn == [(1.0, 2.0), (4.0, 3.0)]
    assert [each.text for each in of_class(svg, "row")] == [
        "not drawn: 4 without a place on a logarithmic axis"
    ]
    assert not of_class(LOGARITHMIC[chart]((Series(name="a", points=good),)), "row")


@pytest.mark.parametrize("chart", LOGARITHMIC)
def test_a_chart_of_nothing_that_can_be_drawn_says_so(chart: str) -> None:
    svg = LOGARITHMIC[chart]((Series(name="a", points=points((0.0, 0.0))), Series(name="b", points=())))
    check_box(svg)
    assert not of_class(svg, "point")
    assert [each.text for each in of_class(svg, "row")] == [
        "not drawn: 1 without a place on a logarithmic axis"
    ]


def test_a_range_down_to_zero_leaves_its_point() -> None:
    svg = line_chart(
        "t", "x", "y", (Series(name="a", points=(Point(x=1.0, y=2.0, label="", low=0.0, high=3.0),)),)
    )
    check_box(svg)
    assert len(of_class(svg, "point")) == 1 and not of_class(svg, "range")


@pytest.mark.parametrize("slope, peak", [(0.0, 8.0), (2.0, 0.0), (math.nan, 8.0)])
def test_a_roof_without_a_rate_is_not_drawn(slope: float, peak: float) -> None:
    roofs = (Roof(name="none", slope=slope, peak=peak), Roof(name="r", slope=2.0, peak=8.0))
    svg = roofline_chart("t", "x", "y", (Series(name="a", points=points((1.0, 2.0))),), roofs)
    check_box(svg)
    assert [figure(each, "data-slope") for each in of_class(svg, "roof")] == [2.0]
    assert "not drawn: 1 without a place on a logarithmic axis" in [
        each.text for each in of_class(svg, "row")
    ]


def test_parts_that_were_not_measured_are_left_out() -> None:
    small = replace(
        REPORT,
        tolerance=None,
        ready_s=None,
        cold_start=(),
        transfers=(),
        beside_artifact=None,
        patch_embed=(),
        environment=None,
        roofline_bounds=(),
    )
    root = ElementTree.fromstring(page(small).partition("\n")[2])
    assert [each.text for each in root.iter("h2")] == ["Latency of engines", "Roofline", "Notes"]
    assert "The export counted no cost of these engines." in [each.text for each in root.iter("p")]
    calm = ElementTree.fromstring(page(replace(REPORT, regressions=())).partition("\n")[2])
    assert "No engine is slower by more than 10 %." in [each.text for each in calm.iter("p")]


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.25, "0.25"),
        (1.0234, "1.02"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (268.435456, "268"),
        (0.000123, "0.000123"),
        (3.7e-6, "3.70e-06"),
        (2.5e7, "2.50e+07"),
        (200, "200"),
        (10, "10"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


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
    check_html_path(tmp_path / "probe.html")
    for path in (tmp_path, tmp_path / "none" / "probe.html"):
        with pytest.raises(ConfigError) as caught:
            check_html_path(path)
        assert caught.value.where == "--html" and str(path) in caught.value.message


# Of every text, point and bar: whether it lies inside its chart, as the browser lays it out. Overlaps of labels.
MEASURE = """<script>
const outside = [], overlaps = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  const texts = [];
  for (const each of svg.querySelectorAll("text, circle, rect, polyline, line")) {
    const own = each.getBoundingClientRect();
    if (own.left < box.left - 0.5 || own.right > box.right + 0.5
        || own.top < box.top - 0.5 || own.bottom > box.bottom + 0.5)
      outside.push(each.outerHTML);
    if (each.tagName === "text") texts.push([own, each.textContent]);
  }
  texts.forEach(([a, first], i) => texts.slice(i + 1).forEach(([b, second]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
      overlaps.push(first + " | " + second);
  }));
}
document.title = JSON.stringify({charts: document.querySelectorAll("svg").length, outside, overlaps,
  points: document.querySelectorAll("circle.point").length, width: document.documentElement.scrollWidth});
</script>"""


def browse(path: Path, folder: Path) -> tuple[str, str]:
    """The document as headless Chromium has it after loading, and what it logged."""
    assert BROWSER is not None
    words = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        # A new profile would ask for updates and a default search engine first, which takes time and a network.
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-quic",
        "--disable-sync",
        "--window-size=1200,900",
        "--enable-logging=stderr",
    )
    done = subprocess.run(
        [BROWSER, *words, f"--user-data-dir={folder}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on PATH; the tests above read the page by an XML parser"
)
def test_a_browser_shows_the_page_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "probe.html"
    write_html(REPORT, path)
    _, log = browse(path, tmp_path / "profile")
    assert "CONSOLE" not in log, log
    text = path.read_text(encoding="utf-8")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*></meta>', text)
    assert policy is not None
    path.write_text(text.replace(policy[0], "").replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    shown, _ = browse(path, tmp_path / "profile")
    title = re.search(r"<title>(\{.*?\})</title>", shown)
    assert title is not None, shown[:500]
    found = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert found["charts"] == 8 and found["outside"] == [] and found["overlaps"] == []
    assert found["points"] == len(ENGINES) + 2 + len(ENGINES) - 1 and found["width"] <= 1200
