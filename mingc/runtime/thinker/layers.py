"""The thinker's graphs in their order: embedding, of every layer attention and feed-forward, head.

Between the halves of a layer the ranks' partial sums are added up. No graph waits for the host, so that a whole step
can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mingc.artifacts.spec import join_path
from mingc.runtime.distributed.comm_stream import CommStream
from mingc.runtime.distributed.process_group import all_gather_last
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

_KINDS = ("prefill", "decode")
_MOST_PARTS = 16
_ROWS = ("input_ids", "embeds", "embed_kind", "segment", "index")  # inputs (T, …)
_ROUTES = ("expert_ids", "expert_weights")

Inputs = Mapping[str, Tensor]
_Half = tuple[Graph, dict[str, Tensor]]  # half a layer, with its pages


class ThinkerLayers:
    """Runs steps over pages.

    Args:
        state: the pages of every layer, by the stage's names.
        all_reduce_: replaces a tensor by its sum over the ranks.
        gather: puts the ranks' (N, W) side by side.

    Attributes:
        num_layer_groups: that a chunk of a prompt is run in; between them other steps may run.
    """

    def __init__(
        self,
        stage: LoadedStage,
        state: Mapping[str, Tensor],
        *,
        vocab_size: int,
        all_reduce_: Callable[[Tensor], None],
        gather: Callable[[Tensor], Tensor] = all_gather_last,
    ) -> None:
        (self._embed,) = stage.layer_instances("embed").values()
        (self._head,) = stage.layer_instances("head").values()
        self._vocab_size = vocab_size
        self._reduce_ = all_reduce_
        self._gather = gather
        self._side = CommStream(next(iter(state.values())).device)
        self._layers = {kind: _layers(stage, state, kind) for kind in _KINDS}
        self.num_layer_groups = min(_MOST_PARTS, len(self._layers["prefill"]) // 2)

    def prefill(self, *chunks: Inputs) -> tuple[Tensor, ...]:
        """Logits (S, V) float32 of the tokens `last` of the last one of `chunks`, which follow each other.

        The sums over ranks of one chunk run beside the layers of another one.

        Inputs: of `embed` (input_ids, embeds, embed_kind, positions), page_table (S, P), segment (T,), index (T,), last
        (S,): rows of the chunk.
        Behind the logits, of each expert layer, the ids and weights (T, K) of the experts of all chunks; nothing when
        the engines do not tell.
        """
        flows = [_Flow({**inputs, **self._begin(inputs)}) for inputs in chunks]
        routes = self._pass(self._layers["prefill"], flows)
        stream = {"residual": flows[-1].residual, "delta": flows[-1].delta}
        return (self.chunk_logits(chunks[-1], stream), *routes)

    def prefill_layer_group(
        self, part: int, inputs: Inputs, stream: Inputs
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """One of the `num_layer_groups` of `prefill` of one chunk, each of about as many layers; the first embeds.

        Inputs: as `prefill`; after the first part those of `embed` are not needed. `stream` is what the part before
        has given, tensors (T, …), and nothing for the first.
        Returns the stream behind the part, and what its expert layers tell.
        """
        if part == 0:
            stream = self._begin(inputs)
        halves = self._layers["prefill"]
        first, end = (2 * (len(halves) // 2 * each // self.num_layer_groups) for each in (part, part + 1))
        flow = _Flow({**inputs, **stream})
        routes = self._pass(halves[first:end], [flow])
        return {**stream, "residual": flow.residual, "delta": flow.delta}, routes

    def chunk_logits(self, inputs: Inputs, stream: Inputs) -> Tensor:
        """Logits (S, V) float32 of the tokens `last` behind the last part."""
        last = inputs["last"]
        return self._logits(*(stream[name].index_select(0, last) for name in ("residual", "delta")))

    def decode(self, inputs: Inputs) -> Tensor:
        """Logits (B, V) float32 of one token a request.

        Inputs: of `embed`, page_table (B, P), lengths (B,).
        """
        flow = _Flow({**inputs, **self._embed.run(**_needed(self._embed, inputs))})
        self._pass(self._layers["decode"], [flow])
        return self._logits(flow.residual, flow.delta)

    def _begin(self, inputs: Inputs) -> dict[str, Tensor]:
        """The stream in front of the first layer; routers read the kind of each token, too."""
        return {**self._embed.run(**_needed(self._embed, inputs)), "embed_kind": inputs["embed_kind"]}

    def _logits(self, residual: Tensor, delta: Tensor) -> Tensor:
        share = self._head.run(residual=residual, delta=delta)["logits"]
        return self._gather(share)[:, : self._vocab_size]

    def _pass(self, halves: Sequence[_Half], flows: Sequence[_Flow]) -> list[Tensor]:
        """Bring `flows` behind `halves`; what the expert layers tell, of all flows one below the other.

        The sums of one flow run beside the next half of another one.
        """
        routes: list[Tensor] = []
        for graph, pages in halves:
            told = []
            for flow in flows:
                flow.wait()
                outputs = graph.run(
                    residual=flow.residual, delta=flow.delta, **_needed(graph, flow.context), **pages
                )
                flow.residual, flow.delta = outputs["residual"], outputs["partial"]
                if len(flows) == 1:
                    self._reduce_(flow.delta)
                else:
                    flow.wait = self._side.start(partial(self._reduce_, flow.delta))
                told.append([outputs[name] for name in _ROUTES if name in outputs])
            routes += [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*told, strict=True)]
        for flow in flows:
            flow.wait()
        return routes


class _Flow:
    """What one chunk or batch is on its way through the layers.

    Attributes:
        residual, delta: the residual stream (N, D), and what the last half adds to it.
        wait: must be called before `delta` is read.
    """

    def __init__(self, context: Inputs) -> None:
        self.context = dict(context)
        self.residual, self.delta = self.context.pop("residual"), self.context.pop("delta")
        self.wait: Callable[[], None] = lambda: None


def split_chunk(inputs: Inputs, most: int) -> list[Inputs]:
    """Inputs of a prompt's chunk, as `prefill` takes them, as those of chunks of at most `most` rows behind each other.

    `last` is then for the last one of them only.
    """
    width = len(inputs["input_ids"])
    if width <= most:
        return [inputs]
    chunks: list[Inputs] = []
    for first in range(0, width, most):
        rows = {name: inputs[name][first : first + most] for name in _ROWS}
        positions = inputs["positions"][:, first : first + most].contiguous()
        last = (inputs["last"] - first).clamp(0, most - 1)
        chunks.append({**inputs, **rows, "positions": positions, "last": last})
    return chunks


def _layers(stage: LoadedStage, state: Mapping[str, Tensor], kind: str) -> list[_Half]:
    """The graphs of all halves in order, each with its pages."""
    feed_forwards = {}
    for name in ("dense", f"{kind}_experts"):
        if name in stage.graphs:
            feed_forwards.update(stage.layer_instances(name))
    halves: list[_Half] = []
    for instance, attention in stage.layer_instances(f"{kind}_attention").items():
        pages = {each.name: state[join_path(instance, each.name)] for each in attention.spec.state}
        halves.append((attention, pages))
        layer = instance.removesuffix(".attention")
        halves.append((feed_forwards[f"{layer}.feed_forward"], {}))
    return halves


def _needed(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `tensors` that are inputs of `graph`."""
    return {each.name: tensors[each.name] for each in graph.spec.inputs if each.name in tensors}
