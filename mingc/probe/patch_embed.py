"""Compares the vision encoder's patch embedding as a linear layer, as engines run it, with the equivalent conv3d.

Kernel, stride and patch have the same size, so the convolution yields one output per patch: the same dot products,
which vendor convolutions compute far slower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.parameters import VisionParameters
from mingc.errors import ConfigError
from mingc.probe.report import PatchEmbed
from mingc.probe.stopwatch import Stopwatch
from mingc.runtime.engines.stage_loader import opened_weights, weights_regions

_PATCHES = (256, 1024, 4096)
_MAX_REPETITIONS = 10
_BUDGET_MS = 5000.0  # for the timed calls of one form at one size
_MAX_CALL_MS = 2000.0  # larger sizes are skipped when one call is expected to take longer


def check_patch_embed(artifact: Artifact) -> None:
    """Raises: ConfigError when the artifact has no vision encoder."""
    if "vision_encoder" not in artifact.manifest.stages:
        raise ConfigError(
            "the artifact has no vision encoder", where="--compare patch-embed", fix="leave --compare out"
        )


def compare_patch_embed(
    artifact: Artifact, stopwatch: Stopwatch, progress: Callable[[str], None], notes: list[str]
) -> tuple[PatchEmbed, ...]:
    """Time both forms with the weights of a checked artifact on random patches, without engines or CUDA graphs.

    `progress` is called with each size before it starts. Sizes that would take too long are skipped, with a line in
    `notes`.
    """
    manifest = artifact.manifest
    vision = manifest.parameters_of("vision_encoder", VisionParameters)
    device = torch.device(manifest.fingerprint.device)
    names = ("patch_embed.weight", "patch_embed.bias")
    with opened_weights(weights_regions(artifact, manifest.stages["vision_encoder"], 0)) as files:
        weight, bias = (files[name].get_tensor(name).to(device) for name in names)
    block = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    kernel = weight.view(-1, *block)
    rows: list[PatchEmbed] = []
    for count in _PATCHES:
        if rows and (expected_ms := rows[-1].conv3d_ms * count / rows[-1].patches) > _MAX_CALL_MS:
            notes.append(
                f"patch embedding: sizes from {count} patches are left out, one conv3d call would take about "
                f"{expected_ms / 1000:.0f} s"
            )
            break
        progress(f"patch embedding of {count} patches")
        generator = torch.Generator(device).manual_seed(1)
        patches = torch.randn(count, weight.shape[1], generator=generator, device=device).to(weight.dtype)
        volume = patches.view(-1, *block)

        def convolve(volume: Tensor = volume) -> Tensor:
            return F.conv3d(volume, kernel, bias, stride=block[1:])

        def multiply(patches: Tensor = patches) -> Tensor:
            return F.linear(patches, weight, bias)

        conv_ms, linear_ms = (_least_ms(stopwatch, run) for run in (convolve, multiply))
        convolved, multiplied = convolve().flatten(1).float(), multiply().float()
        rows.append(
            PatchEmbed(
                patches=count,
                conv3d_ms=conv_ms,
                linear_ms=linear_ms,
                ratio=conv_ms / linear_ms,
                relative_difference=float((convolved - multiplied).abs().max() / multiplied.abs().max()),
            )
        )
    return tuple(rows)


def _least_ms(stopwatch: Stopwatch, run: Callable[[], Tensor]) -> float:
    """Least milliseconds of `run` with a cold cache, over as many calls as fit into the budget."""
    (once_ms,) = stopwatch.samples_ms(run, 1, cold=True)
    count = max(1, min(_MAX_REPETITIONS, int(_BUDGET_MS / max(once_ms, 1e-6))))
    return min(stopwatch.samples_ms(run, count, cold=True))
