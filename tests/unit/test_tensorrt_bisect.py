"""The search for the smallest failing program, with a failure that only two operators together cause."""

from __future__ import annotations

from collections.abc import Sequence

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

    found = script.smallest(module, given, fails)
    assert found is not None
    part, inputs, reason = found
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
