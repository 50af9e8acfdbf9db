"""Items from engine threads to requests on an event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mingc.runtime.request_stream import EventQueue, RequestStream, TokenItem


def token(number: int) -> TokenItem:
    return TokenItem(token=number, finish=None)


def test_each_stream_receives_its_items_in_order() -> None:
    async def main() -> list[list[int | None]]:
        event_queue = EventQueue(asyncio.get_running_loop())
        streams = [RequestStream(event_queue) for _ in range(3)]

        def write(first: int) -> None:
            for number in range(first, 3000, 2):
                streams[number % 3].put(token(number))

        threads = [threading.Thread(target=write, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        got: list[list[int | None]] = []
        for stream in streams:
            items = [await stream.get(10.0) for _ in range(1000)]
            got.append([item.token if isinstance(item, TokenItem) else None for item in items])
        for thread in threads:
            thread.join()
        return got

    for remainder, numbers in enumerate(asyncio.run(main())):
        for first in range(2):
            assert [n for n in numbers if n is not None and n % 2 == first] == [
                number for number in range(remainder, 3000, 3) if number % 2 == first
            ]


def test_items_that_arrive_together_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[int, list[Any]]:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []
        call = loop.call_soon_threadsafe

        def count(*arguments: Any) -> asyncio.Handle:
            wakes.append(arguments)
            return call(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        event_queue = EventQueue(loop)
        streams = [RequestStream(event_queue) for _ in range(16)]
        for number, stream in enumerate(streams):
            stream.put(token(number))
        first = [await stream.get(10.0) for stream in streams]
        streams[0].put(token(99))
        return len(wakes), [*first, await streams[0].get(10.0)]

    wakes, items = asyncio.run(main())
    assert wakes == 2
    assert [item.token for item in items] == [*range(16), 99]


def test_a_closed_event_loop_closes_its_streams() -> None:
    loop = asyncio.new_event_loop()
    event_queue = EventQueue(loop)
    streams = [RequestStream(event_queue) for _ in range(2)]
    loop.close()
    for stream in streams:
        stream.put(token(1))
        stream.put(token(2))
    assert not event_queue._items
