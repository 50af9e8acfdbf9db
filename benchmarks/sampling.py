"""Time of sampling one token of each request at the released vocabulary: greedy, without a sort, and with one.

One CUDA graph runs the head of the thinker, whose weights flush the caches, and then the sampling; a figure is its time
minus the time of the head alone. With `--steps` the share of a whole decode step is computed from the greedy steps of
that result. Whole sampled steps are timed by `thinker.py`. Takes half a minute on a GPU.

    python benchmarks/sampling.py --steps benchmarks/results/thinker-….json --json benchmarks/results/sampling-….json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arguments
import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.sample_tokens import NUM_COLUMNS, NUM_RULES, sample_greedy, sample_tokens, sort_and_sample

VOCAB, HIDDEN = 157_184, 4096
GOAL = 1.05  # of a greedy step
# temperature, top_k, top_p, min_p, repetition penalty
RULES = {
    "penalty alone": (0.0, 0.0, 1.0, 0.0, 1.1),
    "temperature": (1.0, 0.0, 1.0, 0.0, 1.0),
    "top_k": (1.0, 50.0, 1.0, 0.0, 1.0),
    "top_p": (1.0, 0.0, 0.9, 0.0, 1.0),
    "min_p": (1.0, 0.0, 1.0, 0.05, 1.0),
    "all": (0.7, 50.0, 0.95, 0.02, 1.05),
}
Figure = dict[str, Any]


class Step:
    """Head and sampling of `batch` requests; `scale` of the hidden states is that of the logits, in bfloat16 values."""

    def __init__(self, weight: Tensor, batch: int, rules: tuple[float, ...], scale: float) -> None:
        generator = torch.Generator("cuda").manual_seed(batch)
        self._weight = weight
        self._hidden = scale * torch.randn(batch, HIDDEN, generator=generator, device="cuda").bfloat16()
        self._seen = torch.rand(batch, VOCAB, generator=generator, device="cuda") < 0.01
        self._sampling = torch.zeros(batch, NUM_COLUMNS, device="cuda")
        self._sampling[:, : NUM_RULES - 1] = torch.tensor(rules, device="cuda")
        self._sampling[:, NUM_RULES - 1] = torch.rand(batch, generator=generator, device="cuda")

    def head(self) -> Tensor:
        return F.linear(self._hidden, self._weight).float()

    def greedy(self) -> Tensor:
        return sample_greedy(self.head())

    def sampled(self) -> Tensor:
        return sample_tokens(self.head(), self._sampling, self._seen)

    def sorted(self) -> Tensor:
        return sort_and_sample(self.head(), self._sampling, self._seen)

    def same_tokens(self) -> int:
        """Rows in which the kernel and the sort sample the same token."""
        return int((self.sampled() == self.sorted()).sum())


def times_ms(runs: dict[str, Callable[[], Tensor]], count: int) -> dict[str, list[float]]:
    """Milliseconds of each run as a CUDA graph, measured in turns."""
    graphs = {name: harness.capture(run) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(4):
        for name, graph in graphs.items():
            samples[name] += harness.time_ms(graph.replay, count // 4, warmups=2)
    for graph in graphs.values():
        graph.reset()
    return samples


def measure(step: Step, count: int) -> Figure:
    """Microseconds after the head, of every way to sample."""
    runs = {"head": step.head, "greedy": step.greedy, "sampled": step.sampled, "sort": step.sorted}
    samples = times_ms(runs, count)
    head = statistics.median(samples.pop("head"))
    found = {name: harness.summary([1e3 * (each - head) for each in ms]) for name, ms in samples.items()}
    return {
        "name": "sampling_us",
        **found["sampled"],
        "unit": "us",
        "greedy": found["greedy"],
        "head_us": round(1e3 * head, 1),
        "reference": {"name": "sort", **found["sort"]},
        "same_tokens": step.same_tokens(),
    }


def greedy_steps(path: Path | None) -> dict[int, float]:
    """Milliseconds of a decode step by batch, from a result of `thinker.py` with its shortest prompts."""
    if path is None:
        return {}
    steps: dict[int, float] = {}
    for figure in json.loads(path.read_text(encoding="utf-8"))["figures"]:
        if figure["name"] == "decode_step_ms":
            batch, median = figure["batch"], float(figure["median"])
            steps[batch] = min(median, steps.get(batch, median))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches", type=arguments.wholes(1, 256), default=(1, 16, 32), help="rows to sample"
    )
    parser.add_argument("--steps", type=Path, help="result of thinker.py, whose greedy steps the share is of")
    parser.add_argument("--count", type=arguments.whole(4), default=40, help="timed runs of each")
    parser.add_argument("--profile", action="store_true", help="kernel table of the rules named all")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = harness.parse_args(parser)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    steps = greedy_steps(given.steps)
    rates = harness.peak_rates()
    figures: list[Figure] = []
    kernels = {}
    with torch.inference_mode():
        weight = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(0, HIDDEN**-0.5)
        for batch in given.batches:
            rows = [(name, 3.0) for name in RULES] + [("all", 0.0)]  # the last one: equal logits
            for name, scale in rows:
                step = Step(weight, batch, RULES[name], scale)
                figure = {**measure(step, given.count), "batch": batch, "rules": name, "logits_scale": scale}
                if batch in steps:
                    more = (figure["median"] - figure["greedy"]["median"]) / 1e3
                    ratio = 1 + more / steps[batch]
                    figure["of_greedy_step"] = {
                        "step_ms": steps[batch],
                        "ratio": round(ratio, 4),
                        "goal": GOAL,
                    }
                figures.append(figure)
                print(figure, flush=True)
            if given.profile:
                kernels[f"batch {batch}"] = harness.kernel_table(
                    Step(weight, batch, RULES["all"], 3.0).sampled
                )
                print(*kernels[f"batch {batch}"], sep="\n", flush=True)
    if given.json:
        more = {"steps": given.steps.name if given.steps else None, "kernels": kernels}
        harness.write(given.json, harness.result("sampling", rates, figures, **more))


if __name__ == "__main__":
    main()
