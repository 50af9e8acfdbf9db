"""The dashboard of deploy/grafana fits Grafana's own types, and asks for metrics and labels that a server has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from mingc.server.metrics import describe_metrics

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "mingc.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# What Grafana puts in the place of its variables, and the label that Prometheus adds.
VARIABLES = {"$__rate_interval": "1m", "$instance": ".+"}
INSTANCE = "instance"


def series() -> dict[str, set[str]]:
    """Labels of each time series by its name, from the list of metrics."""
    found: dict[str, set[str]] = {}
    for info in describe_metrics():
        labels = {*info.labels, INSTANCE}
        if info.type == "histogram":
            found |= {f"{info.name}_bucket": {*labels, "le"}}
            found |= {f"{info.name}_{part}": labels for part in ("sum", "count")}
        else:
            found[info.name] = labels
    return found


def test_grafana_reads_every_field() -> None:
    """Its types leave out fields that they do not know."""
    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    def check(written: Any, read: Any, path: str) -> None:
        if isinstance(written, dict):
            assert written.keys() <= read.keys(), path
            for name, value in written.items():
                check(value, read[name], f"{path}.{name}")
        elif isinstance(written, list):
            assert len(written) == len(read), path
            for index, (one, other) in enumerate(zip(written, read, strict=True)):
                check(one, other, f"{path}[{index}]")
        else:
            assert written == read, path

    check(DASHBOARD, read, "dashboard")
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_a_server_has(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        text = target["expr"]
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        assert "$" not in text
        names: set[str] = set()
        labels: set[str] = set()

        def visit(node: Any, names: set[str] = names, labels: set[str] = labels) -> None:
            if isinstance(node, promql_parser.VectorSelector):
                names.add(node.name)
                labels |= {each.name for each in node.matchers.matchers}
            elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                labels |= set(node.modifier.labels)

        promql_parser.walk(promql_parser.parse(text), visit)
        known = series()
        assert names and names <= known.keys()
        assert all(labels <= known[name] for name in names)
        if "format" not in target:  # a table shows all labels
            shown = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            assert shown <= labels


def test_sessions_are_shown() -> None:
    asked = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    names = [info.name for info in describe_metrics() if "realtime" in info.name]
    assert names and all(name in asked for name in names)
