"""Isolation of multimodal requests through HTTP: 32 mixed requests together, compared with each sent alone.

Text, images, clips, images and clips in both orders, spoken answers and `/v1/audio/speech`, greedy and sampled, with
several voices and seeds. They are sent together in several orders and at staggered moments. Texts must be equal, and
waves nearly so, because other batches sum in another order; differences are relative to the largest sample alone.

    python benchmarks/mixed_isolation.py --artifact /tmp/tiny --json benchmarks/results/mixed-isolation-….json
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from arguments import whole
from mixed_clients import Answer, Request, clip, picture, send, send_together

from mingc.artifacts.artifact import open_artifact
from mingc.console.serve_child import serve_child

NUM_REQUESTS = 32
_STAGGER_S = 0.02  # between two requests of a staggered pattern
_QUESTIONS = (
    "What is this?",
    "请描述一下。",
    "Describe it in one sentence, please, and then count to five.",
    "Why?",
)
_GREEDY: dict[str, Any] = {}
_SAMPLED = {"temperature": 0.9, "top_p": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """Comparison of answers with answers to the same requests alone.

    Attributes:
        same_text: number of chats with the same text.
        same_samples: number of spoken answers that are equal sample by sample.
        other_length: number of spoken answers with another number of samples.
        gap: largest difference of samples of spoken answers of the same length.
    """

    same_text: int
    same_samples: int
    other_length: int
    gap: float


def make_requests(voices: Sequence[str], *, max_tokens: int, max_steps: int) -> list[Request]:
    """Eight kinds of requests, four of each that differ in size, text, sampling, voice and seed."""
    requests = []
    for index in range(NUM_REQUESTS):
        kind, variant = index % 8, index // 8
        random = np.random.default_rng(index)
        image = picture(
            random.integers(0, 256, (32 * (1 + index % 3), 32 * (2 + variant), 3), dtype=np.uint8)
        )
        speech = clip(0.1 * random.standard_normal(int(16_000 * (0.3 + 0.35 * variant))))
        asked = {"type": "text", "text": _QUESTIONS[variant]}
        sampling = _SAMPLED if index % 3 == 1 else _GREEDY
        voice = voices[index % len(voices)]
        if kind == 7:
            fields = {"input": _QUESTIONS[variant], "voice": voice, "seed": index, "max_steps": max_steps}
            fields |= {"response_format": "wav", "stream": False}
            fields["temperature"] = 0.7 * (variant % 2)
            requests.append(Request(path="/v1/audio/speech", body=fields))
            continue
        parts = (
            [asked],
            [image, asked],
            [speech, asked],
            [image, speech, asked],
            [speech, image, asked],
            [asked],
            [image, asked],
        )[kind]
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": max_tokens - 2 * variant,
            "seed": index,
            **sampling,
        }
        if kind >= 5:
            body["modalities"] = ["text", "audio"]
            body["audio"] = {"voice": voice, "format": "wav", "max_steps": max_steps}
        requests.append(Request(path="/v1/chat/completions", body=body))
    return requests


def compare(answers: Sequence[Answer], alone: Sequence[Answer]) -> Likeness:
    pairs = list(zip(answers, alone, strict=True))
    spoken = [(one, other) for one, other in pairs if other.samples.size]
    equally_long = [(one, other) for one, other in spoken if one.samples.size == other.samples.size]
    gaps = [
        float(np.abs(one.samples - other.samples).max() / np.abs(other.samples).max())
        for one, other in equally_long
    ]
    return Likeness(
        same_text=sum(one.text == other.text for one, other in pairs),
        same_samples=sum(np.array_equal(one.samples, other.samples) for one, other in spoken),
        other_length=len(spoken) - len(equally_long),
        gap=max(gaps, default=0.0),
    )


def patterns() -> dict[str, tuple[list[int], float]]:
    """Orders of the requests, and the seconds between two of them."""
    given = list(range(NUM_REQUESTS))
    shuffled = np.random.default_rng(7).permutation(NUM_REQUESTS).tolist()
    return {
        "together": (given, 0.0),
        "together, reversed": (given[::-1], 0.0),
        "together, shuffled": (shuffled, 0.0),
        "staggered, shuffled": (shuffled, _STAGGER_S),
    }


def measure(url: str, requests: Sequence[Request]) -> list[dict[str, Any]]:
    alone = [send(url, request) for request in requests]
    num_spoken = sum(bool(answer.samples.size) for answer in alone)
    figures = []
    found = {"alone again": [send(url, request) for request in requests]}
    for name, (order, stagger_s) in patterns().items():
        answers = send_together(url, [requests[index] for index in order], stagger_s)
        by_index = dict(zip(order, answers, strict=True))
        found[name] = [by_index[index] for index in range(len(requests))]
    for name, answers in found.items():
        like = compare(answers, alone)
        rows = {
            "same_text": (like.same_text, f"of {len(requests)} requests"),
            "same_samples": (like.same_samples, f"of {num_spoken} spoken answers"),
            "other_length": (like.other_length, f"of {num_spoken} spoken answers"),
            "wave_gap": (like.gap, "of the largest sample"),
        }
        figures += [
            {"name": figure, "pattern": name, "median": value, "n": 1, "unit": unit}
            for figure, (value, unit) in rows.items()
        ]
    different = len({answer.text for answer in alone})
    figures.append({"name": "different_texts", "median": different, "n": 1, "unit": "texts"})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument("--voices", default="DB30,lingguang", help="of the artifact, separated by commas")
    parser.add_argument("--max-tokens", type=whole(8), default=24, help="of a chat")
    parser.add_argument("--max-steps", type=whole(1), default=4, help="patches of a spoken answer")
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    given = harness.parse_args(parser)
    requests = make_requests(given.voices.split(","), max_tokens=given.max_tokens, max_steps=given.max_steps)
    words = [str(given.artifact), "--port", "0", "--drain-seconds", "0", *shlex.split(given.serve)]
    with serve_child(words, stop_s=30) as (_, stdout):
        if not (url := stdout.readline().decode().strip()):
            raise SystemExit("the server did not start")
        figures = measure(url, requests)
    for each in figures:
        print(" ".join(f"{key}={value}" for key, value in each.items()))
    if given.json:
        fingerprint = open_artifact(given.artifact).manifest.fingerprint
        about = {"gpus": fingerprint.world_size, "dtype": fingerprint.dtype}
        value = harness.result("mixed_isolation", {}, figures, **about)
        harness.write(given.json, value)


if __name__ == "__main__":
    main()
