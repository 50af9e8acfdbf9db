"""Number of experts that a decode step reads, counted at the routers: checks the assumption of the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from torch import Tensor

from mingc.export.layers.decoder import DecoderConfig
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.router import route_hidden
from mingc.runtime.engines.stage_loader import LoadedStage


def experts_read(
    stage: LoadedStage,
    state: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    config: DecoderConfig,
    inputs: Mapping[str, Tensor],
) -> float:
    """Number of different experts that the tokens of one step select, averaged over the expert layers.

    Runs one rank's share without all-reduces: hidden states differ from the true ones, the spread over experts does
    not.
    """
    counts: list[int] = []
    (embed,) = stage.layer_instances("embed").values()
    context = {**inputs, **embed.run(**{each.name: inputs[each.name] for each in embed.spec.inputs})}
    residual, delta = context.pop("residual"), context.pop("delta")
    feed_forwards = {**stage.layer_instances("dense"), **stage.layer_instances("decode_experts")}
    for name, attention in stage.layer_instances("decode_attention").items():
        given = {each.name: context[each.name] for each in attention.spec.inputs if each.name in context}
        pages = {each.name: state[f"{name}.{each.name}"] for each in attention.spec.state}
        made = attention.run(residual=residual, delta=delta, **given, **pages)
        half = f"{name.removesuffix('.attention')}.feed_forward"
        residual, delta = made["residual"], made["partial"]
        if f"{half}.router.weight" in weights:
            normed = rms_norm(residual + delta, weights[f"{half}.norm"], config.norm_eps)
            if not normed.isfinite().all():
                raise SystemExit(f"{half}: the residual stream is not finite")
            ids, _ = route_hidden(
                normed, weights[f"{half}.router.weight"], weights[f"{half}.router.bias"], None,
                num_groups=config.num_expert_groups, num_kept_groups=config.num_kept_groups,
                top_k=config.num_experts_per_token, scale=config.routed_scale,
            )  # fmt: skip
            counts.append(ids.unique().numel())
        made = feed_forwards[half].run(residual=residual, delta=delta)
        residual, delta = made["residual"], made["partial"]
    return statistics.mean(counts)
