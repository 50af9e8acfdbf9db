#!/usr/bin/env python
"""Draw docs/images/talker.svg: speech made per second by mingc and by plain torch in the same runs.

Reads result files of `benchmarks/talker.py`; of files that measure the same batch the last one counts. Needs
matplotlib (the dev extra). `chart_points` is what tests compare with the committed picture and with the documents.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = ("talker-h200-2026-11-22.json",)
PICTURE = ROOT / "docs" / "images" / "talker.svg"
BATCHES = (1, 16, 32)
PATCH_S = 0.32


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartPoint:
    """Milliseconds of one patch at one batch size: median of mingc and of both baselines of the same run."""

    batch: int
    mingc_ms: float
    torch_graph_ms: float
    torch_eager_ms: float

    def audio_s_per_s(self, patch_ms: float) -> float:
        """Seconds of speech that all requests of the batch get in one second."""
        return self.batch * PATCH_S * 1000 / patch_ms


def chart_points(files: tuple[str, ...] = FILES) -> list[ChartPoint]:
    """One point a batch size of BATCHES."""
    points: dict[int, ChartPoint] = {}
    for name in files:
        for figure in json.loads((RESULTS / name).read_text(encoding="utf-8"))["figures"]:
            if figure["name"] == "patch_step_ms" and "reference_graph" in figure:
                points[figure["batch"]] = ChartPoint(
                    batch=figure["batch"],
                    mingc_ms=figure["median"],
                    torch_graph_ms=figure["reference_graph"]["median"],
                    torch_eager_ms=figure["reference"]["median"],
                )
    return [points[batch] for batch in BATCHES]


def bars(points: list[ChartPoint]) -> dict[str, list[float]]:
    """Heights of the bars, audio seconds per second, by series."""
    return {
        "mingc": [point.audio_s_per_s(point.mingc_ms) for point in points],
        "plain torch in a CUDA graph": [point.audio_s_per_s(point.torch_graph_ms) for point in points],
        "eager torch": [point.audio_s_per_s(point.torch_eager_ms) for point in points],
    }


def draw(points: list[ChartPoint], path: Path) -> None:
    """Write the picture. Text stays text and no date is stored, so that the same figures give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mingc", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    width = 0.27
    colors = ("#1f6f8b", "#9fb4bf", "#d6dde1")
    for index, (name, heights) in enumerate(bars(points).items()):
        places = [place + (index - 1) * width for place in range(len(points))]
        drawn = axes.bar(places, heights, width, label=name, color=colors[index])
        axes.bar_label(drawn, labels=[f"{height:.0f}" for height in heights], padding=2, fontsize=9)
    axes.set_xticks(range(len(points)), [f"batch {point.batch}" for point in points])
    axes.set_ylabel("audio seconds per second")
    axes.set_title("Speech stages, one H200, bfloat16", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the chart of the README from result files.")
    parser.add_argument("--output", type=Path, default=PICTURE, help="SVG file to write.")
    draw(chart_points(), parser.parse_args().output)
