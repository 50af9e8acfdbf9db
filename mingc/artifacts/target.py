"""GPU table: one row per GPU, with its size, its peak rates, the kernels it runs and their configurations.

The only module that knows a compute capability or a number of multiprocessors. `mingc.host.machine` reads both from the
driver and looks the row up. A GPU without a row runs on plain kernels: the torch reference of every operation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

KernelFamily = Literal["triton", "clusters"]
"""`triton`: the kernels of mingc/kernels/triton, which use programmatic dependent launch: capability 9.0 or newer.
`clusters`: the CUDA C++ of mingc/kernels/cuda, for thread block clusters, TMA copies and `wgmma`: capability 9.0."""

GemmShape = tuple[int, int, int]

Capability = tuple[int, int]

RTX_CAPABILITIES: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
"""Cards that TensorRT for RTX 1.7 builds engines for."""

_RTX = "rtx:"
_CUDA = "cuda:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The part of a fingerprint that depends on the machine."""

    torch: str
    device: str
    capability: str


def is_rtx(target: str) -> bool:
    """Whether an export target names RTX cards: `rtx:sm86,sm89`."""
    return target.startswith(_RTX)


def rtx_capabilities(target: str) -> tuple[Capability, ...] | None:
    """Compute capabilities of the RTX cards that an export target names, in this order; None: it names none.

    Raises: ValueError, whose message says which word is wrong.
    """
    if not is_rtx(target):
        return None
    names = {sm_name(each): each for each in RTX_CAPABILITIES}
    words = [word.strip() for word in target.removeprefix(_RTX).split(",")]
    unknown = [word for word in words if word not in names]
    if unknown:
        raise ValueError(f"{unknown[0] or 'an empty name'} is not one of {', '.join(names)}")
    if len({*words}) < len(words):
        raise ValueError("names a card twice")
    return tuple(names[word] for word in words)


def names_cuda_gpu(target: str) -> bool:
    """Whether a target has the form `cuda:sm90`, whatever the name behind the colon is."""
    return target.startswith(_CUDA)


def cuda_capability(target: str) -> Capability | None:
    """Compute capability in a target of the form `cuda:sm90`; None: it has another form.

    Raises: ValueError, whose message says what is wrong with the name.
    """
    if not names_cuda_gpu(target):
        return None
    name = target.removeprefix(_CUDA)
    found = re.fullmatch(r"sm([1-9]\d?)(\d)", name)
    if found is None:
        raise ValueError(f"{name or 'an empty name'} is not the name of one GPU, such as sm90")
    return int(found[1]), int(found[2])


def sm_name(capability: Capability) -> str:
    """`sm89` of (8, 9)."""
    return "sm{}{}".format(*capability)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """A GEMM of an expert: `block_n` weight rows by `block_k` inputs per step, `tiles_per_program` tiles.

    `block_k` counts stored elements: an INT4 element holds two inputs.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    tiles_per_program: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvConfig:
    """A GEMV for one token: `block_n` weight rows by `block_k` inputs per step, `num_programs` programs in total."""

    block_n: int
    block_k: int
    num_programs: int
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedNormGemvConfig:
    """A GEMV with norm, activation and residual: `block_n` weight rows a program, read `block_k` inputs at a time."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig:
    """A GEMM with norm, activation and residual; `split_k` programs share the inputs of a tile."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterGemmConfig:
    """A GEMM of the DiT: `cluster_size` thread blocks split the K of `block_n` outputs; slices in flight."""

    block_n: int
    cluster_size: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSamplerConfig:
    """Flow matching for at most `max_requests`: GEMMs of the DiT, whose tiles have rows of `tile_requests`.

    `project`: the output projection after attention, which is a kernel of its own then; None: one kernel does both.
    """

    max_requests: int
    tile_requests: int
    qkv: ClusterGemmConfig
    up: ClusterGemmConfig
    down: ClusterGemmConfig
    project: ClusterGemmConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One GPU.

    Attributes:
        name: the name of the row, or the driver's name of a GPU without a row.
        device_name: regular expression that the driver's name matches; None: no row.
        num_multiprocessors: as the driver reports them; a partition of a GPU has fewer than the row.
        memory_gb, memory_tb_s, bf16_tflop_s: by the vendor's data sheet, matmul without sparsity; None: unknown.
        kernels: families of kernels in addition to the plain ones.
        is_measured: whether speed was measured on this GPU.
        gemv: configurations by (n, k, bytes per weight).
        fused_norm_gemv: configurations by (n, k).
        linear: configurations by (rows, or the power of two above them, n, k).
        flow_sampler: configurations, that of the smallest batches first.
    """

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    device_name: str | None = None
    memory_gb: int | None = None
    memory_tb_s: float | None = None
    bf16_tflop_s: int | None = None
    kernels: tuple[KernelFamily, ...] = ()
    is_measured: bool = False
    gemv: Mapping[GemmShape, GemvConfig] = field(default_factory=dict, repr=False)
    fused_norm_gemv: Mapping[tuple[int, int], FusedNormGemvConfig] = field(default_factory=dict, repr=False)
    linear: Mapping[GemmShape, LinearConfig] = field(default_factory=dict, repr=False)
    flow_sampler: tuple[FlowSamplerConfig, ...] = field(default=(), repr=False)

    @property
    def is_known(self) -> bool:
        """Whether the table has a row for this GPU."""
        return self.device_name is not None

    @property
    def architecture(self) -> str:
        """Architecture for the CUDA compiler, with the instructions of this architecture alone."""
        return "sm_{}{}a".format(*self.capability)

    def describe(self) -> str:
        """One line for logs and reports."""
        if not self.is_known:
            capability = "{}.{}".format(*self.capability)
            return (
                f"unknown GPU {self.name} (compute capability {capability}, {self.num_multiprocessors} "
                "multiprocessors): runs on plain kernels; speed not measured"
            )
        measured = "" if self.is_measured else "; speed not measured"
        return (
            f"{self.name}: {self.num_multiprocessors} multiprocessors, {self.memory_gb} GB at {self.memory_tb_s} TB/s, "
            f"{self.bf16_tflop_s} TFLOP/s in bfloat16; runs on {' and '.join(self.kernels)} kernels{measured}"
        )


