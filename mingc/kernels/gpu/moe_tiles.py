"""How the work of the mixture-of-experts kernels is cut, by shape.

Chosen among the candidates of `benchmarks/moe_tiles.py` on an H200 at hidden 4096, 256 experts of width 1024 and a
quarter of it, 8 a token. Sizes that a tile would not divide get the largest power of two that does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

BF16, FP8, INT4 = 0, 1, 2  # how weights are stored


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
class Grouped:
    """Cut of the grouped products: `rows` pairs a block, and up to `extra` more in an expert's last one.

    `swap` puts weights on the matrix units' first side. Columns of `up` count gate and up rows.
    """

    rows: int
    up: Tiles
    down: Tiles
    swap: bool
    extra: int = 0


def row_up(width: int, depth: int) -> Tiles:
    """First product of one token: `width` this rank's expert width, `depth` the hidden size."""
    return Tiles(columns=_divisor(width, 2 if width > 512 else 4), depth=_divisor(depth, 2048))


def expert_row_up(width: int, depth: int) -> Tiles:
    """First product of one token in the kernel that also chooses its experts."""
    return Tiles(columns=_divisor(width, 4), depth=_divisor(depth, 4096), warps=4 if width > 512 else 8)


def row_down(width: int, columns: int) -> Tiles:
    """Second product of one token: `columns` the hidden size."""
    return Tiles(columns=_divisor(columns, 16 if width > 512 else 8), depth=_divisor(width, 512))


def up(width: int, depth: int, storage: int) -> Tiles:
    """First product of some tokens."""
    wide = storage != BF16 and width > 128
    return Tiles(columns=_divisor(width, 64 if wide else 32), depth=_divisor(depth, 256))


def down(width: int, columns: int, storage: int) -> Tiles:
    """Second product of some tokens; `width` as stored."""
    if storage == FP8 and width > 512:
        return Tiles(
            columns=_divisor(columns, 64), depth=_divisor(width, 256), repeats=_repeats(columns, 64, 4)
        )
    if width >= 512:
        return Tiles(columns=_divisor(columns, 128), depth=_divisor(width, 128), stages=4)
    return Tiles(
        columns=_divisor(columns, 128), depth=_divisor(width, 128), repeats=_repeats(columns, 128, 2)
    )


def grouped(pairs: int, experts: int, width: int, hidden_size: int, storage: int) -> Grouped:
    """All products of a prefill chunk: `pairs` (token, expert) pairs over `experts` experts of `width`."""
    mean = pairs // experts
    extra, second = 0, None
    if storage == BF16 and mean >= 64:
        rows, extra, cut = 128, 32, Tiles(columns=256, depth=64, warps=8, stages=4)
        if width <= 256:
            # A few steps make a tile: of two programs on a multiprocessor one writes while the other reads.
            second = Tiles(columns=128, depth=64, warps=8, stages=3)
    elif storage == BF16 and mean >= 16:
        rows, cut = 64, Tiles(columns=128, depth=64)
    elif mean >= (64 if storage == INT4 else 16):
        rows, cut = 64, Tiles(columns=128, depth=64 if storage == INT4 else 128)
    else:
        rows, cut = 32 if mean >= 16 else 16, Tiles(columns=128, depth=128)
    return Grouped(
        rows=rows,
        up=_fitted(cut, 2 * width, hidden_size),
        down=_fitted(second or cut, hidden_size, width),
        swap=storage != BF16 or rows < 64,
        extra=extra,
    )


def _fitted(tiles: Tiles, columns: int, depth: int) -> Tiles:
    """Such tiles, or smaller ones that divide the weight."""
    return replace(tiles, columns=_divisor(columns, tiles.columns), depth=_divisor(depth, tiles.depth))


def _divisor(size: int, at_most: int) -> int:
    """The largest power of two up to `at_most` that divides `size`."""
    return min(at_most, size & -size)


def _repeats(columns: int, tile: int, at_most: int) -> int:
    """How many tiles of `columns` a program makes."""
    return _divisor(columns // _divisor(columns, tile), at_most)
