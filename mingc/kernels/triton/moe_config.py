"""How the work of the mixture-of-experts kernels is cut, by shape: the one place that the kernels ask.

An export may have timed cuts on the device at hand and have chosen some (`using`). For all other shapes `rule` answers:
the best, or nearly so, of many timed on an H200 at hidden 4096, 256 experts of width 1024 and a quarter of it, 8 a
token. Sizes that a tile would not divide get the largest power of two that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

BF16, FP8, INT4 = 0, 1, 2  # how weights are stored
MAX_DECODE_TOKENS = 64  # of the kernels that sort nothing

Kernel = Literal["moe_gemv", "row", "batch", "grouped"]
"""One token with the choice of its experts, one token, a few tokens, a prefill chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """A tile is `columns` rows of a weight, `depth` of its inputs a step; `repeats` tiles a program.

    Inputs count as stored: INT4 has two in one.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    repeats: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Cut of the experts' first product, `up`, and of their second, `down`.

    Of grouped products also: `rows` pairs a block, and up to `extra` more in an expert's last one; `swap` puts weights
    on the matrix units' first side. Their columns of `up` count gate and up rows.
    """

    up: Tiles
    down: Tiles
    rows: int = 0
    swap: bool = False
    extra: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a cut is chosen for: `tokens` tokens of `chosen` of `experts` experts each, of which a rank has `width`."""

    kernel: Kernel
    tokens: int
    hidden_size: int
    width: int
    experts: int
    chosen: int
    storage: int


_chosen: Mapping[Shape, Cut] = {}


@contextmanager
def using(table: Mapping[Shape, Cut]) -> Iterator[None]:
    """Inside, the shapes in `table` are cut as it says. Not for several threads."""
    global _chosen
    before, _chosen = _chosen, table
    try:
        yield
    finally:
        _chosen = before


def chosen_cuts() -> Mapping[Shape, Cut]:
    """The table in use."""
    return _chosen


def cut(shape: Shape) -> Cut:
    """How the kernels are to cut `shape`."""
    if not _chosen:  # while a graph of variable size is traced, tokens are no number that could be looked up
        return rule(shape)
    return _chosen.get(shape) or rule(shape)


def kernel_of(tokens: int, storage: int) -> Kernel:
    """The kernels that take so many tokens whose experts are chosen already."""
    if tokens == 1 and storage != INT4:
        return "row"
    return "batch" if tokens <= MAX_DECODE_TOKENS else "grouped"


def rule(shape: Shape) -> Cut:
    """The cut of a shape that nobody has timed."""
    width, hidden = shape.width, shape.hidden_size
    if shape.kernel == "grouped":
        return blocks_of(shape, _block_rows(shape))
    if shape.kernel == "batch":
        per_item = 2 if shape.storage == INT4 else 1
        return Cut(
            up=_up(width, hidden // per_item, shape.storage),
            down=_down(width // per_item, hidden, shape.storage),
        )
    first = _moe_gemv_up if shape.kernel == "moe_gemv" else _row_up
    return Cut(up=first(width, hidden), down=_row_down(width, hidden))


def blocks_of(shape: Shape, rows: int) -> Cut:
    """Grouped products in blocks of `rows` pairs."""
    width, storage = shape.width, shape.storage
    extra, second = 0, None
    if storage == BF16 and rows == 128:
        extra, tiles = 32, Tiles(columns=256, depth=64, warps=8, stages=4)
        if width <= 256:
            # A few steps make a tile: of two programs on a multiprocessor one writes while the other reads.
            second = Tiles(columns=128, depth=64, warps=8, stages=3)
    elif rows == 128:
        tiles = Tiles(columns=128, depth=64 if storage == INT4 else 128, warps=8, stages=4)
    elif rows == 64:
        tiles = Tiles(columns=128, depth=128 if storage == FP8 else 64)
    else:
        tiles = Tiles(columns=128, depth=128)
    return Cut(
        rows=rows,
        up=fitted(tiles, 2 * width, shape.hidden_size),
        down=fitted(second or tiles, shape.hidden_size, width),
        swap=storage != BF16 or rows < 64,
        extra=extra,
    )


def fitted(tiles: Tiles, columns: int, depth: int) -> Tiles:
    """Such tiles, or smaller ones that divide the weight."""
    return replace(tiles, columns=_divisor(columns, tiles.columns), depth=_divisor(depth, tiles.depth))


def _block_rows(shape: Shape) -> int:
    """By the pairs that an expert gets on average."""
    mean = shape.tokens * shape.chosen // shape.experts
    if mean >= 64:
        return 128 if shape.storage == BF16 else 64
    if mean < 16:
        return 16
    return 32 if shape.storage == INT4 else 64


def _row_up(width: int, depth: int) -> Tiles:
    return Tiles(columns=_divisor(width, 2 if width > 512 else 4), depth=_divisor(depth, 2048))


def _moe_gemv_up(width: int, depth: int) -> Tiles:
    return Tiles(columns=_divisor(width, 4), depth=_divisor(depth, 4096), warps=4 if width > 512 else 8)


def _row_down(width: int, columns: int) -> Tiles:
    return Tiles(columns=_divisor(columns, 16 if width > 512 else 8), depth=_divisor(width, 512))


def _up(width: int, depth: int, storage: int) -> Tiles:
    wide = storage != BF16 and width > 128
    return Tiles(columns=_divisor(width, 64 if wide else 32), depth=_divisor(depth, 256))


def _down(width: int, columns: int, storage: int) -> Tiles:
    """`width` as stored."""
    if storage == FP8 and width > 512:
        return Tiles(
            columns=_divisor(columns, 64), depth=_divisor(width, 256), repeats=_repeats(columns, 64, 4)
        )
    if width >= 512:
        return Tiles(columns=_divisor(columns, 128), depth=_divisor(width, 128), stages=4)
    return Tiles(
        columns=_divisor(columns, 128), depth=_divisor(width, 128), repeats=_repeats(columns, 128, 2)
    )


def _divisor(size: int, at_most: int) -> int:
    """The largest power of two up to `at_most` that divides `size`."""
    return min(at_most, size & -size)


def _repeats(columns: int, tile: int, at_most: int) -> int:
    """How many tiles of `columns` a program makes."""
    return _divisor(columns // _divisor(columns, tile), at_most)
