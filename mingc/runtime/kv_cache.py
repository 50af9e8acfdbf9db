"""KV cache bookkeeping: which request owns which pages and slots. The workers hold the tensors; imports no torch.

Page 0 and slot 0 are never allocated: padding rows of a batch write there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class PagePool:
    """Allocates pages of `page_size` KV rows to requests, and keeps written pages for prompts with the same beginning.

    A full page whose rows are written can be published under a key of its content (`mingc.runtime.thinker.page_keys`).
    A request shares the published pages of its prompt's beginning. A published page without an owner counts as free: it
    keeps its content until a request needs the page; the least recently used one is taken first.

    Args:
        num_pages: pages of the state tensors, including page 0.

    Attributes:
        num_evicted: how many published pages were given to other requests.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1 and page_size > 0
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last may still be in a cache
        self._owned: dict[int, list[int]] = {}
        self._published: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # of published pages
        self._num_owners: dict[int, int] = {}  # of published pages that are owned
        self._idle: OrderedDict[int, None] = OrderedDict()  # published pages without an owner, oldest first

    @property
    def num_free(self) -> int:
        """Pages without an owner, published ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_published(self) -> int:
        """Pages that prompts may share, with or without an owner."""
        return len(self._published)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request that has the pool to itself."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def has_room(self, num_tokens: int, keys: Sequence[bytes] = (), *, spare: int = 0) -> bool:
        """Whether `allocate` would succeed now and leave `spare` pages free."""
        if self.pages_for(num_tokens) + spare - len(keys) > self.num_free:
            return False  # however many are shared; saves the search, as waiting requests ask at every step
        shared = self._find(keys)
        # Shared pages without an owner count as free now, and would not then.
        num_left = self.num_free - sum(page in self._idle for page in shared)
        return self.pages_for(num_tokens) + spare - len(shared) <= num_left

    def allocate(
        self, owner: int, num_tokens: int, keys: Sequence[bytes] = (), *, spare: int = 0
    ) -> int | None:
        """Allocate pages for `num_tokens` tokens to `owner`, which must have none.

        Its first pages are the published pages of the leading `keys`, up to the first key without a page. Returns their
        number; None, without any change, if fewer than `spare` pages would be left free.
        """
        assert owner not in self._owned, f"request {owner} already has pages"
        if not self.has_room(num_tokens, keys, spare=spare):
            return None
        shared = self._find(keys)
        for page in shared:
            self._add_owner(page)
        self._owned[owner] = list(shared)
        is_extended = self.extend(owner, num_tokens)
        assert is_extended, "there was room"
        return len(shared)

    def extend(self, owner: int, num_tokens: int) -> bool:
        """Allocate pages until `owner` holds `num_tokens`. False, without any change, if too few pages are free."""
        pages = self._owned.get(owner, [])
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        if missing > 0:
            self._owned.setdefault(owner, pages)
            for _ in range(missing):
                pages.append(self._free.pop() if self._free else self._evict())
        return True

    def share(self, owner: int, keys: Sequence[bytes], first: int) -> int:
        """Replace pages of `owner`, from number `first`, by the published pages of `keys[first:]`.

        Stops at the first key without a page. The replaced pages must not be published; their content is lost. Returns
        how many were replaced.
        """
        pages = self._owned[owner]
        shared = self._find(keys[first:])
        for place, page in enumerate(shared, first):
            assert pages[place] not in self._keys, "the page is shared already"
            self._free.append(pages[place])
            self._add_owner(page)
            pages[place] = page
        return len(shared)

    def publish(self, owner: int, keys: Sequence[bytes], first: int = 0) -> None:
        """Let later prompts share the pages of `owner` from number `first` on, under the keys `keys[first:]`.

        All their rows must be written, or be written by steps that run before the steps of any later request. A key
        that already has a page keeps it.
        """
        for page, key in zip(self.pages(owner)[first:], keys[first:], strict=False):
            if page not in self._keys and key not in self._published:
                self._published[key], self._keys[page] = page, key
                self._num_owners.setdefault(page, 1)

    def unpublish_all(self) -> None:
        """Prevent later prompts from sharing any page written so far."""
        self._free.extend(self._idle)
        for contents in (self._idle, self._published, self._keys):
            contents.clear()

    def pages(self, owner: int) -> Sequence[int]:
        """Pages of `owner` in token order; empty if it has none."""
        return self._owned.get(owner, ())

    def free(self, owner: int) -> None:
        """Free all pages of `owner`; does nothing if it has none."""
        for page in reversed(self._owned.pop(owner, [])):  # so the last published pages are given away first
            num_owners = self._num_owners.get(page, 1) - 1
            if num_owners:
                self._num_owners[page] = num_owners
                continue
            self._num_owners.pop(page, None)
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def check_count(self) -> None:
        """Assert that the page counts add up. Cheap: does not check single pages."""
        num_shared = sum(self._num_owners.values()) - len(self._num_owners)
        num_used = sum(map(len, self._owned.values())) - num_shared
        assert self.num_free + num_used == self.num_pages - 1, "KV pages leaked or allocated twice"

    def check(self) -> None:
        """Assert that every page is free or owned, by several requests only if it may be shared.

        For tests: there may be hundreds of thousands.
        """
        owners = Counter(page for pages in self._owned.values() for page in pages)
        found = sorted([*self._free, *self._idle, *owners])
        assert found == list(range(1, self.num_pages)), "KV pages leaked or allocated twice"
        counted = {page: self._num_owners.get(page, 1) for page in owners}
        assert counted == owners and {*self._num_owners} <= {*owners}, "owners of KV pages miscounted"
        assert {page: key for key, page in self._published.items()} == self._keys
        assert {*self._idle} <= {*self._keys} <= {*self._idle, *owners}, "a published page is not there"

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """Published pages of the leading keys."""
        pages: list[int] = []
        for key in keys:
            page = self._published.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _add_owner(self, page: int) -> None:
        self._idle.pop(page, None)
        self._num_owners[page] = self._num_owners.get(page, 0) + 1

    def _evict(self) -> int:
        """The least recently used page of the published ones without an owner."""
        page, _ = self._idle.popitem(last=False)
        del self._published[self._keys.pop(page)]
        self.num_evicted += 1
        return page


class SlotPool:
    """Allocates rows of per-request state, one per request.

    Args:
        num_slots: rows of the state tensors, including slot 0.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 1
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._slots: dict[int, int] = {}  # by owner
        self._owners: dict[int, int] = {}  # by slot

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, owner: int) -> int | None:
        """Allocate a slot for `owner`, which must not have one; None if all are taken."""
        assert owner not in self._slots, f"request {owner} already has a slot"
        if not self._free:
            return None
        slot = self._slots[owner] = self._free.pop()
        self._owners[slot] = owner
        return slot

    def slot(self, owner: int) -> int:
        return self._slots[owner]

    def owner(self, slot: int) -> int:
        return self._owners[slot]

    def free(self, owner: int) -> None:
        """Free the slot of `owner`; does nothing if it has none."""
        slot = self._slots.pop(owner, None)
        if slot is not None:
            del self._owners[slot]
            self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is free or owned, exactly once."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self.num_slots)), "slots leaked"
        assert {slot: owner for owner, slot in self._slots.items()} == self._owners, "slots of other owners"
