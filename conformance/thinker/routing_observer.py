"""The thinker's graphs with observed routing: follow the reference's routing, teacher-force, perturb, count ties.

Rounding decides between experts with nearly equal scores. A token routed to another expert differs from the reference
by a whole expert, as does everything computed from it, although no weight or kernel is wrong. Such a row may resume
from the reference if the same engine, given the row perturbed by no more than rounding error, returns the reference
row. Perturbation cannot hide a wrong weight, router or kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conformance.sublayer_fit import SublayerFit
from mingc.artifacts.spec import GraphSpec, join_path
from mingc.numerics.gather_shards import gather_shards
from mingc.numerics.perturbation import add_relative_noise, row_errors
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.stage_loader import LoadedStage

_FEED_FORWARD = re.compile(r"^layers\.(?P<layer>\d+)\.feed_forward$")
_ROUTED = "_experts"  # suffix of graphs that route tokens to experts
_MIN_PERTURBATIONS = 64  # perturbations tried per row

Run = Callable[[Sequence[Tensor]], list[Tensor]]
# off: record outputs only. count_ties: count rows that rounding could route elsewhere. follow_reference: rows that left
# the reference by rounding resume from it. teacher_force: every row of every layer resumes from the reference.
# perturb: add random rounding error to the inputs of the experts.
Mode = Literal["off", "count_ties", "follow_reference", "teacher_force", "perturb"]


class RoutingObserver:
    """Observes the output rows of every layer during a run.

    Args:
        tolerance: error of a row, relative to the layer's largest reference value, above which the row counts as
            rerouted. Perturbations are half of it, relative to a row's root mean square.

    Attributes:
        num_rerouted: rows that rounding routed to other experts than the reference's.
        num_ties: rows that rounding could route to other experts.
        fits: per layer, the sublayer outputs of rows that were not rerouted, fitted to the reference; set in
            `follow_reference` runs.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._generator = torch.Generator().manual_seed(0)
        self.begin("off")

    def begin(self, mode: Mode, reference: NDArray[np.float32] | None = None) -> None:
        """Observe another run; `reference` (L, T, D) holds the layer outputs of all its tokens."""
        assert (reference is not None) == (mode in ("follow_reference", "teacher_force")), (
            "only these modes use a reference"
        )
        self._mode = mode
        self._reference = None if reference is None else torch.from_numpy(reference)
        self._outputs: dict[int, list[Tensor]] = {}
        self.num_rerouted = 0
        self.num_ties = 0
        self.fits: dict[int, SublayerFit] = {}
        self.next(0, 0)

    def next(self, first: int, count: int) -> None:
        """Announce the next step: `count` tokens from token `first` of the run."""
        self._tokens = slice(first, first + count)

    @property
    def layers(self) -> NDArray[np.float32]:
        """Output rows (L, T, D) float32 of the engines; reference rows where rerouted."""
        rows = torch.stack([torch.cat(self._outputs[layer]) for layer in sorted(self._outputs)])
        layers: NDArray[np.float32] = rows.numpy()
        return layers

    def observe(self, layer: int, is_routed: bool, run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call `run`, a layer's feed-forward. Inputs and outputs start with the residual and its pending update."""
        outputs = run(tensors)
        count = self._tokens.stop - self._tokens.start
        rows = _residual_stream(outputs)[:count]
        match self._mode:
            case "count_ties" if is_routed:
                scale, every = float(rows.abs().max()), torch.arange(count)
                is_away = self._reachable_by_perturbation(
                    run,
                    tensors,
                    every,
                    lambda found, source: row_errors(found, rows[source], scale) > self._tolerance,
                )
                self.num_ties += int(is_away.sum())
            case "perturb" if is_routed:
                residual, delta, *others = tensors
                perturbed = self._perturbed(_residual_stream(tensors))
                outputs[1] = run([perturbed.to(residual), torch.zeros_like(delta), *others])[1]
            case "follow_reference":
                rerouted = self._find_rerouted(layer, is_routed, rows, run, tensors)
                self._fit(layer, rerouted, tensors, outputs)
                self._resume_from_reference(layer, rerouted, outputs)
                self.num_rerouted += len(rerouted)
                rows[rerouted] = self._reference_rows(layer)[rerouted]
            case "teacher_force":
                self._resume_from_reference(layer, torch.arange(count), outputs)
        self._outputs.setdefault(layer, []).append(rows)
        return outputs

    def _reference_rows(self, layer: int) -> Tensor:
        """Reference outputs (n, D) of a layer for the tokens of this step."""
        assert self._reference is not None
        return self._reference[layer, self._tokens]

    def _find_rerouted(
        self, layer: int, is_routed: bool, rows: Tensor, run: Run, tensors: Sequence[Tensor]
    ) -> Tensor:
        """Indices (m,) of a layer's `rows` (n, D) that left the reference by rounding."""
        assert self._reference is not None
        expected, scale = self._reference_rows(layer), float(self._reference[layer].abs().max())
        off = (row_errors(rows, expected, scale) > self._tolerance).nonzero().squeeze(1)
        if not is_routed or not len(off):
            return off[:0]
        is_back = self._reachable_by_perturbation(
            run,
            tensors,
            off,
            lambda found, source: row_errors(found, expected[source], scale) <= self._tolerance,
        )
        return off[is_back]

    def _fit(
        self, layer: int, rerouted: Tensor, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Add a layer's sublayer outputs to its fit, without the rows `rerouted` (m,)."""
        assert self._reference is not None
        expected = self._reference_rows(layer)
        count = len(expected)
        residual, attention, feed_forward = (
            each[:count].float().cpu() for each in (tensors[0], tensors[1], outputs[1])
        )
        before = self._reference_rows(layer - 1) if layer else residual
        is_kept = torch.ones(count, dtype=torch.bool)
        is_kept[rerouted] = False
        parts = (attention, feed_forward, expected - before)
        self.fits.setdefault(layer, SublayerFit()).add(*(part[is_kept].numpy() for part in parts))

    def _resume_from_reference(self, layer: int, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Replace `rows` (m,) of a layer's outputs by the reference."""
        residual, update = outputs[:2]
        place = rows.to(residual.device)
        update[place] = self._reference_rows(layer)[rows].to(residual) - residual[place]

    def _reachable_by_perturbation(
        self,
        run: Run,
        tensors: Sequence[Tensor],
        rows: Tensor,
        is_reached: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Test which of `rows` (n,), perturbed by rounding error, give an output that `is_reached` accepts: (n,) bool.

        Args:
            is_reached: maps outputs (m, D) and their source rows (m,) to (m,) bool.
        """
        residual, delta, *others = tensors
        x, batch = _residual_stream(tensors), len(residual)
        left, perturbations = rows, 0
        while len(left) and perturbations < _MIN_PERTURBATIONS:
            # The engine's batch is filled with perturbations of every row.
            copies = batch // len(left)
            source = left.repeat(copies)
            source = torch.cat([source, left[:1].expand(batch - len(source))])
            perturbed = self._perturbed(x[source])
            place = source.to(residual.device)
            outputs = run(
                [perturbed.to(residual), torch.zeros_like(delta), *(each[place] for each in others)]
            )
            left = left[~torch.isin(left, source[is_reached(_residual_stream(outputs), source)])]
            perturbations += copies
        return ~torch.isin(rows, left)

    def _perturbed(self, x: Tensor) -> Tensor:
        """Add random errors of the size of rounding errors to rows (N, D)."""
        return add_relative_noise(x, self._tolerance / 2, self._generator)


def _residual_stream(tensors: Sequence[Tensor]) -> Tensor:
    """Add the pending update to the residual: (N, D) float32 on the host."""
    return tensors[0].float().cpu() + tensors[1].float().cpu()


@dataclass(frozen=True, slots=True)
class _RankGraph:
    """One rank's graph of a layer instance, the rank's KV pages for it, and its device."""

    graph: Graph
    pages: Mapping[str, Tensor]
    device: torch.device


class _SequentialRanks(Engine):
    """Runs one layer instance rank after rank and combines the outputs without collectives."""

    def __init__(self, spec: GraphSpec, first: Graph, others: Sequence[_RankGraph]) -> None:
        self._spec = spec
        self._first = first
        self._others = others
        self._names = [each.name for each in (*spec.inputs, *spec.state)]

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("every rank's graph has its weights")

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        arguments = dict(zip(self._names, tensors, strict=True))
        home = tensors[0].device
        parts = [self._first.run(**arguments)]
        for rank in self._others:
            inputs = {
                name: value.to(rank.device) for name, value in arguments.items() if name not in rank.pages
            }
            outputs = rank.graph.run(**inputs, **rank.pages)
            parts.append({name: value.to(home) for name, value in outputs.items()})
        return [gather_shards(each, [part[each.name] for part in parts]) for each in self._spec.outputs]


class _ObservedEngine(Engine):
    """The feed-forward of a layer, run through a `RoutingObserver`."""

    def __init__(self, engine: Engine, layer: int, is_routed: bool, observer: RoutingObserver) -> None:
        self._engine = engine
        self._layer = layer
        self._is_routed = is_routed
        self._observer = observer

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("the wrapped engine has its weights")

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._observer.observe(self._layer, self._is_routed, self._engine.run, tensors)


@dataclass(frozen=True)
class ObservedStage(LoadedStage):
    """The thinker of all ranks in one process: graphs run rank after rank, feed-forwards are observed.

    Attributes:
        others: the ranks above 0, with their devices.
    """

    observer: RoutingObserver = field(kw_only=True)
    others: Sequence[tuple[LoadedStage, torch.device]] = field(kw_only=True)
    first: LoadedStage = field(kw_only=True)
    _pages: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def allocate_state(self, dims: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        self._pages[:] = [stage.allocate_state(dims, place) for stage, place in self.others]
        return self.first.allocate_state(dims, device)

    def layer_instances(self, graph: str) -> dict[str, Graph]:
        spec = self.graphs[graph].spec
        ranks = [stage.layer_instances(graph) for stage, _ in self.others]
        observed = {}
        for name, first in self.first.layer_instances(graph).items():
            others = [
                _RankGraph(
                    rank[name], {each.name: pages[join_path(name, each.name)] for each in spec.state}, place
                )
                for rank, pages, (_, place) in zip(ranks, self._pages, self.others, strict=True)
            ]
            engine: Engine = _SequentialRanks(spec, first, others)
            match = _FEED_FORWARD.match(name)
            if match is not None:
                engine = _ObservedEngine(engine, int(match["layer"]), graph.endswith(_ROUTED), self.observer)
            observed[name] = Graph(replace(spec, weights=()), {None: engine})
        return observed


def observe_stage(
    first: LoadedStage, others: Sequence[tuple[LoadedStage, torch.device]], observer: RoutingObserver
) -> ObservedStage:
    """Join the stages of all ranks: `first` is rank 0, `others` are the ranks above with their devices."""
    return ObservedStage(
        first.name, first.graphs, first.weights, observer=observer, others=others, first=first
    )
