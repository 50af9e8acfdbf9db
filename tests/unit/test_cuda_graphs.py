"""Inputs of engines on the CPU: copied into static tensors of their declared dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mingc.runtime.engines.cuda_graphs import GraphRunner, Shapes, StagingBuffer

CPU = torch.device("cpu")
SHAPES: Shapes = {"flags": (torch.bool, (3,)), "ids": (torch.int64, (2,)), "x": (torch.bfloat16, (2, 2))}


def test_inputs_are_converted_to_their_dtypes_and_later_changes_do_not_reach_them() -> None:
    def run(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors[name].clone() for name in SHAPES)

    runner = GraphRunner(SHAPES, run, device=CPU, pool=None, name="a test")
    values = {
        "flags": torch.tensor([1, 0, 1]),
        "ids": torch.tensor([5, -6], dtype=torch.int32),
        "x": torch.eye(2),
    }
    for given in (values, {name: 1 - value for name, value in values.items()}):
        found = dict(zip(SHAPES, runner(given), strict=True))
        for name, (dtype, _) in SHAPES.items():
            assert torch.equal(found[name], given[name].to(dtype)) and found[name].dtype == dtype


def test_written_values_are_copies_at_the_same_addresses() -> None:
    staged = StagingBuffer(SHAPES, CPU)
    before = {name: tensor.data_ptr() for name, tensor in staged.tensors.items()}
    value = torch.ones(2, 2, dtype=torch.bfloat16)
    staged.write({"x": value})
    value.zero_()
    assert staged.tensors["x"].tolist() == [[1, 1], [1, 1]] and not staged.tensors["ids"].any()
    assert {name: tensor.data_ptr() for name, tensor in staged.tensors.items()} == before
    assert all((address - min(before.values())) % 64 == 0 for address in before.values())
