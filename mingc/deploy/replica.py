"""A replica on Ray Serve: the running model of one artifact and the HTTP app over it, in one actor.

Serve calls the constructor, `__serve_build_asgi_app__`, `check_health` and `__del__`; all run on the replica's event
loop for user code. Imported only on replicas, because it loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mingc.deploy.fetch import fetched_artifact
from mingc.deploy.options import DeployOptions
from mingc.deploy.ray_metrics import RayMetrics
from mingc.deploy.remote_speech import RemoteSpeechService, SegmentCall, SpeechInfo
from mingc.errors import CapacityError, MingcError, ServeError, WorkerError
from mingc.media.decoder_pool import DecoderPool
from mingc.runtime.noise import PhiloxNoise, ShiftedNoise
from mingc.runtime.request import Event, Service, SpeechParams, SpeechRequest
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.voices import NewVoice, VoiceInfo
from mingc.server.api_keys import ApiKeys
from mingc.server.app import create_app
from mingc.server.metrics import Metrics
from mingc.server.tracing import Traces
from mingc.text.spoken_piece import SpokenPiece

log = logging.getLogger("mingc.deploy")

# `mingc serve` has it, too: with Python's default of 5 ms, engine threads wait for a thread that prepares a long text.
_SWITCH_S = 0.001
_METRICS_PERIOD_S = 5.0
_SPEECH_INFO_PERIOD_S = 2.0
_END_S = 1.0  # for sending the error events of requests of a failed replica
_EXIT_CODE = 4  # `mingc serve` ends with it after a lost rank


class UnhealthyReplicaError(Exception):
    """A health check that failed; Serve replaces the replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """Process, load and resources in use of a replica, for tests and measurements."""

    pid: int
    model: str
    is_ready: bool
    kv_pages_used: int
    num_waiting: dict[str, int]
    num_running: int


def open_model(artifact: str, options: DeployOptions, *, tp: int | None, loads_speech: bool) -> OmniService:
    """Open the artifact on this node, after fetching it if the options say how.

    Raises: ConfigError when it was exported for another number of ranks than `tp`.
    """
    root = fetched_artifact(artifact, options.fetch, options.cache)
    sys.setswitchinterval(_SWITCH_S)
    talker_devices = options.engines.talker_devices if loads_speech else ()
    service = open_service(
        root,
        replace(options.engines, tp=tp, loads_speech=loads_speech, talker_devices=talker_devices),
        media=DecoderPool.from_options(options.media, num_prepared=options.engines.num_preprocess_threads),
    )
    gc.collect()
    gc.freeze()  # a full collection would traverse all start-up objects while every stream waits
    return service


