"""The whole model in eager float32, one request at a time: the reference of served goldens.

Independent of the serving code: no KV cache, pages, slots, chunks, batches or streaming. Every token and every patch
recomputes its whole sequence, and a waveform is decoded in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.stage_graph import ImagePath, SpeechPath, StageGraph
from mingc.export.checks.eager_decoder import PromptStream, logits_of
from mingc.export.layers.decoder import DecoderConfig

_TOKEN_MULTIPLE = 32  # tokens of pictures and captions are padded to multiples of it

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

Modules = Callable[[str, str], Sequence[nn.Module]]
"""(stage, path in its module) → the float32 module there, one per rank."""


@dataclass(frozen=True, slots=True)
class _Words:
    """A prompt and its answer so far; the fields are the prompt's in `EagerModel.answer`, extended by the answer."""

    input_ids: Tensor
    positions: Tensor
    embed_kind: Tensor
    embeds: Tensor


class EagerModel:
    """Runs the stages of one export.

    Args:
        configs: of the stages, by name.
        keeps_modules: keep modules in memory between calls; otherwise each layer is loaded for every token.
    """

    def __init__(
        self, graph: StageGraph, configs: Mapping[str, Any], modules: Modules, *, keeps_modules: bool
    ) -> None:
        self._configs = configs
        self._modules = modules
        self._kept: dict[tuple[str, str], Sequence[nn.Module]] | None = {} if keeps_modules else None
        self.decoder = graph.text_decoder()
        self.speech: SpeechPath | None = graph.speech_path()
        self.images: ImagePath | None = graph.image_path()

    @property
    def is_small(self) -> bool:
        """Whether all modules are in memory, so that a token needs only a pass over them."""
        return self._kept is not None

    def encode(self, stage: str, inputs: Sequence[NDArray[np.generic]]) -> Floats:
        """Output (…, D) of an encoder's graph `encode` for one image frame or clip, from the graph's inputs."""
        with torch.no_grad():
            (embeds,) = self._one(stage).encode(*map(torch.from_numpy, inputs))
        return _numpy(embeds)

    def answer(
        self,
        prompts: Sequence[tuple[Ints, Ints, Ints, Floats]],
        *,
        rope_deltas: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> list[tuple[Ints, Floats]]:
        """Greedy answers: the tokens (n,) of each prompt and their logits (n, V); a stop token ends an answer.

        Args:
            prompts: input_ids (T,), positions (3, T), embed_kind (T,) and embeds (T, D), read where the kind is not 0.
            rope_deltas: generated token number n, counted from the start of the prompt, has position n + delta.
        """
        words = [_Words(*map(torch.from_numpy, each)) for each in prompts]
        made: list[list[Tensor]] = [[] for _ in prompts]
        ended: set[int] = set()
        for _ in range(max_tokens):
            left = [index for index in range(len(words)) if index not in ended]
            for index, logits in zip(left, self._last_logits([words[each] for each in left]), strict=True):
                made[index].append(logits)
                token = int(logits.argmax())
                if token in stop_ids:
                    ended.add(index)
                else:
                    words[index] = _extended(words[index], token, rope_deltas[index])
        arrays = [_numpy(torch.stack(each)) for each in made]
        return [(each.argmax(axis=1).astype(np.int64), each) for each in arrays]

    def _last_logits(self, prompts: Sequence[_Words]) -> list[Tensor]:
        """Logits (V,) of the last token of each prompt."""
        assert self.decoder is not None, "the export has a text decoder"
        config: DecoderConfig = self._configs[self.decoder].decoder
        streams = self._streams(prompts)
        with torch.no_grad():
            head = self._ranks(self.decoder, "head")
            return [logits_of(head, each.residual[-1:], config.vocab_size)[0] for each in streams]

    def _streams(self, prompts: Sequence[_Words]) -> list[PromptStream]:
        """The residual streams of prompts after the last layer. A layer is loaded once for all of them."""
        assert self.decoder is not None, "the export has a text decoder"
        if not prompts:
            return []
        config: DecoderConfig = self._configs[self.decoder].decoder
        with torch.no_grad():
            embed = self._ranks(self.decoder, "embed")[0]
            streams = [
                PromptStream.embed(embed, each.input_ids, each.embeds, each.embed_kind, each.positions)
                for each in prompts
            ]
            for layer in range(config.num_layers):
                for half in ("attention", "feed_forward"):
                    ranks = self._ranks(self.decoder, f"layers.{layer}.{half}")
                    for stream in streams:
                        stream.add(ranks)
        return streams

    def queries(self) -> Floats:
        """The learned rows (Q, D) of all scales that end the prompt of a picture."""
        assert self.images is not None, "the export draws"
        return _numpy(self._one(self.images.condition).queries)

    def hidden_rows(
        self, prompts: Sequence[tuple[Ints, Ints, Ints, Floats]], queries: Sequence[tuple[int, int]]
    ) -> list[Floats]:
        """Rows [start, end) of each prompt (see `answer`) after the last layer, before the final norm."""
        streams = self._streams([_Words(*map(torch.from_numpy, each)) for each in prompts])
        return [_numpy(each.residual[start:end]) for each, (start, end) in zip(streams, queries, strict=True)]

    def draw(
        self,
        rows: Floats,
        *,
        glyph_ids: Ints | None,
        noise: Floats,
        levels: Floats,
        guidance: float,
        reference: Floats | None,
    ) -> tuple[Floats, Floats]:
        """Latents (C, h, w) and pixels (H, W, 3), 0 to 255, of a picture; every step recomputes its caption.

        Args:
            rows: (Q, D) of `hidden_rows`.
            glyph_ids: (L,) of the text that it is to show.
            noise: (C, h, w).
            levels: (steps + 1,).
            guidance: at most 1: none.
            reference: (H, W, 3), 0 to 255.
        """
        path = self.images
        assert path is not None, "the export draws"
        sampler, vae = self._one(path.sampler), self._one(path.decoder)
        with torch.no_grad():
            hidden = torch.from_numpy(rows)
            caption = self._one(path.condition).condition(hidden, torch.zeros_like(hidden))[0]
            if glyph_ids is not None:
                assert path.glyph is not None, "the export has glyphs"
                caption = torch.cat(
                    (caption, self._one(path.glyph).encode(torch.from_numpy(glyph_ids)[None])[0][0])
                )
            frames = [torch.from_numpy(noise)]
            if reference is not None:
                scaled = torch.from_numpy(reference).permute(2, 0, 1) / 127.5 - 1
                _, down, across = frames[0].shape
                cells = scaled.reshape(1, 3, down, scaled.shape[1] // down, across, -1)
                frames.append(vae.encode(cells)[0][0])
            for now, after in pairwise(levels.tolist()):
                velocity = _velocity(sampler, frames, caption, 1 - now)
                if guidance > 1:
                    unguided = _velocity(sampler, frames, torch.zeros_like(caption), 1 - now)
                    velocity = velocity + guidance * (velocity - unguided)
                frames[0] = frames[0] - (after - now) * velocity
            pixels = vae.decode(frames[0][None])[0][0].flatten(3, 4).flatten(1, 2)
            shown = (pixels / 2 + 0.5).clamp(0, 1) * 255
        return _numpy(frames[0]), _numpy(shown.permute(1, 2, 0))

    def speak(
        self,
        *,
        input_ids: Ints,
        embed_rows: Ints,
        embeds: Floats,
        history: Floats,
        noise: Floats,
        step_noise: Floats,
        settings: tuple[float, float, float],
        is_last: Callable[[int, float], bool],
    ) -> tuple[Floats, Floats, Floats]:
        """Speech of one segment: latents (n, P, C), stop probabilities (n,) and samples (m,).

        Args:
            input_ids: (T,), of which rows `embed_rows` (E,) take `embeds` (E, D) in place of words.
            history: (H, C) latents before the first patch.
            noise: (N, P, C) start noise of patches; at most N are generated.
            step_noise: (N, steps, P, C).
            settings: guidance, sigma, temperature.
            is_last: whether the segment ends with this patch, from its index and stop probability.
        """
        assert self.speech is not None, "the export has a speech path"
        sampler, vocoder = self._one(self.speech.sampler), self._one(self.speech.vocoder)
        arguments = [torch.tensor([value], dtype=torch.float32) for value in settings]
        past, following = torch.from_numpy(history)[None], torch.zeros(0, embeds.shape[1])
        latents, stops = [], []
        with torch.no_grad():
            for patch in range(len(noise)):
                hidden = self._hidden(input_ids, embed_rows, embeds, following)
                drawn = [torch.from_numpy(each[patch])[None] for each in (noise, step_noise)]
                found, embed, _, stop = sampler.sample(hidden, past, *drawn, *arguments)
                latents.append(found[0])
                stops.append(float(stop))
                past = torch.cat((past, found), dim=1)[:, found.shape[1] :]
                following = torch.cat((following, embed))
                if is_last(patch, stops[-1]):
                    break
            (samples,) = vocoder.decode(torch.cat(latents)[None])
        return _numpy(torch.stack(latents)), np.array(stops, np.float32), _numpy(samples).reshape(-1)

    def _hidden(self, input_ids: Ints, embed_rows: Ints, embeds: Floats, following: Tensor) -> Tensor:
        """Hidden state (1, D) of the last token of a prompt and the patches (n, D) after it."""
        assert self.speech is not None, "the export has a speech path"
        llm, config = self._one(self.speech.speech_llm), self._configs[self.speech.speech_llm]
        count = len(input_ids) + len(following)
        words = torch.cat((torch.from_numpy(input_ids), torch.zeros(len(following), dtype=torch.int64)))
        given, is_given = torch.zeros(count, embeds.shape[1]), torch.zeros(count, dtype=torch.bool)
        rows = torch.from_numpy(embed_rows)
        given[rows], is_given[rows] = torch.from_numpy(embeds), True
        given[len(input_ids) :], is_given[len(input_ids) :] = following, True
        shape = (2, config.slot_tokens, config.llm.num_kv_heads, config.llm.head_dim)
        slots = [torch.zeros(shape) for _ in range(2 * config.llm.num_layers)]
        segment, index = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        places = (segment, index, torch.tensor([1]), torch.tensor([count - 1]))
        hidden: Tensor = llm.prefill(words, given, is_given, *places, *slots)[0]
        return hidden

    def _one(self, stage: str) -> Any:
        """The whole module of a stage that is not sharded."""
        return self._ranks(stage, "")[0]

    def _ranks(self, stage: str, path: str) -> Sequence[nn.Module]:
        if self._kept is None:
            return self._modules(stage, path)
        if (stage, path) not in self._kept:
            self._kept[stage, path] = self._modules(stage, path)
        return self._kept[stage, path]


def _velocity(sampler: Any, frames: Sequence[Tensor], caption: Tensor, time: float) -> Tensor:
    """Velocity (C, h, w) of the first of `frames`, each (C, h, w), with one `caption` (L, C)."""
    channels, height, width = frames[0].shape
    size = sampler.ends.config.patch_size
    grid = (height // size, width // size)

    def padded(values: Tensor) -> tuple[Tensor, Tensor]:
        more = -len(values) % _TOKEN_MULTIPLE
        return F.pad(values, (0, 0, 0, more)), torch.arange(len(values) + more) >= len(values)

    rows, is_caption_pad = padded(caption)
    cells = [each.reshape(channels, grid[0], size, grid[1], size) for each in frames]
    tokens = [each.permute(1, 3, 2, 4, 0).reshape(grid[0] * grid[1], -1) for each in cells]
    axes = (torch.arange(len(frames)) + len(rows) + 1, *map(torch.arange, grid))
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    positions = torch.cat((padded(places)[0], F.pad(torch.arange(1, len(rows) + 1)[:, None], (0, 2))))
    latents, is_pad = padded(torch.cat(tokens))
    embedded = sampler.ends.caption(rows[None], is_caption_pad)[0]
    found = sampler.velocity(latents[None], positions, is_pad, embedded, torch.tensor([time]))[0][0]
    patches: Tensor = found[: grid[0] * grid[1]].reshape(*grid, size, size, channels)
    return patches.permute(4, 0, 2, 1, 3).reshape(channels, height, width)


def _extended(words: _Words, token: int, rope_delta: int) -> _Words:
    """The prompt with one more word."""
    position = len(words.input_ids) + rope_delta
    return _Words(
        torch.cat((words.input_ids, torch.tensor([token]))),
        torch.cat((words.positions, torch.full((3, 1), position)), dim=1),
        torch.cat((words.embed_kind, torch.zeros(1, dtype=torch.int64))),
        torch.cat((words.embeds, torch.zeros(1, words.embeds.shape[1]))),
    )


def _numpy(value: Tensor) -> Floats:
    array: Floats = value.detach().float().numpy()
    return array
