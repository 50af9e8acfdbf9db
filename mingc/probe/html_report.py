"""The report of a probe as one HTML file: tables and charts, without scripts or external resources."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from mingc.errors import ConfigError
from mingc.probe.charts import (
    Bar,
    Point,
    Roof,
    Series,
    bar_chart,
    line_chart,
    number,
    printable,
    roofline_chart,
)
from mingc.probe.report import EngineFigures, ProbeReport, RooflineBound

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'"  # a browser loads nothing else, whatever the texts say
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #ffffff; margin: 0 auto; max-width: 1080px;
  padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 34px 0 8px; border-bottom: 1px solid #cccccc; }
h3 { font-size: 16px; margin: 22px 0 4px; } p { margin: 6px 0; max-width: 80ch; } code { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: 6px 0; }
th, td { padding: 3px 10px; border-bottom: 1px solid #e2e2e2; text-align: left; vertical-align: top; }
th { background: #f3f3f3; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tfoot td { font-weight: 600; border-top: 2px solid #888888; } .bad { color: #a11200; font-weight: 600; }
.facts th { background: none; font-weight: 600; white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #1a1a1a; }
svg .label { font-weight: 600; } .grid { stroke: #e6e6e6; } .frame { fill: none; stroke: #888888; }
.line { fill: none; stroke-width: 1.8; } .range { stroke-width: 1.2; opacity: 0.55; } .sample { stroke-width: 1.8; }
.roof { fill: none; stroke: #555555; stroke-width: 1.6; }
"""
_BATCH_DIMS = {
    "B": "requests in a call (B)",
    "N": "clips or rows in a call (N)",
    "T": "new tokens of a request (T)",
}


def check_html_path(path: Path) -> None:
    """Raises: ConfigError when no file can be written at `path`; called before anything is measured."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = (
            "is a folder"
            if path.is_dir()
            else f"cannot be written: {folder} is no folder that this user may write"
        )
        raise ConfigError(
            f"{path} {why}", where="--html", fix="pass the name of a file in a folder that exists"
        )


def write_html(report: ProbeReport, path: Path) -> None:
    """Write the page of `report` to `path`, atomically."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as file:
        try:
            file.write(page(report))
            file.flush()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def page(report: ProbeReport) -> str:
    """The HTML document, which is well-formed XML as well."""
    root = Element("html", {"lang": "en"})
    head, body = SubElement(root, "head"), SubElement(root, "body")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
    _add(head, "title", f"mingc probe: {report.model}")
    SubElement(head, "style").text = _STYLE
    _add(body, "h1", f"mingc probe: {report.model}")
    _summary(body, report)
    _regressions(body, report)
    _cold_start(body, report)
    _latencies(body, report)
    _roofline(body, report)
    _beside(body, report)
    _transfers(body, report)
    _patch_embed(body, report)
    _add(body, "h2", "Notes")
    notes = SubElement(body, "ul")
    for note in report.notes:
        _add(notes, "li", note, {"class": "bad"} if note.startswith("fault of the roof") else {})
    text = tostring(root, encoding="unicode", short_empty_elements=False)
    return f"<!DOCTYPE html>\n{text}\n"


def _summary(body: Element, report: ProbeReport) -> None:
    rates, here = report.peak_rates, report.environment
    facts: dict[str, object] = {
        "artifact": report.artifact,
        "artifact sha256": report.artifact_sha256,
        "command": report.command,
        "dtype": report.dtype,
        "device": rates.device,
        "memory, copy": f"{number(1e3 * rates.copy_tb_s)} GB/s",
        "memory, read": f"{number(1e3 * rates.read_tb_s)} GB/s",
        f"matmul, {rates.matmul_dtype}": f"{number(1e3 * rates.matmul_tflop_s)} GFLOP/s",
    }
    if here is not None:
        facts |= {
            "measured at": here.measured_at,
            "versions": ", ".join(
                f"{name} {value}"
                for name, value in {
                    "mingc": here.mingc,
                    "Python": here.python,
                    "torch": here.torch,
                    "ONNX Runtime": here.onnxruntime,
                    "CUDA": here.cuda,
                    "driver": here.driver,
                    "NCCL": here.nccl,
                }.items()
                if value is not None
            ),
            "system": here.system,
            "CPU": f"{here.cpu}, {here.cores} cores, torch uses {here.torch_threads} thread(s)",
            "memory": f"{number(here.memory_gib)} GiB",
            "GPUs": "; ".join(here.gpus) or "none",
        }
    table = SubElement(SubElement(body, "table", {"class": "facts"}), "tbody")
    for name, value in facts.items():
        row = SubElement(table, "tr")
        _add(row, "th", name)
        _add(row, "td", str(value))


