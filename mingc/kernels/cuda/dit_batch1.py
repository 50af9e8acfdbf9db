"""Operator of `mingc.kernels.dit_batch1`: engines call it by name, with the machine code as an argument.

Importing this module registers it. It needs neither Triton nor a compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mingc.artifacts.target import ClusterGemmConfig
from mingc.host.machine import gpu_target
from mingc.kernels.cuda.nvrtc import CudaModule, Launch, compile_source, pack, tensor_map, unpack

_SOURCE = Path(__file__).with_suffix(".cu")
_WIDTH, _INNER, _HEADS = 1024, 4096, 16
_SHAPES = {
    "qkv": (3 * _WIDTH, _WIDTH),
    "out": (_WIDTH, _WIDTH),
    "up": (_INNER, _WIDTH),
    "down": (_WIDTH, _INNER),
}
_SLICE = 64  # K of a slice, which one copy loads
_MOST_ROWS, _FEW_ROWS = 80, 8  # each kernel exists for both
_OUT_BLOCK_N, _OUT_CLUSTER_SIZE = 128, 8
_OUT_TOKENS = 48  # tokens of a head's queries, keys and values in shared memory
_ALIGNMENT = 1024  # of slices in shared memory
_BARRIERS_BYTES = 128
_SQUARES_COLUMNS = 64  # columns that one stored sum of squares covers
_ENTER_BLOCKS = 128 + 8 + 1  # condition, history, stop head
_TURN_BLOCKS = 8  # one cluster between steps; each block stores a sum of squares a row


class BlockWeights(NamedTuple):
    """Weights of one block: norms (D,), GEMM weights (out, in) with biases."""

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
    """Weights of a transformer: blocks, final norm (D,), rotary tables (T, d/2) float32, latent embedding (D, C)."""

    blocks: Sequence[BlockWeights]
    norm: Tensor
    cos: Tensor
    sin: Tensor
    embed: Tensor
    embed_bias: Tensor


class PatchWeights(NamedTuple):
    """Weights of one patch: the DiT and its projection (C, D), the aggregator and its first token (1, D).

    Also the condition's projection (D, LLM size), time embeddings (steps, D) and step sizes (steps,) float32, and the
    stop head (2, LLM size).
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
    """Inputs of one request.

    Hidden state (1, LLM size), history (1, H, C), noise (1, P, C), noise of the steps (1, steps, P, C), guidance, sigma
    and temperature (1,); all but the hidden state are float32.
    """

    hidden: Tensor
    history: Tensor
    noise: Tensor
    step_noise: Tensor
    guidance: Tensor
    sigma: Tensor
    temperature: Tensor


def sample(inputs: PatchInputs, weights: PatchWeights) -> tuple[Tensor, Tensor, Tensor]:
    """See `mingc.kernels.dit_batch1`."""
    dit, aggregator = weights.dit, weights.aggregator
    edges = [dit.embed, dit.embed_bias, weights.project, weights.project_bias]
    others = [
        weights.condition, weights.condition_bias, weights.step_sizes, weights.stop, weights.stop_bias, weights.query,
        aggregator.embed, aggregator.embed_bias,
    ]  # fmt: skip
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.mingc.dit_batch1_sample(
        *(each.contiguous() for each in inputs),
        weights.times, edges, others, _flat(dit), dit.norm, dit.cos, dit.sin,
        _flat(aggregator), aggregator.norm, aggregator.cos, aggregator.sin, _code(inputs.hidden),
    )  # fmt: skip
    return out


def _flat(weights: TransformerWeights) -> list[Tensor]:
    return [tensor for block in weights.blocks for tensor in block]


def _code(x: Tensor) -> str:
    """The configurations of the GPU and the machine code compiled for them, packed."""
    target = gpu_target(x.device)
    configs = {name: dataclasses.asdict(config) for name, config in target.dit_batch1.items()}
    defines = tuple(
        (f"{name}_{key}".upper(), value) for name, config in configs.items() for key, value in config.items()
    )
    code = compile_source(_SOURCE, defines, target.architecture)
    return pack({name: [*config.values()] for name, config in configs.items()}, code)


def _config(values: Sequence[int]) -> ClusterGemmConfig:
    """A configuration from its packed fields."""
    block_n, cluster_size, num_stages = values
    return ClusterGemmConfig(block_n=block_n, cluster_size=cluster_size, num_stages=num_stages)


