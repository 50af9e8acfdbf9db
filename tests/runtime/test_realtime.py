"""Realtime sessions over a real socket and a fake service: order of events, interruption, limits, and nothing held."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest
from fake_service import INFO, FakeService, patch
from openai_checks import image_data_url
from realtime_client import RATE, Event, RealtimeClient, speech, telephony
from server_thread import eventually, fake_server, metric, run_server
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mingc.prompts.conversation import MediaPart
from mingc.runtime import request as runtime
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    Done,
    ServiceInfo,
    TextDelta,
    TextRequest,
    TranscriptEvent,
    TranscriptionRequest,
    Usage,
)
from mingc.server.app import create_app
from mingc.server.options import ServeOptions
from mingc.server.realtime.items import Conversation

SENTENCE = speech(0.0, 2.2, silence_s=0.8)
NO_TURNS: Any = {"input": {"turn_detection": None}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


class ScriptedService(FakeService):
    """Answers by a script. `allowed`: how many of its events may be sent; `num_sent` of them were handled."""

    def __init__(self, script: list[runtime.Event], info: ServiceInfo = INFO) -> None:
        super().__init__(info)
        self.script = script
        self.allowed = 1 << 30
        self.num_sent = 0

    async def answers(self, request: TextRequest) -> AsyncIterator[tuple[int, runtime.Event]]:
        assert isinstance(request, ChatRequest)
        self.chats.append(request)
        self.running.add(request.request_id)
        self.num_sent = 0
        try:
            for event in self.script:
                while self.num_sent >= self.allowed:
                    await asyncio.sleep(0.001)
                yield 0, event
                self.num_sent += 1
        finally:
            self.running.discard(request.request_id)


@contextmanager
def scripted(
    script: list[runtime.Event], info: ServiceInfo = INFO, **options: Any
) -> Iterator[tuple[str, ScriptedService]]:
    services: list[ScriptedService] = []

    def make() -> ScriptedService:
        services.append(ScriptedService(script, info))
        return services[0]

    with run_server(make, ServeOptions(port=0, shutdown_timeout_s=0.2, **options)) as url:
        yield url, services[0]


def sound(index: int, text_end: int | None, *, is_end: bool = False) -> AudioDelta:
    text = None if text_end is None else "said"
    return replace(patch(index), segment_text=text, text_end=text_end, is_segment_end=is_end)


def call(name: str = "weather", arguments: str = '{"city": "Zürich"}') -> list[runtime.Event]:
    return [
        runtime.ToolCallDelta(index=0, name=name),
        TextDelta(text="", token=7, kind="call"),
        runtime.ToolCallDelta(index=0, arguments=arguments),
        runtime.ToolCallDone(index=0, name=name, arguments=arguments),
    ]


def done(reason: Any = "stop", **usage: int) -> Done:
    return Done(finish_reason=reason, usage=Usage(prompt_tokens=50, completion_tokens=8, **usage))


SPOKEN: list[runtime.Event] = [
    TextDelta(text="Hello", token=1),
    TextDelta(text=" there,", token=2),
    sound(0, 12),
    TextDelta(text=" friend.", token=3),
    sound(1, None, is_end=True),
    *call(),
    sound(2, 20),
    sound(3, None, is_end=True),
    done("tool_calls", audio_patches=4),
]


def kinds(events: list[Event]) -> list[str]:
    """Types of events; repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if not index or name != names[index - 1]]


def answer(client: RealtimeClient, **response: Any) -> Event:
    """Ask for a response, and read to its end."""
    client.send("response.create", response=response)
    found: Event = client.until("response.done")["response"]
    return found


HI = TextDelta(text="Hi", token=1)
THOUGHT = TextDelta(text="Hm", token=1, kind="thought")
BROKEN = runtime.ToolCallFailed(index=None, text="{")


# One response


def test_a_model_without_voices_speaks() -> None:
    voiceless = replace(INFO, voices=(), default_voice=None)
    with scripted(SPOKEN, voiceless) as (url, _), RealtimeClient(url) as client:
        assert answer(client)["audio"] == {"output": {"format": {"type": "audio/pcm", "rate": RATE}}}


def test_a_spoken_answer_with_a_call_in_the_order_of_the_protocol() -> None:
    with scripted(SPOKEN) as (url, service), RealtimeClient(url) as client:
        client.update(tools=[TOOL], instructions="Be short.")
        client.say("hello", id="question")
        client.events.clear()
        response = answer(client, metadata={"topic": "greeting"})
        item = "conversation.item"
        assert kinds(client.events) == [
            f"{item}.added", f"{item}.done", "created",
            "output_item.added", f"{item}.added", "content_part.added",
            "output_audio_transcript.delta", "output_audio.delta",
            "output_audio_transcript.delta", "output_audio.delta",
            "output_audio.done", "output_audio_transcript.done", "content_part.done",
            "output_item.done", f"{item}.done",
            "output_item.added", f"{item}.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done", f"{item}.done", "done",
        ]  # fmt: skip
        message, made = response["output"]
        assert message["content"] == [{"type": "output_audio", "transcript": "Hello there, friend."}]
        assert (made["name"], made["arguments"]) == ("weather", '{"city": "Zürich"}')
        assert response["metadata"] == {"topic": "greeting"}
        assert response["audio"] == {
            "output": {"format": {"type": "audio/pcm", "rate": RATE}, "voice": "DB30"}
        }
        usage = response["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (50, 12, 62)
        assert usage["output_token_details"] == {"text_tokens": 8, "audio_tokens": 4}
        added = [each for each in client.of(f"{item}.added")]
        assert [each["previous_item_id"] for each in added] == [None, "question", message["id"]]
        sounds = [base64.b64decode(each["delta"]) for each in client.of("response.output_audio.delta")]
        assert len(b"".join(sounds)) == 2 * 4 * 7680  # the resampler keeps nothing back

        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "sunny"}
        client.send("conversation.item.create", item=result)
        answer(client)
        (system, user, own, tool) = service.chats[1].messages
        assert [each.role for each in (system, user, own, tool)] == ["system", "user", "assistant", "tool"]
        assert tool.text == "sunny" and own.has_tools and system.text == "Be short."
        assert service.chats[1].tools.tools[0].name == "weather"


