"""Items from engine threads to requests on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mingc.runtime.request import AudioDelta
from mingc.runtime.request_stream import EventQueue, RequestStream, TokenItem


def token(number: int) -> TokenItem:
    return TokenItem(token=number, finish=None)


async def next_of(stream: RequestStream) -> object:
    """The next item; an error when none comes in time."""
    return await asyncio.wait_for(stream.get(), 10)


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
            items = [await next_of(stream) for _ in range(1000)]
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
        first = [await next_of(stream) for stream in streams]
        streams[0].put(token(99))
        return len(wakes), [*first, await next_of(streams[0])]

    wakes, items = asyncio.run(main())
    assert wakes == 2
    assert [item.token for item in items] == [*range(16), 99]


def test_a_reader_that_was_cancelled_loses_no_item_of_its_stream_or_others() -> None:
    async def main() -> None:
        event_queue = EventQueue(asyncio.get_running_loop())
        left, other = RequestStream(event_queue), RequestStream(event_queue)
        reader = asyncio.ensure_future(left.get())
        await asyncio.sleep(0)
        reader.cancel()
        for number, stream in enumerate((left, left, other)):  # handed over in the turn that ends the reader
            stream.put(token(number))
        found = [await next_of(stream) for stream in (other, left, left)]
        assert found == [token(2), token(0), token(1)]
        assert reader.cancelled()

    asyncio.run(main())


def test_a_closed_event_loop_closes_its_streams() -> None:
    loop = asyncio.new_event_loop()
    event_queue = EventQueue(loop)
    streams = [RequestStream(event_queue) for _ in range(2)]
    loop.close()
    for stream in streams:
        stream.put(token(1))
        stream.put(token(2))
    assert not event_queue._items


def test_a_closed_stream_drops_what_it_holds_and_what_is_under_way() -> None:
    async def main() -> None:
        stream = RequestStream(EventQueue(asyncio.get_running_loop()))
        stream.put(token(1))
        await asyncio.sleep(0)
        stream.put(token(2))  # not handed over yet
        stream.close()
        stream.put(token(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not stream._items
        assert stream.num_pending_patches == 0

    asyncio.run(main())


def test_patches_count_from_put_to_get() -> None:
    async def main() -> None:
        stream = RequestStream(EventQueue(asyncio.get_running_loop()))
        patch = AudioDelta(samples=np.zeros(4, np.float32))
        counts = []
        for item in (patch, token(1), patch):
            stream.put(item)
            counts.append(stream.num_pending_patches)
        for _ in range(3):
            await next_of(stream)
            counts.append(stream.num_pending_patches)
        assert counts == [1, 1, 2, 1, 1, 0]

    asyncio.run(main())


def test_when_all_clients_leave_too_much_unread_each_may_leave_a_second() -> None:
    """Then the talker pauses those that do not read, and memory is given back when they leave."""

    async def main() -> None:
        queue = EventQueue(asyncio.get_running_loop(), max_unread_bytes=4000)
        stalled, reading = RequestStream(queue), RequestStream(queue)
        patch = AudioDelta(samples=np.zeros(100, np.float32))
        for _ in range(9):
            stalled.put(patch)
        reading.put(patch)
        await asyncio.sleep(0)
        assert queue.unread_bytes == 4000
        assert stalled.is_behind(128) and not reading.is_behind(128)
        await stalled.get()
        assert queue.unread_bytes == 3600
        assert not stalled.is_behind(128) and stalled.is_behind(8)
        stalled.close()
        stalled.put(patch)
        await reading.get()
        assert queue.unread_bytes == 0

    asyncio.run(main())


class PutWhenEmpty(deque[Any]):
    """Items, of which another thread adds one at the moment at which the event loop finds that there are none left."""

    put: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        if not len(self) and self.put is not None:
            put, self.put = self.put, None
            put()
            return False
        return len(self) > 0


def test_an_item_that_arrives_when_all_others_are_handed_over_wakes_the_loop_again() -> None:
    async def main() -> list[object]:
        event_queue = EventQueue(asyncio.get_running_loop())
        stream, items = RequestStream(event_queue), PutWhenEmpty()
        event_queue._items = items
        items.put = lambda: stream.put(token(2))
        stream.put(token(1))
        return [await next_of(stream) for _ in range(2)]

    assert asyncio.run(asyncio.wait_for(main(), 10)) == [token(1), token(2)]
