"""Prompts of pictures in the thinker loop: the answer is the hidden rows of their queries, whatever runs beside them.

The fake engines give a row the value of its token or embedding, and its positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from collector import Collector
from fake_thinker import HIDDEN, PAGE, make_prompt, make_thinker_loop, make_thinker_stage
from hand_run import run_step, run_until_idle

from mingc.errors import RequestError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import FailedItem, HiddenRowsItem
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.scheduler import ThinkerPlan

SLOW_CHUNKS = ChunkedPrefillPolicy(
    num_layer_groups=3, latency_model=StepLatencyModel(chunks=((64, 90.0),), decodes=((8, 1.0),))
)
WAYS: dict[str, dict[str, Any]] = {
    "host samples": {},
    "device samples": {"is_static": True},
    "chunks of 3": {"is_static": True, "chunk": 3},
    "shared chunks": {"is_static": True, "max_prompts": 4},
    "shared chunks, host samples": {"max_prompts": 4},
    "two batches": {"is_static": True, "two_batch_overlap": True},
    "two batches, host samples": {"two_batch_overlap": True},
    "layer groups": {"is_static": True, "chunk": 8, "num_layers": 3, "prefill_policy": SLOW_CHUNKS},
}
CHATS = [
    make_prompt([3, 1, 4, 1, 5]),
    make_prompt(list(range(40, 110)), media=[10, 11, 50]),
    make_prompt([9] * 33),
]
BLOCK = 20  # the first query of the long prompt, on the border of a page


def drawing(first: int = BLOCK, count: int = 50, media: range = range(3, 9)) -> ThinkerPrompt:
    """A prompt with a reference picture, `count` queries from token `first` on, and an end token."""
    ids = [*range(100, 100 + first), *[7] * count, 8]
    prompt = make_prompt(ids, media=[*media, *range(first, first + count)])
    known = np.array([[1, place] for place in range(len(media))], np.uint8)
    return replace(prompt, queries=(first, first + count), media_ids=known if len(media) else None)


SHORT = drawing(4, 3, range(0))


def expected(prompt: ThinkerPrompt) -> np.ndarray:
    """Value and position (Q, 2) of each query, as `fake_thinker` defines them."""
    assert prompt.media_embeds is not None and prompt.queries is not None
    rows = np.arange(*prompt.queries)
    embeds = prompt.media_embeds[len(prompt.media_rows) - len(rows) :].double().sum(1).numpy()
    values = np.round(embeds * 64) + 1000 * prompt.embed_kind[rows]
    return np.stack([values, prompt.positions[:, rows].sum(0)], axis=1)


def make_loop(way: str, **options: Any) -> ThinkerLoop:
    chosen = {**WAYS[way], **options}
    stage = make_thinker_stage(
        num_layers=chosen.pop("num_layers", 1),
        max_prompts=chosen.get("max_prompts", 1),
        nan_on=501,
        fail_on=502,
    )
    return make_thinker_loop(stage, **chosen)


class Picture(Collector):
    """A picture's prompt in a loop."""

    def __init__(self, loop: ThinkerLoop, prompt: ThinkerPrompt) -> None:
        super().__init__()
        self.prompt = prompt
        self.job = loop.submit_queries(prompt, self.put, keys=loop.page_keys(prompt))

    def check(self, reused: int = 0) -> None:
        (item,) = self.items
        assert isinstance(item, HiddenRowsItem), item
        assert item.residual.shape == item.delta.shape == (len(expected(self.prompt)), HIDDEN)
        assert item.residual.dtype == item.delta.dtype == torch.float32
        assert np.array_equal((item.residual + item.delta)[:, :2].numpy(), expected(self.prompt))
        assert item.reused_tokens == reused and item.begun_at is not None


def chat(loop: ThinkerLoop, prompt: ThinkerPrompt, max_tokens: int = 12) -> Collector:
    collector = Collector()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8)
    loop.submit(prompt, sampling, 5, collector.put, keys=loop.page_keys(prompt))
    return collector


