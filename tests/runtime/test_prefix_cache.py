"""Prefix cache of the thinker loop: answers with reused pages equal those without, to the last bit.

The fake engines add whole numbers, so that their results depend on which KV rows a request sees and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from collector import Collector
from fake_thinker import PAGE, make_prompt, make_thinker_loop, make_thinker_stage
from hand_run import run_until_idle
from held_resources import check_all_is_free

from mingc.errors import WorkerError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel

SYSTEM = [7, 3, 9, 11, 2, 5, 8, 1, 4, 6]  # two and a half pages
WAYS: dict[str, dict[str, Any]] = {
    "host sampling": {},
    "device sampling": {"is_static": True, "max_prompts": 4},
    "two-batch overlap": {"is_static": True, "two_batch_overlap": True, "chunk": 32},
    "layer groups": {
        "num_layers": 3,
        "prefill_policy": ChunkedPrefillPolicy(
            num_layer_groups=3, latency_model=StepLatencyModel(chunks=((64, 90.0),), decodes=((8, 1.0),))
        ),
    },
}


@contextmanager
def running(*, is_cached: bool, num_layers: int = 1, **options: Any) -> Iterator[ThinkerLoop]:
    """A loop with small chunks, so that prompts have several."""
    stage = make_thinker_stage(num_layers=num_layers, max_prompts=options.get("max_prompts", 1))
    loop = make_thinker_loop(stage, **{"chunk": 16, **options}, prefix_salt=b"model" if is_cached else None)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop(10.0)


@dataclass
class Answer:
    """Tokens and logits of an answer, and prompt tokens that were not computed for it."""

    tokens: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]]
    reused: int

    def __eq__(self, other: object) -> bool:
        """Whether tokens and logits are the same, whatever was reused."""
        assert isinstance(other, Answer)
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)


def submit(loop: ThinkerLoop, prompt: ThinkerPrompt, *, max_tokens: int = 6, **sampling: Any) -> Collector:
    collector = Collector()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    keys = loop.page_keys(prompt)
    loop.submit(prompt, params, 1, collector.put, keys=keys, recorder=collector.recorder)
    return collector


def result(collector: Collector) -> Answer:
    tokens = collector.tokens()
    items = [item for item in collector.items if isinstance(item, TokenItem)]
    return Answer(tokens, np.stack(collector.recorder.logits), items[-1].reused_tokens)


def ask(loop: ThinkerLoop, prompt: ThinkerPrompt, **sampling: Any) -> Answer:
    return result(submit(loop, prompt, **sampling))


def text(ids: Sequence[int], *, delta: int = 0) -> ThinkerPrompt:
    """A prompt whose last tokens, and their answer, are `delta` positions from their place, as after media."""
    positions = np.tile(np.arange(len(ids)), (3, 1))
    positions[:, len(SYSTEM) :] += delta
    return replace(make_prompt(ids, rope_delta=delta), positions=positions)


def with_media(ids: Sequence[int], media: Sequence[int], *, picture: int) -> ThinkerPrompt:
    """A prompt whose rows `media` show the picture of this number."""
    prompt = make_prompt(ids, media=media, rope_delta=-3)
    assert prompt.media_embeds is not None
    embeds = prompt.media_embeds + picture
    rows = [[picture, place] for place in range(len(media))]
    return replace(prompt, media_embeds=embeds, media_ids=np.array(rows, np.uint8))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def test_a_prompt_again_computes_its_last_tokens_only(way: dict[str, Any]) -> None:
    """And its answer is the same; so is that of another one that begins alike."""
    prompts = [
        make_prompt(SYSTEM + list(range(20, 50))),
        make_prompt(SYSTEM + list(range(20, 52))),
        make_prompt([*SYSTEM, 99]),
    ]
    with running(is_cached=False, **way) as loop:
        expected = [ask(loop, prompt) for prompt in prompts]
        assert [each.reused for each in expected] == [0, 0, 0]
    with running(is_cached=True, **way) as loop:
        first = [ask(loop, prompt) for prompt in prompts]
        prefilled = loop.scheduler.num_prefilled
        again = [ask(loop, prompt) for prompt in prompts]
        assert first == expected == again
        assert [each.reused for each in first] == [0, 40, 8]
        assert [each.reused for each in again] == [36, 40, 8], "at least the last token is computed"
        assert loop.scheduler.num_prefilled - prefilled == (40 - 36) + (42 - 40) + (11 - 8)
    check_all_is_free(loop)


def test_the_next_turn_of_a_chat_computes_its_new_tokens_only(way: dict[str, Any]) -> None:
    turn = [200, 201, 202]
    with running(is_cached=True, **way) as loop:
        prompt = text([*SYSTEM, 30, 31, 32, 33])
        answer = ask(loop, prompt, max_tokens=10).tokens
        assert len(answer) == 10
        following = text([*SYSTEM, 30, 31, 32, 33, *answer, *turn])
        second = ask(loop, following)
    written = 14 + 9  # the row of the last token is not computed, although it would fill a page
    assert second.reused == written // PAGE * PAGE
    with running(is_cached=False, **way) as loop:
        assert ask(loop, following) == second


def test_a_stopped_answer_is_cached_whole_and_can_be_cut_anywhere(way: dict[str, Any]) -> None:
    """Its last token, too, fills a page: the step that sampled the stop token has computed its row."""
    ids = [*SYSTEM, 30, 31, 32, 33]
    with running(is_cached=False, **way) as loop:
        whole = ask(loop, text(ids), max_tokens=40).tokens
        length = next(n for n in range(2, 40) if (len(ids) + n) % PAGE == 0 and whole[n] not in whole[:n])
        answer, stop = whole[:length], whole[length]
        following = [text([*ids, *answer[:cut], stop, 200, 201]) for cut in range(length + 1)]
        expected = [ask(loop, each) for each in following]
    for cut, (prompt, wanted) in enumerate(zip(following, expected, strict=True)):
        with running(is_cached=True, **way) as loop:
            assert ask(loop, text(ids), max_tokens=40, stop_token_ids=(stop,)).tokens == answer
            found = ask(loop, prompt)
        assert (found, found.reused) == (wanted, (len(ids) + cut) // PAGE * PAGE)


def test_rope_positions_are_part_of_a_page() -> None:
    """The same tokens at other positions, as behind media of another size, share nothing."""
    ids = [*SYSTEM, 30, 31]
    with running(is_cached=True) as loop:
        answer = ask(loop, text(ids, delta=5), max_tokens=10).tokens
        following = [*ids, *answer, 400]
        assert [ask(loop, text(following, delta=delta)).reused for delta in (4, 5)] == [8, 20]


@pytest.mark.parametrize("is_static", [False, True], ids=["host sampling", "device sampling"])
def test_media_of_other_content_share_nothing(is_static: bool) -> None:
    """All their tokens have the same id."""
    ids = [*SYSTEM, *(9 * [77]), 30, 31]
    places = range(10, 19)
    with running(is_cached=False, is_static=is_static) as loop:
        one, two = (ask(loop, with_media(ids, places, picture=picture)) for picture in (1, 2))
        assert one != two
    with running(is_cached=True, is_static=is_static) as loop:
        for reused in (0, 20):  # of the first picture; then again
            found = ask(loop, with_media(ids, places, picture=1))
            assert (found, found.reused) == (one, reused)
        found = ask(loop, with_media(ids, places, picture=2))
        assert (found, found.reused) == (two, 8)
        unknown = replace(with_media(ids, places, picture=1), media_ids=None)
        assert [ask(loop, unknown).reused for _ in range(2)] == [8, 8], (
            "media without a hash are never reused"
        )


def test_a_reused_prompt_has_its_repetition_penalty() -> None:
    """Tokens that no chunk had count, and those of the slot's earlier requests do not."""
    prompt = make_prompt([*SYSTEM, *range(20, 27)])
    other = make_prompt(range(300, 420))
    options = {"is_static": True, "max_prompts": 4}
    with running(is_cached=False, **options) as loop:
        expected = ask(loop, prompt, repetition_penalty=4.0, max_tokens=12)
        assert ask(loop, prompt, max_tokens=12).tokens != expected.tokens
    with running(is_cached=True, **options) as loop:
        for reused in (0, 16):
            found = ask(loop, prompt, repetition_penalty=4.0, max_tokens=12)
            assert (found.tokens, found.reused) == (expected.tokens, reused)
            ask(loop, other, max_tokens=12)


