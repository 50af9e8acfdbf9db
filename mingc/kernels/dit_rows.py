"""Flow matching and the aggregator at batch 1: kernels of their own for few rows, and for what is between them.

At 74 rows the vendor's products take longer to begin and to end than to multiply. These begin early (their weights
come while the kernel before them ends), split the depth over a cluster of thread blocks, and take norm, activation
and residual sum with them. Only on CUDA of Hopper's architecture and for the released geometry; the reference is
what `Cfm` does elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from mingc.kernels.dispatch import use_clusters

WIDTH, INNER, HEAD_SIZE = 1024, 4096, 64
PATCH, CHANNELS = 4, 64  # latents of a patch and their channels
HISTORY, LLM_WIDTH = 32, 896  # latents before the patch; of the hidden state
MAX_STEPS = 32


class BlockWeights(NamedTuple):
    """One block: norms (D,), products (out, in) with biases."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    mlp_norm: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class TransformerWeights(NamedTuple):
    """Blocks, the norm (D,) after them, rope tables (T, d/2) float32, the embedding (D, C) of its latents."""

    blocks: Sequence[BlockWeights]
    norm: Tensor
    cos: Tensor
    sin: Tensor
    embed: Tensor
    embed_bias: Tensor


class PatchWeights(NamedTuple):
    """The DiT and its projection (C, D), the aggregator and its first token (1, D), and what is before either.

    The condition's product (D, LLM width), time embeddings (steps, D) and step sizes (steps,) float32, and the stop
    head (2, LLM width).
    """

    dit: TransformerWeights
    project: Tensor
    project_bias: Tensor
    aggregator: TransformerWeights
    query: Tensor
    condition: Tensor
    condition_bias: Tensor
    times: Tensor
    step_sizes: Tensor
    stop: Tensor
    stop_bias: Tensor


class PatchInputs(NamedTuple):
    """Inputs of one request: hidden state (1, LLM width), history (1, H, C), noise (1, P, C), noise of the steps
    (1, steps, P, C), guidance, sigma and temperature (1,): all float32 but the first."""

    hidden: Tensor
    history: Tensor
    noise: Tensor
    step_noise: Tensor
    guidance: Tensor
    sigma: Tensor
    temperature: Tensor


def takes_patch(noise: Tensor, weights: PatchWeights) -> bool:
    """Whether `sample` is there for ODE states of this shape."""
    # In this order: the batch of a dynamic graph must not be asked for its size.
    return (
        _takes(weights.dit, 1 + HISTORY + PATCH)
        and _takes(weights.aggregator, 1 + PATCH)
        and weights.condition.shape == (WIDTH, LLM_WIDTH)
        and weights.times.shape[0] <= MAX_STEPS
        and noise.shape == (1, PATCH, CHANNELS)
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
    """One patch: latents (1, P, C) float32, the aggregator's stream (1 + P, D) before its norm, and the stop
    probability (1,) float32."""
    from mingc.kernels.gpu import dit_rows as gpu

    return gpu.sample(inputs, weights)
