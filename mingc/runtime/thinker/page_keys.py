"""Keys of KV pages for the prefix cache: equal keys mean equal rows. Imports no torch.

The key of a page is a hash of the previous page's key and of everything else that its rows depend on: token ids, rotary
positions, the embedding kind of each token, and the content of media tokens, which all have the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mingc.prompts.thinker_prompt import ThinkerPrompt

_DIGEST_BYTES = 32


def page_keys(
    prompt: ThinkerPrompt, *, page_size: int, salt: bytes, before: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the full pages of `prompt`. The keys `before` precede them if it is the rest of a longer prompt.

    Stops before the first page with a media token whose content is not known (`ThinkerPrompt.media_ids`). `salt`
    distinguishes models.
    """
    keys = list(before)
    num_tokens = prompt.num_tokens
    rows = prompt.media_rows
    num_known = 0 if prompt.media_ids is None else len(prompt.media_ids)
    if num_known < len(rows):
        num_tokens = int(rows[num_known])
    first_media = np.searchsorted(rows, np.arange(0, num_tokens + 1, page_size))
    key = keys[-1] if keys else hashlib.blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    for page in range(num_tokens // page_size):
        inside = slice(page * page_size, (page + 1) * page_size)
        digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
        digest.update(prompt.input_ids[inside].tobytes())
        digest.update(prompt.positions[:, inside].tobytes())
        digest.update(prompt.embed_kind[inside].tobytes())
        if prompt.media_ids is not None:
            digest.update(prompt.media_ids[first_media[page] : first_media[page + 1]].tobytes())
        key = digest.digest()
        keys.append(key)
    return keys


def answer_keys(
    prompt: ThinkerPrompt, answer: Sequence[int], *, page_size: int, salt: bytes, known: Sequence[bytes]
) -> list[bytes]:
    """Keys of the full pages of `prompt` and the `answer` after it; `known` are the keys of the prompt."""
    whole = prompt.followed_by(answer)
    rest = slice(len(known) * page_size, None)
    media = slice(int(np.searchsorted(prompt.media_rows, rest.start)), None)
    tail = replace(
        whole,
        input_ids=whole.input_ids[rest],
        positions=whole.positions[:, rest],
        embed_kind=whole.embed_kind[rest],
        media_embeds=None,
        media_ids=None if prompt.media_ids is None else prompt.media_ids[media],
    )
    return page_keys(tail, page_size=page_size, salt=salt, before=known)
