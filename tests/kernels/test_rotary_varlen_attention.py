"""Rotation and attention in one operation: the plain path, the operator's shape and cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mingc
from mingc.export.cost.kernel_cost import KERNELS
from mingc.kernels.rotary_varlen_attention import rotary_varlen_attention
from mingc.kernels.varlen_attention import make_segments


@pytest.mark.parametrize(("heads", "size"), [(2, 12), (16, 72)])
def test_queries_and_keys_are_rotated_and_see_their_range(heads: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(10, 3, heads, size, generator=generator)
    angles = 6 * torch.rand(10, size // 2, generator=generator)
    bounds = torch.tensor([[0, 4]] * 4 + [[4, 10]] * 6)[None]
    segments = make_segments(bounds, qkv[None, :, 0].flatten(2), heads)
    got = rotary_varlen_attention(qkv, angles.cos(), angles.sin(), segments)
    low, high = qkv.double().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.exp(1j * angles.double())[:, None, None]
    q, k, v = turned[:, 0], turned[:, 1], qkv[:, 2].double()
    for query, (start, end) in enumerate(bounds[0].tolist()):
        # The real part of a product with the conjugate sums the products of both halves.
        scores = (q[query] * k[start:end].conj()).real.sum(-1) / size**0.5
        expected = torch.einsum("kh,khd->hd", scores.softmax(0), v[start:end])
        torch.testing.assert_close(got[query].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_operator_has_the_shape_and_the_cost_of_attention() -> None:
    operator = torch.ops.mingc.rotary_varlen_attention.default
    with FakeTensorMode():
        tables = torch.empty(30, 36), torch.empty(30, 36)
        given = [torch.empty(30, 3, 16, 72), *tables, torch.empty(1, 30, 2, dtype=torch.int32)]
        assert operator(*given, "code").shape == (30, 16, 72)
    names = [each.name for each in operator._schema.arguments]
    shapes = {name: each.shape for name, each in zip(names, given, strict=False)}
    assert KERNELS["rotary_varlen_attention"](shapes, {}).flops == 4 * 30 * 15 * 16 * 72


_CALL = """
import sys
import torch
import mingc.runtime.engines.backends.aoti  # registers the ops

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
keys = ("CUDA", "CPU", "CompositeExplicitAutograd")
for name in ("mingc::rotary_varlen_attention", "mingc::int4_experts"):
    assert [key for key in keys if has_kernel(name, key)] == ["CUDA"]
compilers = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
assert not compilers, compilers
"""


def test_a_server_registers_the_operators_without_importing_a_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", _CALL], env=environment, check=True, timeout=300)
