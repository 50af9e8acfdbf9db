"""The parts of a service that answer chats and the parts that speak, and the media embeddings of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.errors import RequestError
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.media_decoder import MediaDecoder
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.prompts.thinker_prompt import AUDIO, VISION, ThinkerPrompt
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.encoders import host_tensors
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.encoders.media_ids import media_digests, media_ids
from mingc.runtime.request import Constraint
from mingc.runtime.request_stream import RequestStream
from mingc.runtime.service.output_processor import Timings
from mingc.runtime.service.voices import Voices
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.text.spoken import SpeechText

if TYPE_CHECKING:
    from mingc.runtime.grammar.compiler import GrammarCompiler
    from mingc.runtime.grammar.matcher import GrammarMatcher

Encoded = dict[int, list[Future[Tensor]]]  # by `embed_kind`, in the order of `MediaFeatures`
Prepared = tuple[ThinkerPrompt, list[bytes] | None, Encoded]
"""A prompt without media embeddings, its keys for the prefix cache, and futures of the embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatPipeline:
    """The parts that answer chats: prompt processor, encoders, thinker."""

    processor: ChatProcessor
    tokenizer: TextTokenizer
    vision: EncoderLoop[VisionFeatures] | None
    audio: EncoderLoop[AudioFeatures] | None
    loop: ThinkerLoop
    encoder_cache: EncoderCache | None = None  # both encoders share it
    media: MediaDecoder | None = None  # the service closes it, and `grammars`
    grammars: GrammarCompiler | None = None  # None without its library

    def prepare(
        self, prepare: Callable[[], PreparedPrompt], timings: Timings, stream: RequestStream
    ) -> Prepared:
        """Build a prompt, and submit its media to the encoders. Blocks.

        Raises: RequestError when the prompt exceeds the context.
        """
        timings.mark("preprocessing")
        prepared = prepare()
        prompt, media = prepared.tokens, prepared.media
        # A prompt that is too long fails here, before the encoders run.
        self.loop.scheduler.max_new_tokens(prompt.num_tokens, 1)
        timings.mark("prepared")
        encoded: Encoded = {}
        if (media.vision or media.audio) and not stream.is_closed:
            digests = media_digests(media)
            # The processor refuses media without an encoder, so a kind that occurs has its encoder.
            if media.vision and self.vision is not None:
                encoded[VISION] = self.vision.submit(media.vision, digests.vision)
            if media.audio and self.audio is not None:
                encoded[AUDIO] = self.audio.submit(media.audio, digests.audio)
            if self.loop.has_prefix_cache:
                ids = media_ids(prompt.embed_kind, media, digests, merge_size=self.processor.merge_size)
                prompt = replace(prompt, media_ids=ids)
        return prompt, self.loop.page_keys(prompt), encoded

    def matchers(self, constraint: Constraint | None, count: int) -> Sequence[GrammarMatcher | None]:
        """A matcher for each answer. Blocks. Raises: RequestError when the answers cannot be constrained so."""
        if constraint is None:
            return [None] * count
        if self.grammars is None:
            raise RequestError(
                f"'{constraint.param}' is not supported: this server has no llguidance, which constrains answers",
                fix="leave it out, or run pip install llguidance where the server runs",
                param=constraint.param,
                code="unsupported_parameter",
            )
        return self.grammars.compile(constraint, count)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeechPipeline:
    """The parts that generate speech. `voices`: None: only those of `planner` are known."""

    planner: SpeechPlanner
    talkers: TalkerGroup
    max_segment_length: int
    speech_text: SpeechText
    voices: Voices | None = None


async def media_embeds(embed_kind: NDArray[np.int64], encoded: Encoded, device: torch.device) -> Tensor:
    """Embeddings (M, D) of all media tokens of a prompt, in token order, on `device`."""
    try:
        values = {
            kind: [await asyncio.wrap_future(future) for future in futures]
            for kind, futures in encoded.items()
        }
    finally:
        for futures in encoded.values():
            for future in futures:
                future.cancel()  # withdraws the media of a request that has ended; finished futures stay
    found = [each for tensors in values.values() for each in tensors]
    if len(found) == 1 and (device.type == "cpu" or found[0].is_pinned()):
        return found[0].to(device, non_blocking=True)  # one medium fills all places
    return await asyncio.to_thread(place, embed_kind, values, device)


async def picture_embeds(
    prompt: ThinkerPrompt, encoded: Encoded, queries: Tensor, device: torch.device
) -> Tensor:
    """Embeddings (M, D) of a picture's prompt on `device`: of its media, then the learned rows `queries` (Q, D)."""
    if not encoded:
        return queries
    num_media = len(prompt.media_rows) - len(queries)
    media = await media_embeds(prompt.embed_kind[: prompt.media_rows[num_media]], encoded, device)
    return torch.cat([media, queries.to(media)])


@torch.inference_mode()
def place(
    embed_kind: NDArray[np.int64], encoded: Mapping[int, Sequence[Tensor]], device: torch.device
) -> Tensor:
    """Copy the embeddings (tokens, D) of each kind to their media tokens: rows (M, D)."""
    kinds = embed_kind[embed_kind > 0]
    first = next(iter(encoded.values()))[0]
    shape = (len(kinds), first.shape[1])
    is_pinned = device.type == "cuda"  # torch keeps pinned memory for later requests
    embeds = (
        torch.empty(shape, dtype=first.dtype, pin_memory=True)
        if is_pinned
        else host_tensors.empty(shape, first.dtype)
    )
    for kind, values in encoded.items():
        rows = np.flatnonzero(kinds == kind)
        start = 0
        for each in values:
            own = rows[start : start + len(each)]
            start += len(each)
            # A slice, because these rows are consecutive: only words separate the frames of a video.
            embeds[own[0] : own[-1] + 1] = each
    return embeds.to(device, non_blocking=True)
