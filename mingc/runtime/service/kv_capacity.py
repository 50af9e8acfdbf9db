"""Number of tokens that the thinker's KV pages hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mingc.artifacts.manifest import Manifest
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError

_MIN_TOKENS = 16384
# Of the memory that is free after everything else is loaded; the rest is for CUDA graphs and buffers of thinker steps.
_CUDA_SHARE = 0.8


def kv_tokens(
    manifest: Manifest, decoder: str, devices: Sequence[torch.device], *, requested: int | None, context: int
) -> int:
    """Tokens as `requested`, else by free memory on a GPU, or a few requests of `context` tokens on a CPU.

    Call it after everything else is loaded on every rank: it measures the free memory of the fullest of `devices`.
    Raises: ArtifactError when the decoder has no attention graph.
    """
    if requested is not None:
        return requested
    if devices[0].type != "cuda":
        return max(context, _MIN_TOKENS)
    record = manifest.stages[decoder].graphs.get("decode_attention")
    if record is None:
        raise ArtifactError(
            f"stage {decoder} has no graph decode_attention", where="manifest.json", fix="export again"
        )
    attention = record.spec
    row_bytes = len(attention.layer_instances) * sum(
        torch_dtype(tensor.dtype).itemsize * math.prod(size for size in tensor.shape if isinstance(size, int))
        for tensor in attention.state
    )
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    return max(context, int(free * _CUDA_SHARE) // row_bytes)
