"""Report of `mingc probe`: figures, peak rates and roofline bounds. Plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mingc.artifacts.manifest import EngineCost


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRate:
    """Rate of repeatedly reading the same `num_bytes`, from whichever cache holds them."""

    num_bytes: int
    read_tb_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRates:
    """Measured peak rates of a machine on large random tensors: copy (bytes read and written), read and matmul.

    `cache_bytes` is the size of the last-level cache; None if unknown. `read_tb_s` is 0 in reports of earlier versions.
    `cache_rates` are for small tensors, smallest first, on a CPU, where data of the previous call are still in the
    cache; empty on CUDA, where the cache is emptied before each call.
    """

    device: str
    copy_tb_s: float
    matmul_tflop_s: float
    matmul_dtype: str
    cache_bytes: int | None = None
    read_tb_s: float = 0.0
    cache_rates: tuple[CacheRate, ...] = field(default=(), metadata={"shown": False})

    @property
    def memory_tb_s(self) -> float:
        """The faster of copying and reading: engines mostly read, and writes are slower."""
        return max(self.copy_tb_s, self.read_tb_s)

    def rate_of(self, num_bytes: int) -> float:
        """Return the highest possible rate in TB/s of a call that reads `num_bytes`.

        Rates fall with the size, except that the time of the call slows down the smallest sizes. So the result is the
        best rate among the largest measured size up to `num_bytes` and all larger ones.
        """
        below = [each.num_bytes for each in self.cache_rates if each.num_bytes <= num_bytes]
        least = max(below, default=0)
        cached = [each.read_tb_s for each in self.cache_rates if each.num_bytes >= least]
        return max(self.memory_tb_s, *cached) if cached else self.memory_tb_s

    def faster(self, other: PeakRates) -> PeakRates:
        """Take the higher rates of two measurements of the same machine."""
        return replace(
            self,
            copy_tb_s=max(self.copy_tb_s, other.copy_tb_s),
            read_tb_s=max(self.read_tb_s, other.read_tb_s),
            matmul_tflop_s=max(self.matmul_tflop_s, other.matmul_tflop_s),
            cache_rates=tuple(
                max(pair, key=lambda each: each.read_tb_s)
                for pair in zip(self.cache_rates, other.cache_rates, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Latency of one engine in milliseconds.

    Attributes:
        min_ms, median_ms, p95_ms, p99_ms: over `repetitions` CUDA graph replays (`is_captured`) with a cold cache; on
            the CPU over back-to-back calls. What is compared is `min_ms`: other work on the machine slows down the
            median.
        warm_ms: the fastest of back-to-back replays.
        uncaptured_ms: the least device time of calls without a graph, with a cold cache.
        enqueue_ms: the least host time of such a call until it returns.
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
    """Timing of one engine at one set of sizes.

    `context_tokens` are the tokens every request holds before the call; None for engines without state. A step runs
    the engine `layer_instances` times, once per layer that shares it; the first one is timed. `backend` is empty in
    reports of earlier versions.
    """

    engine: str
    sizes: dict[str, int]
    context_tokens: int | None
    latency: Latency
    layer_instances: int = 1
    backend: str = ""

    @property
    def title(self) -> str:
        return title(self.engine, self.sizes, self.context_tokens)

    def cells(self) -> dict[str, str | float | None]:
        """Columns of the console table."""
        latency = self.latency
        return {
            "engine": self.title,
            "backend": self.backend,
            "min_ms": latency.min_ms,
            "median_ms": latency.median_ms,
            "p95_ms": latency.p95_ms,
            "p99_ms": latency.p99_ms,
            "no_graph_ms": latency.uncaptured_ms,
            "enqueue_ms": latency.enqueue_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineBound:
    """Minimum FLOPs and bytes of one engine call, and the minimum time at the machine's peak rates.

    Attributes:
        engine: the `EngineFigures.title`.
        weight_bytes: every weight once, plus second reads of weights that do not fit into the cache.
        io_bytes: inputs and outputs.
        memory_bound_ms, compute_bound_ms: time for all bytes at the memory rate, for all FLOPs at the matmul rate.
        roofline: larger of the two bounds as a fraction of the fastest call.
        memory_roof_tb_s: the memory rate of the bound, see `PeakRates.rate_of`.
        intensity: FLOPs per byte. achieved_tflop_s, achieved_tb_s: FLOPs and bytes by the fastest call.
        uncounted: kernels that the cost model does not count; if there are any, the bounds are too low.
    """

    engine: str
    flops: int
    weight_bytes: int
    state_bytes: int
    io_bytes: int
    memory_bound_ms: float
    compute_bound_ms: float
    roofline: float
    uncounted: tuple[str, ...]
    memory_roof_tb_s: float = 0.0
    intensity: float = 0.0
    achieved_tflop_s: float = 0.0
    achieved_tb_s: float = 0.0

    def cells(self) -> dict[str, str | float]:
        """Columns of the console table."""
        return {
            "engine": self.engine,
            "gflop": self.flops / 1e9,
            "weight_mb": self.weight_bytes / 1e6,
            "state_mb": self.state_bytes / 1e6,
            "memory_ms": self.memory_bound_ms,
            "compute_ms": self.compute_bound_ms,
            "roofline_%": round(100 * self.roofline, 1),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """An engine whose fastest call is slower than that of the baseline by more than the tolerance.

    `median_slower_by`: the same of the medians, which other work on the machine slows down as well.
    """

    engine: str
    baseline_ms: float
    min_ms: float
    slower_by: float
    median_slower_by: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchEmbed:
    """Least times of two forms of the vision encoder's patch embedding, and their relative difference."""

    patches: int
    conv3d_ms: float
    linear_ms: float
    ratio: float
    relative_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPhase:
    """One phase of a cold start, and the cumulative seconds from the start of the process to the end of the phase."""

    phase: str
    seconds: float
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRequest:
    """Milliseconds until the complete answer of the first request of a kind after the start, and of its repetition."""

    request: str
    first_ms: float
    second_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One memory transfer rate: `num_bytes` in `ms`; without a rate, `not_run` says why."""

    transfer: str
    num_bytes: int
    ms: float | None
    gb_s: float | None
    not_run: str = ""

    def cells(self) -> dict[str, str | float | None]:
        """Columns of the console table."""
        return {
            "transfer": self.transfer,
            "mb": self.num_bytes / 1e6 if self.num_bytes else None,
            "ms": self.ms,
            "gb_s": self.gb_s,
            "not_run": self.not_run,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePair:
    """An engine of this artifact and its counterpart in another one, timed alternately.

    `ratio` is other / this, of the minima.
    """

    engine: str
    backend: str
    min_ms: float
    median_ms: float
    other_backend: str
    other_min_ms: float
    other_median_ms: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one engine takes of a token, a patch or a first audio of one request.

    Attributes:
        calls: of the engine, one for each layer that shares it.
        ms: of all calls, by the fastest one; `median_ms` by the median.
        share: of the sum of all engines.
        roof_ms, gap_ms: `ms` at the roofline bound, and how much more it is; None without a counted cost.
    """

    of: str
    engine: str
    backend: str
    calls: int
    ms: float
    median_ms: float
    share: float
    roof_ms: float | None
    gap_ms: float | None

    def cells(self) -> dict[str, str | float | None]:
        """Columns of the console table."""
        return {
            "engine": self.engine if self.calls == 1 else f"{self.calls} x {self.engine}",
            "of": self.of,
            "share_%": round(100 * self.share, 1),
            "ms": self.ms,
            "roof_ms": self.roof_ms,
            "gap_ms": self.gap_ms,
            "median_ms": self.median_ms,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine and the versions of a probe; None for unknown ones. `measured_at` is in UTC."""

    measured_at: str
    mingc: str
    python: str
    torch: str
    onnxruntime: str | None
    cuda: str | None
    driver: str | None
    nccl: str | None
    system: str
    cpu: str
    cores: int
    torch_threads: int
    memory_gib: float
    gpus: tuple[str, ...]

    def cells(self) -> dict[str, object]:
        """Columns of the console table."""
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "torch_threads": self.torch_threads,
            "gpus": self.gpus or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """The result of `mingc probe`; a report written with `--json` serves as a baseline.

    `roofline_bounds` lacks engines for which the export counted no cost. `artifact_sha256` is of the manifest's
    content, which has the hashes of all files. `ready_s` is the sum of the phases of `cold_start`; None if it was not
    run. `beside` compares with the artifact `beside_artifact`, whose figures are `beside_engines`.
    """

    artifact: str
    model: str
    dtype: str
    torch: str
    peak_rates: PeakRates
    tolerance: float | None
    summary: tuple[Part, ...] = ()
    regressions: tuple[Regression, ...]
    engines: tuple[EngineFigures, ...]
    roofline_bounds: tuple[RooflineBound, ...]
    only_here: tuple[str, ...]
    only_in_baseline: tuple[str, ...]
    patch_embed: tuple[PatchEmbed, ...] = ()
    artifact_sha256: str = ""
    command: str = ""
    environment: Environment | None = None
    ready_s: float | None = None
    cold_start: tuple[StartPhase, ...] = ()
    first_requests: tuple[FirstRequest, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    beside_artifact: str | None = None
    beside: tuple[EnginePair, ...] = ()
    beside_engines: tuple[EngineFigures, ...] = field(default=(), metadata={"shown": False})
    notes: tuple[str, ...] = field(default=())


def title(engine: str, sizes: Mapping[str, int], context: int | None = None) -> str:
    """Title of an engine: name, sizes, tokens per request; for example `talker.step B=16 +256`."""
    words = [engine, *(f"{name}={size}" for name, size in sizes.items())]
    return " ".join(words if context is None else [*words, f"+{context}"])


def roofline_bound(
    figures: EngineFigures, cost: EngineCost, io_bytes: int, peak_rates: PeakRates
) -> RooflineBound:
    """Roofline bounds of `cost`, counted at export, at the context of `figures` and relative to their fastest call."""
    context = figures.context_tokens or 0
    flops = cost.flops + context * cost.context_flops
    state_bytes = cost.state_bytes + context * cost.context_bytes
    weight_bytes = cost.weight_bytes
    if peak_rates.cache_bytes is not None and weight_bytes > peak_rates.cache_bytes:
        weight_bytes += int(cost.reuse_bytes * (1 - peak_rates.cache_bytes / weight_bytes))
    num_bytes = weight_bytes + state_bytes + io_bytes
    memory_tb_s = peak_rates.rate_of(num_bytes)
    bytes_ms = num_bytes / memory_tb_s / 1e9
    flops_ms = flops / peak_rates.matmul_tflop_s / 1e9
    min_ms = figures.latency.min_ms
    return RooflineBound(
        engine=figures.title,
        flops=flops,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
        io_bytes=io_bytes,
        memory_bound_ms=bytes_ms,
        compute_bound_ms=flops_ms,
        roofline=max(bytes_ms, flops_ms) / min_ms,
        uncounted=cost.uncounted,
        memory_roof_tb_s=memory_tb_s,
        intensity=flops / num_bytes if num_bytes else 0.0,
        achieved_tflop_s=flops / min_ms / 1e9,
        achieved_tb_s=num_bytes / min_ms / 1e9,
    )


def above_the_roof(bounds: Sequence[RooflineBound]) -> str | None:
    """Note engines that were faster than their bound; None if there is none."""
    above = [bound for bound in bounds if bound.roofline > 1.0]
    if not above:
        return None
    highest = max(above, key=lambda bound: bound.roofline)
    return (
        f"fault of the roof: {len(above)} engine(s) were faster than the measured rates allow, {highest.engine} by "
        f"{100 * (highest.roofline - 1):.0f} %: the rates are too low, as other work slowed the machine down while "
        "they were measured, or the cost counts more than the engine does"
    )
