"""Forward pass of the thinker: runs the graphs in order (embedding, attention and feed-forward of each layer, head).

After each half of a layer the ranks all-reduce their partial outputs. No graph waits for the host, so the worker can
capture a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mingc.artifacts.spec import join_path
from mingc.errors import ArtifactError
from mingc.runtime.distributed.process_group import all_gather_last
from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

_KINDS = ("prefill", "decode")
_MAX_LAYER_GROUPS = 16
_ROWS = ("input_ids", "embeds", "embed_kind", "segment", "index")  # inputs (T, …)
_ROUTES = ("expert_ids", "expert_weights")

Inputs = Mapping[str, Tensor]


class _HalfLayer(NamedTuple):
    """Attention or feed-forward of a layer: its graph and its KV pages."""

    graph: Graph
    pages: dict[str, Tensor]


class ThinkerLayers:
    """Runs prefill chunks and decode steps over paged KV.

    Args:
        state: KV pages of every layer, by the stage's state names.
        all_reduce_: replaces a tensor by its sum over the ranks.
        gather: concatenates the ranks' (N, W) along the last dimension.

    Attributes:
        num_layer_groups: the layers of a chunk can run in so many groups; other steps may run between them.
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
        self._all_reduce_ = all_reduce_
        self._gather = gather
        self._comm_stream = CommStream(next(iter(state.values())).device)
        self._layers = {kind: _layers(stage, state, kind) for kind in _KINDS}
        self.num_layer_groups = min(_MAX_LAYER_GROUPS, len(self._layers["prefill"]) // 2)

    def prefill(self, *chunks: Inputs) -> tuple[Tensor, ...]:
        """Run consecutive chunks of a prompt. Returns logits (S, V) float32 at the rows `last` of the last chunk.

        With several chunks, the all-reduce of one overlaps with the layers of another (two-batch overlap).

        Inputs: the inputs of `embed` (input_ids, embeds, embed_kind, positions), page_table (S, P), segment (T,),
        index (T,), last (S,).
        For each expert layer, ids and weights (T, K) of the experts of all chunks follow, if the engines output them.
        """
        streams, routes = self.prefill_streams(*chunks)
        return (self.chunk_logits(chunks[-1], streams[-1]), *routes)

    def prefill_streams(self, *chunks: Inputs) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """As `prefill`, without the head. Returns the residual stream of each chunk, and the routes."""
        batches = [_Batch({**inputs, **self._embed_stream(inputs)}) for inputs in chunks]
        routes = self._forward(self._layers["prefill"], batches)
        return [{"residual": each.residual, "delta": each.delta} for each in batches], routes

    def prefill_layer_group(
        self, group: int, inputs: Inputs, stream: Inputs
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run layer group `group` of `num_layer_groups` (of nearly equal size) for one chunk; group 0 also embeds.

        The inputs are the same as for `prefill`; only group 0 reads the inputs of `embed`. `stream` is what the
        previous group returned, tensors (T, …); group 0 ignores it.
        Returns the residual stream after the group, and the routes of its expert layers.
        """
        if group == 0:
            stream = self._embed_stream(inputs)
        halves = self._layers["prefill"]
        first, end = (2 * (len(halves) // 2 * each // self.num_layer_groups) for each in (group, group + 1))
        batch = _Batch({**inputs, **stream})
        routes = self._forward(halves[first:end], [batch])
        return {**stream, "residual": batch.residual, "delta": batch.delta}, routes

    def chunk_logits(self, inputs: Inputs, stream: Inputs) -> Tensor:
        """Logits (S, V) float32 at the rows `last`, after the last layer group."""
        last = inputs["last"]
        return self._logits(*(stream[name].index_select(0, last) for name in ("residual", "delta")))

    def decode(self, inputs: Inputs) -> Tensor:
        """Logits (B, V) float32 after one token of each request.

        Inputs: the inputs of `embed`, page_table (B, P), lengths (B,).
        """
        batch = _Batch({**inputs, **self._embed.run(**_inputs_of(self._embed, inputs))})
        self._forward(self._layers["decode"], [batch])
        return self._logits(batch.residual, batch.delta)

    def _embed_stream(self, inputs: Inputs) -> dict[str, Tensor]:
        """The residual stream before the first layer, and `embed_kind`, which routers read."""
        return {**self._embed.run(**_inputs_of(self._embed, inputs)), "embed_kind": inputs["embed_kind"]}

    def _logits(self, residual: Tensor, delta: Tensor) -> Tensor:
        share = self._head.run(residual=residual, delta=delta)["logits"]
        return self._gather(share)[:, : self._vocab_size]

    def _forward(self, halves: Sequence[_HalfLayer], batches: Sequence[_Batch]) -> list[Tensor]:
        """Run all `batches` through `halves`. Returns the routes of expert layers, batches concatenated.

        With several batches, the all-reduce of one overlaps with the next half-layer of another.
        """
        routes: list[Tensor] = []
        for graph, pages in halves:
            found = []
            for batch in batches:
                batch.wait()
                outputs = graph.run(
                    residual=batch.residual, delta=batch.delta, **_inputs_of(graph, batch.context), **pages
                )
                batch.residual, batch.delta = outputs["residual"], outputs["partial"]
                if len(batches) == 1:
                    self._all_reduce_(batch.delta)
                else:
                    batch.wait = self._comm_stream.start(partial(self._all_reduce_, batch.delta))
                found.append([outputs[each] for each in _ROUTES if each in outputs])
            routes += [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*found, strict=True)]
        for batch in batches:
            batch.wait()
        return routes


class CommStream:
    """Runs communication on a side stream that overlaps with compute, also during graph capture; inline on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=stream_priority.COMMUNICATION)  # type: ignore[no-untyped-call]

    def start(self, run: Callable[[], None]) -> Callable[[], None]:
        """Enqueue `run` after the work already queued on the current stream.

        Returns a function that makes the current stream wait for its end. Until then nothing may write or free the
        tensors that `run` uses.
        """
        if self._stream is None:
            run()
            return lambda: None
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            run()
            end = self._stream.record_event()
        return lambda: main.wait_event(end)


class _Batch:
    """A chunk or decode batch on its way through the layers.

    Attributes:
        residual, delta: the residual stream (N, D), and the output of the last half-layer, which is not added yet.
        wait: waits for the all-reduce of `delta`; call it before reading `delta`.
    """

    def __init__(self, context: Inputs) -> None:
        self.context = dict(context)
        self.residual, self.delta = self.context.pop("residual"), self.context.pop("delta")
        self.wait: Callable[[], None] = lambda: None


def split_chunk(inputs: Inputs, max_rows: int) -> list[Inputs]:
    """Split the inputs of a chunk for `ThinkerLayers.prefill` into consecutive chunks of at most `max_rows` rows.

    Only the last chunk has a valid `last`.
    """
    num_rows = len(inputs["input_ids"])
    if num_rows <= max_rows:
        return [inputs]
    chunks: list[Inputs] = []
    for first in range(0, num_rows, max_rows):
        rows = {name: inputs[name][first : first + max_rows] for name in _ROWS}
        positions = inputs["positions"][:, first : first + max_rows].contiguous()
        last = (inputs["last"] - first).clamp(0, max_rows - 1)
        chunks.append({**inputs, **rows, "positions": positions, "last": last})
    return chunks


def _layers(stage: LoadedStage, state: Mapping[str, Tensor], kind: str) -> list[_HalfLayer]:
    """All half-layers in order, each with its KV pages."""
    feed_forwards = {}
    for name in ("dense", f"{kind}_experts"):
        if name in stage.graphs:
            feed_forwards.update(stage.layer_instances(name))
    halves: list[_HalfLayer] = []
    for instance, attention in stage.layer_instances(f"{kind}_attention").items():
        pages = {each.name: state[join_path(instance, each.name)] for each in attention.spec.state}
        halves.append(_HalfLayer(attention, pages))
        layer = instance.removesuffix(".attention")
        feed_forward = feed_forwards.get(f"{layer}.feed_forward")
        if feed_forward is None:
            raise ArtifactError(
                f"layer {layer} has attention but no feed-forward: neither graph dense nor {kind}_experts has it",
                where=f"manifest.json, stage {stage.name}",
                fix="copy the artifact again, or export again",
            )
        halves.append(_HalfLayer(feed_forward, {}))
    return halves


def _inputs_of(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The `tensors` that `graph` takes as inputs."""
    return {each.name: tensors[each.name] for each in graph.spec.inputs if each.name in tensors}
