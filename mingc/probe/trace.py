"""One request as a Chrome trace: every engine, operation and kernel of all threads of this process.

Chrome (`chrome://tracing`) and https://ui.perfetto.dev show the file. Other ranks than the first are not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.spec import GraphSpec
from mingc.errors import ConfigError
from mingc.probe.report import title
from mingc.prompts.conversation import Message, TextPart
from mingc.runtime.engines.base import Graph
from mingc.runtime.request import ChatRequest, Event, SamplingParams, Service, SpeechParams, SpeechRequest
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions

_TEXT = "Hello."
_TOKENS = 16


def write_trace(artifact: Path, path: Path, progress: Callable[[str], None]) -> None:
    """Serve `artifact` in this process, and write what its second request does: a spoken chat, or what it can.

    Raises: as `open_service`; ConfigError for an artifact that answers neither text nor speech.
    """
    progress("trace of one request")
    activities = [ProfilerActivity.CPU]
    opened = open_artifact(artifact)
    if opened.manifest.fingerprint.device == "cuda":
        activities.append(ProfilerActivity.CUDA)

    async def run() -> None:
        service = open_service(artifact, EngineOptions(speech_lead=0))
        try:
            await _answer(service, "warm-up")
            threads = _ExperimentalConfig(profile_all_threads=True)
            with (
                _named_engines(opened),
                profile(activities=activities, experimental_config=threads) as recorded,
            ):
                await _answer(service, "traced")
            recorded.export_chrome_trace(str(path))
        finally:
            await service.close(shutdown_timeout_s=0.0)

    asyncio.run(run())


async def _answer(service: Service, name: str) -> None:
    info = service.info
    speech = SpeechParams(seed=1) if info.has_speech else None
    events: AsyncIterator[Event]
    if info.has_text:
        messages = (Message(role="user", parts=(TextPart(text=_TEXT),)),)
        sampling = SamplingParams(max_tokens=_TOKENS)
        events = service.chat(
            ChatRequest(request_id=name, messages=messages, sampling=sampling, speech=speech)
        )
    elif speech is not None:
        events = service.speech(SpeechRequest(request_id=name, text=_TEXT, speech=speech))
    else:
        raise ConfigError(
            "the artifact answers neither text nor speech", where="--trace", fix="leave --trace out"
        )
    async for _ in events:
        pass


@contextmanager
def _named_engines(artifact: Artifact) -> Iterator[None]:
    """In the block, every call of an engine is a range of the trace, named as in the report."""
    run = Graph.run

    def stage_of(spec: GraphSpec) -> str:
        for name, stage in artifact.manifest.stages.items():
            if spec.name in stage.graphs and stage.graphs[spec.name].spec == spec:
                return f"{name}.{spec.name}"
        return spec.name

    def named(self: Graph, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = {dim: tensors[name].shape[axis] for dim, (name, axis) in self._places.items()}
        with record_function(title(stage_of(self.spec), sizes)):
            return run(self, **tensors)

    Graph.run = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graph.run = run  # type: ignore[method-assign]