@pytest.mark.parametrize("way", WAYS)
def test_pictures_get_the_rows_of_their_queries_and_chats_the_tokens_that_they_get_alone(way: str) -> None:
    alone = []
    for prompt in CHATS:
        loop = make_loop(way)
        answer = chat(loop, prompt)
        run_until_idle(loop)
        alone.append(answer.tokens())
    loop = make_loop(way)
    before, answers, pictures = loop.held, [], []
    for prompt in CHATS:
        pictures += [Picture(loop, SHORT), Picture(loop, drawing())]
        answers.append(chat(loop, prompt))
        for _ in range(3):
            run_step(loop)
    run_until_idle(loop)
    for picture in pictures:
        picture.check()
    assert [answer.tokens() for answer in answers] == alone
    assert loop.held == before
    loop.scheduler.check()


@pytest.mark.parametrize("way", ["device samples", "host samples", "layer groups"])
def test_a_preempted_picture_begins_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: before it has any rows, with some of them, and when the host has not collected the last ones."""
    moments = set()
    for num_pages in range(40, 49, 4):
        loop = make_loop(way, num_pages=num_pages, chunk=8 if way == "layer groups" else 4)
        plan = loop.scheduler.plan

        def note(loop: ThinkerLoop = loop, plan: Any = plan) -> ThinkerPlan:
            made: ThinkerPlan = plan()
            for request in made.preempted:
                running = loop._requests[request]
                if running.prompt.queries is not None:
                    moments.add((bool(running.hidden), bool(running.pending)))
            return made

        monkeypatch.setattr(loop.scheduler, "plan", note)
        answers = [chat(loop, CHATS[0], 70), chat(loop, CHATS[2], 40)]
        for _ in range(3):
            run_step(loop)
        picture = Picture(loop, drawing(40, 50))
        run_until_idle(loop)
        picture.check()
        assert [len(each.tokens()) for each in answers] == [70, 40]
        assert not loop.held["chats"]
        loop.scheduler.check()
    wanted = {(False, False), (True, False)} | ({(True, True)} if way == "device samples" else set())
    assert moments >= wanted, moments


@pytest.mark.parametrize(
    ("way", "first"),
    [("device samples", BLOCK), ("host samples", BLOCK + PAGE - 1), ("two batches", BLOCK + PAGE - 1)],
)
def test_the_prefix_cache_serves_what_is_before_the_queries_and_nothing_else(way: str, first: int) -> None:
    """Queries have no content that another prompt could have, so pages with one of them are never shared."""
    loop = make_loop(way, prefix_salt=b"model")
    prompt = drawing(first)
    other = replace(prompt, media_embeds=prompt.media_embeds + 1 if prompt.media_embeds is not None else None)
    seen = replace(
        prompt, queries=None, media_ids=np.array([[1, place] for place in range(56)], np.uint8)
    )  # a chat with a picture at the same place
    for each, reused in ((prompt, 0), (prompt, BLOCK), (other, BLOCK)):
        picture = Picture(loop, each)
        run_until_idle(loop)
        picture.check(reused)
    assert BLOCK % PAGE == 0
    answer = chat(loop, seen)
    run_until_idle(loop)
    assert {getattr(item, "reused_tokens", None) for item in answer.items} == {BLOCK}


@pytest.mark.parametrize("way", ["device samples", "host samples", "layer groups"])
def test_a_cancelled_or_failed_picture_leaves_nothing_and_others_go_on(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(way, chunk=8)
    before = loop.held
    answer, cancelled = chat(loop, CHATS[0]), Picture(loop, drawing())
    for _ in range(4):
        run_step(loop)
    loop.cancel(cancelled.job)
    ids = drawing().input_ids.copy()
    broken = []
    for token in (501, 502):  # logits that are not finite, an engine that fails
        ids[1] = token
        broken.append(Picture(loop, replace(drawing(), input_ids=ids.copy())))
    good = Picture(loop, drawing())
    run_until_idle(loop)
    assert not cancelled.items and len(answer.tokens()) == 12
    good.check()
    for each in broken:
        (item,) = each.items
        assert isinstance(item, FailedItem)
    nothing = torch.full((2, 50, HIDDEN), torch.nan)
    monkeypatch.setattr(loop.runner, "take_rows", lambda tokens: AsyncHostCopy(nothing[:, : len(tokens)]))
    spoiled = Picture(loop, drawing())
    run_until_idle(loop)
    assert "hidden rows are not finite" in spoiled.error().message
    assert loop.held == before


def test_a_prompt_beyond_the_context_is_refused() -> None:
    loop = make_loop("host samples")
    with pytest.raises(RequestError, match="context holds 256"):
        Picture(loop, drawing(206))
