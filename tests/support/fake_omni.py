"""A service over fake engines, with helpers to build and run requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engines import HIDDEN
from fake_talker import (
    FLOW,
    LATENT_DIM,
    LATENTS,
    SAMPLE_RATE,
    TALKER,
    VAE,
    make_talker_group,
)
from fake_thinker import make_thinker_loop, thinker_parameters
from held_resources import wait_until_equal

from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import Message, TextPart
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.request import ChatRequest, Event, SamplingParams, ServiceInfo, SpeechParams, SpeechRequest
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.pipelines import ChatPipeline, SpeechPipeline
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.voices import VoicePack

_STEP_S = 0.03

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"


def voice(name: str, seed: int) -> VoicePack:
    generator = np.random.default_rng(seed)
    return VoicePack(
        name=name,
        transcript="Hello.",
        latents=generator.standard_normal((2 * LATENTS, LATENT_DIM)).astype(np.float32),
        embeds=generator.standard_normal((2, HIDDEN)).astype(np.float32),
        speaker=generator.standard_normal(HIDDEN).astype(np.float32),
    )


def make_service(
    *,
    slots: int = 8,
    talkers: int = 1,
    max_streams: int = 64,
    max_running: int = 8,
    has_talker: bool = True,
    has_thinker: bool = True,
    max_pending: int = 128,
    speech_lead: int = 0,
    **chat_parts: Any,
) -> OmniService:
    tokenizer = TextTokenizer.from_file(TINY / "tokenizer.json")
    parameters = thinker_parameters(tokenizer.token_id)
    voices = {"amy": voice("amy", 1), "bob": voice("bob", 2)}
    planner = SpeechPlanner(
        SpeechPromptBuilder(TextTokenizer.from_file(TINY / "talker" / "llm")),
        voices,
        parameters=TALKER,
        flow=FLOW,
        vae=VAE,
    )
    return OmniService(
        ServiceInfo(
            model="fake",
            sample_rate=SAMPLE_RATE,
            voices=tuple(voices),
            default_voice="amy",
            has_text=has_thinker,
            has_image=False,
            has_video=False,
            has_audio_input=False,
            has_speech=has_talker,
        ),
        chat=ChatPipeline(
            **{
                "processor": ChatProcessor(tokenizer, parameters, vision=None, audio=None),
                "tokenizer": tokenizer,
                "vision": None,
                "audio": None,
                "loop": make_thinker_loop(max_running=max_running, stop_ids=parameters.stop_token_ids),
                **chat_parts,
            }
        )
        if has_thinker
        else None,
        speech=SpeechPipeline(
            planner=planner,
            talkers=make_talker_group(talkers, slots=slots, max_streams=max_streams, speech_lead=speech_lead),
            max_segment_length=TALKER.max_segment_length,
            speech_text="natural",
        )
        if has_talker
        else None,
        max_pending_patches=max_pending,
    )


def chat(text: str, speech: SpeechParams | None = None, **sampling: Any) -> ChatRequest:
    return ChatRequest(
        request_id="r",
        messages=(Message(role="user", parts=(TextPart(text=text),)),),
        sampling=SamplingParams(**{"max_tokens": 12, **sampling}),
        speech=speech,
    )


def speech_request(text: str, **params: Any) -> SpeechRequest:
    return SpeechRequest(request_id="s", text=text, speech=SpeechParams(**params))


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def run(service: OmniService, work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` on an idle service, close it, check that no request holds resources."""

    before = service.held

    async def whole() -> Any:
        try:
            return await asyncio.wait_for(work, 60)
        finally:
            await service.close(shutdown_timeout_s=0)

    result = asyncio.run(whole())
    loops = [*service.talkers] if service.thinker is None else [service.thinker, *service.talkers]
    for loop in loops:
        loop.scheduler.check()
    wait_until_equal(before, lambda: service.held)
    return result


def slow_down(service: OmniService, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every decode step and every patch take a while. Returns the list that each of them is added to."""
    steps: list[str] = []

    def slow(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_slowly(*arguments: Any) -> Any:
            steps.append(name)
            time.sleep(_STEP_S)
            return run(*arguments)

        return run_slowly

    if service.thinker is not None:
        runner = service.thinker.runner
        monkeypatch.setattr(runner, "decode", slow("token", runner.decode))
    for loop in service.talkers:
        engines = loop.worker.engines
        monkeypatch.setattr(engines, "launch", slow("patch", engines.launch))
    return steps
