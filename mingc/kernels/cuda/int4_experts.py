"""GEMMs of `mingc.kernels.moe_experts` with INT4 weights for decode steps and chunks of up to some hundred tokens.

Engines call the operator by name, with the machine code as an argument. Importing this module registers it. It needs
neither Triton nor a compiler.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.cuda.nvrtc import CudaModule, Launch, compile_source, pack, register_operator, unpack

BLOCK_ROWS = 16  # (token, expert) pairs of one expert that a thread block multiplies
_SOURCE = Path(__file__).with_suffix(".cu")
_ARRANGE, _UP, _DOWN = "mingc_int4_arrange", "mingc_int4_up", "mingc_int4_down"
_THREADS = 256
_GROUP = 128  # inputs that share a scale
_CHUNK = 4  # groups in a stage
_STAGES = 3  # of rows in shared memory
_MAX_GROUPS = 32
_UP_COLUMNS, _DOWN_COLUMNS = 128, 256  # of a thread block
_PIECE = 8  # dims that a thread arranges


def fits(hidden_size: int, intermediate_size: int) -> bool:
    """Whether the kernels take experts of these sizes, the intermediate size of one rank."""
    return all(
        size % (_CHUNK * _GROUP) == 0 and size <= _MAX_GROUPS * _GROUP
        for size in (hidden_size, intermediate_size)
    )


def machine_code(device: torch.device) -> str:
    """Packed machine code for the GPU, compiled once a process.

    Raises: KernelError if NVRTC is missing or cannot compile the source.
    """
    defines = (("ROWS", BLOCK_ROWS), ("CHUNK", _CHUNK), ("STAGES", _STAGES), ("MAX_GROUPS", _MAX_GROUPS))
    return pack({}, compile_source(_SOURCE, defines, gpu_target(device).architecture))


# As in `mingc.kernels.dispatch`: Dynamo cannot trace the compiler's calls.
machine_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _module(code: str, device: int) -> CudaModule:
    stage_bytes = BLOCK_ROWS * (2 * _CHUNK * _GROUP + 64)
    gemm = Launch(threads=_THREADS, shared_bytes=_STAGES * stage_bytes + 4 * _MAX_GROUPS * BLOCK_ROWS)
    with torch.cuda.device(device):
        return CudaModule(unpack(code)[1], {_ARRANGE: Launch(threads=_THREADS), _UP: gemm, _DOWN: gemm})


def _multiply(
    x: Tensor,
    order: Tensor,
    table: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor,
    down_scale: Tensor,
    blocks: int,
    code: str,
) -> Tensor:
    """The operator `int4_experts`: outputs (R, D) bfloat16 of all (token, expert) pairs, not yet weighted.

    It arranges the tokens, then multiplies twice.

    Args:
        x: (T, D) bfloat16.
        order, table: from `mingc_moe_sort` with blocks of `BLOCK_ROWS` pairs: order (R,), table (3, any) int32.
        gate_up, down, gate_up_scale, down_scale: INT4, see `mingc.kernels.quantized`, of sizes that `fits` accepts.
        blocks: columns of the table that may be in use.
        code: from `machine_code`.
    """
    (tokens, hidden_size), pairs, width = x.shape, order.shape[0], table.shape[1]
    inner = gate_up.shape[1] // 2
    x = x.contiguous()
    arranged, sums = torch.empty_like(x), x.new_empty(tokens, hidden_size // _GROUP, dtype=torch.float32)
    hidden = x.new_empty(pairs, inner)
    hidden_sums = x.new_empty(pairs, inner // _GROUP, dtype=torch.float32)
    out = x.new_empty(pairs, hidden_size)
    module = _module(code, x.device.index or 0)
    pieces = tokens * hidden_size // _PIECE
    module.launch(_ARRANGE, -(-pieces // _THREADS), [x, arranged, sums], [pieces])
    module.launch(
        _UP, blocks * (inner // _UP_COLUMNS),
        [arranged, sums, order, table, gate_up, gate_up_scale, hidden, hidden_sums],
        [pairs // tokens, hidden_size, inner, width],
    )  # fmt: skip
    module.launch(
        _DOWN, blocks * (hidden_size // _DOWN_COLUMNS),
        [hidden, hidden_sums, order, table, down, down_scale, out, None],
        [pairs // tokens, inner, hidden_size, width],
    )  # fmt: skip
    return out


def _multiply_fake(x: Tensor, order: Tensor, *_: object) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


register_operator("int4_experts", _multiply, _multiply_fake)
