"""Engines as small Python functions that keep the graphs' contracts: what they return depends on exactly what the
real ones may depend on (visible KV rows, own slot, own noise), so mixing requests up changes results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mingc.artifacts.model import CfmParameters, TalkerParameters, ThinkerParameters, VaeParameters
from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.kv_cache import PagePool, SlotPool
from mingc.runtime.scheduler import TalkerScheduler, ThinkerScheduler
from mingc.runtime.stages import LoadedStage
from mingc.runtime.talker import TalkerWorker
from mingc.runtime.talker_loop import TalkerLoop
from mingc.runtime.thinker import ThinkerWorker
from mingc.runtime.thinker_loop import ThinkerLoop

CPU = torch.device("cpu")
HIDDEN, VOCAB, PAGE, CONTEXT = 4, 576, 4, 256
LATENTS, LATENT_DIM, HISTORY, STEPS = 2, 4, 6, 3
SAMPLES_PER_LATENT, TAIL, SLOT_TOKENS = 6, 3, 192
PATCH_SAMPLES = LATENTS * SAMPLES_PER_LATENT
SAMPLE_RATE = 44100


class FunctionEngine(Engine):
    """An engine that is a function of named tensors."""

    def __init__(self, names: Sequence[str], function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._names = names
        self._function = function

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        assert not weights

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(self._function(**dict(zip(self._names, tensors, strict=True))))


def make_graph(
    name: str,
    function: Callable[..., tuple[Tensor, ...]],
    *,
    inputs: dict[str, tuple[DType, tuple[int | str, ...]]],
    outputs: Sequence[str],
    state: dict[str, tuple[int | str, ...]],
    dims: dict[str, tuple[int, ...]],
    instances: tuple[str, ...] = ("",),
) -> Graph:
    spec = GraphSpec(
        name=name,
        inputs=tuple(
            TensorSpec(name=key, dtype=dtype, shape=shape) for key, (dtype, shape) in inputs.items()
        ),
        outputs=tuple(TensorSpec(name=key, dtype="float32", shape=()) for key in outputs),
        state=tuple(TensorSpec(name=key, dtype="float32", shape=shape) for key, shape in state.items()),
        dims=tuple(
            Dim(name=key, minimum=1, maximum=max(buckets, default=1 << 20), buckets=buckets)
            for key, buckets in dims.items()
        ),
        instances=instances,
    )
    names = [*inputs, *(key.replace(".", "_") for key in state)]

    def checked(**tensors: Tensor) -> tuple[Tensor, ...]:
        sizes: dict[str, int] = {}
        for tensor in spec.inputs:
            given = tensors[tensor.name]
            assert str(given.dtype) == f"torch.{tensor.dtype}", f"{name}.{tensor.name} is {given.dtype}"
            assert given.dim() == len(tensor.shape), f"{name}.{tensor.name} has shape {tuple(given.shape)}"
            for size, wanted in zip(given.shape, tensor.shape, strict=True):
                assert size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        for key, size in sizes.items():
            assert size in dims[key], f"{name}: {key} is {size}, no bucket of {dims[key]}"
        return function(**tensors)

    return Graph(spec, {None: FunctionEngine(names, checked)})


def _scores(values: Tensor, width: int) -> Tensor:
    """(width,) that depends on every value and its place."""
    places = torch.arange(1, len(values) + 1, dtype=torch.float64)
    total = (values.double() * places).sum() % 1009
    return torch.sin(total * torch.arange(1, width + 1, dtype=torch.float64) + total).float()


def make_thinker_stage(*, fail_on: int | None = None, nan_on: int | None = None) -> LoadedStage:
    """A thinker of one layer whose logits depend on ids, positions and embeddings of the visible rows in order.

    `fail_on`: an input id that makes prefill raise; `nan_on`: one that makes its request's logits NaN.
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
        start: Tensor,
        last: Tensor,
        k_pages: Tensor,
    ) -> tuple[Tensor, ...]:
        stream = residual + delta
        if fail_on is not None and (stream[:, 0] == fail_on).any():
            raise RuntimeError("engine failure")
        first, count = int(start), int(last) + 1
        rows = rows_of(page_table)[: first + count]
        k_pages[rows[first:], 0] = stream[:count, :2]
        partial = torch.zeros_like(stream)
        partial[count - 1, 2] = sum_of(k_pages[rows, 0])
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
            instances=("embed",),
        ),
        make_graph(
            "prefill_attention",
            prefill,
            inputs={
                **stream_of("T"),
                "cos": ("float32", ("T", 1)),
                "sin": ("float32", ("T", 1)),
                "page_table": ("int32", ("P",)),
                "start": ("int64", (1,)),
                "last": ("int64", (1,)),
            },
            outputs=halfway,
            state={"k_pages": ("KV", 1, 2)},
            dims={"T": chunks, "P": tables, "KV": ()},
            instances=("layers.0.attention",),
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
            instances=("layers.0.attention",),
        ),
        make_graph(
            "dense",
            dense,
            inputs=stream_of("N"),
            outputs=halfway,
            state={},
            dims={"N": either},
            instances=("layers.0.feed_forward",),
        ),
        make_graph(
            "head",
            head,
            inputs=stream_of("B"),
            outputs=("logits",),
            state={},
            dims={"B": batches},
            instances=("head",),
        ),
    ]
    return LoadedStage("thinker", {graph.spec.name: graph for graph in graphs})


