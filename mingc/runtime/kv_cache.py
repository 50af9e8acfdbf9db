"""KV cache bookkeeping: which request owns which pages and slots. The tensors are in the workers; imports no torch.

Page 0 and slot 0 are never allocated: padding rows of a batch write there.
"""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Allocates pages of `page_size` KV rows to requests.

    Args:
        num_pages: pages of the state tensors, including page 0.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1 and page_size > 0
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last may still be in a cache
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request that has the pool to itself."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def extend(self, owner: int, num_tokens: int) -> bool:
        """Allocate pages until `owner` holds `num_tokens`. False, without any change, if too few pages are free."""
        pages = self._owned.get(owner, [])
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            pages = self._owned.setdefault(owner, pages)
            pages.extend(self._free.pop() for _ in range(missing))
        return True

    def pages(self, owner: int) -> Sequence[int]:
        """Pages of `owner` in token order; empty if it has none."""
        return self._owned.get(owner, ())

    def free(self, owner: int) -> None:
        """Free all pages of `owner`; does nothing if it has none."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check_count(self) -> None:
        """Assert that the number of pages adds up. Cheap: does not look at single pages."""
        num_used = sum(map(len, self._owned.values()))
        assert self.num_free + num_used == self.num_pages - 1, "KV pages leaked or allocated twice"

    def check(self) -> None:
        """Assert that every page is free or owned, exactly once. For tests: there may be hundreds of thousands."""
        used = [page for pages in self._owned.values() for page in pages]
        assert sorted(self._free + used) == list(range(1, self.num_pages)), (
            "KV pages leaked or allocated twice"
        )


class SlotPool:
    """Allocates rows of per-request state, one per request.

    Args:
        num_slots: rows of the state tensors, including slot 0.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 1
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._owned: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, owner: int) -> int | None:
        """Allocate a slot for `owner`, which must not have one; None if all are taken."""
        assert owner not in self._owned, f"request {owner} already has a slot"
        if not self._free:
            return None
        self._owned[owner] = self._free.pop()
        return self._owned[owner]

    def slot(self, owner: int) -> int:
        return self._owned[owner]

    def free(self, owner: int) -> None:
        """Free the slot of `owner`; does nothing if it has none."""
        slot = self._owned.pop(owner, None)
        if slot is not None:
            self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is free or owned, exactly once."""
        assert sorted([*self._free, *self._owned.values()]) == list(range(1, self.num_slots)), "slots leaked"
