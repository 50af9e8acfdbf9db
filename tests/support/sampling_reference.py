"""Rules of sampling written in numpy, token by token, and a matcher whose mask depends on every token before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from collector import Collector
from numpy.typing import NDArray

from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.thinker.token_matcher import MaskWords

Floats = NDArray[np.float64]


def edited(
    raw: NDArray[np.float32],
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    banned: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> Floats:
    """Logits (V,) that a token is chosen from: -inf for tokens that cannot be."""
    logits = [float(value) for value in raw]
    for token in {*prompt, *answer}:
        value, penalty = logits[token], params.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in {*answer}:
        count = [*answer].count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias if bias > -100 or allowed is not None else -np.inf
    free = {*range(len(logits))} if allowed is None else {*allowed}
    free = free - {*banned} or free  # a constraint is stronger than a ban
    return np.array([value if token in free else -np.inf for token, value in enumerate(logits)])


def logprobs(raw: NDArray[np.float32]) -> Floats:
    """Log-softmax (V,) in float64."""
    shifted = raw.astype(np.float64) - raw.max()
    found: Floats = shifted - np.log(np.exp(shifted).sum())
    return found


def most_likely(raw: NDArray[np.float32], count: int) -> list[int]:
    """Tokens by descending logit, equal ones in order of id."""
    return sorted(range(len(raw)), key=lambda token: (-raw[token], token))[:count]


def check_greedy(
    answer: Collector,
    prompt: ThinkerPrompt,
    params: SamplingParams,
    matcher: WalkMatcher | None = None,
    stop_ids: tuple[int, ...] = (),
) -> None:
    """Every token has the highest logit after the rules, and the log probabilities that were asked for."""
    tokens, rows = answer.tokens(), answer.recorder.logits
    assert len(rows) == len(tokens) > 0
    items = [each for each in answer.items if isinstance(each, TokenItem) and each.token is not None]
    for place, (token, raw) in enumerate(zip(tokens, rows, strict=True)):
        before = tokens[:place]
        banned = {*params.banned_tokens, *(stop_ids if place < params.min_tokens else ())}
        allowed = None if matcher is None else matcher.allowed(before)
        logits = edited(raw, prompt.input_ids.tolist(), before, params, banned=banned, allowed=allowed)
        assert token == logits.argmax(), place
        check_logprobs(items[place], raw, params)


def check_logprobs(item: TokenItem, raw: np.ndarray, params: SamplingParams) -> None:
    if params.num_logprobs is None:
        assert item.logprobs is None
        return
    assert item.logprobs is not None and item.token is not None
    expected = logprobs(raw)
    top = most_likely(raw, params.num_logprobs)
    assert [token for token, _ in item.logprobs.top] == top
    values = [item.logprobs.logprob, *(value for _, value in item.logprobs.top)]
    np.testing.assert_allclose(values, expected[[item.token, *top]], atol=1e-5)


class WalkMatcher:
    """Allows five tokens that depend on all tokens so far, and notes what it is asked.

    It checks the calls: a mask is filled at most once for every token, and only allowed tokens come.

    Args:
        after: it becomes active after so many tokens.
        stop_after: the answer is complete after so many tokens; before, `last` is allowed alone.
        last: a token (such as a stop token) that may only come in the end.
        fails: name of the method that raises, and at which token.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        after: int = 0,
        stop_after: int | None = None,
        last: int | None = None,
        fails: tuple[str, int] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._after, self._stop_after, self._last = after, stop_after, last
        self._fails = fails
        self.tokens: list[int] = []
        self.num_filled = 0

    def allowed(self, tokens: Sequence[int]) -> set[int] | None:
        """The tokens that may follow `tokens`; None: all."""
        if len(tokens) < self._after:
            return None
        if self._last is not None and self._stop_after == len(tokens):
            return {self._last}
        seed = sum((place + 1) * token for place, token in enumerate(tokens))
        return {(17 * seed + 101 * each + 5) % self._vocab_size for each in range(5)}

    def _check(self, name: str) -> None:
        if self._fails == (name, len(self.tokens)):
            raise KeyError(name)

    @property
    def is_active(self) -> bool:
        self._check("is_active")
        return self.allowed(self.tokens) is not None

    @property
    def is_stopped(self) -> bool:
        return self._last is None and len(self.tokens) == self._stop_after

    def fill(self, words: MaskWords) -> None:
        self._check("fill")
        assert not self.is_stopped and self.is_active, "there is nothing to ask"
        allowed = self.allowed(self.tokens)
        assert allowed is not None
        bits = np.zeros(32 * len(words), bool)
        if self._fails != ("empty", len(self.tokens)):
            bits[[*allowed]] = True
        words[:] = np.packbits(bits, bitorder="little").view("<i4")
        self.num_filled += 1

    def accept(self, token: int) -> None:
        self._check("accept")
        allowed = self.allowed(self.tokens)
        assert not self.is_stopped and (allowed is None or token in allowed)
        self.tokens.append(token)
