"""Records served goldens: the requests, prepared as a server prepares them, and the eager model's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.artifact import Artifact, hash_file
from mingc.artifacts.manifest import Manifest
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.glyph import GlyphTokenizer, glyph_text
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.prompts.thinker_prompt import AUDIO, VISION
from mingc.prompts.tokenizer import Detokenizer, TextTokenizer, load_tokenizer
from mingc.runtime.encoders.vision_grid import build_grid_arrays, group_pixels
from mingc.runtime.images.schedule import noise_levels
from mingc.runtime.images.tokens import start_noise
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.service.drawing import decode_reference, picture_sizes
from mingc.runtime.service.served_stages import (
    ChatStages,
    ImageStages,
    SpeechStages,
    find_chat_stages,
    find_image_stages,
    find_speech_stages,
)
from mingc.runtime.service.speech_builder import create_speech_planner
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.text.spoken import SpokenText, spoken_pieces
from mingc.verify.served.cases import SPEECH_TEXT, ServedCase, ServedGoldens, asset_records, write_goldens
from mingc.verify.served.conversion import decoded_messages, image_request, speech_params
from mingc.verify.served.requests import PIXEL_STRIDE, Media, chat_cases, picture_cases, speech_cases

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

FILE = "goldens/served.safetensors"
_TOKENS = 6  # of an answer
_TOKENS_OF_LARGE = 2  # of a model whose layers are loaded anew for every token
_MAX_COLUMNS = 1024  # logits recorded for a token
_SEED = 20


class ReferenceModel(Protocol):
    """Interface of the model that computes the answers; see `mingc.export.checks.eager_model.EagerModel`."""

    @property
    def is_small(self) -> bool: ...

    def encode(self, stage: str, inputs: Sequence[Array]) -> Floats: ...

    def answer(
        self,
        prompts: Sequence[tuple[Ints, Ints, Ints, Floats]],
        *,
        rope_deltas: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
    ) -> list[tuple[Ints, Floats]]: ...

    def queries(self) -> Floats: ...

    def hidden_rows(
        self, prompts: Sequence[tuple[Ints, Ints, Ints, Floats]], queries: Sequence[tuple[int, int]]
    ) -> list[Floats]: ...

    def draw(
        self,
        rows: Floats,
        *,
        glyph_ids: Ints | None,
        noise: Floats,
        levels: Floats,
        guidance: float,
        reference: Floats | None,
    ) -> tuple[Floats, Floats]: ...

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
    ) -> tuple[Floats, Floats, Floats]: ...


def record_goldens(folder: Path, manifest: Manifest, model: ReferenceModel) -> str:
    """Write the served goldens of the artifact being built in `folder`. Returns the file's path in it."""
    writer = _GoldenWriter(Artifact(folder, manifest), model)
    writer.record()
    speech = find_speech_stages(manifest)
    goldens = ServedGoldens(
        cases=tuple(writer.cases),
        tensors=writer.media.tensors,
        sample_rate=0 if speech is None else speech.vae.sample_rate,
        parameters=manifest.parameters,
        assets=asset_records(manifest, lambda file: hash_file(folder / file)),
    )
    write_goldens(folder / FILE, goldens)
    return FILE


