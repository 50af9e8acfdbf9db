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
