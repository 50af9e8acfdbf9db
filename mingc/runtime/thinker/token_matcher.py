"""What the thinker asks of the grammar of one answer: which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Bits of tokens that may come next: token t is allowed if bit t % 32 of word t // 32 is set.
MaskWords = NDArray[np.int32]


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


class TokenMatcher(Protocol):
    """State of the constraint of one answer. The thinker thread calls it; one matcher serves one answer.

    For each token of the answer: `is_active`, `fill` if it is, and `accept` of the token that was sampled, also while
    the matcher is not active. No method is called after `is_stopped`. Whatever a method raises fails this answer alone.
    """

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is complete: no token may follow."""
        ...

    def fill(self, words: MaskWords) -> None:
        """Write the tokens that may come next into `words` (ceil(V / 32),), stop tokens only where it may end.

        Sets all words; bits of tokens beyond the vocabulary are ignored. At least one token is allowed.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance by a sampled token of the answer; stop tokens that end it are passed, too."""
        ...