def make_thinker_worker(
    stage: LoadedStage | None = None, *, num_pages: int = 129, is_static: bool = False
) -> ThinkerWorker:
    return ThinkerWorker(
        stage or make_thinker_stage(),
        vocab_size=VOCAB,
        page_size=PAGE,
        num_pages=num_pages,
        device=CPU,
        is_static=is_static,
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
) -> ThinkerLoop:
    worker = make_thinker_worker(stage, num_pages=num_pages, is_static=is_static)
    scheduler = ThinkerScheduler(
        PagePool(num_pages, PAGE),
        max_running=max_running,
        chunk_tokens=chunk,
        max_context=CONTEXT,
        max_waiting=max_waiting,
    )
    return ThinkerLoop(worker, scheduler, stop_ids=stop_ids, vocab_size=VOCAB)


def _talker_stage() -> LoadedStage:
    state: dict[str, tuple[int | str, ...]] = {"k_slots.0": ("S", SLOT_TOKENS, 1, 1)}

    def prefill(
        input_ids: Tensor,
        embeds: Tensor,
        use_embed: Tensor,
        slot: Tensor,
        start: Tensor,
        last: Tensor,
        k_slots_0: Tensor,
    ) -> tuple[Tensor, ...]:
        count, first = int(last) + 1, int(start)
        values = torch.where(use_embed, embeds.sum(1) * 100, input_ids.float())[:count]
        k_slots_0[int(slot), first : first + count, 0, 0] = values
        return (_scores(k_slots_0[int(slot), : first + count, 0, 0], HIDDEN)[None],)

    def step(embeds: Tensor, slots: Tensor, lengths: Tensor, k_slots_0: Tensor) -> tuple[Tensor, ...]:
        k_slots_0[slots, lengths, 0, 0] = embeds.sum(1)
        return (
            torch.stack(
                [
                    _scores(k_slots_0[slot, : length + 1, 0, 0], HIDDEN)
                    for slot, length in zip(slots, lengths, strict=True)
                ]
            ),
        )

    one: tuple[DType, tuple[int | str, ...]] = ("int64", (1,))
    each: tuple[DType, tuple[int | str, ...]] = ("int64", ("B",))
    return LoadedStage(
        "talker",
        {
            "prefill": make_graph(
                "prefill",
                prefill,
                inputs={
                    "input_ids": ("int64", ("T",)),
                    "embeds": ("float32", ("T", HIDDEN)),
                    "use_embed": ("bool", ("T",)),
                    "slot": one,
                    "start": one,
                    "last": one,
                },
                outputs=["hidden"],
                state=state,
                dims={"T": (4, 16), "S": ()},
            ),
            "step": make_graph(
                "step",
                step,
                inputs={"embeds": ("float32", ("B", HIDDEN)), "slots": each, "lengths": each},
                outputs=["hidden"],
                state=state,
                dims={"B": (1, 2, 4, 8), "S": ()},
            ),
        },
    )


