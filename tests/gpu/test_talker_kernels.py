"""Triton kernels of the talker against their torch references, in bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mingc.kernels import linear
from mingc.kernels.chunk_layout import SLOT_CHUNK_ALIGNMENT
from mingc.kernels.contiguous_kv_attention import contiguous_kv_attention
from mingc.kernels.contiguous_kv_prefill_attention import contiguous_kv_prefill_attention
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.quantized import quantize_fp8
from mingc.kernels.sliding_window_attention import sliding_window_attention
from mingc.kernels.small_sequence_attention import small_sequence_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1.5e-2  # rounding error of bfloat16, relative to the largest value


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    values = torch.rand(*shape, device="cuda") * 6
    return values.cos(), values.sin()


def check(value: Tensor, expected: Tensor) -> None:
    error = (value.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < TOLERANCE


def test_small_sequence_attention() -> None:
    qkv, tables = normal(6, 37, 3 * 16 * 64), angles(37, 32)
    with plain_torch():
        expected = small_sequence_attention(qkv, *tables)
    check(small_sequence_attention(qkv, *tables), expected)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [([1, 4, 2], [0, 130, 599]), ([4], [0]), ([1], [130]), ([3], [256]), ([2, 4], [599, 7])],
)
def test_contiguous_kv_attention(slots: list[int], lengths: list[int], window: int | None) -> None:
    """One or two requests run a separate kernel."""
    qkv, tables = normal(len(slots), 18 * 64), angles(len(slots), 32)
    ours, theirs = ([normal(5, 600, 2, 64) for _ in range(2)] for _ in range(2))
    for own, other in zip(ours, theirs, strict=True):
        other.copy_(own)
    places = torch.tensor(slots, device="cuda"), torch.tensor(lengths, device="cuda")
    with plain_torch():
        expected = contiguous_kv_attention(qkv, *tables, *theirs, *places, window)
    check(contiguous_kv_attention(qkv, *tables, *ours, *places, window), expected)
    for own, other in zip(ours, theirs, strict=True):
        check(own, other)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("tokens", "prompts"),
    [  # start and length of each prompt of a chunk
        (32, [(0, 32)]),
        (64, [(37, 61)]),
        (37, [(290, 10)]),
        (1, [(0, 1)]),
        (128, [(0, 17), (40, 16), (5, 33), (299, 1)]),
    ],
)
def test_contiguous_kv_prefill_attention(
    tokens: int, prompts: list[tuple[int, int]], window: int | None
) -> None:
    qkv, tables = normal(tokens, 18 * 64), angles(tokens, 32)
    ours, theirs = ([normal(5, 300, 2, 64) for _ in range(2)] for _ in range(2))
    for own, other in zip(ours, theirs, strict=True):
        other.copy_(own)
    segment, index, first = torch.full((tokens,), -1), torch.zeros(tokens, dtype=torch.int64), 0
    for number, (start, count) in enumerate(prompts):
        segment[first : first + count] = number
        index[first : first + count] = start + torch.arange(count)
        first += -(-count // SLOT_CHUNK_ALIGNMENT) * SLOT_CHUNK_ALIGNMENT
    slots = torch.tensor([3, 1, 4, 2])
    places, is_real = [each.cuda() for each in (slots, segment, index)], (segment >= 0).cuda()
    with plain_torch():
        expected = contiguous_kv_prefill_attention(qkv, *tables, *theirs, *places, window)
    check(
        contiguous_kv_prefill_attention(qkv, *tables, *ours, *places, window)[is_real],
        expected[is_real],
    )
    for own, other in zip(ours, theirs, strict=True):
        check(own[1:], other[1:])  # padding is written to slot 0, in any order


@pytest.mark.parametrize("first", [[-2, 14, 62], [1598, -2, 30]])
def test_sliding_window_attention(first: list[int]) -> None:
    qkv, tables = normal(3, 18, 18 * 64), angles(3, 18, 32)
    ours, theirs = ([normal(5, 88, 2, 64) for _ in range(2)] for _ in range(2))
    for own, other in zip(ours, theirs, strict=True):
        other.copy_(own)
    places = torch.tensor([1, 4, 2], device="cuda"), torch.tensor(first, device="cuda")
    with plain_torch():
        expected = sliding_window_attention(qkv, *tables, *theirs, *places, 64)
    check(sliding_window_attention(qkv, *tables, *ours, *places, 64), expected)
    for own, other in zip(ours, theirs, strict=True):
        check(own, other)


@pytest.mark.parametrize("rows", [1, 2, 5, 18, 32])
@pytest.mark.parametrize(("activation", "factor"), [("none", 1), ("gelu", 1), ("swiglu", 2)])
def test_an_mlp(rows: int, activation: linear.Activation, factor: int) -> None:
    """Up and down: the next GEMM uses the sums of squares of the split-K GEMM before it."""
    x, norm, next_norm = normal(rows, 896), normal(896), normal(896)
    first, bias = normal(4864 * factor, 896) * 896**-0.5, normal(4864) if factor == 1 else None
    second = normal(896, 4864) * 4864**-0.5

    def run() -> tuple[Tensor, Tensor]:
        stream = linear.begin_residual(x, norm, 1e-6)
        inner = linear.normed_linear(stream, first, bias, 1e-6, activation)
        stream = linear.add_linear(inner, second, None, stream, next_norm, 1e-6)
        return stream.values, linear.final_norm(stream, 1e-6)

    with plain_torch():
        expected = run()
    for value, wanted in zip(run(), expected, strict=True):
        check(value, wanted)


@pytest.mark.parametrize(("size", "inner"), [(72, 200), (1152, 24), (896, 5000)])
def test_one_row_of_any_size(size: int, inner: int) -> None:
    """Sizes that no block divides, too."""
    x, norm, next_norm = normal(1, size), normal(size), normal(size)
    first, second = normal(2 * inner, size) * size**-0.5, normal(size, inner) * inner**-0.5
    bias = normal(size)

    def run() -> Tensor:
        stream = linear.begin_residual(x, norm, 1e-6)
        made = linear.normed_linear(stream, first, None, 1e-6, "swiglu")
        return linear.final_norm(linear.add_linear(made, second, bias, stream, next_norm, 1e-6), 1e-6)

    with plain_torch():
        expected = run()
    check(run(), expected)


@pytest.mark.parametrize("rows", [1, 2, 32, 74])
@pytest.mark.parametrize(("activation", "factor"), [("gelu", 1), ("swiglu", 2)])
def test_an_mlp_with_fp8_weights(rows: int, activation: linear.Activation, factor: int) -> None:
    """Beyond 32 rows the activations are rounded to FP8 too, each row with its own scale."""
    x, norm, next_norm = normal(rows, 896), normal(896), normal(896)
    first, first_scale = quantize_fp8(normal(4864 * factor, 896) * 896**-0.5)
    second, second_scale = quantize_fp8(normal(896, 4864) * 4864**-0.5)
    bias = normal(4864) if factor == 1 else None

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        stream = linear.begin_residual(x, norm, 1e-6)
        inner = linear.normed_linear(stream, first, bias, 1e-6, activation, first_scale)
        stream = linear.add_linear(inner, second, None, stream, next_norm, 1e-6, second_scale)
        return stream.values, linear.final_norm(stream, 1e-6)

    with plain_torch():
        expected = run(x)
    for value, wanted in zip(run(x), expected, strict=True):
        if rows <= 32:
            check(value, wanted)
        else:
            assert (value.float() - wanted.float()).norm() / wanted.float().norm() < 0.05
    if rows > 32:
        assert torch.equal(run(torch.cat((x[:40], 100 * x[40:])))[0][:40], run(x)[0][:40])
