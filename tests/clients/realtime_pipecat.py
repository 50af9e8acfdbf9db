"""Pipecat: a spoken conversation in a pipeline, which keeps the context and reacts to speech by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from client_inputs import CHUNK_S, TOOL, Inputs, run
from pipecat.adapters.llm.schemas.tools_schema import AdapterType, ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMUpdateSettingsFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

RATE = 24000


class Service(OpenAIRealtimeLLMService):
    """Pipecat's service, which notes what passes on its connection."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.sent: list[Any] = []

    async def send_client_event(self, event: Any) -> None:
        self.sent.append(event)
        await super().send_client_event(event)


class Speaker(FrameProcessor):
    """The end of the pipeline, in the place of a loudspeaker."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.num_bytes += len(frame.audio)
        await self.push_frame(frame, direction)


class Talk:
    """A running pipeline over one session."""

    def __init__(self, given: Inputs, context: LLMContext, calls: list[str]) -> None:
        self.errors: list[str] = []
        self.speaker = Speaker()
        self.llm = Service(
            api_key=given.key,
            base_url=f"{given.url.replace('http:', 'ws:')}/realtime",
            settings=OpenAIRealtimeLLMService.Settings(
                model=given.model,
                system_instruction="Be short.",
                session_properties=self.properties(given, "none"),
            ),
        )

        async def get_weather(params: Any) -> None:
            calls.append(params.arguments["city"])
            await self.choose(given, "none")  # a random model would call on
            await params.result_callback(f"18 °C in {calls[-1]}")

        self.llm.register_function("get_weather", get_weather)
        pair = LLMContextAggregatorPair(context)
        self.worker = PipelineWorker(
            Pipeline([pair.user(), self.llm, self.speaker, pair.assistant()]),
            params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
        )

        @self.worker.event_handler("on_pipeline_error")  # type: ignore[untyped-decorator]
        async def fail(_: Any, frame: ErrorFrame) -> None:
            self.errors.append(frame.error)

    @staticmethod
    def properties(given: Inputs, choice: Any) -> events.SessionProperties:
        return events.SessionProperties(
            max_output_tokens=80,
            tool_choice=choice,
            audio=events.AudioConfiguration(
                input=events.AudioInput(
                    transcription=events.InputAudioTranscription(), turn_detection=events.TurnDetection()
                ),
                output=events.AudioOutput(voice=given.voice),
            ),
        )

    async def choose(self, given: Inputs, choice: str) -> None:
        settings = OpenAIRealtimeLLMService.Settings(session_properties=self.properties(given, choice))
        await self.worker.queue_frame(LLMUpdateSettingsFrame(delta=settings))

    async def say(self, speech: bytes) -> None:
        """Queue sound as a microphone does."""
        size = int(CHUNK_S * RATE) * 2
        for start in range(0, len(speech), size):
            frame = InputAudioRawFrame(audio=speech[start : start + size], sample_rate=RATE, num_channels=1)
            await self.worker.queue_frame(frame)
            await asyncio.sleep(CHUNK_S)

    async def until(self, claim: Callable[[], Any]) -> None:
        end = time.monotonic() + 60
        while not claim():
            assert not self.errors, self.errors
            assert time.monotonic() < end, f"nothing came after {self.llm.sent[-1]}"
            await asyncio.sleep(0.01)

    def sent(self, kind: type) -> list[Any]:
        return [each for each in self.llm.sent if isinstance(each, kind)]


async def converse(given: Inputs) -> None:
    # a schema of Pipecat's own allows any further argument, and a random model would write many
    tools = ToolsSchema(standard_tools=[], custom_tools={AdapterType.OPENAI: [TOOL]})
    calls: list[str] = []
    context = LLMContext(messages=[{"role": "user", "content": "Greet me."}], tools=tools)
    await hold(given, context, calls, speak)
    roles = [message["role"] for message in context.get_messages()]
    assert roles[0] == "user" and roles.count("assistant") >= 3 and "tool" in roles, roles
    assert calls[0] in ("Genève", "Zürich")
    context.add_message({"role": "user", "content": "And now?"})
    await hold(given, context, calls, greet)  # another connection, to which the whole context is sent


async def hold(given: Inputs, context: LLMContext, calls: list[str], conversation: Any) -> None:
    talk = Talk(given, context, calls)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(talk.worker)
    running = asyncio.create_task(runner.run())
    await talk.worker.queue_frame(LLMContextFrame(context))
    await conversation(given, talk, context, calls)
    assert not talk.errors, talk.errors
    await talk.worker.queue_frame(EndFrame())
    await asyncio.wait_for(running, 60)


async def greet(given: Inputs, talk: Talk, context: LLMContext, calls: list[str]) -> None:
    await talk.until(lambda: talk.speaker.num_bytes > 0)
    assert len(talk.sent(events.ConversationItemCreateEvent)) >= 1


async def speak(given: Inputs, talk: Talk, context: LLMContext, calls: list[str]) -> None:
    await greet(given, talk, context, calls)
    num_bytes = talk.speaker.num_bytes
    await talk.say(given.first_turn)  # the greeting is still being spoken
    await talk.until(lambda: talk.speaker.num_bytes > num_bytes + RATE)
    num_cuts = len(talk.sent(events.ConversationItemTruncateEvent))
    await talk.choose(given, "required")
    await talk.say(given.second_turn)  # and so is the answer
    await talk.until(lambda: len(talk.sent(events.ConversationItemTruncateEvent)) > num_cuts)
    await talk.until(lambda: calls)
    num_bytes = talk.speaker.num_bytes
    await talk.until(lambda: talk.speaker.num_bytes > num_bytes)  # the answer to the result


if __name__ == "__main__":
    run(lambda given: asyncio.run(converse(given)))
