"""Voices over HTTP on a real artifact: registered as an export does, used, kept, shared, and refused."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from mingc_command import CHECKPOINT, DATA, Server, mingc_here, serving
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from server_thread import run_server
from websockets.sync.client import connect

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.manifest import read_manifest
from mingc.errors import RequestError
from mingc.export.assets.voices import SPEAKER_NETWORK, VoiceSource, read_voice
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.features import Features
from mingc.prompts.media_decoder import MediaTask
from mingc.runtime.request import SpeechParams
from mingc.runtime.service import voices
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.voice_registration import open_voices
from mingc.runtime.voices import VoicePack, VoiceSample

WORDS = "One sentence. Another one. And a third."
VOICES, SPEECH, CHAT = "/v1/audio/voices", "/v1/audio/speech", "/v1/chat/completions"


def wav(samples: np.ndarray, rate: int = 16_000, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def recording() -> bytes:
    """6.7 s of speech as a WAV file of 16 bits, in the first of two channels."""
    samples, rate = soundfile.read(DATA / "speech" / "three-sentences.ogg", dtype="int16")
    return wav(np.stack([samples, samples[::-1]], axis=1), rate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def server(eager_artifact: Path, folder: Path) -> Iterator[Server]:
    with serving(eager_artifact, "--voices-dir", folder, "--voice-alias", "alloy=DB30") as started:
        yield started


def client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


def add(
    http: httpx.Client, name: str, audio: bytes | None = None, words: str | None = WORDS, **fields: str
) -> httpx.Response:
    data = {"name": name, "consent": "The speaker agreed on paper.", **fields}
    if words is not None:
        data["ref_text"] = words
    files = None if audio is None else {"audio_sample": ("voice.wav", audio)}
    if files is None:
        return http.post(VOICES, files={key: (None, value) for key, value in data.items()})
    return http.post(VOICES, data=data, files=files)


def speak(http: httpx.Client, text: str = "Say this. And say that.", **fields: Any) -> bytes:
    body = {"input": text, "seed": 5, "max_steps": 2, "response_format": "wav", "stream": False, **fields}
    response = http.post(SPEECH, json=body)
    assert response.status_code == 200, response.text
    return response.content


def names(http: httpx.Client) -> list[str]:
    return [each["name"] for each in http.get(VOICES).json()["uploaded_voices"]]


@pytest.fixture(scope="module")
def clone(server: Server, recording: bytes) -> dict[str, Any]:
    with client(server) as http:
        response = add(http, "clone", recording, speaker_description="calm")
        assert response.status_code == 200, response.text
        return dict(response.json())


def test_a_voice_over_http_is_the_exported_one_bit_for_bit(
    eager_artifact: Path, folder: Path, clone: dict[str, Any], recording: bytes, tmp_path: Path
) -> None:
    """The same file, registered by the functions that `mingc export` calls, in another process."""
    manifest = read_manifest(eager_artifact)
    path = tmp_path / "voice.wav"
    path.write_bytes(recording)
    source = VoiceSource(name="clone", wav=path, transcript=WORDS)
    network = CHECKPOINT / "talker" / SPEAKER_NETWORK
    flow = manifest.parameters["cfm"]
    read = read_voice(source, network, flow.speaker_dim, max_seconds=40.0)
    copied = tmp_path / "artifact"
    copied.mkdir()
    for each in eager_artifact.iterdir():
        (copied / each.name).symlink_to(each) if each.name != "voices" else (copied / "voices").mkdir()
    register = open_voices(copied, open_artifact(eager_artifact).manifest)
    record = register(read)
    register(replace(read, name="another that says the same", clip=read.clip[::-1]))
    exported, kept = load_file(copied / record.file), load_file(folder / f"{clone['id']}.safetensors")
    np.testing.assert_array_equal(exported["latents"][0], kept["latents"])
    for name in ("embeds", "speaker"):
        np.testing.assert_array_equal(exported[name], kept[name])
    samples, _ = soundfile.read(path, dtype="int16")
    np.testing.assert_array_equal(kept["clip"], samples[:, 0])
    assert record.num_patches == len(kept["embeds"]) > 10 and np.ptp(kept["embeds"]) > 0


def test_the_objects_of_a_voice(server: Server, clone: dict[str, Any]) -> None:
    expected = {
        "id": clone["id"], "object": "audio.voice", "name": "clone", "type": "audio_sample", "ref_text": WORDS,
        "created_at": clone["created_at"], "duration": 106446 / 16000, "consent": "The speaker agreed on paper.",
        "speaker_description": "calm",
    }  # fmt: skip
    assert clone == {**expected, "success": True}
    with client(server) as http:
        listed = http.get(VOICES).json()
    assert listed["object"] == "list" and listed["default"] == "DB30"
    assert listed["voices"][:2] == ["DB30", "lingguang"] and "clone" in listed["voices"]
    assert expected in listed["data"] and expected in listed["uploaded_voices"]
    assert [each["type"] for each in listed["data"][:2]] == ["built_in", "built_in"]


def test_all_ways_to_name_a_clone_give_the_same_speech(
    server: Server, clone: dict[str, Any], recording: bytes
) -> None:
    """By name, id or object; brought along, which wins over `voice`, with the label of another or of no voice."""
    data = base64.b64encode(recording).decode()
    given = {"ref_audio": f"data:audio/wav;base64,{data}", "ref_text": WORDS}
    with client(server) as http:
        first = speak(http, voice="clone")
        assert speak(http, voice=clone["id"]) == speak(http, voice={"id": clone["id"]}) == first
        for voice in ({}, {"voice": "DB30"}, {"voice": "alloy"}):
            assert speak(http, **given, **voice) == first
        assert (
            speak(http, ref_audio=data, ref_text=WORDS)
            == first
            == speak(http, ref_audio=data, ref_text=f" {WORDS}")
        )
        spaced = add(http, "spaced", recording, f" {WORDS}\n").json()
        assert spaced["ref_text"] == WORDS and speak(http, voice="spaced") == first
        assert http.delete(f"{VOICES}/spaced").status_code == 200
        assert speak(http, voice="DB30") != first
        for fields in ({"ref_audio": data, "ref_text": "a" * 1001}, {"ref_audio": "AAAA", "ref_text": WORDS}):
            body = {"input": "Hi.", **fields}
            refused = http.post(SPEECH, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("ref_")
            chat = {"messages": [{"role": "user", "content": "Hi."}], "modalities": ["text", "audio"]}
            refused = http.post(CHAT, json={**chat, "audio": fields})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("audio.ref_")
        # The words are a part of what is cached.
        assert speak(http, ref_audio=data, ref_text="Other words.") != first


def test_a_clone_speaks_an_answer(server: Server, clone: dict[str, Any], recording: bytes) -> None:
    with client(server) as http:

        def answer(**audio: Any) -> dict[str, Any]:
            body = {
                "messages": [{"role": "user", "content": "Talk."}],
                "modalities": ["text", "audio"],
                "audio": {"format": "wav", "max_steps": 2, **audio},
                "max_tokens": 24,
                "seed": 5,
                "ignore_eos": True,
            }
            response = http.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            return dict(response.json()["choices"][0]["message"])

        kept, other = answer(voice="clone"), answer(voice="DB30")
        given = answer(ref_audio=base64.b64encode(recording).decode(), ref_text=WORDS)
        assert kept["content"] == given["content"] == other["content"]
        assert kept["audio"]["data"] == given["audio"]["data"] != other["audio"]["data"]


def test_a_clone_speaks_a_text_that_is_still_being_written(server: Server, clone: dict[str, Any]) -> None:
    def session(**config: Any) -> tuple[bytes, list[str]]:
        sound, codes = b"", []
        with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", proxy=None) as socket:
            defaults = {"seed": 5, "max_steps": 2, "response_format": "wav", "split_granularity": "sentence"}
            for event in (
                {"type": "session.config", **defaults, **config},
                {"type": "input.text", "text": "Say this. And "},
                {"type": "input.text", "text": "say that."},
                {"type": "input.done"},
                {"type": "session.close"},
            ):
                socket.send(json.dumps(event))
            for message in socket:
                if isinstance(message, bytes):
                    sound += message
                elif (event := json.loads(message))["type"] == "error":
                    codes.append(event["error"]["code"])
        return sound, codes

    kept, none = session(voice="clone")
    assert none == [] and len(kept) > 10_000 and kept == session(voice={"id": clone["id"]})[0] != session()[0]
    with client(server) as http:
        assert kept[44:] == speak(http, voice="clone")[44:], "but for the header, which has no length"
    assert session(voice="nobody")[1] == ["voice_not_found"]
    assert session(ref_audio="AAAA")[1] == ["unknown_parameter"]


def test_the_words_of_a_recording_are_not_spoken(server: Server, clone: dict[str, Any]) -> None:
    """Each segment of the text is spoken once, for two patches, whatever the voice has said."""

    def segments(voice: str) -> tuple[list[str], int]:
        body = {
            "input": "Say this. And say that.", "voice": voice, "seed": 5, "max_steps": 2, "response_format": "wav",
            "stream_format": "sse", "timestamp_granularities": ["segment"],
        }  # fmt: skip
        found: list[str] = []
        with client(server) as http:
            lines = http.post(SPEECH, json=body).text.splitlines()
            for event in (json.loads(line[6:]) for line in lines if line.startswith("data: {")):
                found += [event["text"]] if "text" in event else []
            return found, len(speak(http, voice=voice))

    assert segments("clone") == segments("DB30")
    assert not any(word in "".join(segments("clone")[0]) for word in ("sentence", "third"))


class SlowDecoder(InProcessDecoder):
    """Decodes when it may, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_media = 0

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        self.num_media += 1
        self.has_begun.set()
        assert self.may_end.wait(60)
        return super().run(task, data)