def _regressions(body: Element, report: ProbeReport) -> None:
    if report.tolerance is None:
        return
    _add(body, "h2", "Against the baseline")
    limit = f"{100 * report.tolerance:g} %"
    if not report.regressions:
        _add(body, "p", f"No engine is slower by more than {limit}.")
    else:
        text = f"{len(report.regressions)} engine(s) are slower by more than {limit}."
        _add(body, "p", text, {"class": "bad"})
        _table(
            body,
            ("engine", "baseline, ms", "median, ms", "slower by, %"),
            [
                (each.engine, each.baseline_ms, each.median_ms, 100 * each.slower_by)
                for each in report.regressions
            ],
        )
    for name, titles in (("Not in the baseline", report.only_here), ("Only in it", report.only_in_baseline)):
        if titles:
            _add(body, "p", f"{name}: {', '.join(titles)}")


def _cold_start(body: Element, report: ProbeReport) -> None:
    if report.ready_s is None:
        return
    _add(body, "h2", "Cold start")
    _add(
        body,
        "p",
        f"Ready after {number(report.ready_s)} s: the sum of all phases of mingc serve in a new process.",
    )
    bars = [
        Bar(name=each.phase, start=max(0.0, each.until_s - each.seconds), end=each.until_s)
        for each in report.cold_start
    ]
    body.append(bar_chart("Phases of the cold start", "seconds since the process was created", bars))
    rows = [(each.phase, each.seconds, each.until_s) for each in report.cold_start]
    _table(body, ("phase", "s", "until, s"), rows, ("sum", report.ready_s, report.ready_s))
    if report.first_requests:
        _add(body, "h3", "First requests")
        _table(
            body,
            ("request", "first, ms", "again, ms"),
            [(each.request, each.first_ms, each.second_ms) for each in report.first_requests],
        )


def _latencies(body: Element, report: ProbeReport) -> None:
    _add(body, "h2", "Latency of engines")
    _add(body, "p", "Points are medians; the thin lines reach from the fastest call to the 99th percentile.")
    beside = set(map(id, report.beside_engines))
    engines = [*report.engines, *report.beside_engines]
    for stage in dict.fromkeys(_stage(each) for each in engines):
        _add(body, "h3", stage)
        here = [each for each in engines if _stage(each) == stage]
        for dim, group in _by_dim(here).items():
            label = _BATCH_DIMS.get(dim, f"size {dim}" if dim else "the only size")
            series = _series(
                [each for each in group if id(each) not in beside], dim, "" if not beside else "{}"
            )
            series += _series([each for each in group if id(each) in beside], dim, "{}, beside")
            body.append(line_chart(f"Latency of {stage} against {label}", label, "latency, ms", series))
    rows = []
    for each in engines:
        latency = each.latency
        figures = (latency.median_ms, latency.p95_ms, latency.p99_ms, latency.min_ms)
        rest = (latency.warm_ms, latency.uncaptured_ms, latency.enqueue_ms, latency.repetitions)
        graph = "yes" if latency.is_captured else "no"
        rows.append((each.title, each.backend, *figures, *rest, graph, each.layer_instances))
    head = (
        "engine",
        "backend",
        "median, ms",
        "p95, ms",
        "p99, ms",
        "min, ms",
        "warm, ms",
        "without graph, ms",
    )
    _table(body, (*head, "to queue, ms", "calls", "CUDA graph", "layers"), rows)


def _by_dim(engines: Sequence[EngineFigures]) -> dict[str, list[EngineFigures]]:
    """Engines by the dim on the x axis of their latency chart; `` for those without sizes."""
    groups: dict[str, list[EngineFigures]] = {}
    for each in engines:
        same = [other.sizes for other in engines if other.engine == each.engine]
        varying = [dim for dim in each.sizes if len({sizes.get(dim) for sizes in same}) > 1]
        dims = [*(dim for dim in _BATCH_DIMS if dim in each.sizes), *varying, *each.sizes]
        groups.setdefault(dims[0] if dims else "", []).append(each)
    return groups


def _series(engines: Sequence[EngineFigures], dim: str, backend: str) -> list[Series]:
    """One for each graph and set of other sizes; `backend` is the backend's part of the name, if any."""
    found: dict[str, list[Point]] = {}
    for each in engines:
        others = [f"{name}={size}" for name, size in each.sizes.items() if name != dim]
        context = [f"+{each.context_tokens}"] if each.context_tokens is not None else []
        suffix = [f"({backend.format(each.backend)})"] if backend else []
        name = " ".join([each.engine.partition(".")[2], *others, *context, *suffix])
        latency = each.latency
        label = f"{each.title} {each.backend}: median {number(latency.median_ms)} ms"
        found.setdefault(name, []).append(
            Point(
                x=float(each.sizes.get(dim, 1)),
                y=latency.median_ms,
                label=label,
                low=latency.min_ms,
                high=max(latency.p99_ms, latency.median_ms),
            )
        )
    return [Series(name=name, points=tuple(points)) for name, points in found.items()]