def _cfm_stage(stop_probability: float, nan_guidance: float | None) -> LoadedStage:
    def sample(
        hidden: Tensor,
        history: Tensor,
        noise: Tensor,
        step_noise: Tensor,
        guidance: Tensor,
        sigma: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, ...]:
        scale = (sigma * temperature)[:, None, None]
        mean = (hidden.mean(1) + history.mean((1, 2)) + guidance)[:, None, None]
        latents = noise + mean + scale * step_noise.sum(1)
        if nan_guidance is not None:
            latents = torch.where((guidance == nan_guidance)[:, None, None], float("nan"), latents)
        embeds = latents.mean(1)
        return (
            latents,
            embeds,
            torch.cat([history[:, LATENTS:], latents], dim=1),
            torch.full((len(hidden),), stop_probability),
        )

    one: tuple[DType, tuple[int | str, ...]] = ("float32", ("B",))
    return LoadedStage(
        "cfm",
        {
            "sample": make_graph(
                "sample",
                sample,
                inputs={
                    "hidden": ("float32", ("B", HIDDEN)),
                    "history": ("float32", ("B", HISTORY, LATENT_DIM)),
                    "noise": ("float32", ("B", LATENTS, LATENT_DIM)),
                    "step_noise": ("float32", ("B", STEPS, LATENTS, LATENT_DIM)),
                    "guidance": one,
                    "sigma": one,
                    "temperature": one,
                },
                outputs=["latents", "next_embeds", "next_history", "stop_probability"],
                state={},
                dims={"B": (1, 2, 4, 8)},
            )
        },
    )


def _vae_stage() -> LoadedStage:
    """Each latent becomes its mean, repeated; the last TAIL samples of a patch come with the next one."""

    def stream(
        latents: Tensor, slots: Tensor, patch_index: Tensor, overlap: Tensor, num_patches: Tensor
    ) -> tuple[Tensor, ...]:
        wave = latents.mean(2).repeat_interleave(SAMPLES_PER_LATENT, dim=1)
        is_first = patch_index == 0
        num_patches[slots] = torch.where(is_first, 0.0, num_patches[slots])
        mine = slots > 0
        assert (num_patches[slots[mine]] == patch_index[mine]).all(), "a patch was left out or decoded twice"
        num_patches[slots] += 1
        before = torch.where(is_first[:, None], float("nan"), overlap[slots])
        overlap[slots] = wave[:, -TAIL:]
        return (torch.cat([before, wave], dim=1),)

    return LoadedStage(
        "audio_vae",
        {
            "stream": make_graph(
                "stream",
                stream,
                inputs={
                    "latents": ("float32", ("B", LATENTS, LATENT_DIM)),
                    "slots": ("int64", ("B",)),
                    "patch_index": ("int64", ("B",)),
                },
                outputs=["samples"],
                state={"overlap": ("S", TAIL), "num_patches": ("S",)},
                dims={"B": (1, 2, 4, 8), "S": ()},
            )
        },
    )


TALKER = TalkerParameters(
    hidden_size=HIDDEN,
    num_layers=1,
    vocab_size=512,
    slot_tokens=SLOT_TOKENS,
    min_stop_step=3,
    max_steps=40,
    stop_threshold=0.5,
    default_voice="amy",
    max_segment_length=50,
    cap_min_seconds=1e-9,
    cap_seconds_per_character=PATCH_SAMPLES / SAMPLE_RATE / 2,  # half a patch a character
)
FLOW = CfmParameters(
    num_steps=STEPS,
    latents_per_patch=LATENTS,
    history_latents=HISTORY,
    latent_dim=LATENT_DIM,
    speaker_dim=3,
    guidance=2.0,
    sigma=0.25,
    temperature=0.0,
)
VAE = VaeParameters(
    sample_rate=SAMPLE_RATE,
    hop_samples=3,
    frames_per_latent=2,
    latent_dim=LATENT_DIM,
    samples_per_latent=SAMPLES_PER_LATENT,
    lookahead_frames=1,
    tail_samples=TAIL,
)


def make_talker_worker(
    *,
    slots: int = 8,
    stop_probability: float = 0.0,
    nan_guidance: float | None = None,
    depth: int | None = None,
) -> TalkerWorker:
    return TalkerWorker(
        _talker_stage(),
        _cfm_stage(stop_probability, nan_guidance),
        _vae_stage(),
        parameters=TALKER,
        flow=FLOW,
        vae=VAE,
        num_slots=slots + 1,
        device=CPU,
        depth=depth,
    )


def make_talker_loop(
    worker: TalkerWorker | None = None, *, max_streams: int = 64, max_behind_s: float = 60.0
) -> TalkerLoop:
    worker = worker or make_talker_worker()
    scheduler = TalkerScheduler(
        SlotPool(worker.num_slots), max_batch=worker.max_batch, max_joins=4, max_streams=max_streams
    )
    return TalkerLoop(worker, scheduler, max_behind_s=max_behind_s)


def thinker_parameters(token_id: Callable[[str], int]) -> ThinkerParameters:
    return ThinkerParameters(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=1,
        max_positions=CONTEXT,
        page_size=PAGE,
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
