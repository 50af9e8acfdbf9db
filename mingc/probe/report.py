"""What `mingc probe` tells: plain data and the sums over it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mingc.artifacts.manifest import EngineCost


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRates:
    """Rates of a machine, measured on large random tensors: copying (bytes read and written), matrix products.

    `cache_bytes` is the last cache before the memory; None where it is not known.
    """

    device: str
    copy_tb_s: float
    matmul_tflop_s: float
    matmul_dtype: str
    cache_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Milliseconds of one engine.

    Attributes:
        median_ms, p95_ms, p99_ms, min_ms: of `repetitions` replays of a CUDA graph (`is_captured`) with a cold cache;
            on the CPU of calls back to back.
        warm_ms: median of replays back to back.
        uncaptured_ms: median on the device of calls outside a graph, cache cold.
        enqueue_ms: median until such a call is back at the host.
    """

    median_ms: float
    p95_ms: float
    p99_ms: float
    min_ms: float
    repetitions: int
    is_captured: bool
    warm_ms: float | None
    uncaptured_ms: float | None
    enqueue_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFigures:
    """One engine at one set of sizes.

    `max_model_len` are held by every request before the call; None where no request holds any. A step runs it
    `layer_instances` times: once a layer where layers share an engine; timed is the first one.
    """

    engine: str
    sizes: dict[str, int]
    max_model_len: int | None
    latency: Latency
    layer_instances: int = 1

    @property
    def title(self) -> str:
        return title(self.engine, self.sizes, self.max_model_len)

    def cells(self) -> dict[str, str | float | None]:
        """The columns that people see."""
        latency = self.latency
        return {
            "engine": self.title,
            "median_ms": latency.median_ms,
            "p95_ms": latency.p95_ms,
            "p99_ms": latency.p99_ms,
            "min_ms": latency.min_ms,
            "no_graph_ms": latency.uncaptured_ms,
            "enqueue_ms": latency.enqueue_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineBound:
    """The least that one call of an engine must do, and how long the machine takes for it at its ceilings.

    Attributes:
        engine: as `EngineFigures.title`.
        weight_bytes: every weight once, and again for every further use what the cache cannot keep of it.
        border_bytes: inputs and outputs.
        roofline: share of the measured median that the larger of both floors makes up.
        uncounted: kernels whose work no rule counts; with any, the floors are too low.
    """

    engine: str
    flops: int
    weight_bytes: int
    state_bytes: int
    border_bytes: int
    bytes_floor_ms: float
    flops_floor_ms: float
    roofline: float
    uncounted: tuple[str, ...]

    def cells(self) -> dict[str, str | float]:
        """The columns that people see."""
        return {
            "engine": self.engine,
            "gflop": self.flops / 1e9,
            "weight_mb": self.weight_bytes / 1e6,
            "state_mb": self.state_bytes / 1e6,
            "bytes_floor_ms": self.bytes_floor_ms,
            "flops_floor_ms": self.flops_floor_ms,
            "roof_%": round(100 * self.roofline, 1),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """An engine that is slower than the baseline by more than the tolerance."""

    engine: str
    baseline_ms: float
    median_ms: float
    slower_by: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchEmbed:
    """Median times of the vision encoder's patch embedding of `patches` patches in two forms, and how they differ."""

    patches: int
    conv3d_ms: float
    linear_ms: float
    ratio: float
    relative_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """The result of `mingc probe`; written with `--json` it is the baseline of a later one.

    `floors` lacks engines whose export did not count their work.
    """

    artifact: str
    model: str
    dtype: str
    torch: str
    ceilings: PeakRates
    tolerance: float | None
    engines: tuple[EngineFigures, ...]
    floors: tuple[RooflineBound, ...]
    regressions: tuple[Regression, ...]
    only_here: tuple[str, ...]
    only_in_baseline: tuple[str, ...]
    patch_embed: tuple[PatchEmbed, ...] = ()
    notes: tuple[str, ...] = field(default=())


def title(engine: str, sizes: Mapping[str, int], context: int | None = None) -> str:
    """`talker.step B=16 +256`: the engine, its sizes, the tokens every request holds."""
    words = [engine, *(f"{name}={size}" for name, size in sizes.items())]
    return " ".join(words if context is None else [*words, f"+{context}"])


def floor_of(
    figures: EngineFigures, work: EngineCost, border_bytes: int, ceilings: PeakRates
) -> RooflineBound:
    """The floors of `work`, which an export counted, at the context and against the median of `figures`."""
    context = figures.max_model_len or 0
    flops = work.flops + context * work.context_flops
    state_bytes = work.state_bytes + context * work.context_bytes
    weight_bytes = work.weight_bytes
    if ceilings.cache_bytes is not None and weight_bytes > ceilings.cache_bytes:
        weight_bytes += int(work.reuse_bytes * (1 - ceilings.cache_bytes / weight_bytes))
    bytes_ms = (weight_bytes + state_bytes + border_bytes) / ceilings.copy_tb_s / 1e9
    flops_ms = flops / ceilings.matmul_tflop_s / 1e9
    return RooflineBound(
        engine=figures.title,
        flops=flops,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
        border_bytes=border_bytes,
        bytes_floor_ms=bytes_ms,
        flops_floor_ms=flops_ms,
        roofline=max(bytes_ms, flops_ms) / figures.latency.median_ms,
        uncounted=work.uncounted,
    )
