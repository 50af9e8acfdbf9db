"""Programs as TensorRT takes them: writes of rows, attention, padding and sums, against torch's own operations.

Networks are built by torch-tensorrt and TensorRT for RTX, which need no GPU; such tests are skipped where they are not
installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checks import needs_torch_tensorrt
from torch import Tensor, nn

from mingc.export.compile import tensorrt_builder
from mingc.export.compile.backends.tensorrt import BACKEND
from mingc.export.compile.tensorrt_builder import add_in_float32, attend, pad, write_rows
from mingc.host import tensorrt_library


def test_writes_of_rows_become_writes_of_a_matrix() -> None:
    """Against torch's own `index_put`: several indices, of several dims, negative ones, values that are broadcast."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 5, 2, 4, generator=generator)
    slots, places = torch.tensor([[2], [0]]), torch.tensor([[4, -1 - 2, 0], [1, 3, -1]])
    for indices, shape in (
        ((slots, places), (2, 3, 2, 4)),
        ((slots, places), (1, 1, 2, 4)),
        ((slots.flatten(),), (2, 5, 2, 4)),
        ((slots.flatten(),), (4,)),
    ):
        values = torch.randn(shape, generator=generator)
        torch.testing.assert_close(write_rows(x, indices, values), x.index_put(indices, values))
    for kept in (
        (x, (None, places[0]), x[:, :3]),
        (x, (slots[:, 0],), x[:2], True),
        (x[0, 0], (slots[:, 0],), x[0, 0]),
        (x[0], (x[0, :, 0, 0] > 0,), x[0, 0]),
    ):
        assert write_rows(*kept) is NotImplemented


@pytest.mark.parametrize("words", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32], ids=str)
def test_attention_becomes_products_and_a_softmax(words: dict[str, Any], masked: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 3, rows, 8, generator=generator) for rows in (5, 7, 7))
    mask = None if masked is None else torch.randn(5, 7, generator=generator)
    if mask is not None:
        words = {"scale": words.get("scale")}  # torch takes one of mask and is_causal
        mask = (mask > 0) | torch.eye(5, 7, dtype=torch.bool) if masked == torch.bool else mask
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask, **words)
    torch.testing.assert_close(attend(q, k, v, mask, **words), expected)


def test_attention_is_given_to_the_layer_in_the_form_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch also takes a mask that all queries share, or in float32; other attentions keep torch-tensorrt's way."""
    seen: list[Tensor] = []
    monkeypatch.setattr(tensorrt_builder, "attention", lambda *words: seen.append(words[3]))
    q = torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)
    for mask in (torch.zeros(2, 1, 1, 5), torch.zeros(1, 5, dtype=torch.bool)):
        attend(q, q, q, mask)
    assert [(each.shape, each.dtype) for each in seen] == [
        ((2, 1, 5, 5), torch.bfloat16),
        ((1, 1, 5, 5), torch.bool),
    ]
    assert attend(q, q, q, enable_gqa=True) is NotImplemented
    assert attend(q[0], q[0], q[0]) is NotImplemented


@pytest.mark.parametrize("sizes", [(0, 0, 1, 2), (2, 1), (0, -1, 3, 0), (-1, 2, 0, 0, 1, -1)], ids=str)
def test_padding_becomes_a_concatenation(sizes: tuple[int, ...]) -> None:
    x = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    expected = nn.functional.pad(x, sizes, value=0.5)
    padded = pad(x, sizes, 0.5)
    assert padded.dtype == x.dtype and torch.equal(padded, expected)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        middle = x + self.down(torch.relu(self.up(x)))
        inner = torch.add(self.up(middle), self.up(y), alpha=2)
        return middle, self.down(inner) + y * 2 + (x + y)


def test_a_sum_with_a_linear_layer_is_computed_in_float32() -> None:
    """Rounded once: in bfloat16 a sum of two values has the rounding of the exact sum."""
    torch.manual_seed(7)
    module, given = Residual().bfloat16(), tuple(torch.randn(2, 5, 8).bfloat16())
    with torch.no_grad():
        expected = module(*given)
        program = torch.export.export(module, given, strict=False)
        add_in_float32(program)
        program.validate()
        got = program.module()(*given)
    for value, reference in zip(got, expected, strict=True):
        assert value.dtype == torch.bfloat16 and torch.equal(value, reference)
    sums = program.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert [each.meta["val"].dtype for each in sums] == [*[torch.float32] * 3, *[torch.bfloat16] * 2]
    exact = torch.export.export(Residual(), tuple(each.float() for each in given), strict=False)
    before = len(exact.graph.nodes)
    add_in_float32(exact)
    assert len(exact.graph.nodes) == before, "float32 stays as it is"


class Selecting(nn.Module):
    def forward(self, keep: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(keep, x, -torch.inf), torch.where(keep, y, 0)


@needs_torch_tensorrt
def test_sums_with_a_linear_layer_are_float32_in_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreters: list[Any] = []
    convert = tensorrt_builder._convert

    def converted(*words: Any) -> Any:
        interpreters.append(convert(*words))
        return interpreters[0]

    monkeypatch.setattr(tensorrt_builder, "_convert", converted)
    module, given = Residual().bfloat16(), tuple(torch.randn(2, 5, 8).bfloat16())
    with torch.no_grad():
        program = torch.export.export(module, given, strict=False)
    BACKEND.compile(program, tmp_path / "x.trt", device="rtx:sm89", cache=None, where="test.graph")
    trt, network = tensorrt_library.import_library("tensorrt_rtx"), interpreters[0].ctx.net
    found = []
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type == trt.LayerType.ELEMENTWISE:
            layer.__class__ = trt.IElementWiseLayer
            if layer.op == trt.ElementWiseOperation.SUM:
                found.append(layer.get_output(0).dtype)
    assert found.count(trt.DataType.FLOAT) == 3, "the others add biases, or no linear layer's output"


@needs_torch_tensorrt
def test_values_are_selected_in_their_own_dtype(tmp_path: Path) -> None:
    """torch-tensorrt 2.11 casts both operands to int32; a value of another dtype than torch's is refused."""
    given = (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4).long())
    program = torch.export.export(Selecting(), given, strict=False)
    BACKEND.compile(program, tmp_path / "x.trt", device="rtx:sm89", cache=None, where="test.graph")