# Measured on an H200 (benchmarks/NOTES-thinker.md).
_GEMV: Mapping[GemmShape, GemvConfig] = {
    (1280, 4096, 2): GemvConfig(block_n=4, block_k=4096, num_programs=320, num_warps=4),
    (4096, 1024, 2): GemvConfig(block_n=4, block_k=1024, num_programs=1024, num_warps=4),
    (5120, 4096, 1): GemvConfig(block_n=4, block_k=4096, num_programs=1280, num_warps=4),
    (4096, 4096, 1): GemvConfig(block_n=8, block_k=4096, num_programs=512, num_warps=4),
    (39296, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=528, num_warps=8),
    (157184, 4096, 1): GemvConfig(block_n=8, block_k=4096, num_programs=19648, num_warps=4),
    (640, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=320, num_warps=4),
    (4096, 512, 2): GemvConfig(block_n=8, block_k=512, num_programs=512, num_warps=4),
    (2560, 4096, 2): GemvConfig(block_n=2, block_k=4096, num_programs=528, num_warps=8),
    (4096, 2048, 2): GemvConfig(block_n=2, block_k=2048, num_programs=528, num_warps=4),
}

# Measured on an H200 (benchmarks/NOTES.md): the speech LLM of the released model.
_FUSED_NORM_GEMV: Mapping[tuple[int, int], FusedNormGemvConfig] = {
    (1152, 896): FusedNormGemvConfig(block_n=8, block_k=128, num_warps=4),
    (896, 896): FusedNormGemvConfig(block_n=1, block_k=128, num_warps=1),
    (4864, 896): FusedNormGemvConfig(block_n=2, block_k=128, num_warps=1),
    (896, 4864): FusedNormGemvConfig(block_n=4, block_k=256, num_warps=4),
}

