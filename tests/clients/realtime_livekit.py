"""LiveKit Agents: a spoken conversation over its realtime model, as an agent holds it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from client_inputs import CHUNK_S, TOOL, Inputs, run
from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

RATE = 24000


async def converse(given: Inputs) -> None:
    options: dict[str, Any] = {
        "base_url": given.url, "api_key": given.key, "model": given.model, "voice": given.voice
    }  # fmt: skip
    model = RealtimeModel(**options)
    session = model.session()
    heard = Heard(session)
    await session.update_instructions("Answer briefly.")
    await heard.play(await session.generate_reply(instructions="Greet."), seconds=0.5)
    session.interrupt()  # a random model would speak for long
    await heard.response_done()

    speaking = asyncio.create_task(say(session, given.first_turn))
    message_id = await heard.play(await heard.generation(), seconds=0.5)
    await speaking
    assert heard.names[-2:] == ["input_speech_started", "input_speech_stopped"], heard.names

    speaking = asyncio.create_task(say(session, given.second_turn))  # while the answer is being spoken
    while heard.names[-1] != "input_speech_started":
        await asyncio.sleep(0.01)
    session.truncate(message_id=message_id, modalities=["audio", "text"], audio_end_ms=320)
    await heard.response_done()
    await heard.play(await heard.generation(), seconds=0.5)
    session.interrupt()
    await heard.response_done()
    await speaking

    async def get_weather(raw_arguments: dict[str, object]) -> str:
        return f"18 °C in {raw_arguments['city']}"

    tool = {name: value for name, value in TOOL.items() if name != "type"}
    await session.update_tools([llm.function_tool(get_weather, raw_schema=tool)])
    generation = await session.generate_reply(tool_choice="required")
    call = await anext(aiter(generation.function_stream))
    session.interrupt()  # a random model would call on
    await heard.response_done()
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Genève", "Zürich")
    history = session.chat_ctx.copy()
    result = llm.FunctionCallOutput(
        call_id=call.call_id,
        name=call.name,
        output=await get_weather(json.loads(call.arguments)),
        is_error=False,
    )
    history.items.append(result)
    await session.update_chat_ctx(history)
    await heard.play(await session.generate_reply(tool_choice="none"), seconds=0.3)
    session.interrupt()
    await heard.response_done()
    history = session.chat_ctx.copy()
    kinds = [item.type for item in history.items]
    assert kinds.count("message") >= 5 and kinds.count("function_call_output") == 1, kinds
    await session.aclose()

    model = RealtimeModel(**options, max_session_duration=1.0)  # then it connects again and sends its history
    session = model.session()
    heard = Heard(session)
    reconnected = asyncio.Event()
    session.on("session_reconnected", lambda _: reconnected.set())
    await session.update_chat_ctx(history)
    await asyncio.wait_for(reconnected.wait(), 60)
    await heard.play(await session.generate_reply(), seconds=0.3)
    kept = {item.id for item in session.chat_ctx.items}
    assert all(item.id in kept for item in history.items if item.type != "message" or item.content)
    await session.aclose()


class Heard:
    """What a session reports; every error fails the conversation."""

    def __init__(self, session: Any) -> None:
        self.names: list[str] = []
        self._generations: asyncio.Queue[Any] = asyncio.Queue()
        self._done: asyncio.Queue[Any] = asyncio.Queue()
        self._errors: list[Any] = []
        for name in ("input_speech_started", "input_speech_stopped"):
            session.on(name, lambda _, name=name: self.names.append(name))
        session.on("generation_created", self._created)
        session.on("error", self._errors.append)
        session.on("openai_server_event_received", self._received)

    def _created(self, event: Any) -> None:
        if not event.user_initiated:
            self._generations.put_nowait(event)

    def _received(self, event: Any) -> None:
        if event["type"] == "response.done":
            self._done.put_nowait(event)
        if event["type"] == "error":
            self._errors.append(event)

    async def generation(self) -> Any:
        """The next answer to a spoken turn."""
        return await asyncio.wait_for(self._generations.get(), 60)

    async def response_done(self) -> None:
        """Wait for the end of the oldest response not waited for."""
        await asyncio.wait_for(self._done.get(), 60)
        assert not self._errors, self._errors

    async def play(self, generation: Any, seconds: float) -> str:
        """Take so much sound of an answer. Returns its id."""
        message = await anext(aiter(generation.message_stream))
        async for frame in message.audio_stream:
            assert frame.sample_rate == RATE
            seconds -= frame.duration
            if seconds <= 0:
                break
        assert seconds <= 0, "the answer was shorter"
        assert not self._errors, self._errors
        return str(message.message_id)


async def say(session: Any, speech: bytes) -> None:
    """Push sound as a microphone does."""
    size = int(CHUNK_S * RATE) * 2
    for start in range(0, len(speech), size):
        data = speech[start : start + size]
        session.push_audio(
            rtc.AudioFrame(data=data, sample_rate=RATE, num_channels=1, samples_per_channel=len(data) // 2)
        )
        await asyncio.sleep(CHUNK_S)


if __name__ == "__main__":
    run(lambda given: asyncio.run(converse(given)))
