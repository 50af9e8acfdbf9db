"""Time, memory and size of one `mingc export`; words after `--` are passed to it.

The size of the largest shard is its size in device memory: a synthetic artifact stores one layer of each kind.

    python benchmarks/export.py --json benchmarks/results/export-tp4-….json -- benchmarks/released --synthetic \\
        --stages thinker --tp 4 --target cuda --dtype bfloat16 --jobs 14 --output /tmp/thinker-tp4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness

from mingc.artifacts.artifact import open_artifact
from mingc.runtime.engines.stage_loader import rank_weight_bytes


def figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of the report that `mingc export --json` prints."""
    artifact = open_artifact(Path(report["output"]))
    shard = max(rank_weight_bytes(artifact, name, 0) for name in artifact.manifest.stages)
    graphs = report["graphs"]
    values = {
        "export_s": (report["seconds"], "s"),
        "compile_s": (sum(each["compile_seconds"] for each in graphs), "s of all jobs together"),
        "engines": (sum(each["engines"] for each in graphs), "engines"),
        "engine_bytes": (sum(each["size_bytes"] for each in graphs), "bytes"),
        "artifact_bytes_without_weights": (report["artifact_bytes"] - report["weights_bytes"], "bytes"),
        "largest_shard_bytes": (shard, "bytes"),
        "peak_rss_bytes": (report["peak_rss_bytes"], "bytes of the largest process"),
        "export_peak_rss_ratio": (round(report["peak_rss_bytes"] / shard, 3), "of the largest shard"),
    }
    whole = [{"name": name, "median": value, "unit": unit} for name, (value, unit) in values.items()]
    errors = [
        {"name": "parity_error", "graph": each["graph"], "median": each["error"], "unit": "relative"}
        for each in graphs
    ]
    return whole + errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    parser.add_argument("words", nargs="+", help="of mingc export, behind --")
    arguments = harness.parse_args(parser)
    command = [sys.executable, "-m", "mingc", "export", *arguments.words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    found = figures(json.loads(done.stdout))
    for each in found:
        print(" ".join(f"{key}={value}" for key, value in each.items()))
    if arguments.json:
        harness.write(arguments.json, harness.result("export", harness.peak_rates(), found))


if __name__ == "__main__":
    main()
