"""The report of a probe as one HTML file, by a template of its own for the shared style and script."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from mingc.console.report_page import fill, write_text
from mingc.probe.report import ProbeReport


def write_html(report: ProbeReport, path: Path) -> None:
    """Write the page of `report` to `path`, atomically."""
    write_text(page(report), path)


def page(report: ProbeReport) -> str:
    """Write the HTML document."""
    template = resources.files("mingc.probe").joinpath("report.html").read_text(encoding="utf-8")
    return fill(template, report)
