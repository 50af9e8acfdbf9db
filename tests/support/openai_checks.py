"""Checks of a server with the official `openai` client; each takes the server's base URL.

The checks know nothing of the model behind the server, so that they hold for a fake and for a real artifact.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from openai import OpenAI
from PIL import Image

SAMPLE_RATE = 44100


def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=300)


def model_name(base_url: str) -> str:
    with client(base_url) as openai:
        return openai.models.list().data[0].id


def image_data_url() -> str:
    """A small picture as a PNG data URL."""
    pixels = np.linspace(0, 255, 64 * 96 * 3, dtype=np.uint8).reshape(64, 96, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def wav_base64(seconds: float = 0.5, rate: int = 16000) -> str:
    """A tone as base64 of a WAV file."""
    time = np.arange(int(seconds * rate), dtype=np.float32) / rate
    file = io.BytesIO()
    soundfile.write(file, 0.2 * np.sin(2 * np.pi * 330 * time), rate, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def user(*parts: Any) -> list[Any]:
    """A conversation with one user message."""
    return [{"role": "user", "content": list(parts)}]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


IMAGE = {"type": "image_url", "image_url": {"url": image_data_url()}}
CLIP = {"type": "input_audio", "input_audio": {"data": wav_base64(), "format": "wav"}}


def check_models(base_url: str) -> None:
    with client(base_url) as openai:
        models = openai.models.list().data
        assert len(models) == 1
        assert openai.models.retrieve(models[0].id).id == models[0].id


def check_text(base_url: str) -> str:
    with client(base_url) as openai:
        completion = openai.chat.completions.create(
            model=model_name(base_url), messages=user(text("Say something short.")), max_tokens=12
        )
    choice = completion.choices[0]
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.message.audio is None
    assert choice.finish_reason in ("stop", "length")
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return choice.message.content


def check_streamed_text(base_url: str) -> None:
    """One delta per token, and together the same text as without streaming."""
    whole = check_text(base_url)
    with client(base_url) as openai:
        stream = openai.chat.completions.create(
            model=model_name(base_url),
            messages=user(text("Say something short.")),
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    deltas = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert "".join(delta or "" for delta in deltas) == whole
    # a stop token has no delta
    assert chunks[-1].usage.completion_tokens - len(deltas) in (0, 1)
    assert len({chunk.id for chunk in chunks}) == 1


def check_image(base_url: str) -> None:
    with client(base_url) as openai:
        completion = openai.chat.completions.create(
            model=model_name(base_url), messages=user(IMAGE, text("What is this?")), max_tokens=8
        )
        plain = openai.chat.completions.create(
            model=model_name(base_url), messages=user(text("What is this?")), max_tokens=8
        )
    assert completion.usage is not None and plain.usage is not None
    assert completion.usage.prompt_tokens >= plain.usage.prompt_tokens


def check_input_audio(base_url: str) -> None:
    with client(base_url) as openai:
        completion = openai.chat.completions.create(
            model=model_name(base_url), messages=user(text("What do you hear?"), CLIP), max_tokens=8
        )
    assert completion.choices[0].finish_reason in ("stop", "length")


def check_text_and_audio(base_url: str) -> None:
    with client(base_url) as openai:
        completion = openai.chat.completions.create(
            model=model_name(base_url),
            messages=user(IMAGE, CLIP, text("Answer aloud.")),
            modalities=["text", "audio"],
            audio={"voice": default_voice(base_url), "format": "wav"},
            max_tokens=12,
        )
    message = completion.choices[0].message
    assert message.audio is not None
    assert message.audio.transcript == message.content
    check_wav(base64.b64decode(message.audio.data))


def check_streamed_text_and_audio(base_url: str, audio_format: str = "wav") -> None:
    """The payloads, joined, form one clip with the right rate."""
    voice: Any = {"voice": default_voice(base_url), "format": audio_format}
    with client(base_url) as openai:
        stream = openai.chat.completions.create(
            model=model_name(base_url),
            messages=user(text("Answer aloud.")),
            modalities=["text", "audio"],
            audio=voice,
            max_tokens=12,
            stream=True,
        )
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    deltas = [
        chunk.choices[0].delta.model_dump() for chunk in chunks
    ]  # older clients return `audio` as a plain dict
    audio = [delta["audio"] for delta in deltas if delta.get("audio")]
    assert audio[0]["id"] and not any(part.get("id") for part in audio[1:])
    assert audio[-1]["transcript"] == content
    assert all(part["data"] for part in audio[:-1])
    check_clip(b"".join(base64.b64decode(part.get("data") or "") for part in audio), audio_format)


def check_joined_stream(base_url: str, audio_format: str) -> None:
    """`chat.completions.stream` joins the fields of all deltas: the whole answer, as without streaming."""
    arguments: dict[str, Any] = {
        "model": model_name(base_url),
        "messages": user(text("Answer aloud.")),
        "modalities": ["text", "audio"],
        "audio": {"voice": default_voice(base_url), "format": audio_format},
        "max_tokens": 12,
        "seed": 3,
    }
    with client(base_url) as openai:
        whole = openai.chat.completions.create(**arguments).choices[0].message
        with openai.chat.completions.stream(**arguments) as stream:
            for _ in stream:
                pass
            # `get_final_completion` would raise for an answer that `max_tokens` ends.
            joined = stream.current_completion_snapshot.choices[0].message
    assert whole.audio is not None and joined.audio is not None
    assert joined.content == whole.content == joined.audio.transcript
    assert joined.audio.id.count("audio-") == 1
    assert joined.audio.expires_at == pytest.approx(whole.audio.expires_at, abs=600)
    data = base64.b64decode(joined.audio.data, validate=True)
    expected = base64.b64decode(whole.audio.data)
    samples = check_clip(data, audio_format)
    assert samples.tolist() == check_clip(expected, audio_format).tolist()
    assert data == expected or audio_format == "wav", "the header of a streamed WAV has no length"


def check_speech_file(base_url: str, folder: Path) -> None:
    """Speech to a file, whole and streamed; both have the same samples."""
    voice = default_voice(base_url)
    whole, streamed = folder / "whole.wav", folder / "streamed.wav"
    with client(base_url) as openai:
        arguments: dict[str, Any] = {
            "model": model_name(base_url),
            "voice": voice,
            "input": "Hello there, this is a test.",
            "response_format": "wav",
            "extra_body": {"seed": 5, "max_steps": 24},
        }
        with openai.audio.speech.with_streaming_response.create(**arguments) as response:
            response.stream_to_file(whole)
        with openai.audio.speech.with_streaming_response.create(
            **arguments, stream_format="audio"
        ) as response:
            response.stream_to_file(streamed)
    assert check_wav(whole.read_bytes()).tolist() == check_wav(streamed.read_bytes()).tolist()


def check_unknown_voice(base_url: str) -> None:
    from openai import NotFoundError

    with client(base_url) as openai, pytest.raises(NotFoundError) as caught:
        openai.audio.speech.create(model=model_name(base_url), voice="absent", input="Hello.")
    assert caught.value.param == "voice"
    assert default_voice(base_url) in caught.value.message


def check_unknown_model(base_url: str) -> None:
    from openai import NotFoundError

    with client(base_url) as openai, pytest.raises(NotFoundError) as caught:
        openai.chat.completions.create(model="gpt-4o", messages=user(text("Hi")))
    assert caught.value.code == "model_not_found"


def check_logprobs(base_url: str) -> None:
    """The bytes of the tokens are the text's, half characters included; a stream has the same, with their text."""
    arguments: dict[str, Any] = {
        "model": model_name(base_url),
        "messages": user(text("Say something short, 😀 你好.")),
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with client(base_url) as openai:
        whole = openai.chat.completions.create(**arguments).choices[0]
        chunks = list(openai.chat.completions.create(**arguments, stream=True))
        plain = openai.chat.completions.create(**{**arguments, "top_logprobs": 0}).choices[0]
        without = openai.chat.completions.create(**{**arguments, "top_logprobs": 0, "logprobs": False})
    assert whole.logprobs is not None and whole.logprobs.content and whole.logprobs.refusal is None
    content = whole.logprobs.content
    joined = b"".join(bytes(each.bytes or ()) for each in content)
    assert joined.decode(errors="replace") == whole.message.content
    for entry in content:
        logprobs = [each.logprob for each in entry.top_logprobs]
        assert len(logprobs) == 3 and logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= max(0.0, *logprobs)
        assert entry.bytes is None or entry.token == bytes(entry.bytes).decode(errors="replace")
    assert without.choices[0].logprobs is None
    assert plain.logprobs is not None and plain.logprobs.content is not None
    assert [each.top_logprobs for each in plain.logprobs.content] == [[]] * len(content)
    streamed, shown = [], ""
    for choice in (chunk.choices[0] for chunk in chunks):
        shown += choice.delta.content or ""
        streamed += (choice.logprobs and choice.logprobs.content) or []
        sent = b"".join(bytes(each.bytes or ()) for each in streamed).decode(errors="replace")
        assert sent.rstrip("\ufffd") == shown.rstrip("\ufffd"), "an entry comes with its text"
    assert streamed == content


def check_answers(base_url: str) -> None:
    """Answer i of several is that of the seed plus i; usage counts the prompt once."""
    arguments: dict[str, Any] = {
        "model": model_name(base_url),
        "messages": user(text("Say something short.")),
        "max_tokens": 12,
        "temperature": 1.0,
    }
    with client(base_url) as openai:
        alone = [openai.chat.completions.create(**arguments, seed=seed) for seed in (5, 6, 7)]
        whole = openai.chat.completions.create(**arguments, seed=5, n=3)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = openai.chat.completions.create(**arguments, seed=5, n=3, **options)
    texts = [each.choices[0].message.content for each in alone]
    assert len(set(texts)) == 3
    assert [(each.index, each.message.content) for each in whole.choices] == list(enumerate(texts))
    usages = [each.usage for each in alone if each.usage is not None]
    for usage in (whole.usage, last.usage):
        assert usage is not None and usage.prompt_tokens == usages[0].prompt_tokens
        assert usage.completion_tokens == sum(each.completion_tokens for each in usages)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    shown, ends = [""] * 3, [""] * 3
    for choice in (chunk.choices[0] for chunk in chunks):
        assert not ends[choice.index]
        shown[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ""
    assert shown == texts and ends == [each.finish_reason for each in whole.choices]


def check_completions(base_url: str) -> None:
    prompt = "Once upon a time 😀"
    tokens = tokenize(base_url, prompt=prompt)["tokens"]
    arguments: dict[str, Any] = {"model": model_name(base_url), "seed": 4, "temperature": 0.8, "logprobs": 2}
    with client(base_url) as openai:
        whole = openai.completions.create(**arguments, prompt=prompt)
        by_ids = openai.completions.create(**arguments, prompt=tokens)
        in_list = openai.completions.create(**{**arguments, "logprobs": None}, prompt=[prompt], echo=True)
        echoed = openai.completions.create(**{**arguments, "logprobs": None}, prompt=tokens, echo=True)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = openai.completions.create(**arguments, prompt=prompt, n=2, **options)
    choice = whole.choices[0]
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 16
    assert by_ids.choices[0].text == choice.text
    assert [each.choices[0].text for each in (in_list, echoed)] == [prompt + choice.text] * 2
    found = choice.logprobs
    assert (
        found is not None
        and found.tokens
        and found.text_offset
        and found.top_logprobs
        and found.token_logprobs
    )
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    for token, offset, logprob, top in zip(
        found.tokens, found.text_offset, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token) or "<" in token
        assert top[token] == logprob and len(top) in (2, 3)
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    first = [each for chunk in chunks for each in chunk.choices if each.index == 0]
    assert "".join(each.text for each in first) == choice.text
    assert first[-1].finish_reason == choice.finish_reason
    streamed = [each.logprobs for each in first if each.logprobs is not None]
    assert [token for each in streamed for token in each.tokens or ()] == found.tokens
    assert [offset for each in streamed for offset in each.text_offset or ()] == found.text_offset
    assert last.choices == [] and last.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def tokenize(base_url: str, **body: Any) -> dict[str, Any]:
    with client(base_url) as openai:
        return dict(openai.post(f"{base_url}/tokenize", body=body, cast_to=dict[str, Any]))


def check_tokenizer(base_url: str) -> None:
    """`/detokenize` gives back what `/tokenize` got; special tokens in a text are text."""
    for prompt in ("a", " Ünï 😀\n你好 \0<|role_end|>", "x" * 3000):
        found = tokenize(base_url, prompt=prompt, return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] is None or found["max_model_len"] > 0
        with client(base_url) as openai:
            body = {"tokens": found["tokens"]}
            back = openai.post(f"{base_url}/detokenize", body=body, cast_to=dict[str, Any])
        assert back == {"prompt": prompt}
    messages = user(text("Say something short."))
    chat = tokenize(base_url, messages=messages, model=model_name(base_url))
    assert chat["token_strs"] is None and chat["count"] == len(chat["tokens"])
    with client(base_url) as openai:
        version = openai.get(f"{base_url}/version", cast_to=dict[str, Any])
    assert list(version) == ["version"]


def default_voice(base_url: str) -> str:
    with client(base_url) as openai:
        voices = openai.get("/audio/voices", cast_to=dict[str, Any])
    return str(voices["default"] or voices["voices"][0])


def check_wav(data: bytes) -> NDArray[np.int16]:
    """soundfile reads it at 44,100 Hz, mono, not empty; returns the samples as int16."""
    samples: NDArray[np.int16]
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == SAMPLE_RATE
    assert samples.ndim == 1 and len(samples) > 0
    return samples


def check_clip(data: bytes, audio_format: str) -> NDArray[np.int16]:
    """The samples of a whole clip; soundfile reads every format."""
    if audio_format != "pcm16":
        return check_wav(data)
    samples, _ = soundfile.read(
        io.BytesIO(data), dtype="int16", samplerate=SAMPLE_RATE, channels=1, format="RAW", subtype="PCM_16"
    )
    assert len(data) == 2 * len(samples) > 0
    return np.asarray(samples, np.int16)


OF_ANY_SERVER = (
    check_models,
    check_text,
    check_streamed_text,
    check_image,
    check_input_audio,
    check_text_and_audio,
    check_streamed_text_and_audio,
    check_unknown_voice,
    check_unknown_model,
    check_logprobs,
    check_answers,
    check_completions,
    check_tokenizer,
)