class _Kernels:
    """Compiled kernels on a device, and their launches."""

    def __init__(self, code: str) -> None:
        numbers, machine_code = unpack(code)
        self.configs = {name: _config(values) for name, values in numbers.items()}
        launches = {f"mingc_dit_{name}_pdl": Launch(threads=256) for name in ("enter", "turn")}
        for name, config in self.configs.items():
            slices = _SHAPES[name][1] // config.cluster_size // _SLICE
            for suffix, rows in (("", config.num_stages * _MOST_ROWS), ("_few", slices * _FEW_ROWS)):
                launches[f"mingc_dit_{name}{suffix}_pdl"] = Launch(
                    threads=2 * config.block_n,
                    shared_bytes=(slices * config.block_n + rows) * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
                    spread=True,
                )
        out = Launch(
            threads=2 * _OUT_BLOCK_N,
            shared_bytes=(2 * _OUT_BLOCK_N + 6 * _OUT_TOKENS) * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
            spread=True,
        )
        launches |= {"mingc_dit_out_pdl": out, "mingc_dit_out_few_pdl": out}
        self._module = CudaModule(machine_code, launches)

    def gemm(
        self, name: str, pointers: Sequence[Tensor | None], numbers: Sequence[int], ahead: Tensor | None
    ) -> None:
        """Launch one of the four GEMMs of a block.

        Args:
            name: of the GEMM; `out` includes the attention before it.
            pointers: pointers of the struct `Gemm`, without `ahead`.
            numbers: rows, parts and tokens of that struct.
            ahead: weights of a later GEMM to prefetch into the L2 cache, a share by each thread block.
        """
        x, weight = pointers[0], pointers[2]
        assert x is not None and weight is not None
        rows, _, tokens = numbers
        if name == "out":
            block_n, box_rows = _OUT_BLOCK_N, _OUT_TOKENS
            blocks = _WIDTH // block_n * _OUT_CLUSTER_SIZE * (rows // tokens)
        else:
            config = self.configs[name]
            block_n, box_rows = config.block_n, _FEW_ROWS if rows <= _FEW_ROWS else _MOST_ROWS
            blocks = _SHAPES[name][0] // block_n * config.cluster_size
        share = 0 if ahead is None else ahead.numel() * ahead.element_size() // blocks // 16 * 16
        maps = [
            _map_of_outputs(weight, block_n),
            tensor_map(x, (x.shape[1], rows), (2 * x.shape[1],), (_SLICE, box_rows)),
        ]
        kernel = f"mingc_dit_{name}{'_few' if rows <= _FEW_ROWS else ''}_pdl"
        self._module.launch(kernel, blocks, [*pointers[:8], ahead, *pointers[8:]], [*numbers, share], maps)

    def enter(self, pointers: Sequence[Tensor], steps: int) -> None:
        """Launch the kernel before all steps; arguments: the struct `Enter`."""
        self._module.launch("mingc_dit_enter_pdl", _ENTER_BLOCKS, pointers, [steps])

    def turn(self, pointers: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Launch the kernel between two steps; arguments: the struct `Turn`."""
        self._module.launch("mingc_dit_turn_pdl", _TURN_BLOCKS, pointers, numbers)


def _map_of_outputs(weight: Tensor, block_n: int) -> bytes:
    """Tensor map that loads `block_n` outputs, the even ones of every 16 first: a thread then has two adjacent ones."""
    outputs, depth = weight.shape
    strides = [2 * depth * step for step in (2, 1, 16)]
    return tensor_map(weight, (depth, 8, 2, outputs // 16), strides, (_SLICE, 8, 2, block_n // 16))


@functools.cache
def _kernels(code: str, device: int) -> _Kernels:
    with torch.cuda.device(device):
        return _Kernels(code)


class _Stream:
    """Residual stream of some sequences through a transformer; fills the struct `Gemm` of the source.

    The kernel between steps writes `start`; each block allocates its own output.
    """

    def __init__(self, sequences: int, cos: Tensor, sin: Tensor, like: Tensor, kernels: _Kernels) -> None:
        rows = sequences * cos.shape[0]
        self.start = [
            like.new_empty(rows, _WIDTH), like.new_empty(rows, _WIDTH), cos.new_empty(rows, _TURN_BLOCKS)
        ]  # fmt: skip
        self.x, self.scaled, self.squares = self.start
        self._cos, self._sin, self._kernels = cos, sin, kernels

    def run_blocks(self, blocks: list[Tensor], last_norm: Tensor, following: Tensor | None) -> None:
        """Run all blocks from `start`; their parameters are in the order of `BlockWeights`.

        `following` is the first weight matrix after them, to prefetch.
        """
        self.x, self.scaled, self.squares = self.start
        size = 10
        for start in range(0, len(blocks), size):
            _, qkv, qkv_bias, out, out_bias, mlp_norm, up, up_bias, down, down_bias = blocks[
                start : start + size
            ]
            is_last = start + size == len(blocks)
            next_norm = last_norm if is_last else blocks[start + size]
            qkv_rows = self._normed("qkv", qkv, qkv_bias, ahead=out)
            self._add("out", qkv_rows, out, out_bias, mlp_norm, ahead=up)
            up_rows = self._normed("up", up, up_bias, ahead=down)
            ahead = following if is_last else blocks[start + size + 1]
            self._add("down", up_rows, down, down_bias, next_norm, ahead=ahead)

    def _normed(self, name: str, weight: Tensor, bias: Tensor, ahead: Tensor) -> Tensor:
        rows, parts = self.squares.shape
        out = self.x.new_empty(rows, _SHAPES[name][0])
        pointers = [
            self.scaled, self.squares, weight, bias, None, None, self._cos, self._sin, out, None, None
        ]  # fmt: skip
        self._kernels.gemm(name, pointers, [rows, parts, self._cos.shape[0]], ahead)
        return out

    def _add(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, ahead: Tensor | None
    ) -> None:
        values, scaled = torch.empty_like(self.x), torch.empty_like(self.x)
        squares = self.squares.new_empty(values.shape[0], _WIDTH // _SQUARES_COLUMNS)
        pointers = [x, None, weight, bias, self.x, norm, None, None, values, scaled, squares]
        self._kernels.gemm(name, pointers, [values.shape[0], 0, self._cos.shape[0]], ahead)
        self.x, self.scaled, self.squares = values, scaled, squares


def _sample(
    hidden: Tensor,
    history: Tensor,
    noise: Tensor,
    step_noise: Tensor,
    guidance: Tensor,
    sigma: Tensor,
    temperature: Tensor,
    times: Tensor,
    edges: list[Tensor],
    others: list[Tensor],
    blocks: list[Tensor],
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    aggregator: list[Tensor],
    aggregator_norm: Tensor,
    aggregator_cos: Tensor,
    aggregator_sin: Tensor,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    embed, embed_bias, project, project_bias = edges
    condition, condition_bias, step_sizes, stop, stop_bias, query, aggregator_embed, aggregator_bias = others
    kernels = _kernels(code, hidden.device.index or 0)
    steps, num_history = times.shape[0], history.shape[1]
    probability = noise.new_empty(1)
    first, tokens = hidden.new_empty(2, steps, _WIDTH), hidden.new_empty(num_history, _WIDTH)
    kernels.enter(
        [hidden, history, condition, condition_bias, times, embed, embed_bias, stop, stop_bias, first, tokens,
         probability],
        steps,
    )  # fmt: skip
    stream = _Stream(2, cos, sin, hidden, kernels)
    aggregator_stream = _Stream(1, aggregator_cos, aggregator_sin, hidden, kernels)
    state = noise
    for step in range(steps + 1):
        last = max(0, step - 1)  # the step that ends here; none before the first
        updated = torch.empty_like(noise) if step else noise
        ends, before = [stream.scaled, stream.squares], cos.shape[0] if step else 0
        update = [state, step_noise[:, last], sigma, temperature, step_sizes[last:], guidance, updated]
        if step < steps:
            begins = [first[:, step], tokens, embed, embed_bias, project, project_bias, blocks[0]]
            target, shape = stream, [cos.shape[0], 2, steps * _WIDTH, 0 if step else num_history]
        else:
            begins = [query, tokens, aggregator_embed, aggregator_bias, project, project_bias, aggregator[0]]
            target, shape = aggregator_stream, [aggregator_cos.shape[0], 1, 0, 0]
        kernels.turn([*begins, *ends, *update, *target.start], [before, stream.squares.shape[1], *shape])
        state = updated
        if step < steps:
            stream.run_blocks(blocks, norm, blocks[1] if step + 1 < steps else aggregator[1])
    aggregator_stream.run_blocks(aggregator, aggregator_norm, None)
    return state, aggregator_stream.x, probability


def _sample_fake(
    hidden: Tensor, history: Tensor, noise: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(noise), hidden.new_empty(1 + noise.shape[1], _WIDTH), noise.new_empty(1)


# Not `torch.library.custom_op`: its first call imports torch's compiler, which adds seconds to a server's start.
_OPS = torch.library.Library("mingc", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS.define(  # type: ignore[no-untyped-call]
    "dit_batch1_sample" + torch.library.infer_schema(_sample, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OPS.impl("dit_batch1_sample", _sample, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("mingc::dit_batch1_sample", _sample_fake, lib=_OPS)
