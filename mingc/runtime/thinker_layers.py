"""The thinker's graphs in their order: embedding, of every layer attention and feed-forward, head.

Between the halves of a layer the ranks' partial sums are added up. No graph waits for the host, so that a whole step
can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from mingc.artifacts.spec import join_path
from mingc.runtime.distributed import all_gather_last
from mingc.runtime.engines.base import Graph
from mingc.runtime.stages import LoadedStage

_KINDS = ("prefill", "decode")


class ThinkerLayers:
    """Runs steps over pages.

    Args:
        state: the pages of every layer, by the stage's names.
        reduce_: replaces a tensor by its sum over the ranks.
        gather: puts the ranks' (N, W) side by side.
    """

    def __init__(
        self,
        stage: LoadedStage,
        state: Mapping[str, Tensor],
        *,
        vocab_size: int,
        reduce_: Callable[[Tensor], None],
        gather: Callable[[Tensor], Tensor] = all_gather_last,
    ) -> None:
        (self._embed,) = stage.instances("embed").values()
        (self._head,) = stage.instances("head").values()
        self._vocab_size = vocab_size
        self._reduce_ = reduce_
        self._gather = gather
        self._layers = {kind: _layers(stage, state, kind) for kind in _KINDS}

    def prefill(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits (1, V) float32 of token `last` of one request's chunk.

        Inputs: of `embed` (input_ids, embeds, embed_kind, positions), page_table (P,), start (1,), last (1,).
        Behind the logits, of each expert layer, the ids and weights (T, K) of the experts; nothing when the engines
        do not tell.
        """
        routes: list[Tensor] = []
        residual, delta = self._run("prefill", inputs, routes)
        last = inputs["last"]
        logits = self._logits(residual.index_select(0, last), delta.index_select(0, last))
        return (logits, *routes)

    def decode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, V) float32 of one token a request.

        Inputs: of `embed`, page_table (B, P), lengths (B,).
        """
        return self._logits(*self._run("decode", inputs, []))

    def _run(self, kind: str, inputs: Mapping[str, Tensor], routes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The residual stream (N, D) and what the last half adds to it."""
        context = {**inputs, **self._embed.run(**_needed(self._embed, inputs))}
        residual, delta = context.pop("residual"), context.pop("delta")
        for graph, pages in self._layers[kind]:
            outputs = graph.run(residual=residual, delta=delta, **_needed(graph, context), **pages)
            residual, delta = outputs["residual"], outputs["partial"]
            self._reduce_(delta)
            if "expert_ids" in outputs:
                routes += (outputs["expert_ids"], outputs["expert_weights"])
        return residual, delta

    def _logits(self, residual: Tensor, delta: Tensor) -> Tensor:
        share = self._head.run(residual=residual, delta=delta)["logits"]
        return self._gather(share)[:, : self._vocab_size]


def _layers(
    stage: LoadedStage, state: Mapping[str, Tensor], kind: str
) -> list[tuple[Graph, dict[str, Tensor]]]:
    """The graphs of all halves in order, each with its pages."""
    feed_forwards = {}
    for name in ("dense", f"{kind}_experts"):
        if name in stage.graphs:
            feed_forwards.update(stage.instances(name))
    halves: list[tuple[Graph, dict[str, Tensor]]] = []
    for instance, attention in stage.instances(f"{kind}_attention").items():
        pages = {each.name: state[join_path(instance, each.name)] for each in attention.spec.state}
        halves.append((attention, pages))
        layer = instance.removesuffix(".attention")
        halves.append((feed_forwards[f"{layer}.feed_forward"], {}))
    return halves


def _needed(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `tensors` that are inputs of `graph`."""
    return {each.name: tensors[each.name] for each in graph.spec.inputs if each.name in tensors}
