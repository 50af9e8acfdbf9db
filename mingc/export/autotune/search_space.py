"""Cuts of the mixture-of-experts kernels that are worth timing beside the rule's.

Few: those that came first or close to it in sweeps over many (`benchmarks/results/moe-tiles-h200-2026-11-21.json`,
`prefill-forms-…` and `thinker-rows-…` beside it), each beside the rule's cut of the other product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mingc.kernels.triton.moe_config import BF16, FP8, INT4, Cut, Shape, Tiles, blocks_of, fitted, rule

_EXPERT_ROW_UPS = (
    Tiles(columns=4, depth=4096, warps=4),
    Tiles(columns=4, depth=4096, warps=8),
    Tiles(columns=2, depth=4096, warps=4),
    Tiles(columns=4, depth=2048, warps=4),
    Tiles(columns=2, depth=2048, warps=4),
)
_ROW_UPS = (
    Tiles(columns=2, depth=2048, warps=4),
    Tiles(columns=4, depth=2048, warps=4),
    Tiles(columns=2, depth=2048, warps=8),
    Tiles(columns=4, depth=1024, warps=4),
)
_ROW_DOWNS = (
    Tiles(columns=4, depth=512, warps=4),
    Tiles(columns=8, depth=512, warps=4),
    Tiles(columns=16, depth=512, warps=4),
    Tiles(columns=8, depth=512, warps=8),
)
# By storage. Depths of INT4 count bytes.
_BATCH_UPS = {
    BF16: (
        Tiles(columns=32, depth=256),
        Tiles(columns=64, depth=256),
        Tiles(columns=64, depth=128),
        Tiles(columns=32, depth=128, stages=4),
    ),
    FP8: (
        Tiles(columns=64, depth=256),
        Tiles(columns=32, depth=256),
        Tiles(columns=32, depth=256, stages=4),
    ),
    INT4: (
        Tiles(columns=64, depth=256),
        Tiles(columns=32, depth=256),
        Tiles(columns=64, depth=128),
    ),
}
_BATCH_DOWNS = {
    BF16: (
        Tiles(columns=128, depth=128),
        Tiles(columns=128, depth=128, stages=4),
        Tiles(columns=64, depth=128),
        Tiles(columns=64, depth=256, repeats=4),
    ),
    FP8: (
        Tiles(columns=64, depth=256, repeats=4),
        Tiles(columns=128, depth=256),
        Tiles(columns=64, depth=256),
    ),
    INT4: (
        Tiles(columns=128, depth=128),
        Tiles(columns=64, depth=128),
        Tiles(columns=64, depth=128, repeats=4),
    ),
}
_LEAST_ROWS, _MOST_ROWS = 16, 128  # of a block of grouped products
# By whether a block has 64 rows or more.
_GROUPED = {
    False: (Tiles(columns=128, depth=128, stages=4), Tiles(columns=256, depth=128, warps=8)),
    True: (
        Tiles(columns=128, depth=64, stages=4),
        Tiles(columns=256, depth=64, warps=8),
        Tiles(columns=256, depth=64, warps=8, stages=4),
    ),
}


def candidates(shape: Shape) -> tuple[Cut, ...]:
    """The rule's cut, then others, each once. Some may need more shared memory than a device has."""
    return tuple(dict.fromkeys((rule(shape), *_others(shape))))


def _others(shape: Shape) -> Iterator[Cut]:
    default = rule(shape)
    ups, downs = _products(shape, default)
    width, hidden = shape.width, shape.hidden_size
    per_item = 2 if shape.storage == INT4 and shape.kernel == "batch" else 1
    columns = 2 * width if shape.kernel == "grouped" else width
    for tiles in ups:
        yield replace(default, up=fitted(tiles, columns, hidden // per_item))
    for tiles in downs:
        if hidden % (tiles.columns * tiles.repeats) == 0:
            yield replace(default, down=fitted(tiles, hidden, width // per_item))
    if shape.kernel == "grouped":
        for rows in (default.rows // 2, 2 * default.rows):
            if _LEAST_ROWS <= rows <= _MOST_ROWS:
                yield blocks_of(shape, rows)


def _products(shape: Shape, default: Cut) -> tuple[tuple[Tiles, ...], tuple[Tiles, ...]]:
    """Tiles for the first product and for the second."""
    match shape.kernel:
        case "moe_gemv":
            return _EXPERT_ROW_UPS, _ROW_DOWNS
        case "row":
            return _ROW_UPS, _ROW_DOWNS
        case "batch":
            return _BATCH_UPS[shape.storage], _BATCH_DOWNS[shape.storage]
        case "grouped":
            both = _GROUPED[default.rows >= 64]
            if shape.storage == FP8:
                both = tuple(replace(each, depth=128) for each in both)
            if default.rows == _MOST_ROWS:
                # Four warps have too few registers for blocks of so many rows.
                both = (*both[1:], Tiles(columns=128, depth=64, warps=8))
            return both, both