@pytest.mark.parametrize("modality", ["text", "audio"])
@pytest.mark.parametrize(
    ("script", "status", "output", "error"),
    [
        ([HI, done()], "completed", ["message"], None),
        ([HI, done("length")], "incomplete", ["message"], "max_output_tokens"),
        ([done()], "completed", ["message"], None),  # nothing was said, which is an answer too
        ([*call(), done("tool_calls")], "completed", ["function_call"], None),
        ([*call(), HI, done()], "completed", ["function_call", "message"], None),
        ([THOUGHT, *call(), *call(), done()], "completed", ["function_call"] * 2, None),
        ([HI, BROKEN, done()], "failed", ["message"], "invalid_tool_call"),
        ([*call(), BROKEN, done("length")], "incomplete", ["function_call"], "max_output_tokens"),
        ([], "failed", [], "unfinished"),
    ],
)  # fmt: skip
def test_what_a_response_is_made_of(
    modality: str, script: list[runtime.Event], status: str, output: list[str], error: str | None
) -> None:
    with scripted(script) as (url, _), RealtimeClient(url) as client:
        client.update(output_modalities=[modality], tools=[TOOL])
        response = answer(client)
        assert (response["status"], [each["type"] for each in response["output"]]) == (status, output)
        details = response["status_details"]
        assert (details.get("reason") or details.get("error", {}).get("code")) == error
        kind = "output_audio" if modality == "audio" else "output_text"
        for item in response["output"]:
            if item["type"] == "message":
                assert item["status"] == ("completed" if status == "completed" else "incomplete")
                assert [part["type"] for part in item["content"]] == [kind]


@pytest.mark.parametrize(("encoding", "num_bytes"), [("audio/pcmu", 3 * 2560), ("audio/pcma", 3 * 2560)])
def test_telephony(encoding: str, num_bytes: int) -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.update(
            audio={"input": {"format": {"type": encoding}}, "output": {"format": {"type": encoding}}}
        )
        response = answer(client)
        sounds = [base64.b64decode(each["delta"]) for each in client.of("response.output_audio.delta")]
        assert len(b"".join(sounds)) == num_bytes
        assert response["audio"]["output"]["format"] == {"type": encoding}


# Turns of the user


def test_a_turn_is_heard_and_answered() -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        client.update(audio={"input": {"transcription": {"model": "whisper-1"}}})
        client.events.clear()
        client.append(SENTENCE)
        client.until("conversation.item.input_audio_transcription.completed")
        if not client.of("response.done"):
            client.until("response.done")
        first = [event["type"] for event in client.events[:6]]
        assert first == [
            "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed",
            "conversation.item.added", "conversation.item.done", "response.created",
        ]  # fmt: skip
        started, stopped, committed, added = client.events[:4]
        assert {each["item_id"] for each in (started, stopped, committed)} == {added["item"]["id"]}
        assert (started["audio_start_ms"], stopped["audio_end_ms"]) == (244, 2688)
        assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]
        (part,) = service.chats[0].messages[-1].parts
        assert isinstance(part, MediaPart) and part.kind == "audio" and not isinstance(part.data, bytes)
        client.send("conversation.item.retrieve", item_id=added["item"]["id"])
        item = client.until("conversation.item.retrieved")["item"]
        assert item["content"] == [{"type": "input_audio", "transcript": "hello world"}]
        assert client.of("conversation.item.input_audio_transcription.delta")
        assert metric(url, 'mingc_realtime_turns_total{end="server_vad"}') == 1


def test_a_transcript_that_fails_fails_alone() -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.update(audio={"input": {"transcription": {"model": "any", "prompt": "fail first"}}})
        client.append(SENTENCE)
        failed = client.until("conversation.item.input_audio_transcription.failed")
        assert failed["error"] == {"type": "server_error", "message": "rank 1 died"}
        if not client.of("response.done"):
            client.until("response.done")
        assert client.of("response.done")[0]["response"]["status"] == "completed"
        assert answer(client)["status"] == "completed"


