"""Operator of `mingc.kernels.flow_sampler`: engines call it by name, with the machine code as an argument.

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
from mingc.kernels.cuda.nvrtc import (
    CudaModule,
    Launch,
    compile_source,
    pack,
    register_operator,
    tensor_map,
    unpack,
)

_SOURCE = Path(__file__).with_suffix(".cu")
_WIDTH, _INNER, _HEADS = 1024, 4096, 16
_SHAPES = {
    "qkv": (3 * _WIDTH, _WIDTH),
    "up": (_INNER, _WIDTH),
    "down": (_WIDTH, _INNER),
    "project": (_WIDTH, _WIDTH),
}
_SLICE = 64  # K of a slice, which one copy loads
_FEW_ROWS = 8  # of a tile; each kernel exists for this and for the rows of `_tile_rows`
_FEW_REQUESTS = 2  # up to here, requests with few rows have tiles of their own
_OUT_BLOCK_N, _OUT_CLUSTER_SIZE = 128, 8
_OUT_TOKENS = 48  # tokens of a head's queries, keys and values in shared memory
_ATTEND_BLOCKS, _ATTEND_THREADS = 8, 192  # blocks of a sequence, with two heads each
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
    """Inputs of B requests.

    Hidden state (B, LLM size), history (B, H, C), noise (B, P, C), noise of the steps (B, steps, P, C), guidance, sigma
    and temperature (B,); all but the hidden state are float32.
    """

    hidden: Tensor
    history: Tensor
    noise: Tensor
    step_noise: Tensor
    guidance: Tensor
    sigma: Tensor
    temperature: Tensor


def sample(inputs: PatchInputs, weights: PatchWeights) -> tuple[Tensor, Tensor, Tensor]:
    """See `mingc.kernels.flow_sampler`."""
    dit, aggregator = weights.dit, weights.aggregator
    edges = [dit.embed, dit.embed_bias, weights.project, weights.project_bias]
    others = [
        weights.condition, weights.condition_bias, weights.step_sizes, weights.stop, weights.stop_bias, weights.query,
        aggregator.embed, aggregator.embed_bias,
    ]  # fmt: skip
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.mingc.flow_sample(
        *(each.contiguous() for each in inputs),
        weights.times, edges, others, _flat(dit), dit.norm, dit.cos, dit.sin,
        _flat(aggregator), aggregator.norm, aggregator.cos, aggregator.sin, _code(inputs.hidden),
    )  # fmt: skip
    return out


def _flat(weights: TransformerWeights) -> list[Tensor]:
    return [tensor for block in weights.blocks for tensor in block]


def max_requests(device: torch.device) -> int:
    """The largest batch with a configuration for the GPU."""
    return max((config.max_requests for config in gpu_target(device).flow_sampler), default=0)


def _code(x: Tensor) -> str:
    """The GPU's configuration for the requests of `x` and the machine code compiled for it, packed."""
    target = gpu_target(x.device)
    config = next(each for each in target.flow_sampler if x.shape[0] <= each.max_requests)
    found = {name: getattr(config, name) for name in ("qkv", "up", "down", "project")}
    gemms = {name: dataclasses.asdict(gemm) for name, gemm in found.items() if gemm is not None}
    defines = [
        (f"{name}_{key}".upper(), value) for name, gemm in gemms.items() for key, value in gemm.items()
    ]
    defines.append(("TILE_ROWS", _tile_rows(config.tile_requests)))
    code = compile_source(_SOURCE, tuple(defines), target.architecture)
    numbers = {name: [*gemm.values()] for name, gemm in gemms.items()}
    return pack({**numbers, "tile_requests": [config.tile_requests]}, code)


def _config(values: Sequence[int]) -> ClusterGemmConfig:
    """A configuration from its packed fields."""
    block_n, cluster_size, num_stages = values
    return ClusterGemmConfig(block_n=block_n, cluster_size=cluster_size, num_stages=num_stages)