class _GoldenWriter:
    def __init__(self, artifact: Artifact, model: ReferenceModel) -> None:
        self._artifact = artifact
        self._manifest = artifact.manifest
        self._model = model
        self.media = Media()
        self.cases: list[ServedCase] = []

    def record(self) -> None:
        tokenizers = self._manifest.tokenizers
        chat, speech = find_chat_stages(self._manifest), find_speech_stages(self._manifest)
        planner: SpeechPlanner | None = None
        if speech is not None and speech.speech_llm in tokenizers:
            planner = create_speech_planner(self._artifact, speech)
            names = [voice.name for voice in self._manifest.voices]
            for case in speech_cases(names, min_stop_step=speech.talker.min_stop_step):
                self.cases.append(case)
                pieces = spoken_pieces(case.text, speech.talker.max_segment_length, SPEECH_TEXT)
                self._record_speech(case, planner, speech, pieces)
        if chat is not None and chat.decoder in tokenizers:
            images = find_image_stages(self._manifest)
            if images is not None:
                self._record_pictures(chat, images)
            self._record_chats(chat, planner, speech)

    def _processor(self, stages: ChatStages, tokenizer: TextTokenizer) -> ChatProcessor:
        return ChatProcessor(
            tokenizer,
            stages.thinker,
            vision=stages.vision_parameters,
            audio=stages.audio_parameters,
            decoder=InProcessDecoder(),
        )

    def _record_pictures(self, stages: ChatStages, images: ImageStages) -> None:
        cases = picture_cases(self.media, takes_image="image" in stages.ports)
        processor = self._processor(stages, load_tokenizer(self._artifact, stages.decoder))
        counts, queries = images.queries.num_queries, self._model.queries()
        prompts = [
            processor.prepare_picture(decoded_messages(case, self.media.tensors), num_queries=counts)
            for case in cases
        ]
        blocks = [each.prepared.tokens.queries for each in prompts]
        hidden = self._model.hidden_rows(
            [self._prompt(stages, each.prepared, queries) for each in prompts],
            [each for each in blocks if each is not None],
        )
        for case, prompt, rows in zip(cases, prompts, hidden, strict=True):
            request = image_request(case, self.media.tensors)
            reference = decode_reference(request, InProcessDecoder())
            height, width = picture_sizes(request, reference).inner
            latent_size = (height // images.vae.scale, width // images.vae.scale)
            noise = start_noise(request.seed or 0, (images.dit.latent_channels, *latent_size)).numpy()
            num_tokens = latent_size[0] * latent_size[1] // images.dit.patch_size**2
            assert case.drawing is not None, "the case draws"
            shown = "" if images.glyphs is None else glyph_text(prompt.text)
            latents, pixels = self._model.draw(
                rows,
                glyph_ids=GlyphTokenizer(images.glyphs.added_tokens, images.glyphs.max_length).encode(shown)
                if images.glyphs is not None and shown
                else None,
                noise=noise,
                levels=noise_levels(images.dit, case.drawing.num_steps, num_tokens),
                guidance=case.drawing.guidance,
                reference=None if reference is None else reference.pixels.astype(np.float32),
            )
            self.cases.append(case)
            put = self._putter(case)
            put("latents", latents)
            put("pixels", pixels[::PIXEL_STRIDE, ::PIXEL_STRIDE].round().astype(np.uint8))

    def _record_chats(
        self, stages: ChatStages, planner: SpeechPlanner | None, speech: SpeechStages | None
    ) -> None:
        thinker = stages.thinker
        cases = chat_cases(
            self.media,
            max_tokens=_TOKENS if self._model.is_small else _TOKENS_OF_LARGE,
            vision=stages.vision_parameters,
            has_audio=stages.audio is not None,
            has_speech=planner is not None,
        )
        tokenizer = load_tokenizer(self._artifact, stages.decoder)
        processor = self._processor(stages, tokenizer)
        prepared = [processor.prepare(decoded_messages(case, self.media.tensors)) for case in cases]
        answers = self._model.answer(
            [self._prompt(stages, each) for each in prepared],
            rope_deltas=[each.tokens.rope_delta for each in prepared],
            max_tokens=cases[0].max_tokens,
            stop_ids=thinker.stop_token_ids,
        )
        columns = np.linspace(0, thinker.vocab_size - 1, min(thinker.vocab_size, _MAX_COLUMNS)).astype(
            np.int64
        )
        for case, prompt, (tokens, logits) in zip(cases, prepared, answers, strict=True):
            is_stopped = int(tokens[-1]) in thinker.stop_token_ids
            self.cases.append(
                replace(case, rope_delta=prompt.tokens.rope_delta, finish="stop" if is_stopped else "length")
            )
            tokens = tokens[: len(tokens) - is_stopped]
            put = self._putter(case)
            put("input_ids", prompt.tokens.input_ids)
            put("positions", prompt.tokens.positions)
            put("embed_kind", prompt.tokens.embed_kind)
            for index, image in enumerate(prompt.media.vision):
                put(f"vision.{index}", image.pixels)
            for index, clip in enumerate(prompt.media.audio):
                put(f"audio.{index}", clip.mel)
            put("tokens", tokens)
            put("logits", logits[:, columns])
            put("columns", columns)
            if planner is not None and speech is not None and case.speech is not None:
                pieces = _spoken(tokenizer, tokens, speech.talker.max_segment_length)
                self._record_speech(case, planner, speech, pieces)

    def _prompt(
        self, stages: ChatStages, prepared: PreparedPrompt, queries: Floats | None = None
    ) -> tuple[Ints, Ints, Ints, Floats]:
        """Make the eager model's inputs of a prompt; its media are embedded one frame or clip per call.

        `queries`: the rows behind them, in the prompt of a picture.
        """
        prompt, hidden_size = prepared.tokens, stages.thinker.hidden_size
        embeds = np.zeros((prompt.num_tokens, hidden_size), np.float32)
        vision, audio = stages.vision_parameters, stages.audio_parameters
        found: list[Floats] = []
        for feature in prepared.media.vision:
            assert stages.vision is not None and vision is not None, "media without an encoder are refused"
            frames, height, width = feature.grid
            for pixels in np.split(feature.pixels, frames):
                arrays = build_grid_arrays(
                    [(1, height, width)],
                    merge_size=vision.merge_size,
                    position_grid_size=vision.position_grid_size,
                )
                inputs = (
                    group_pixels(pixels, vision.merge_size),
                    arrays.position_index,
                    arrays.position_weight,
                    arrays.coordinates,
                    np.ascontiguousarray(arrays.segment),
                )
                found.append(self._model.encode(stages.vision, inputs))
        if queries is not None:
            found.append(queries)
        if found:
            embeds[prompt.embed_kind == VISION] = np.concatenate(found)
        spoken: list[Floats] = []
        for clip in prepared.media.audio:
            assert stages.audio is not None and audio is not None, "media without an encoder are refused"
            mel = np.zeros((clip.num_tokens * audio.frames_per_token, audio.num_mels), np.float32)
            mel[: len(clip.mel)] = clip.mel
            grouped = mel.reshape(1, clip.num_tokens, audio.frames_per_token, audio.num_mels)
            made = self._model.encode(stages.audio, (grouped, np.array([len(clip.mel)], np.int64)))
            spoken.append(made.reshape(-1, hidden_size)[: clip.num_tokens])
        if spoken:
            embeds[prompt.embed_kind == AUDIO] = np.concatenate(spoken)
        return prompt.input_ids, prompt.positions, prompt.embed_kind, embeds

    def _record_speech(
        self, case: ServedCase, planner: SpeechPlanner, speech: SpeechStages, pieces: Iterable[str]
    ) -> None:
        talker, flow = speech.talker, speech.flow
        generator = np.random.default_rng(_SEED + len(self.cases))
        made: dict[str, list[Array]] = {
            name: [] for name in ("noise", "step_noise", "latents", "stop", "samples")
        }
        counts = []
        assert case.speech is not None, "the case speaks"
        for index, text in enumerate(pieces):
            segment = planner.segment(text, index, speech_params(case.speech), PhiloxNoise(0))
            shape = (segment.max_patches, flow.latents_per_patch, flow.latent_dim)
            noise = generator.standard_normal(shape, np.float32)
            step_noise = generator.standard_normal((shape[0], flow.num_steps, *shape[1:]), np.float32)
            latents, stop, samples = self._model.speak(
                input_ids=segment.input_ids,
                embed_rows=segment.embed_rows,
                embeds=segment.embeds,
                history=segment.history,
                noise=noise,
                step_noise=step_noise,
                settings=(segment.guidance, segment.sigma, segment.temperature),
                is_last=lambda patch, stop: patch > talker.min_stop_step and stop > talker.stop_threshold,
            )
            counts.append(len(latents))
            values = (noise[: len(latents)], step_noise[: len(latents)], latents, stop, samples)
            for name, value in zip(made, values, strict=True):
                made[name].append(value)
        put = self._putter(case)
        put("patches", np.array(counts, np.int64))
        if counts:
            for name, parts in made.items():
                put(name, np.concatenate(parts))

    def _putter(self, case: ServedCase) -> Callable[[str, Array], None]:
        def put(name: str, value: Array) -> None:
            self.media.tensors[f"{case.name}.{name}"] = value

        return put


def _spoken(tokenizer: TextTokenizer, tokens: Ints, max_length: int) -> list[str]:
    """Cut an answer into the pieces that are spoken one by one."""
    detokenizer, spoken = Detokenizer(tokenizer), SpokenText(max_length, SPEECH_TEXT)
    pieces = [piece for token in tokens.tolist() for piece in spoken.push(detokenizer.push(token))]
    pieces += [*spoken.push(detokenizer.flush()), *spoken.finish()]
    return [piece.text for piece in pieces]