def test_transcripts_come_in_the_order_of_the_turns() -> None:
    class SlowAtFirst(FakeService):
        def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
            found, is_first = super().transcribe(request), len(self.transcriptions) == 1

            async def late() -> AsyncGenerator[TranscriptEvent]:
                await asyncio.sleep(0.5 if is_first else 0.0)
                async for event in found:
                    yield event

            return late()

    with run_server(SlowAtFirst) as url, RealtimeClient(url) as client:
        client.update(audio={"input": {"turn_detection": None, "transcription": {"model": "any"}}})
        committed, told = [], []
        for _ in range(2):
            client.append(SENTENCE)
            client.send("input_audio_buffer.commit")
            committed.append(client.until("input_audio_buffer.committed")["item_id"])
        for _ in range(2):
            told.append(client.until("conversation.item.input_audio_transcription.completed")["item_id"])
        assert told == committed


def test_a_response_begins_in_the_silence_before_a_turn_ends() -> None:
    """It is not shown before; when the user speaks on, it never was."""
    with scripted(SPOKEN) as (url, service), RealtimeClient(url) as client:
        client.update(tools=[TOOL])
        client.append(speech(0.0, 2.12, silence_s=0.35))
        eventually(
            lambda: service.num_sent == len(SPOKEN) - 1
        )  # all but the last one, after which it is not asked
        client.append(speech(3.1, 4.65))
        eventually(lambda: metric(url, 'mingc_realtime_early_starts_total{result="dropped"}') == 1)
        client.append(bytes(2 * RATE))
        client.until("response.done")
        assert len(client.of("response.created")) == len(client.of("input_audio_buffer.committed")) == 1
        assert metric(url, 'mingc_realtime_early_starts_total{result="used"}') == 1
        assert len(service.chats) == 2 and len(service.chats[1].messages) == 1
        answer(client)
        assert [each.role for each in service.chats[2].messages] == ["user", "assistant", "user"]


def test_a_client_that_leaves_in_a_pause_leaves_nothing() -> None:
    with scripted(SPOKEN) as (url, service):
        service.allowed = 2
        with RealtimeClient(url) as client:
            client.append(speech(0.0, 2.12, silence_s=0.4))
            eventually(lambda: service.num_sent == 2)
        eventually(lambda: not service.running and metric(url, "mingc_num_realtime_sessions") == 0)
        assert metric(url, "mingc_num_requests_running") == metric(url, "mingc_body_bytes") == 0


@pytest.mark.parametrize("change", ["item", "settings"])
def test_a_response_that_began_early_does_not_miss_what_the_client_changes(change: str) -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        client.update(
            audio={"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 1500}}}
        )
        client.append(speech(0.0, 2.12, silence_s=0.4))
        eventually(lambda: len(service.chats) == 1)
        if change == "item":
            client.say("Consider this.")
        else:
            client.update(instructions="Consider this.")
        client.append(bytes(4 * RATE))
        client.until("response.done")
        assert "Consider this." in " ".join(each.text for each in service.chats[-1].messages)


def test_without_a_place_a_response_begins_after_the_turn() -> None:
    with fake_server(max_concurrent_requests=1) as (url, service), RealtimeClient(url) as client:
        with RealtimeClient(url) as other:
            other.say("endless")
            other.send("response.create")
            other.until("response.output_audio.delta")
            client.append(speech(0.0, 2.12, silence_s=0.4))
            eventually(lambda: metric(url, 'mingc_limit_used{limit="requests"}') == 1)
            other.send("response.cancel")
            other.until("response.done")
        eventually(lambda: not service.running)
        client.append(bytes(RATE))
        assert client.until("response.done")["response"]["status"] == "completed"


def test_commit_and_clear_by_the_client() -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        client.update(audio=NO_TURNS)
        client.append(speech(0.0, 1.0))
        client.send("input_audio_buffer.clear")
        client.until("input_audio_buffer.cleared")
        client.send("input_audio_buffer.commit", event_id="mine")
        error = client.until("error")["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
        client.append(SENTENCE)
        client.send("input_audio_buffer.commit")
        committed = client.until("input_audio_buffer.committed")
        client.until("conversation.item.done")
        assert not service.chats
        answer(client)
        assert len(service.chats[0].messages) == 1
        assert client.of("conversation.item.added")[0]["item"]["id"] == committed["item_id"]


def test_a_turn_that_was_cleared_names_no_later_item() -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.append(speech(0.0, 2.12, silence_s=0.3))
        started = client.until("input_audio_buffer.speech_started")
        client.send("input_audio_buffer.clear")
        client.until("input_audio_buffer.cleared")
        client.append(bytes(RATE))
        client.send("input_audio_buffer.commit")
        assert client.until("input_audio_buffer.committed")["item_id"] != started["item_id"]


def test_silence_for_too_long_is_a_turn() -> None:
    """It begins when the answer was played. A client that left is not asked, nor one that wants no turns any more.

    One that may have begun to speak is asked when it turns out that it has not.
    """
    with (
        fake_server() as (url, service),
        RealtimeClient(url) as quiet,
        RealtimeClient(url) as doubtful,
        RealtimeClient(url) as client,
    ):
        with RealtimeClient(url) as gone:
            for each in (gone, quiet, doubtful, client):
                each.update(
                    audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}}}
                )
                each.say("Are you there?")
                answer(each)
        quiet.update(audio=NO_TURNS)
        doubtful.append(speech(0.0, 0.576))  # one frame of speech at its end; two begin a turn
        client.append(bytes(2 * 2 * RATE))
        triggered = client.until("input_audio_buffer.timeout_triggered")
        assert 2 < triggered["audio_start_ms"] <= 960 and triggered["audio_end_ms"] == 2000
        assert client.until("input_audio_buffer.committed")["item_id"] == triggered["item_id"]
        client.until("response.done")
        for each in (quiet, doubtful):  # whose limits were over before
            _sync(each)
            assert not each.of("input_audio_buffer.committed", "input_audio_buffer.speech_started")
        assert metric(url, 'mingc_realtime_turns_total{end="idle_timeout"}') == 1
        assert len(service.chats) == 5
        doubtful.append(bytes(RATE))
        doubtful.until("input_audio_buffer.timeout_triggered")
        doubtful.until("response.done")


