"""Cost model of the operator that samples one patch, from the arguments of a real call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mingc.export.cost.kernel_cost import KERNELS
from mingc.export.layers.dit import DitConfig
from mingc.export.stages.cfm import Cfm, CfmConfig
from mingc.kernels import flow_sampler
from mingc.kernels.cuda import flow_sampler as gpu

STEPS, HISTORY, PATCH, CHANNELS, LLM, WIDTH, INNER, DEPTH = 3, 32, 4, 64, 896, 1024, 4096, 2


def transformer(tokens: int, out: int) -> DitConfig:
    return DitConfig(
        depth=DEPTH,
        hidden_size=WIDTH,
        num_heads=16,
        mlp_size=INNER,
        latent_dim=CHANNELS,
        out_size=out,
        num_tokens=tokens,
    )


def blocks_flops(sequences: int, tokens: int) -> int:
    products = 2 * sequences * tokens * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    return DEPTH * (products + 4 * sequences * tokens * tokens * WIDTH)


@pytest.mark.parametrize("requests", [1, 4])
def test_the_cost_rule_accepts_the_arguments_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    names = [each.name for each in torch.ops.mingc.flow_sample.default._schema.arguments]
    given: dict[str, Any] = {}

    def record(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given.update(zip(names, arguments, strict=True))
        return arguments[0], arguments[0], arguments[0]

    monkeypatch.setattr(torch.ops.mingc, "flow_sample", record)
    monkeypatch.setattr(gpu, "_code", lambda _: "")
    tokens = 1 + HISTORY + PATCH
    config = CfmConfig(
        num_steps=STEPS,
        latents_per_patch=PATCH,
        history_latents=HISTORY,
        llm_hidden_size=LLM,
        speaker_dim=192,
        dit=transformer(tokens, CHANNELS),
        aggregator=transformer(1 + PATCH, LLM),
    )
    with torch.device("meta"):
        controls = [torch.empty(requests) for _ in range(3)]
        flow_sampler.sample(
            flow_sampler.PatchInputs(
                torch.empty(requests, LLM),
                torch.empty(requests, HISTORY, CHANNELS),
                torch.empty(requests, PATCH, CHANNELS),
                torch.empty(requests, STEPS, PATCH, CHANNELS),
                *controls,
            ),
            Cfm(config).patch_weights(),
        )
    shapes = {
        name: [tuple(each.shape) for each in value] if isinstance(value, list) else tuple(value.shape)
        for name, value in given.items()
        if not isinstance(value, str)
    }
    work = KERNELS["flow_sample"](shapes, given)
    step = blocks_flops(2, tokens) + 2 * PATCH * CHANNELS * WIDTH * 3  # embedded once, projected for both
    condition_and_stop = 2 * LLM * (WIDTH + 2)
    # The history, and the patch for the aggregator.
    tokens_embedded = 2 * (HISTORY + PATCH) * CHANNELS * WIDTH
    once = condition_and_stop + tokens_embedded + blocks_flops(1, 1 + PATCH)
    assert work.flops == requests * (STEPS * step + once)
    assert work.weight_shares == {"blocks": STEPS, "edges": STEPS}
