"""Several talkers: which one speaks a request, what clients and metrics see of all, and the failure of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from collector import Collector
from fake_omni import collect, make_service, run, speech_request
from fake_talker import make_segment, make_talker_group

from mingc.errors import CapacityError, ServeError, WorkerError
from mingc.runtime.request import AudioDelta, Event
from mingc.runtime.service.omni import OmniService
from mingc.runtime.talker import loop as talker_loop
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.loop import TalkerLoop

Started = Callable[[TalkerLoop], TalkerLoop]
TEXT = "One sentence with several words in it, and then another one. And a third."


def started_group(started: Started, count: int, **options: int) -> TalkerGroup:
    group = make_talker_group(count, **options)
    for loop in group.loops:
        started(loop)
    return group


def open_stream(group: TalkerGroup, *, is_live: bool = False) -> tuple[TalkerLoop, int]:
    """Open a stream as the service does. Returns its talker and id."""
    loop = group.place()
    return loop, loop.open(lambda item: None, lambda: False, is_live=is_live)


def cancel(loop: TalkerLoop, stream: int) -> None:
    """Cancel a stream and wait until it is gone."""
    loop.cancel(stream)
    is_gone = threading.Event()
    loop.post(is_gone.set)
    assert is_gone.wait(30)


def end(streams: list[tuple[TalkerLoop, int]]) -> None:
    for each in streams:
        cancel(*each)


def audio(events: list[Event]) -> np.ndarray:
    return np.concatenate([event.samples for event in events if isinstance(event, AudioDelta)])


def test_a_stream_is_placed_where_the_fewest_are_open_and_the_first_of_equal_ones(started: Started) -> None:
    group = started_group(started, 3)
    streams = [open_stream(group) for _ in range(6)]
    assert [group.loops.index(loop) for loop, _ in streams] == [0, 1, 2, 0, 1, 2]
    cancel(*streams.pop(5))
    cancel(*streams.pop(1))
    cancel(*streams.pop(3))
    assert [loop.num_streams for loop in group.loops] == [2, 0, 1]
    streams += [open_stream(group) for _ in range(3)]
    assert [group.loops.index(loop) for loop, _ in streams[3:]] == [1, 1, 2]
    end(streams)


def test_a_stream_is_refused_only_when_all_talkers_are_full(started: Started) -> None:
    group = started_group(started, 2, max_streams=2)
    streams = [open_stream(group) for _ in range(4)]
    with pytest.raises(CapacityError):
        open_stream(group)
    cancel(*streams.pop(3))
    streams.append(open_stream(group))
    assert streams[3][0] is group.loops[1]
    with pytest.raises(CapacityError):
        open_stream(group)
    end(streams)


def test_a_refused_stream_is_no_listener(started: Started) -> None:
    group = started_group(started, 1, max_streams=1)
    (loop,) = group.loops
    stream = loop.open(lambda item: None, lambda: False, is_live=True)
    with pytest.raises(CapacityError):
        loop.open(lambda item: None, lambda: False, is_live=True)
    assert sum(loop.listeners.values()) == 1
    cancel(loop, stream)


def test_a_talker_that_has_failed_gets_no_stream_while_another_one_runs(started: Started) -> None:
    group = started_group(started, 2)
    first, second = group.loops
    lost, other = Collector(), Collector()
    lost_stream = first.open(lost.put, lambda: False)
    first.add(lost_stream, make_segment(patches=3))
    stream = second.open(other.put, lambda: False)
    failure = WorkerError("the device is gone")
    first.fail(failure)
    assert lost.error() is failure
    streams = [open_stream(group) for _ in range(3)]
    assert [loop for loop, _ in streams] == [second] * 3, "it has no open stream, but has failed"
    second.add(stream, make_segment(patches=3))
    assert len(other.segments()) == 1, "streams of the others go on"
    end([*streams, (second, stream)])
    second.fail(WorkerError("this one, too"))
    with pytest.raises(ServeError, match="the device is gone"):
        open_stream(group)


def test_listeners_waiting_streams_and_underruns_are_those_of_all() -> None:
    """Of talkers whose threads do not run, so nothing is admitted."""
    group = make_talker_group(2)
    streams = [open_stream(group, is_live=is_live) for is_live in (True, True, False, True)]
    assert [loop.num_streams for loop in group.loops] == [2, 2]
    assert dict(group.listeners) == {"starting": 3, "playing": 0, "late": 0, "paused": 0}
    for loop, stream in streams[:3]:
        loop.add(stream, make_segment())
    assert group.num_waiting == 3
    for count, loop in enumerate(group.loops, start=2):
        loop._pacing.num_underruns = count
    assert group.num_underruns == 5


def test_each_talker_has_its_device_as_the_current_one_of_its_thread(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines and pinned buffers use it; a thread begins with the first GPU."""
    inside: dict[int, torch.device] = {}

    @contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        inside[threading.get_ident()] = device
        yield
        del inside[threading.get_ident()]

    monkeypatch.setattr(talker_loop, "current_device", current_device)
    group = make_talker_group(2)
    launched_on: list[list[torch.device | None]] = [[], []]
    collectors = []
    for index, loop in enumerate(group.loops):
        worker = loop.worker
        launch = worker.engines.launch

        def record(*arguments: Any, index: int = index, launch: Callable[..., Any] = launch) -> Any:
            launched_on[index].append(inside.get(threading.get_ident()))
            return launch(*arguments)

        monkeypatch.setattr(worker.engines, "launch", record)
        monkeypatch.setattr(worker, "device", torch.device("cuda", 2 + index))
        started(loop)
        collectors.append(Collector())
        stream = loop.open(collectors[-1].put, lambda: False)
        loop.add(stream, make_segment(patches=2))
    for loop, collector in zip(group.loops, collectors, strict=True):
        collector.segments()
        cancel(loop, next(iter(loop._streams)))
    assert [{*each} for each in launched_on] == [{torch.device("cuda", 2)}, {torch.device("cuda", 3)}]


