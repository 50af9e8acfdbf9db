"""Timing of mixture-of-experts kernels on the current GPU, with random weights and random routing."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mingc.errors import ExportError
from mingc.export.autotune.selection import Selection, select_fastest
from mingc.export.process_pool import gives_memory_back
from mingc.export.stage import ExpertDims
from mingc.host.machine import gpu
from mingc.kernels.dispatch import use_triton
from mingc.kernels.moe_experts import ExpertWeights, moe_experts
from mingc.kernels.moe_gemv import RouterWeights, moe_gemv
from mingc.kernels.quantized import INT4_GROUP
from mingc.kernels.triton.moe_config import FP8, INT4, MoeConfig, MoeProblem, use_tuned_configs

# A share of the largest value, as in the kernels' tests: configurations sum in different orders, in bfloat16.
TOLERANCE = 1.5e-2
_ROUNDS = 15  # timings of each configuration, in turns
_WARM_UPS = 2
_MIN_SETS, _MAX_SETS = 4, 16  # sets of inputs, each with its own routing
_CACHES = 4  # all sets together read this many times the L2 cache, so that weights do not stay in it
_EPS, _SCALE = 1e-6, 2.5

Inputs = tuple[Tensor, Tensor, Tensor]
"""Inputs of one call: tokens (T, D), expert ids (T, K) int64 and their weights (T, K) float32."""


class RandomExperts:
    """One rank's experts, shared expert and router. Without `has_values` the weights are uninitialized memory.

    A shared expert of another intermediate size runs in its own kernels and is left out.
    """

    def __init__(
        self, dims: ExpertDims, weight_format: int, *, has_values: bool = True, device: str = "cuda"
    ) -> None:
        self.dims, self.weight_format, self._has_values, self._device = (
            dims,
            weight_format,
            has_values,
            device,
        )
        self._generator = torch.Generator(device).manual_seed(0)
        self.experts = self._weights(dims.num_experts)
        self.shared = self._weights() if dims.shared_intermediate_size == dims.intermediate_size else None
        weight = self._matrix(1, dims.num_experts, dims.hidden_size, size=dims.hidden_size**-0.5)
        self._router = RouterWeights(
            weight, torch.zeros(1, dims.num_experts, device=self._device), dims.num_groups, dims.num_kept_groups,
            dims.top_k, _SCALE,
        )  # fmt: skip
        self._norm = torch.ones(dims.hidden_size, dtype=torch.bfloat16, device=self._device)

    def inputs(self, tokens: int, sets: int) -> list[Inputs]:
        """Make `sets` sets of inputs. Tokens are routed at random, the worst case for the number of experts read."""
        dims, made = self.dims, []
        for _ in range(sets):
            scores = torch.rand(tokens, dims.num_experts, generator=self._generator, device=self._device)
            x = torch.randn(tokens, dims.hidden_size, generator=self._generator, device=self._device)
            weights = torch.rand(tokens, dims.top_k, generator=self._generator, device=self._device)
            made.append((x.to(torch.bfloat16), scores.topk(dims.top_k).indices, weights))
        return made

    def run(self, problem: MoeProblem, inputs: Inputs) -> Tensor:
        """Output (T, D) of the Triton kernels of `problem`, or of plain torch where none run.

        The output of a chunk lacks the shared expert, which runs elsewhere.
        """
        x, ids, weights = inputs
        if problem.kernel == "moe_gemv":
            return moe_gemv(x, x, self._norm, _EPS, self._router, self.experts, self.shared)[1]
        shared = None if problem.kernel == "grouped" else self.shared
        if not use_triton(x):
            return moe_experts(x, ids, weights, *self.experts, shared=shared)
        # Not by `moe_experts`, which may choose CUDA C++.
        from mingc.kernels.triton.moe_decode import moe_decode
        from mingc.kernels.triton.moe_prefill import moe_prefill

        if problem.kernel == "grouped":
            chunk: Tensor = moe_prefill(x, ids, weights, *self.experts, None, None)
            return chunk
        parts = (None, None, None, None) if shared is None else shared
        step: Tensor = moe_decode(x, ids, weights, *self.experts, *parts)
        return step

    def read_bytes(self, inputs: Inputs) -> float:
        """Weight bytes of all experts that some token is routed to, and of the shared one."""
        one = self.experts.gate_up[0].nbytes + self.experts.down[0].nbytes
        read = torch.bincount(inputs[1].flatten(), minlength=self.dims.num_experts).count_nonzero()
        return float(one * (read + int(self.shared is not None)))

    def _weights(self, *leading: int) -> ExpertWeights:
        dims = self.dims
        gate_up, gate_up_scale = self._stored(*leading, 2 * dims.intermediate_size, dims.hidden_size)
        down, down_scale = self._stored(*leading, dims.hidden_size, dims.intermediate_size)
        return ExpertWeights(gate_up, down, gate_up_scale, down_scale)

    def _stored(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        """A matrix of values with a variance of 1/K, and its scales."""
        *rows, inputs = shape
        size = inputs**-0.5
        if self.weight_format == FP8:
            weight = self._matrix(*shape, dtype=torch.float8_e4m3fn)
            return weight, torch.full(rows, size, device=self._device)
        if self.weight_format == INT4:
            packed = torch.empty(*rows, inputs // 2, dtype=torch.uint8, device=self._device)
            if self._has_values:
                packed.random_(generator=self._generator)
            groups = (*rows, -(-inputs // INT4_GROUP))
            return packed, torch.full(groups, size / 4, dtype=torch.bfloat16, device=self._device)
        return self._matrix(*shape, size=size), None

    def _matrix(self, *shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        if self._has_values:
            # One expert at a time: FP8 needs a bfloat16 copy.
            for part in weight.view(-1, *shape[-2:]):
                values = torch.empty(part.shape, dtype=torch.bfloat16, device=self._device)
                part.copy_(values.normal_(0, size, generator=self._generator))
        return weight


class ProblemTimer:
    """Times configurations of one problem and compares their outputs with the output of the first one."""

    def __init__(self, experts: RandomExperts, problem: MoeProblem) -> None:
        self._experts, self._problem = experts, problem
        bytes_each = experts.read_bytes(experts.inputs(problem.tokens, 1)[0])
        sets = _CACHES * gpu().cache_bytes / bytes_each
        self.inputs = experts.inputs(problem.tokens, min(max(_MIN_SETS, int(sets) + 1), _MAX_SETS))
        self._graphs: dict[MoeConfig, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._expected: Tensor | None = None

    def time_us(self, configs: Sequence[MoeConfig]) -> list[float]:
        """Median microseconds of a call with each configuration. Raises: ExportError when outputs differ."""
        graphs = [self._graph(config) for config in configs]
        for graph in graphs * _WARM_UPS:
            graph.replay()
        times = [[_timed(graph.replay) for graph in graphs] for _ in range(_ROUNDS)]
        torch.cuda.synchronize()
        return [
            statistics.median(1e3 * start.elapsed_time(end) / len(self.inputs) for start, end in each)
            for each in zip(*times, strict=True)
        ]

    def _graph(self, config: MoeConfig) -> torch.cuda.CUDAGraph:
        """A captured call for each set of inputs: launching from the host takes longer than one-token kernels run."""
        if config not in self._graphs:
            with use_tuned_configs({self._problem: config}):
                output = self._experts.run(self._problem, self.inputs[0])
                if self._expected is None:
                    self._expected = output
                check_result(self._problem, config, output, self._expected)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    for inputs in self.inputs:
                        self._experts.run(self._problem, inputs)
            self._graphs[config] = graph
        return self._graphs[config]


def check_result(problem: MoeProblem, config: MoeConfig, output: Tensor, expected: Tensor) -> None:
    """Compare the outputs of two configurations. Raises: ExportError when they differ by more than rounding."""
    error = float((output.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error <= TOLERANCE:  # also true for NaN
        raise ExportError(
            f"a kernel configuration for {problem.tokens} tokens gives another result than the default: {error:.2g} of"
            f" the largest value off, {TOLERANCE} allowed",
            where=f"{problem.kernel} kernels, {config}",
            fix="report this; --no-autotune exports with the default configurations",
        )


_uninitialized = functools.cache(functools.partial(RandomExperts, has_values=False))


def fits(dims: ExpertDims, problem: MoeProblem, config: MoeConfig) -> bool:
    """Compile the kernels of `problem` into Triton's cache; False when the GPU lacks shared memory or registers.

    The process keeps the memory of the weights: allocating it takes longer than compiling.
    """
    from triton.runtime.errors import OutOfResources

    experts = _uninitialized(dims, problem.weight_format)
    x = torch.zeros(problem.tokens, problem.hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(problem.top_k, device="cuda").repeat(problem.tokens, 1)
    try:
        with use_tuned_configs({problem: config}):
            experts.run(problem, (x, ids, ids.float()))
        torch.cuda.synchronize()
    except OutOfResources:
        return False
    return True


@gives_memory_back()
def time_problems(
    dims: ExpertDims, configs: Sequence[tuple[MoeProblem, tuple[MoeConfig, ...]]]
) -> list[Selection]:
    """Select among the configurations of each problem, the default first; their kernels should be compiled already.

    Raises: ExportError, torch.OutOfMemoryError.
    """
    experts = RandomExperts(dims, configs[0][0].weight_format)
    return [
        select_fastest(problem, each, ProblemTimer(experts, problem).time_us) for problem, each in configs
    ]


def _timed(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events on the device before and after `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    return start, end