def test_each_prompt_of_a_chunk_has_the_repetition_penalty_of_its_own_reused_tokens() -> None:
    prompts = [make_prompt([*range(start, start + 18)]) for start in (20, 60)]
    stage = make_thinker_stage(max_prompts=4)
    options: dict[str, Any] = {"is_static": True, "max_prompts": 4, "chunk": 16}

    def answers(loop: ThinkerLoop) -> list[Answer]:
        collectors = [submit(loop, each, repetition_penalty=4.0, max_tokens=12) for each in prompts]
        run_until_idle(loop)
        return [result(each) for each in collectors]

    expected = answers(make_thinker_loop(stage, **options))
    loop = make_thinker_loop(stage, **options, prefix_salt=b"model")
    assert [each.reused for each in answers(loop)] == [0, 0]
    calls = loop.scheduler.num_prefilled
    found = answers(loop)
    assert [each.reused for each in found] == [16, 16] and loop.scheduler.num_prefilled == calls + 4
    assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_requests_that_join_and_leave_share_pages(way: dict[str, Any]) -> None:
    """In a pool that a few of them fill, so that pages are evicted, and requests wait for pages in use."""
    random = np.random.default_rng(1)
    heads = [[int(each) for each in random.integers(0, 500, size)] for size in (12, 27, 40)]
    prompts = []
    for number in range(40):
        tail = [int(each) for each in random.integers(0, 500, random.integers(1, 9))]
        prompts.append(make_prompt(heads[number % 3][: random.integers(1, 41)] + tail))
    with running(is_cached=False, **way) as loop:
        expected = [ask(loop, prompt) for prompt in prompts]
    with running(is_cached=True, num_pages=40, **way) as loop:
        reused = 0
        for start in range(0, len(prompts), 10):
            group = list(enumerate(prompts))[start : start + 10]
            collectors = [(number, submit(loop, prompt)) for number, prompt in group]
            leaving = [
                loop.submit(
                    prompt, SamplingParams(max_tokens=40), 1, lambda item: None, keys=loop.page_keys(prompt)
                )
                for _, prompt in group[:2]
            ]
            for job in leaving:
                loop.cancel(job)
            for number, collector in collectors:
                found = result(collector)
                assert found == expected[number], number
                reused += found.reused
        assert reused > 200 and loop.scheduler.pool.num_evicted > 20
        assert loop.scheduler.num_reused >= reused
    check_all_is_free(loop)
    loop.scheduler.check()


