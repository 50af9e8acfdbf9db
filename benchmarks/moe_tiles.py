"""Times candidate tiles of the mixture-of-experts decode kernels on a GPU, at the released dims and its shards.

    python benchmarks/moe_tiles.py --shards 1,4 --tokens 1,8,32 --formats bf16,fp8,int4 --json tiles.json

Random routing of every token by itself: the worst case for how many experts a step reads. Each timing is a CUDA graph
over several routings, so that the cache does not hold the weights.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from mingc.kernels.gpu import moe_experts, moe_tiles
from mingc.kernels.gpu.moe_tiles import Grouped, Tiles

HIDDEN, WIDTH, EXPERTS, CHOSEN = 4096, 1024, 256, 8
BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}


class Layer:
    """Random weights of one layer's experts in one format, large enough for any shard."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        count = (EXPERTS + 1) * 3 * WIDTH * HIDDEN
        if storage == "int4":
            self.flat = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, device="cuda")
        else:
            dtype = torch.float8_e4m3fn if storage == "fp8" else torch.bfloat16
            self.flat = torch.empty(count, dtype=dtype, device="cuda")
            for part in self.flat.split(2**28):
                part.copy_(torch.randn(part.shape, device="cuda") / 64)

    def weights(self, width: int) -> tuple[Tensor | None, ...]:
        """gate_up, down, their scales, and the same of the shared expert."""
        per_byte = 2 if self.storage == "int4" else 1
        shapes = (
            (EXPERTS, 2 * width, HIDDEN),
            (EXPERTS, HIDDEN, width),
            (2 * width, HIDDEN),
            (HIDDEN, width),
        )
        tensors, scales, start = [], [], 0
        for shape in shapes:
            stored = (*shape[:-1], shape[-1] // per_byte)
            end = start + torch.Size(stored).numel()
            tensors.append(self.flat[start:end].view(stored))
            start = end
            scales.append(_scale(self.storage, shape))
        return (tensors[0], tensors[1], scales[0], scales[1], tensors[2], tensors[3], scales[2], scales[3])


def _scale(storage: str, shape: tuple[int, ...]) -> Tensor | None:
    if storage == "bf16":
        return None
    if storage == "fp8":
        return torch.rand(shape[:-1], device="cuda")
    return (torch.rand(*shape[:-1], shape[-1] // 128, device="cuda") / 64).to(torch.bfloat16)


def routings(tokens: int, sets: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    result = []
    for _ in range(sets):
        scores = torch.rand(tokens, EXPERTS, generator=generator, device="cuda")
        result.append((scores.topk(CHOSEN).indices, torch.rand(tokens, CHOSEN, device="cuda")))
    return result


def bytes_read(storage: str, width: int, routing: list[tuple[Tensor, Tensor]]) -> float:
    """Mean over the routings of the weight bytes of all experts that somebody chose, and of the shared one."""
    experts = statistics.mean(ids.unique().numel() + 1 for ids, _ in routing)
    return experts * 3 * width * HIDDEN * BYTES[storage]


def samples_us(
    run: Callable[[Tensor, Tensor], object],
    routing: list[tuple[Tensor, Tensor]],
    count: int,
    *,
    is_eager: bool = False,
) -> list[float]:
    """Microseconds of one call of `run`, `count` times; in a CUDA graph unless it is to be eager."""

    def step() -> None:
        for each in routing:
            run(*each)

    timed = step if is_eager else harness.capture(step).replay
    return [1000 * each / len(routing) for each in harness.time_ms(timed, count, 2)]


def candidates(storage: str, tokens: int, width: int, part: str) -> Iterator[Tiles]:
    wide = 1 if storage == "bf16" else 2
    if part == "row_up":
        for columns, depth, warps in itertools.product((2, 4, 8), (1024, 2048), (4, 8)):
            if columns * depth // warps <= 2048:
                yield Tiles(columns=columns, depth=depth, warps=warps)
    elif part == "row_down":
        for columns, warps in itertools.product((4, 8, 16, 32), (4, 8)):
            yield Tiles(columns=columns, depth=min(512, width), warps=warps)
    elif part == "up":
        for columns, depth, stages in itertools.product((16, 32, 64), (128, 256), (3, 4)):
            if columns * depth * stages <= 64 * 256 * 3 and columns * depth >= 32 * 128:
                yield Tiles(
                    columns=columns, depth=depth if storage == "int4" else depth * wide, stages=stages
                )
    elif part == "down":
        stored = width // (2 if storage == "int4" else 1)
        depths = [each * (1 if storage == "int4" else wide) for each in (128, 256)]
        for columns, depth, stages, repeats in itertools.product((32, 64, 128), depths, (3, 4), (1, 4)):
            if (
                depth <= stored
                and columns * depth * stages // wide <= 64 * 256 * 4
                and columns * repeats <= 256
            ):
                yield Tiles(columns=columns, depth=depth, stages=stages, repeats=repeats)
        if stored < depths[0]:
            for columns, stages, repeats in itertools.product((64, 128), (3, 4), (1, 4)):
                yield Tiles(columns=columns, depth=stored, stages=stages, repeats=repeats)


def grouped_candidates(storage: str, tokens: int) -> Iterator[Grouped]:
    """Cuts of the prefill products: rows a block, swapped or not, columns, warps, stages."""
    mean = tokens * CHOSEN // EXPERTS
    for rows in (16, 32, 64, 128):
        if not mean // 2 <= rows <= 2 * mean:
            continue
        for swap in (True,) if storage != "bf16" or rows < 64 else (False, True):
            for columns, warps, stages in ((128, 4, 4), (128, 4, 3), (256, 8, 3), (256, 8, 4), (128, 8, 4)):
                depth = 64 if rows >= 64 and storage != "fp8" else 128
                stage = (rows * 2 * (2 if storage == "int4" else 1) + columns * BYTES[storage]) * depth
                if stage * stages > 220_000 or (storage == "int4" and stage * stages > 200_000):
                    continue
                if rows == 128 and warps == 4:
                    continue
                tiles = Tiles(columns=columns, depth=depth, warps=warps, stages=stages)
                yield Grouped(rows=rows, up=tiles, down=tiles, swap=swap)


def tune_grouped(layer: Layer, tokens: int, shard: int) -> dict[str, Any]:
    width = WIDTH // shard
    weights = layer.weights(width)[:4]
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    routing = routings(tokens, 2)
    run = lambda ids, mix: moe_experts.moe_prefill(x, ids, mix, *weights, None)  # noqa: E731
    before, rows = moe_tiles.grouped, []
    for cut in grouped_candidates(layer.storage, tokens):
        moe_tiles.grouped = lambda *_, chosen=cut: chosen
        try:
            rows.append((statistics.median(samples_us(run, routing, 4)), cut))
        except Exception as fault:
            print("  fault", cut, type(fault).__name__, str(fault)[:120], flush=True)
    moe_tiles.grouped = before
    rows.sort(key=lambda row: row[0])
    rate = tokens * CHOSEN * 6 * width * HIDDEN / 1e6
    floor = bytes_read(layer.storage, width, routing) / 4.27e6
    for us, cut in rows:
        print(
            f"{layer.storage} prefill T={tokens} shard={shard}: {us:.0f} us {rate / us:.0f} TFLOP/s,"
            f" weights {floor:.0f} us",
            end="",
        )
        print(f" rows={cut.rows} swap={cut.swap} {cut.up}", flush=True)
    return {"format": layer.storage, "tokens": tokens, "shard": shard, "part": "grouped",
            "samples": [{"us": round(us, 1), "cut": str(cut)} for us, cut in rows]}  # fmt: skip


def tune(layer: Layer, tokens: int, shard: int, part: str, limit: float) -> dict[str, Any]:
    """Times the whole layer with each candidate for `part`, the best found so far elsewhere."""
    width = WIDTH // shard
    weights = layer.weights(width)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    volume = 0
    sets = 2
    while volume < 2e8 and sets < 32:
        routing = routings(tokens, sets)
        volume = sets * bytes_read(layer.storage, width, routing)
        sets += 1
    run = lambda ids, mix: moe_experts.moe_decode(x, ids, mix, *weights)  # noqa: E731
    before = getattr(moe_tiles, part)
    rows = []
    deadline = time.monotonic() + limit
    for tiles in candidates(layer.storage, tokens, width, part):
        if time.monotonic() > deadline:
            break
        setattr(moe_tiles, part, lambda *_, chosen=tiles: chosen)
        try:
            rows.append((statistics.median(samples_us(run, routing, 7)), tiles))
        except Exception as fault:
            print("  fault", part, tiles, type(fault).__name__, str(fault)[:120], flush=True)
    setattr(moe_tiles, part, before)
    rows.sort(key=lambda row: row[0])
    floor = bytes_read(layer.storage, width, routing) / 4.27e6
    for us, tiles in rows[:4] + rows[-1:]:
        print(
            f"{layer.storage} T={tokens} shard={shard} {part}: {us:.1f} us, {100 * floor / us:.0f} % {tiles}",
            flush=True,
        )
    if rows:
        setattr(moe_tiles, part, lambda *_, chosen=rows[0][1]: chosen)
    return {
        "format": layer.storage, "tokens": tokens, "shard": shard, "part": part, "floor_us": round(floor, 2),
        "samples": [{"us": round(us, 2), "tiles": str(tiles)} for us, tiles in rows],
    }  # fmt: skip


def compile_only(cases: list[tuple[str, int, int, str]], share: int, shares: int) -> None:
    """Fills Triton's cache with this share of all candidates."""
    number = 0
    for storage, tokens, shard, part in cases:
        width = WIDTH // shard
        stored = 2 if storage == "int4" else 1
        dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}[storage]
        gate_up = torch.zeros(CHOSEN, 2 * width, HIDDEN // stored, dtype=torch.uint8, device="cuda").to(dtype)
        down = torch.zeros(CHOSEN, HIDDEN, width // stored, dtype=torch.uint8, device="cuda").to(dtype)
        scales = [_scale(storage, (CHOSEN, 2 * width, HIDDEN)), _scale(storage, (CHOSEN, HIDDEN, width))]
        x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(tokens, CHOSEN, dtype=torch.int64, device="cuda")
        if part == "grouped":
            ids = torch.arange(CHOSEN, device="cuda").expand(tokens, -1).contiguous()
        before = getattr(moe_tiles, part)
        found = (
            grouped_candidates(storage, tokens)
            if part == "grouped"
            else candidates(storage, tokens, width, part)
        )
        for tiles in found:
            number += 1
            if number % shares != share:
                continue
            setattr(moe_tiles, part, lambda *_, chosen=tiles: chosen)
            try:
                if part == "grouped":
                    moe_experts.moe_prefill(x, ids, ids.float(), gate_up, down, *scales, None)
                    continue
                moe_experts.moe_decode(
                    x, ids, ids.float(), gate_up, down, *scales, gate_up[0], down[0], *scales
                )
            except Exception as fault:
                print("fault", storage, tokens, part, tiles, type(fault).__name__, str(fault)[:300])
        setattr(moe_tiles, part, before)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", default="1,4")
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--prefill", default="256,1024,4096")
    parser.add_argument("--formats", default="bf16,fp8,int4")
    parser.add_argument("--share", help="I/N: only compile, the I-th of N shares")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = []
    for storage in options.formats.split(","):
        for shard in map(int, options.shards.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                is_row = tokens == 1 and storage != "int4"
                for part in ("row_up", "row_down") if is_row else ("up", "down"):
                    cases.append((storage, tokens, shard, part))
        for tokens in map(int, options.prefill.split(",")):
            cases.append((storage, tokens, 1, "grouped"))
    if options.share:
        share, shares = map(int, options.share.split("/"))
        compile_only(cases, share, shares)
        return
    ceiling = harness.ceilings()
    figures = []
    defaults = {part: getattr(moe_tiles, part) for part in ("row_up", "row_down", "up", "down", "grouped")}
    for storage, group in itertools.groupby(cases, key=lambda case: case[0]):
        layer = Layer(storage)
        for (tokens, shard), parts in itertools.groupby(group, key=lambda case: case[1:3]):
            for _, _, _, part in parts:
                if part == "grouped":
                    figures.append(tune_grouped(layer, tokens, shard))
                else:
                    figures.append(tune(layer, tokens, shard, part, options.seconds))
            for part, value in defaults.items():
                setattr(moe_tiles, part, value)
        del layer
    if options.json:
        harness.write(options.json, harness.result("moe_tiles", ceiling, figures))


if __name__ == "__main__":
    main()
