"""The thinker's graphs, all ranks in this process, run from recorded states where rounding chose other experts.

Two experts may score alike; then rounding decides between them, and a token's row is off by a whole expert though
nothing is wrong, with all that is computed from it. So a row that leaves its record may go on from there, if the same
engine, given the row moved by no more than roundings, gives the recorded one. To a wrong weight, router or kernel no
such move leads back.
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

from mingc.artifacts.spec import GraphSpec, join_path
from mingc.gather_shards import gather_shards
from mingc.numerics.perturbation import add_relative_noise, row_errors
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.verify.scale import HalvesFit

_FEED_FORWARD = re.compile(r"^layers\.(?P<layer>\d+)\.feed_forward$")
_ROUTED = "_experts"  # what the names of graphs that choose experts end with
# Moves of a row that are tried, at least.
_MOVES = 64

Run = Callable[[Sequence[Tensor]], list[Tensor]]
# What is done with a run: nothing; its ties are counted; rows that left the record by rounding go on from there; all
# rows do, in every layer; what its experts read is moved by roundings, at random.
Mode = Literal["off", "ties", "follow", "lead", "shake"]


class RoutingObserver:
    """Looks at every layer's output rows while tokens pass through.

    Args:
        tolerance: how far a row may be off, relative to the layer's largest recorded value, before it counts as
            another one. Half of it, of a row's root mean square, is how far roundings may have moved a row.

    Attributes:
        num_followed: rows that went to other experts than the recorded ones, by rounding.
        num_ties: rows that roundings could send to other experts.
        fits: by layer what its halves add to rows that were not followed, beside what the record says; of followed
            runs.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._generator = torch.Generator().manual_seed(0)
        self.begin("off")

    def begin(self, mode: Mode, record: NDArray[np.float32] | None = None) -> None:
        """Watch another run; `record` (L, T, D) is what the layers of its tokens must give."""
        assert (record is not None) == (mode in ("follow", "lead")), "these go on from a record"
        self._mode = mode
        self._record = None if record is None else torch.from_numpy(record)
        self._given: dict[int, list[Tensor]] = {}
        self.num_followed = 0
        self.num_ties = 0
        self.fits: dict[int, HalvesFit] = {}
        self.next(0, 0)

    def next(self, first: int, count: int) -> None:
        """The next step is of `count` tokens, from the `first` of the run."""
        self._tokens = slice(first, first + count)

    @property
    def layers(self) -> NDArray[np.float32]:
        """The rows (L, T, D) float32 that the engines gave; recorded ones where they were followed."""
        rows = torch.stack([torch.cat(self._given[layer]) for layer in sorted(self._given)])
        layers: NDArray[np.float32] = rows.numpy()
        return layers

    def look(self, layer: int, is_routed: bool, run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`run` a layer's feed-forward; its inputs and outputs begin with the stream and what is added to it."""
        outputs = run(tensors)
        count = self._tokens.stop - self._tokens.start
        rows = _stream(outputs)[:count]
        match self._mode:
            case "ties" if is_routed:
                scale, every = float(rows.abs().max()), torch.arange(count)
                is_away = self._can_reach(
                    run,
                    tensors,
                    every,
                    lambda found, of: row_errors(found, rows[of], scale) > self._tolerance,
                )
                self.num_ties += int(is_away.sum())
            case "shake" if is_routed:
                residual, delta, *others = tensors
                moved = self._moved(_stream(tensors))
                outputs[1] = run([moved.to(residual), torch.zeros_like(delta), *others])[1]
            case "follow":
                followed = self._find_followed(layer, is_routed, rows, run, tensors)
                self._fit(layer, followed, tensors, outputs)
                self._go_on_from_record(layer, followed, outputs)
                self.num_followed += len(followed)
                rows[followed] = self._recorded(layer)[followed]
            case "lead":
                self._go_on_from_record(layer, torch.arange(count), outputs)
        self._given.setdefault(layer, []).append(rows)
        return outputs

    def _recorded(self, layer: int) -> Tensor:
        """What a layer must give for the tokens of this step (n, D)."""
        assert self._record is not None
        return self._record[layer, self._tokens]

    def _find_followed(
        self, layer: int, is_routed: bool, rows: Tensor, run: Run, tensors: Sequence[Tensor]
    ) -> Tensor:
        """Which of a layer's `rows` (n, D) left the record by rounding, (m,)."""
        assert self._record is not None
        recorded, scale = self._recorded(layer), float(self._record[layer].abs().max())
        off = (row_errors(rows, recorded, scale) > self._tolerance).nonzero().squeeze(1)
        if not is_routed or not len(off):
            return off[:0]
        is_back = self._can_reach(
            run, tensors, off, lambda found, of: row_errors(found, recorded[of], scale) <= self._tolerance
        )
        return off[is_back]

    def _fit(
        self, layer: int, followed: Tensor, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Add what a layer's halves add to all rows but the `followed` (m,) ones."""
        assert self._record is not None
        recorded = self._recorded(layer)
        count = len(recorded)
        residual, attention, feed_forward = (
            each[:count].float().cpu() for each in (tensors[0], tensors[1], outputs[1])
        )
        before = self._recorded(layer - 1) if layer else residual
        is_kept = torch.ones(count, dtype=torch.bool)
        is_kept[followed] = False
        parts = (attention, feed_forward, recorded - before)
        self.fits.setdefault(layer, HalvesFit()).add(*(part[is_kept].numpy() for part in parts))

    def _go_on_from_record(self, layer: int, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Let `rows` (m,) of a layer's outputs be those that were recorded."""
        residual, partial = outputs[:2]
        place = rows.to(residual.device)
        partial[place] = self._recorded(layer)[rows].to(residual) - residual[place]

    def _can_reach(
        self,
        run: Run,
        tensors: Sequence[Tensor],
        rows: Tensor,
        is_there: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Which of `rows` (n,) of the inputs give, moved by roundings, what `is_there`, (n,) bool.

        Args:
            is_there: (m,) bool, of (m, D) outputs and the (m,) rows whose moved inputs gave them.
        """
        residual, delta, *others = tensors
        x, width = _stream(tensors), len(residual)
        left, moves = rows, 0
        while len(left) and moves < _MOVES:
            # As many moves of each row as the engine's size has room for.
            copies = width // len(left)
            of = left.repeat(copies)
            of = torch.cat([of, left[:1].expand(width - len(of))])
            moved = self._moved(x[of])
            place = of.to(residual.device)
            outputs = run([moved.to(residual), torch.zeros_like(delta), *(each[place] for each in others)])
            left = left[~torch.isin(left, of[is_there(_stream(outputs), of)])]
            moves += copies
        return ~torch.isin(rows, left)

    def _moved(self, x: Tensor) -> Tensor:
        """Rows (N, D) where roundings may have put them."""
        return add_relative_noise(x, self._tolerance / 2, self._generator)


def _stream(tensors: Sequence[Tensor]) -> Tensor:
    """The residual stream (N, D) float32 on the host: what it was, and what is added to it."""
    return tensors[0].float().cpu() + tensors[1].float().cpu()


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's weights of a graph's instance, its pages of the instance, and where both are."""

    graph: Graph
    pages: Mapping[str, Tensor]
    device: torch.device


class _AllRanks(Engine):
    """One instance of a graph with the weights of every rank in turn; the first one's pages are given to every run."""

    def __init__(self, spec: GraphSpec, first: Graph, others: Sequence[_Share]) -> None:
        self._spec = spec
        self._first = first
        self._others = others
        self._names = [each.name for each in (*spec.inputs, *spec.state)]

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("every rank's graph has its weights")

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = dict(zip(self._names, tensors, strict=True))
        home = tensors[0].device
        parts = [self._first.run(**given)]
        for share in self._others:
            moved = {name: value.to(share.device) for name, value in given.items() if name not in share.pages}
            made = share.graph.run(**moved, **share.pages)
            parts.append({name: value.to(home) for name, value in made.items()})
        return [gather_shards(each, [part[each.name] for part in parts]) for each in self._spec.outputs]


class _Watched(Engine):
    """A layer's feed-forward under a `RoutingObserver`."""

    def __init__(self, engine: Engine, layer: int, is_routed: bool, watch: RoutingObserver) -> None:
        self._engine = engine
        self._layer = layer
        self._is_routed = is_routed
        self._watch = watch

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError("the engine behind has its weights")

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._watch.look(self._layer, self._is_routed, self._engine.run, tensors)


@dataclass(frozen=True)
class FollowedStage(LoadedStage):
    """The stage of the first rank, whose graphs run on every rank and whose feed-forwards are watched.

    Attributes:
        others: the ranks behind the first, with their devices.
    """

    watch: RoutingObserver = field(kw_only=True)
    others: Sequence[tuple[LoadedStage, torch.device]] = field(kw_only=True)
    first: LoadedStage = field(kw_only=True)
    _pages: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def allocate_state(self, dims: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        self._pages[:] = [stage.allocate_state(dims, place) for stage, place in self.others]
        return self.first.allocate_state(dims, device)

    def layer_instances(self, graph: str) -> dict[str, Graph]:
        spec = self.graphs[graph].spec
        ranks = [stage.layer_instances(graph) for stage, _ in self.others]
        made = {}
        for name, first in self.first.layer_instances(graph).items():
            others = [
                _Share(
                    rank[name], {each.name: pages[join_path(name, each.name)] for each in spec.state}, place
                )
                for rank, pages, (_, place) in zip(ranks, self._pages, self.others, strict=True)
            ]
            engine: Engine = _AllRanks(spec, first, others)
            match = _FEED_FORWARD.match(name)
            if match is not None:
                engine = _Watched(engine, int(match["layer"]), graph.endswith(_ROUTED), self.watch)
            made[name] = Graph(replace(spec, weights=()), {None: engine})
        return made


def followed_stage(
    first: LoadedStage, others: Sequence[tuple[LoadedStage, torch.device]], watch: RoutingObserver
) -> FollowedStage:
    """The whole of a stage from its ranks' shares, `others` with their devices."""
    return FollowedStage(first.name, first.graphs, first.weights, watch=watch, others=others, first=first)
