"""Spoken answers for whose first patches a thinker waits, with a clock of the test's own."""

from __future__ import annotations

import threading

from mingc.runtime.speech_starts import SpeechStarts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_first_patch_is_waited_for_until_it_has_arrived() -> None:
    starts = SpeechStarts(Clock())
    starts.expect("a")
    assert not starts.wait_for_segment()
    starts.begin("a")
    starts.begin("b")
    assert starts.wait_for_segment()
    waiter = threading.Thread(target=starts.wait_for_patches)
    waiter.start()  # the clock stands still, so only `end` can end it
    starts.end("a")
    starts.end("unknown")
    assert waiter.is_alive()
    starts.end("b")
    waiter.join(10)
    assert not waiter.is_alive() and not starts.wait_for_segment()


def test_neither_a_thought_nor_a_late_patch_stops_a_thinker() -> None:
    clock = Clock()
    starts = SpeechStarts(clock)
    starts.expect("thinks for minutes")
    starts.begin("has no place in the talker")
    clock.now += 0.05
    assert not starts.wait_for_segment()
    starts.wait_for_patches()
    clock.now += 60
    assert not starts.wait_for_segment()


def test_a_segment_that_completes_while_the_last_token_is_read_is_seen() -> None:
    starts = SpeechStarts(Clock())
    starts.expect("a")
    wait = starts._changed.wait
    starts._changed.wait = lambda timeout=None: starts.begin("a") or wait(0)  # type: ignore[method-assign, func-returns-value]
    assert starts.wait_for_segment()
