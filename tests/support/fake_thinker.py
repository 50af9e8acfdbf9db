"""A thinker of Python functions: what they return depends on exactly what the real engines may depend on (the visible
KV rows in order), so mixing requests up changes results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from fake_engines import CPU, HIDDEN, make_graph
from torch import Tensor

from mingc.artifacts.parameters import ThinkerParameters
from mingc.artifacts.spec import DType
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.scheduler import ThinkerScheduler
from mingc.runtime.thinker.worker import StepOptions, ThinkerWorker

VOCAB, PAGE, CONTEXT = 576, 4, 256
CHUNK_ALIGNMENT, SHARED_ROWS = 4, 32


def make_thinker_stage(
    *,
    fail_on: int | None = None,
    nan_on: int | None = None,
    num_layers: int = 1,
    max_prompts: int = 1,
) -> LoadedStage:
    """A thinker of equal layers whose logits depend on ids, positions and embeddings of the visible rows in order.

    `fail_on`: an input id that makes prefill raise; `nan_on`: one that makes its request's logits NaN. A chunk holds
    tokens of at most `max_prompts` requests.
    The stream holds a token's value, its positions, and what its request's visible rows sum up to.
    """

    def sum_of(rows: Tensor) -> float:
        if nan_on is not None and (rows[:, 0] == nan_on).any():
            return float("nan")
        values = (rows * torch.tensor([1.0, 7.0])).sum(1).double()
        return float((values * torch.arange(1, len(values) + 1)).sum() % 1009)

    def rows_of(pages: Tensor) -> Tensor:
        return (pages.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def embed(input_ids: Tensor, embeds: Tensor, embed_kind: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        values = torch.where(embed_kind > 0, (embeds.sum(1) * 64).round() + 1000 * embed_kind, input_ids)
        stream = torch.zeros(len(input_ids), HIDDEN)
        stream[:, 0], stream[:, 1] = values, positions.sum(0)
        return stream, torch.zeros_like(stream), stream[:, :1], stream[:, :1]

    def prefill(
        residual: Tensor,
        delta: Tensor,
        cos: Tensor,
        sin: Tensor,
        page_table: Tensor,
        segment: Tensor,
        index: Tensor,
        k_pages: Tensor,
    ) -> tuple[Tensor, ...]:
        stream = residual + delta
        if fail_on is not None and (stream[:, 0] == fail_on).any():
            raise RuntimeError("engine failure")
        partial = torch.zeros_like(stream)
        for prompt, table in enumerate(page_table):
            (own,) = torch.where((segment == prompt) & (index >= 0))
            if len(own):
                assert own[0] % CHUNK_ALIGNMENT == 0 and torch.equal(own, own[0] + torch.arange(len(own)))
                rows = rows_of(table)[: index[own[-1]] + 1]
                k_pages[rows[index[own]], 0] = stream[own, :2]
                partial[own[-1], 2] = sum_of(k_pages[rows, 0])
        return stream, partial

    def decode(
        residual: Tensor,
        delta: Tensor,
        cos: Tensor,
        sin: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        k_pages: Tensor,
    ) -> tuple[Tensor, ...]:
        stream = residual + delta
        contexts = [rows_of(each)[:count] for each, count in zip(page_table, lengths, strict=True)]
        k_pages[torch.stack([rows[-1] for rows in contexts]), 0] = stream[:, :2]
        partial = torch.zeros_like(stream)
        partial[:, 2] = torch.tensor([sum_of(k_pages[rows, 0]) for rows in contexts])
        return stream, partial

    def dense(residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        return residual + delta, torch.zeros_like(residual)

    def head(residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        total = (residual + delta)[:, 2:3].double()
        return (torch.sin(total * torch.arange(1, VOCAB + 1) + total).float(),)

    def stream_of(dim: str) -> dict[str, tuple[DType, tuple[int | str, ...]]]:
        return {name: ("float32", (dim, HIDDEN)) for name in ("residual", "delta")}

    chunks, batches, tables = (8, 16, 32), (1, 2, 4, 8), (4, 8, 16, 32, CONTEXT // PAGE)
    either = tuple(sorted({*chunks, *batches}))
    halfway = ("residual", "partial")
    graphs = [
        make_graph(
            "embed",
            embed,
            inputs={
                "input_ids": ("int64", ("N",)),
                "embeds": ("float32", ("N", HIDDEN)),
                "embed_kind": ("int64", ("N",)),
                "positions": ("int64", (3, "N")),
            },
            outputs=("residual", "delta", "cos", "sin"),
            state={},
            dims={"N": either},
            layer_instances=("embed",),
        ),
        make_graph(
            "prefill_attention",
            prefill,
            inputs={
                **stream_of("T"),
                "cos": ("float32", ("T", 1)),
                "sin": ("float32", ("T", 1)),
                "page_table": ("int32", (max_prompts, "P")),
                "segment": ("int64", ("T",)),
                "index": ("int64", ("T",)),
            },
            outputs=halfway,
            state={"k_pages": ("KV", 1, 2)},
            dims={"T": chunks, "P": tables, "KV": ()},
            layer_instances=tuple(f"layers.{layer}.attention" for layer in range(num_layers)),
        ),
        make_graph(
            "decode_attention",
            decode,
            inputs={
                **stream_of("B"),
                "cos": ("float32", ("B", 1)),
                "sin": ("float32", ("B", 1)),
                "page_table": ("int32", ("B", "P")),
                "lengths": ("int64", ("B",)),
            },
            outputs=halfway,
            state={"k_pages": ("KV", 1, 2)},
            dims={"B": batches, "P": tables, "KV": ()},
            layer_instances=tuple(f"layers.{layer}.attention" for layer in range(num_layers)),
        ),
        make_graph(
            "dense",
            dense,
            inputs=stream_of("N"),
            outputs=halfway,
            state={},
            dims={"N": either},
            layer_instances=tuple(f"layers.{layer}.feed_forward" for layer in range(num_layers)),
        ),
        make_graph(
            "head",
            head,
            inputs=stream_of("B"),
            outputs=("logits",),
            state={},
            dims={"B": batches},
            layer_instances=("head",),
        ),
    ]
    return LoadedStage("thinker", {graph.spec.name: graph for graph in graphs})


def make_thinker_worker(
    stage: LoadedStage | None = None,
    *,
    num_pages: int = 129,
    is_static: bool = False,
    two_batch_overlap: bool = False,
    max_chunk: int | None = None,
) -> ThinkerWorker:
    return ThinkerWorker(
        stage or make_thinker_stage(),
        thinker_parameters(lambda token: 0),
        num_pages=num_pages,
        device=CPU,
        options=StepOptions(
            is_static=is_static,
            two_batch_overlap=two_batch_overlap,
            max_prompts=64,  # as many as the stage takes
            max_chunk=max_chunk,
        ),
        keeps_rows=True,
    )


def make_thinker_loop(
    stage: LoadedStage | None = None,
    *,
    num_pages: int = 129,
    chunk: int = 32,
    max_running: int = 8,
    max_waiting: int = 64,
    stop_ids: Sequence[int] = (),
    is_static: bool = False,
    prefill_policy: ChunkedPrefillPolicy | None = None,
    max_prompts: int = 1,
    two_batch_overlap: bool = False,
    prefix_salt: bytes | None = None,
) -> ThinkerLoop:
    stage = stage or make_thinker_stage(max_prompts=max_prompts)
    worker = make_thinker_worker(
        stage,
        num_pages=num_pages,
        is_static=is_static,
        two_batch_overlap=two_batch_overlap,
    )
    scheduler = ThinkerScheduler(
        PagePool(num_pages, PAGE),
        max_running=max_running,
        chunk=replace(worker.chunk, max_rows=chunk),
        prefill_policy=prefill_policy or ChunkedPrefillPolicy(num_layer_groups=worker.num_layer_groups),
        max_context=CONTEXT,
        max_waiting=max_waiting,
    )
    return ThinkerLoop(worker, scheduler, stop_ids=stop_ids, vocab_size=VOCAB, prefix_salt=prefix_salt)


def thinker_parameters(token_id: Callable[[str], int]) -> ThinkerParameters:
    return ThinkerParameters(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=1,
        max_positions=CONTEXT,
        page_size=PAGE,
        chunk_alignment=CHUNK_ALIGNMENT,
        shared_rows=SHARED_ROWS,
        stop_token_ids=(token_id("<|role_end|>"),),
        image_patch_token=token_id("<imagePatch>"),
        frame_patch_token=token_id("<framePatch>"),
        audio_patch_token=token_id("<audioPatch>"),
        image_start_token=token_id("<image>"),
        image_end_token=token_id("</image>"),
        video_start_token=token_id("<video>"),
        video_end_token=token_id("</video>"),
        audio_start_token=token_id("<audio>"),
        audio_end_token=token_id("</audio>"),
        temporal_position_scale=2,
        default_system_text="你是一个友好的AI助手。",
        thinking_suffix="\n\ndetailed thinking {state}",
    )


def make_prompt(ids: Sequence[int], *, media: Sequence[int] = (), rope_delta: int = 0) -> ThinkerPrompt:
    """A prompt whose rows `media` hold embeddings."""
    rows = np.array(media, dtype=np.int64)
    kind = np.zeros(len(ids), np.int64)
    kind[rows] = 1 + rows % 2
    generator = torch.Generator().manual_seed(len(ids))
    return ThinkerPrompt(
        input_ids=np.array(ids, dtype=np.int64),
        positions=np.stack([np.arange(len(ids))] * 3) - np.array([[0], [1], [2]]),
        rope_delta=rope_delta,
        embed_kind=kind,
        media_embeds=torch.randn(len(rows), HIDDEN, generator=generator) if len(rows) else None,
    )
