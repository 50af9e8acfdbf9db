"""Runs prompts through the thinker's graphs as a server does: pages, chunks, padding, decode batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mingc.artifacts.spec import GraphSpec
from mingc.export.layers.decoder import PAGE_SIZE
from mingc.export.stage import GraphDef
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.layers import ThinkerLayers


class EagerEngine(Engine):
    """A module's method in place of a compiled engine; keeps the outputs of its last run."""

    def __init__(self, method: Callable[..., Sequence[Tensor]]) -> None:
        self._method = method
        self.inputs: Sequence[Tensor] = ()
        self.outputs: Sequence[Tensor] = ()

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.inputs = tensors
        with torch.no_grad():
            self.outputs = self._method(*tensors)
        return list(self.outputs)


@dataclass(frozen=True)
class EagerStage(LoadedStage):
    """A stage whose instances are modules; `engines` by graph and instance."""

    engines: dict[tuple[str, str], EagerEngine] = field(default_factory=dict)

    def layer_instances(self, graph: str) -> dict[str, Graph]:
        spec = self.graphs[graph].spec
        return {name: Graph(spec, {None: self.engines[graph, name]}) for name in spec.layer_instances}


def eager_stage(module: nn.Module, plans: Sequence[GraphDef]) -> EagerStage:
    """The graphs of `plans` over `module`."""
    engines = {
        (plan.spec.name, instance): EagerEngine(getattr(module.get_submodule(instance), plan.method))
        for plan in plans
        for instance in plan.spec.layer_instances
    }
    graphs = {plan.spec.name: Graph(plan.spec, {}) for plan in plans}
    return EagerStage("thinker", graphs, engines=engines)


def compiled_stage(
    specs: Sequence[GraphSpec], engines: Mapping[str, Engine], module: nn.Module
) -> LoadedStage:
    """The graphs of `specs` over compiled `engines` with the weights of `module`."""
    graphs = {}
    for spec in specs:
        weights = module.get_submodule(spec.layer_instances[0]).state_dict()
        if not spec.weights:
            engines[spec.name].bind(weights)
        graphs[spec.name] = Graph(spec, {None: engines[spec.name]}, weights)
    return LoadedStage("thinker", graphs, module.state_dict())


def alone(x: Tensor) -> Tensor:
    """Collectives of a single rank."""
    return x


