"""The conversation benchmark: its requests, its load and its verdicts. The whole script takes too long for a test."""

from __future__ import annotations

import base64
import io
import itertools
import json
import statistics
from dataclasses import replace

import pytest
import soundfile
from chat_clients import Seen
from conversation import (
    Samples,
    add_answers,
    beside_ratios,
    capacity,
    check_cold,
    encoder_hits,
    is_sustained,
    stages_ms,
)
from conversation_clients import WORKLOADS, Answer, Sizes, poisson, request_of
from fake_service import INFO
from PIL import Image
from speech_clients import RATE, ReceivedSpeech

from mingc.runtime.request import ServiceLoad
from mingc.server.http.parsing import parse_chat, parse_speech
from mingc.server.metrics import Metrics
from mingc.server.options import ServeOptions

SIZES = Sizes(words=5, tokens=20, patches=10, image_pixels=96, clip_s=1.5)


def spoken(first_s: float, *, late: int = 0, chunks: int = 200) -> Answer:
    """An answer of so many chunks of 0.1 s, the last `late` of them a second later than they should be."""
    arrivals = [
        (
            100.0 + first_s + 0.09 * index + (index >= chunks - late) * (1.0 + index),
            int(0.2 * RATE) * (index + 1),
        )
        for index in range(chunks)
    ]
    return Answer(100.0, None, ReceivedSpeech(100.0, arrivals))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_server_understands_every_request(workload: str) -> None:
    raw = json.dumps({**request_of(workload, 3, SIZES), "model": INFO.model}).encode()
    options = ServeOptions()
    if workload == "speech":
        speech = parse_speech(raw, INFO, options)
        assert (speech.delivery, speech.audio.format, speech.audio.sample_rate, speech.speech.max_steps) == (
            "audio",
            "pcm16",
            44100,
            10,
        )
        return
    parsed = parse_chat(raw, INFO, options)
    chat = parsed.request
    assert (
        parsed.stream and parsed.include_usage and chat.sampling.ignore_eos and chat.sampling.max_tokens == 20
    )
    kinds = [getattr(part, "kind", "text") for part in chat.messages[0].parts]
    assert kinds == {"text": ["text"], "image": ["image", "text"], "clip": ["audio"]}[workload]
    assert (chat.speech is not None) == (workload == "clip")


def test_media_are_what_they_are_said_to_be_and_differ_between_requests() -> None:
    for workload in ("image", "clip"):
        assert request_of(workload, 3, SIZES) == request_of(workload, 3, SIZES)
        assert request_of(workload, 3, SIZES) != request_of(workload, 4, SIZES)
    sound = request_of("clip", 1, SIZES)["messages"][0]["content"][0]["input_audio"]["data"]
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sound)))
    assert (len(samples), rate) == (24000, 16000)
    assert 0.05 < abs(samples).max() < 1.0
    url = request_of("image", 1, SIZES)["messages"][0]["content"][0]["image_url"]["url"]
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert (image.format, image.size) == ("JPEG", (96, 96))


def test_varied_answers_differ_in_length_around_the_wanted_one() -> None:
    varied = Sizes(words=5, tokens=100, patches=10, image_pixels=96, clip_s=1.5, is_varied=True)
    lengths = [request_of("text", index, varied)["max_tokens"] for index in range(300)]
    assert min(lengths) < 60 and max(lengths) > 140 and 90 < statistics.mean(lengths) < 110
    assert {request_of("text", index, SIZES)["max_tokens"] for index in range(9)} == {20}


def test_chats_are_sampled_as_asked() -> None:
    sampled = replace(SIZES, sampling={"temperature": 0.5, "top_p": 0.9})
    for workload in ("text", "image", "clip"):
        body = request_of(workload, 1, sampled)
        assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
        assert body == request_of(workload, 1, SIZES) | {"temperature": 0.5, "top_p": 0.9}
    assert "temperature" not in request_of("speech", 1, sampled), "it means the noise of the flow there"


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = poisson(20.0, 500.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05), (
        "as exponential gaps have"
    )
    assert len(poisson(0.001, 1.0, seed=1, least=4)) == 4


def test_the_capacity_is_the_highest_rate_in_time() -> None:
    tried: list[float] = []

    def is_in_time(rate: float) -> bool:
        tried.append(rate)
        return rate <= 5.2

    assert capacity(is_in_time, 1.0, 9.0, 4) == 5.0
    assert tried == [1.0, 9.0, 5.0, 7.0, 6.0, 5.5]
    assert capacity(lambda rate: True, 1.0, 9.0, 4) == 9.0
    assert capacity(lambda rate: False, 1.0, 9.0, 4) == 0.0


def test_a_rate_is_sustained_without_refusals_late_chunks_and_late_first_audio() -> None:
    assert is_sustained([spoken(0.29)] * 20)
    assert not is_sustained([spoken(0.29)] * 20 + [None])
    assert is_sustained([spoken(0.1)] * 20 + [spoken(0.4)]), "one of 21 may be later"
    assert not is_sustained([spoken(0.1)] * 17 + [spoken(0.4)] * 2)
    assert spoken(0.1, late=2).num_underruns == 2
    assert is_sustained([spoken(0.1)] * 3 + [spoken(0.1, late=7)])
    assert not is_sustained([spoken(0.1)] * 3 + [spoken(0.1, late=8)]), "8 of 800 are 1 %"
    assert not is_sustained([])


def test_figures_are_of_all_servers_with_the_median_of_each() -> None:
    total = Samples()
    for delay in (0.1, 0.2):
        seen = Seen(100.0, [100.0 + delay + 0.5 * index for index in range(3)])
        seen.timings_ms = {"preprocessing": 1.0, "prepared": 5.0, "encoded": 9.0}
        one = Samples()
        add_answers(one, [Answer(100.0, seen, None), spoken(delay)], load="closed")
        total.merge(one)
    figures = {(each["name"], each.get("stage")): each for each in total.figures()}
    assert figures["ttft_ms", None]["servers"] == pytest.approx([100.0, 200.0])
    assert figures["first_audio_ms", None]["n"] == 2
    assert figures["tpot_ms", None]["median"] == pytest.approx(500.0)
    assert figures["answer_tokens", None]["median"] == 3
    assert figures["answer_audio_s", None]["median"] == pytest.approx(20.0)
    assert figures["stage_ms", "encode"]["median"] == pytest.approx(4.0)
    assert ("stage_ms", "queue") not in figures
    assert stages_ms({"first_segment": 3.0, "first_audio": 10.0}) == {"first_patch": 7.0}


def test_text_beside_speakers_is_compared_with_text_alone() -> None:
    samples = Samples()
    samples.add("inter_token_ms", "ms", [10.0] * 99 + [20.0], load="beside", streams=2, speakers=0)
    assert beside_ratios(samples) == []
    samples.add("inter_token_ms", "ms", [11.0] * 90 + [30.0] * 10, load="beside", streams=2, speakers=8)
    assert [each["median"] for each in beside_ratios(samples)] == [1.1, 3.0]


def test_a_measurement_fails_when_requests_are_answered_from_a_cache() -> None:
    metrics = Metrics()
    scrape = metrics.render(ServiceLoad(encoder_hits=3)).decode()
    assert encoder_hits(scrape) == 3
    cold = Answer(0.0, Seen(0.0, [1.0], cached_tokens=32), None)
    warm = Answer(0.0, Seen(0.0, [1.0], cached_tokens=320), None)
    check_cold([cold, None], 0)
    for answers, hits in (([cold, warm], 0), ([cold], 1)):
        with pytest.raises(SystemExit, match="came from a cache"):
            check_cold(answers, hits)
