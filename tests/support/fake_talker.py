"""The speech stages as Python functions: what they return depends on exactly what the real engines may depend on (own
slot, own noise), so mixing segments up changes results."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from fake_engines import CPU, HIDDEN, make_graph
from torch import Tensor

from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.artifacts.spec import DType
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker

LATENTS, LATENT_DIM, HISTORY, STEPS = 2, 4, 6, 3
SAMPLES_PER_LATENT, TAIL, SLOT_TOKENS = 6, 3, 192
NUM_PROMPTS, CHUNK_ALIGNMENT = 3, 4
PATCH_SAMPLES = LATENTS * SAMPLES_PER_LATENT
SAMPLE_RATE = 44100


def _scores(values: Tensor, width: int) -> Tensor:
    """(width,) that depends on every value and its place."""
    places = torch.arange(1, len(values) + 1, dtype=torch.float64)
    total = (values.double() * places).sum() % 1009
    return torch.sin(total * torch.arange(1, width + 1, dtype=torch.float64) + total).float()


def _talker_stage() -> LoadedStage:
    state: dict[str, tuple[int | str, ...]] = {"k_slots.0": ("S", SLOT_TOKENS, 1, 1)}

    def prefill(
        input_ids: Tensor,
        embeds: Tensor,
        use_embed: Tensor,
        segment: Tensor,
        index: Tensor,
        slots: Tensor,
        last: Tensor,
        k_slots_0: Tensor,
    ) -> tuple[Tensor, ...]:
        values = torch.where(use_embed, embeds.sum(1) * 100, input_ids.float())
        hidden = torch.zeros(NUM_PROMPTS, HIDDEN)
        for number, slot in enumerate(slots):
            own = torch.nonzero(segment == number).flatten()
            assert bool(len(own)) == bool(slot), "each slot but 0 has a prompt"
            if len(own):
                assert own[0] % CHUNK_ALIGNMENT == 0 and own[-1] == last[number]
                k_slots_0[slot, index[own], 0, 0] = values[own]
                hidden[number] = _scores(k_slots_0[slot, : index[own[-1]] + 1, 0, 0], HIDDEN)
        return (hidden,)

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

    tokens: tuple[DType, tuple[int | str, ...]] = ("int64", ("T",))
    prompts: tuple[DType, tuple[int | str, ...]] = ("int64", (NUM_PROMPTS,))
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
                    "segment": tokens,
                    "index": tokens,
                    "slots": prompts,
                    "last": prompts,
                },
                outputs=["hidden"],
                state=state,
                dims={"T": (4, 16, 32), "S": ()},
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
            ),
            "aggregate": make_graph(
                "aggregate",
                lambda latents: (latents.mean(1),),
                inputs={"latents": ("float32", ("N", LATENTS, LATENT_DIM))},
                outputs=["embeds"],
                state={},
                dims={"N": (1, 4)},
            ),
            "speaker": make_graph(
                "speaker",
                lambda vectors: (vectors.sum(1, keepdim=True).expand(-1, HIDDEN),),
                inputs={"vectors": ("float32", ("N", 3))},
                outputs=["embeds"],
                state={},
                dims={"N": (8,)},
            ),
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
            ),
            "encode": make_graph(
                "encode",
                lambda waveform, num_frames, noise: (waveform.mean(1, keepdim=True) + noise,),
                inputs={
                    "waveform": ("float32", ("T", SAMPLES_PER_LATENT)),
                    "num_frames": ("int64", (1,)),
                    "noise": ("float32", ("T", LATENT_DIM)),
                },
                outputs=["latents"],
                state={},
                dims={"T": (4, 16)},
            ),
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
    chunk_alignment=CHUNK_ALIGNMENT,
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
    worker: TalkerWorker | None = None,
    *,
    name: str = "talker",
    max_streams: int = 64,
    max_jobs: int | None = None,
    speech_lead: int = 0,
    slow_client_timeout_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> TalkerLoop:
    worker = worker or make_talker_worker()
    scheduler = TalkerScheduler(
        SlotPool(worker.num_slots),
        max_batch=worker.max_batch,
        max_prefills_per_patch=4,
        max_streams=max_streams,
        max_jobs=max_jobs,
    )
    return TalkerLoop(
        worker,
        scheduler,
        name=name,
        speech_lead=speech_lead,
        slow_client_timeout_s=slow_client_timeout_s,
        clock=clock,
    )


def make_talker_group(
    count: int, *, slots: int = 8, max_streams: int = 64, speech_lead: int = 0
) -> TalkerGroup:
    """`count` talkers, each with its own worker."""
    return TalkerGroup(
        [
            make_talker_loop(
                make_talker_worker(slots=slots),
                name=f"talker {index}",
                max_streams=max_streams,
                speech_lead=speech_lead,
            )
            for index in range(count)
        ]
    )


def make_segment(
    seed: int = 1,
    index: int = 0,
    *,
    tokens: int = 21,
    patches: int = 6,
    prefix: int = 9,
    guidance: float = 2.0,
    temperature: float = 0.0,
) -> SpeechSegment:
    generator = np.random.default_rng(tokens)
    return SpeechSegment(
        input_ids=generator.integers(0, 500, tokens),
        embed_rows=np.array([3, tokens - 2, tokens - 1]),
        embeds=generator.standard_normal((3, HIDDEN)).astype(np.float32),
        num_prefix=prefix,
        history=generator.standard_normal((HISTORY, LATENT_DIM)).astype(np.float32),
        noise=PhiloxNoise(seed),
        index=index,
        max_patches=patches,
        guidance=guidance,
        sigma=FLOW.sigma,
        temperature=temperature,
    )
