"""Realtime sessions of a real artifact with random weights, by OpenAI's client: what is said, heard and remembered."""

from __future__ import annotations

import base64
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from changed_artifact import terse_artifact
from held_resources import wait_until_equal
from mingc_command import serving
from openai_checks import image_data_url
from realtime_client import RATE, Event, OfficialClient, RealtimeClient, speech
from server_thread import eventually, run_server
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mingc.media.decoder_pool import DecoderPool
from mingc.runtime.request import AudioDelta, ChatRequest, Constraint, TextDelta
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.server.options import ServeOptions

SENTENCE = speech(0.0, 2.2, silence_s=0.8)
TOOL = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"day": {"enum": ["today"]}},
        "required": ["day"],
        "additionalProperties": False,
    },
}


@dataclass
class Watched:
    """A served artifact that records each chat request of its sessions, and the events of the answer."""

    service: OmniService
    url: str = ""
    chats: list[tuple[ChatRequest, list[Any]]] = field(default_factory=list)

    def watch(self) -> None:
        """Answers depend on the prompt alone, and have no special tokens, as those of a model that was trained."""
        chat, words = self.service.chat, Constraint(kind="regex", text="([a-zA-Z]{1,9}[ ,.])*", param="text")

        async def watched(request: ChatRequest) -> AsyncIterator[Any]:
            events: list[Any] = []
            self.chats.append((request, events))
            sampling = replace(request.sampling, constraint=words)
            if request.tools.choice == "required":
                sampling = replace(request.sampling, temperature=1.0, seed=1)
            request = replace(request, sampling=sampling)
            if request.speech is not None:
                request = replace(request, speech=replace(request.speech, seed=7))
            async with aclosing(chat(request)) as answer:
                async for event in answer:
                    events.append(event)
                    yield event

        self.service.chat = watched  # type: ignore[method-assign, assignment]

    def prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a chat."""
        request = self.chats[index][0]
        prepared = self.service.prepare(
            request.messages, tools=request.tools.tools, thinking=request.thinking
        )
        ids: list[int] = prepared.tokens.input_ids.tolist()
        return ids

    def answer(self, index: int) -> list[int]:
        """Token ids of the text of an answer."""
        events = self.chats[index][1]
        return [each.token for each in events if isinstance(each, TextDelta) and each.token is not None]


@pytest.fixture(scope="module")
def served(eager_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    artifact = terse_artifact(eager_artifact, tmp_path_factory.mktemp("terse") / "artifact")
    found: list[Watched] = []

    def make() -> OmniService:
        found.append(
            Watched(open_service(artifact, EngineOptions(num_preprocess_threads=2), media=DecoderPool()))
        )
        found[0].watch()
        return found[0].service

    with run_server(make, ServeOptions(port=0, shutdown_timeout_s=1.0)) as url:
        found[0].url = url
        before = found[0].service.held
        yield found[0]
        wait_until_equal(before, lambda: found[0].service.held)


def ask(client: RealtimeClient, **response: Any) -> Event:
    client.send("response.create", response=response)
    found: Event = client.until("response.done")["response"]
    assert found["status"] != "failed", found["status_details"]
    return found


def sounds(client: RealtimeClient) -> bytes:
    return b"".join(base64.b64decode(each["delta"]) for each in client.of("response.output_audio.delta"))


def test_a_conversation(served: Watched) -> None:
    """Greeting, a turn by its silence, an interruption, a call and its result, and the history in another session."""
    with OfficialClient(served.url) as client:
        client.update(max_output_tokens=12, audio={"input": {"transcription": {"model": "any"}}})
        greeting = ask(client, instructions="Greet the user.")
        assert greeting["output"][0]["content"][0]["type"] == "output_audio"
        assert greeting["usage"]["output_token_details"]["text_tokens"] == 12
        assert len(sounds(client)) > 0

        client.append(SENTENCE)
        client.until("response.done")
        turn = client.of("input_audio_buffer.committed")[0]["item_id"]
        transcript = client.of("conversation.item.input_audio_transcription.completed")
        if not transcript:
            transcript = [client.until("conversation.item.input_audio_transcription.completed")]
        assert (
            transcript[0]["item_id"] == turn
            and transcript[0]["usage"]["input_token_details"]["audio_tokens"] > 20
        )
        spoken = client.of("response.done")[-1]["response"]["usage"]["input_token_details"]
        assert spoken["audio_tokens"] > 20

        client.update(max_output_tokens=100)
        client.say("Tell me a long story.")
        client.send("response.create")
        client.until("response.output_audio.delta")
        client.append(SENTENCE)
        cut = client.until("response.done")["response"]
        assert cut["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        client.until("response.created")
        client.send("response.cancel")
        client.until("response.done")

        client.update(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
        made = ask(client)["output"][0]
        assert (made["type"], made["name"], made["arguments"]) == (
            "function_call",
            "weather",
            '{"day": "today"}',
        )
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "sunny"}
        client.send("conversation.item.create", item=result)
        client.update(tool_choice="none", max_output_tokens=6)
        ask(client)
        before = len(served.chats)
        history = []
        for event in client.of("conversation.item.added"):
            client.send("conversation.item.retrieve", item_id=event["item"]["id"])
            history.append(client.until("conversation.item.retrieved")["item"])

    with OfficialClient(served.url) as client:
        client.update(tools=[TOOL], max_output_tokens=6)
        for item in history:
            kept = {key: value for key, value in item.items() if key not in ("object", "status")}
            client.send("conversation.item.create", item=kept)
            client.until("conversation.item.done")
        ask(client)
    roles = [[each.role for each in served.chats[index][0].messages] for index in (before - 1, before)]
    assert roles[1] and roles[1].count("tool") == roles[0].count("tool") == 1


def test_sigterm_within_a_spoken_answer(eager_artifact: Path) -> None:
    """The answer goes on while the server drains, then the WebSocket is closed, and the process ends."""
    with serving(eager_artifact, "--drain-seconds", 2) as server, RealtimeClient(server.url) as client:
        client.update(max_output_tokens=600)
        client.say("Tell me a long story.")
        client.send("response.create")
        client.until("response.output_audio.delta")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/ready", trust_env=False).status_code == 503)
        with pytest.raises(InvalidStatus) as refused, RealtimeClient(server.url):
            pass
        assert refused.value.response.status_code == 503
        client.say("And another one.")
        client.until("conversation.item.done", where=lambda event: event["item"]["role"] == "user")
        client.until("response.output_audio.delta")
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                client.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        assert not client.of("response.done")
        assert server.process.wait(30) == 0


def test_a_text_session_with_a_picture(served: Watched) -> None:
    with OfficialClient(served.url) as client:
        client.update(output_modalities=["text"], max_output_tokens=8)
        picture = {"type": "input_image", "image_url": image_data_url()}
        text = {"type": "input_text", "text": "What is this?"}
        client.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": [picture, text]}
        )
        first, second = ask(client), ask(client)
        assert first["output"][0]["content"][0]["type"] == "output_text"
        assert second["usage"]["input_token_details"]["cached_tokens"] > first["usage"]["input_tokens"] // 2
        assert first["usage"]["input_token_details"]["image_tokens"] > 0


def heard_tokens(events: list[Any], ms: int, answer: list[int], texts: list[str]) -> int:
    """How many tokens were said in so many milliseconds, from the segments of the speech and their lengths.

    `texts`: of each token. The tokens of a segment are spread evenly over its patches.
    """
    ends, place = [], 0
    for text in texts:
        place += len(text)
        ends.append(place)
    segments: list[list[Any]] = []
    for event in events:
        if isinstance(event, AudioDelta):
            if event.text_end is not None:
                segments.append([event.text_end, 0])
            segments[-1][1] += len(event.samples)
    left, start = ms / 1000 * 44100, 0
    for text_end, num_samples in segments:
        first = sum(end <= start for end in ends)
        last = sum(end <= text_end for end in ends)
        if left < num_samples:
            return first + int((last - first) * left / num_samples)
        left, start = left - num_samples, text_end
    return len(answer)


def test_the_next_prompt_has_what_was_heard(served: Watched) -> None:
    """By token ids, which the prefix cache has. A later cut can only be an earlier place."""
    tokenizer = served.service.tokenizer
    role_end = tokenizer.token_id("<|role_end|>")
    with OfficialClient(served.url) as client:
        client.update(max_output_tokens=30, audio={"input": {"turn_detection": None}})
        client.say("Tell me something.")
        first = len(served.chats)
        item = ask(client)["output"][0]
        prompt, answer, events = served.prompt(first), served.answer(first), served.chats[first][1]
        assert len(answer) == 30
        total_ms = len(sounds(client)) * 500 // RATE
        texts = [tokenizer.decode([each]) for each in answer]
        for ms in sorted({total_ms + 1, total_ms, total_ms - 1, 100, *range(0, total_ms, 320)}, reverse=True):
            client.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=ms)
            assert client.until("conversation.item.truncated")["audio_end_ms"] == min(ms, total_ms)
            usage = ask(client, conversation="none", output_modalities=["text"], max_output_tokens=1)["usage"]
            after = served.prompt(len(served.chats) - 1)
            num_same = 0
            while num_same < 30 and after[: len(prompt) + num_same + 1] == prompt + answer[: num_same + 1]:
                num_same += 1
            expected = 30 if ms >= total_ms else heard_tokens(events, ms, answer, texts)
            assert num_same == expected
            assert not num_same or after[len(prompt) + num_same] == role_end
            page = 16
            assert (
                usage["input_token_details"]["cached_tokens"]
                >= (len(prompt) + num_same) // page * page - page
            )


@pytest.mark.parametrize("has_limit", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_oldest_turns_are_left_out(served: Watched, has_limit: bool) -> None:
    """By the tokens of real prompts, spoken answers included, and down to the share that is kept."""
    context = served.service.info.max_model_len
    assert context is not None
    instructions = "Be brief. " * 5
    limit, ratio = (200, 0.5) if has_limit else (context - 4, 0.8)
    words = "word " * (10 if has_limit else context // 12)
    with OfficialClient(served.url) as client:
        client.update(
            instructions=instructions, max_output_tokens=4, audio={"input": {"turn_detection": None}}
        )
        first = len(served.chats)
        client.update(output_modalities=["audio" if has_limit else "text"])
        base = ask(client, conversation="none", input=[])["usage"]["input_tokens"]
        if has_limit:
            limits = {"post_instructions": limit}
            client.update(
                truncation={"type": "retention_ratio", "retention_ratio": ratio, "token_limits": limits}
            )
            limit += base
        sizes, starts = [], []
        for number in range(12):
            client.say(f"{number}. {words}")
            usage = ask(client)["usage"]
            first += 1
            assert usage["input_tokens"] == len(served.prompt(first))
            sizes.append(usage["input_tokens"])
            starts.append(int(served.chats[first][0].messages[1].text.split(".")[0]))
        assert max(sizes) <= limit and len(set(starts)) > 2
        turn = sizes[1] - sizes[0]
        for number in range(1, 12):
            if starts[number] == starts[number - 1]:
                assert sizes[number] == pytest.approx(sizes[number - 1] + turn, abs=4)
            else:
                assert sizes[number - 1] + turn + 4 > limit
                assert sizes[number] <= base + ratio * (limit - base)
        client.update(truncation="disabled")
        client.say("word " * context)
        client.send("response.create")
        error = client.until("response.done")["response"]["status_details"]["error"]
        assert error["code"] == "context_length_exceeded"


def test_sessions_at_once_are_each_as_alone(served: Watched) -> None:
    def talk(number: int) -> tuple[str, bytes]:
        with RealtimeClient(served.url) as client:
            client.update(max_output_tokens=2, instructions=f"You are number {number}.")
            client.say("Say something.")
            response = ask(client)
            return response["output"][0]["content"][0]["transcript"], sounds(client)

    alone = [talk(number) for number in range(8)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda number: talk(number % 8), range(24)))
    for number, (text, pcm) in enumerate(together):
        assert text == alone[number % 8][0]
        first, second = (np.frombuffer(each, "<i2").astype(float) for each in (pcm, alone[number % 8][1]))
        assert len(first) == len(second) and np.abs(first - second).max(initial=0) <= 4
