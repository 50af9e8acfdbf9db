"""Rotation and attention of a packed projection in one operation, for the vision encoder.

CUDA C++ computes large images in bfloat16 with the heads of the released model, on a GPU with cluster kernels
(`mingc.artifacts.target`). Everything else is `rotate_packed` and then `varlen_attention`, whose torch form is the
reference.

Shape letters: P patches, H heads, d head size, R = d/2 rotary angles.
"""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.cuda import rotary_varlen_attention as cuda
from mingc.kernels.dispatch import use_clusters
from mingc.kernels.rotate_packed import rotate_packed
from mingc.kernels.varlen_attention import Segments, varlen_attention

_MAX_SMALL = 1024  # patches up to which the two kernels are faster (benchmarks/NOTES-encoders.md)


def rotary_varlen_attention(qkv_P3Hd: Tensor, cos_PR: Tensor, sin_PR: Tensor, segments: Segments) -> Tensor:
    """Rotate queries and keys, then attend with each query to its visible keys.

    Args:
        qkv_P3Hd: (P, 3, H, d) queries, keys and values, finite also where no query sees them.
        cos_PR, sin_PR: (P, R) float32, as in `rotate_packed`.
        segments: from `make_segments` for one batch row of P keys. No range may be empty: the kernel could hang.

    Returns: (P, H, d) in the dtype of `qkv_P3Hd`.

    Raises: KernelError if the kernel cannot be compiled.
    """
    num_patches, _, heads, size = qkv_P3Hd.shape
    # The order matters: comparing the patches of a dynamic graph would specialize it.
    if use_clusters(qkv_P3Hd) and (heads, size) == (cuda.HEADS, cuda.SIZE) and num_patches > _MAX_SMALL:
        return cuda.rotary_varlen_attention(qkv_P3Hd, cos_PR, sin_PR, segments.bounds)
    q_PHd, k_PHd = rotate_packed(qkv_P3Hd, cos_PR, sin_PR)
    return varlen_attention(q_PHd[None], k_PHd[None], qkv_P3Hd[None, :, 2], segments)[0]