# Interruption


@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW", "ALAW"])
def test_speech_interrupts_an_answer(subtype: str) -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        sound = SENTENCE
        if subtype != "PCM_16":
            sound = telephony(SENTENCE, subtype)
            client.update(audio={"input": {"format": {"type": f"audio/pcm{subtype[0].lower()}"}}})
        client.say("endless")
        client.send("response.create")
        client.until("response.output_audio.delta")
        client.append(sound)
        started = client.until("input_audio_buffer.speech_started")
        assert abs(started["audio_start_ms"] - 244) <= 64  # of 24 kHz: 244
        cut = client.until("response.done")["response"]
        assert cut["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        after = client.events[client.events.index(client.of("input_audio_buffer.speech_started")[0]) :]
        assert not [event for event in after if event["type"].endswith("audio.delta")]
        client.until("response.created")
        client.send("response.cancel")
        assert client.until("response.done")["response"]["status_details"]["reason"] == "client_cancelled"
        eventually(lambda: not service.running)
        assert metric(url, 'mingc_realtime_interruptions_total{reason="turn_detected"}') == 1
        client.send("response.create")
        client.until("response.output_audio.delta")
        asked, heard, said = service.chats[-1].messages[:3]
        assert asked.text == "endless" and heard.role == "assistant" and said.parts[0].size > 1000


def test_a_turn_that_does_not_interrupt_is_answered_afterwards() -> None:
    with scripted(SPOKEN) as (url, service), RealtimeClient(url) as client:
        service.allowed = 3
        detection = {"type": "server_vad", "interrupt_response": False}
        client.update(audio={"input": {"turn_detection": detection}}, tools=[TOOL])
        client.send("response.create")
        client.until("response.output_audio.delta")
        client.append(SENTENCE)
        client.until("input_audio_buffer.committed")
        service.allowed = 1 << 30
        assert client.until("response.done")["response"]["status"] == "completed"
        assert client.until("response.done")["response"]["status"] == "completed"
        assert [each.role for each in service.chats[1].messages] == ["assistant", "user"]


ACTIONS = ["close", "cancel", "truncate", "truncate 0", "clear", "delete", "speak"]


@pytest.fixture(scope="module")
def stepped() -> Iterator[tuple[str, ScriptedService]]:
    """A server that tests share, whose service sends as many events as it may."""
    with scripted(SPOKEN) as found:
        yield found


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_at_every_event(action: str, stepped: tuple[str, ScriptedService]) -> None:
    """Order rules hold, every response has one end, the session goes on, and nothing is held."""
    url, service = stepped
    truncated = "mingc_realtime_truncated_seconds_total"
    before_s, cut_ms = metric(url, truncated), 0
    for num_events in range(len(SPOKEN)):
        service.allowed, service.num_sent = num_events, 0
        with RealtimeClient(url) as client:
            client.update(tools=[TOOL])
            client.send("response.create")
            client.until("response.created")
            eventually(lambda n=num_events: bool(service.running) and service.num_sent == n)
            _sync(client)
            items = client.of("response.output_item.added")
            item_id = items[0]["item"]["id"] if items else "nothing"
            heard_ms = _sound_ms(client)
            if action == "close":
                continue
            _act(client, action, item_id)
            if action in ("clear", "delete"):
                service.allowed = 1 << 30
                assert client.until("response.done")["response"]["status"] == "completed"
            elif action.startswith("truncate") and not items:
                client.send("response.cancel")
                client.until("response.done")
            else:
                end = client.until("response.done")["response"]
                assert end["status"] == "cancelled" and len(end["output"]) == bool(items)
                assert _sound_ms(client) == heard_ms
                if heard_ms <= 640:  # of the first segment
                    texts = [part["transcript"] for item in end["output"] for part in item["content"]]
                    assert "Hello there,".startswith("".join(texts)) and (heard_ms or not any(texts))
            if action.startswith("truncate") and items:
                at = client.until("conversation.item.truncated")["audio_end_ms"]
                assert at == (0 if action.endswith(" 0") else min(heard_ms, 500))
                cut_ms += heard_ms - at
            if action == "speak":
                client.until("response.created")
                client.send("response.cancel")
                client.until("response.done")
            service.allowed = 1 << 30
            assert answer(client)["status"] == "completed"
            assert len(client.of("response.created")) == len(client.of("response.done"))
    eventually(lambda: not service.running and metric(url, "mingc_num_realtime_sessions") == 0)
    assert metric(url, "mingc_num_requests_running") == metric(url, "mingc_body_bytes") == 0
    assert metric(url, truncated) - before_s == pytest.approx(cut_ms / 1000)


def _sync(client: RealtimeClient) -> None:
    """Read what was sent until now."""
    client.send("conversation.item.retrieve", item_id="unknown")
    assert client.until("error")["error"]["code"] == "item_retrieve_invalid_item_id"


def _sound_ms(client: RealtimeClient) -> int:
    deltas = client.of("response.output_audio.delta")
    return sum(len(base64.b64decode(each["delta"])) for each in deltas) * 500 // RATE


def _act(client: RealtimeClient, action: str, item_id: str) -> None:
    match action:
        case "cancel":
            client.send("response.cancel")
        case "truncate" | "truncate 0":
            at = 0 if action.endswith(" 0") else 500
            client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=at)
            if item_id == "nothing":
                assert client.until("error")["error"]["code"] == "item_truncate_invalid_item_id"
        case "clear":
            client.send("input_audio_buffer.clear")
            client.until("input_audio_buffer.cleared")
        case "delete":
            client.send("conversation.item.delete", item_id=item_id)
            client.until("conversation.item.deleted", "error")
        case "speak":
            client.append(SENTENCE)
            client.until("input_audio_buffer.speech_started")


