"""The report of a benchmark: charts and tables of every path and load, verdicts, traps and scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mingc.bench.baseline import VERDICTS, Comparison
from mingc.bench.figures import (
    CONTINUITY,
    FIRST_AUDIO,
    FIRST_TOKEN,
    SUCCESS,
    UNDERRUNS,
    WALL,
    Figure,
    estimates,
    measures,
)
from mingc.bench.records import PATHS, BenchFile, Load, Run, grouped
from mingc.bench.statistics import Estimate, Quantile
from mingc.console.report_page import Cell, Chart, Point, ReportPage, Section, Table

Figures = Mapping[Figure, Estimate]
_OVERVIEW = ("success", "requests", "tokens", "audio", "first token", "time per output token", "first audio",
             "real-time factor", "underruns per answer", "first unfinished picture", "wall")  # fmt: skip
_SPREAD = (FIRST_TOKEN, FIRST_AUDIO, WALL)
_SPREAD_LINES = 8  # loads in a chart
_SHARES = np.linspace(0, 1, 51)


def report(file: BenchFile, comparison: Comparison | None = None) -> ReportPage:
    """Build the report of `file`."""
    found = estimates(file.runs)
    facts = {
        "command": file.command,
        "date": file.date,
        **{f"server {url}": _words(about) for url, about in file.servers.items()},
        **{f"client: {name}": value for name, value in {**file.hardware, **file.versions}.items()},
        "settings": _words(file.settings),
    }
    sections = [_traps(file)]
    if comparison is not None:
        sections.append(_verdicts(comparison, has_changed=True))
    if found:
        sections.append(_overview(found))
    sections += [_scores(file)] * bool(file.scores)
    for path in dict.fromkeys(path for path, _ in found):
        own = {load: figures for (each, load), figures in found.items() if each == path}
        sections.append(
            _path(
                path, own, {load: runs for (each, load), runs in grouped(file.runs).items() if each == path}
            )
        )
    if comparison is not None and any(change.verdict == "no difference" for change in comparison.changes):
        sections.append(_verdicts(comparison, has_changed=False))
    return ReportPage(title=f"mingc bench {' '.join(file.servers)}", facts=facts, sections=tuple(sections))


def _traps(file: BenchFile) -> Section:
    notes = ["The measurement ended early: loads are missing, or have fewer requests."] * (
        not file.is_complete
    )
    if not file.findings:
        return Section(heading="Traps", notes=(*notes, "No trap was found."))
    rows = tuple((each.trap, each.where, each.message) for each in file.findings)
    table = Table(
        caption="What makes figures wrong, or might", columns=("trap", "where", "what was seen"), rows=rows
    )
    return Section(heading="Traps", notes=tuple(notes), tables=(table,), is_bad=True)


def _verdicts(comparison: Comparison, *, has_changed: bool) -> Section:
    """Figures that changed, or are not known to; otherwise those without a difference."""
    rows = tuple(
        (f"{change.path} {change.load.label}", change.figure.label, change.verdict, _cell(change.before),
         _cell(change.now), _relative(change.before, change.now))
        for change in comparison.changes
        if (change.verdict != "no difference") == has_changed
    )  # fmt: skip
    tables = (
        Table(caption="", columns=("load", "figure", "verdict", "baseline", "now", "change"), rows=rows),
    )
    if not has_changed:
        return Section(heading="No difference to the baseline", tables=tables)
    counts = {
        verdict: sum(change.verdict == verdict for change in comparison.changes) for verdict in VERDICTS
    }
    return Section(
        heading="Against the baseline",
        notes=(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()), *comparison.notes),
        tables=tables if rows else (),
        is_bad=comparison.is_worse,
    )


def _overview(found: Mapping[tuple[str, Load], Figures]) -> Section:
    """One row a path and load, for whoever publishes them: of times the median and the p95."""
    by_name = {figure.name: figure for figures in found.values() for figure in figures}
    of_names = [
        [by_name[each] for each in (name, f"{name}, median", f"{name}, p95") if each in by_name]
        for name in _OVERVIEW
    ]
    columns = [figures for figures in of_names if figures]
    rows = tuple(
        (path, load.label, *(_overview_cell(figures, column) for column in columns))
        for (path, load), figures in found.items()
    )
    charts = [
        chart
        for figure, *_ in columns
        if figure not in (SUCCESS, UNDERRUNS)
        for chart in _over_loads(
            figure.label,
            {path: (figure, _of(found, path)) for path in dict.fromkeys(path for path, _ in found)},
        )
    ]
    labels = [figure.label.replace("median", "median / p95") for figure, *_ in columns]
    table = Table(caption="Means over repeats", columns=("path", "load", *labels), rows=rows)
    return Section(heading="Overview", charts=tuple(charts), tables=(table,))


def _overview_cell(figures: Figures, column: Sequence[Figure]) -> str:
    return " / ".join(_number(figures[each].mean) for each in column if each in figures)


def _of(found: Mapping[tuple[str, Load], Figures], path: str) -> Mapping[Load, Figures]:
    return {load: figures for (each, load), figures in found.items() if each == path}


def _path(path: str, found: Mapping[Load, Figures], runs: Mapping[Load, Sequence[Run]]) -> Section:
    names = dict.fromkeys(figure for figures in found.values() for figure in figures)
    charts: list[Chart] = []
    for group, members in _groups(names).items():
        is_dull = members[0] in (SUCCESS, CONTINUITY) and all(
            figures[members[0]].mean == 100 for figures in found.values() if members[0] in figures
        )
        if not is_dull:
            lines = {_line(figure) if members[1:] else figure.name: (figure, found) for figure in members}
            unit = f", {members[0].unit}" if members[0].unit else ""
            charts += _over_loads(f"{group}{unit}" if members[1:] else members[0].label, lines)
    charts += [chart for figure in _SPREAD if figure in names for chart in _spread(figure, runs)]
    columns = ("figure", *(load.label for load in found))
    rows: list[tuple[Cell, ...]] = [
        ("requests", *(sum(len(run.samples) for run in runs[load]) for load in found)),
        ("repeats", *(len(runs[load]) for load in found)),
    ]
    rows += [(figure.label, *(_cell(figures.get(figure)) for figures in found.values())) for figure in names]
    table = Table(
        caption="Mean ± standard deviation over repeats (95 % interval of the mean)",
        columns=columns,
        rows=tuple(rows),
    )
    return Section(heading=f"{path}: {PATHS.get(path, path)}", charts=tuple(charts), tables=(table,))


def _groups(figures: Sequence[Figure] | Mapping[Figure, None]) -> Mapping[str, list[Figure]]:
    """Figures that belong into one chart: quantiles of the same times, and stages of the server."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        is_stage = figure.name.startswith("server: ")
        groups.setdefault(
            "stages of the server" if is_stage else figure.name.rpartition(", ")[0] or figure.name, []
        ).append(figure)
    return groups


