"""Pacing of speech, with a clock of the test's own: one patch lasts one second."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.talker.pacing import SpeechPacing

RATE = 10  # samples a second, and samples a patch


def make_pacing(lead: int = 3, *live: int, whole: tuple[int, ...] = ()) -> SpeechPacing:
    pacing = SpeechPacing(lead, patch_samples=RATE, sample_rate=RATE)
    for stream in (*live, *whole):
        add(pacing, stream, 0.0, is_live=stream in live)
    return pacing


def add(pacing: SpeechPacing, stream: int, now: float, *, is_live: bool = True) -> None:
    """A stream whose first segment has a slot."""
    pacing.open(stream, is_live=is_live)
    pacing.arrive(stream, now)
    pacing.begin_segment(stream)


def make_patches(pacing: SpeechPacing, stream: int, count: int, now: float) -> None:
    for _ in range(count):
        pacing.launch([stream], now)
        pacing.deliver(stream, RATE, now)


def play(pacing: SpeechPacing, stream: int, patches: int, now: float = 0.0) -> None:
    """Start playback at `now` with so many patches ready."""
    make_patches(pacing, stream, 1, now)
    pacing.begin_playback(stream, now)
    make_patches(pacing, stream, patches - 1, now)


def launches(pacing: SpeechPacing, count: int, *, took_s: float = 0.0) -> list[float]:
    """When the patches of stream 1 are launched if nothing else happens; playback starts with the first of them."""
    now, times = 0.0, []
    while len(times) < count:
        if not pacing.due(now):
            now = pacing.next_time([], now)
            assert now < math.inf, "never due again"
            continue
        times.append(now)
        pacing.launch([1], now)
        now += took_s
        pacing.deliver(1, RATE, now)
        pacing.begin_playback(1, now)
    return times


@pytest.mark.parametrize(
    ("lead", "expected"),
    [
        (1, [0, 0, 1, 2, 3, 4]),  # no time to wait for others: as soon as it may be
        (2, [0, 0, 0.5, 1.5, 2.5, 3.5]),
        (3, [0, 0, 0, 1, 2, 3]),
        (5, [0, 0, 0, 0, 0, 1]),
        (0, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_patch_is_made_at_most_the_lead_before_its_playback_and_the_first_at_once(
    lead: int, expected: list[float]
) -> None:
    assert launches(make_pacing(lead, 1), 6) == expected


def test_the_patches_ready_and_not_begun_are_never_more_than_the_lead() -> None:
    for lead in (1, 2, 3, 4):
        for index, at in enumerate(launches(make_pacing(lead, 1), 20)):
            assert index - math.floor(at) <= lead
            assert at <= index, "launched after its playback time"


def test_playback_starts_when_the_first_audio_has_left_and_not_before() -> None:
    pacing = make_pacing(3, 1)
    make_patches(pacing, 1, 3, 0.0)
    assert pacing.due(100.0) == [] and pacing.unread == {1}
    assert pacing.next_time([], 100.0) == math.inf
    pacing.begin_playback(1, 100.0)
    pacing.begin_playback(1, 200.0)  # the second patch that leaves changes nothing
    assert pacing.due(100.9) == [] and pacing.unread == set()
    assert pacing.due(101.0) == [1]


def test_a_patch_that_is_ready_and_the_only_one_before_playback_is_unread() -> None:
    pacing = make_pacing(1, 1)
    pacing.launch([1], 0.0)
    assert pacing.unread == set(), "the client has had nothing to read"
    pacing.deliver(1, RATE, 0.2)
    assert pacing.unread == {1}


@pytest.mark.parametrize("lead", [1, 2, 3, 5])
def test_before_playback_as_many_patches_are_made_as_the_lead_has(lead: int) -> None:
    pacing = make_pacing(lead, 1)
    count = 0
    while pacing.due(0.0):
        make_patches(pacing, 1, 1, 0.0)
        count += 1
        assert count <= lead
    assert count == lead
    in_flight = make_pacing(lead, 1)
    for _ in range(lead):
        assert in_flight.due(0.0) == [1]
        in_flight.launch([1], 0.0)
    assert in_flight.due(0.0) == [], "patches on their way count"


def test_streams_that_have_time_wait_for_those_that_have_not_and_share_their_patch() -> None:
    pacing = make_pacing(3, 1, 2, 3)
    for stream, at in ((1, 0.0), (2, 0.3), (3, 0.6)):
        play(pacing, stream, 3, at)
    assert pacing.due(0.9) == []
    assert pacing.next_time([], 0.9) == 1.0
    assert pacing.due(1.0) == [1, 2, 3], "earliest playback first"
    pacing.launch([1, 2, 3], 1.0)
    for stream in (1, 2, 3):
        pacing.deliver(stream, RATE, 1.0)
    for after in range(2, 9):  # from then on one patch a second serves all of them
        assert pacing.due(after - 0.01) == []
        assert pacing.due(float(after)) == [1, 2, 3]
        pacing.launch([1, 2, 3], after)
        for stream in (1, 2, 3):
            pacing.deliver(stream, RATE, after)
    assert pacing.num_underruns == 0


def test_after_a_patch_with_fewer_samples_the_next_one_is_due_earlier() -> None:
    """The first patch of a segment lacks the samples that the decoder still holds back."""
    pacing = make_pacing(3, 1)
    play(pacing, 1, 3, 0.0)
    pacing.launch([1], 1.0)
    assert pacing.next_time([], 1.0) == 2.0
    pacing.deliver(1, RATE - 3, 1.0)
    assert pacing.next_time([], 1.0) == pytest.approx(1.7)
    assert pacing.due(1.6) == [] and pacing.due(1.71) == [1]


def test_a_stream_as_far_ahead_as_it_may_be_does_not_join_a_patch_of_others() -> None:
    pacing = make_pacing(3, 1, 2)
    play(pacing, 1, 4, 0.0)
    pacing.launch([2], 0.5)
    pacing.deliver(2, RATE, 0.5)
    assert pacing.due(0.5) == [2]
    assert pacing.due(1.0) == [2, 1]


def test_the_first_patch_of_a_new_stream_comes_before_all_that_are_in_time() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 3, 0.0)
    add(pacing, 2, 2.5)
    assert pacing.due(2.5) == [2, 1]
    assert pacing.due(2.5, is_crowded=True) == [2, 1]
    late = make_pacing(3, 1)
    play(late, 1, 2, 0.0)
    add(late, 2, 2.5)
    assert late.due(2.5) == [1, 2], "its playback time is over"


def test_whole_speech_is_never_held_and_starves_no_listener() -> None:
    pacing = make_pacing(3, 1, whole=(2,))
    make_patches(pacing, 2, 50, 0.05)
    assert pacing.due(0.05) == [1, 2]
    play(pacing, 1, 3, 0.0)
    # The listener's patch is to be played at 3.0, the other's has three seconds from its last launch.
    assert pacing.due(0.1) == [1, 2]
    make_patches(pacing, 1, 1, 0.1)
    assert pacing.due(1.2) == [2, 1], "a listener ahead of its clock comes behind it"


def test_while_another_stream_waits_for_a_slot_none_is_held() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 4, 0.0)
    assert pacing.due(0.0) == []
    assert pacing.due(0.0, is_crowded=True) == [1]
    pacing.launch([1], 0.0, ending=[1])
    assert pacing.due(0.0, is_crowded=True) == [], "its segment has no further patch"


def test_the_clock_goes_on_between_segments_and_the_next_one_takes_a_slot_when_it_is_due() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 5, 0.0)
    pacing.launch([1], 0.0)  # surplus: the segment had ended with the patch before
    pacing.end_segment(1)
    assert pacing.admissible([1], 1.9) == []
    assert pacing.next_time([1], 1.9) == 2.0
    assert pacing.admissible([1], 2.0) == [1]
    assert pacing.next_time([1], 2.0) == math.inf, "it may begin, and waits for a slot alone"
    add(pacing, 2, 2.0)
    assert pacing.admissible([1, 2], 2.0) == [2, 1], "a new request first"


def test_no_prompt_of_a_newcomer_delays_a_listener_that_is_short_of_sound() -> None:
    """Stream 1 needs its second patch at 1.0; 4 waits for its second segment."""
    pacing = make_pacing(3, 1, 4)
    for stream in (1, 4):
        play(pacing, stream, 1)
    pacing.end_segment(4)
    for stream, priority in ((2, 0), (3, -1)):
        pacing.open(stream, is_live=True, priority=priority)
        pacing.arrive(stream, 0.1)
    assert pacing.admissible([4, 2, 3], 0.4) == [3, 2, 4]
    assert pacing.admissible([4, 2, 3], 0.6) == [3, 4], "a listener like it, and one that comes first"
    assert pacing.admissible([4, 2, 3], 3.2) == [2, 3, 4], "overdue"
    make_patches(pacing, 1, 1, 0.7)
    assert pacing.admissible([4, 2, 3], 0.7) == [3, 2, 4]
    pacing.release()
    assert pacing.admissible([4, 2], 1.9) == [4, 2], "unpaced speech has no such time"


def test_without_a_lead_slots_are_taken_in_order_of_arrival() -> None:
    pacing = make_pacing(0, 1, 2, 3)
    play(pacing, 1, 40, 0.0)
    assert pacing.admissible([1, 3, 2], 0.0) == [1, 3, 2]


def test_a_patch_after_its_playback_time_is_one_underrun_and_playback_goes_on_from_it() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 3, 0.0)
    make_patches(pacing, 1, 1, 3.0)
    assert pacing.num_underruns == 0
    make_patches(pacing, 1, 1, 4.5)  # to be played at 4.0
    assert pacing.num_underruns == 1
    make_patches(pacing, 1, 1, 5.5)  # in time again: the stall has moved everything on by half a second
    assert pacing.num_underruns == 1
    make_patches(pacing, 1, 1, 7.0)
    assert pacing.num_underruns == 2


def test_a_patch_that_comes_late_gives_its_listener_sound_from_then_on() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 3, 0.0)
    pacing.launch([1], 2.5)
    pacing.open(2, is_live=True)
    pacing.arrive(2, 4.0)
    assert pacing.admissible([2], 4.4) == [], "the other listener has no sound"
    pacing.deliver(1, RATE, 4.5)
    assert pacing.admissible([2], 4.5) == [2], "it has until 5.5"


def test_what_a_client_does_not_read_is_no_underrun_and_whole_speech_has_none() -> None:
    pacing = make_pacing(3, 1, whole=(2,))
    play(pacing, 1, 3, 0.0)
    pacing.pause(1)
    assert 1 not in pacing.due(50.0)
    make_patches(pacing, 1, 1, 50.0)
    assert pacing.num_underruns == 0
    pacing.resume(1)
    assert 1 in pacing.due(52.0)
    make_patches(pacing, 1, 1, 52.0)
    assert pacing.num_underruns == 0, "the pause delayed this patch"
    make_patches(pacing, 1, 1, 54.0)
    assert pacing.num_underruns == 1, "it reads again"
    pacing.begin_playback(2, 0.0)
    make_patches(pacing, 2, 1, 0.0)
    make_patches(pacing, 2, 1, 90.0)
    assert pacing.num_underruns == 1


def test_a_hundred_streams_come_and_go() -> None:
    pacing = make_pacing(3, *range(100))
    assert pacing.due(0.0) == list(range(100))
    for stream in range(50):
        pacing.close(stream)
    assert pacing.due(0.0) == list(range(50, 100))
    for stream in range(200, 300):
        add(pacing, stream, 1.0)
    assert set(pacing.due(1.0)) == {*range(50, 100), *range(200, 300)}
    for stream in range(300, 1300):
        add(pacing, stream, 2.0)
        pacing.close(stream)
    assert len(pacing._by_row) == 256, "rows are used again"


def test_listeners_are_counted_by_state() -> None:
    pacing = make_pacing(3, 1, 2, 3, 4, whole=(5,))
    for stream in (2, 3, 4):
        play(pacing, stream, 3, 0.0)
    make_patches(pacing, 3, 1, 0.0)
    pacing.pause(4)
    assert pacing.listeners(3.5) == {"starting": 1, "playing": 1, "late": 1, "paused": 1}
    pacing.close(3)
    assert pacing.listeners(3.5)["playing"] == 0


@given(
    lead=st.integers(1, 5),
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    patches=st.integers(1, 12),
    step=st.sampled_from([0.02, 0.05]),
)
def test_a_fast_talker_never_stops_a_player_and_never_exceeds_the_lead(
    lead: int, arrivals: list[int], patches: int, step: float
) -> None:
    """A talker that takes `step` seconds for a patch of up to four streams; patches run one after the other."""
    pacing = SpeechPacing(lead, patch_samples=RATE, sample_rate=RATE)
    left, started = dict.fromkeys(range(len(arrivals)), patches), dict[int, float]()
    waiting = dict(enumerate(arrivals))
    now = 0.0
    while left:
        for stream in [stream for stream, at in waiting.items() if at <= now]:
            add(pacing, stream, now)
            del waiting[stream]
        batch = pacing.due(now)[:4]
        if not batch:
            now = max(now, min([pacing.next_time([], now), *waiting.values()]))
            continue
        for stream in batch:
            if stream in started:
                assert patches - left[stream] - math.floor(now - started[stream] + 1e-6) <= lead
        pacing.launch(batch, now)
        now += step
        for stream in batch:
            pacing.deliver(stream, RATE, now)
            if stream not in started:
                started[stream] = now
                pacing.begin_playback(stream, now)
            left[stream] -= 1
            if not left[stream]:
                del left[stream]
                pacing.close(stream)
    if lead > 1:
        assert pacing.num_underruns == 0


def test_a_stream_waits_from_its_first_segment_on() -> None:
    """Text that goes on arriving does not put it behind streams that came later."""
    pacing = SpeechPacing(3, patch_samples=320, sample_rate=1000)
    for stream in (1, 2):
        pacing.open(stream, is_live=True)
        pacing.arrive(stream, float(stream))
    pacing.arrive(1, 3.0)
    assert pacing.admissible([2, 1], 4.0) == [1, 2]


def test_a_stream_that_is_not_played_yet_counts_from_its_launch() -> None:
    """Stream 1 plays from second 100 and needs its next patch at 101.5; the sound of 2 was launched at 101."""
    pacing = make_pacing(3, 1, 2)
    make_patches(pacing, 1, 1, 100.0)
    pacing.begin_playback(1, 100.5)
    pacing.launch([2], 101.0)
    assert pacing.due(101.0) == [1, 2], "101.5 before 102"
    pacing.launch([1], 101.0)
    assert pacing.due(101.0) == [2, 1], "102 before 102.5"


def test_a_stream_that_had_nothing_to_say_has_not_waited_for_a_patch() -> None:
    """Text that is written slowly gets no precedence over streams of a lower priority."""
    pacing = make_pacing(3)
    for stream, priority in ((1, 1), (2, 0)):
        pacing.open(stream, is_live=False, priority=priority)
    pacing.arrive(1, 0.0)
    pacing.begin_segment(1)
    pacing.launch([1], 0.0, ending=[1])
    pacing.deliver(1, RATE, 0.1)
    pacing.end_segment(1)
    for stream in (1, 2):
        pacing.arrive(stream, 60.0)
    assert pacing.admissible([1, 2], 60.0) == [2, 1]
    pacing.arrive(1, 63.0)
    assert pacing.admissible([1, 2], 63.1) == [1, 2], "both are overdue: its second segment is no new wait"
    for stream in (1, 2):
        pacing.begin_segment(stream)
    pacing.launch([2], 62.0)
    assert pacing.due(63.1) == [1, 2], "only one of them"


def test_no_stream_is_paced_that_is_opened_after_the_release() -> None:
    pacing = make_pacing(3)
    pacing.release()
    pacing.open(1, is_live=True, lead=2)
    pacing.arrive(1, 0.0)
    pacing.begin_segment(1)
    make_patches(pacing, 1, 9, 0.0)
    assert pacing.due(0.0) == [1]


def test_a_priority_counts_no_longer_than_its_stream() -> None:
    """Without priorities the playback decides also about speech that has waited for long."""
    pacing = make_pacing(3, 1, whole=(2,))
    play(pacing, 1, 1)
    pacing.launch([1], 3.4)
    pacing.open(3, is_live=True, priority=1)
    assert pacing.due(3.5) == [2, 1]
    pacing.close(3)
    assert pacing.due(3.5) == [1, 2]


def test_a_pause_ends_with_its_segment() -> None:
    pacing = make_pacing(3, 1)
    play(pacing, 1, 3)
    pacing.launch([1], 1.0, ending=[1])
    pacing.pause(1)
    pacing.deliver(1, RATE, 1.0)
    pacing.end_segment(1)
    pacing.arrive(1, 2.0)
    pacing.begin_segment(1)
    assert pacing.due(2.0) == [1]


def patch_s(rows: int) -> float:
    """A talker with batches of 1, 2, 4 and 8 rows."""
    return next(seconds for size, seconds in ((1, 0.2), (2, 0.4), (4, 0.6), (8, 0.8)) if rows <= size)


def test_jobs_take_no_longer_patch_than_a_listener_can_wait_for() -> None:
    """By estimates that may be exceeded by half."""
    pacing = make_pacing(3, whole=(2, 3, 4, 5, 6))
    assert len(pacing.due(0.0, patch_s=patch_s)) == 5, "nobody listens"
    pacing.open(1, is_live=True)
    assert len(pacing.due(0.0, patch_s=patch_s)) == 4, "0.9 s, and one that comes now waits for one patch"
    pacing.arrive(1, 0.0)
    pacing.begin_segment(1)
    play(pacing, 1, 3, 0.0)
    pacing.launch([2, 3, 4, 5, 6], 0.0)
    assert pacing.due(2.3, patch_s=patch_s) == [1], "it has 0.7 s left, and two rows take 0.6 s"
    assert pacing.due(3.1, patch_s=patch_s) == [2, 1], "one that has waited for three seconds"
    assert pacing.due(3.1, max_rows=1, patch_s=patch_s) == [2]


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    whole=st.integers(0, 6),
    now=st.integers(0, 60),
    max_rows=st.integers(1, 8),
)
def test_a_patch_that_holds_fewer_rows_has_the_first_of_them(
    starts: list[int], whole: int, now: int, max_rows: int
) -> None:
    pacing = make_pacing(3, *range(len(starts)), whole=tuple(range(100, 100 + whole)))
    for stream, start in enumerate(starts):
        play(pacing, stream, 3, start / 10)

    def seconds(rows: int) -> float:
        return patch_s(min(rows, max_rows))

    everybody = pacing.due(now / 10, patch_s=seconds)
    assert pacing.due(now / 10, max_rows=max_rows, patch_s=seconds) == everybody[:max_rows]