def test_sessions_that_are_dropped_at_once_leave_nothing() -> None:
    with fake_server() as (url, service):

        def drop(number: int) -> None:
            for index in range(number, 60, 4):
                with RealtimeClient(url) as client:
                    client.say("endless" if index % 2 else "hello")
                    client.send("response.create")
                    for _ in range(index % 9):
                        client.next()

        threads = [threading.Thread(target=drop, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: metric(url, "mingc_num_realtime_sessions") == 0)
        eventually(lambda: not service.running)
        assert metric(url, "mingc_num_requests_running") == metric(url, "mingc_body_bytes") == 0


# Items, several responses, limits


def test_items_are_answered_while_a_response_runs() -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.say("endless")
        client.send("response.create")
        client.until("response.output_audio.delta")
        client.say("more", id="more")
        client.until("conversation.item.done", where=lambda event: event["item"]["id"] == "more")
        client.send("conversation.item.delete", item_id="more")
        client.until("conversation.item.deleted")
        client.send("response.create", event_id="second")
        error = client.until("error")["error"]
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "second")
        client.send("response.cancel")
        client.until("response.done")
        client.send("response.cancel", event_id="again")
        error = client.until("error")["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "again")
        assert error["message"].startswith("Cancellation failed")


def test_responses_out_of_band() -> None:
    with scripted(SPOKEN) as (url, service), RealtimeClient(url) as client:
        client.update(tools=[TOOL])
        client.say("hello", id="hello")
        client.until("conversation.item.done")
        service.allowed = 2
        aside = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "aside"}]}
        for given in ([aside, {"type": "item_reference", "id": "hello"}], []):
            response = {"conversation": "none", "output_modalities": ["text"], "input": given}
            client.send("response.create", response=response)
            created = client.until("response.created")["response"]
            assert created["conversation_id"] is None
        client.send("response.create", response={"conversation": "none"})
        assert client.until("error")["error"]["code"] == "conversation_already_has_active_response"
        client.send("response.create")
        eventually(lambda: len(service.chats) == 3)
        texts = [" ".join(message.text for message in chat.messages) for chat in service.chats]
        assert texts == ["aside hello", "", "hello"]
        client.send("response.cancel", response_id=created["id"])
        assert client.until("response.done")["response"]["id"] == created["id"]
        service.allowed = 1 << 30
        client.until("response.done")
        client.until("response.done")
        assert len(client.of("conversation.item.added")) == 3  # question, answer and call of the conversation


def test_what_is_deleted_needs_no_memory() -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.say("x" * 100_000, id="long")
        client.until("conversation.item.done")
        assert metric(url, "mingc_body_bytes") > 0  # beyond what every body has free
        client.send("conversation.item.delete", item_id="long")
        client.until("conversation.item.deleted")
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)


def test_media_that_are_being_read_need_memory() -> None:
    """Also when their item is gone, and no longer than they are read."""

    class Held(FakeService):
        """Reads media when it is `allowed` to."""

        allowed: threading.Event

        async def decode_media(self, part: MediaPart) -> MediaPart:
            await asyncio.to_thread(self.allowed.wait, 30)
            return await super().decode_media(part)

        def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
            found = super().transcribe(request)

            async def late() -> AsyncGenerator[TranscriptEvent]:
                await asyncio.to_thread(self.allowed.wait, 30)
                async for event in found:
                    yield event

            return late()

    Held.allowed = allowed = threading.Event()
    with run_server(Held) as url, RealtimeClient(url) as client:
        sound = speech(0.0, 6.0)
        for transcription, num_copies in ((None, 1), ({"model": "any"}, 2)):
            allowed.clear()
            client.update(audio={"input": {"turn_detection": None, "transcription": transcription}})
            client.append(sound)
            client.send("input_audio_buffer.commit")
            item_id = client.until("input_audio_buffer.committed")["item_id"]
            client.send("conversation.item.delete", item_id=item_id)
            client.until("conversation.item.deleted")
            _sync(client)
            held = metric(url, "mingc_body_bytes") + 65536  # which are free
            assert held == pytest.approx(num_copies * len(sound), abs=1000)
            allowed.set()
            eventually(lambda: metric(url, "mingc_body_bytes") == 0)