class _Kernels:
    """Compiled kernels on a device, and their launches."""

    def __init__(self, code: str) -> None:
        numbers, machine_code = unpack(code)
        (self.tile_requests,) = numbers.pop("tile_requests")
        self._tile_rows = _tile_rows(self.tile_requests)
        self.configs = {name: _config(values) for name, values in numbers.items()}
        launches = {f"mingc_dit_{name}_pdl": Launch(threads=256) for name in ("enter", "turn")}
        for name, config in self.configs.items():
            slices = _SHAPES[name][1] // config.cluster_size // _SLICE
            rows_of = {"": config.num_stages * self._tile_rows, "_few": slices * _FEW_ROWS}
            for suffix, rows in rows_of.items():
                if name == "project" and suffix:
                    continue  # few rows: one kernel with the attention
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
        if "project" in self.configs:
            launches["mingc_dit_attend_pdl"] = Launch(
                threads=_ATTEND_THREADS,
                shared_bytes=6 * _OUT_TOKENS * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
            )
        self._module = CudaModule(machine_code, launches)

    def gemm(
        self, name: str, pointers: Sequence[Tensor | None], numbers: Sequence[int], ahead: Tensor | None
    ) -> None:
        """Launch a GEMM of a block.

        Args:
            name: of the GEMM; `out` includes the attention before it. Or `attend`: attention alone.
            pointers: pointers of the struct `Gemm`, without `ahead`.
            numbers: rows, tile_rows, parts, tokens and kept of that struct.
            ahead: weights of a later GEMM to prefetch into the L2 cache, a share by each thread block.
        """
        x, weight = pointers[0], pointers[2]
        assert x is not None and weight is not None
        rows, tile_rows, _, tokens, kept = numbers
        if name == "attend":
            is_few, block_n, box_rows = False, _OUT_BLOCK_N, _OUT_TOKENS
            blocks = _ATTEND_BLOCKS * (rows // tokens)
        elif name == "out":
            is_few = kept <= _FEW_ROWS
            block_n, box_rows = _OUT_BLOCK_N, _OUT_TOKENS
            blocks = _WIDTH // block_n * _OUT_CLUSTER_SIZE * (rows // tokens)
        else:
            is_few = tile_rows <= _FEW_ROWS
            config = self.configs[name]
            block_n, box_rows = config.block_n, _FEW_ROWS if is_few else self._tile_rows
            blocks = _SHAPES[name][0] // block_n * config.cluster_size * -(-rows // tile_rows)
        share = 0 if ahead is None else ahead.numel() * ahead.element_size() // blocks // 16 * 16
        maps = [
            _map_of_outputs(weight, block_n),
            tensor_map(x, (x.shape[1], rows), (2 * x.shape[1],), (_SLICE, box_rows)),
        ]
        kernel = f"mingc_dit_{name}{'_few' if is_few else ''}_pdl"
        self._module.launch(kernel, blocks, [*pointers[:8], ahead, *pointers[8:]], [*numbers, share], maps)

    def requests_of_tile(self, rows: int, requests: int) -> int:
        """How many of some requests, each with `rows` rows, one thread block computes."""
        if rows <= _FEW_ROWS and requests <= _FEW_REQUESTS:
            return 1
        return min(requests, self._tile_rows // rows)

    def enter(self, requests: int, pointers: Sequence[Tensor], steps: int) -> None:
        """Launch the kernel before all steps; arguments: the struct `Enter`."""
        self._module.launch("mingc_dit_enter_pdl", requests * _ENTER_BLOCKS, pointers, [steps])

    def turn(self, requests: int, pointers: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Launch the kernel between two steps; arguments: the struct `Turn`."""
        self._module.launch("mingc_dit_turn_pdl", requests * _TURN_BLOCKS, pointers, numbers)


def _tile_rows(requests: int) -> int:
    """Rows of a tile of `requests` with 37 tokens in two sequences, a multiple of 8."""
    return -(-requests * 74 // 8) * 8


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
    """Residual stream of requests of some sequences through a transformer; fills the struct `Gemm` of the source.

    The kernel between steps writes `start`; each block allocates its own output. The last block computes only the last
    `kept` tokens of a sequence after its attention.
    """

    def __init__(
        self,
        requests: int,
        sequences: int,
        kept: int,
        cos: Tensor,
        sin: Tensor,
        like: Tensor,
        kernels: _Kernels,
    ) -> None:
        rows = requests * sequences * cos.shape[0]
        self.start = [
            like.new_empty(rows, _WIDTH), like.new_empty(rows, _WIDTH), cos.new_empty(rows, _TURN_BLOCKS)
        ]  # fmt: skip
        self.x, self.scaled, self.squares = self.start
        self._requests, self._sequences, self._kept = requests, sequences, kept
        self._cos, self._sin, self._kernels = cos, sin, kernels

    @property
    def tokens(self) -> int:
        """Tokens of a sequence in the stream at present."""
        return self.x.shape[0] // (self._requests * self._sequences)

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
            kept = self._kept if is_last else self.tokens
            if "project" in self._kernels.configs and kept > _FEW_ROWS:
                context = torch.empty_like(self.x)
                pointers = [qkv_rows, None, out, *[None] * 5, context, None, None]
                self._launch("attend", pointers, 0, kept, out)
                self._add("project", context, out, out_bias, mlp_norm, kept, ahead=up)
            else:
                self._add("out", qkv_rows, out, out_bias, mlp_norm, kept, ahead=up)
            up_rows = self._normed("up", up, up_bias, ahead=down)
            ahead = following if is_last else blocks[start + size + 1]
            self._add("down", up_rows, down, down_bias, next_norm, kept, ahead=ahead)

    def _normed(self, name: str, weight: Tensor, bias: Tensor, ahead: Tensor) -> Tensor:
        rows, parts = self.squares.shape
        out = self.x.new_empty(rows, _SHAPES[name][0])
        pointers = [
            self.scaled, self.squares, weight, bias, None, None, self._cos, self._sin, out, None, None
        ]  # fmt: skip
        self._launch(name, pointers, parts, self.tokens, ahead)
        return out

    def _add(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: Tensor,
        kept: int,
        ahead: Tensor | None,
    ) -> None:
        rows = self._requests * self._sequences * kept
        values, scaled = self.x.new_empty(rows, _WIDTH), self.x.new_empty(rows, _WIDTH)
        squares = self.squares.new_empty(rows, _WIDTH // _SQUARES_COLUMNS)
        pointers = [x, None, weight, bias, self.x, norm, None, None, values, scaled, squares]
        self._launch(name, pointers, 0, kept, ahead)
        self.x, self.scaled, self.squares = values, scaled, squares

    def _launch(
        self, name: str, pointers: Sequence[Tensor | None], parts: int, kept: int, ahead: Tensor | None
    ) -> None:
        x = pointers[0]
        assert x is not None
        rows, request_rows = x.shape[0], x.shape[0] // self._requests
        tile_rows = request_rows * self._kernels.requests_of_tile(request_rows, self._requests)
        self._kernels.gemm(name, pointers, [rows, tile_rows, parts, self._cos.shape[0], kept], ahead)


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
    steps, (requests, num_history) = times.shape[0], history.shape[:2]
    probability = noise.new_empty(requests)
    first = hidden.new_empty(requests, 2, steps, _WIDTH)
    tokens = hidden.new_empty(requests, num_history, _WIDTH)
    kernels.enter(
        requests,
        [hidden, history, condition, condition_bias, times, embed, embed_bias, stop, stop_bias, first, tokens,
         probability],
        steps,
    )  # fmt: skip
    stream = _Stream(requests, 2, noise.shape[1], cos, sin, hidden, kernels)
    aggregator_stream = _Stream(
        requests, 1, aggregator_cos.shape[0], aggregator_cos, aggregator_sin, hidden, kernels
    )
    state = noise
    for step in range(steps + 1):
        last = max(0, step - 1)  # the step that ends here; none before the first
        updated = torch.empty_like(noise) if step else noise
        ends, before = [stream.scaled, stream.squares], stream.tokens if step else 0
        update = [state, step_noise[:, last], sigma, temperature, step_sizes[last:], guidance, updated]
        if step < steps:
            begins = [first[:, :, step], tokens, embed, embed_bias, project, project_bias, blocks[0]]
            target, shape = stream, [cos.shape[0], 2, steps * _WIDTH, 0 if step else num_history]
        else:
            begins = [query, tokens, aggregator_embed, aggregator_bias, project, project_bias, aggregator[0]]
            target, shape = aggregator_stream, [aggregator_cos.shape[0], 1, 0, 0]
        kernels.turn(
            requests,
            [*begins, *ends, *update, *target.start],
            [before, stream.squares.shape[1], *shape, step_noise.stride(0)],
        )
        state = updated
        if step < steps:
            stream.run_blocks(blocks, norm, blocks[1] if step + 1 < steps else aggregator[1])
    aggregator_stream.run_blocks(aggregator, aggregator_norm, None)
    return state, aggregator_stream.x, probability


def _sample_fake(
    hidden: Tensor, history: Tensor, noise: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    requests, patch, _ = noise.shape
    return (
        torch.empty_like(noise),
        hidden.new_empty(requests * (1 + patch), _WIDTH),
        noise.new_empty(requests),
    )


register_operator("flow_sample", _sample, _sample_fake)
