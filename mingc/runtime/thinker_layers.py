"""The thinker's graphs in their order: embedding, of every layer attention and feed-forward, head.

Between the halves of a layer the ranks' partial sums are added up. No graph waits for the host, so that a whole step
can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mingc.artifacts.spec import join_path
from mingc.runtime.distributed import all_gather_last
from mingc.runtime.engines.base import Graph
from mingc.runtime.stages import LoadedStage

_KINDS = ("prefill", "decode")
_MOST_PARTS = 16

_Half = tuple[Graph, dict[str, Tensor]]  # half a layer, with its pages


class ThinkerLayers:
    """Runs steps over pages.

    Args:
        state: the pages of every layer, by the stage's names.
        reduce_: replaces a tensor by its sum over the ranks.
        gather: puts the ranks' (N, W) side by side.

    Attributes:
        num_parts: that a chunk of a prompt is run in; between them other steps may run.
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
        self.num_parts = min(_MOST_PARTS, len(self._layers["prefill"]) // 2)

    def prefill(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits (S, V) float32 of the tokens `last` of a chunk.

        Inputs: of `embed` (input_ids, embeds, embed_kind, positions), page_table (S, P), segment (T,), index (T,), last
        (S,): rows of the chunk.
        Behind the logits, of each expert layer, the ids and weights (T, K) of the experts; nothing when the engines
        do not tell.
        """
        stream: Mapping[str, Tensor] = {}
        routes: list[Tensor] = []
        for part in range(self.num_parts):
            stream, told = self.prefill_part(part, inputs, stream)
            routes += told
        return (self.chunk_logits(inputs, stream), *routes)

    def prefill_part(
        self, part: int, inputs: Mapping[str, Tensor], stream: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """One of the `num_parts` of `prefill`, each of about as many layers; the first embeds.

        Inputs: as `prefill`; after the first part those of `embed` are not needed. `stream` is what the part before
        has given, tensors (T, …), and nothing for the first.
        Returns the stream behind the part, and what its expert layers tell.
        """
        if part == 0:  # routers read the kind of each token, too
            stream = {**self._embed.run(**_needed(self._embed, inputs)), "embed_kind": inputs["embed_kind"]}
        routes: list[Tensor] = []
        halves = self._layers["prefill"]
        first, end = (2 * (len(halves) // 2 * each // self.num_parts) for each in (part, part + 1))
        residual, delta = _pass(halves[first:end], {**inputs, **stream}, self._reduce_, routes)
        return {**stream, "residual": residual, "delta": delta}, routes

    def chunk_logits(self, inputs: Mapping[str, Tensor], stream: Mapping[str, Tensor]) -> Tensor:
        """Logits (S, V) float32 of the tokens `last` behind the last part."""
        last = inputs["last"]
        return self._logits(*(stream[name].index_select(0, last) for name in ("residual", "delta")))

    def decode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, V) float32 of one token a request.

        Inputs: of `embed`, page_table (B, P), lengths (B,).
        """
        context = {**inputs, **self._embed.run(**_needed(self._embed, inputs))}
        return self._logits(*_pass(self._layers["decode"], context, self._reduce_, []))

    def _logits(self, residual: Tensor, delta: Tensor) -> Tensor:
        share = self._head.run(residual=residual, delta=delta)["logits"]
        return self._gather(share)[:, : self._vocab_size]


def _pass(
    halves: Sequence[_Half],
    context: Mapping[str, Tensor],
    reduce_: Callable[[Tensor], None],
    routes: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The residual stream (N, D) behind `halves`, and what the last one adds to it."""
    context = dict(context)
    residual, delta = context.pop("residual"), context.pop("delta")
    for graph, pages in halves:
        outputs = graph.run(residual=residual, delta=delta, **_needed(graph, context), **pages)
        residual, delta = outputs["residual"], outputs["partial"]
        reduce_(delta)
        if "expert_ids" in outputs:
            routes += (outputs["expert_ids"], outputs["expert_weights"])
    return residual, delta


def _layers(stage: LoadedStage, state: Mapping[str, Tensor], kind: str) -> list[_Half]:
    """The graphs of all halves in order, each with its pages."""
    feed_forwards = {}
    for name in ("dense", f"{kind}_experts"):
        if name in stage.graphs:
            feed_forwards.update(stage.instances(name))
    halves: list[_Half] = []
    for instance, attention in stage.instances(f"{kind}_attention").items():
        pages = {each.name: state[join_path(instance, each.name)] for each in attention.spec.state}
        halves.append((attention, pages))
        layer = instance.removesuffix(".attention")
        halves.append((feed_forwards[f"{layer}.feed_forward"], {}))
    return halves


def _needed(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `tensors` that are inputs of `graph`."""
    return {each.name: tensors[each.name] for each in graph.spec.inputs if each.name in tensors}
