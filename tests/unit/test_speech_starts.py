"""Spoken answers for whose first patches a thinker waits, with a clock of the test's own."""

from __future__ import annotations

import threading

import pytest

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


def test_a_thinker_waits_only_for_what_may_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for words long after they were expected, nor beside a segment that is there."""
    clock = Clock()
    starts = SpeechStarts(clock)
    starts.expect("thinks for minutes")
    clock.now += 60
    starts.expect("speaks")
    starts.begin("speaks")
    clock.now += 0.005
    starts.begin("speaks later")
    clock.now += 0.005
    left = ["unknown", "speaks", "speaks later"]
    monkeypatch.setattr(starts._changed, "wait", lambda timeout: starts.end(left.pop(0)))
    assert starts.wait_for_segment(), "one of both has time left"
    starts.wait_for_patches()
    assert not left, "until the last one has come"
    starts.expect("has no place in the talker")
    starts.begin("has no place in the talker")
    clock.now += 0.05
    assert not starts.wait_for_segment()


def test_a_segment_that_completes_while_the_last_token_is_read_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = SpeechStarts(Clock())
    starts.expect("a")

    def read(timeout: float | None = None) -> bool:
        starts.begin("a")
        return True

    monkeypatch.setattr(starts._changed, "wait", read)
    assert starts.wait_for_segment()
