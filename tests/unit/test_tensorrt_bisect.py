"""The search for the smallest failing program, with a failure that only two operators together cause."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import tensorrt_bisect as script
import torch
from torch import Tensor, fx, nn


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.linear(x).split(2, -1)
        bad = (first.relu() + second).sin().neg().exp() * y
        return (bad.tanh() + first).softmax(-1)


def linear(module: fx.GraphModule, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.linear.weight, module.linear.bias)


def test_the_smallest_part_that_fails_is_found_with_the_inputs_that_torch_computed() -> None:
    given = (torch.randn(3, 4), torch.randn(3, 2))
    module = torch.export.export(Chain(), given, strict=False).module()
    trials = []

    def fails(parts: Sequence[script.Part]) -> list[str | None]:
        found: list[str | None] = []
        for part, inputs in parts:
            targets = [str(each.target) for each in script.operators_of(part)]
            trials.append(len(targets))
            with torch.no_grad():
                part(*inputs)
            found.append("wrong" if {"aten.sin.default", "aten.exp.default"} <= {*targets} else None)
        return found

    kept: list[int] = []
    found = script.smallest(
        module, given, fails, keep=lambda part, *_: kept.append(len(script.operators_of(part)))
    )
    assert found is not None
    part, inputs, reason = found
    assert kept == sorted({*kept}, reverse=True) and kept[-1] == 3 < kept[0], "each is smaller"
    text = script.describe(part, inputs, reason)
    assert text["operators"] == ["aten.sin.default", "aten.neg.default", "aten.exp.default"]
    assert text["inputs"] == ["float32 [3, 2]"] and text["reason"] == "wrong"
    with torch.no_grad():
        first, second = linear(module, given[0]).split(2, -1)
        torch.testing.assert_close(part(*inputs)[0], (first.relu() + second).sin().neg().exp())
    assert len(trials) < 12, "the search halves"
    assert script.smallest(module, given, lambda parts: [None for _ in parts]) is None
    assert script.alone(module, given, fails) == [], "neither of both fails alone"
    trials.clear()
    again = script.smallest(module, given, fails, ways=3)
    assert again is not None and script.describe(*again)["operators"] == text["operators"]


def test_a_value_that_is_no_tensor_is_computed_in_the_part() -> None:
    given = (torch.randn(3, 4), torch.randn(3, 2))
    module = torch.export.export(Chain(), given, strict=False).module()
    values = script.record(module, given)
    names = [str(each.target) for each in script.operators_of(module)]
    last = names.index("aten.relu.default")
    part, inputs, count = script.cut(module, values, last, 1)
    with torch.no_grad():
        torch.testing.assert_close(part(*inputs)[0], linear(module, given[0])[:, :2].relu())
    assert count == 1 and len(inputs) == 1


def test_a_failure_counts_only_in_a_fresh_process(tmp_path: Path) -> None:
    """A program that only fails in a process that has run another is right."""
    code = (
        "import json, os, pathlib, sys; folder = pathlib.Path(sys.argv[1])\n"
        "for count, _ in enumerate(sys.stdin):\n"
        "    kind = (folder / 'kind').read_text()\n"
        "    if kind == 'crash' or (kind == 'late' and count): os.abort()\n"
        "    print(json.dumps({'is_right': kind != 'wrong' and (kind != 'stale' or not count)}), flush=True)\n"
    )
    worker = script.Worker(tmp_path / "worker", [sys.executable, "-c", code], 60.0)

    def ask(kind: str) -> bool:
        (worker.folder / "kind").write_text(kind)
        return bool(worker.ask()["is_right"])

    try:
        assert ask("right") and ask("late") and ask("right") and ask("stale")
        assert not ask("wrong") and not ask("crash") and ask("late")
        (worker.folder / "kind").write_text("crash")
        assert worker.ask()["reason"].startswith("ended with -6 within 60 s")
    finally:
        worker.stop()
