"""Page and slot pools: every page and slot is allocated once and freed, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.kv_cache import PagePool, SlotPool


def test_page_zero_is_never_allocated() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    assert pool.extend(1, pool.max_tokens)
    assert sorted(pool.pages(1)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_extend_allocates_all_or_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    assert pool.extend(1, 5)
    held = tuple(pool.pages(1))
    assert not pool.extend(2, 5)
    assert pool.pages(2) == ()
    assert pool.extend(1, 9)
    assert tuple(pool.pages(1))[:2] == held, "growing must not move pages that hold tokens"
    pool.check()


def test_extend_to_fewer_tokens_changes_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool.extend(1, 8)
    assert pool.extend(1, 3)
    assert len(pool.pages(1)) == 2


def test_free_of_an_unknown_owner_does_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool.free(9)
    pool.check()


def test_check_finds_a_leak() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool._free.pop()
    for check in (pool.check, pool.check_count):
        with pytest.raises(AssertionError, match="leaked"):
            check()


def test_only_the_full_check_finds_a_page_with_two_owners() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool._free[0] = pool._free[1]
    pool.check_count()
    with pytest.raises(AssertionError, match="allocated twice"):
        pool.check()


def test_slot_zero_is_never_allocated() -> None:
    pool = SlotPool(3)
    assert {pool.allocate(1), pool.allocate(2)} == {1, 2}
    assert pool.allocate(3) is None
    pool.free(1)
    assert pool.allocate(3) is not None
    pool.check()


def keys(text: str) -> list[bytes]:
    """Keys of pages of content `text`, a letter each, chained like those of prompts."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_a_published_page_is_shared_and_outlives_its_owner() -> None:
    pool = PagePool(num_pages=6, page_size=4)
    assert pool.allocate(1, 12, keys("ab")) == 0
    first = list(pool.pages(1))
    pool.publish(1, keys("ab"))
    assert pool.allocate(2, 12, keys("abc")) == 2
    assert list(pool.pages(2))[:2] == first[:2]
    assert (pool.num_free, pool.num_published) == (1, 2)
    pool.check()
    for owner, num_free in ((1, 2), (2, 5)):
        pool.free(owner)
        assert pool.num_free == num_free, "shared pages are free with their last owner"
        pool.check()
    assert pool.allocate(3, 20, keys("ab")) == 2
    assert list(pool.pages(3))[:2] == first[:2]
    pool.check()


def test_only_leading_pages_are_shared() -> None:
    pool = PagePool(num_pages=9, page_size=4)
    pool.allocate(1, 12)
    pool.publish(1, [b"x", b"y", b"z"])
    assert pool.allocate(2, 12, [b"x", b"?", b"z"]) == 1
    assert pool.pages(2)[0] == pool.pages(1)[0]
    assert not {*pool.pages(2)[1:]} & {*pool.pages(1)}


def test_published_pages_are_given_away_last_and_oldest_first() -> None:
    pool = PagePool(num_pages=7, page_size=4)
    for owner, text in ((1, "ab"), (2, "cd")):
        pool.allocate(owner, 8)
        pool.publish(owner, keys(text))
        pool.free(owner)
    assert pool.allocate(3, 4, keys("a")) == 1  # used again: "cd" is older now
    pool.free(3)
    assert pool.allocate(4, 8) == 0 and (pool.num_published, pool.num_evicted) == (4, 0)
    assert pool.allocate(5, 4) == 0 and (pool.num_published, pool.num_evicted) == (3, 1)
    pool.check()
    found = {text: len(pool._find(keys(text))) for text in ("ab", "cd")}
    assert found == {"ab": 1, "cd": 2}, "of one prompt, the last page goes first"
    pool.allocate(6, 8)
    assert {text: len(pool._find(keys(text))) for text in ("ab", "cd")} == {"ab": 1, "cd": 0}


def test_pages_that_are_shared_do_not_count_twice_as_room() -> None:
    """Four pages are free, two of them hold what the request shares: it cannot have three more."""
    pool = PagePool(num_pages=5, page_size=4)
    pool.allocate(1, 8)
    pool.publish(1, keys("ab"))
    pool.free(1)
    assert pool.num_free == 4
    for num_tokens, fits in ((16, True), (17, False)):
        assert pool.has_room(num_tokens, keys("ab")) == fits
    assert pool.allocate(2, 17, keys("ab")) is None and pool.num_free == 4
    pool.check()
    assert pool.allocate(2, 16, keys("ab")) == 2 and pool.num_free == 0
    pool.check()


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    """A page can be shared only behind all those before it: without the first, the others are of no use."""
    pool = PagePool(num_pages=6, page_size=4)
    keys = [b"a", b"b", b"c", b"d"]
    assert pool.allocate(1, 16) == 0
    pool.publish(1, keys)
    pool.free(1)
    assert pool.allocate(2, 8) == 0 and pool.num_evicted == 1  # one page was free
    assert pool.allocate(3, 12, keys) == 3, "all but the last are still there"
    pool.check()


