"""Thinker scheduler: order, fairness, limits; no leaks and no starvation under random traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingc.errors import CapacityError, RequestError
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.scheduler import (
    ChunkShape,
    PrefillChunk,
    PromptSlice,
    ThinkerPlan,
    ThinkerScheduler,
)

# One of three layer groups per step beside decoding requests.
SLOW_CHUNKS = ChunkedPrefillPolicy(
    num_layer_groups=3, latency_model=StepLatencyModel(chunks=((9, 90.0),), decodes=((4, 1.0),))
)


def prefills(scheduler: ThinkerScheduler) -> Iterator[tuple[ThinkerPlan, PrefillChunk]]:
    """Steps that prefill, each committed when the next one is asked for; there is an end to them."""
    for _ in range(1000):
        plan = scheduler.plan()
        if plan.prefill is None:
            return
        yield plan, plan.prefill
        scheduler.commit(plan)
    raise AssertionError("prompts are prefilled for ever")


def make_thinker(
    *,
    num_pages: int = 17,
    max_running: int = 4,
    chunk: int = 8,
    max_context: int = 64,
    max_waiting: int = 8,
    prefill_policy: ChunkedPrefillPolicy | None = None,
    max_prompts: int = 1,
    alignment: int = 1,
    two_batch_rows: int = 0,
) -> ThinkerScheduler:
    pool = PagePool(num_pages=num_pages, page_size=4)
    return ThinkerScheduler(
        pool,
        max_running=max_running,
        chunk=ChunkShape(
            max_rows=chunk,
            max_prompts=max_prompts,
            alignment=alignment,
            shared_rows=1024,
            two_batch_rows=two_batch_rows,
        ),
        prefill_policy=prefill_policy or ChunkedPrefillPolicy(num_layer_groups=1),
        max_context=max_context,
        max_waiting=max_waiting,
    )


def only(chunk: PrefillChunk | None) -> PromptSlice:
    """The one prompt of a chunk."""
    assert chunk is not None
    (part,) = chunk.prompts
    return part


@pytest.mark.parametrize(
    ("prompts", "is_full"), [([8], False), ([8, 8], False), ([8, 8, 8], True), ([1024], True)]
)
def test_a_chunk_is_full_with_as_many_prompts_or_tokens_as_may_share_one(
    prompts: list[int], is_full: bool
) -> None:
    scheduler = make_thinker(max_prompts=3, chunk=1024, max_context=2048, num_pages=1025)
    assert not scheduler.fills_chunk
    for request, count in enumerate(prompts):
        scheduler.add(request, prompt_tokens=count, max_tokens=1)
    assert scheduler.fills_chunk == is_full


def test_of_a_prompt_only_what_is_left_of_it_fills_a_chunk() -> None:
    scheduler = make_thinker(max_prompts=3, chunk=1024, max_context=2048, num_pages=1025)
    scheduler.add(1, prompt_tokens=1024 + 8, max_tokens=1)
    assert scheduler.fills_chunk
    scheduler.commit(scheduler.plan())
    assert not scheduler.fills_chunk


@pytest.mark.parametrize(
    ("two_batch_rows", "expected"),
    [(0, [(0, 8, False), (8, 8, False), (16, 3, True)]), (16, [(0, 16, False), (16, 3, True)])],
    ids=["one chunk", "two-batch overlap"],
)
def test_a_prompt_is_prefilled_in_chunks_then_decodes(
    two_batch_rows: int, expected: list[tuple[int, int, bool]]
) -> None:
    scheduler = make_thinker(chunk=8, two_batch_rows=two_batch_rows)
    scheduler.add(1, prompt_tokens=19, max_tokens=4)
    seen = []
    for _ in expected:
        plan = scheduler.plan()
        assert plan.prefill is not None and plan.decode == ()
        part = only(plan.prefill)
        seen.append((part.start, part.count, part.is_end))
        scheduler.commit(plan)
    assert seen == expected
    assert scheduler.plan().decode == (1,)
    assert scheduler.plan().prefill is None


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (8, [(0, 8, True)]),
        (9, [(0, 9, True)]),
        (13, [(0, 13, True)]),
        (16, [(0, 16, True)]),
        (24, [(0, 16, False), (16, 8, True)]),
        (27, [(0, 16, False), (16, 11, True)]),
    ],
)
def test_a_chunk_is_overlapped_with_a_shorter_rest(
    num_tokens: int, expected: list[tuple[int, int, bool]]
) -> None:
    """Steps of a prompt in chunks of 8: what is left behind a chunk runs beside it, however short."""
    scheduler = make_thinker(chunk=8, two_batch_rows=16, max_prompts=4)
    scheduler.add(1, prompt_tokens=num_tokens, max_tokens=4)
    seen = []
    for _, chunk in prefills(scheduler):
        part = only(chunk)
        seen.append((part.start, part.count, part.is_end))
        assert chunk.is_whole and chunk.num_rows == part.count
    assert seen == expected


def test_no_rest_is_overlapped_beside_decoding_requests() -> None:
    scheduler = make_thinker(chunk=8, two_batch_rows=16)
    scheduler.add(1, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    scheduler.add(2, prompt_tokens=13, max_tokens=1)
    counts = [only(chunk).count for _, chunk in prefills(scheduler)]
    assert counts == [8, 5]


@pytest.mark.parametrize("two_batch_rows", [0, 8])
def test_decode_continues_during_a_long_prefill_without_two_batch_overlap(two_batch_rows: int) -> None:
    scheduler = make_thinker(chunk=4, two_batch_rows=two_batch_rows)
    scheduler.add(1, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    scheduler.add(2, prompt_tokens=16, max_tokens=1)
    for _ in range(4):
        plan = scheduler.plan()
        assert only(plan.prefill).request == 2
        assert plan.decode == (1,)
        scheduler.commit(plan)
    assert scheduler.plan().decode == (1, 2)


def test_a_chunk_is_split_into_layer_groups_only_beside_decoding_requests() -> None:
    scheduler = make_thinker(
        num_pages=256, chunk=128, max_context=400, prefill_policy=ChunkedPrefillPolicy(num_layer_groups=4)
    )
    scheduler.add(1, prompt_tokens=300, max_tokens=8)
    scheduler.add(2, prompt_tokens=100, max_tokens=8)
    seen = []
    for plan, chunk in prefills(scheduler):
        part = only(chunk)
        seen.append((part.request, part.start, part.count, chunk.first_group, chunk.end_group, plan.decode))
        assert chunk.num_rows == part.count and chunk.is_whole == (chunk.end_group == 4)
        assert part.is_end == (part.start + part.count in (300, 100))
        assert chunk.ended == ((part,) if chunk.is_whole and part.is_end else ())
    assert seen == [
        (1, 0, 128, 0, 4, ()),
        (2, 0, 100, 0, 4, ()),
        (1, 128, 128, 0, 2, (2,)),
        (1, 128, 128, 2, 4, (2,)),
        (1, 256, 44, 0, 4, (2,)),
    ]


@pytest.mark.parametrize(("num_waiting", "groups"), [(1, 1), (3, 2), (4, 3)])
def test_prompts_that_do_not_fit_into_the_chunk_count_as_waiting(num_waiting: int, groups: int) -> None:
    """One of three layer groups beside decoding requests, at least half of them for two prompts, all for four."""
    scheduler = make_thinker(num_pages=64, max_running=5, prefill_policy=SLOW_CHUNKS)
    scheduler.add(0, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    for request in range(1, num_waiting + 1):
        scheduler.add(request, prompt_tokens=24, max_tokens=8)
    plan = scheduler.plan()
    assert plan.decode == (0,) and only(plan.prefill).count == 8
    assert plan.prefill is not None and plan.prefill.end_group == groups


def test_a_started_chunk_is_completed_before_another() -> None:
    scheduler = make_thinker(
        num_pages=256, chunk=128, max_context=400, prefill_policy=ChunkedPrefillPolicy(num_layer_groups=4)
    )
    scheduler.add(1, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    scheduler.add(2, prompt_tokens=128, max_tokens=8)
    scheduler.commit(scheduler.plan())  # half of it
    scheduler.add(3, prompt_tokens=4, max_tokens=8)
    chunks = []
    for _ in range(2):
        plan = scheduler.plan()
        assert plan.prefill is not None
        chunks.append((only(plan.prefill).request, plan.prefill.first_group))
        scheduler.commit(plan)
    assert chunks == [(2, 2), (3, 0)]


def test_a_started_chunk_is_dropped_with_its_request() -> None:
    scheduler = make_thinker(
        num_pages=256, chunk=128, max_context=400, prefill_policy=ChunkedPrefillPolicy(num_layer_groups=4)
    )
    scheduler.add(1, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    for request in (2, 3):
        scheduler.add(request, prompt_tokens=300, max_tokens=8)
        scheduler.remove(request - 1 if request > 2 else 0)
        plan = scheduler.plan()
        assert plan.prefill is not None
        assert (only(plan.prefill).request, plan.prefill.first_group) == (request, 0)
        scheduler.commit(plan)
    scheduler.check()


def test_a_short_prompt_overtakes_a_long_one_and_both_end() -> None:
    scheduler = make_thinker(chunk=4)
    scheduler.add(1, prompt_tokens=32, max_tokens=1)
    scheduler.add(2, prompt_tokens=4, max_tokens=1)
    order = []
    for _plan, chunk in prefills(scheduler):
        order.append(only(chunk).request)
    assert order[:3] == [1, 2, 1]
    assert order.count(1) == 8


def test_short_prompts_share_a_chunk_each_at_an_aligned_row() -> None:
    scheduler = make_thinker(
        num_pages=256, chunk=64, max_context=99, max_prompts=3, alignment=8, max_running=8
    )
    for request, count in enumerate((5, 8, 50, 20, 8), start=1):
        scheduler.add(request, prompt_tokens=count, max_tokens=1)
    plan = scheduler.plan()
    assert plan.prefill is not None and plan.prefill.num_rows == 8 + 8 + 20, (
        "3 has no room, 5 comes after three"
    )
    assert [(each.request, each.start, each.count, each.is_end) for each in plan.prefill.prompts] == [
        (1, 0, 5, True),
        (2, 0, 8, True),
        (4, 0, 20, True),
    ]
    scheduler.commit(plan)
    plan = scheduler.plan()
    assert plan.decode == (1, 2, 4)
    assert plan.prefill is not None and [each.request for each in plan.prefill.prompts] == [5, 3]
    scheduler.commit(plan)
    assert scheduler.plan().decode == (1, 2, 4, 5, 3)


def test_a_chunk_of_one_long_prompt_has_no_room() -> None:
    scheduler = make_thinker(num_pages=256, chunk=16, max_context=99, max_prompts=4)
    scheduler.add(1, prompt_tokens=30, max_tokens=1)
    scheduler.add(2, prompt_tokens=2, max_tokens=1)
    parts = []
    for _plan, chunk in prefills(scheduler):
        parts.append([(each.request, each.count) for each in chunk.prompts])
    assert parts == [[(1, 16)], [(2, 2), (1, 14)]]


def test_no_prompt_joins_beyond_the_rows_that_cost_least() -> None:
    scheduler = make_thinker(num_pages=2000, chunk=4096, max_context=4096, max_prompts=4)
    for request, count in enumerate((1000, 100, 24), start=1):
        scheduler.add(request, prompt_tokens=count, max_tokens=1)
    plan = scheduler.plan()
    assert plan.prefill is not None and [each.request for each in plan.prefill.prompts] == [1, 3]


def test_a_started_shared_chunk_continues_without_a_removed_request() -> None:
    prefill_policy = ChunkedPrefillPolicy(
        num_layer_groups=4, latency_model=StepLatencyModel(chunks=((64, 80.0),), decodes=((4, 1.0),))
    )
    scheduler = make_thinker(
        num_pages=256, chunk=64, max_context=99, max_prompts=2, prefill_policy=prefill_policy
    )
    scheduler.add(1, prompt_tokens=4, max_tokens=8)
    scheduler.commit(scheduler.plan())
    scheduler.add(2, prompt_tokens=5, max_tokens=8)
    scheduler.add(3, prompt_tokens=6, max_tokens=8)
    scheduler.commit(scheduler.plan())  # half of it
    scheduler.remove(2)
    scheduler.add(4, prompt_tokens=7, max_tokens=8)
    plan = scheduler.plan()
    assert plan.prefill is not None and plan.prefill.num_rows == 11, "the rows of both are still there"
    assert (only(plan.prefill).request, plan.prefill.first_group) == (3, 2)
    for _ in range(4):
        if plan.prefill.is_whole:
            break
        scheduler.commit(plan)
        plan = scheduler.plan()
        assert plan.prefill is not None
    assert [each.request for each in plan.prefill.ended] == [3]
    scheduler.commit(plan)
    assert scheduler.plan().decode == (1, 3)
    scheduler.remove(3)
    scheduler.check()


def held_pages(scheduler: ThinkerScheduler, *requests: int) -> list[int]:
    return [len(scheduler.pool.pages(request)) for request in requests]


def test_the_pages_of_a_request_grow_with_its_answer() -> None:
    """In pages of 4, the first decode step writes row 5, the last one 11; the step after it may be planned, too."""
    scheduler = make_thinker()
    scheduler.add(1, prompt_tokens=5, max_tokens=8)
    pages = []
    for _ in range(9):
        plan = scheduler.plan()
        pages += held_pages(scheduler, 1)
        scheduler.commit(plan)
    assert pages == [2, 2, 2, 2, 3, 3, 3, 3, 3]


def test_pages_that_a_chunk_still_writes_are_given_to_nobody() -> None:
    """Of two prompts that share a chunk, one is removed after a layer group; the others run with its page table."""
    scheduler = make_thinker(max_prompts=2, prefill_policy=SLOW_CHUNKS)
    scheduler.add(0, prompt_tokens=1, max_tokens=12)
    scheduler.commit(scheduler.plan())
    for request in (1, 2):
        scheduler.add(request, prompt_tokens=4, max_tokens=1)
    free = []
    for step in range(4):
        plan = scheduler.plan()
        assert plan.prefill is None or plan.prefill.first_group == (0, 2)[step]
        scheduler.commit(plan)
        if step == 0:
            scheduler.remove(1)
        free.append(scheduler.pool.num_free)
    assert free == [13, 14, 14, 13], "one page of 0 and of 2, one of 1 for a step; 0 begins its second"
    scheduler.check()


def test_a_chunk_begins_again_when_its_prompt_was_preempted() -> None:
    policy = ChunkedPrefillPolicy(
        num_layer_groups=12, latency_model=StepLatencyModel(chunks=((9, 90.0),), decodes=((4, 1.0),))
    )
    scheduler = make_thinker(num_pages=5, prefill_policy=policy)
    scheduler.add(0, prompt_tokens=3, max_tokens=11)
    for _ in range(2):
        scheduler.commit(scheduler.plan())
    scheduler.add(1, prompt_tokens=4, max_tokens=1)
    groups, preempted = [], []
    for step in range(2, 16):
        if step == 11:
            scheduler.remove(0)
        plan = scheduler.plan()
        groups += [] if plan.prefill is None else [(plan.prefill.first_group, plan.prefill.end_group)]
        preempted += [(step, each) for each in plan.preempted]
        scheduler.commit(plan)
        scheduler.check()
    assert preempted == [(10, 1)], "row 12 of 0 begins its fourth page, the last one"
    assert groups == [*((group, group + 1) for group in range(8)), (0, 12)]


def test_no_request_is_preempted_and_admitted_at_once() -> None:
    """Its last token may not be known yet. Here, pages of the second preempted request would hold the first one."""
    requests = [(11, 24), (3, 17), (9, 9), (7, 24), (10, 18), (4, 8)]
    scheduler = make_thinker(num_pages=18, max_prompts=4, max_running=6, chunk=32)
    left = {}
    for request, (prompt, answer) in enumerate(requests):
        scheduler.add(request, prompt_tokens=prompt, max_tokens=answer)
        left[request] = answer
    num_together = 0
    while left:
        plan = scheduler.plan()
        num_together = max(num_together, len(plan.preempted))
        assert not any(held_pages(scheduler, *plan.preempted))
        scheduler.commit(plan)
        ended = () if plan.prefill is None else [each.request for each in plan.prefill.ended]
        for request in (*plan.decode, *ended):
            left[request] -= 1
            if not left[request]:
                scheduler.remove(request)
                del left[request]
    assert num_together == 2


def test_the_youngest_request_is_preempted_and_continues_behind_its_last_token() -> None:
    """In 4 pages of 4 tokens, both would need 3."""
    scheduler = make_thinker(num_pages=5)
    scheduler.add(1, prompt_tokens=3, max_tokens=8)
    scheduler.add(2, prompt_tokens=4, max_tokens=8)
    steps = []
    for step in range(11):
        if step == 8:
            scheduler.remove(1)  # its answer has 8 tokens
        plan = scheduler.plan()
        part = None if plan.prefill is None else only(plan.prefill)
        prefill = None if part is None else (part.request, part.start, part.count)
        steps.append((prefill, plan.decode, plan.preempted, held_pages(scheduler, 1, 2)))
        scheduler.commit(plan)
        scheduler.check()
    assert steps == [
        ((1, 0, 3), (), (), [1, 2]),
        ((2, 0, 4), (1,), (), [1, 2]),
        (None, (1, 2), (), [2, 2]),  # row 4 of both
        (None, (1, 2), (), [2, 2]),
        (None, (1, 2), (), [2, 2]),
        (None, (1, 2), (), [2, 2]),
        (None, (1,), (2,), [3, 0]),  # row 8 of both: 2 has 5 tokens of its answer
        (None, (1,), (), [3, 0]),
        ((2, 0, 8), (), (), [0, 3]),
        ((2, 8, 1), (), (), [0, 3]),
        (None, (2,), (), [0, 3]),
    ]
    assert scheduler.num_preempted == 1


def test_small_requests_pass_one_that_waits_for_pages_until_they_had_four_times_its_pages() -> None:
    scheduler = make_thinker(num_pages=5, max_context=16)  # 4 pages of 4 tokens
    scheduler.add(0, prompt_tokens=4, max_tokens=4)
    scheduler.plan()
    scheduler.add(1, prompt_tokens=12, max_tokens=4)  # needs all pages
    for small in range(2, 2 + 4 * 4):
        scheduler.add(small, prompt_tokens=2, max_tokens=2)
        scheduler.plan()
        assert held_pages(scheduler, 0, 1, small) == [2, 0, 1]
        scheduler.remove(small)
    for small in (99, 100):
        scheduler.add(small, prompt_tokens=2, max_tokens=2)
        scheduler.plan()
        assert held_pages(scheduler, 0, 1, small) == [2, 0, 0], "it is the turn of the large request"
    scheduler.remove(0)
    scheduler.plan()
    assert held_pages(scheduler, 1, 99, 100) == [4, 0, 0]
    scheduler.remove(1)
    scheduler.plan()
    assert held_pages(scheduler, 99, 100) == [1, 1]


def test_many_that_are_admitted_at_once_pass_a_large_request_only_as_far_as_one_by_one() -> None:
    scheduler = make_thinker(num_pages=19, max_running=99)
    scheduler.add(0, prompt_tokens=16, max_tokens=9)  # 5 pages of 18
    scheduler.add(1, prompt_tokens=47, max_tokens=2)  # 12
    scheduler.plan()
    scheduler.add(2, prompt_tokens=60, max_tokens=4)  # 16
    for small in range(3, 9):  # a page of 16 each at first
        scheduler.add(small, prompt_tokens=2, max_tokens=62)
    assert held_pages(scheduler, 0, 1, *range(2, 9)) == [5, 12, *[0] * 7]
    scheduler.remove(1)
    scheduler.plan()
    assert held_pages(scheduler, *range(2, 9)) == [0, 1, 1, 1, 1, 0, 0], "four times its 16 pages"


def test_shared_pages_that_nobody_else_holds_are_not_spare() -> None:
    scheduler = make_thinker(num_pages=7, max_context=20)
    scheduler.add(0, prompt_tokens=8, max_tokens=1, keys=keys_of("a" * 8))
    for _ in prefills(scheduler):
        pass
    scheduler.remove(0)
    scheduler.add(1, prompt_tokens=8, max_tokens=2)  # 3 pages; 3 are left, 2 of them published
    scheduler.plan()
    scheduler.add(2, prompt_tokens=9, max_tokens=1, keys=keys_of("a" * 9))
    scheduler.plan()
    assert held_pages(scheduler, 1, 2) == [3, 0], "none would be left for the running request"


def test_four_chats_with_long_answers_leave_room_for_short_ones() -> None:
    """Each may fill a third of the pages; a fifth waits for more than is left. Chats of 8 tokens hardly wait."""
    scheduler = make_thinker(num_pages=301, max_context=1000, max_running=99, chunk=1000)
    for long in range(4):
        scheduler.add(long, prompt_tokens=100, max_tokens=300)
    scheduler.add(4, prompt_tokens=900, max_tokens=100)
    for short in range(5, 35):  # about 270 steps
        scheduler.add(short, prompt_tokens=20, max_tokens=8)
        waited, left = -1, 8
        while left:
            plan = scheduler.plan()
            waited += not scheduler.pool.pages(short)
            ended = () if plan.prefill is None else [part.request for part in plan.prefill.ended]
            left -= short in (*plan.decode, *ended)
            scheduler.commit(plan)
        assert waited < 12, "a step or two for every page that it gave to older answers"
        scheduler.remove(short)
    assert scheduler.num_preempted and not scheduler.pool.pages(4)


def test_a_long_prompt_gets_every_second_chunk_however_many_short_ones_arrive() -> None:
    scheduler = make_thinker(num_pages=99, chunk=8, max_running=99, max_waiting=99)
    scheduler.add(0, prompt_tokens=40, max_tokens=1)  # five chunks
    order = []
    for short in range(1, 20):
        scheduler.add(short, prompt_tokens=4, max_tokens=1)
        plan = scheduler.plan()
        order.append(only(plan.prefill).request)
        scheduler.commit(plan)
    assert order[:9] == [0, 1, 0, 2, 0, 3, 0, 4, 0]
    assert order[9:] == list(range(5, 15)), "then the short ones in order of arrival"


def test_a_full_queue_refuses() -> None:
    scheduler = make_thinker(max_waiting=1, max_running=1)
    scheduler.add(1, prompt_tokens=4, max_tokens=4)
    scheduler.plan()
    scheduler.add(2, prompt_tokens=4, max_tokens=4)
    with pytest.raises(CapacityError) as error:
        scheduler.add(3, prompt_tokens=4, max_tokens=4)
    assert (error.value.status, error.value.code) == (503, "queue_full")


@pytest.mark.parametrize("max_waiting", [0, 1])
def test_requests_that_an_idle_server_has_room_for_do_not_fill_its_queue(max_waiting: int) -> None:
    scheduler = make_thinker(max_waiting=max_waiting, max_running=4)
    for request in range(4 + max_waiting):
        scheduler.add(request, prompt_tokens=4, max_tokens=4)
    with pytest.raises(CapacityError):
        scheduler.add(9, prompt_tokens=4, max_tokens=4)
    scheduler.plan()
    assert (scheduler.num_running, scheduler.num_waiting) == (4, max_waiting)


def test_without_a_queue_a_request_that_has_room_is_taken() -> None:
    scheduler = make_thinker(max_waiting=0, max_running=1)
    scheduler.add(1, prompt_tokens=4, max_tokens=4)
    scheduler.plan()
    with pytest.raises(CapacityError):
        scheduler.add(2, prompt_tokens=4, max_tokens=4)


def test_prompt_longer_than_the_context_is_the_clients_fault() -> None:
    scheduler = make_thinker(max_context=64)
    assert scheduler.max_new_tokens(60, 100) == 4
    with pytest.raises(RequestError) as error:
        scheduler.max_new_tokens(64, 1)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    assert error.value.status == 400 and "has 64 tokens, the context holds 64" in error.value.message


@pytest.mark.parametrize(
    ("prompt", "requested", "granted"),
    [(1, 5, 5), (1, 1, 1), (30, 2, 2), (30, 3, 2), (31, 1, 1), (31, 9, 1), (1, 31, 31), (1, 32, 31)],
)
def test_an_answer_has_what_is_asked_for_and_fits(prompt: int, requested: int, granted: int) -> None:
    """In a context of 32 tokens, which is less than all pages hold."""
    scheduler = make_thinker(num_pages=17, max_context=32)
    assert scheduler.max_context == 32
    assert scheduler.max_new_tokens(prompt, requested) == granted


def test_a_chunk_may_start_while_none_is_running_and_a_prompt_is_there() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=2)
    scheduler = make_thinker(chunk=128, num_pages=256, max_context=400, prefill_policy=policy)
    assert not scheduler.can_start_chunk
    scheduler.add(1, prompt_tokens=4, max_tokens=4)
    assert scheduler.can_start_chunk, "one waits"
    scheduler.commit(scheduler.plan())
    assert not scheduler.can_start_chunk, "it decodes, and no other is there"
    scheduler.add(2, prompt_tokens=200, max_tokens=4)
    plan = scheduler.plan()
    assert plan.prefill is not None and plan.prefill.end_group == 1, (
        "half of the layers, beside the decode step"
    )
    scheduler.commit(plan)
    scheduler.add(3, prompt_tokens=4, max_tokens=4)
    assert not scheduler.can_start_chunk, "the chunk is not complete"
    scheduler.commit(scheduler.plan())
    assert scheduler.can_start_chunk, "the second one has further chunks"


def test_a_request_has_no_more_tokens_than_all_pages_hold() -> None:
    scheduler = make_thinker(num_pages=5, max_context=64)  # 4 pages of 4 tokens
    assert scheduler.max_new_tokens(10, 100) == 6
    with pytest.raises(RequestError, match="the context holds 16 with the answer"):
        scheduler.max_new_tokens(16, 1)
    scheduler.add(1, prompt_tokens=10, max_tokens=6)
    assert not scheduler.plan().is_empty, "it would wait for ever"


def test_removal_frees_pages_at_once_in_every_state() -> None:
    scheduler = make_thinker(max_running=2)
    for request in (1, 2, 3):
        scheduler.add(request, prompt_tokens=8, max_tokens=4)
    scheduler.commit(scheduler.plan())  # 1 decodes, 2 prefills, 3 waits
    held = []
    for request in (1, 2, 3, 3):
        scheduler.remove(request)
        held.append(scheduler.pool.num_pages - 1 - scheduler.pool.num_free)
    assert held == [3, 0, 0, 0], "three pages each; 3 waited for its own"
    assert scheduler.num_running == scheduler.num_waiting == 0
    scheduler.check()
    assert scheduler.plan().is_empty


def test_a_chunk_of_a_removed_request_is_not_recorded() -> None:
    scheduler = make_thinker()
    scheduler.add(1, prompt_tokens=8, max_tokens=4)
    plan = scheduler.plan()
    scheduler.remove(1)
    scheduler.commit(plan)
    assert scheduler.plan().is_empty
    scheduler.check()


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[int, int, int, int | None]]:
    """(arrival step, prompt tokens, answer tokens, step of cancellation or None)."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 30), st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(0, 60)
            ),
            max_size=20,
        )
    )


