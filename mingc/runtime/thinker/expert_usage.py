"""Experts that decode steps read: counted at the routers of a step, summed by the loop for metrics.

The time of a decode step depends on how many different experts its tokens select. That number depends on the router
weights, the tokens and the batch size. A step is counted while it runs: before each expert layer, its router is
additionally run in plain torch. The results of the step do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.artifacts.parameters import RouterParameters
from mingc.artifacts.spec import join_path
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.router import route
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.engines.stage_loader import LoadedStage

_TEXT = 0  # the gate of decoded tokens


class ExpertRouters:
    """The routers of a decoder's expert layers."""

    def __init__(self, stage: LoadedStage, parameters: RouterParameters) -> None:
        self._weights = stage.weights
        self._parameters = parameters
        self._layers = frozenset(stage["decode_experts"].spec.layer_instances)

    def count(self, half_layer: str, residual: Tensor, delta: Tensor) -> Tensor | None:
        """Number of different experts () int64 that a step's tokens select in a half-layer; None if it has no experts.

        Args:
            residual, delta: (B, D), the inputs of the half-layer; every row counts, padding included, as the engines
                read the experts of all.

        Scores are float32. In low precision an engine may select another one of two experts with nearly equal scores.
        """
        if half_layer not in self._layers:
            return None

        def weight(name: str) -> Tensor:
            return self._weights[join_path(half_layer, name)]

        router = self._parameters
        normed = rms_norm(residual + delta, weight("norm"), router.norm_eps).to(torch.float32)
        logits = F.linear(normed, weight("router.weight")[_TEXT].to(torch.float32))
        ids, _ = route(
            logits,
            weight("router.bias")[_TEXT],
            num_groups=router.num_groups,
            num_kept_groups=router.num_kept_groups,
            top_k=router.top_k,
            scale=1.0,
        )
        is_read = torch.zeros(logits.shape[1], dtype=torch.int64, device=ids.device)
        return is_read.scatter_(0, ids.flatten(), 1).sum()


class CountedStep:
    """Counts the experts of one decode step; pass `observe` to `ThinkerLayers.decode`."""

    def __init__(self, routers: ExpertRouters) -> None:
        self._routers = routers
        self._counts: list[Tensor] = []

    def observe(self, half_layer: str, residual: Tensor, delta: Tensor) -> None:
        count = self._routers.count(half_layer, residual, delta)
        if count is not None:
            self._counts.append(count)

    def copy_to_host(self, num_rows: int) -> ExpertsRead:
        """Start the copy of the counts of a step of `num_rows` rows."""
        return ExpertsRead(num_rows=num_rows, host_copy=AsyncHostCopy(torch.stack(self._counts)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertsRead:
    """Counts of one decode step (L,) int64, one for each expert layer, being copied to the host.

    Attributes:
        num_rows: rows of the step, padding included.
    """

    num_rows: int
    host_copy: AsyncHostCopy

    def wait(self) -> list[int]:
        """The counts; blocks until the device has computed them."""
        counts: list[int] = self.host_copy.wait()[0].tolist()
        return counts


@dataclass(kw_only=True, slots=True)
class ExpertUsage:
    """Which decode steps are counted, and what was counted since the start.

    Attributes:
        interval_s: seconds between two counted steps; 0: none is counted.
        totals: by rows of a step: how many steps were counted, and the sum of their means over the expert layers. It
            is replaced, not changed, so that other threads may read it.
    """

    interval_s: float = 0.0
    totals: Mapping[int, tuple[int, float]] = field(default_factory=dict, init=False)
    _due_at: float = field(default=0.0, init=False)

    def take_turn(self, now: float) -> bool:
        """Whether the decode step that begins at `now` (`time.perf_counter`) is to be counted."""
        if not self.interval_s or now < self._due_at:
            return False
        self._due_at = now + self.interval_s
        return True

    def add(self, num_rows: int, counts: list[int]) -> float:
        """Add a counted step. Returns its mean over the layers."""
        mean = sum(counts) / len(counts)
        num_steps, total = self.totals.get(num_rows, (0, 0.0))
        self.totals = {**self.totals, num_rows: (num_steps + 1, total + mean)}
        return mean
