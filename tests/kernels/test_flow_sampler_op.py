"""Operator of the DiT's CUDA kernels in a serving process, with a stand-in for the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mingc

_CALL = """
import sys
import torch
import mingc.runtime.engines.backends.aoti  # registers the op

def stand_in(hidden, history, noise, *others):
    return noise + 1, hidden.new_ones(len(noise) * (1 + noise.shape[1]), 1024), noise.new_zeros(len(noise))

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
keys = [key for key in ("CUDA", "CPU", "CompositeExplicitAutograd") if has_kernel("mingc::flow_sample", key)]
assert keys == ["CUDA"], f"not the bare kernel: {keys}"
stand_ins = torch.library.Library("mingc", "IMPL")
stand_ins.impl("flow_sample", stand_in, "CPU")
one = torch.zeros(1)
arguments = [torch.zeros(2, 896), torch.zeros(2, 32, 64), torch.zeros(2, 4, 64), one, one, one, one, one]
arguments += [[one], [one], [one], one, one, one, [one], one, one, one, "code"]
with torch.inference_mode():
    made = torch.ops.mingc.flow_sample.default(*arguments)
assert [tuple(each.shape) for each in made] == [(2, 4, 64), (10, 1024), (2,)]
assert made[0].eq(1).all()
compilers = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
assert not compilers, f"calling the op imports {compilers}"

from torch._subclasses import FakeTensorMode
with FakeTensorMode() as mode:
    fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    lists = [[mode.from_tensor(one)] if isinstance(each, list) else each for each in fakes]
    shapes = torch.ops.mingc.flow_sample.default(*lists)
assert [each.shape for each in shapes] == [each.shape for each in made]
"""


def test_a_server_calls_the_op_without_importing_a_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", _CALL], env=environment, check=True, timeout=300)
