"""Attention and GEMM of the encoders against plain torch, in half precision on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mingc.export.layers.vision_transformer import VisionBlock
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.layer_norm import add_layer_norm
from mingc.kernels.linear import linear_gelu
from mingc.kernels.rotary_varlen_attention import rotary_varlen_attention
from mingc.kernels.rotate_packed import rotate_packed
from mingc.kernels.varlen_attention import make_segments, varlen_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2  # rounding error of bfloat16, relative to the largest value
VISION, AUDIO = (16, 72), (20, 64)  # heads and their size in the released encoders


def frames(*sizes: int) -> Tensor:
    """Ranges (1, S, 2) of frames of these sizes; negative: that many padding rows, each of which sees four."""
    ranges, start = [], 0
    for size in sizes:
        end = start + abs(size)
        for at in range(start, end):
            own = start + (at - start) // 4 * 4
            ranges.append((start, end) if size > 0 else (own, min(own + 4, end)))
        start = end
    return torch.tensor([ranges], dtype=torch.int32, device="cuda")


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Softmax over each query's range in float64."""
    rows, queries = q.shape[:2]
    key = torch.arange(k.shape[1], device="cuda")
    bounds = bounds.expand(rows, queries, 2)
    is_hidden = (key < bounds[..., :1]) | (key >= bounds[..., 1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(is_hidden.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double())


def check(value: Tensor, expected: Tensor) -> None:
    assert value.isfinite().all()
    error = (value.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < TOLERANCE


# One size of each kernel configuration, and of each case of a block of queries: in one frame, across frames, padding.
@pytest.mark.parametrize(
    "sizes",
    [(1,), (4, 60), (256,), (300, 77, 1, 500, -146), (1024,), (576,) * 3, (2500,), (130, -2400), (1000,) * 3],
    ids=str,
)
@pytest.mark.parametrize("heads", [VISION, AUDIO, (2, 80), (2, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frames_of_a_packed_projection(
    sizes: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    bounds = frames(*sizes)
    count = bounds.shape[1]
    packed = torch.randn(1, count, 3, *heads, device="cuda", dtype=dtype)
    q, k, v = (2 * packed).unbind(2)
    segments = make_segments(bounds, q.flatten(2), heads[0])
    assert segments.mask is None
    check(varlen_attention(q, k, v, segments), attend(q, k, v, bounds))


@pytest.mark.parametrize("lengths", [(1500,), (1, 700, 64), (3000, 2999)], ids=str)
def test_one_range_for_all_positions_of_a_clip(lengths: tuple[int, ...]) -> None:
    packed = torch.randn(len(lengths), max(lengths), 3, *AUDIO, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    bounds = torch.tensor([[[0, length]] for length in lengths], device="cuda")
    # What lies beyond a clip is never read.
    for row, length in enumerate(lengths):
        packed[row, length:, 1:] = torch.nan
    out = varlen_attention(q, k, v, make_segments(bounds, q.flatten(2), AUDIO[0]))
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        check(out[one], attend(q[one], k[one, :length], v[one, :length], bounds[one]))


def test_random_ranges() -> None:
    q, k, v = torch.randn(1, 700, 3, *VISION, device="cuda", dtype=torch.bfloat16).unbind(2)
    start = torch.randint(0, 700, (1, 700, 1), device="cuda")
    bounds = torch.cat((start, (start + torch.randint_like(start, 1, 700)).clamp(max=700)), -1)
    check(varlen_attention(q, k, v, make_segments(bounds, q.flatten(2), 16)), attend(q, k, v, bounds))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (torch.randn(1, 300, *VISION, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bounds = frames(299, -1)
    got = varlen_attention(40 * q, 40 * k, v, make_segments(bounds, q.flatten(2), 16))
    check(got, attend(40 * q, 40 * k, v, bounds))


# More than 1,024 patches, which CUDA C++ rotates and attends to; the last block of 192 queries whole, partial, padding.
@pytest.mark.parametrize(
    "sizes",
    [(1025,), (300, 77, 1, 500, -346), (4096,), (576,) * 3, (2500,), (130, -2400), (1000,) * 3, (1152, 4)],
    ids=str,
)
def test_rotation_and_attention_of_large_images(sizes: tuple[int, ...]) -> None:
    bounds = frames(*sizes)
    count = bounds.shape[1]
    qkv = 2 * torch.randn(count, 3, *VISION, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(count, VISION[1] // 2, device="cuda") * 6
    tables = angles.cos(), angles.sin()
    segments = make_segments(bounds, qkv[None, :, 0].flatten(2), VISION[0])
    q, k = rotate_packed(qkv, *tables)
    expected = attend(q[None], k[None], qkv[None, :, 2], bounds)[0]
    check(rotary_varlen_attention(qkv, *tables, segments), expected)


def test_random_ranges_and_large_scores_of_a_large_image() -> None:
    qkv = torch.randn(1500, 3, *VISION, device="cuda", dtype=torch.bfloat16)
    qkv[:, :2] *= 40
    tables = torch.ones(1500, VISION[1] // 2, device="cuda"), torch.zeros(1500, VISION[1] // 2, device="cuda")
    start = torch.randint(0, 1500, (1, 1500, 1), device="cuda")
    bounds = torch.cat((start, (start + torch.randint_like(start, 1, 1500)).clamp(max=1500)), -1)
    q, k, v = (each[None] for each in qkv.unbind(1))
    segments = make_segments(bounds, q.flatten(2), VISION[0])
    check(rotary_varlen_attention(qkv, *tables, segments), attend(q, k, v, bounds)[0])


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("rows", [1, 256, 1000])
def test_gelu_of_a_linear_layer(rows: int, approximate: str) -> None:
    x, weight, bias = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, 1152), (4304, 1152), (4304,))
    )
    weight /= 34
    linear = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = torch.nn.functional.gelu(linear, approximate=approximate)
    check(linear_gelu(x, weight, bias, approximate), expected)


@pytest.mark.parametrize(("rows", "width"), [(1, 1152), (1024, 1152), (1501, 1280), (7, 64)])
def test_norm_of_a_residual_sum(rows: int, width: int) -> None:
    x, update = (4 * torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) + 1 for _ in range(2))
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    total, normed = add_layer_norm(x, update, weight, bias, 1e-6)
    torch.testing.assert_close(total, x + update, rtol=0, atol=0)
    values = total.double()
    expected = torch.nn.functional.layer_norm(values, (width,), weight.double(), bias.double(), 1e-6)
    check(normed, expected)


@pytest.mark.parametrize(("tokens", "heads"), [(1, VISION), (1001, VISION), (64, (4, 32))], ids=str)
def test_rotation_of_a_packed_projection(tokens: int, heads: tuple[int, int]) -> None:
    qkv = torch.randn(tokens, 3, *heads, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(tokens, heads[1] // 2, device="cuda") * 6
    # A pair is a complex number, which an angle turns; on the CPU, as torch compiles complex products on a GPU.
    low, high = qkv[:, :2].double().cpu().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.exp(1j * angles[:, None, None].double().cpu())
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    for got, exact in zip(rotate_packed(qkv, angles.cos(), angles.sin()), expected.unbind(1), strict=True):
        check(got.cpu(), exact)


def test_a_block_of_the_released_vision_encoder() -> None:
    """In bfloat16 with kernels as close to float32 as plain torch in bfloat16."""
    torch.manual_seed(0)
    block = VisionBlock(1152, 4304, 16, "tanh").cuda().requires_grad_(False)
    x = torch.randn(1024, 1152, device="cuda")
    angles = torch.rand(1024, 36, device="cuda") * 6
    bounds = frames(600, 424)

    def run(dtype: torch.dtype) -> Tensor:
        segments = make_segments(bounds, x.to(dtype), 16)
        stream, update = block.to(dtype)(x.to(dtype), x.to(dtype), angles.cos(), angles.sin(), segments)
        return stream.double() + update.double()

    exact = run(torch.float32)
    with plain_torch():
        plain = (run(torch.bfloat16) - exact).norm()
    assert (run(torch.bfloat16) - exact).norm() < 1.1 * plain
    assert plain < 0.02 * exact.norm()


def test_a_frame_gives_the_same_bits_beside_other_frames() -> None:
    """Where it starts at a whole block, in one bucket."""
    q, k, v = torch.randn(1, 256, 3, *VISION, device="cuda", dtype=torch.bfloat16).unbind(2)
    outs = []
    for before, after in itertools.product((0, 128, 256), (0, 128)):
        around = [torch.randn_like(q).repeat(1, 2, 1, 1) for _ in range(3)]
        parts = [
            torch.cat((noise[:, :before], each, noise[:, : 256 - before + after]), 1)
            for noise, each in zip(around, (q, k, v), strict=True)
        ]
        bounds = frames(*(size for size in (before, 256, 256 - before + after) if size))
        out = varlen_attention(*parts, make_segments(bounds, parts[0].flatten(2), 16))
        outs.append(out[:, before : before + 256])
    for other in outs[1::2]:
        torch.testing.assert_close(other, outs[1], rtol=0, atol=0)
    for other in outs[::2]:
        torch.testing.assert_close(other, outs[0], rtol=0, atol=0)
