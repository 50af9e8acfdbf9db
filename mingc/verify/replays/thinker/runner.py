"""Runs recorded prompts through a server's worker and rank group, with KV pages in reverse order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.parameters import ThinkerParameters
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.startup import create_worker
from mingc.runtime.thinker.step import DecodeStep
from mingc.runtime.thinker.worker import ThinkerWorker
from mingc.verify.engines import Engines, to_numpy
from mingc.verify.replays.thinker.prompts import Prompt

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class ThinkerRunner:
    """The workers of all ranks, and the KV pages of the prompts.

    Args:
        rows: most prompts that run together.
        longest: most tokens of a prompt and its continuation.
    """

    def __init__(self, engines: Engines, parameters: ThinkerParameters, *, rows: int, longest: int) -> None:
        self._parameters = parameters
        self._pages_each = -(-longest // parameters.page_size)
        num_pages = 1 + rows * self._pages_each

        def start(stage: LoadedStage) -> ThinkerWorker:
            self._worker = create_worker(
                stage, engines.artifact.manifest, num_pages=num_pages, device=engines.device
            )
            return self._worker

        self.num_ranks = engines.world_size
        self._group: RankGroup | None = None
        if engines.world_size > 1:
            self._group = RankGroup(
                engines.artifact.root,
                engines.rank_devices(),
                lambda: engines.stage("thinker"),
                start,
                num_pages=num_pages,
                on_failure=lambda error: None,  # the next step raises it
            )
        else:
            start(engines.stage("thinker"))
        self._runner: ThinkerWorker | RankGroup = self._group or self._worker
        self.max_chunk = self._worker.max_chunk

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def pages(self, row: int) -> Ints:
        """The pages of a prompt, last page first, so that memory order differs from token order."""
        first = 1 + row * self._pages_each
        return np.arange(first, first + self._pages_each)[::-1].copy()

    def prefill(self, prompt: Prompt, row: int, chunk: int) -> list[Floats]:
        """Logits (V,) of the last token of every chunk of at most `chunk` tokens."""
        return [
            to_numpy(self._runner.prefill(step))[0].astype(np.float32)
            for step in prompt.chunks(chunk, self.pages(row))
        ]

    def decode(self, rows: Ints, input_ids: Ints, positions: Ints, lengths: Ints) -> Floats:
        """Logits (n, V) of one token of each prompt in `rows` (n,); `lengths` include the token."""
        step = DecodeStep(
            input_ids=input_ids,
            positions=positions,
            lengths=lengths,
            pages=np.stack([self.pages(int(row)) for row in rows]),
        )
        return to_numpy(self._runner.decode(step))[: len(rows)].astype(np.float32)

    def greedy(self, prompts: Sequence[Prompt], steps: int) -> tuple[Ints, Floats]:
        """Greedy continuation of all prompts together: ids (B, steps) and logits (B, steps, V)."""
        logits = [
            np.stack([self.prefill(prompt, row, self.max_chunk)[-1] for row, prompt in enumerate(prompts)])
        ]
        ids = [logits[0].argmax(axis=1)]
        lengths = np.array([len(prompt.input_ids) for prompt in prompts])
        deltas = np.array([prompt.rope_delta for prompt in prompts])
        for _ in range(steps - 1):
            logits.append(self.decode(np.arange(len(prompts)), ids[-1], lengths + deltas, lengths + 1))
            ids.append(logits[-1].argmax(axis=1))
            lengths = lengths + 1
        return np.stack(ids, axis=1), np.stack(logits, axis=1)

    def cached(self, name: str, num_tokens: int) -> NDArray[np.generic]:
        """KV state `name` (heads, num_tokens, head_dim) of the first prompt, in token order."""
        size = self._parameters.page_size
        rows = (self.pages(0)[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]
        cached: NDArray[np.generic] = to_numpy(self._worker.state[name])[rows].swapaxes(0, 1)
        return cached

    def experts(self, num_tokens: int) -> tuple[Ints, Floats] | None:
        """Expert ids and weights (layers, tokens, k) of the last chunk; None when engines do not return them."""
        routes = self._worker.routes
        if not routes:
            return None
        ids, weights = (torch.stack([each[index][:num_tokens] for each in routes]) for index in (0, 1))
        return to_numpy(ids).astype(np.int64), to_numpy(weights).astype(np.float32)
