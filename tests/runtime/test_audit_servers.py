"""`mingc audit` of servers: a stand-in with good and bad answers proves that each failure is noticed."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audited_server import stand_in, tones, wav
from fake_service import SPEECH_ONLY, TEXT_ONLY, FakeService
from mingc_command import ENVIRONMENT, mingc_here
from PIL import Image, ImageDraw
from server_thread import fake_server, run_server

from mingc.audit.audit import is_server
from mingc.audit.questions import COOKBOOK, LONG, SENTENCES, digest_of, media_part
from mingc.audit.server import served
from mingc.prompts.conversation import MediaPart
from mingc.runtime.request import ServiceInfo

GOOD = {
    "Explain what tensor parallelism is in one sentence.": "It splits a tensor over devices, which compute at once.",
    "Read this sentence aloud: This model understands text, images, audio, and video, and can reply with either text "
    "or speech.": "This model understands text, images, audio, and video, and can reply with either text or speech.",
    "Say one friendly sentence.": "Hello! How can I assist you today?",
    "请详细介绍鹦鹉的生活习性。": "鹦鹉成群生活在热带的森林里，吃种子和水果。",
}


def audit(*words: object, code: int) -> Any:
    done = mingc_here("audit", *words, "--repeats", 1, "--json")
    assert done.code == code, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def two_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sentences in each language and shorter long texts: speaking and measuring are most of a test's time."""
    monkeypatch.setattr(
        "mingc.audit.self_audit.LONG", {kind: each[: len(each) // 2] for kind, each in LONG.items()}
    )
    monkeypatch.setattr(
        "mingc.audit.self_audit.SENTENCES", {kind: each[:2] for kind, each in SENTENCES.items()}
    )


def test_a_good_server_is_good(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with stand_in(answers=GOOD, voices=("Ann", "Bob")) as url:
        report = audit("--self", url, "--html", page, code=0)
    assert report["verdict"] == "good" and report["reasons"] == ["all 15 checks are good, 2 were skipped"]
    outcomes = {each["name"]: each["outcome"] for each in report["checks"]}
    assert [name for name in outcomes if name.startswith("speech")] == [
        "speech Ann/en", "speech Ann/zh", "speech Bob/en", "speech Bob/zh", "speech Ann/long-en", "speech Ann/long-zh",
    ]  # fmt: skip
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == {"beach", "space station"}
    published = {each["name"]: each["found"] for each in report["checks"]}
    assert published["friendly sentence"].endswith("; the published answer")
    assert published["tensor parallelism"].endswith("; not word for word the published answer")
    assert page.read_text(encoding="utf-8").count("data:image/png") == 18
    long = {each["name"]: each["figures"]["drift_pitch_semitones"] for each in report["sounds"]}
    assert long["Ann/en-1.1.wav"] is None and abs(long["Ann/long-en.wav"]) < 1


@pytest.mark.usefixtures("two_sentences")
def test_each_fault_of_speech_is_noticed_in_the_voice_that_has_it() -> None:
    kinds = {"silent": "silence", "clipped": "clipping", "slow": "pace", "header": "header", "cut": "length"}
    with stand_in(answers=GOOD, voices=("drifting", "Ann", *kinds)) as url:
        report = audit("--self", url, code=3)
    found = {each["name"]: each for each in report["checks"] if each["name"].startswith("speech ")}
    assert {each["name"] for each in report["checks"] if each["outcome"] == "bad"} == {
        *(f"speech {voice}/{language}" for voice in kinds for language in ("en", "zh")),
        *("speech drifting/long-en", "speech drifting/long-zh"),
    }
    for voice, kind in kinds.items():
        for language in ("en", "zh"):
            assert f"{kind}: " in found[f"speech {voice}/{language}"]["found"]
    assert found["speech slow/en"]["found"].startswith("pace: 2 of 2, slow/en-1.1.wav: 0.16")
    assert "files have [24000] Hz, the list of models says 44100" in found["speech header/zh"]["found"]
    assert "drift: 1 of 1" in found["speech drifting/long-zh"]["found"]
    assert report["verdict"] == "bad" and len(report["reasons"]) == 12


@pytest.mark.usefixtures("two_sentences")
def test_each_fault_of_answers_is_noticed_by_its_checks() -> None:
    made = {"red circle", "blue square", "number", "moving triangle"}
    speech = {"speech Ann/en", "speech Ann/zh", "speech Ann/long-en", "speech Ann/long-zh"}
    prompts = {"tensor parallelism", "read aloud", "friendly sentence", "parrots"}
    found = {}
    for faults in (("deaf", "blind"), ("one sound", "one answer"), ("failing",)):
        with stand_in(*faults, answers=GOOD) as url:
            report = audit("--self", url, code=3)
        found[faults[0]] = {
            each["name"]: each["found"] for each in report["checks"] if each["outcome"] == "bad"
        }
    assert {*found["deaf"]} == speech | made | {"spoken sentences"}
    assert (
        "words: 2 of 2" in found["deaf"]["speech Ann/zh"]
        and "lacks red, circle" in found["deaf"]["red circle"]
    )
    assert {*found["one sound"]} >= made | prompts | {"spoken sentences", "answers differ", "speech differs"}
    assert {*found["failing"]} >= made | prompts | {
        "spoken sentences",
        "speech Ann/en-1",
        "speech Ann/long-zh",
    }
    assert all("500" in each for each in found["failing"].values())


def test_an_answer_needs_enough_keywords_at_the_beginnings_of_words() -> None:
    questions = {each.name: each for each in COOKBOOK}
    assert questions["parrots"].missing("企鹅生活在南极。") == ["鹦鹉", "热带", "种子", "栖息", "社交"]
    assert questions["parrots"].missing("鹦鹉在热带的森林里成群生活。") == []
    assert questions["friendly sentence"].missing("Say one friendly sentence.") == ["hello"]
    assert questions["tensor parallelism"].missing("It distributes tensors; many GPUs work.") == []
    assert questions["tensor parallelism"].missing("Extensors distribute.") == ["tensor", "device", "comput"]


@pytest.mark.usefixtures("two_sentences")
def test_two_servers_are_judged_alone_and_beside_each_other() -> None:
    """Such as an artifact of quantized weights and one in bfloat16."""
    other = {**GOOD, "Say one friendly sentence.": "Have a wonderful day!"}
    with stand_in(answers=GOOD) as one, stand_in("dull", answers=other) as dull:
        report = audit("--self", one, dull, code=0)
    (same,) = (each for each in report["checks"] if each["name"] == "same answers")
    assert same["found"] == "8 of 9 greedy answers are the same words"
    assert report["notes"][-1].startswith("the speech of both is intelligible: mel distance, aligned: ")


@pytest.mark.usefixtures("two_sentences")
def test_two_servers_are_compared_by_their_speech() -> None:
    with stand_in() as one, stand_in() as other, stand_in("header") as wrong:
        assert audit(one, other, code=0)["verdict"] == "equivalent"
        report = audit(one, wrong, code=3)
    assert re.match(r"header: B is 1.8\d times as long as A", report["reasons"][0])


@pytest.mark.usefixtures("two_sentences")
def test_a_server_that_speaks_in_chats_only_is_asked_to_read_aloud() -> None:
    """The shape of sglang-omni: no routes for speech and voices, audio in the message."""
    with stand_in("peer", answers=GOOD) as url:
        report = audit("--self", url, code=0)
    assert "speech default/zh" in {each["name"] for each in report["checks"]}
    with stand_in("peer", "header", answers=GOOD) as url:
        report = audit("--self", url, code=3)
    (found,) = (each["found"] for each in report["checks"] if each["name"] == "speech default/zh")
    assert re.search(r"header: 2 of 2, .*the server counted .* s: they were made at 44100 Hz", found)


def test_our_server_is_asked_through_its_own_interface() -> None:
    """The fake model answers with the words of the question and speaks tones: heard as other words."""
    with fake_server() as (url, service):
        report = audit("--self", url, code=3)
    speech = {each["name"]: each["found"] for each in report["checks"] if each["name"].startswith("speech ")}
    assert {*speech} == {
        *(f"speech {voice}/{language}" for voice in ("DB30", "Lina") for language in ("en", "zh")),
        *("speech DB30/long-en", "speech DB30/long-zh", "speech differs"),
    }
    assert all("words: " in found for name, found in speech.items() if name != "speech differs")
    parts = [part for chat in service.chats for message in chat.messages for part in message.parts]
    assert {part.kind for part in parts if isinstance(part, MediaPart)} == {"image", "video", "audio"}
    assert len(service.speeches) == len(service.transcriptions) == 18


def test_an_artifact_is_served_in_a_child_process(
    eager_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # the backend of the tests
    assert is_server(str(eager_artifact)) and not is_server(str(eager_artifact.parent))
    with served(str(eager_artifact)) as server:
        assert server.voices() and "audio" in server.entry["input_modalities"]
        assert isinstance(server.ask("Say one friendly sentence.", max_tokens=3), str)


def test_speakers_are_compared_with_the_network_of_an_artifact(tmp_path: Path, eager_artifact: Path) -> None:
    long = np.concatenate([tones("The morning train was late again." * 8, syllable_s=0.06)])
    paths = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path in paths:
        path.write_bytes(wav(long))
    report = audit(*paths, "--artifact", eager_artifact, code=0)
    assert all(
        each["figures"]["drift_speaker"] is not None and -0.01 < each["figures"]["drift_speaker"] < 2
        for each in report["sounds"]
    )


@pytest.mark.usefixtures("two_sentences")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("hanging", "timed out"),
        ("endless", "the answer does not end"),
        ("dying", "disconnected"),
        ("garbage", "is no JSON"),
        ("other shape", "another shape than OpenAI's"),
    ],
)
def test_a_server_that_answers_wrongly_or_never_is_bad(
    fault: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.bench.server._TIMEOUT_S", 2.0)
    monkeypatch.setattr("mingc.bench.server._LATER_TIMEOUT_S", 0.05)
    with stand_in(fault, answers=GOOD) as url:
        report = audit("--self", url, code=3)
    bad = [each["found"] for each in report["checks"] if each["outcome"] == "bad"]
    assert len(bad) > 10 and any(found in each for each in bad), bad


@pytest.mark.parametrize("info", [TEXT_ONLY, SPEECH_ONLY])
@pytest.mark.usefixtures("two_sentences")
def test_what_a_server_cannot_do_is_skipped(info: ServiceInfo) -> None:
    """Without its talker, or without the model that reads and listens."""
    with run_server(lambda: FakeService(info)) as url:
        report = audit("--self", url, code=3)
    can_speak = info is SPEECH_ONLY
    skipped = {each["name"] for each in report["checks"] if each["outcome"] == "skipped"}
    assert (
        {"parrots", "number"} <= skipped if can_speak else any(each.startswith("speech ") for each in skipped)
    )
    assert all(
        each["name"].startswith("speech ") == can_speak
        for each in report["checks"]
        if each["outcome"] == "bad"
    )


@pytest.mark.parametrize("url", ["http://[bad", "http://127.0.0.1:99999", "http://exa mple"])
def test_a_bad_address_is_an_error(url: str) -> None:
    done = mingc_here("audit", "--self", url)
    assert done.code in (1, 2) and "bug" not in done.stderr


def test_an_address_without_a_server_is_an_error() -> None:
    done = mingc_here("audit", "--self", "http://127.0.0.1:9")
    assert done.code == 1 and "GET /v1/models" in done.stderr


def test_files_of_published_prompts_are_sent(tmp_path: Path) -> None:
    with stand_in(answers=GOOD) as url, served(url) as server:
        assert server.ask("What is it?", [media_part("a.jpeg", _red_square())]) == "It is a red square."
    assert {each.file for each in COOKBOOK} == {"", "demo.jpeg", "space_woaudio.mp4"}
    assert digest_of("hello, how can I assist you\ntoday") == next(
        each.digest for each in COOKBOOK if each.name == "friendly sentence"
    )


def _red_square() -> bytes:
    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).rectangle((16, 16, 48, 48), fill=(214, 40, 40))
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()
