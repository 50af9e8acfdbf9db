"""Cost model of every operator, from the arguments of real calls.

The operators' modules need Triton: a stand-in replaces it, and the operators only record their arguments. Each call
runs in plain torch first, so that the shapes are ones the reference supports.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import mingc.kernels
from mingc.export.cost.kernel_cost import CONTEXT, KERNELS
from mingc.export.layers import moe
from mingc.kernels import (
    contiguous_kv_attention,
    contiguous_kv_prefill_attention,
    decode_attention,
    gemv,
    layer_norm,
    linear,
    modulated_norm,
    moe_experts,
    norm_rope_write,
    norm_rotate_packed,
    paged_attention,
    quantized,
    rotate_packed,
    router,
    sample_tokens,
    silu_product,
    sliding_window_attention,
    small_sequence_attention,
    varlen_attention,
)

BATCH, TOKENS, HIDDEN, SIZE, HEADS, KV_HEADS, PAGE = 3, 70, 256, 64, 8, 2, 16
EXPERTS, WIDTH, CHOSEN = 16, 128, 4
PACKED = HEADS + 2 * KV_HEADS


class Reached(Exception):
    """Raised by an operator: its name and arguments."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        super().__init__(name)
        self.name, self.arguments = name, arguments


def recording(name: str, *, mutates_args: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Stand-in for `triton_op`: the operator raises `Reached`."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        known.add(name.removeprefix("mingc::"))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            raise Reached(name.removeprefix("mingc::"), dict(bound.arguments))

        return call

    return wrap


known: set[str] = set()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that makes every kernel function call its operator, which raises `Reached`."""

    def is_ours(name: str) -> bool:
        return name == "mingc.kernels.triton" or name.startswith("mingc.kernels.triton.")

    before = {name: module for name, module in sys.modules.items() if is_ours(name)}
    for name in before:
        del sys.modules[name]

    def switch() -> None:
        fake = MagicMock(next_power_of_2=lambda n: 1 << (n - 1).bit_length(), cdiv=lambda a, b: -(-a // b))
        fake.language.constexpr = lambda value: SimpleNamespace(value=value)
        monkeypatch.setitem(sys.modules, "triton", fake)
        monkeypatch.setitem(sys.modules, "triton.language", fake.language)
        monkeypatch.setattr(torch.library, "triton_op", recording)
        for each in pkgutil.iter_modules(mingc.kernels.__path__):
            module = importlib.import_module(f"mingc.kernels.{each.name}")
            for dispatch in ("use_triton", "use_triton_float32"):
                if hasattr(module, dispatch):
                    monkeypatch.setattr(module, dispatch, lambda *_: True)
        gpu = importlib.import_module("mingc.kernels.triton")
        for each in pkgutil.iter_modules(gpu.__path__):
            importlib.import_module(f"mingc.kernels.triton.{each.name}")

    yield switch
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]
    sys.modules.update(before)
    if "mingc.kernels.triton" in before:
        mingc.kernels.triton = before["mingc.kernels.triton"]
    elif hasattr(mingc.kernels, "triton"):
        del mingc.kernels.triton


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(*shape)
    return angle.cos(), angle.sin()


def pages() -> tuple[Tensor, Tensor]:
    return torch.randn(20 * PAGE, KV_HEADS, SIZE), torch.randn(20 * PAGE, KV_HEADS, SIZE)


def tables(batch: int) -> Tensor:
    return torch.arange(1, 1 + 6 * batch, dtype=torch.int32).view(batch, 6)


def slots() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 100, KV_HEADS, SIZE), torch.randn(5, 100, KV_HEADS, SIZE)


def attend_pages() -> object:
    return paged_attention.paged_decode_attention(
        torch.randn(BATCH, HEADS, SIZE), *pages(), tables(BATCH), torch.tensor([3, 40, 90]), PAGE
    )


def decode_from_qkv() -> object:
    return decode_attention.decode_attention(
        torch.randn(BATCH, PACKED, SIZE), torch.ones(SIZE), torch.ones(SIZE), *angles(BATCH, SIZE // 4),
        *pages(), tables(BATCH), torch.tensor([3, 40, 90]), 1e-6, PAGE,
    )  # fmt: skip


def prefill_pages() -> object:
    q, index = torch.randn(TOKENS, HEADS, SIZE), 16 + torch.arange(TOKENS)
    return paged_attention.paged_prefill_attention(
        q, *pages(), tables(1), torch.zeros_like(index), index, PAGE
    )


def write_pages() -> object:
    return norm_rope_write.norm_rope_write(
        torch.randn(TOKENS, PACKED, SIZE), torch.ones(SIZE), torch.ones(SIZE), *angles(TOKENS, SIZE // 4),
        torch.arange(TOKENS), *pages(), 1e-6,
    )  # fmt: skip


def decode_contiguous() -> object:
    qkv, where = torch.randn(BATCH, PACKED * SIZE), torch.tensor([1, 2, 3])
    return contiguous_kv_attention.contiguous_kv_attention(
        qkv, *angles(BATCH, SIZE // 2), *slots(), where, 9 * where, None
    )


def prefill_contiguous() -> object:
    qkv, places = torch.randn(TOKENS, PACKED * SIZE), (torch.zeros(TOKENS).long(), torch.arange(TOKENS))
    return contiguous_kv_prefill_attention.contiguous_kv_prefill_attention(
        qkv, *angles(TOKENS, SIZE // 2), *slots(), torch.tensor([1]), *places, None
    )


def attend_sliding_window() -> object:
    qkv, where = torch.randn(BATCH, 8, PACKED * SIZE), torch.tensor([1, 2, 3])
    return sliding_window_attention.sliding_window_attention(
        qkv, *angles(BATCH, 8, SIZE // 2), *slots(), where, 8 * where, 64
    )


def attend_small_sequence() -> object:
    return small_sequence_attention.small_sequence_attention(
        torch.randn(BATCH, 9, 3 * HEADS * SIZE), *angles(9, SIZE // 2)
    )


def attend_segments(bounds: list[list[int]]) -> object:
    """`bounds`: one range for all queries, or one for each half of them."""
    ranges = torch.tensor([bounds]).repeat_interleave(TOKENS // 2 if len(bounds) > 1 else 1, dim=1)
    q = torch.randn(1, TOKENS, HEADS, SIZE)
    segments = varlen_attention.make_segments(ranges, q.flatten(2), HEADS)
    return varlen_attention.varlen_attention(q, q, q, segments)


def add_and_norm() -> object:
    x, weight = torch.randn(TOKENS, HIDDEN), torch.ones(HIDDEN)
    return layer_norm.add_layer_norm(x, x, weight, weight, 1e-6)


def add_and_norm_by_time(*, adds: bool, norms: bool) -> object:
    x, weight, time = torch.randn(BATCH, TOKENS, HIDDEN), torch.ones(HIDDEN), torch.randn(BATCH, HIDDEN)
    if not adds:
        return modulated_norm.modulated_norm(x, weight, time, 1e-5)
    if not norms:
        return modulated_norm.add_gated(x, x, weight, time, 1e-5)
    return modulated_norm.add_gated_norm(x, x, weight, time, weight, time, 1e-5)


def norm_and_rotate() -> object:
    packed, weight = torch.randn(BATCH, TOKENS, 3, HEADS, SIZE), torch.ones(SIZE)
    return norm_rotate_packed.norm_rotate_packed(packed, weight, weight, *angles(TOKENS, SIZE // 2), 1e-5)


def rotate_projection() -> object:
    return rotate_packed.rotate_packed(torch.randn(TOKENS, 3, HEADS, SIZE), *angles(TOKENS, SIZE // 2))


def route_tokens() -> object:
    weight, bias, gates = torch.randn(3, EXPERTS, HIDDEN), torch.zeros(3, EXPERTS), torch.tensor([0, 2, 1])
    return router.route_hidden(
        torch.randn(BATCH, HIDDEN), weight, bias, gates,
        num_groups=4, num_kept_groups=2, top_k=CHOSEN, scale=2.5,
    )  # fmt: skip


def run_experts(tokens: int, *, has_shared: bool, is_fp8: bool = False) -> object:
    def make(*leading: int) -> moe_experts.ExpertWeights:
        gate_up, down = torch.randn(*leading, 2 * WIDTH, HIDDEN), torch.randn(*leading, HIDDEN, WIDTH)
        if not is_fp8:
            return moe_experts.ExpertWeights(gate_up, down)
        (gate_up, up_scale), (down, down_scale) = map(quantized.quantize_fp8, (gate_up, down))
        return moe_experts.ExpertWeights(gate_up, down, up_scale, down_scale)

    ids = torch.rand(tokens, EXPERTS).topk(CHOSEN).indices
    shared = make() if has_shared else None
    return moe_experts.moe_experts(
        torch.randn(tokens, HIDDEN), ids, torch.rand(tokens, CHOSEN), *make(EXPERTS), shared=shared
    )


def quantized_linear() -> object:
    return linear.linear(torch.randn(BATCH, HIDDEN), *_fp8(WIDTH, HIDDEN))


def _fp8(rows: int, depth: int) -> tuple[Tensor, None, Tensor]:
    weight, scale = quantized.quantize_fp8(torch.randn(rows, depth))
    return weight, None, scale


def fused_gemv() -> object:
    row = torch.randn(1, HIDDEN)
    rows = linear.ResidualState(row, row, None, None)
    if sys.modules.get("mingc.kernels.triton.fused_norm_gemv") is not None:
        rows = rows._replace(norm=torch.ones(HIDDEN))
    return linear.normed_linear(rows, torch.randn(WIDTH, HIDDEN), None, 1e-6)


def linear_with_residual() -> object:
    rows = linear.ResidualState(torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN), None, None)
    if sys.modules.get("mingc.kernels.triton.linear") is not None:
        rows = rows._replace(squares=torch.ones(BATCH, 1), counters=torch.zeros(8, dtype=torch.int32))
    x, weight = torch.randn(BATCH, WIDTH), torch.randn(HIDDEN, WIDTH)
    return linear.add_linear(x, weight, None, rows, torch.ones(HIDDEN), 1e-6)


def gemv_with_norm() -> object:
    row = torch.randn(1, HIDDEN)
    return gemv.sum_norm_linear(row, row, torch.ones(HIDDEN), torch.randn(WIDTH, HIDDEN), 1e-6)


def plain_gemv() -> object:
    weight, _, scale = _fp8(WIDTH, HIDDEN)
    return gemv.gemv(torch.randn(1, HIDDEN), weight, scale)


def run_expert_layer() -> object:
    config = {"num_groups": 4, "num_kept_groups": 2, "top_k": CHOSEN, "scale": 2.5}
    half = moe.MoeFeedForward(moe.Router(HIDDEN, EXPERTS, **config), HIDDEN, EXPERTS, WIDTH, WIDTH, 1e-6)
    for parameter in half.parameters():
        parameter.data.normal_()
    row = torch.randn(1, HIDDEN)
    with torch.no_grad():
        return half.decode(row, row)


def sample() -> Tensor:
    columns = torch.zeros(BATCH, sample_tokens.NUM_COLUMNS)
    return sample_tokens.sample_tokens(torch.randn(BATCH, TOKENS), columns, torch.zeros(BATCH, TOKENS) > 0)


# FLOPs of one call at a context of 9 tokens, counted from the definition of the operation.
CALLS: dict[str, tuple[str, Callable[[], object], int]] = {
    "paged decode": ("paged_decode_attention", attend_pages, 4 * BATCH * HEADS * SIZE * 10),
    "decode": ("decode_attention", decode_from_qkv, 4 * BATCH * HEADS * SIZE * 10),
    "paged prefill": (
        "paged_prefill_attention", prefill_pages,
        4 * HEADS * SIZE * sum(9 + t + 1 for t in range(TOKENS)),
    ),
    "write": ("norm_rope_write", write_pages, 0),
    "contiguous KV decode": ("contiguous_kv_attention", decode_contiguous, 4 * BATCH * HEADS * SIZE * 10),
    "contiguous KV prefill": (
        "contiguous_kv_prefill_attention", prefill_contiguous,
        4 * HEADS * SIZE * sum(9 + t + 1 for t in range(TOKENS)),
    ),
    "sliding window": ("sliding_window_attention", attend_sliding_window, 4 * BATCH * 8 * HEADS * SIZE * 64),
    "small sequence": ("small_sequence_attention", attend_small_sequence, 4 * BATCH * 9 * 9 * HEADS * SIZE),
    "two frames": (
        "varlen_attention", lambda: attend_segments([[0, TOKENS // 2], [TOKENS // 2, TOKENS]]),
        2 * 4 * (TOKENS // 2) ** 2 * HEADS * SIZE,
    ),
    "one clip": ("varlen_attention", lambda: attend_segments([[0, TOKENS]]), 4 * TOKENS**2 * HEADS * SIZE),
    "sum and norm": ("add_layer_norm", add_and_norm, 0),
    "norm by time": ("modulated_norm", lambda: add_and_norm_by_time(adds=False, norms=True), 0),
    "gated sum": ("add_gated", lambda: add_and_norm_by_time(adds=True, norms=False), 0),
    "gated sum and norm": ("add_gated_norm", lambda: add_and_norm_by_time(adds=True, norms=True), 0),
    "norm and rotation": ("norm_rotate_packed", norm_and_rotate, 0),
    "rotation": ("rotate_packed", rotate_projection, 0),
    "SwiGLU": ("silu_product", lambda: silu_product.silu_product(torch.randn(TOKENS, 2 * WIDTH)), 0),
    "rounding of many rows": (
        "quantize_rows",
        lambda: linear.linear(torch.randn(TOKENS, HIDDEN), *_fp8(WIDTH, HIDDEN), has_many_rows=True), 0,
    ),
    "router": ("route_hidden", route_tokens, 2 * BATCH * EXPERTS * HIDDEN),
    "experts": (
        "moe_decode", lambda: run_experts(BATCH, has_shared=True), 6 * BATCH * (CHOSEN + 1) * WIDTH * HIDDEN
    ),
    "experts in FP8": (
        "moe_decode", lambda: run_experts(1, has_shared=False, is_fp8=True), 6 * CHOSEN * WIDTH * HIDDEN
    ),
    "experts by chunk": (
        "moe_prefill", lambda: run_experts(TOKENS, has_shared=True), 6 * TOKENS * CHOSEN * WIDTH * HIDDEN
    ),
    "expert layer of one token": (
        "moe_gemv", run_expert_layer, 2 * EXPERTS * HIDDEN + 6 * (CHOSEN + 1) * WIDTH * HIDDEN
    ),
    "GEMV": ("gemv", plain_gemv, 2 * WIDTH * HIDDEN),
    "GEMV with norm": ("sum_norm_linear", gemv_with_norm, 2 * WIDTH * HIDDEN),
    "linear": ("normed_linear", quantized_linear, 2 * BATCH * WIDTH * HIDDEN),
    "fused GEMV": ("fused_norm_gemv", fused_gemv, 2 * WIDTH * HIDDEN),
    "sampling": ("sample_tokens", sample, 0),
    "linear with residual": ("add_linear", linear_with_residual, 2 * BATCH * WIDTH * HIDDEN),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_cost_rule_accepts_the_arguments_of_the_operator(
    name: str, on_device: Callable[[], None]
) -> None:
    operator, call, flops = CALLS[name]
    call()
    on_device()
    with pytest.raises(Reached) as reached:
        call()
    assert reached.value.name == operator
    given = reached.value.arguments
    shapes = {key: tuple(each.shape) if isinstance(each, Tensor) else () for key, each in given.items()}
    work = KERNELS[operator](shapes, given)
    assert work.flops == flops or work.flops.subs({CONTEXT: 9}) == flops
    assert work.weight_shares.keys() <= given.keys()


def test_every_operator_is_called(on_device: Callable[[], None]) -> None:
    on_device()
    assert known == {operator for operator, *_ in CALLS.values()}