class Replica:
    """Base of both deployments: opens a service, checks its health, closes it."""

    async def __init__(self, options: DeployOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self.options = options
        self._failure: ServeError | None = None
        self._loop = asyncio.get_running_loop()
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self.service = await self.open_service()
        self.service.on_failure(self._fail)

    def _publish(self, metrics: Metrics) -> None:
        """Copy `metrics`, and the load of the service, to Ray's metrics until this replica ends."""
        self._metrics = RayMetrics(metrics, lambda: self.service.load)
        self._tasks.append(asyncio.create_task(self._metrics.publish(_METRICS_PERIOD_S)))

    async def open_service(self) -> Service:
        """Open the service of this replica."""
        raise NotImplementedError

    def _fail(self, error: ServeError) -> None:
        """Record a failure of the service, on any thread, and end."""
        self._failure = error
        self._end_soon()

    def _end_soon(self) -> None:
        """End this process soon, with its rank and decoder processes.

        Until the third check has failed, Serve keeps sending requests here, and more than to other replicas because
        they fail at once. An actor that has ended gets none.
        """
        if not self._is_ending:
            self._is_ending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the replica has ended
                self._loop.call_soon_threadsafe(self._loop.call_later, _END_S, os._exit, _EXIT_CODE)

    async def check_health(self) -> None:
        """Serve calls it. Raises: UnhealthyReplicaError when a rank died or hangs, or an engine thread ended."""
        if self._failure is not None or not self.service.is_ready:
            self._end_soon()
        if self._failure is not None:
            raise UnhealthyReplicaError(str(self._failure))
        if not self.service.is_ready:
            raise UnhealthyReplicaError("an engine thread or a rank of this replica has ended")

    async def __del__(self) -> None:
        """Serve calls it when no request runs any more, or the shutdown timeout has passed."""
        for task in getattr(self, "_tasks", ()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        service = getattr(self, "service", None)  # none when the constructor failed
        if service is not None:
            await service.close(shutdown_timeout_s=0.0)


class ModelReplica(Replica):
    """Ingress deployment: the HTTP interface of `mingc serve`, over the artifact and optionally remote speech."""

    async def __init__(self, options: DeployOptions, speech: Any = None) -> None:  # type: ignore[misc]
        """`speech`: handle of the deployment that generates speech; None when this replica does."""
        self._speech = speech
        # fail before anything slow
        keys, traces = ApiKeys(options.http.api_key_file), Traces.from_environment()
        await Replica.__init__(self, options)
        self._app = create_app(self.service, options.http, keys, traces, is_behind_proxy=True)
        self._publish(self._app.state.server.metrics)
        if isinstance(self.service, RemoteSpeechService):
            self._tasks.append(asyncio.create_task(self._follow_speech(self.service)))

    async def __del__(self) -> None:
        """See `Replica`."""
        await Replica.__del__(self)
        app = getattr(self, "_app", None)
        if app is not None and app.state.server.traces is not None:
            await asyncio.to_thread(app.state.server.traces.close)

    async def _follow_speech(self, service: RemoteSpeechService) -> None:
        """Read the capabilities of the speech deployment again and again: an update may change its voices."""
        while True:
            await asyncio.sleep(_SPEECH_INFO_PERIOD_S)
            try:
                service.update(await self._speech.info.remote())
            except Exception as error:  # earlier information stays valid until a speech replica answers again
                log.warning("the voices of the speech deployment were not read: %s", error)

    async def open_service(self) -> Service:
        has_own_speech = self.options.speech and self._speech is None
        options = self.options
        service = open_model(options.artifact, options, tp=options.tp, loads_speech=has_own_speech)
        if self._speech is None:
            return service
        info: SpeechInfo = await self._speech.info.remote()
        handle = self._speech.options(stream=True)
        return RemoteSpeechService(
            service,
            info,
            speak=lambda call: _remote_events(handle.speak, call),
            speech=lambda request: _remote_events(handle.speech, request),
            voices=_Voices(self._speech),
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return BehindProxy(self._app)

    async def state(self) -> ReplicaState:
        """The state of this replica."""
        load = self.service.load
        return ReplicaState(
            pid=os.getpid(),
            model=self.service.info.model,
            is_ready=self.service.is_ready,
            kv_pages_used=load.kv_pages_used,
            num_waiting=dict(load.num_waiting),
            num_running=self._app.state.server.num_running,
        )


class SpeechReplica(Replica):
    """Deployment behind text replicas: generates speech segments."""

    async def __init__(self, options: DeployOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        await Replica.__init__(self, options)
        self._publish(Metrics())  # the talker's; the replica where a request arrives counts it

    async def open_service(self) -> OmniService:
        artifact = self.options.speech_artifact
        assert artifact is not None, "the application has a speech deployment"
        engines = replace(self.options.engines, image_devices=())  # the other deployment draws
        return open_model(artifact, replace(self.options, engines=engines), tp=None, loads_speech=True)

    async def info(self) -> SpeechInfo:
        """Capabilities of the speech artifact."""
        assert isinstance(self.service, OmniService)
        return SpeechInfo(
            service=self.service.info,
            max_segment_length=self.service.max_segment_length,
            speech_text=self.service.speech_text,
        )

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        """See `Service`."""
        return await self.service.list_voices()

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        """See `Service`."""
        return await self.service.add_voice(voice)

    async def remove_voice(self, name: str) -> VoiceInfo:
        """See `Service`."""
        return await self.service.remove_voice(name)

    async def find_voice(self, params: SpeechParams, prefix: str) -> SpeechParams:
        """See `OmniService.find_voice`."""
        assert isinstance(self.service, OmniService)
        return await self.service.find_voice(params, prefix)

    async def speak(self, call: SegmentCall) -> AsyncGenerator[Event]:
        """Events of the speech of one segment of a request."""
        assert isinstance(self.service, OmniService)
        noise = ShiftedNoise(PhiloxNoise(call.seed), call.index)
        events = self.service.speak(
            [SpokenPiece(call.text, call.text_end)],
            call.params,
            noise,
            is_live=call.is_live,
            priority=call.priority,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def speech(self, request: SpeechRequest) -> AsyncGenerator[Event]:
        """Events of a whole speech request."""
        assert isinstance(self.service, OmniService)
        async with contextlib.aclosing(self.service.speech(request)) as events:
            async for event in events:
                yield event


async def _remote_events(method: Any, argument: object) -> AsyncGenerator[Event]:
    """Events of a call of the speech deployment; closing the iterator cancels the call.

    Raises: the error that the replica raised, WorkerError when it ended, CapacityError when too many calls wait.
    """
    response = method.remote(argument)
    try:
        with _mapped_errors():
            async for event in response:
                yield event
    finally:
        response.cancel()


class _Voices:
    """The voices of the speech deployment `handle`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        return cast(tuple[VoiceInfo, ...], await self._call("list_voices"))

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        return cast(VoiceInfo, await self._call("add_voice", voice))

    async def remove_voice(self, name: str) -> VoiceInfo:
        return cast(VoiceInfo, await self._call("remove_voice", name))

    async def find_voice(self, params: SpeechParams, prefix: str = "") -> SpeechParams:
        return cast(SpeechParams, await self._call("find_voice", params, prefix))

    async def _call(self, method: str, *arguments: object) -> object:
        with _mapped_errors():
            return await getattr(self._handle, method).remote(*arguments)


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    """Raise what a speech replica raised, and errors of Ray as those of this replica."""
    where = "speech deployment"
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MingcError):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise WorkerError("the speech replica of this request ended", where=where) from error
    except BackPressureError as error:
        raise CapacityError("all speech replicas are busy", where=where, code="overloaded") from error
    except DeploymentUnavailableError as error:
        raise WorkerError("no speech replica can be reached", where=where, status=503) from error
    except (TaskCancelledError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # this request is cancelled; otherwise Serve reports that the call was, on its replica
        raise WorkerError("the speech of this request was cancelled on its replica", where=where) from error


class BehindProxy:
    """ASGI middleware between Serve's proxy and the app.

    It removes the header `x-request-id` from responses, because the proxy adds it. The proxy passes the id on in the
    request, so logs and error messages of the replica have the id that clients see. It also removes the route prefix of
    the application from paths.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]  # WebSockets do not get it from the proxy
            await send(message)

        if scope["type"] in ("http", "websocket") and (prefix := scope.get("root_path", "")):
            path = scope["path"].removeprefix(prefix) or "/"
            scope = {**scope, "path": path, "root_path": ""}
        await self._app(scope, receive, without_id)