def test_speech_does_not_depend_on_the_talker_that_speaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [speech_request(f"{TEXT} Number {seed}.", seed=seed) for seed in range(8)]

    async def one_by_one(service: OmniService) -> list[list[Event]]:
        return [await collect(service.speech(each)) for each in requests]

    async def together(service: OmniService) -> list[list[Event]]:
        return list(await asyncio.gather(*(collect(service.speech(each)) for each in requests)))

    single = make_service(has_thinker=False)
    expected = run(single, one_by_one(single))
    service = make_service(talkers=2, has_thinker=False)
    placed: list[int] = []
    for index, loop in enumerate(service.talkers):
        opened = loop.open

        def record(*arguments: Any, index: int = index, opened: Any = opened, **options: Any) -> int:
            placed.append(index)
            stream: int = opened(*arguments, **options)
            return stream

        monkeypatch.setattr(loop, "open", record)
    found = run(service, together(service))
    assert placed == [0, 1] * 4
    for events, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(audio(events), audio(reference), rtol=0, atol=1e-6)


def test_a_service_counts_what_all_its_talkers_hold_and_stops_their_pacing() -> None:
    service = make_service(talkers=2, has_thinker=False, speech_lead=2)
    loops = service.talkers
    assert [loop._name for loop in loops] == ["talker 0", "talker 1"]

    async def work() -> None:
        streams = [service.speech(speech_request(TEXT, seed=seed)) for seed in range(3)]
        for stream in streams:
            await anext(stream)
        assert service.held["speech streams"] == 3
        assert service.load.num_waiting.keys() == {"talker"}
        assert sum(service.load.listeners.values()) == 0
        for stream in streams:
            await stream.aclose()
        await service.close(shutdown_timeout_s=1.0)

    run(service, work())
    assert [loop._pacing._lead for loop in loops] == [0, 0]
    assert not any(loop.is_healthy for loop in loops)


def test_a_service_is_full_when_all_its_talkers_are() -> None:
    service = make_service(talkers=2, has_thinker=False, max_streams=1)

    async def work() -> None:
        streams = [service.speech(speech_request(TEXT, seed=seed)) for seed in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(CapacityError):
            await collect(service.speech(speech_request(TEXT)))
        for stream in streams:
            await stream.aclose()

    run(service, work())


def test_a_service_with_a_failed_talker_is_not_ready_and_still_speaks() -> None:
    """As after any lost thread: a supervisor replaces the server, and requests do not fail until then."""
    service = make_service(talkers=2, has_thinker=False)
    assert service.is_ready
    service.talkers[0].fail(WorkerError("the device is gone"))
    assert not service.is_ready
    assert len(audio(run(service, collect(service.speech(speech_request(TEXT, seed=1)))))) > 0
