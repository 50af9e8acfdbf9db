"""Flow matching and the aggregator for few requests in CUDA C++: GEMMs for few rows and everything between them.

At 74 rows a request the vendor's GEMMs spend more time starting and ending than multiplying. These kernels load their
weights while the kernel before them ends (programmatic dependent launch), split K over a cluster of thread blocks, and
fuse norm, activation and residual sum. They need a GPU with cluster kernels (`mingc.artifacts.target`) and the released
model's sizes; elsewhere `mingc.export.stages.cfm.Cfm` runs the plain form, which is the reference.
"""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.cuda import flow_sampler as cuda
from mingc.kernels.cuda.flow_sampler import BlockWeights, PatchInputs, PatchWeights, TransformerWeights
from mingc.kernels.dispatch import use_clusters

__all__ = ["BlockWeights", "PatchInputs", "PatchWeights", "TransformerWeights", "sample", "takes_patch"]

WIDTH, INNER, HEAD_SIZE = 1024, 4096, 64
PATCH, CHANNELS = 4, 64  # latents of a patch and their channels
HISTORY, LLM_WIDTH = 32, 896  # latents before the patch; size of the hidden state
MAX_STEPS = 32


def takes_patch(noise: Tensor, weights: PatchWeights) -> bool:
    """Whether `sample` supports these weights and an ODE state of this shape."""
    # The order matters: comparing the batch of a dynamic graph would specialize it.
    return (
        _takes(weights.dit, 1 + HISTORY + PATCH)
        and _takes(weights.aggregator, 1 + PATCH)
        and weights.condition.shape == (WIDTH, LLM_WIDTH)
        and weights.times.shape[0] <= MAX_STEPS
        and noise.shape[1:] == (PATCH, CHANNELS)
        and noise.shape[0] <= cuda.max_requests(noise.device)
    )


def _takes(weights: TransformerWeights, tokens: int) -> bool:
    first = weights.blocks[0]
    return (
        use_clusters(first.qkv)
        and first.qkv.shape == (3 * WIDTH, WIDTH)
        and first.up.shape == (INNER, WIDTH)
        and weights.embed.shape == (WIDTH, CHANNELS)
        and weights.cos.shape == (tokens, HEAD_SIZE // 2)
    )


def sample(inputs: PatchInputs, weights: PatchWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one patch of each of B requests. A request gives the same bits in every batch of a configuration.

    Returns: latents (B, P, C) float32, the aggregator's residual stream (B (1 + P), D) before its norm, and the stop
    probabilities (B,) float32.
    """
    return cuda.sample(inputs, weights)
