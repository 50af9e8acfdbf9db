"""Two real ranks: rank 0 alone edits logits, and both go on with its tokens. The recorded logits check every choice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import sampling_reference
from collector import Collector
from mingc_command import ENVIRONMENT
from recorded_thinker import CASES, THINKER, thinker_prompt
from sampling_reference import WalkMatcher

from mingc.runtime.request import SamplingParams
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.worker import StepOptions

_RULES = (
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=8, ignore_eos=True, frequency_penalty=2.0, repetition_penalty=1.5),
    SamplingParams(max_tokens=7, ignore_eos=True, logit_bias=((3, 100.0),), num_logprobs=2),
)


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_two_ranks_sample_edited_answers_of_one_batch(
    is_static: bool, two_rank_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rank 1 went on with another token, the next logits would differ from those of a prefill of all tokens."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    options = EngineOptions(
        max_total_tokens=2048, steps=StepOptions(is_static=is_static), loads_speech=False, prefix_cache=False
    )
    service = open_service(two_rank_artifact, options)
    try:
        loop = service.thinker
        assert loop is not None and isinstance(loop.runner, RankGroup)
        vocab_size = THINKER["text.greedy_logits"].shape[-1]

        def ask(case: str, sampling: SamplingParams, *, is_constrained: bool = False) -> Collector:
            answer = Collector()
            loop.submit(
                thinker_prompt(case),
                sampling,
                1,
                answer.put,
                recorder=answer.recorder,
                matcher=WalkMatcher(vocab_size) if is_constrained else None,
            )
            return answer

        # The last answer takes the tokens that a constraint chose, so its prompt is what both ranks have read.
        asked = [
            (case, rules, is_constrained, ask(case, rules, is_constrained=is_constrained))
            for case in CASES[:2]
            for rules in _RULES
            for is_constrained in (False, True)
        ]
        for case, rules, is_constrained, answer in asked:
            tokens = answer.tokens()
            assert len(tokens) == rules.max_tokens
            prompt = THINKER[f"{case}.input_ids"][0].tolist()
            for place, raw in enumerate(answer.recorder.logits):
                allowed = WalkMatcher(vocab_size).allowed(tokens[:place]) if is_constrained else None
                edited = sampling_reference.edited(raw, prompt, tokens[:place], rules, allowed=allowed)
                assert tokens[place] == edited.argmax()
            if case == "text":
                again = Collector()
                continued = thinker_prompt(case).followed_by(tokens[:-1])
                last = SamplingParams(max_tokens=1, ignore_eos=True)
                loop.submit(continued, last, 1, again.put, recorder=again.recorder)
                again.tokens()
                np.testing.assert_allclose(again.recorder.logits[0], answer.recorder.logits[-1], atol=1e-3)
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