def _roofline(body: Element, report: ProbeReport) -> None:
    _add(body, "h2", "Roofline")
    bounds, rates = report.roofline_bounds, report.peak_rates
    if not bounds:
        _add(body, "p", "The export counted no cost of these engines.")
        return
    _add(
        body,
        "p",
        "Operations and bytes are counted at export, roofs are the fastest calls measured in this run. A figure above "
        "100 % is a fault of its roof.",
    )
    drawn = [each for each in bounds if each.flops > 0]
    if drawn:
        peak = 1e3 * rates.matmul_tflop_s
        roofs = [
            Roof(name=f"memory {number(slope)} GB/s, {number(peak)} GFLOP/s", slope=slope, peak=peak)
            for slope in dict.fromkeys(
                1e3 * each.memory_roof_tb_s for each in sorted(drawn, key=_memory_roof)
            )
        ]
        series = [
            Series(name=stage, points=tuple(map(_roofline_point, group)), is_joined=False)
            for stage, group in groupby(drawn, key=_stage)
        ]
        title = "Roofline: achieved operations against arithmetic intensity"
        body.append(
            roofline_chart(title, "arithmetic intensity, FLOP/byte", "achieved, GFLOP/s", series, roofs)
        )
    left_out = [each.engine for each in bounds if each.flops <= 0]
    if left_out:
        _add(body, "p", f"Not drawn, as they count no operations: {', '.join(left_out)}.")
    rows = [
        (
            each.engine,
            each.flops / 1e9,
            (each.weight_bytes + each.state_bytes + each.io_bytes) / 1e6,
            each.intensity,
            1e3 * each.achieved_tflop_s,
            1e3 * each.achieved_tb_s,
            1e3 * each.memory_roof_tb_s,
            each.memory_bound_ms,
            each.compute_bound_ms,
            100 * each.roofline,
        )
        for each in bounds
    ]
    head = ("engine", "GFLOP", "MB", "FLOP/byte", "GFLOP/s", "GB/s", "roof, GB/s", "memory bound, ms")
    _table(body, (*head, "compute bound, ms", "of the roof, %"), rows)


def _memory_roof(bound: RooflineBound) -> float:
    return bound.memory_roof_tb_s


def _roofline_point(bound: RooflineBound) -> Point:
    label = f"{bound.engine}: {number(100 * bound.roofline)} % of its roof"
    return Point(x=bound.intensity, y=1e3 * bound.achieved_tflop_s, label=label)


def _beside(body: Element, report: ProbeReport) -> None:
    if report.beside_artifact is None:
        return
    _add(body, "h2", "Beside another artifact")
    _add(body, "p", f"{report.beside_artifact}, whose engines were timed in turns with these.")
    head = ("engine", "backend", "median, ms", "other backend", "its median, ms", "other / this")
    _table(
        body,
        head,
        [
            (each.engine, each.backend, each.median_ms, each.other_backend, each.other_median_ms, each.ratio)
            for each in report.beside
        ],
    )


def _transfers(body: Element, report: ProbeReport) -> None:
    if not report.transfers:
        return
    _add(body, "h2", "Memory rates")
    rows = []
    for each in report.transfers:
        why = f"not run: {each.not_run}" if each.not_run else ""
        rows.append((each.transfer, each.num_bytes / 1e6 or None, each.ms, each.gb_s, why))
    _table(body, ("transfer", "MB", "ms", "GB/s", ""), rows)


def _patch_embed(body: Element, report: ProbeReport) -> None:
    if not report.patch_embed:
        return
    _add(body, "h2", "Patch embedding as convolution and as linear layer")
    rows = [
        (each.patches, each.conv3d_ms, each.linear_ms, each.ratio, each.relative_difference)
        for each in report.patch_embed
    ]
    _table(body, ("patches", "conv3d, ms", "linear, ms", "conv3d / linear", "relative difference"), rows)


def _stage(each: EngineFigures | RooflineBound) -> str:
    return each.engine.partition(".")[0]


_Cell = str | int | float | None


def _table(
    body: Element, head: Sequence[str], rows: Iterable[Sequence[_Cell]], last: Sequence[_Cell] = ()
) -> None:
    """A table; columns of numbers are aligned on the right."""
    listed = [*rows]
    numeric = [all(not isinstance(row[index], str) for row in listed) for index in range(len(head))]
    table = SubElement(SubElement(body, "div", {"class": "scroll"}), "table")
    titles = SubElement(SubElement(table, "thead"), "tr")
    for name, is_number in zip(head, numeric, strict=True):
        _add(titles, "th", name, {"class": "number"} if is_number else {})
    for kind, lines in (("tbody", listed), ("tfoot", [last] if last else [])):
        part = SubElement(table, kind) if lines else None
        for line in lines:
            row = SubElement(part, "tr") if part is not None else None
            assert row is not None
            for value, is_number in zip(line, numeric, strict=True):
                text = "" if value is None else value if isinstance(value, str) else number(value)
                _add(row, "td", text, {"class": "number"} if is_number else {})


def _add(parent: Element, tag: str, text: str, attributes: Mapping[str, str] | None = None) -> Element:
    element = SubElement(parent, tag, dict(attributes or {}))
    element.text = printable(text)
    return element
