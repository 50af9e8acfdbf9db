"""What the thinker asks of the grammar of one answer: which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Bits of tokens that may come next: token t is allowed if bit t % 32 of word t // 32 is set.
MaskWords = NDArray[np.int32]


def full_mask(vocab_size: int) -> MaskWords:
    """A mask (ceil(V / 32),) that allows every token of the vocabulary, and no bit beyond it."""
    bits = np.arange(32 * -(-vocab_size // 32)) < vocab_size
    words: MaskWords = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return words


class TokenMatcher(Protocol):
    """State of the constraint of one answer. The thinker thread calls it; one matcher serves one answer.

    For each token of the answer: `fill` if the matcher `is_active`, and `accept` of the token that was sampled, also
    while it is not active. A stop token ends the answer and is not passed to it. Nothing is called after `is_stopped`.
    Whatever a method raises fails this answer alone.
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
        """Write the tokens that may come next into `words` (ceil(V / 32),), stop tokens only where the answer may end.

        Sets all words; bits beyond the vocabulary are ignored. At least one token is allowed.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance by a sampled token of the answer."""
        ...
