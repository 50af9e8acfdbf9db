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

from mingc.kernels.gpu.cuda_source import CudaModule, Launch, compile_source, pack, unpack

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
_SLICE_BYTES = 80 * 64 * 2  # rows of one slice of the depth in shared memory
_ALIGNMENT = 1024  # of slices in shared memory
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
    "out": _Tiles(columns=64, splits=4, ring=4),
    "up": _Tiles(columns=128, splits=4, ring=4),
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
        launches = {
            f"mingc_dit_{name}_early": Launch(
                threads=2 * tiles.columns,
                shared_bytes=_SHAPES[name][1] // tiles.splits * tiles.columns * 2
                + tiles.ring * _SLICE_BYTES
                + _ALIGNMENT,
            )
            for name, tiles in self.tiles.items()
        }
        others = {
            "mingc_dit_attention_early": Launch(threads=96),
            "mingc_dit_turn_early": Launch(threads=256),
        }
        self._module = CudaModule(machine_code, {**launches, **others})

    def product(self, name: str, pointers: Sequence[Tensor | None], rows: int, parts: int) -> None:
        tiles = self.tiles[name]
        blocks = _SHAPES[name][0] // tiles.columns * tiles.splits
        self._module.launch(f"mingc_dit_{name}_early", blocks, pointers, [rows, parts])

    def attention(self, sequences: int, pointers: Sequence[Tensor], tokens: int) -> None:
        self._module.launch("mingc_dit_attention_early", sequences * _HEADS, pointers, [tokens])

    def turn(self, pointers: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self._module.launch("mingc_dit_turn_early", _TURN_BLOCKS, pointers, numbers)


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
            next_norm = blocks[start + size] if start + size < len(blocks) else last_norm
            self._add("out", self._attend(self._normed("qkv", qkv, qkv_bias)), out, out_bias, mlp_norm)
            self._add("down", self._normed("up", up, up_bias), down, down_bias, next_norm)

    def _normed(self, name: str, weight: Tensor, bias: Tensor) -> Tensor:
        rows, parts = self.squares.shape
        out = self.x.new_empty(rows, _SHAPES[name][0])
        pointers = [self.scaled, self.squares, weight, bias, None, None, out, None, None]
        self._kernels.product(name, pointers, rows, parts)
        return out

    def _add(self, name: str, x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor) -> None:
        values, scaled = torch.empty_like(self.x), torch.empty_like(self.x)
        squares = self.squares.new_empty(values.shape[0], _WIDTH // self._kernels.tiles[name].columns)
        pointers = [x, None, weight, bias, self.x, norm, values, scaled, squares]
        self._kernels.product(name, pointers, values.shape[0], 0)
        self.x, self.scaled, self.squares = values, scaled, squares

    def _attend(self, qkv: Tensor) -> Tensor:
        out, tokens = torch.empty_like(self.x), self._cos.shape[0]
        self._kernels.attention(qkv.shape[0] // tokens, [qkv, self._cos, self._sin, out], tokens)
        return out


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
    return torch.empty_like(x), squares.new_empty(
        x.shape[0], _WIDTH // _Tiles(*unpack(code)[0]["down"]).columns
    )


@_sample.register_fake
def _(first: Tensor, history: Tensor, noise: Tensor, *others: object) -> Tensor:
    return torch.empty_like(noise)
