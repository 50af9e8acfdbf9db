"""Many requests at once: what the first ones need is not kept waiting by reading the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from fake_omni import collect, make_service, run, say
from fake_service import FakeService

from mingc.runtime import omni
from mingc.runtime.config import ServeOptions
from mingc.runtime.server import create_app, serve


def test_a_request_of_a_crowd_is_spoken_before_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(has_thinker=False)
    loop = service._speech.loop  # type: ignore[union-attr]
    read, add = omni.iter_speech_segments, loop.add
    log: list[str] = []

    def logged_read(text: str, max_length: int) -> Iterator[str]:
        log.append("read")
        yield from read(text, max_length)

    def logged_add(*arguments: object) -> None:
        log.append("add")
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(omni, "iter_speech_segments", logged_read)
    monkeypatch.setattr(loop, "add", logged_add)
    requests = [say(f"Number {number}.", max_steps=2) for number in range(4)]

    async def crowd() -> None:
        await asyncio.gather(*(collect(service.speech(each)) for each in requests))

    # The first two may be read side by side.
    run(service, crowd())
    assert sorted(log) == ["add"] * 4 + ["read"] * 4
    assert "add" in log[:3]


def test_engine_threads_get_their_turn_soon_while_a_server_runs() -> None:
    class Seen(Exception):
        pass

    before, during = sys.getswitchinterval(), []

    def announce(url: str) -> None:
        during.append(sys.getswitchinterval())
        raise Seen

    with pytest.raises(Seen):
        serve(create_app(FakeService(), ServeOptions(port=0)), announce=announce)
    assert during == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == before