@dataclass(kw_only=True)
class Prompt:
    """One request: its preprocessed prompt and its pages."""

    input_ids: Tensor  # (T,) int64
    embeds: Tensor  # (T, D)
    embed_kind: Tensor  # (T,) int64
    positions: Tensor  # (3, T) int64
    delta: int  # decode position minus token index
    pages: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    length: int = 0

    @property
    def rows(self) -> Tensor:
        """Pool rows of the request's pages, in token order."""
        return (self.pages.long()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()


def golden_prompt(golden: dict[str, Tensor], case: str) -> Prompt:
    """The recorded prompt of `case`, unpadded."""
    ids = golden[f"{case}.input_ids"][0]
    kind = torch.zeros_like(ids)
    for mask, value in (("image_mask", 1), ("audio_mask", 2)):
        if f"{case}.{mask}" in golden:
            kind[golden[f"{case}.{mask}"][0]] = value
    embeds = torch.full((len(ids), golden[f"{case}.inputs_embeds"].shape[-1]), torch.nan)
    for features, token_kind in (("image_embeds", 1), ("video_embeds", 1), ("audio_embeds", 2)):
        if f"{case}.{features}" in golden:
            embeds[kind == token_kind] = golden[f"{case}.{features}"].flatten(0, -2)
    return Prompt(
        input_ids=ids,
        embeds=embeds,
        embed_kind=kind,
        positions=golden[f"{case}.position_ids"][:, 0],
        delta=int(golden[f"{case}.rope_deltas"].item()),
    )


class Session:
    """A pool of pages and a stage over it."""

    def __init__(self, stage: LoadedStage, vocab_size: int, *, pages: int = 64) -> None:
        self.state = stage.allocate_state({"KV": pages * PAGE_SIZE}, torch.device("cpu"))
        self._layers = ThinkerLayers(
            stage, self.state, vocab_size=vocab_size, all_reduce_=alone, gather=alone
        )
        inputs = stage.graphs["prefill_attention"].spec.inputs
        (self._num_prompts,) = (each.shape[0] for each in inputs if each.name == "page_table")
        self.routing: list[
            tuple[Tensor, Tensor]
        ] = []  # expert ids and weights of each layer in the last chunk
        order = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(7))
        self._free: list[int] = order.tolist()

    def prefill(
        self,
        prompt: Prompt,
        *,
        chunk: int,
        padding: int = 0,
        padding_kind: int = 0,
        room: int = 32,
        together: int = 1,
    ) -> Tensor:
        """Prefill `prompt`, `together` chunks per call, each with `padding` rows; returns the last logits (1, V).

        Padding rows are word 0, or with another `padding_kind` NaN.
        """
        total = len(prompt.input_ids)
        pages = [self._free.pop() for _ in range(-(-(total + room) // PAGE_SIZE))]
        prompt.pages = torch.tensor(pages, dtype=torch.int32)
        chunks = [
            _chunk(prompt, start, min(start + chunk, total), padding, padding_kind, self._num_prompts)
            for start in range(0, total, chunk)
        ]
        for first in range(0, len(chunks), together):
            logits, *routing = self._layers.prefill(*chunks[first : first + together])
        prompt.length = total
        self.routing = list(zip(routing[::2], routing[1::2], strict=True))
        return logits

    def decode(self, prompts: Sequence[Prompt], tokens: Sequence[int], *, padding: int = 0) -> Tensor:
        """Decode one token of each prompt, in a batch with `padding` empty requests; returns logits (B, V)."""
        for prompt in prompts:
            prompt.length += 1
        width = max(-(-prompt.length // PAGE_SIZE) for prompt in prompts)
        table = torch.zeros(len(prompts) + padding, width, dtype=torch.int32)
        for row, prompt in zip(table, prompts, strict=False):
            count = min(width, len(prompt.pages))
            row[:count] = prompt.pages[:count]
        blank = [0] * padding
        positions = torch.tensor([*(prompt.length - 1 + prompt.delta for prompt in prompts), *blank])
        logits = self._layers.decode(
            {
                "input_ids": torch.tensor([*tokens, *blank]),
                "embeds": torch.zeros(len(table), prompts[0].embeds.shape[1]),
                "embed_kind": torch.zeros(len(table), dtype=torch.int64),
                "positions": positions.expand(3, -1).contiguous(),
                "lengths": torch.tensor([*(prompt.length for prompt in prompts), *blank]),
                "page_table": table,
            }
        )
        return logits[: len(prompts)]

    def greedy(
        self, prompt: Prompt, steps: int, *, chunk: int = 1 << 20, padding: int = 0
    ) -> tuple[list[int], Tensor]:
        """Greedy continuation, and the logits (steps, V) of its tokens."""
        logits = [self.prefill(prompt, chunk=chunk, padding=padding)]
        for _ in range(steps - 1):
            logits.append(self.decode([prompt], [int(logits[-1].argmax())], padding=padding))
        joined = torch.cat(logits)
        return joined.argmax(-1).tolist(), joined


def _chunk(
    prompt: Prompt, start: int, end: int, padding: int, padding_kind: int, num_prompts: int
) -> dict[str, Tensor]:
    """Engine inputs of tokens `start` to `end`, followed by `padding` rows; a compiled engine reads `num_prompts`."""
    index = torch.arange(start, end)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, padding))

    return {
        "input_ids": pad(prompt.input_ids[index]),
        "embeds": torch.nn.functional.pad(prompt.embeds[index], (0, 0, 0, padding), value=torch.nan),
        "embed_kind": torch.nn.functional.pad(prompt.embed_kind[index], (0, padding), value=padding_kind),
        "positions": pad(prompt.positions[:, index]),
        "page_table": torch.nn.functional.pad(
            prompt.pages[None, : -(-end // PAGE_SIZE)], (0, 0, 0, num_prompts - 1)
        ),
        "segment": torch.zeros(end - start + padding, dtype=torch.int64),
        "index": torch.nn.functional.pad(index, (0, padding), value=-1),
        "last": torch.tensor([end - start - 1]),
    }
