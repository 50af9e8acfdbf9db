"""The kernels of one patch against plain torch, and CUDA graphs with programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mingc.export.layers.dit import DitConfig
from mingc.export.stages.cfm import Cfm, CfmConfig
from mingc.host.machine import gpu_target
from mingc.kernels import flow_sampler
from mingc.kernels.dispatch import plain_torch
from mingc.runtime.engines.cuda_graphs import GraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and "clusters" not in gpu_target().kernels,
        reason="needs a GPU with cluster kernels",
    ),
]
BATCHES = (1, 2, 3, 4)
TOLERANCE = 2.5e-2  # rounding error of bfloat16 through the blocks, relative to the largest value


def config(tokens: int, out: int) -> DitConfig:
    return DitConfig(
        depth=2, hidden_size=1024, num_heads=16, mlp_size=4096, latent_dim=64, out_size=out, num_tokens=tokens
    )


def filled(module: nn.Module) -> nn.Module:
    """Random bfloat16 weights on the GPU; float32 rotary tables and positive step sizes."""
    torch.manual_seed(3)
    for name, parameter in module.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
        value = torch.randn(parameter.shape) * scale + (1 if name.endswith("norm") else 0)
        parameter.data = value.to("cuda", torch.bfloat16)
    for name, buffer in module.named_buffers():
        angles = torch.rand(buffer.shape, device="cuda") * 6
        table = angles.sin() if name.endswith("sin") else angles.cos()
        buffer.data = table.abs() if name == "step_sizes" else table
    return module.requires_grad_(False)


def error(value: Tensor, expected: Tensor) -> float:
    return float((value.float() - expected.float()).abs().max() / expected.float().abs().max())


def sampler(requests: int = 1) -> tuple[Cfm, tuple[Tensor, ...]]:
    module = filled(
        Cfm(
            CfmConfig(
                num_steps=3,
                latents_per_patch=4,
                history_latents=32,
                llm_hidden_size=896,
                speaker_dim=192,
                dit=config(37, 64),
                aggregator=config(5, 896),
            )
        )
    )
    assert isinstance(module, Cfm)
    normal = [
        torch.randn(requests, *shape, device="cuda") for shape in ((896,), (32, 64), (4, 64), (3, 4, 64))
    ]
    controls = [torch.rand(requests, device="cuda") + value for value in (1.5, 0.25, 0.5)]
    return module, (normal[0].to(torch.bfloat16), *normal[1:], *controls)


@pytest.mark.parametrize("requests", BATCHES)
def test_one_patch(requests: int) -> None:
    module, inputs = sampler(requests)
    assert flow_sampler.takes_patch(inputs[2], module.patch_weights())
    with plain_torch():
        expected = module.sample(*inputs)
    assert all(each.isfinite().all() for each in expected)
    for value, wanted in zip(module.sample(*inputs), expected, strict=True):
        assert error(value, wanted) < TOLERANCE


def test_larger_batches_run_the_vendors_gemms() -> None:
    module, inputs = sampler(5)
    assert not flow_sampler.takes_patch(inputs[2], module.patch_weights())


@pytest.mark.parametrize("requests", BATCHES[1:])
def test_a_request_gives_the_same_bits_in_every_row_of_a_batch(requests: int) -> None:
    module, inputs = sampler(requests)
    made = module.sample(*inputs)
    shifted = module.sample(*(each.roll(1, 0) for each in inputs))
    assert all(torch.equal(moved, value.roll(1, 0)) for moved, value in zip(shifted, made, strict=True))


@pytest.mark.parametrize("requests", BATCHES)
def test_kernels_with_pdl_give_the_same_result_every_time(requests: int) -> None:
    module, inputs = sampler(requests)
    expected = [each.clone() for each in module.sample(*inputs)]
    assert all(each.isfinite().all() for each in expected)
    graph, outputs = GraphPool(torch.device("cuda", 0)).capture(lambda: module.sample(*inputs), "sampler")
    for _ in range(200):
        for each in outputs:
            each.fill_(7)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


def test_a_graph_of_one_kernel() -> None:
    value = torch.zeros(1, device="cuda")
    graph, _ = GraphPool(torch.device("cuda", 0)).capture(lambda: (value.add_(1),), "one kernel")
    before = value.clone()
    graph.replay()
    assert torch.equal(value, before + 1)
