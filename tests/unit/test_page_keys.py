"""Keys of KV pages: equal for equal rows only, and a page's key covers everything before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.thinker.page_keys import answer_keys, page_keys

PAGE = 4
IDS = list(range(100, 119))
MEDIA = range(6, 13)  # from the second page to the fourth


def prompt_of(ids: list[int] = IDS, *, media: range = range(0)) -> ThinkerPrompt:
    kinds = np.zeros(len(ids), np.int64)
    kinds[list(media)] = 1
    hashes = np.array([[5, place] for place in range(len(media))], np.uint8)
    return ThinkerPrompt(
        input_ids=np.array(ids),
        positions=np.tile(np.arange(len(ids)), (3, 1)),
        rope_delta=0,
        embed_kind=kinds,
        media_ids=hashes if len(media) else None,
    )


def keys(prompt: ThinkerPrompt, salt: bytes = b"model") -> list[bytes]:
    return page_keys(prompt, page_size=PAGE, salt=salt)


def num_equal(one: list[bytes], other: list[bytes]) -> int:
    """Number of leading pages with equal keys; no page behind them may have one of the other's keys."""
    count = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    assert not {*one[count:]} & {*other}
    return count


def changed(name: str, place: tuple[int, ...], prompt: ThinkerPrompt) -> ThinkerPrompt:
    values = np.array(getattr(prompt, name))
    values[place] += 1
    return replace(prompt, **{name: values})


def test_only_full_pages_have_keys() -> None:
    assert [len(keys(prompt_of(IDS[:count]))) for count in (1, 3, 4, 7, 8, 19)] == [0, 0, 1, 1, 2, 4]
    assert len({*keys(prompt_of())}) == 4
    assert keys(prompt_of(IDS[:9])) == keys(prompt_of())[:2], "a prompt that goes on begins alike"


@pytest.mark.parametrize(
    ("name", "place", "same"),
    [
        ("input_ids", (0,), 0),
        ("input_ids", (7,), 1),
        ("input_ids", (15,), 3),
        ("input_ids", (16,), 4),
        ("positions", (0, 8), 2),
        ("positions", (2, 8), 2),
        ("embed_kind", (6,), 1),
        ("media_ids", (0, 0), 1),  # token 6
        ("media_ids", (1, 1), 1),
        ("media_ids", (2, 0), 2),  # token 8
        ("media_ids", (6, 1), 3),  # token 12
    ],
)
def test_everything_that_a_row_depends_on_is_in_its_key(name: str, place: tuple[int, ...], same: int) -> None:
    prompt = prompt_of(media=MEDIA)
    assert num_equal(keys(prompt), keys(changed(name, place, prompt))) == same


def test_a_prompt_with_media_may_end_with_a_full_page() -> None:
    longer = prompt_of(media=MEDIA)
    assert keys(prompt_of(IDS[:16], media=MEDIA)) == keys(longer)[:4]


def test_models_share_nothing() -> None:
    assert num_equal(keys(prompt_of()), keys(prompt_of(), salt=b"other")) == 0


def test_pages_behind_media_of_unknown_content_have_no_key() -> None:
    unknown = replace(prompt_of(media=MEDIA), media_ids=None)
    assert keys(unknown) == keys(prompt_of(media=MEDIA))[:1]
    assert answer_keys(unknown, IDS, page_size=PAGE, salt=b"model", known=keys(unknown)) == keys(unknown)


@pytest.mark.parametrize("media", [range(0), MEDIA, range(15, 19)], ids=["text", "media", "media at the end"])
def test_an_answer_has_the_keys_of_the_prompt_that_repeats_it(media: range) -> None:
    prompt = replace(prompt_of(media=media), rope_delta=-7)
    answer = [3, 1, 4, 1, 5, 9]
    whole = prompt_of([*IDS, *answer], media=media)
    whole.positions[:, len(IDS) :] -= 7
    found = answer_keys(prompt, answer, page_size=PAGE, salt=b"model", known=keys(prompt))
    assert len(found) == 6 and found == keys(whole)
    other = answer_keys(
        replace(prompt, rope_delta=0), answer, page_size=PAGE, salt=b"model", known=keys(prompt)
    )
    assert num_equal(found, other) == 4
