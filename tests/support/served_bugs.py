"""Plausible bugs of the serving code, to plant in a running service, and the row of `verify` that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mingc.runtime.service import pipelines
from mingc.runtime.talker.engines import TalkerEngines
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.talker.worker import TalkerWorker
from mingc.runtime.thinker import loop
from mingc.runtime.thinker.loop import ThinkerLoop


@dataclass(frozen=True)
class ServedBug:
    """One bug.

    Attributes:
        what: what is wrong, for people.
        owner, name: the function that is wrong: a class or module, and its attribute.
        make: the wrong function from the right one.
        cases: the recorded requests that show it.
        row: the first row of `verify` that fails.
    """

    what: str
    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    cases: tuple[str, ...]
    row: str


def _hidden_kept(_: Callable[..., Any]) -> Callable[..., Any]:
    def advance(self: Any, sampled: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        self._step.run(
            embeds=sampled["next_embeds"],
            slots=inputs["step_slots"],
            lengths=inputs["lengths"],
            **self._talker_state,
        )

    return advance


def _history_kept(right: Callable[..., Any]) -> Callable[..., Any]:
    def sample(self: Any, inputs: Mapping[str, Any]) -> Any:
        before = self._history.clone()
        sampled = right(self, inputs)
        self._history.copy_(before)
        return sampled

    return sample


def _without_embeds(right: Callable[..., Any]) -> Callable[..., Any]:
    def run_chunk(self: Any, parts: Any) -> None:
        none = [
            replace(each.segment, embed_rows=each.segment.embed_rows[:0], embeds=each.segment.embeds[:0])
            for each in parts
        ]
        right(self, [replace(each, segment=own) for each, own in zip(parts, none, strict=True)])

    return run_chunk


def _guidance_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def write(self: Any, inputs: Any, rows: Any) -> None:
            right(self, inputs, rows)
            inputs[name][:] = inputs["guidance"]

        return write

    return make


def _without_instructions(right: Callable[..., Any]) -> Callable[..., Any]:
    def segment(self: Any, text: str, index: int, speech: Any, noise: Any) -> Any:
        return right(self, text, index, replace(speech, instructions=None), noise)

    return segment


def _without_delta(right: Callable[..., Any]) -> Callable[..., Any]:
    def decode_step(self: Any, requests: Any) -> Any:
        step = right(self, requests)
        return replace(step, positions=step.lengths - 1)

    return decode_step


def _image_gate(right: Callable[..., Any]) -> Callable[..., Any]:
    def prefill_step(*words: Any) -> Any:
        step = right(*words)
        return replace(step, embed_kind=np.minimum(step.embed_kind, 1))

    return prefill_step


def _without_audio(right: Callable[..., Any]) -> Callable[..., Any]:
    def place(embed_kind: Any, encoded: Any, device: Any) -> Any:
        embeds = right(embed_kind, encoded, device)
        if len(encoded) == 2:
            with torch.inference_mode():
                embeds[torch.from_numpy(embed_kind[embed_kind > 0] == 2)] = 0
        return embeds

    return place


def _not_cancelled(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, request: None


_SETTINGS = ("speech with settings",)

BUGS: Mapping[str, ServedBug] = {
    "hidden-state": ServedBug(
        "the hidden state of the speech LLM is never updated",
        TalkerEngines,
        "advance",
        _hidden_kept,
        ("speech",),
        "speech.latents (alone)",
    ),
    "history": ServedBug(
        "the history window of the sampler never moves",
        TalkerEngines,
        "sample",
        _history_kept,
        ("speech",),
        "speech.latents (alone)",
    ),
    "voice": ServedBug(
        "the embeddings of the voice are not used",
        TalkerWorker,
        "_run_chunk",
        _without_embeds,
        ("speech",),
        "speech.latents (alone)",
    ),
    "sigma": ServedBug(
        "sigma is replaced by guidance",
        TalkerWorker,
        "_write_patch",
        _guidance_as("sigma"),
        _SETTINGS,
        "speech with settings.latents (alone)",
    ),
    "temperature": ServedBug(
        "temperature is replaced by guidance",
        TalkerWorker,
        "_write_patch",
        _guidance_as("temperature"),
        _SETTINGS,
        "speech with settings.latents (alone)",
    ),
    "instructions": ServedBug(
        "instructions are dropped",
        SpeechPlanner,
        "segment",
        _without_instructions,
        _SETTINGS,
        "speech with settings.latents (alone)",
    ),
    "rope-delta": ServedBug(
        "decode positions lack the prompt's rope_delta",
        ThinkerLoop,
        "_decode_step",
        _without_delta,
        ("image",),
        "image.tokens (alone)",
    ),
    "gate": ServedBug(
        "audio tokens go through the image gate",
        loop,
        "prefill_step",
        _image_gate,
        ("audio",),
        "audio.tokens (alone)",
    ),
    "mixed-prompt": ServedBug(
        "the audio of a prompt with an image is lost",
        pipelines,
        "place",
        _without_audio,
        ("image, audio",),
        "image, audio.tokens (alone)",
    ),
    "chat-disconnect": ServedBug(
        "a client that leaves does not cancel its chat",
        ThinkerLoop,
        "cancel",
        _not_cancelled,
        ("text",),
        "held after a chat that leaves",
    ),
    "speech-disconnect": ServedBug(
        "a client that leaves does not cancel its speech",
        TalkerLoop,
        "cancel",
        _not_cancelled,
        ("speech",),
        "held after all requests, alone",
    ),
}
