"""`mingc.kernels.dit_batch1` on CUDA: its op, which engines call by name with machine code inside.

Importing this registers it. It needs neither Triton nor a compiler.
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
from mingc.host import gpu_target
from mingc.kernels.cuda.nvrtc import CudaModule, Launch, compile_source, pack, tensor_map, unpack

_SOURCE = Path(__file__).with_suffix(".cu")
_WIDTH, _INNER, _HEADS = 1024, 4096, 16
_SHAPES = {
    "qkv": (3 * _WIDTH, _WIDTH),
    "out": (_WIDTH, _WIDTH),
    "up": (_INNER, _WIDTH),
    "down": (_WIDTH, _INNER),
}
_SLICE = 64  # depth of a slice, which is what one copy brings of rows or outputs
_MOST_ROWS, _FEW_ROWS = 80, 8  # each kernel is there for either
_OUT_COLUMNS, _OUT_SPLITS = 128, 8
_OUT_TOKENS = 48  # of queries, keys and values of a head in shared memory
_ALIGNMENT = 1024  # of slices in shared memory
_BARRIERS_BYTES = 128
_SQUARES_COLUMNS = 64  # of the columns of a row of which one sum of squares is left
_ENTER_BLOCKS = 128 + 8 + 1  # for the condition, for the history, for the stop head
_TURN_BLOCKS = 8  # of the one cluster between steps; each leaves a sum of squares a row


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


def sample(inputs: PatchInputs, weights: PatchWeights) -> tuple[Tensor, Tensor, Tensor]:
    """See `mingc.kernels.dit_batch1`."""
    dit, heard = weights.dit, weights.aggregator
    edges = [dit.embed, dit.embed_bias, weights.project, weights.project_bias]
    others = [
        weights.condition, weights.condition_bias, weights.step_sizes, weights.stop, weights.stop_bias, weights.query,
        heard.embed, heard.embed_bias,
    ]  # fmt: skip
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.mingc.dit_batch1_sample(
        *(each.contiguous() for each in inputs),
        weights.times, edges, others, _flat(dit), dit.norm, dit.cos, dit.sin,
        _flat(heard), heard.norm, heard.cos, heard.sin, _code(inputs.hidden),
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
    """The kernels of one machine code on a device, and how each is launched."""

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
            threads=2 * _OUT_COLUMNS,
            shared_bytes=(2 * _OUT_COLUMNS + 6 * _OUT_TOKENS) * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
            spread=True,
        )
        launches |= {"mingc_dit_out_pdl": out, "mingc_dit_out_few_pdl": out}
        self._module = CudaModule(machine_code, launches)

    def product(
        self, name: str, pointers: Sequence[Tensor | None], numbers: Sequence[int], ahead: Tensor | None
    ) -> None:
        """One of the four products of a block.

        Args:
            name: which; `out` does the attention before it too.
            pointers: those of the struct `Product` but for `ahead`.
            numbers: rows, parts and tokens of that struct.
            ahead: weights that a later product reads, fetched into the second-level cache, a share by each block.
        """
        x, weight = pointers[0], pointers[2]
        assert x is not None and weight is not None
        rows, _, tokens = numbers
        if name == "out":
            block_n, box_rows = _OUT_COLUMNS, _OUT_TOKENS
            blocks = _WIDTH // block_n * _OUT_SPLITS * (rows // tokens)
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
        """What is before all steps: the struct `Enter`."""
        self._module.launch("mingc_dit_enter_pdl", _ENTER_BLOCKS, pointers, [steps])

    def turn(self, pointers: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """What is between two steps: the struct `Turn`."""
        self._module.launch("mingc_dit_turn_pdl", _TURN_BLOCKS, pointers, numbers)


def _map_of_outputs(weight: Tensor, block_n: int) -> bytes:
    """A copy brings so many outputs; of every 16 the even ones first, so that a thread gets two neighbours."""
    outputs, depth = weight.shape
    strides = [2 * depth * step for step in (2, 1, 16)]
    return tensor_map(weight, (depth, 8, 2, outputs // 16), strides, (_SLICE, 8, 2, block_n // 16))


@functools.cache
def _kernels(code: str, device: int) -> _Kernels:
    with torch.cuda.device(device):
        return _Kernels(code)


class _Stream:
    """The residual stream of some sequences on its way through a transformer: fills the struct `Product` of the source.

    A turn writes where it begins; blocks leave it in tensors of their own.
    """

    def __init__(self, sequences: int, cos: Tensor, sin: Tensor, like: Tensor, kernels: _Kernels) -> None:
        rows = sequences * cos.shape[0]
        self.start = [
            like.new_empty(rows, _WIDTH), like.new_empty(rows, _WIDTH), cos.new_empty(rows, _TURN_BLOCKS)
        ]  # fmt: skip
        self.x, self.scaled, self.squares = self.start
        self._cos, self._sin, self._kernels = cos, sin, kernels

    def through(self, blocks: list[Tensor], last_norm: Tensor, following: Tensor | None) -> None:
        """All blocks, their parameters in the order of `BlockWeights`, from the start.

        `following` is the first matrix that comes after them.
        """
        self.x, self.scaled, self.squares = self.start
        size = 10
        for start in range(0, len(blocks), size):
            _, qkv, qkv_bias, out, out_bias, mlp_norm, up, up_bias, down, down_bias = blocks[
                start : start + size
            ]
            is_last = start + size == len(blocks)
            next_norm = last_norm if is_last else blocks[start + size]
            turned = self._normed("qkv", qkv, qkv_bias, ahead=out)
            self._add("out", turned, out, out_bias, mlp_norm, ahead=up)
            wide = self._normed("up", up, up_bias, ahead=down)
            ahead = following if is_last else blocks[start + size + 1]
            self._add("down", wide, down, down_bias, next_norm, ahead=ahead)

    def _normed(self, name: str, weight: Tensor, bias: Tensor, ahead: Tensor) -> Tensor:
        rows, parts = self.squares.shape
        out = self.x.new_empty(rows, _SHAPES[name][0])
        pointers = [
            self.scaled, self.squares, weight, bias, None, None, self._cos, self._sin, out, None, None
        ]  # fmt: skip
        self._kernels.product(name, pointers, [rows, parts, self._cos.shape[0]], ahead)
        return out

    def _add(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, ahead: Tensor | None
    ) -> None:
        values, scaled = torch.empty_like(self.x), torch.empty_like(self.x)
        squares = self.squares.new_empty(values.shape[0], _WIDTH // _SQUARES_COLUMNS)
        pointers = [x, None, weight, bias, self.x, norm, None, None, values, scaled, squares]
        self._kernels.product(name, pointers, [values.shape[0], 0, self._cos.shape[0]], ahead)
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
    condition, condition_bias, step_sizes, stop, stop_bias, query, heard_embed, heard_bias = others
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
    heard = _Stream(1, aggregator_cos, aggregator_sin, hidden, kernels)
    state = noise
    for step in range(steps + 1):
        last = max(0, step - 1)  # of which this is the end; before the first step of none
        updated = torch.empty_like(noise) if step else noise
        ends, before = [stream.scaled, stream.squares], cos.shape[0] if step else 0
        update = [state, step_noise[:, last], sigma, temperature, step_sizes[last:], guidance, updated]
        if step < steps:
            begins = [first[:, step], tokens, embed, embed_bias, project, project_bias, blocks[0]]
            target, shape = stream, [cos.shape[0], 2, steps * _WIDTH, 0 if step else num_history]
        else:
            begins = [query, tokens, heard_embed, heard_bias, project, project_bias, aggregator[0]]
            target, shape = heard, [aggregator_cos.shape[0], 1, 0, 0]
        kernels.turn([*begins, *ends, *update, *target.start], [before, stream.squares.shape[1], *shape])
        state = updated
        if step < steps:
            stream.through(blocks, norm, blocks[1] if step + 1 < steps else aggregator[1])
    heard.through(aggregator, aggregator_norm, None)
    return state, heard.x, probability


def _sample_fake(
    hidden: Tensor, history: Tensor, noise: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(noise), hidden.new_empty(1 + noise.shape[1], _WIDTH), noise.new_empty(1)


# Not by `torch.library.custom_op`: its first call imports torch's compiler, seconds of a server's start.
_OPS = torch.library.Library("mingc", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS.define(  # type: ignore[no-untyped-call]
    "dit_batch1_sample" + torch.library.infer_schema(_sample, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OPS.impl("dit_batch1_sample", _sample, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("mingc::dit_batch1_sample", _sample_fake, lib=_OPS)
