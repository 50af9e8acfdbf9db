"""Voices of one service: those of the artifact, those that clients uploaded, and those that a request brings along."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.artifact import Artifact
from mingc.errors import ArtifactError, RequestError
from mingc.host.speaker_network import SpeakerNetwork
from mingc.media.dsp.speaker_features import speaker_features
from mingc.prompts.features import VoiceClip
from mingc.prompts.media_decoder import MediaDecoder, MediaTask
from mingc.runtime.request import SpeechParams
from mingc.runtime.service.served_stages import SpeechStages
from mingc.runtime.service.voice_store import (
    StoredVoice,
    Tensors,
    VoiceStore,
    check_name,
    voice_id,
)
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.talker.voice_encoder import VoiceEncoder
from mingc.runtime.voices import NewVoice, VoiceInfo, VoicePack, VoiceSample, voice_not_found

log = logging.getLogger("mingc.voices")

CACHE_BYTES = 128 << 20  # a voice of 30 s takes half a megabyte
_MAX_COMPONENT = 1e4  # of a speaker vector; those of the network are below 10

_T = TypeVar("_T")


CallOnDevice = Callable[[Callable[[], VoicePack]], Future[VoicePack]]


class Offload(Protocol):
    """Runs work that blocks in the preprocessing threads."""

    async def __call__(self, work: Callable[[], _T], /) -> _T: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Registered:
    """A voice and what it was computed from: a clip, or a speaker vector (D,) alone."""

    pack: VoicePack
    clip: VoiceClip | None
    vector: NDArray[np.float32]


class Voices:
    """Finds, registers and keeps voices. Call the coroutines on the service's event loop.

    Args:
        encoder, call: the encoder, and what runs it on the thread of its device.
        media: decodes recordings, and the service closes it; None: none are taken.
        store: None: voices are not kept.
    """

    def __init__(
        self,
        artifact: Artifact,
        stages: SpeechStages,
        planner: SpeechPlanner,
        encoder: VoiceEncoder,
        call: CallOnDevice,
        *,
        media: MediaDecoder | None,
        store: VoiceStore | None,
    ) -> None:
        manifest = artifact.manifest
        self._planner, self._encoder, self._call = planner, encoder, call
        self._speaker_dim = stages.flow.speaker_dim
        self._built_in = {
            record.name: VoiceInfo(
                id=record.name, name=record.name, kind="built_in", transcript=record.transcript
            )
            for record in manifest.voices
        }
        self.media, self._store = media, store
        files = [
            manifest.files[path].sha256
            for stage in (stages.sampler, stages.vocoder)
            for path in manifest.stages[stage].weights_files
        ]
        self._weights = hashlib.sha256(" ".join(files).encode()).hexdigest()
        self._network_path = (
            None if manifest.speaker_network is None else artifact.path(manifest.speaker_network)
        )
        self._network: SpeakerNetwork | None = None
        self._network_lock = threading.Lock()
        self._cache: OrderedDict[bytes, VoicePack] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[bytes, asyncio.Task[VoicePack]] = {}

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """Bytes of cached voices, and how many there may be."""
        return {"voice_cache_bytes": (self._num_bytes, CACHE_BYTES)}

    async def resolve(self, params: SpeechParams, offload: Offload, *, prefix: str = "") -> SpeechParams:
        """`params` with the voice itself, unless it is one of the artifact's.

        Raises: RequestError for an unknown name (404) and for a sample that cannot be used; `prefix` is the path of the
            fields in the request.
        """
        try:
            if isinstance(params.reference, VoiceSample):
                sample = params.reference
                pack = await self._cached(_key(sample), lambda: self._register(sample, offload))
            elif params.reference is not None or params.voice is None or params.voice in self._built_in:
                return params
            else:
                pack = await self._uploaded(params.voice, offload)
        except RequestError as error:
            if not prefix or error.param is None:
                raise
            # Another one: requests that wait for the same voice get the same error.
            raise RequestError(
                error.message, fix=error.fix, status=error.status, param=prefix + error.param, code=error.code
            ) from error
        return replace(params, reference=pack)

    async def list(self, offload: Offload) -> tuple[VoiceInfo, ...]:
        """All voices: the artifact's first."""
        stored = [] if self._store is None else await offload(self._store.list)
        return (*self._built_in.values(), *(each.info for each in stored))

    async def add(self, voice: NewVoice, offload: Offload) -> VoiceInfo:
        """Register a voice and keep it.

        Raises: RequestError for a name or a sample that cannot be used, without a store, without space.
        """
        store = self._require_store()
        check_name(voice.name)
        if voice.name in self._built_in:
            raise RequestError(
                f"{voice.name!r} is a voice of the model: take another name",
                status=409,
                param="name",
                code="voice_exists",
            )
        if not voice.consent.strip():
            raise RequestError("'consent' is empty", param="consent", code="invalid_value")
        sample = voice.sample
        if sample.transcript is not None:
            sample = replace(sample, transcript=sample.transcript.strip())  # the prompt has it so
        made = await self._register(sample, offload)
        source: NDArray[np.generic] = made.vector if made.clip is None else made.clip.samples
        info = VoiceInfo(
            id=voice_id(voice.name, source, sample.transcript),
            name=voice.name,
            kind="speaker_embedding" if made.clip is None else "audio_sample",
            transcript=None if made.clip is None else sample.transcript,
            created_at=int(time.time()),
            consent=voice.consent,
            description=voice.description,
            seconds=None if made.clip is None else made.clip.seconds,
        )
        stored = StoredVoice(
            info=info,
            weights=self._weights,
            sample_rate=0 if made.clip is None else made.clip.sample_rate,
        )
        pack = made.pack
        tensors = {"latents": pack.latents, "embeds": pack.embeds, "speaker": pack.speaker}
        await offload(
            lambda: store.add(stored, {**tensors, "vector" if made.clip is None else "clip": source})
        )
        log.info("voice %s added: %s", info.id, info.name)
        return info

    async def remove(self, name: str, offload: Offload) -> VoiceInfo:
        """Remove an uploaded voice by id or name. Raises: RequestError (404, or 403 for one of the artifact's)."""
        if name in self._built_in:
            raise RequestError(
                f"{name!r} is a voice of the model and cannot be removed", status=403, code="voice_built_in"
            )
        store = self._require_store()
        found = await offload(lambda: store.find(name))
        if found is None or not await offload(lambda: store.remove(found)):
            raise await self._not_found(name, offload)
        self._drop(found.info.id.encode())
        log.info("voice %s removed: %s", found.info.id, found.info.name)
        return found.info

    def _require_store(self) -> VoiceStore:
        if self._store is None:
            raise RequestError(
                "this server keeps no voices: have it started with --voices-dir, or send 'ref_audio' with each request",
                code="voices_not_kept",
            )
        return self._store

    async def _uploaded(self, name: str, offload: Offload) -> VoicePack:
        store = self._store
        found = None if store is None else await offload(lambda: store.find(name))
        if found is None or store is None:
            raise await self._not_found(name, offload)
        known = found

        async def load() -> VoicePack:
            tensors = await offload(lambda: store.read(known))
            if tensors is None:
                raise await self._not_found(name, offload)
            return await self._unpack(known, tensors, offload)

        return await self._cached(known.info.id.encode(), load)

    async def _not_found(self, name: str, offload: Offload) -> RequestError:
        return voice_not_found(name, [each.name for each in await self.list(offload)])

    async def _unpack(self, voice: StoredVoice, tensors: Tensors, offload: Offload) -> VoicePack:
        """The voice in a file: as it is, or computed again from its clip when other weights have computed it."""
        transcript = voice.info.transcript or ""
        if voice.weights != self._weights:
            clip = None
            if "clip" in tensors:
                clip = VoiceClip(samples=np.asarray(tensors["clip"], np.int16), sample_rate=voice.sample_rate)
            vector = None if clip is not None else np.asarray(tensors["vector"], np.float32)
            return (await self._encode(clip, vector, transcript, offload)).pack
        arrays = {name: np.asarray(tensors[name], np.float32) for name in ("latents", "embeds", "speaker")}
        return VoicePack(name=voice.info.name, transcript=transcript, **arrays)

    async def _register(self, sample: VoiceSample, offload: Offload) -> _Registered:
        """Compute the voice of a sample. Raises: RequestError."""
        if sample.vector:
            return await self._encode(None, self._check_vector(sample.vector), "", offload)
        media = self.media
        if media is None or self._network_path is None:
            raise RequestError(
                "this model takes no recordings of voices: "
                + ("its server decodes no media" if media is None else "it has no speaker network"),
                param=sample.where,
                code="unsupported_parameter",
            )
        if not sample.transcript or not sample.transcript.strip():
            raise RequestError("the recording of a voice needs its words: send 'ref_text'", param="ref_text")
        task, data = MediaTask(kind="voice", where=sample.where, max_bytes=media.max_bytes), sample.recording
        assert isinstance(data, bytes), "recordings are loaded"
        clip = await offload(lambda: media.run(task, data))
        assert isinstance(clip, VoiceClip), "the task of a voice has a clip"
        return await self._encode(clip, None, sample.transcript.strip(), offload)

    async def _encode(
        self, clip: VoiceClip | None, vector: NDArray[np.float32] | None, transcript: str, offload: Offload
    ) -> _Registered:
        """Run the speaker network and, between two patches, the engines of a talker."""
        frames = None
        if clip is not None:
            samples, rate = clip.samples, clip.sample_rate
            frames = await offload(lambda: self._encoder.prepare(samples, rate))
            vector = await offload(lambda: self._open_network().embed(speaker_features(samples, rate)))
        assert vector is not None, "a voice has a clip or a vector"
        of_speaker = vector
        pack = await asyncio.wrap_future(
            self._call(lambda: self._encoder.encode(frames, of_speaker, transcript=transcript))
        )
        if not all(np.isfinite(each).all() for each in (pack.latents, pack.embeds, pack.speaker)):
            raise RequestError("the voice's values are not finite", param="ref_audio")
        self._planner.check_room(pack)
        return _Registered(pack=pack, clip=clip, vector=vector)

    def _check_vector(self, values: tuple[float, ...]) -> NDArray[np.float32]:
        vector = np.asarray(values, np.float32)
        if len(values) != self._speaker_dim:
            why = f"has {len(values)} numbers; this model's have {self._speaker_dim}"
        elif not np.isfinite(vector).all() or np.abs(vector).max() > _MAX_COMPONENT or not vector.any():
            why = f"must have numbers between -{_MAX_COMPONENT:g} and {_MAX_COMPONENT:g}, not all zero"
        else:
            return vector
        raise RequestError(f"'speaker_embedding' {why}", param="speaker_embedding")

    def _open_network(self) -> SpeakerNetwork:
        with self._network_lock:
            if self._network is None:
                assert self._network_path is not None, "checked before"
                self._network = _load_network(self._network_path)
            return self._network

    async def _cached(self, key: bytes, make: Callable[[], Awaitable[VoicePack | _Registered]]) -> VoicePack:
        """The voice under `key`; requests that need it at the same time wait for one computation."""
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        task = self._making.get(key)
        if task is None:

            async def keep() -> VoicePack:
                try:
                    made = await make()
                    pack = made.pack if isinstance(made, _Registered) else made
                    self._keep(key, pack)
                    return pack
                finally:
                    del self._making[key]

            task = self._making[key] = asyncio.create_task(keep())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    def _keep(self, key: bytes, pack: VoicePack) -> None:
        self._drop(key)
        self._cache[key] = pack
        self._num_bytes += pack.num_bytes
        while self._num_bytes > CACHE_BYTES:
            self._drop(next(iter(self._cache)))

    def _drop(self, key: bytes) -> None:
        found = self._cache.pop(key, None)
        if found is not None:
            self._num_bytes -= found.num_bytes


def _key(sample: VoiceSample) -> bytes:
    """Differs for samples whose voices differ: a hash of the content, never of a name."""
    digest = hashlib.sha256(np.asarray(sample.vector, np.float64).tobytes())
    assert isinstance(sample.recording, bytes), "recordings are loaded"
    for part in ((sample.transcript or "").encode(), sample.recording):
        digest.update(hashlib.sha256(part).digest())
    return digest.digest()


def _load_network(path: Path) -> SpeakerNetwork:
    """Raises: ArtifactError."""
    try:
        return SpeakerNetwork(path)
    except ImportError as error:
        raise RequestError(
            "recordings of voices need onnxruntime on this server: pip install 'mingc[serve]'",
            code="unsupported_parameter",
        ) from error
    except Exception as error:  # its errors share no narrower class
        raise ArtifactError(f"the speaker network cannot be run: {error}", where=str(path)) from error
