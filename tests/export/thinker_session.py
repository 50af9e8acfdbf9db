"""Runs prompts through the thinker's two graphs the way a server does: pages, chunks, padding, a decode batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mingc.export.layers.decoder import PAGE_SIZE, DecoderConfig

Graph = Callable[..., Sequence[Tensor]]


@dataclass(kw_only=True)
class Prompt:
    """One request: what the processor made of it, and where its tokens lie."""

    input_ids: Tensor  # (T,) int64
    embeds: Tensor  # (T, D)
    embed_kind: Tensor  # (T,) int64
    positions: Tensor  # (3, T) int64
    delta: int  # decode position minus token index
    pages: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    length: int = 0

    @property
    def rows(self) -> Tensor:
        """Pool rows of its pages in token order."""
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
    """A pool of pages and the two graphs over it."""

    def __init__(
        self,
        config: DecoderConfig,
        prefill: Graph,
        decode: Graph,
        *,
        kv_heads: int | None = None,
        pages: int = 64,
    ) -> None:
        shape = (pages * PAGE_SIZE, kv_heads or config.num_kv_heads, config.head_dim)
        self.pools = [torch.zeros(shape) for _ in range(2 * config.num_layers)]
        self._prefill = prefill
        self._decode = decode
        order = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(7))
        self._free: list[int] = order.tolist()

    def prefill(self, prompt: Prompt, *, chunk: int, padding: int = 0, room: int = 32) -> Tensor:
        """All chunks of `prompt`, each followed by `padding` rows; the last token's logits (1, V)."""
        total = len(prompt.input_ids)
        pages = [self._free.pop() for _ in range(-(-(total + room) // PAGE_SIZE))]
        prompt.pages = torch.tensor(pages, dtype=torch.int32)
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            index = torch.arange(start, end)

            def pad(values: Tensor) -> Tensor:
                return torch.nn.functional.pad(values, (0, padding))

            logits = self._prefill(
                pad(prompt.input_ids[index]),
                torch.nn.functional.pad(prompt.embeds[index], (0, 0, 0, padding)),
                pad(prompt.embed_kind[index]),
                pad(prompt.positions[:, index]),
                prompt.pages[: -(-end // PAGE_SIZE)],
                torch.tensor([start]),
                torch.tensor([end - start - 1]),
                *self.pools,
            )[0]
        prompt.length = total
        return logits

    def decode(self, prompts: Sequence[Prompt], tokens: Sequence[int], *, padding: int = 0) -> Tensor:
        """One token of each prompt, in a batch with `padding` empty requests; logits (B, V)."""
        for prompt in prompts:
            prompt.length += 1
        width = max(-(-prompt.length // PAGE_SIZE) for prompt in prompts)
        table = torch.zeros(len(prompts) + padding, width, dtype=torch.int32)
        for row, prompt in zip(table, prompts, strict=False):
            count = min(width, len(prompt.pages))
            row[:count] = prompt.pages[:count]
        blank = [0] * padding
        logits = self._decode(
            torch.tensor([*tokens, *blank]),
            torch.tensor([*(prompt.length - 1 + prompt.delta for prompt in prompts), *blank]),
            torch.tensor([*(prompt.length for prompt in prompts), *blank]),
            table,
            *self.pools,
        )[0]
        return logits[: len(prompts)]

    def greedy(
        self, prompt: Prompt, steps: int, *, chunk: int = 1 << 20, padding: int = 0
    ) -> tuple[list[int], Tensor]:
        """The greedy continuation and the logits (steps, V) that it was read from."""
        logits = [self.prefill(prompt, chunk=chunk, padding=padding)]
        for _ in range(steps - 1):
            logits.append(self.decode([prompt], [int(logits[-1].argmax())], padding=padding))
        joined = torch.cat(logits)
        return joined.argmax(-1).tolist(), joined
