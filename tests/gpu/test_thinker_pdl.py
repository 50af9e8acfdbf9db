"""A decode step of one token as a CUDA graph, whose kernels overlap, against the same kernels one after the other."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from mingc.export.layers.decoder import PAGE_SIZE, Decoder, DecoderConfig, DecoderLayer
from mingc.export.layers.moe import Router
from mingc.kernels.quantized import quantize_fp8
from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.engines.programmatic_launch import _edges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, PAGES, REPLAYS = 3, 300, 60
CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=4096, num_layers=LAYERS, num_dense_layers=0, num_heads=32, num_kv_heads=4,
    head_dim=128, rotary_dim=64, rope_theta=2.4e6, norm_eps=1e-6, dense_intermediate_size=1024, num_experts=32,
    expert_intermediate_size=1024, shared_intermediate_size=1024, num_experts_per_token=8, num_expert_groups=8,
    num_kept_groups=4, routed_scale=2.5,
)  # fmt: skip


def make_layers() -> list[DecoderLayer]:
    """Layers with random weights: FP8 matrices with scales, as an export makes them; norms and routers are not FP8."""
    with torch.device("meta"):
        decoder = Decoder(CONFIG, 1)
    for owner in decoder.layers.modules():
        for name, weight in [*owner.named_parameters(recurse=False)]:
            values = torch.randn(weight.shape, device="cuda")
            if weight.ndim == 1:
                made = (1 + values / 10).to(torch.bfloat16)
            elif isinstance(owner, Router):
                made = (
                    values / 100 if name == "bias" else (values * weight.shape[-1] ** -0.5).to(torch.bfloat16)
                )
            else:
                made, scale = quantize_fp8(values * weight.shape[-1] ** -0.5)
                setattr(owner, f"{name}_scale", nn.Parameter(scale, requires_grad=False))
            setattr(owner, name, nn.Parameter(made, requires_grad=False))
    return [cast(DecoderLayer, layer) for layer in decoder.layers]


@torch.no_grad()
def test_overlapping_kernels_give_the_same_bits() -> None:
    torch.manual_seed(0)
    layers = make_layers()
    pools = [
        tuple(torch.randn(PAGES * PAGE_SIZE, 4, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
        for _ in layers
    ]
    table = torch.zeros(1, PAGES - 1, dtype=torch.int32, device="cuda")
    lengths = torch.ones(1, dtype=torch.int64, device="cuda")
    x, cos, sin = (
        torch.zeros(1, 4096, dtype=torch.bfloat16, device="cuda"),
        *torch.ones(2, 1, 32, device="cuda"),
    )

    def step() -> tuple[Tensor, ...]:
        residual, delta = x, torch.zeros_like(x)
        for layer, (k, v) in zip(layers, pools, strict=True):
            residual, delta = layer.attention.decode(residual, delta, cos, sin, table, lengths, k, v)
            residual, delta = layer.feed_forward.decode(residual, delta)
        return residual, delta

    graph, outputs = GraphPool(torch.device("cuda", 0)).capture(step, "three layers")
    edges = _edges(graph.raw_cuda_graph())
    programmatic = sum(not is_ordinary for *_, is_ordinary in edges)
    assert programmatic >= 9 * LAYERS - 1, "all kernels of a layer overlap"
    for _ in range(REPLAYS):
        x.copy_(torch.randn(1, 4096))
        table.copy_(1 + torch.randperm(PAGES - 1))
        lengths.fill_(int(torch.randint(1, PAGES * PAGE_SIZE - PAGE_SIZE, ())))
        expected = step()
        torch.cuda.synchronize()
        graph.replay()
        for value, wanted in zip(outputs, expected, strict=True):
            assert value.isfinite().all() and torch.equal(value, wanted)