def test_equal_prompts_at_once_are_computed_once() -> None:
    """What one of them has computed, the others skip, although it was not there when they were admitted."""
    prompt = make_prompt(range(100))
    with running(is_cached=True) as loop:
        answers = [result(each) for each in [submit(loop, prompt) for _ in range(4)]]
        assert all(each == answers[0] for each in answers)
        assert loop.scheduler.num_prefilled == 100 + 3 * PAGE, "the last page of each prompt is its own"
    check_all_is_free(loop)


@pytest.mark.parametrize("fault", ["fail_on", "nan_on"])
def test_nothing_is_reused_after_a_fault(fault: str) -> None:
    """Pages that were written around it may hold anything."""
    loop = make_thinker_loop(make_thinker_stage(**{fault: 13}), chunk=16, prefix_salt=b"model")
    loop.start()
    try:
        prompt = make_prompt(range(20, 60))
        assert ask(loop, prompt).reused == 0
        assert ask(loop, prompt).reused == 36
        assert isinstance(submit(loop, make_prompt([*range(20, 60), 13])).error(), WorkerError)
        assert loop.scheduler.pool.num_published == 0
        assert ask(loop, prompt).reused == 0
    finally:
        loop.stop(10.0)


def test_requests_without_keys_take_no_part() -> None:
    prompt = make_prompt(range(40))
    with running(is_cached=True) as loop:
        for _ in range(2):
            collector = Collector()
            loop.submit(prompt, SamplingParams(max_tokens=4), 1, collector.put)
            collector.tokens()
            assert {each.reused_tokens for each in collector.items if isinstance(each, TokenItem)} == {0}
        assert loop.scheduler.pool.num_published == 0


@pytest.mark.parametrize("way", WAYS)
def test_what_a_prompt_of_several_chunks_reused_is_counted_whole(way: str) -> None:
    """Its later chunks reuse nothing more, and take nothing from the count of the first."""
    with running(is_cached=True, **WAYS[way]) as loop:
        beginning = list(range(1, 6 * PAGE + 1))
        assert ask(loop, make_prompt(beginning)).reused == 0
        longer = make_prompt([*beginning, *range(100, 180)])  # three chunks and more
        assert ask(loop, longer).reused == len(beginning)