def test_pages_in_use_are_never_evicted() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool.allocate(1, 8)
    pool.publish(1, keys("ab"))
    assert pool.allocate(2, 8) is None and pool.num_published == 2
    assert pool.allocate(3, 12, keys("ab")) == 2, "what it shares needs no room"
    pool.check()


def test_pages_are_exchanged_for_published_ones() -> None:
    pool = PagePool(num_pages=9, page_size=4)
    for owner in (1, 2):
        pool.allocate(owner, 16, keys("abc"))
    pool.publish(1, keys("abc"))
    own = list(pool.pages(2))
    assert pool.share(2, keys("abx"), 0) == 2
    assert list(pool.pages(2)) == [*pool.pages(1)[:2], *own[2:]]
    assert pool.num_free == 2
    assert pool.share(2, keys("abc"), 2) == 1
    assert list(pool.pages(2)) == [*pool.pages(1)[:3], own[3]]
    pool.check()


def test_the_first_page_of_a_content_stays() -> None:
    pool = PagePool(num_pages=9, page_size=4)
    for owner in (1, 2):
        pool.allocate(owner, 8)
        pool.publish(owner, keys("ab"))
    assert pool.num_published == 2
    pool.publish(1, keys("xy"))
    assert pool.num_published == 2, "a page has one content"
    pool.free(2)
    pool.check()
    assert pool.num_free == 6
    assert list(pool.pages(1)) == pool._find(keys("ab"))


def test_nothing_published_is_found_once_it_is_taken_back() -> None:
    pool = PagePool(num_pages=9, page_size=4)
    pool.allocate(1, 8)
    pool.publish(1, keys("ab"))
    pool.allocate(2, 12, keys("ab"))
    pool.allocate(3, 8)
    pool.publish(3, keys("cd"))
    pool.free(3)
    pool.unpublish_all()
    pool.check()
    assert (pool.num_published, pool.num_free, pool.num_evicted) == (0, 5, 0)
    assert pool.allocate(4, 8, keys("ab")) == 0
    for owner, num_free in ((1, 3), (2, 6), (4, 8)):
        pool.free(owner)
        pool.check()
        assert pool.num_free == num_free


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "share", "publish", "free", "unpublish"]),
            st.integers(0, 4),
            st.integers(0, 3),
            st.integers(1, 6),
        ),
        max_size=80,
    )
)
def test_shared_pages_never_leak_and_hold_what_they_are_found_for(
    actions: list[tuple[str, int, int, int]],
) -> None:
    """A model of the pages' content: a page is written by its only owner, and found by its content only."""
    pool = PagePool(num_pages=9, page_size=4)
    texts = {0: "aaaaaa", 1: "aabbbb", 2: "abcdef", 3: "zyxwvu"}
    chosen: dict[int, str] = {}
    written: dict[int, bytes] = {}
    for action, owner, kind, count in actions:
        if action == "allocate" and owner not in chosen:
            text = texts[kind][:count]
            room = pool.has_room(4 * count, keys(text))
            shared = pool.allocate(owner, 4 * count, keys(text))
            assert (shared is not None) == room
            if shared is not None:
                assert [written[page] for page in pool.pages(owner)[:shared]] == keys(text)[:shared]
                for page in pool.pages(owner)[shared:]:
                    written[page] = b"?"
                chosen[owner] = text
        elif action == "share" and owner in chosen:
            content = keys(chosen[owner])
            first = sum(written[page] == key for page, key in zip(pool.pages(owner), content, strict=True))
            num_shared = pool.share(owner, content, first)
            shared_pages = pool.pages(owner)[first : first + num_shared]
            assert [written[page] for page in shared_pages] == content[first : first + num_shared]
        elif action == "publish" and owner in chosen:
            content = keys(chosen[owner])
            for page, key in zip(pool.pages(owner), content, strict=True):
                assert written[page] in (b"?", key), "another request has written into the page"
                written[page] = key
            pool.publish(owner, content)
        elif action == "free":
            pool.free(owner)
            chosen.pop(owner, None)
        elif action == "unpublish":
            pool.unpublish_all()
        pool.check()
        pool.check_count()


@given(
    st.lists(
        st.tuples(st.sampled_from(["extend", "free"]), st.integers(0, 5), st.integers(1, 40)), max_size=60
    )
)
def test_pages_never_leak(actions: list[tuple[str, int, int]]) -> None:
    pool = PagePool(num_pages=9, page_size=4)
    for action, owner, tokens in actions:
        before = pool.num_free, tuple(pool.pages(owner))
        if action == "free":
            pool.free(owner)
        elif pool.extend(owner, tokens):
            assert len(pool.pages(owner)) * pool.page_size >= tokens
        else:
            assert (pool.num_free, tuple(pool.pages(owner))) == before
        pool.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_slots_never_leak(actions: list[tuple[bool, int]]) -> None:
    pool = SlotPool(4)
    held: set[int] = set()
    for is_free, owner in actions:
        if is_free:
            pool.free(owner)
            held.discard(owner)
        elif owner not in held and pool.allocate(owner) is not None:
            held.add(owner)
        assert pool.num_free == 3 - len(held)
        pool.check()