def test_what_is_heard_is_bounded_by_the_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn, or a silence for too long, is told and left out; with room there is a turn again."""
    monkeypatch.setitem(Conversation.__init__.__kwdefaults__, "max_items", 2)
    with fake_server() as (url, service), RealtimeClient(url) as client:
        detection = {"type": "server_vad", "idle_timeout_ms": 5000}
        client.update(audio={"input": {"turn_detection": detection}})
        client.say("hello", id="first")
        answer(client)
        triggered = client.until("input_audio_buffer.timeout_triggered", "error")
        assert triggered["type"] == "input_audio_buffer.timeout_triggered"
        assert client.until("error")["error"]["code"] == "too_many_items"
        client.append(SENTENCE)
        assert client.until("error")["error"]["code"] == "too_many_items"
        assert client.of("input_audio_buffer.speech_stopped")
        assert not client.of("input_audio_buffer.committed") and len(client.of("response.created")) == 1
        assert metric(url, 'mingc_realtime_early_starts_total{result="dropped"}') == 1
        eventually(lambda: not service.running)
        client.send("conversation.item.delete", item_id="first")
        client.append(SENTENCE)
        assert client.until("response.done")["response"]["status"] == "completed"


def test_a_picture_and_one_that_is_none() -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        picture = {"type": "input_image", "image_url": image_data_url()}
        text = {"type": "input_text", "text": "What is this?"}
        item = {"type": "message", "role": "user", "content": [picture, text]}
        client.send("conversation.item.create", item=item)
        answer(client)
        assert [type(part).__name__ for part in service.chats[0].messages[0].parts] == [
            "MediaPart",
            "TextPart",
        ]
        broken = {
            "type": "input_audio",
            "audio": base64.b64encode(bytes(20)).decode(),
        }  # too short to be heard
        item = {"type": "message", "role": "user", "content": [broken]}
        client.send("conversation.item.create", item=item, event_id="broken")
        error = client.until("error")["error"]
        assert (error["type"], error["event_id"]) == ("invalid_request_error", "broken")
        assert answer(client)["status"] == "completed"


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("overloaded", None, "server_error"),
        ("too long", "invalid_value", "invalid_request_error"),
        ("fail first", None, "server_error"),
        ("fail midway", None, "server_error"),
        ("crash midway", "internal_error", "server_error"),
    ],
)
def test_a_response_that_fails(text: str, code: str | None, kind: str) -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.say(text, id="bad")
        response = answer(client)
        error = response["status_details"]["error"]
        assert (response["status"], error.get("code"), error["type"]) == ("failed", code, kind)
        client.send("conversation.item.delete", item_id="bad")
        client.until("conversation.item.deleted")
        assert answer(client)["status"] == "completed"


def test_limits_of_keys_and_places(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("good\n")
    headers = {"additional_headers": {"authorization": "Bearer good"}}
    with fake_server(api_key_file=tmp_path / "keys", key_max_requests=1, has_open_metrics=True) as (url, _):
        with pytest.raises(InvalidStatus), RealtimeClient(url):
            pass
        with RealtimeClient(url, **headers) as first, RealtimeClient(url, **headers) as second:
            first.say("endless")
            first.send("response.create")
            first.until("response.output_audio.delta")
            error = answer(second)["status_details"]["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "server_error")
        eventually(lambda: metric(url, "mingc_num_realtime_sessions") == 0)
        assert metric(url, "mingc_num_requests_running") == 0


def test_the_memory_of_a_session_is_limited() -> None:
    """By the budget of all bodies; what is refused leaves the session as it was."""
    with fake_server(max_body_bytes=1 << 20, max_total_body_bytes=1 << 20) as (url, _):
        with RealtimeClient(url) as client:
            client.update(audio=NO_TURNS)
            client.append(bytes(1_200_000), size=9000)
            error = client.until("error")["error"]
            assert error["code"] == "body_budget_exhausted"
            client.send("input_audio_buffer.clear")
            while client.until("input_audio_buffer.cleared", "error")["type"] == "error":
                pass
            client.say("hello")
            assert answer(client)["status"] == "completed"
        eventually(lambda: metric(url, "mingc_body_bytes") == 0)


@pytest.mark.parametrize("instructions", ["", "Be short. " * 9])
@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_the_oldest_turns_are_left_out(truncation: Any, instructions: str) -> None:
    info = replace(INFO, max_model_len=400)
    with scripted([TextDelta(text="yes", token=None), done()], info) as (url, service):
        with RealtimeClient(url) as client:
            client.update(output_modalities=["text"], truncation=truncation, instructions=instructions)
            for number in range(12):
                client.say(f"{number}:" + 40 * "x")
                answer(client)
        lengths = [7 + sum(1 + len(m.text) for m in chat.messages) for chat in service.chats]
        assert all(chat.messages[0].text == instructions for chat in service.chats if instructions)
        turns = [chat.messages[bool(instructions) :] for chat in service.chats]
        firsts = [messages[0].text[:2] for messages in turns]
        if truncation == "disabled":
            assert set(firsts) == {"0:"} and max(lengths) > 400
        else:
            assert max(lengths) <= 400 and len(set(firsts)) > 1
            after_cuts = [
                size
                for size, first, before in zip(lengths[1:], firsts[1:], firsts, strict=False)
                if first != before
            ]
            assert max(after_cuts) <= 7 + 0.8 * (300 - 7)  # a quarter of the context is for the answer
            assert all(messages[0].role == "user" for messages in turns)
            assert all(chat.messages[-1].text.startswith(f"{n}:") for n, chat in enumerate(service.chats))


def test_turns_leave_their_items_alone() -> None:
    """Without sound, once they are left out of prompts; of no other object there are more and more."""
    info = replace(INFO, max_model_len=400)
    with scripted(SPOKEN, info) as (url, service), RealtimeClient(url) as client:
        client.update(tools=[TOOL], audio={"input": {"transcription": {"model": "any"}}})

        def objects_after(num_turns: int) -> Counter[str]:
            for _ in range(num_turns):
                client.append(SENTENCE)
                client.until("response.done")
                while len(client.of("conversation.item.input_audio_transcription.completed")) < 1:
                    client.next()
                client.events.clear()
                service.chats.clear()
                service.transcriptions.clear()
            _sync(client)
            client.events.clear()
            gc.collect()
            kinds = (type(each) for each in gc.get_objects())
            return Counter(
                each.__qualname__
                for each in kinds
                if str(each.__module__).split(".")[0] in ("mingc", "asyncio", "_asyncio")
            )

        before, after = objects_after(12), objects_after(12)
        items = {"UserMessage", "AudioContent", "AssistantMessage", "Answer", "_Segment", "FunctionCall"}
        assert {name for name in after if after[name] > before[name] + 6} == items


# Connection


def test_events_that_are_changed_at_random_end_no_session() -> None:
    """Bytes are changed, cut and doubled; the seed is fixed."""
    random = Random(36)
    picture = {"type": "input_image", "image_url": image_data_url()}
    item = {
        "id": "a",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}, picture],
    }
    made: list[Event] = [
        {"type": "session.update", "session": {"type": "realtime", "audio": NO_TURNS, "tools": [TOOL]}},
        {"type": "conversation.item.create", "item": item, "previous_item_id": "root"},
        {"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 500},
        {"type": "input_audio_buffer.append", "audio": base64.b64encode(speech(0.5, 0.7)).decode()},
        {
            "type": "response.create",
            "response": {"input": [item], "conversation": "none", "metadata": {"a": "b"}},
        },
        {"type": "response.cancel", "response_id": "resp_1"},
    ]
    with fake_server() as (url, service), RealtimeClient(url) as client:
        for _number in range(400):
            data = bytearray(json.dumps(random.choice(made)).encode())
            for _change in range(random.randint(0, 4)):
                place = random.randrange(len(data) + 1)
                data[place : place + random.choice((0, 1, 9))] = random.choice(
                    (b"", b"0", b'"', b"\xff", b"[null]")
                )
            client.socket.send(bytes(data))
        for mark in ("the end", "the very end"):  # when all was read, all responses end
            client.send("conversation.item.delete", item_id=mark)
            client.until("error", where=lambda event, mark=mark: mark in event["error"]["message"])
            eventually(lambda: not service.running)
        client.update(audio={"input": {"turn_detection": None}})
        assert answer(client)["status"] in ("completed", "failed")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [("?model=unknown", 404, "model_not_found"), ("?call_id=rtc_1", 400, "unsupported_parameter")],
)
def test_a_query_that_is_refused(query: str, status: int, code: str) -> None:
    with fake_server() as (url, _):
        with pytest.raises(InvalidStatus) as refused, RealtimeClient(url, query):
            pass
        assert refused.value.response.status_code == status and code.encode() in refused.value.response.body
        assert httpx.get(f"{url}/v1/realtime", trust_env=False).status_code == 426
        with RealtimeClient(url, "?model=ming-omni&other=1") as client:
            assert client.next()["session"]["model"] == "ming-omni"


def test_a_client_that_does_not_read_is_heard() -> None:
    with fake_server() as (url, service), RealtimeClient(url) as client:
        client.say("endless")
        client.send("response.create")
        eventually(lambda: bool(service.running))
        client.send("response.cancel")
        eventually(lambda: not service.running)
        assert client.until("response.done")["response"]["status"] == "cancelled"


def test_an_idle_session_makes_room_and_one_that_answers_stays() -> None:
    with scripted(SPOKEN, max_connections=2) as (url, service), RealtimeClient(url) as busy:
        service.allowed = 3  # it is silent meanwhile, and was so before the other one came
        busy.send("response.create")
        busy.until("response.output_audio.delta")
        with RealtimeClient(url) as idle:
            assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
            with pytest.raises(ConnectionClosed):
                while True:
                    idle.next()
        busy.send("response.cancel")
        assert busy.until("response.done")["response"]["status"] == "cancelled"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_client_that_reads_slowly_receives_all_unless_it_cancels(is_cancelled: bool) -> None:
    """More than sockets hold: what waits is sent when the answer is complete, and taken back when it is cancelled."""
    script = [HI, *(sound(index, 2, is_end=True) for index in range(2000)), done()]
    with scripted(script) as (url, service), RealtimeClient(url) as client:
        client.send("response.create")
        before = 0
        while before < 250 or before != service.num_sent:  # until the queue is full, which holds 200
            before = service.num_sent
            time.sleep(0.5)
        script[before + 9 :] = [done()]  # the answer ends while it is nearly so
        if is_cancelled:
            client.send("response.cancel")
        status = client.until("response.done")["response"]["status"]
        received_ms, made_ms = _sound_ms(client), 320 * (service.num_sent - 1)
        if is_cancelled:
            assert status == "cancelled" and received_ms < made_ms
        else:
            assert (status, received_ms) == ("completed", made_ms)


def test_an_answer_ends_when_the_last_of_it_is_written() -> None:
    """The first event is written when all of the answer is generated; while another one is, there is time to end."""
    script = [HI, *(sound(index, 2, is_end=True) for index in range(5)), done()]
    written: list[Event] = []

    async def run() -> None:
        service, is_done = ScriptedService(script), asyncio.Event()
        app = create_app(service, ServeOptions())
        asked = [
            {"type": "websocket.connect"},
            {"type": "websocket.receive", "text": '{"type": "response.create"}'},
        ]

        async def receive() -> Any:
            if not asked:
                await is_done.wait()
                return {"type": "websocket.disconnect", "code": 1000}
            return asked.pop(0)

        async def send(message: Any) -> None:
            if "text" not in message:
                return
            written.append(json.loads(message["text"]))
            if written[-1]["type"].endswith(".delta"):
                while not service.chats or app.state.server.num_running:
                    await asyncio.sleep(0)
                for _ in range(20):
                    await asyncio.sleep(0)
            if written[-1]["type"] == "response.done":
                is_done.set()

        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": [],
            "query_string": b"",
            "subprotocols": [],
        }
        async with asyncio.timeout(30):
            await app(scope, receive, send)

    asyncio.run(run())
    assert (
        sum(each["type"] == "response.output_audio.delta" for each in written) == 6
    )  # what a resampler held back
    assert written[-1]["response"]["status"] == "completed"


def test_a_session_that_is_too_old() -> None:
    with fake_server(max_session_s=1.0) as (url, service), RealtimeClient(url) as client:
        client.say("endless")
        client.send("response.create")
        assert client.until("error")["error"]["code"] == "session_expired"
        with pytest.raises(ConnectionClosed) as closed:
            client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
        eventually(lambda: not service.running)


# Attacks


def test_a_turn_as_long_as_a_clip_is_answered_with_its_rest() -> None:
    """A cut is no end: nothing answers the first part, which its own continuation would interrupt."""
    info = replace(INFO, media_limits={"clip_seconds": 1.2})
    with scripted(SPOKEN, info) as (url, service), RealtimeClient(url) as client:
        client.update(tools=[TOOL])
        client.append(SENTENCE)
        assert client.until("response.done")["response"]["status"] == "completed"
        committed = client.of("input_audio_buffer.committed")
        assert len(committed) > 1 and len(client.of("response.created")) == 1
        (chat,) = service.chats
        assert [each.role for each in chat.messages] == ["user"] * len(committed)


def test_the_item_of_a_turn_has_its_id_alone() -> None:
    with fake_server() as (url, _), RealtimeClient(url) as client:
        client.append(speech(0.0, 1.0))
        turn = client.until("input_audio_buffer.speech_started")["item_id"]
        client.say("mine", id=turn)
        assert client.until("error")["error"]["code"] == "item_create_duplicate_item_id"
        client.append(bytes(2 * RATE))
        assert client.until("input_audio_buffer.committed")["item_id"] == turn
        assert client.until("response.done")["response"]["status"] == "completed"


@pytest.mark.parametrize(
    "limit", [{"max_concurrent_requests": 1}, {"key_max_requests": 1}, {"key_max_tokens": 3000}]
)
@pytest.mark.parametrize("is_committed", [True, False])
def test_one_place_serves_a_response_and_a_transcript(
    limit: dict[str, int], is_committed: bool, tmp_path: Any
) -> None:
    """The same for tokens, of which each may need 2,048.

    The transcript waits for it; the response waits for the transcript of its own session alone.
    """
    (tmp_path / "keys").write_text("good\n")
    options: dict[str, Any] = {"api_key_file": tmp_path / "keys", **limit}
    headers = {"additional_headers": {"authorization": "Bearer good"}}
    with fake_server(**options) as (url, _), RealtimeClient(url, **headers) as client:
        client.update(audio={"input": {"transcription": {"model": "any"}}})
        if is_committed:
            client.update(audio=NO_TURNS)
        for number in range(3):
            client.append(SENTENCE)
            if is_committed:
                client.send("input_audio_buffer.commit")
                client.send("response.create")
            while len(client.of("response.done")) <= number:
                client.next()
        while len(client.of("conversation.item.input_audio_transcription.completed")) < 3:
            client.next()
        assert not client.of("conversation.item.input_audio_transcription.failed")
        assert [each["response"]["status"] for each in client.of("response.done")] == ["completed"] * 3


def test_an_answer_out_of_band_leaves_the_conversation_as_it_is() -> None:
    info = replace(INFO, max_model_len=400)
    with scripted([TextDelta(text="yes", token=None), done()], info) as (url, service):
        with RealtimeClient(url) as client:
            client.update(output_modalities=["text"])
            for number in range(4):
                client.say(f"{number}:" + 40 * "x")
            answer(client, conversation="none", instructions="y" * 300)
            answer(client)
        aside, own = ([m.text[:2] for m in chat.messages] for chat in service.chats)
        assert "0:" not in aside and own == ["0:", "1:", "2:", "3:"]
