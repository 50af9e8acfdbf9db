"""Expert routing (spec: thinker.md §2.3) against a token-by-token implementation of its rules."""

import pytest
import torch
from torch import Tensor

from mingc.kernels.router import route, route_hidden


def plain_route(logits: Tensor, bias: Tensor, groups: int, kept: int, chosen: int) -> dict[int, float]:
    """Weights of one token by expert."""
    scores = torch.sigmoid(logits.double())
    biased = scores + bias.double()
    size = len(scores) // groups
    ranked = sorted(
        range(groups), key=lambda g: -sum(sorted(biased[g * size : (g + 1) * size].tolist())[-2:])
    )
    allowed = [expert for group in ranked[:kept] for expert in range(group * size, (group + 1) * size)]
    picked = sorted(allowed, key=lambda expert: -biased[expert].item())[:chosen]
    total = sum(scores[expert].item() for expert in picked)
    return {expert: 2.5 * scores[expert].item() / total for expert in picked}


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "chosen"), [(16, 4, 2, 4), (256, 8, 4, 8), (12, 1, 1, 3), (8, 8, 4, 4)]
)
@pytest.mark.parametrize("is_bias_per_token", [False, True])
def test_against_plain_rules(
    experts: int, groups: int, kept: int, chosen: int, is_bias_per_token: bool
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(20, experts, generator=generator)
    bias = torch.randn(20, experts, generator=generator) if is_bias_per_token else torch.randn(experts)
    ids, weights = route(logits, bias, num_groups=groups, num_kept_groups=kept, top_k=chosen, scale=2.5)
    assert ids.shape == weights.shape == (20, chosen)
    for token in range(20):
        expected = plain_route(logits[token], bias.expand(20, -1)[token], groups, kept, chosen)
        assert set(ids[token].tolist()) == set(expected)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)


def test_the_bias_selects_but_does_not_weight() -> None:
    bias = torch.zeros(8)
    bias[5] = 10
    ids, weights = route(torch.zeros(1, 8), bias, num_groups=1, num_kept_groups=1, top_k=2, scale=2.5)
    assert ids[0, 0] == 5
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))


def test_at_most_the_kept_groups_appear() -> None:
    logits = torch.full((1, 256), -4.0)
    logits[0, 96:128] = 4.0
    ids, weights = route(logits, torch.zeros(256), num_groups=8, num_kept_groups=4, top_k=8, scale=2.5)
    assert set((ids // 32).flatten().tolist()) == {3}
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))


def test_each_token_uses_its_own_gate() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 32, generator=generator)
    weight, bias = torch.randn(3, 16, 32, generator=generator), torch.randn(3, 16, generator=generator)
    gates = torch.arange(9) % 3
    limits = {"num_groups": 4, "num_kept_groups": 2, "top_k": 4, "scale": 2.5}
    ids, weights = route_hidden(x, weight, bias, gates, **limits)
    for gate in range(3):
        own = gates == gate
        wanted_ids, wanted = route(x[own] @ weight[gate].t(), bias[gate], **limits)
        assert torch.equal(ids[own], wanted_ids)
        torch.testing.assert_close(weights[own], wanted)
    plain_ids, _ = route_hidden(x, weight, bias, None, **limits)
    assert torch.equal(plain_ids, route(x @ weight[0].t(), bias[0], **limits)[0])
