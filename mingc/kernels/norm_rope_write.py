"""Query and key norms, rotary embedding and the KV cache write, between the packed QKV projection and attention."""

from __future__ import annotations

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.mrope import apply_rope
from mingc.kernels.rms_norm import rms_norm


def norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    eps: float,
) -> Tensor:
    """Normalize and rotate queries and keys; write keys and values to the pools. Returns the queries.

    Args:
        qkv: (T, Hq + 2 Hk, d), heads of queries, keys, values.
        q_norm, k_norm: (d,), weights of the RMS norm over each head.
        cos, sin: (T, rot / 2) float32; the first rot values of a head are rotated, value f with value f + rot / 2.
        rows: (T,) int64, the pool row of each token. Padding tokens may share rows, which are never read.
        k_pages, v_pages: (KV, Hk, d), mutated at `rows`.

    Returns: (T, Hq, d) (spec: thinker.md §2.1, §3).
    """
    if use_triton(qkv, qkv.shape[-1]):
        from mingc.kernels.triton import norm_rope_write as gpu

        ready: Tensor = gpu.norm_rope_write(
            qkv.contiguous(), q_norm, k_norm, cos, sin, rows, k_pages, v_pages, eps
        )
        return ready
    num_kv_heads = k_pages.shape[1]
    q, k, v = qkv.split_with_sizes((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    # Write to the pool itself, not to a view of it: otherwise the compiler copies the pool.
    k_pages.index_put_((rows,), apply_rope(rms_norm(k, k_norm, eps), cos, sin))
    v_pages.index_put_((rows,), v)
    return apply_rope(rms_norm(q, q_norm, eps), cos, sin)
