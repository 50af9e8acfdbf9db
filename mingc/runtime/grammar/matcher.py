"""The matcher of one answer: which tokens its grammar allows next."""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from mingc.errors import RequestError
from mingc.runtime.request import Constraint

# CPU time on the thinker's thread. Ordinary masks take 0.01 to 0.1 ms of a token, some of a large vocabulary 5 ms.
_SECONDS_PER_TOKEN = 0.005
_MAX_SECONDS_LEFT = 0.2


class GrammarMatcher:
    """A `TokenMatcher` of the thinker.

    What it takes of the thinker's thread delays all answers: one that takes too long fails.
    """

    def __init__(self, matcher: LLMatcher, constraint: Constraint) -> None:
        self._constraint = constraint
        self._initial = matcher
        self._matcher = matcher.deep_copy()
        self._seconds_left = _MAX_SECONDS_LEFT
        self.is_active = constraint.after is None

    @property
    def is_stopped(self) -> bool:
        return self._constraint.after is None and self._matcher.is_stopped()

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the tokens that may come next. Raises: RequestError when the grammar is too complex."""
        begin = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(begin + _SECONDS_PER_TOKEN)

    def accept(self, token: int) -> None:
        """Advance by a token. Raises: RequestError when the grammar is too complex."""
        if self.is_active:
            begin = time.thread_time()
            self._matcher.consume_token(token)
            self._check(begin)
            self.is_active = self._constraint.after is None or not self._matcher.is_stopped()
        elif token == self._constraint.after:
            self._matcher = self._initial.deep_copy()
            self.is_active = True

    def _check(self, begin: float) -> None:
        left = self._seconds_left - (time.thread_time() - begin)
        self._seconds_left = min(left, _MAX_SECONDS_LEFT)
        if self._matcher.is_error() or left < 0:
            why = brief(self._matcher.get_error()) or "finding the next token takes too long"
            raise RequestError(
                f"the answer cannot be continued by the grammar of '{self._constraint.param}': {why}",
                fix="send a simpler one",
                param=self._constraint.param,
                code="constraint_too_complex",
            )


def brief(error: str) -> str:
    """An error of llguidance, in which `get_error` marks that it left out the details."""
    plain = " ".join(error.replace("<non-verbose/>", "").split())[:500]
    return "it allows no answer" if plain == "NoExtensionBias" else plain
