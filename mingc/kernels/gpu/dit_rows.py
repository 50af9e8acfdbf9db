"""`mingc.kernels.dit_rows` on CUDA: its two ops, which engines call by name with machine code inside.

Importing this registers them. It needs neither Triton nor a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mingc.kernels.gpu.cuda_source import CudaModule, Launch, compile_source, pack, tensor_map, unpack

if TYPE_CHECKING:
    from mingc.kernels.dit_rows import SamplerWeights, TransformerWeights

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
_EPS = 1e-6
_TURN_BLOCKS = 8  # of the one cluster between steps; each leaves a sum of squares a row


class _Tiles(NamedTuple):
    """How a product is cut: outputs of a cluster, thread blocks that share the depth, slices of rows held at a time."""

    columns: int
    splits: int
    ring: int


# Measured on an H200 (benchmarks/NOTES.md). They travel with the machine code that was made for them.
_TILES = {
    "qkv": _Tiles(columns=64, splits=4, ring=4),
    "up": _Tiles(columns=64, splits=4, ring=4),
    "down": _Tiles(columns=64, splits=8, ring=4),
}


def transform(x: Tensor, weights: TransformerWeights) -> Tensor:
    """See `mingc.kernels.dit_rows`."""
    flat = x.reshape(-1, _WIDTH).contiguous()
    scaled = flat * weights.blocks[0].attention_norm
    squares = flat.float().square().sum(-1, keepdim=True)
    scaled, squares = _transform(
        flat, scaled, squares, _flat(weights), weights.norm, weights.cos, weights.sin, _code(x)
    )
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / _WIDTH + _EPS)
    out: Tensor = (scaled.float() * scale).to(x.dtype).view(x.shape)
    return out


def sample(
    first: Tensor,
    history: Tensor,
    noise: Tensor,
    kicks: Tensor,
    step_sizes: Tensor,
    guidance: Tensor,
    weights: SamplerWeights,
) -> Tensor:
    """See `mingc.kernels.dit_rows`."""
    body = weights.transformer
    inputs = [each.contiguous() for each in (first, history, noise, kicks, step_sizes, guidance)]
    edges = [weights.embed, weights.embed_bias, weights.project, weights.project_bias]
    out: Tensor = _sample(*inputs, edges, _flat(body), body.norm, body.cos, body.sin, _code(first))
    return out


def _flat(weights: TransformerWeights) -> list[Tensor]:
    return [tensor for block in weights.blocks for tensor in block]


def _code(x: Tensor) -> str:
    """The tiles and the machine code that was made for them."""
    major, minor = torch.cuda.get_device_capability(x.device)
    defines = tuple(
        (f"{name.upper()}_{key.upper()}", value)
        for name, tiles in _TILES.items()
        for key, value in tiles._asdict().items()
    )
    return pack(_TILES, compile_source(_SOURCE, defines, f"sm_{major}{minor}a"))


class _Kernels:
    """The kernels of one machine code on a device, and how each is launched."""

    def __init__(self, code: str) -> None:
        numbers, machine_code = unpack(code)
        self.tiles = {name: _Tiles(*values) for name, values in numbers.items()}
        launches = {"mingc_dit_turn_early": Launch(threads=256)}
        for name, tiles in self.tiles.items():
            slices = _SHAPES[name][1] // tiles.splits // _SLICE
            for suffix, rows in (("", tiles.ring * _MOST_ROWS), ("_few", slices * _FEW_ROWS)):
                launches[f"mingc_dit_{name}{suffix}_early"] = Launch(
                    threads=2 * tiles.columns,
                    shared_bytes=(slices * tiles.columns + rows) * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
                    spread=True,
                )
        out = Launch(
            threads=2 * _OUT_COLUMNS,
            shared_bytes=(2 * _OUT_COLUMNS + 6 * _OUT_TOKENS) * _SLICE * 2 + _BARRIERS_BYTES + _ALIGNMENT,
            spread=True,
        )
        launches |= {"mingc_dit_out_early": out, "mingc_dit_out_few_early": out}
        self._module = CudaModule(machine_code, launches)

    def product(
        self, name: str, pointers: Sequence[Tensor | None], numbers: Sequence[int], ahead: Tensor
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
            columns, box_rows = _OUT_COLUMNS, _OUT_TOKENS
            blocks = _WIDTH // columns * _OUT_SPLITS * (rows // tokens)
        else:
            columns, box_rows = self.tiles[name].columns, _FEW_ROWS if rows <= _FEW_ROWS else _MOST_ROWS
            blocks = _SHAPES[name][0] // columns * self.tiles[name].splits
        share = ahead.numel() * ahead.element_size() // blocks // 16 * 16
        maps = [
            _map_of_outputs(weight, columns),
            tensor_map(x, (x.shape[1], rows), (2 * x.shape[1],), (_SLICE, box_rows)),
        ]
        kernel = f"mingc_dit_{name}{'_few' if rows <= _FEW_ROWS else ''}_early"
        self._module.launch(kernel, blocks, [*pointers[:8], ahead, *pointers[8:]], [*numbers, share], maps)

    def turn(self, pointers: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._module.launch("mingc_dit_turn_early", _TURN_BLOCKS, pointers, numbers)


def _map_of_outputs(weight: Tensor, columns: int) -> bytes:
    """A copy brings so many outputs; of every 16 the even ones first, so that a thread gets two neighbours."""
    outputs, depth = weight.shape
    strides = [2 * depth * step for step in (2, 1, 16)]
    return tensor_map(weight, (depth, 8, 2, outputs // 16), strides, (_SLICE, 8, 2, columns // 16))


@functools.cache
def _kernels(code: str, device: int) -> _Kernels:
    with torch.cuda.device(device):
        return _Kernels(code)


class _Stream:
    """A residual stream on its way through the blocks: the struct `Product` of the source is filled here."""

    def __init__(
        self, x: Tensor, scaled: Tensor, squares: Tensor, cos: Tensor, sin: Tensor, kernels: _Kernels
    ) -> None:
        self.x, self.scaled, self.squares = x, scaled, squares
        self._cos, self._sin, self._kernels = cos, sin, kernels

    def through(self, blocks: list[Tensor], last_norm: Tensor) -> None:
        """All blocks, their parameters in the order of `BlockWeights`."""
        size = 10
        for start in range(0, len(blocks), size):
            _, qkv, qkv_bias, out, out_bias, mlp_norm, up, up_bias, down, down_bias = blocks[
                start : start + size
            ]
            following = (start + size) % len(blocks)  # after the last block the next sampler step's first
            next_norm = blocks[following] if following else last_norm
            turned = self._normed("qkv", qkv, qkv_bias, ahead=out)
            self._add("out", turned, out, out_bias, mlp_norm, ahead=up)
            wide = self._normed("up", up, up_bias, ahead=down)
            self._add("down", wide, down, down_bias, next_norm, ahead=blocks[following + 1])

    def _normed(self, name: str, weight: Tensor, bias: Tensor, ahead: Tensor) -> Tensor:
        rows, parts = self.squares.shape
        out = self.x.new_empty(rows, _SHAPES[name][0])
        pointers = [
            self.scaled, self.squares, weight, bias, None, None, self._cos, self._sin, out, None, None
        ]  # fmt: skip
        self._kernels.product(name, pointers, [rows, parts, self._cos.shape[0]], ahead)
        return out

    def _add(self, name: str, x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, ahead: Tensor) -> None:
        values, scaled = torch.empty_like(self.x), torch.empty_like(self.x)
        squares = self.squares.new_empty(values.shape[0], _WIDTH // _SQUARES_COLUMNS)
        pointers = [x, None, weight, bias, self.x, norm, None, None, values, scaled, squares]
        self._kernels.product(name, pointers, [values.shape[0], 0, self._cos.shape[0]], ahead)
        self.x, self.scaled, self.squares = values, scaled, squares


@torch.library.custom_op("mingc::dit_rows_transform", mutates_args=())
def _transform(
    x: Tensor,
    scaled: Tensor,
    squares: Tensor,
    blocks: list[Tensor],
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    code: str,
) -> tuple[Tensor, Tensor]:
    stream = _Stream(x, scaled, squares, cos, sin, _kernels(code, x.device.index or 0))
    stream.through(blocks, norm)
    return stream.scaled, stream.squares


@torch.library.custom_op("mingc::dit_rows_sample", mutates_args=())
def _sample(
    first: Tensor,
    history: Tensor,
    noise: Tensor,
    kicks: Tensor,
    step_sizes: Tensor,
    guidance: Tensor,
    edges: list[Tensor],
    blocks: list[Tensor],
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    code: str,
) -> Tensor:
    tokens, steps = cos.shape[0], first.shape[1]
    embed, embed_bias, project, project_bias = edges
    start, start_scaled = (first.new_empty(2 * tokens, _WIDTH) for _ in range(2))
    start_squares = noise.new_empty(2 * tokens, _TURN_BLOCKS)
    kernels = _kernels(code, first.device.index or 0)
    stream = _Stream(start, start_scaled, start_squares, cos, sin, kernels)
    state, out = noise, noise
    for step in range(steps + 1):
        if step > 0:
            out = torch.empty_like(noise)
        kernels.turn(
            [first, history, embed, embed_bias, project, project_bias, blocks[0], stream.scaled, stream.squares,
             state, kicks, step_sizes, guidance, out, start, start_scaled, start_squares],
            [tokens, stream.squares.shape[1], step, steps],
        )  # fmt: skip
        state = out
        if step < steps:
            stream.x, stream.scaled, stream.squares = start, start_scaled, start_squares
            stream.through(blocks, norm)
    return state


@_transform.register_fake
def _(
    x: Tensor,
    scaled: Tensor,
    squares: Tensor,
    blocks: list[Tensor],
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    code: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), squares.new_empty(x.shape[0], _WIDTH // _SQUARES_COLUMNS)


@_sample.register_fake
def _(first: Tensor, history: Tensor, noise: Tensor, *others: object) -> Tensor:
    return torch.empty_like(noise)