def test_requests_with_the_same_new_voice_share_its_computation(
    eager_artifact: Path, recording: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the client leaves whose request began it."""
    decoder = SlowDecoder()
    service = open_service(eager_artifact, media=decoder)
    params = SpeechParams(reference=VoiceSample(recording=recording, transcript=WORDS))

    async def run() -> None:
        leaving, staying = (asyncio.ensure_future(service.find_voice(params)) for _ in range(2))
        assert await asyncio.to_thread(decoder.has_begun.wait, 60)
        leaving.cancel()
        await asyncio.wait((leaving,))
        decoder.may_end.set()
        found = (await staying).reference
        assert leaving.cancelled() and isinstance(found, VoicePack) and found.transcript == WORDS
        assert (await service.find_voice(params)).reference is found and decoder.num_media == 1
        broken = SpeechParams(reference=VoiceSample(recording=b"no sound", transcript=WORDS))
        for number in (2, 3):  # what failed is not kept
            with pytest.raises(RequestError):
                await service.find_voice(broken)
            assert decoder.num_media == number
        one = found.num_bytes
        monkeypatch.setattr(voices, "CACHE_BYTES", one)
        vectors = (tuple(np.eye(192, dtype=np.float32)[number]) for number in range(3))
        for each in vectors:
            made = (await service.find_voice(SpeechParams(reference=VoiceSample(vector=each)))).reference
            assert isinstance(made, VoicePack) and 0 < service.load.limits["voice_cache_bytes"][0] <= one
        assert (await service.find_voice(params)).reference is not found, "the oldest was dropped"
        await service.close(shutdown_timeout_s=1.0)

    asyncio.run(run())


def test_a_voice_of_a_speaker_vector(server: Server) -> None:
    vector = np.random.default_rng(1).normal(size=192).round(4).tolist()
    with client(server) as http:
        added = add(http, "vector", words=None, speaker_embedding=json.dumps(vector)).json()
        assert (added["type"], added["ref_text"], added["duration"]) == ("speaker_embedding", None, None)
        spoken = speak(http, voice="vector")
        assert spoken == speak(http, speaker_embedding=vector) != speak(http, speaker_embedding=vector[::-1])
        assert http.delete(f"{VOICES}/vector").status_code == 200
        for number in range(25):
            add(http, f"voice {number}", words=None, speaker_embedding=json.dumps(vector))
        message = http.post(SPEECH, json={"input": "Hi.", "voice": "none"}).json()["error"]["message"]
        shown, _, number = message.removesuffix(" more").rpartition(" and ")
        assert shown.count(", ") == 19 and int(number) == len(http.get(VOICES).json()["data"]) - 20
        for number in range(25):
            assert http.delete(f"{VOICES}/voice {number}").status_code == 200


def test_the_client_of_openai_adds_and_deletes(server: Server, recording: bytes) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        made = sdk.audio.voices.create(
            audio_sample=("a.wav", recording),
            consent="cons_1",
            name="of the SDK",
            extra_body={"ref_text": WORDS},
        )
        assert (made.name, made.object, made.type) == ("of the SDK", "audio.voice", "audio_sample")
        speech = sdk.audio.speech.create(
            model="ming-omni", voice={"id": made.id}, input="Hi.", extra_body={"max_steps": 1}
        )
        assert len(speech.read()) > 100
        deleted = sdk.audio.voices.delete(made.id)
        assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "audio.voice.deleted", True)
        with pytest.raises(openai.NotFoundError) as gone:
            sdk.audio.speech.create(model="ming-omni", voice={"id": made.id}, input="Hi.")
        assert gone.value.code == "voice_not_found" and "clone" in gone.value.message
        with pytest.raises(openai.NotFoundError):
            sdk.audio.voices.delete(made.id)
        with pytest.raises(openai.PermissionDeniedError):
            sdk.audio.voices.delete("DB30")


def _hostile(recording: bytes) -> dict[str, tuple[dict[str, str], bytes | None]]:
    """Fields that replace those of a good form, and the file."""
    samples, rate = soundfile.read(io.BytesIO(recording), dtype="float32")
    mono = samples[:, 0]
    flac = io.BytesIO()
    soundfile.write(flac, np.zeros(16_000 * 3600, np.int16), 16_000, format="FLAC")  # an hour in little space
    of_nan = np.where(np.arange(len(mono)) == 9, np.nan, mono)
    broken_header = recording[:40] + b"\xff\xff\xff\xff" + recording[44:2000]
    files = {
        "no bytes": b"",
        "a byte": b"R",
        "text": b"hello " * 1000,
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(1000),
        "zip": b"PK\x03\x04" + bytes(5000),
        "random": np.random.default_rng(0).bytes(50_000),
        "the header alone": recording[:44],
        "a false length": broken_header,
        "an hour": flac.getvalue(),
        "10 MiB and more": recording + bytes(10 << 20),
        "31 s": wav(np.tile(mono, 5)[: 31 * rate]),
        "0.9 s": wav(mono[: int(0.9 * rate)]),
        "silence": wav(np.zeros(3 * rate)),
        "quiet": wav(mono * 1e-3),
        "clipped": wav(np.clip(mono * 50, -1, 1)),
        "clipped below": wav(np.clip(mono * 50, -1, 0.9)),
        "clipped above": wav(np.clip(mono * 50, -0.9, 1)),
        "not a number": wav(of_nan, subtype="FLOAT"),
        "infinite": wav(np.where(of_nan == of_nan, of_nan, np.inf), subtype="FLOAT"),
        "noise": wav(np.random.default_rng(0).normal(0, 0.1, 3 * rate)),
        "a tone": wav(0.3 * np.sin(np.arange(3 * rate) * 0.2)),
        "a rate of primes": wav(mono, 15_991),
        "1 Hz": wav(mono[:20], 1),
        "65 channels": wav(np.zeros((rate, 65), np.int16)),
    }
    bad_names = (
        "",
        ".",
        "..",
        "a/b",
        "../../etc/passwd",
        "a\\b",
        "a\nb",
        "a\tb",
        "a\x7fb",
        "é\u202e",
        " a",
        "a" * 65,
    )
    vectors = (
        "", "[]", "{}", "null", "1", "[1, 2]", '["a"]', f"[{'1, ' * 191}NaN]", f"[{'1, ' * 191}1e999]",
        f"[{'0, ' * 191}0]", f"[{'1, ' * 191}1e30]", f"[{'1, ' * 192}1]", "[" * 5000, f"[{'1,' * 20_000}1]",
    )  # fmt: skip
    cases: dict[str, tuple[dict[str, str], bytes | None]] = {key: ({}, file) for key, file in files.items()}
    cases |= {f"name {name!r}": ({"name": name}, recording) for name in bad_names}
    cases |= {
        f"vector {vector[:20]!r} {len(vector)}": ({"speaker_embedding": vector}, None) for vector in vectors
    }
    cases["both"] = ({"speaker_embedding": "[1]"}, recording)
    cases["neither"] = ({}, None)
    cases["no consent"] = ({"consent": ""}, recording)
    cases["blank consent"] = ({"consent": "  "}, recording)
    cases["too many words"] = ({"ref_text": "a" * 1001}, recording)
    cases["no room for speech"] = ({"ref_text": "\U0001f9ff" * 1000}, recording)
    cases["a prompt"] = ({"type": "prompt"}, recording)
    cases["unknown field"] = ({"voice": "x"}, recording)
    cases["taken"] = ({"name": "clone"}, recording)
    cases["built in"] = ({"name": "DB30"}, recording)
    cases["an alias"] = ({"name": "alloy"}, recording)
    cases["an id"] = ({"name": "voice_" + "0" * 32}, recording)
    return cases


def test_bad_uploads_are_the_fault_of_the_client(
    server: Server, clone: dict[str, Any], recording: bytes, folder: Path
) -> None:
    cases = _hostile(recording)
    assert len(cases) >= 50
    before = sorted(os.listdir(folder))
    found = {}
    with client(server) as http:
        for key, (fields, audio) in cases.items():
            words = None if "speaker_embedding" in fields else WORDS
            form = {"name": "hostile", "words": words, **fields}
            if "ref_text" in form:
                form["words"] = form.pop("ref_text")
            response = add(http, str(form.pop("name")), audio, **form)  # type: ignore[arg-type]
            found[key] = (response.status_code, response.json()["error"]["code"])
        assert {key: each for key, each in found.items() if not 400 <= each[0] < 500} == {}
        assert found["31 s"][0] == 400 and found["10 MiB and more"][0] == 413 and found["taken"][0] == 409
        for key in (
            "silence",
            "quiet",
            *(each for each in found if "clipped" in each),
            "noise",
            "a tone",
            "0.9 s",
        ):
            assert found[key] == (400, "unsuitable_recording"), key
        for body in (b"", b"--x\r\n", recording):
            wrong = http.post(
                VOICES, content=body, headers={"content-type": "multipart/form-data; boundary=x"}
            )
            assert wrong.status_code == 400
        assert http.post(VOICES, json={"name": "a"}).status_code == 415
        assert http.post(VOICES, headers={"origin": "http://evil.example"}).status_code == 403
        for name in ("..", "../clone", "%2e%2e", "clone/x", "x" * 5000):
            assert http.delete(f"{VOICES}/{name}").status_code in (404, 405), name
        assert sorted(os.listdir(folder)) == before and names(http) == ["clone"]
        assert speak(http, voice="clone")


def test_words_are_heard_by_the_model_when_they_are_not_sent(server: Server, recording: bytes) -> None:
    """The random model answers with something, which is what the voice is then said to say."""
    with client(server) as http:
        response = add(http, "heard", recording, words=None)
        assert response.status_code == 200, response.text
        assert response.json()["ref_text"]
        data = base64.b64encode(recording).decode()
        assert speak(http, ref_audio=data) == speak(http, voice="heard")
        http.delete(f"{VOICES}/heard")


def test_a_full_disk_keeps_nothing(
    server: Server, clone: dict[str, Any], recording: bytes, folder: Path
) -> None:
    before = sorted(os.listdir(folder))
    pid, kind = server.process.pid, resource.RLIMIT_FSIZE
    limits = resource.prlimit(pid, kind)
    with client(server) as http:
        resource.prlimit(pid, kind, (20_000, limits[1]))
        try:
            response = add(http, "full", recording)
            assert (response.status_code, response.json()["error"]["code"]) == (507, "insufficient_storage")
            assert sorted(os.listdir(folder)) == before
        finally:
            resource.prlimit(pid, kind, limits)
        assert add(http, "full", recording).status_code == 200
        assert http.delete(f"{VOICES}/full").status_code == 200


def test_servers_share_a_folder(
    server: Server, clone: dict[str, Any], recording: bytes, eager_artifact: Path, folder: Path
) -> None:
    """What one adds or removes, the other one knows. A voice of another artifact is computed again from its clip."""
    foreign = folder / f"voice_{'f' * 32}.safetensors"
    with safe_open(folder / f"{clone['id']}.safetensors", framework="np") as file:
        header = json.loads(file.metadata()["voice"])
    header["info"] |= {"id": foreign.stem, "name": "foreign"}
    tensors = load_file(folder / f"{clone['id']}.safetensors")
    tensors |= {name: np.zeros_like(tensors[name][:1]) for name in ("latents", "embeds", "speaker")}
    save_file(tensors, foreign, {"voice": json.dumps({**header, "weights": "of another model"})})
    (folder / f"voice_{'e' * 32}.safetensors").write_bytes(b"no voice")
    with (
        client(server) as http,
        serving(eager_artifact, "--voices-dir", folder) as other,
        client(other) as second,
    ):
        assert names(second) == ["clone", "foreign"]
        spoken = speak(http, voice="clone")
        assert speak(second, voice="clone") == spoken == speak(second, voice="foreign")
        assert add(second, "new", recording).status_code == 200
        assert speak(http, voice="new") == spoken, "at once, though the list may be a second old"
        assert add(http, "new", recording).status_code == 409
        assert http.delete(f"{VOICES}/new").status_code == 200
        while "new" in names(second):  # the folder is listed once a second
            time.sleep(0.1)
        body = {"input": "Hi.", "voice": "new"}
        assert second.post(SPEECH, json=body).status_code == 404
        assert http.delete(f"{VOICES}/foreign").status_code == 200


def test_a_killed_server_leaves_whole_voices(recording: bytes, eager_artifact: Path, tmp_path: Path) -> None:
    kept = []
    with serving(eager_artifact, "--voices-dir", tmp_path) as started:

        def register(prefix: str) -> None:
            with client(started) as http:
                for number in itertools.count():
                    try:
                        if add(http, f"{prefix}{number}", recording).status_code == 200:
                            kept.append(f"{prefix}{number}")
                    except httpx.HTTPError:
                        return

        threads = [threading.Thread(target=register, args=(prefix,)) for prefix in "abc"]
        for thread in threads:
            thread.start()
        while len(kept) < 3:
            time.sleep(0.01)
        started.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    (tmp_path / "voice_0.1.tmp").write_bytes(b"half a voice")
    with serving(eager_artifact, "--voices-dir", tmp_path) as again, client(again) as http:
        found = names(http)
        assert {*kept} <= {*found} and len(found) <= len(kept) + 3
        assert not list(tmp_path.glob("*.tmp"))
        for path in tmp_path.glob("*.safetensors"):
            assert load_file(path).keys() == {"latents", "embeds", "speaker", "clip"}
        assert speak(http, voice=found[-1])


def test_voices_are_refused_where_they_are_not_kept(eager_artifact: Path, recording: bytes) -> None:
    with (
        run_server(lambda: open_service(eager_artifact, media=InProcessDecoder())) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        refused = add(http, "a", recording)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "voices_not_kept")
        assert "--voices-dir" in refused.json()["error"]["message"]
        assert speak(http, ref_audio=base64.b64encode(recording).decode(), ref_text=WORDS)


def test_the_command_line_manages_the_same_voices(
    server: Server,
    clone: dict[str, Any],
    recording: bytes,
    eager_artifact: Path,
    folder: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(recording)
    words = ("--consent", "yes", "--words", WORDS, "--json")
    added = mingc_here("voices", "add", eager_artifact, folder, path, "--name", "by command", *words)
    assert added.code == 0, added.stderr
    with client(server) as http:
        assert (
            speak(http, voice="by command")
            == speak(http, voice=added.document["id"])
            == speak(http, voice="clone")
        )
    listed = mingc_here("voices", "list", folder, "--json").document["voices"]
    # Oldest first, in seconds: these two may be of one.
    assert sorted(each["name"] for each in listed) == ["by command", "clone"] and added.document in listed
    assert mingc_here("voices", "add", eager_artifact, folder, path, "--name", "by command", *words).code == 1
    assert mingc_here("voices", "remove", folder, "by command").code == 0
    assert mingc_here("voices", "remove", folder, "by command").code == 2
    assert mingc_here("voices", "list", folder / "nowhere").code == 2
