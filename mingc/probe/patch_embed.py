"""The patch embedding of the vision encoder as the linear map that engines use, beside the convolution it is.

Every patch is as large as the kernel and its stride, so a three-dimensional convolution gives each patch one output:
the same sums of products, which vendors' convolutions compute far slower.
"""

from __future__ import annotations

import statistics

import torch
from torch.nn import functional as F

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.parameters import VisionParameters
from mingc.errors import ConfigError
from mingc.probe.report import PatchEmbed
from mingc.probe.stopwatch import Stopwatch
from mingc.runtime.engines.stage_loader import opened_weights

_PATCHES = (256, 1024, 4096)
_REPETITIONS = 10


def check_patch_embed(artifact: Artifact) -> None:
    """Raises: ConfigError when the artifact has no vision encoder."""
    if "vision_encoder" not in artifact.manifest.stages:
        raise ConfigError(
            "the artifact has no vision encoder", where="--compare patch-embed", fix="leave --compare out"
        )


def compare_patch_embed(artifact: Artifact, watch: Stopwatch) -> tuple[PatchEmbed, ...]:
    """Time both forms over the weights of a checked artifact and random patches, outside any engine or graph."""
    manifest = artifact.manifest
    vision = manifest.parameters_of("vision_encoder", VisionParameters)
    device = torch.device(manifest.fingerprint.device)
    with opened_weights(artifact.path(manifest.stages["vision_encoder"].weights[0])) as file:
        weight, bias = (file.get_tensor(f"patch_embed.{name}").to(device) for name in ("weight", "bias"))
    block = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    kernel = weight.view(-1, *block)
    rows = []
    for count in _PATCHES:
        generator = torch.Generator(device).manual_seed(1)
        patches = torch.randn(count, weight.shape[1], generator=generator, device=device).to(weight.dtype)
        volume = patches.view(-1, *block)
        convolved = F.conv3d(volume, kernel, bias, stride=block[1:]).flatten(1)
        multiplied = F.linear(patches, weight, bias)
        conv_ms, linear_ms = (
            statistics.median(watch.samples_ms(run, _REPETITIONS, cold=True))
            for run in (
                lambda volume=volume: F.conv3d(volume, kernel, bias, stride=block[1:]),
                lambda patches=patches: F.linear(patches, weight, bias),
            )
        )
        rows.append(
            PatchEmbed(
                patches=count,
                conv3d_ms=conv_ms,
                linear_ms=linear_ms,
                ratio=conv_ms / linear_ms,
                relative_difference=float(
                    (convolved - multiplied).float().abs().max() / multiplied.float().abs().max()
                ),
            )
        )
    return tuple(rows)
