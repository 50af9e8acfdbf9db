"""Constrained answers, penalties, biases and log probabilities through the thinker loop, over fake engines.

Expected tokens are computed in numpy from the recorded raw logits of the answer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from collector import Collector
from fake_thinker import CONTEXT, PAGE, VOCAB, make_prompt, make_thinker_loop, make_thinker_stage
from hand_run import run_step, run_until_idle
from sampling_reference import WalkMatcher, check_greedy

from mingc.errors import RequestError, WorkerError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import FailedItem, TokenItem
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.running_chat import RunningChat
from mingc.runtime.thinker.worker import LaunchedTokens

PROMPTS = [
    make_prompt([3, 1, 4, 1, 5]),
    make_prompt(list(range(40, 110)), media=[10, 11, 12, 50], rope_delta=-3),
    make_prompt([9] * 33),
    make_prompt([2, 7, 1, 8, 2, 8], media=[1, 2]),
    make_prompt([100]),
    make_prompt(list(range(200, 260))),
]
STOP = 77
HOST_OR_DEVICE = pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
# Rules of six requests that run together: constrained or not, with penalties, random or not.
RULES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"max_tokens": 70}, {}),
    ({"max_tokens": 60, "temperature": 0.8, "repetition_penalty": 1.2, "num_logprobs": 3}, None),
    ({"max_tokens": 90, "presence_penalty": 0.5, "frequency_penalty": 0.4, "num_logprobs": 0}, {"after": 4}),
    ({"max_tokens": 90, "temperature": 1.1, "top_p": 0.9}, {"stop_after": 65}),
    (
        {"max_tokens": 75, "frequency_penalty": 1.5, "repetition_penalty": 1.4, "banned_tokens": (5, 6)},
        None,
    ),
    (
        {"max_tokens": 55, "logit_bias": ((11, 4.0), (12, -100.0)), "num_logprobs": 20},
        {"stop_after": 40, "last": STOP},
    ),
]


def ask(
    loop: ThinkerLoop,
    prompt: ThinkerPrompt,
    *,
    matcher: WalkMatcher | None = None,
    seed: int = 5,
    keys: bool = False,
    **params: Any,
) -> Collector:
    collector = Collector()
    collector.job = loop.submit(  # type: ignore[attr-defined]
        prompt,
        SamplingParams(**{"max_tokens": 9, **params}),
        seed,
        collector.put,
        keys=loop.page_keys(prompt) if keys else None,
        recorder=collector.recorder,
        matcher=matcher,
    )
    return collector


def finish_of(answer: Collector) -> str | None:
    item = answer.items[-1]
    assert isinstance(item, TokenItem)
    return item.finish


@HOST_OR_DEVICE
@pytest.mark.parametrize(
    ("options", "finish", "count"),
    [
        ({}, "length", 20),
        ({"stop_after": 1}, "stop", 1),
        ({"stop_after": 7}, "stop", 7),
        ({"stop_after": 20}, "stop", 20),
        ({"stop_after": 0, "last": STOP}, "stop", 0),
        ({"stop_after": 7, "last": STOP}, "stop", 7),
        ({"after": 5, "stop_after": 9, "last": STOP}, "stop", 9),
    ],
)
def test_a_constrained_answer_has_the_most_likely_allowed_tokens(
    is_static: bool, options: dict[str, Any], finish: str, count: int
) -> None:
    """From the first token on; it ends where the matcher stops, at an allowed stop token, or is cut off."""
    loop = make_thinker_loop(is_static=is_static, stop_ids=[STOP])
    before = loop.held
    matcher = WalkMatcher(VOCAB, **options)
    answer = ask(loop, PROMPTS[0], matcher=matcher, max_tokens=20)
    run_until_idle(loop)
    tokens = answer.tokens()
    assert (len(tokens), finish_of(answer), matcher.tokens) == (count, finish, tokens)
    if tokens:
        check_greedy(answer, PROMPTS[0], SamplingParams(), WalkMatcher(VOCAB, **options))
    asked = len(tokens) - options.get("after", 0) + ("last" in options)
    assert matcher.num_filled == asked, "once for every constrained token"
    assert loop.held == before


@HOST_OR_DEVICE
@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -2.0, "presence_penalty": -0.5},
        {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.3, "min_tokens": 25},
        {"frequency_penalty": 0.05, "repetition_penalty": 0.5},
        {"logit_bias": ((11, 100.0), (12, -100.0))},
        {"logit_bias": ((11, 1.0), (12, 1.25)), "banned_tokens": (11,)},
        {"num_logprobs": 20, "frequency_penalty": 1.0},
        {"num_logprobs": 0},
        {"num_logprobs": 5, "banned_tokens": (3,), "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_answers_follow_the_rules_written_in_numpy(is_static: bool, params: dict[str, Any]) -> None:
    """Also in a slot that an answer with counted tokens has left, and with prompts in several chunks."""
    loop = make_thinker_loop(is_static=is_static, stop_ids=[STOP, 11], max_running=2, chunk=8)
    asked = [ask(loop, each, max_tokens=30, **params) for each in PROMPTS[:4]]
    run_until_idle(loop)
    rules = SamplingParams(**params)
    for answer, prompt in zip(asked, PROMPTS, strict=False):
        if answer.tokens():
            check_greedy(answer, prompt, rules, stop_ids=(STOP, 11))


@HOST_OR_DEVICE
def test_a_constraint_is_stronger_than_min_tokens_and_bans(is_static: bool) -> None:
    """Where the answer is complete, nothing but the stop token may come; elsewhere bans count."""
    loop = make_thinker_loop(is_static=is_static, stop_ids=[STOP])
    matcher = WalkMatcher(VOCAB, stop_after=3, last=STOP)
    banned = tuple(sorted(matcher.allowed([]) or ()))[1:]  # all but one of the first tokens that it allows
    rules = {"min_tokens": 9, "banned_tokens": banned, "logit_bias": tuple((t, -100.0) for t in range(300))}
    answer = ask(loop, PROMPTS[2], matcher=matcher, **rules)
    run_until_idle(loop)
    assert (len(answer.tokens()), finish_of(answer)) == (3, "stop")
    check_greedy(answer, PROMPTS[2], SamplingParams(**rules), WalkMatcher(VOCAB, stop_after=3, last=STOP))


def submit_rules(loop: ThinkerLoop, number: int, *, keys: bool = False) -> Collector:
    params, options = RULES[number]
    matcher = None if options is None else WalkMatcher(VOCAB, **options)
    return ask(loop, PROMPTS[number], matcher=matcher, seed=number, keys=keys, **params)


def result(answer: Collector) -> tuple[list[int], list[list[float]], list[object]]:
    return (
        answer.tokens(),
        [each.tolist() for each in answer.recorder.logits],
        [(each.finish, each.logprobs) for each in answer.items if isinstance(each, TokenItem)],
    )


def alone(make: Callable[[], ThinkerLoop], *, keys: bool = False) -> list[Any]:
    answers = []
    for number in range(len(RULES)):
        loop = make()
        answer = submit_rules(loop, number, keys=keys)
        run_until_idle(loop)
        answers.append(result(answer))
    return answers


def test_host_and_device_give_the_same_answers() -> None:
    host, device = (
        alone(partial(make_thinker_loop, is_static=each, stop_ids=[STOP])) for each in (False, True)
    )
    assert [each[0] for each in host] == [each[0] for each in device]
    # The constraint of the third one allows the stop token once.
    assert [len(tokens) for tokens, _, _ in host] == [70, 60, 43, 65, 75, 40]
    for number, (tokens, logits, found) in enumerate(host):
        assert found == device[number][2] and logits == device[number][1], len(tokens)


@HOST_OR_DEVICE
@pytest.mark.parametrize("max_prompts", [1, 4])
def test_constrained_and_free_answers_in_one_batch_are_those_of_each_alone(
    is_static: bool, max_prompts: int
) -> None:
    make = partial(make_thinker_loop, is_static=is_static, max_prompts=max_prompts, stop_ids=[STOP])
    loop = make()
    before = loop.held
    answers = []
    for number in range(len(RULES)):
        answers.append(submit_rules(loop, number))
        for _ in range(number):
            run_step(loop)
    run_until_idle(loop)
    assert [result(each) for each in answers] == alone(make)
    assert loop.held == before


@HOST_OR_DEVICE
@pytest.mark.parametrize("is_cached", [False, True], ids=["no prefix cache", "prefix cache"])
def test_preempted_answers_keep_their_constraints_and_counts(
    is_static: bool, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_thinker_stage(max_prompts=4)
    options: dict[str, Any] = {"is_static": is_static, "max_prompts": 4, "stop_ids": [STOP]}
    if is_cached:
        options["prefix_salt"] = b"model"
    expected = alone(partial(make_thinker_loop, stage, **options), keys=is_cached)
    loop = make_thinker_loop(stage, num_pages=CONTEXT // PAGE + 1, **options)
    before, answers = loop.held, []
    preempted: set[int] = set()
    begin_again = RunningChat.begin_again

    def note(chat: RunningChat) -> None:
        if chat.answer:
            preempted.add(chat.row.seed)
        begin_again(chat)

    monkeypatch.setattr(RunningChat, "begin_again", note)
    for number in (1, 0, 3, 4, 2, 5):
        answers.append((number, submit_rules(loop, number, keys=is_cached)))
        for _ in range(3):
            run_step(loop)
    run_until_idle(loop)
    assert preempted >= {2, 4} and preempted & {0, 3, 5}, "with counts, and with masks"
    assert [result(each) for _, each in sorted(answers, key=lambda pair: pair[0])] == expected
    assert loop.held == before
    loop.scheduler.check()


@HOST_OR_DEVICE
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_cancelling_a_constrained_answer_frees_everything(is_static: bool, num_steps: int) -> None:
    loop = make_thinker_loop(is_static=is_static, max_running=2)
    before = loop.held
    free = ask(loop, PROMPTS[1], max_tokens=20)
    cancelled = ask(loop, PROMPTS[0], matcher=WalkMatcher(VOCAB), max_tokens=80, frequency_penalty=1.0)
    for _ in range(num_steps):
        run_step(loop)
    items = list(cancelled.items)
    loop.cancel(cancelled.job)  # type: ignore[attr-defined]
    following = ask(loop, PROMPTS[2], frequency_penalty=0.5, max_tokens=12)  # takes its slot
    run_until_idle(loop)
    assert cancelled.items == items
    check_greedy(free, PROMPTS[1], SamplingParams())
    check_greedy(following, PROMPTS[2], SamplingParams(frequency_penalty=0.5))
    assert loop.held == before


@HOST_OR_DEVICE
@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("method", ["is_active", "fill", "accept", "empty"])
def test_a_matcher_that_fails_fails_its_answer_alone(is_static: bool, method: str, place: int) -> None:
    loop = make_thinker_loop(is_static=is_static, max_prompts=4)
    before = loop.held
    neighbours = [ask(loop, PROMPTS[0], max_tokens=20), ask(loop, PROMPTS[3], matcher=WalkMatcher(VOCAB))]
    failing = ask(loop, PROMPTS[4], matcher=WalkMatcher(VOCAB, fails=(method, place)))
    run_until_idle(loop)
    error = failing.error()
    assert isinstance(error, WorkerError)
    assert ("allows no token" if method == "empty" else method) in error.message
    assert len(failing.items) == place + 1, "the tokens before it, and one error"
    assert isinstance(failing.items[-1], FailedItem)
    check_greedy(neighbours[0], PROMPTS[0], SamplingParams())
    check_greedy(neighbours[1], PROMPTS[3], SamplingParams(), WalkMatcher(VOCAB))
    assert loop.held == before


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_a_step_that_fails_after_a_matcher_did_fails_the_others_once(
    is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_thinker_loop(is_static=is_static, max_prompts=4)
    before = loop.held
    names = ("prefill", "launch_prefill")
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("launch failure")

        for name in names:
            patch.setattr(loop.runner, name, fail)
        failing = [
            ask(loop, PROMPTS[4], matcher=WalkMatcher(VOCAB, fails=("fill", 0))),
            ask(loop, PROMPTS[0]),
        ]
        run_until_idle(loop)
    assert [len(each.items) for each in failing] == [1, 1]
    assert "launch failure" in failing[1].error().message
    later = ask(loop, PROMPTS[3], matcher=WalkMatcher(VOCAB))
    run_until_idle(loop)
    check_greedy(later, PROMPTS[3], SamplingParams(), WalkMatcher(VOCAB))
    assert loop.held == before


@pytest.mark.parametrize("is_alone", [True, False])
def test_layers_are_launched_before_the_token_that_the_mask_needs_is_known(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every step is launched while one is in flight, for free neighbours as for the constrained answer."""
    loop = make_thinker_loop(is_static=True, max_prompts=4)
    calls: list[str] = []

    def note(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return run(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    matcher = WalkMatcher(VOCAB)
    asked = [ask(loop, PROMPTS[0], matcher=matcher, max_tokens=4)]
    asked += [] if is_alone else [ask(loop, PROMPTS[4], max_tokens=4)]
    for owner, name in ((loop.runner, "decode"), (loop.runner, "launch_sampling"), (loop.runner, "launch_prefill"),
                        (LaunchedTokens, "wait"), (matcher, "fill"), (matcher, "accept")):  # fmt: skip
        note(owner, name)
    run_until_idle(loop)
    step = ["decode", "wait", "accept", "fill", "launch_sampling"]
    assert calls == ["fill", "launch_prefill", *step * 3, "wait", "accept"]
    for answer, prompt, walk in zip(
        asked, (PROMPTS[0], PROMPTS[4]), (WalkMatcher(VOCAB), None), strict=False
    ):
        assert len(answer.tokens()) == 4
        check_greedy(answer, prompt, SamplingParams(), walk)


def test_steps_without_edits_run_no_further_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What today's requests need is what runs: no edit, no count, no log probability."""
    loop = make_thinker_loop(is_static=True)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is edited")

    for name in ("edit_", "count", "begin_counts"):
        monkeypatch.setattr(f"mingc.runtime.thinker.device_sampler.DeviceSampler.{name}", refuse)
    monkeypatch.setattr("mingc.runtime.thinker.worker.top_logprobs", refuse)
    rules: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2, "min_tokens": 4, "banned_tokens": (3,)}]
    answers = [ask(loop, PROMPTS[0], temperature=0.7, top_k=5, **each) for each in rules]
    run_until_idle(loop)
    assert [len(each.tokens()) for each in answers] == [9, 9]


@HOST_OR_DEVICE
@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": ((4, 1.0), (VOCAB, 1.0))}, f"logit_bias.{VOCAB}"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias.-1"),
        ({"stop_token_ids": tuple(range(19)), "banned_tokens": (30,)}, "stop_token_ids"),
    ],
)
def test_rules_that_the_model_cannot_follow_are_refused(
    is_static: bool, params: dict[str, Any], param: str
) -> None:
    loop = make_thinker_loop(is_static=is_static, stop_ids=[STOP])
    with pytest.raises(RequestError) as caught:
        ask(loop, PROMPTS[0], **params)
    assert caught.value.param == param