@given(
    traffic(),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([SLOW_CHUNKS, ChunkedPrefillPolicy(num_layer_groups=1)]),
    st.integers(1, 4),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_thinker_random_traffic_never_leaks_or_starves(
    requests: list[tuple[int, int, int, int | None]],
    max_running: int,
    chunk: int,
    prefill_policy: ChunkedPrefillPolicy,
    max_prompts: int,
    alignment: int,
    two_batch_overlap: bool,
) -> None:
    scheduler = make_thinker(
        two_batch_rows=2 * chunk * two_batch_overlap,
        num_pages=14,
        max_running=max_running,
        chunk=chunk,
        max_context=52,
        max_waiting=99,
        prefill_policy=prefill_policy,
        max_prompts=max_prompts,
        alignment=alignment,
    )
    left = {}
    prefilled: dict[int, int] = {}
    sizes = {request: prompt for request, (_, prompt, _, _) in enumerate(requests)}  # tokens to prefill
    finished: set[int] = set()
    cancelled: set[int] = set()
    done_parts = 0
    work = sum(3 * prompt + answer for _, prompt, answer, _ in requests)
    for step in range(work + 100):
        for request, (arrival, prompt, answer, cancel) in enumerate(requests):
            if arrival == step:
                scheduler.add(request, prompt_tokens=prompt, max_tokens=answer)
                left[request] = answer
                prefilled[request] = 0
            if cancel == step and arrival <= step:
                scheduler.remove(request)
                cancelled.add(request)
        plan = scheduler.plan()
        prefilled.update(dict.fromkeys(plan.preempted, 0))
        sizes.update({each: requests[each][1] + requests[each][2] - left[each] for each in plan.preempted})
        assert scheduler.num_running <= max_running
        assert cancelled.isdisjoint(plan.decode)
        scheduler.commit(plan)
        emitted = list(plan.decode)
        if plan.prefill is not None:
            assert 1 <= len(plan.prefill.prompts) <= max_prompts
            is_pair = two_batch_overlap and not plan.decode and len(plan.prefill.prompts) == 1
            assert plan.prefill.num_rows <= (2 if is_pair else 1) * chunk
            assert plan.prefill.first_group in (0, done_parts), "one chunk is under way at a time"
            done_parts = 0 if plan.prefill.is_whole else plan.prefill.end_group
            for part in plan.prefill.prompts:
                assert part.start == prefilled[part.request] and part.request not in cancelled
                if plan.prefill.is_whole:
                    prefilled[part.request] += part.count
                    assert part.is_end == (prefilled[part.request] == sizes[part.request])
            emitted += [part.request for part in plan.prefill.ended]
        for request in emitted:
            left[request] -= 1
            if left[request] == 0:
                scheduler.remove(request)
                finished.add(request)
        scheduler.check()
    expected = {r for r, (arrival, _, _, cancel) in enumerate(requests) if cancel is None or cancel < arrival}
    assert expected <= finished
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.pool.num_free == scheduler.pool.num_pages - 1


TEXTS = ("a" * 40, "aaaaaaaaa" + "b" * 31, "abcdefgh" * 5)


def keys_of(text: str) -> list[bytes]:
    """Keys of the full pages of a text, a letter a token."""
    return [text[:end].encode() for end in range(4, len(text) + 1, 4)]


def test_a_prompt_starts_behind_what_another_one_has_computed() -> None:
    scheduler = make_thinker(chunk=8)
    starts = {}
    for request, text in enumerate(("a" * 12, "a" * 12, "a" * 10 + "bb", "a" * 13)):
        scheduler.add(request, prompt_tokens=len(text), max_tokens=1, keys=keys_of(text))
        starts[request] = [
            (each.start, each.count) for _, chunk in prefills(scheduler) for each in chunk.prompts
        ]
        scheduler.remove(request)
    assert starts == {0: [(0, 8), (8, 4)], 1: [(8, 4)], 2: [(8, 4)], 3: [(12, 1)]}
    assert (scheduler.num_prefilled, scheduler.num_reused) == (12 + 4 + 4 + 1, 8 + 8 + 12)
    scheduler.check()


def test_pages_are_reused_from_complete_chunks_only() -> None:
    """Not before the last layer group has run, and nothing of a prompt that was removed before."""
    scheduler = make_thinker(chunk=8, prefill_policy=SLOW_CHUNKS)
    scheduler.add(0, prompt_tokens=1, max_tokens=4)
    scheduler.commit(scheduler.plan())  # decodes: the chunks below are run in parts
    scheduler.add(1, prompt_tokens=8, max_tokens=1, keys=keys_of("a" * 8))
    plan = scheduler.plan()
    assert plan.prefill is not None and not plan.prefill.is_whole
    scheduler.commit(plan)
    assert scheduler.pool.num_published == 0
    scheduler.remove(1)
    assert scheduler.pool.num_published == 0
    scheduler.add(2, prompt_tokens=8, max_tokens=1, keys=keys_of("a" * 8))
    for plan, chunk in prefills(scheduler):
        assert only(chunk).start == 0
        assert scheduler.pool.num_published == 0, plan
    assert scheduler.pool.num_published == 2


def test_a_prompt_inside_a_page_computes_every_token_of_its_own() -> None:
    """Another prompt publishes the page meanwhile; skipping it would leave out the tokens behind it."""
    scheduler = make_thinker(chunk=6)
    scheduler.add(1, prompt_tokens=20, max_tokens=1, keys=keys_of("a" * 20))
    scheduler.commit(scheduler.plan())  # tokens 0 to 5; a page has 4
    scheduler.add(2, prompt_tokens=13, max_tokens=1, keys=keys_of("a" * 13))
    parts = [only(chunk) for _, chunk in prefills(scheduler)]
    assert any(part.request == 2 and part.start == 4 for part in parts), (
        "the second prompt shares the first page"
    )
    computed = 6
    for part in (part for part in parts if part.request == 1):
        skipped = part.start - computed
        assert skipped == 0 or computed % 4 == skipped % 4 == 0, "only whole pages from a page's beginning on"
        computed = part.start + part.count
    assert computed == 20


def test_shared_pages_decide_whether_a_request_is_admitted() -> None:
    """It waits for pages in use, takes free ones that hold a prefix, and needs none for what it shares."""
    scheduler = make_thinker(num_pages=6, max_waiting=0)
    scheduler.add(1, prompt_tokens=8, max_tokens=4, keys=keys_of("a" * 8))
    for _ in prefills(scheduler):
        pass
    with pytest.raises(CapacityError):
        scheduler.add(2, prompt_tokens=8, max_tokens=1, keys=keys_of("b" * 8))
    scheduler.add(3, prompt_tokens=8, max_tokens=1, keys=keys_of("a" * 8))
    scheduler.plan()
    assert scheduler.pool.num_free == 1, (
        "it has one page of its own, and another is left for an answer to grow"
    )
    with pytest.raises(CapacityError):
        scheduler.add(4, prompt_tokens=8, max_tokens=1, keys=keys_of("a" * 8))
    scheduler.remove(3)
    scheduler.remove(1)
    assert (scheduler.pool.num_free, scheduler.pool.num_published) == (5, 2)
    scheduler.add(5, prompt_tokens=19, max_tokens=1, keys=keys_of("b" * 19))
    assert only(scheduler.plan().prefill).start == 0
    assert scheduler.pool.num_published == 0
    scheduler.check()


def test_what_ran_beside_a_fault_is_not_published_later() -> None:
    scheduler = make_thinker(chunk=8)
    scheduler.add(1, prompt_tokens=12, max_tokens=8, keys=keys_of("a" * 12))
    scheduler.add(2, prompt_tokens=4, max_tokens=8, keys=keys_of("b" * 4))
    scheduler.commit(scheduler.plan())
    scheduler.unpublish_all()
    for _ in prefills(scheduler):
        pass
    for request, text in ((1, "a" * 16), (2, "b" * 8)):
        scheduler.publish(request, keys_of(text))
    assert scheduler.pool.num_published == 0


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(0, 2),
            st.integers(1, 32),
            st.integers(1, 30),
            st.none() | st.integers(1, 30),
        ),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([5, 8, 9]),
    st.integers(1, 3),
    st.integers(4, 20),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_every_answer_finds_its_own_tokens_and_ends(
    requests: list[tuple[int, int, int, int, int | None]],
    chunk: int,
    max_prompts: int,
    num_pages: int,
    num_groups: int,
    is_cached: bool,
) -> None:
    """A model of every row of every layer group, written by the planned steps.

    A request is (arrival, kind of text, prompt and answer tokens, tokens at which it is cancelled). Many begin alike.
    """
    policy = SLOW_CHUNKS if num_groups == 3 else ChunkedPrefillPolicy(num_layer_groups=1)
    scheduler = make_thinker(
        num_pages=num_pages,
        chunk=chunk,
        max_waiting=99,
        max_prompts=max_prompts,
        max_context=64,
        prefill_policy=policy,
    )
    pool = scheduler.pool
    rows: dict[tuple[int, int], str] = {}
    answers: dict[int, str] = {}
    prompts = {}
    chunk_rows: list[
        tuple[Sequence[int], int, str]
    ] = []  # pages, start, text of every prompt that began the chunk
    queue: list[int] = []
    overtakers: dict[int, list[int]] = {}  # pages that younger requests may need, by waiting request
    num_tokens = {}
    for number, (_, kind, length, answer, _) in enumerate(requests):
        length = max(1, min(length, pool.max_tokens - answer))
        prompts[number] = TEXTS[kind][:length]
        num_tokens[number] = min(answer, scheduler.max_new_tokens(length, answer))

    def text_of(request: int) -> str:
        return prompts[request] + answers.get(request, "")

    def write(pages: Sequence[int], start: int, text: str, groups: range) -> None:
        for place, letter in enumerate(text, start):
            for group in groups:
                rows[group, 4 * pages[place // 4] + place % 4] = letter

    def check_rows(request: int) -> None:
        written = text_of(request)
        for group in range(num_groups):
            found = [
                rows.get((group, 4 * pool.pages(request)[i // 4] + i % 4), "?") for i in range(len(written))
            ]
            assert "".join(found) == written, "another request's tokens"

    def total(request: int) -> int:
        return pool.pages_for(len(prompts[request]) + num_tokens[request] - 1)

    for step in range(3000):
        for number, (arrival, _, _, _, _) in enumerate(requests):
            if arrival == step:
                keys = keys_of(prompts[number]) if is_cached else None
                scheduler.add(
                    number, prompt_tokens=len(prompts[number]), max_tokens=num_tokens[number], keys=keys
                )
                queue.append(number)
                overtakers[number] = []
        running = {each for each in overtakers if pool.pages(each)}
        plan = scheduler.plan()
        scheduler.check()
        if plan.preempted:
            assert not any(held_pages(scheduler, *plan.preempted)), "its last token may not be known yet"
            survivors = running - {*plan.preempted}
            order = {each: place for place, each in enumerate(overtakers)}  # of arrival
            assert max(order[each] for each in survivors) < min(order[each] for each in plan.preempted)
            queue += plan.preempted
        for new in [each for each in queue if pool.pages(each)]:
            queue.remove(new)
            for other in queue:
                if [*overtakers].index(other) < [*overtakers].index(new):
                    overtakers[other].append(total(new))
        for waiting in queue:
            assert sum(overtakers[waiting][:-1]) < 4 * total(waiting), "it starves"
        if plan.prefill is not None:
            if plan.prefill.first_group == 0:
                chunk_rows = [
                    (tuple(pool.pages(p.request)), p.start, text_of(p.request)[p.start : p.start + p.count])
                    for p in plan.prefill.prompts
                ]
            for pages, start, text in chunk_rows:
                write(pages, start, text, range(plan.prefill.first_group, plan.prefill.end_group))
        ended = () if plan.prefill is None else [each.request for each in plan.prefill.ended]
        scheduler.commit(plan)
        for request in plan.decode:
            written = text_of(request)
            assert len(pool.pages(request)) == pool.pages_for(len(written)) or len(written) % 4 == 0
            write(pool.pages(request), len(written) - 1, written[-1], range(num_groups))
        for request in (*ended, *plan.decode):
            check_rows(request)
            answers[request] = answers.get(request, "") + "abc"[request % 3]
            if len(answers[request]) in (num_tokens[request], requests[request][4]):
                scheduler.publish(request, keys_of(text_of(request)[:-1]))
                scheduler.remove(request)
                del overtakers[request]
        if step == 20:  # a prompt is cancelled inside a chunk
            for part in () if plan.prefill is None else plan.prefill.prompts[:1]:
                if part.request in overtakers and part.request not in ended:
                    scheduler.remove(part.request)
                    del overtakers[part.request]
        scheduler.check()
        if step > 40 and not scheduler.num_running and not scheduler.num_waiting:
            assert not overtakers
            return
    raise AssertionError("requests wait for ever")
