"""The experts' kernels tried on the device at hand: random weights, random routing. `tile_choice` has the decision."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mingc.errors import ExportError
from mingc.export.autotune.selection import Choice, choose
from mingc.export.process_pool import gives_memory_back
from mingc.export.stage import ExpertDims
from mingc.kernels.moe_experts import Weights, moe_experts
from mingc.kernels.moe_gemv import RouterWeights, moe_gemv
from mingc.kernels.quantized import INT4_GROUP
from mingc.kernels.triton.moe_config import FP8, INT4, Cut, Shape, using

# Cuts add up in other orders, and outputs are bfloat16: of the largest value, as the kernels' tests allow it.
TOLERANCE = 1.5e-2
_ROUNDS = 15  # timings of each cut, by turns
_WARM_UPS = 2
_LEAST_SETS, _MOST_SETS = 4, 16  # of inputs, each with a routing of its own
_CACHES = 4  # what all sets read, in caches of the device: weights must not lie there still
_EPS, _SCALE = 1e-6, 2.5

Inputs = tuple[Tensor, Tensor, Tensor]
"""Of one call: tokens (T, D), expert ids (T, K) int64 and their weights (T, K) float32."""


class RandomExperts:
    """One rank's experts, shared expert and router. Without `is_drawn` weights are what lies in the device's memory.

    A shared expert of another width than the others has kernels of its own, and is left out.
    """

    def __init__(
        self, dims: ExpertDims, storage: int, *, is_drawn: bool = True, device: str = "cuda"
    ) -> None:
        self.dims, self.storage, self._is_drawn, self._device = dims, storage, is_drawn, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.experts = self._weights(dims.num_experts)
        self.shared = self._weights() if dims.shared_width == dims.width else None
        router = self._matrix(1, dims.num_experts, dims.hidden_size, size=dims.hidden_size**-0.5)
        self._gates = RouterWeights(
            router, torch.zeros(1, dims.num_experts, device=self._device), dims.num_groups, dims.num_kept_groups,
            dims.num_chosen, _SCALE,
        )  # fmt: skip
        self._norm = torch.ones(dims.hidden_size, dtype=torch.bfloat16, device=self._device)

    def inputs(self, tokens: int, sets: int) -> list[Inputs]:
        """Each token is routed at random by itself: the worst case for how many experts are read."""
        dims, made = self.dims, []
        for _ in range(sets):
            scores = torch.rand(tokens, dims.num_experts, generator=self._generator, device=self._device)
            x = torch.randn(tokens, dims.hidden_size, generator=self._generator, device=self._device)
            mix = torch.rand(tokens, dims.num_chosen, generator=self._generator, device=self._device)
            made.append((x.to(torch.bfloat16), scores.topk(dims.num_chosen).indices, mix))
        return made

    def run(self, shape: Shape, inputs: Inputs) -> Tensor:
        """What the kernels of `shape` give, (T, D); a chunk's without the shared expert, which is not theirs."""
        x, ids, mix = inputs
        if shape.kernel == "moe_gemv":
            return moe_gemv(x, x, self._norm, _EPS, self._gates, self.experts, self.shared)[1]
        return moe_experts(
            x, ids, mix, *self.experts, shared=None if shape.kernel == "grouped" else self.shared
        )

    def read_bytes(self, inputs: Inputs) -> float:
        """Of the weights of all experts that somebody chose, and of the shared one."""
        one = self.experts.gate_up[0].nbytes + self.experts.down[0].nbytes
        read = torch.bincount(inputs[1].flatten(), minlength=self.dims.num_experts).count_nonzero()
        return float(one * (read + int(self.shared is not None)))

    def _weights(self, *leading: int) -> Weights:
        dims = self.dims
        gate_up, gate_up_scale = self._stored(*leading, 2 * dims.width, dims.hidden_size)
        down, down_scale = self._stored(*leading, dims.hidden_size, dims.width)
        return Weights(gate_up, down, gate_up_scale, down_scale)

    def _stored(self, *shape: int) -> tuple[Tensor, Tensor | None]:
        """A matrix of values with a variance of 1/K, and its scales."""
        *rows, inputs = shape
        size = inputs**-0.5
        if self.storage == FP8:
            weight = self._matrix(*shape, dtype=torch.float8_e4m3fn)
            return weight, torch.full(rows, size, device=self._device)
        if self.storage == INT4:
            packed = torch.empty(*rows, inputs // 2, dtype=torch.uint8, device=self._device)
            if self._is_drawn:
                packed.random_(generator=self._generator)
            groups = (*rows, -(-inputs // INT4_GROUP))
            return packed, torch.full(groups, size / 4, dtype=torch.bfloat16, device=self._device)
        return self._matrix(*shape, size=size), None

    def _matrix(self, *shape: int, dtype: torch.dtype = torch.bfloat16, size: float = 1.0) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=self._device)
        if self._is_drawn:
            # An expert at a time: in FP8 it takes a wider copy.
            for part in weight.view(-1, *shape[-2:]):
                wide = torch.empty(part.shape, dtype=torch.bfloat16, device=self._device)
                part.copy_(wide.normal_(0, size, generator=self._generator))
        return weight


class ShapeTrial:
    """Times cuts of one shape's kernels, and holds what each gives against what the first one did."""

    def __init__(self, experts: RandomExperts, shape: Shape) -> None:
        self._experts, self._shape = experts, shape
        a_call = experts.read_bytes(experts.inputs(shape.tokens, 1)[0])
        wanted = _CACHES * torch.cuda.get_device_properties().L2_cache_size / a_call
        self.inputs = experts.inputs(shape.tokens, min(max(_LEAST_SETS, int(wanted) + 1), _MOST_SETS))
        self._graphs: dict[Cut, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._expected: Tensor | None = None

    def time_us(self, cuts: Sequence[Cut]) -> list[float]:
        """Median microseconds of a call with each cut. Raises: ExportError when one gives another result."""
        graphs = [self._graph(cut) for cut in cuts]
        for graph in graphs * _WARM_UPS:
            graph.replay()
        times = [[_timed(graph.replay) for graph in graphs] for _ in range(_ROUNDS)]
        torch.cuda.synchronize()
        return [
            statistics.median(1e3 * start.elapsed_time(end) / len(self.inputs) for start, end in each)
            for each in zip(*times, strict=True)
        ]

    def _graph(self, cut: Cut) -> torch.cuda.CUDAGraph:
        """A call for each set of inputs, captured: kernels of one token are over before the host has launched them."""
        if cut not in self._graphs:
            with using({self._shape: cut}):
                given = self._experts.run(self._shape, self.inputs[0])
                if self._expected is None:
                    self._expected = given
                check_result(self._shape, cut, given, self._expected)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    for inputs in self.inputs:
                        self._experts.run(self._shape, inputs)
            self._graphs[cut] = graph
        return self._graphs[cut]


def check_result(shape: Shape, cut: Cut, given: Tensor, expected: Tensor) -> None:
    """Raises: ExportError when two cuts differ by more than rounding."""
    error = float((given.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error <= TOLERANCE:  # not a number is none, too
        raise ExportError(
            f"a cut of the kernels for {shape.tokens} tokens gives other results than the usual one: {error:.2g} of the"
            f" largest value off, {TOLERANCE} allowed",
            where=f"{shape.kernel} kernels, {cut}",
            fix="report this; with --no-autotune nothing is tried",
        )


_empty = functools.cache(functools.partial(RandomExperts, is_drawn=False))


def fits(dims: ExpertDims, shape: Shape, cut: Cut) -> bool:
    """Compile the kernels of `shape` into Triton's cache; false when the device has too little of what they need.

    The process keeps memory for the weights: to get it costs more than to compile.
    """
    from triton.runtime.errors import OutOfResources

    experts = _empty(dims, shape.storage)
    x = torch.zeros(shape.tokens, shape.hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(shape.chosen, device="cuda").repeat(shape.tokens, 1)
    try:
        with using({shape: cut}):
            experts.run(shape, (x, ids, ids.float()))
        torch.cuda.synchronize()
    except OutOfResources:
        return False
    return True


@gives_memory_back()
def time_shapes(dims: ExpertDims, cuts: Sequence[tuple[Shape, tuple[Cut, ...]]]) -> list[Choice]:
    """Choose among the cuts of each shape, the rule's first; their kernels should be compiled already.

    Raises: ExportError, torch.OutOfMemoryError.
    """
    experts = RandomExperts(dims, cuts[0][0].storage)
    return [choose(shape, each, ShapeTrial(experts, shape).time_us) for shape, each in cuts]


def _timed(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events before and behind `run` on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    return start, end
