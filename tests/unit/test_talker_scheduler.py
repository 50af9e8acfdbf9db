"""Talker scheduler: order, fairness, limits; no leaks under random traffic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.errors import CapacityError
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.talker.scheduler import TalkerScheduler


def make_talker(*, slots: int = 3, max_prefills_per_patch: int = 8, max_streams: int = 8) -> TalkerScheduler:
    return TalkerScheduler(
        SlotPool(slots + 1),
        max_batch=8,
        max_prefills_per_patch=max_prefills_per_patch,
        max_streams=max_streams,
    )


def test_segments_of_a_stream_are_spoken_in_order_one_at_a_time() -> None:
    scheduler = make_talker(slots=3)
    scheduler.open(1)
    scheduler.add(1, 10)
    scheduler.add(1, 11)
    assert [(stream, segment) for stream, segment, _ in scheduler.admit()] == [(1, 10)]
    assert scheduler.admit() == []
    scheduler.end_segment(1)
    assert [(stream, segment) for stream, segment, _ in scheduler.admit()] == [(1, 11)]
    scheduler.end_segment(1)
    assert scheduler.admit() == [] and scheduler.batch() == ()
    scheduler.check()


def test_a_segment_that_arrives_while_another_is_spoken_waits_for_its_end() -> None:
    scheduler = make_talker(slots=3)
    scheduler.open(1)
    scheduler.add(1, 10)
    assert len(scheduler.admit()) == 1
    for segment in (11, 12):
        scheduler.add(1, segment)
        assert scheduler.admit() == [] and scheduler.num_running == 1 and scheduler.num_waiting == 0
    for segment in (11, 12):
        scheduler.end_segment(1)
        assert [(stream, each) for stream, each, _ in scheduler.admit()] == [(1, segment)]
    scheduler.end_segment(1)
    assert scheduler.num_running == 0 and scheduler.slots.num_free == 3


def test_a_long_stream_lets_others_in_between_its_segments() -> None:
    scheduler = make_talker(slots=1)
    for stream in (1, 2):
        scheduler.open(stream)
    scheduler.add(1, 10)
    scheduler.add(1, 11)
    scheduler.add(2, 20)
    spoken = []
    for _ in range(3):
        ((stream, segment, _),) = scheduler.admit()
        spoken.append(segment)
        scheduler.end_segment(stream)
    assert spoken == [10, 20, 11]


@pytest.mark.parametrize(("max_batch", "slots", "running"), [(2, 5, 5), (5, 2, 2), (3, 3, 3)])
def test_no_more_run_than_there_are_slots(max_batch: int, slots: int, running: int) -> None:
    """More than one batch may: with paced speech each of them is in few of the patches."""
    scheduler = TalkerScheduler(
        SlotPool(slots + 1), max_batch=max_batch, max_prefills_per_patch=8, max_streams=8
    )
    for stream in range(6):
        scheduler.open(stream)
        scheduler.add(stream, stream)
    assert len(scheduler.admit()) == running == scheduler.num_running
    assert not scheduler.has_room and scheduler.num_waiting == 6 - running
    scheduler.end_segment(0)
    assert [stream for stream, _, _ in scheduler.admit()] == [running]


def test_admissions_at_one_boundary_are_limited() -> None:
    scheduler = make_talker(slots=3, max_prefills_per_patch=2)
    for stream in (1, 2, 3):
        scheduler.open(stream)
        scheduler.add(stream, stream)
    assert len(scheduler.admit()) == 2
    assert len(scheduler.admit()) == 1
    assert scheduler.batch() == (1, 2, 3)


def test_too_many_streams_are_refused() -> None:
    scheduler = make_talker(max_streams=1)
    scheduler.open(1)
    with pytest.raises(CapacityError) as error:
        scheduler.open(2)
    assert error.value.code == "queue_full"
    scheduler.remove(1)
    scheduler.open(2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20), st.lists(st.integers(1, 6), max_size=4), st.none() | st.integers(0, 40)
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_talker_random_traffic_never_leaks_or_starves(
    streams: list[tuple[int, list[int], int | None]], num_slots: int
) -> None:
    scheduler = make_talker(slots=num_slots, max_prefills_per_patch=2, max_streams=99)
    left: dict[int, int] = {}
    spoken: dict[int, list[int]] = {stream: [] for stream in range(len(streams))}
    alive: set[int] = set()
    for step in range(sum(sum(lengths) for _, lengths, _ in streams) + 80):
        for stream, (arrival, lengths, cancel) in enumerate(streams):
            if arrival == step:
                scheduler.open(stream)
                alive.add(stream)
                for segment in range(len(lengths)):
                    scheduler.add(stream, segment)
            if cancel == step:
                scheduler.remove(stream)
                alive.discard(stream)
        for stream, segment, slot in scheduler.admit():
            assert 0 < slot <= num_slots
            spoken[stream].append(segment)
            left[stream] = streams[stream][1][segment]
        batch = scheduler.batch()
        assert set(batch) <= alive and len(batch) <= num_slots
        for stream in batch:
            left[stream] -= 1
            if left[stream] == 0:
                scheduler.end_segment(stream)
        scheduler.check()
    for stream in alive:
        assert spoken[stream] == list(range(len(streams[stream][1])))
    assert scheduler.num_running == 0