def _line(figure: Figure) -> str:
    """Name of a figure within its chart."""
    if figure.name.startswith("server: "):
        return figure.name.removeprefix("server: ").partition(",")[0]
    return figure.name.rpartition(", ")[2]


def _over_loads(title: str, lines: Mapping[str, tuple[Figure, Mapping[Load, Figures]]]) -> Iterator[Chart]:
    """Chart figures over the loads of each kind of which there are at least two."""
    loads = dict.fromkeys(load for _, found in lines.values() for load in found)
    for kind, x_label in (("closed", "clients"), ("open", "requests due per second")):
        for burst in dict.fromkeys(load.burst for load in loads if load.kind == kind):
            chosen = [load for load in loads if load.kind == kind and load.burst == burst]
            if len(chosen) < 2:
                continue
            series = {
                name: tuple(
                    _point(load, found[load][figure]) for load in chosen if figure in found.get(load, {})
                )
                for name, (figure, found) in lines.items()
            }
            of_bursts = f", bursts of {burst}" if burst > 1 else ""
            if any(series.values()):
                yield Chart(
                    title=title + of_bursts,
                    x_label=x_label,
                    y_label=next(iter(lines.values()))[0].unit,
                    series=series,
                )


def _point(load: Load, value: Estimate) -> Point:
    x = load.concurrency if load.kind == "closed" else load.rate
    return Point(x=x, y=value.mean, low=value.low, high=value.high, label=f"{load.label}: {_cell(value)}")


def _spread(figure: Figure, runs: Mapping[Load, Sequence[Run]]) -> Iterator[Chart]:
    """Chart which share of the answers had at most a time, all repeats together."""
    series: dict[str, tuple[Point, ...]] = {}
    for load in list(runs)[:_SPREAD_LINES]:
        own = [measure for run in runs[load] for each, measure in measures(run) if each == figure]
        values = np.concatenate([each.values for each in own if isinstance(each, Quantile)] or [np.empty(0)])
        if len(values) > 1:
            series[load.label] = tuple(
                Point(x=float(x), y=float(100 * share))
                for x, share in zip(np.quantile(values, _SHARES), _SHARES, strict=True)
            )
    if series:
        name = figure.name.partition(",")[0]
        yield Chart(
            title=f"{name}: share of answers by then, %", x_label=f"{name}, {figure.unit}", y_label="%", series=series,
            is_log_x=False, has_points=False,
        )  # fmt: skip


def _scores(file: BenchFile) -> Section:
    rows = tuple(
        (name, figure, _number(value))
        for name, scores in file.scores.items()
        for figure, value in scores.items()
    )
    return Section(
        heading="Scores", tables=(Table(caption="", columns=("data set", "figure", "value"), rows=rows),)
    )


def _cell(value: Estimate | None) -> str:
    if value is None:
        return ""
    text = _number(value.mean)
    if value.sd is not None:
        text += f" ± {_number(value.sd)}"
    if value.low is not None and value.high is not None:
        text += f" ({_number(value.low)}–{_number(value.high)})"
    return text


def _relative(before: Estimate, now: Estimate) -> str:
    return f"{100 * (now.mean / before.mean - 1):+.1f} %" if before.mean else ""


def _number(value: float) -> str:
    """Three significant digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{round(value, 9):.3g}"


def _words(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in values.items() if value not in (None, "", (), [], False)
    )