# Measured on an H200 (benchmarks/NOTES.md): the shapes of the released model.
_LINEAR: Mapping[GemmShape, LinearConfig] = {
    (16, 1152, 896): LinearConfig(block_m=16, block_n=16, block_k=128, num_stages=5),
    (16, 4864, 896): LinearConfig(block_m=16, block_n=64, block_k=128, num_stages=5),
    (16, 896, 896): LinearConfig(block_m=16, block_n=64, block_k=64, split_k=7),
    (16, 896, 4864): LinearConfig(block_m=16, block_n=32, block_k=128, split_k=19),
    (16, 3072, 1024): LinearConfig(block_m=16, block_n=32, block_k=256, num_stages=4),
    (16, 4096, 1024): LinearConfig(block_m=16, block_n=64, block_k=256, num_stages=4),
    (16, 1024, 1024): LinearConfig(block_m=16, block_n=32, block_k=64, split_k=4, num_stages=5),
    (16, 1024, 4096): LinearConfig(block_m=16, block_n=32, block_k=128, split_k=4, num_stages=5),
    (32, 1152, 896): LinearConfig(block_m=32, block_n=16, block_k=128, num_stages=5),
    (32, 4864, 896): LinearConfig(block_m=32, block_n=64, block_k=128, num_stages=5),
    (32, 896, 896): LinearConfig(block_m=32, block_n=32, block_k=64, split_k=2, num_stages=5),
    (32, 896, 4864): LinearConfig(block_m=32, block_n=32, block_k=64, split_k=4, num_stages=5),
    # Frames of one request's audio decoder. It runs beside the next patch: few programs with little shared memory,
    # which leave room for the DiT's kernels, gain more than the configurations that are fastest alone.
    (18, 1152, 896): LinearConfig(block_m=32, block_n=64, block_k=64, num_stages=4),
    (18, 4864, 896): LinearConfig(block_m=32, block_n=128, block_k=64, num_stages=3, num_warps=8),
    (18, 896, 896): LinearConfig(block_m=32, block_n=32, block_k=64, num_stages=4),
    (18, 896, 4864): LinearConfig(block_m=32, block_n=32, block_k=128, split_k=2, num_stages=4),
    # The thinker, FP8 weights only: one rank, then a quarter.
    (16, 5120, 4096): LinearConfig(block_m=16, block_n=64, block_k=256, num_stages=4),
    (16, 4096, 4096): LinearConfig(block_m=16, block_n=64, block_k=256, num_stages=4),
    (16, 157184, 4096): LinearConfig(block_m=16, block_n=64, block_k=128, num_stages=4),
    (16, 1280, 4096): LinearConfig(block_m=16, block_n=32, block_k=256, num_stages=4),
    (16, 39296, 4096): LinearConfig(block_m=16, block_n=64, block_k=256, num_stages=4),
    (32, 4096, 4096): LinearConfig(block_m=32, block_n=32, block_k=256, num_stages=4),
    (32, 1280, 4096): LinearConfig(block_m=32, block_n=32, block_k=256, num_stages=4),
    (32, 157184, 4096): LinearConfig(block_m=32, block_n=64, block_k=128, num_stages=4),
}

# Measured on an H200 (benchmarks/NOTES.md).
_FLOW_SAMPLER = (
    FlowSamplerConfig(
        max_requests=1,
        tile_requests=1,
        qkv=ClusterGemmConfig(block_n=64, cluster_size=2, num_stages=4),
        up=ClusterGemmConfig(block_n=64, cluster_size=2, num_stages=4),
        down=ClusterGemmConfig(block_n=64, cluster_size=8, num_stages=4),
    ),
    FlowSamplerConfig(
        max_requests=2,
        tile_requests=1,
        qkv=ClusterGemmConfig(block_n=64, cluster_size=2, num_stages=4),
        up=ClusterGemmConfig(block_n=64, cluster_size=2, num_stages=4),
        down=ClusterGemmConfig(block_n=64, cluster_size=8, num_stages=4),
        project=ClusterGemmConfig(block_n=64, cluster_size=4, num_stages=4),
    ),
    FlowSamplerConfig(
        max_requests=4,
        tile_requests=2,
        qkv=ClusterGemmConfig(block_n=128, cluster_size=2, num_stages=4),
        up=ClusterGemmConfig(block_n=128, cluster_size=2, num_stages=4),
        down=ClusterGemmConfig(block_n=128, cluster_size=8, num_stages=4),
        project=ClusterGemmConfig(block_n=64, cluster_size=4, num_stages=4),
    ),
)

_H200 = Target(
    name="NVIDIA H200",
    device_name=r"\bH200\b",
    capability=(9, 0),
    num_multiprocessors=132,
    memory_gb=141,
    memory_tb_s=4.8,
    bf16_tflop_s=989,
    kernels=("triton", "clusters"),
    is_measured=True,
    gemv=_GEMV,
    fused_norm_gemv=_FUSED_NORM_GEMV,
    linear=_LINEAR,
    flow_sampler=_FLOW_SAMPLER,
)
# The same chip with other memory, so it has the H200's kernels and configurations. The figures are for the SXM model.
_H100 = replace(
    _H200,
    name="NVIDIA H100",
    device_name=r"\bH100\b",
    memory_gb=80,
    memory_tb_s=3.35,
)

TARGETS = (_H200, _H100)


@functools.cache
def lookup(capability: tuple[int, int], device_name: str, num_multiprocessors: int) -> Target:
    """The row of a GPU as its driver describes it, with the driver's number of multiprocessors.

    A GPU without a row gets a target without special kernels.
    """
    for row in TARGETS:
        assert row.device_name is not None
        if row.capability == capability and re.search(row.device_name, device_name):
            return replace(row, num_multiprocessors=num_multiprocessors)
    return Target(name=device_name, capability=capability, num_multiprocessors=num_multiprocessors)
