"""Prints the Triton launches of every operation on an H200 as JSON, with a stand-in for Triton. Needs no GPU.

Run as a script in a process of its own: the stand-in stays in `sys.modules`.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo  # before the stand-in: torch's compiler looks for Triton itself
import torch._inductor
from torch import Tensor

from mingc.artifacts.target import lookup

FP8 = torch.float8_e4m3fn
FORMATS = {"bfloat16": torch.bfloat16, "fp8": FP8, "int4": torch.uint8}
# The GEMMs of the released model (one rank and a quarter), then sizes without a measured configuration.
RELEASED = (
    *((1152, 896), (896, 896), (4864, 896), (896, 4864), (3072, 1024), (1024, 1024), (1024, 4096)),
    *((5120, 4096), (4096, 4096), (157184, 4096), (1280, 4096), (4096, 1024), (39296, 4096)),
    *((640, 4096), (4096, 512), (2560, 4096), (4096, 2048)),
)
OTHERS = ((48, 128), (256, 1024), (1584, 2048), (3168, 9216), (67600, 1024))
HEADS = ((32, 4), (8, 1), (4, 1))  # query and KV heads of one rank of 1, 4 and 8

found: list[Any] = []


class Launcher:
    """In place of `torch.library.wrap_triton`: notes kernel, grid and keyword arguments."""

    def __init__(self, kernel: Any) -> None:
        self._name = kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **keywords: found.append([self._name, [*grid], keywords])


def stand_in() -> None:
    fake = MagicMock(
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(), cdiv=lambda a, b: -(-a // b), jit=lambda f: f
    )
    fake.language.constexpr = lambda value: SimpleNamespace(value=value)
    sys.modules["triton"] = fake
    sys.modules["triton.language"] = fake.language
    torch.library.triton_op = lambda name, *, mutates_args: lambda function: function  # type: ignore[assignment]
    torch.library.wrap_triton = Launcher  # type: ignore[assignment]


def module(name: str) -> ModuleType:
    loaded = importlib.import_module(f"mingc.kernels.triton.{name}")
    if hasattr(loaded, "gpu_target"):
        loaded.gpu_target = lambda _: lookup((9, 0), "NVIDIA H200", 132)
    return loaded


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def gemms() -> None:
    gemv, fused, linear = module("gemv"), module("fused_norm_gemv"), module("linear")
    for n, k in (*RELEASED, *OTHERS):
        for dtype in (torch.bfloat16, FP8):
            scale = floats(n) if dtype == FP8 else None
            weight = empty(n, k, dtype=dtype)
            gemv.gemv(empty(1, k), weight, scale)
            if k & (k - 1) == 0:
                gemv.sum_norm_linear(empty(1, k), empty(1, k), empty(k), weight, scale, 1e-6)
            fused.fused_norm_gemv(empty(1, k), empty(k), weight, scale, None, None, 1e-6, 1)
        for rows in (5, 16, 18, 32, 74, 200):
            linear.normed_linear(empty(rows, k), None, empty(n, k), None, None, 1e-6, 0)
            linear.add_linear(
                empty(rows, k), empty(n, k), None, empty(n), empty(rows, n), empty(n), ints(4096)
            )


def experts_of(weight_format: str, size: int, *leading: int) -> tuple[Tensor | None, ...]:
    dtype, hidden = FORMATS[weight_format], 4096
    packed = 2 if weight_format == "int4" else 1
    gate_up = empty(*leading, 2 * size, hidden // packed, dtype=dtype)
    down = empty(*leading, hidden, size // packed, dtype=dtype)
    if weight_format == "bfloat16":
        return gate_up, down, None, None
    return gate_up, down, floats(*leading, 2 * size), floats(*leading, hidden)


def experts() -> None:
    decode, prefill, gemv = module("moe_decode"), module("moe_prefill"), module("moe_gemv")
    for tokens in (32, 65, 256):
        prefill.moe_prefill(
            empty(tokens, 4096),
            ints(tokens, 8),
            floats(tokens, 8),
            *experts_of("int4", 1024, 256),
            None,
            "code",
        )
    for weight_format in FORMATS:
        for size in (128, 256, 512, 1024):
            routed, shared = experts_of(weight_format, size, 256), experts_of(weight_format, size)
            for tokens in (1, 2, 16, 64):
                decode.moe_decode(empty(tokens, 4096), ints(tokens, 8), floats(tokens, 8), *routed, *shared)
            for tokens in (65, 256, 1024, 4096):
                prefill.moe_prefill(
                    empty(tokens, 4096), ints(tokens, 8), floats(tokens, 8), *routed, None, None
                )
            if weight_format != "int4":
                gemv.moe_gemv(
                    empty(1, 4096), empty(1, 4096), empty(4096), empty(3, 256, 4096), floats(3, 256),
                    *routed, *shared, 1e-6, 8, 4, 8, 2.5,
                )  # fmt: skip


def attention() -> None:
    paged = module("paged_attention")
    for heads, kv_heads in HEADS:
        pool = empty(160, kv_heads, 128), empty(160, kv_heads, 128)
        for pages in (4, 64, 512, 4096):
            table = empty(3, pages, dtype=torch.int32)
            paged.paged_decode_attention(empty(3, heads, 128), *pool, table, ints(3), 16)
        for tokens in (64, 1000, 1024, 1025, 4096, 8192):
            table = empty(1, 256, dtype=torch.int32)
            paged.paged_prefill_attention(
                empty(tokens, heads, 128), *pool, table, ints(tokens), ints(tokens), 16
            )


def encoders() -> None:
    varlen = module("varlen_attention")
    # Vision: one row, a range for each of 256 to 65,536 patches. Audio: one clip, a range for all its positions.
    for heads, size in ((16, 72), (16, 80)):
        for queries in (256, 1024, 4096, 65536):
            packed = empty(1, queries, 3, heads, size)
            varlen.varlen_attention(*packed.unbind(2), ints(1, queries, 2))
    for queries in (50, 1500, 15000):
        packed = empty(1, queries, 3, 20, 64)
        varlen.varlen_attention(*packed.unbind(2), ints(1, 1, 2))


def encoder_layers() -> None:
    norm, rotate = module("layer_norm"), module("rotate_packed")
    for rows, width in ((1024, 1152), (1500, 1280)):
        norm.add_layer_norm(*(empty(rows, width) for _ in range(2)), empty(width), empty(width), 1e-6)
    rotate.rotate_packed(empty(1024, 3, 16, 72), floats(1024, 36), floats(1024, 36))


def sampling() -> None:
    sample = module("sample_tokens")
    for batch in (1, 16, 32):
        for vocab in (576, 157184):  # of the tiny and of the released model
            sample.sample_tokens(
                floats(batch, vocab), floats(batch, 26), empty(batch, vocab, dtype=torch.bool), 6
            )


def main() -> None:
    stand_in()
    gemms()
    experts()
    attention()
    encoders()
    encoder_layers()
    sampling()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
