"""The official client for Python: a spoken conversation over `/v1/realtime`; its types check every event."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from client_inputs import CHUNK_S, TOOL, Inputs, run
from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
    "response.created",
]


class Talk:
    """One connection; `events` holds all that was received."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.events: list[Any] = []
        self._num_seen = 0

    async def next(self, *kinds: str) -> Any:
        """The next event of one of these types."""
        while True:
            while self._num_seen < len(self.events):
                event = self.events[self._num_seen]
                self._num_seen += 1
                if event.type in kinds:
                    return event
            raw = await asyncio.wait_for(self.connection.recv_bytes(), 60)
            assert json.loads(raw)["type"] != "error", raw
            self.events.append(EVENT.validate_json(raw, strict=True))

    async def say(self, speech: bytes) -> None:
        """Send sound as a microphone does."""
        size = int(CHUNK_S * 48_000)
        for start in range(0, len(speech), size):
            chunk = base64.b64encode(speech[start : start + size]).decode()
            await self.connection.input_audio_buffer.append(audio=chunk)
            await asyncio.sleep(CHUNK_S)

    async def answer(self) -> Any:
        """The response that is created next, when it is done, which has been heard if it is completed."""
        created = await self.next("response.created")
        done = await self.next("response.done")
        assert done.response.id == created.response.id
        return done.response

    def heard(self, response: Any) -> int:
        """Bytes of sound of a response."""
        deltas = [each for each in self.events if each.type == "response.output_audio.delta"]
        return sum(len(base64.b64decode(each.delta)) for each in deltas if each.response_id == response.id)


async def converse(given: Inputs) -> None:
    client = AsyncOpenAI(base_url=given.url, api_key=given.key)
    async with client.realtime.connect(model=given.model) as connection:
        history = await speak(given, Talk(connection))
    async with client.realtime.connect(model=given.model) as connection:  # and all that was said before
        talk = Talk(connection)
        await talk.next("session.created")
        for item in history:
            await connection.conversation.item.create(item=item)
            assert (await talk.next("conversation.item.added")).item.id == item["id"]
        await connection.response.create(response={"max_output_tokens": 12, "output_modalities": ["text"]})
        answer = await talk.answer()
        assert answer.status in ("completed", "incomplete"), answer
        (message,) = answer.output
        assert message.content[0].type == "output_text" and message.content[0].text


async def speak(given: Inputs, talk: Talk) -> list[dict[str, Any]]:
    connection = talk.connection
    await talk.next("session.created")
    voice, transcriber = {"voice": given.voice}, {"model": "gpt-4o-mini-transcribe"}
    await connection.session.update(
        session={
            "type": "realtime",
            "instructions": "Answer briefly.",
            "max_output_tokens": 12,
            "audio": {"input": {"transcription": transcriber}, "output": voice},
        }
    )
    assert (await talk.next("session.updated")).session.audio.output.voice == given.voice

    await connection.response.create(response={"instructions": "Greet."})
    greeting = await talk.answer()
    assert greeting.status in ("completed", "incomplete") and talk.heard(greeting)

    num_before = len(talk.events)
    speaking = asyncio.create_task(talk.say(given.first_turn))
    answered = await talk.answer()
    await speaking
    assert answered.status in ("completed", "incomplete") and talk.heard(answered)
    kinds = [each.type for each in talk.events[num_before:] if each.type in TURN]
    assert kinds[: len(TURN)] == TURN, kinds
    while not (said := [each for each in talk.events if each.type.endswith("transcription.completed")]):
        await talk.next("conversation.item.input_audio_transcription.completed")

    await connection.response.create(response={"max_output_tokens": "inf"})
    await talk.next("response.output_audio.delta")
    speaking = asyncio.create_task(talk.say(given.second_turn))
    started = await talk.next("input_audio_buffer.speech_started")
    interrupted = (await talk.next("response.done")).response
    assert (interrupted.status, interrupted.status_details.reason) == ("cancelled", "turn_detected")
    (message,) = interrupted.output
    assert message.status == "incomplete" and talk.heard(interrupted) > 200 * 48
    await connection.conversation.item.truncate(item_id=message.id, content_index=0, audio_end_ms=200)
    assert (await talk.next("conversation.item.truncated")).audio_end_ms == 200
    await connection.conversation.item.retrieve(item_id=message.id)
    kept = (await talk.next("conversation.item.retrieved")).item.content[0].transcript
    assert message.content[0].transcript.startswith(kept) and len(kept) < len(message.content[0].transcript)
    assert (await talk.answer()).status in ("completed", "incomplete")
    await speaking
    assert started.item_id in [item.item.id for item in talk.events if item.type == "conversation.item.done"]

    await connection.session.update(session={"type": "realtime", "tools": [TOOL], "tool_choice": "required"})
    await connection.response.create(response={"max_output_tokens": 200})
    call = (await talk.answer()).output[-1]
    assert (call.type, call.status, call.name) == ("function_call", "completed", TOOL["name"])
    assert "city" in json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
    await connection.conversation.item.create(item=result)
    await connection.response.create(response={"tool_choice": "none"})
    told = await talk.answer()
    assert told.output[0].type == "message" and talk.heard(told)

    return [
        {"id": "item_1", "type": "message", "role": "user",
         "content": [{"type": "input_audio", "transcript": said[0].transcript}]},
        {"id": "item_2", "type": "message", "role": "assistant",
         "content": [{"type": "output_audio", "transcript": kept}]},
        {"id": "item_3", "type": "function_call", "call_id": "call_1", "name": call.name, "arguments": call.arguments},
        {"id": "item_4", "type": "function_call_output", "call_id": "call_1", "output": "18 °C"},
        {"id": "item_5", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]  # fmt: skip


if __name__ == "__main__":
    run(lambda given: asyncio.run(converse(given)))
