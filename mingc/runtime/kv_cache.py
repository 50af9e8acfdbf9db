"""Who owns which KV pages and which slots. Plain numbers; the tensors live in the workers. No torch.

Both pools hold number 0 back: padding rows of a batch write there.
"""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Pages of `page_size` KV rows, lent to requests.

    Args:
        num_pages: pages of the state tensors, page 0 included.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1 and page_size > 0
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last is still in the caches
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def max_tokens(self) -> int:
        """Tokens that one request could hold with the pool to itself."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def extend(self, owner: int, num_tokens: int) -> bool:
        """Grow `owner` until it can hold `num_tokens`. Nothing changes, and False, when too few pages are free."""
        pages = self._owned.get(owner, [])
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        if missing > 0:
            pages = self._owned.setdefault(owner, pages)
            pages.extend(self._free.pop() for _ in range(missing))
        return True

    def pages(self, owner: int) -> Sequence[int]:
        """The pages of `owner` in token order; empty when it has none."""
        return self._owned.get(owner, ())

    def free(self, owner: int) -> None:
        """Take back all pages of `owner`; nothing happens when it has none."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check_count(self) -> None:
        """Assert that no page is missing. Does not look at each: there may be hundreds of thousands."""
        num_used = sum(map(len, self._owned.values()))
        assert self.num_free + num_used == self.num_pages - 1, "KV pages leaked or lent twice"

    def check(self) -> None:
        """Assert that every page is either free or owned, once. For tests: an idle server would be held up by it."""
        used = [page for pages in self._owned.values() for page in pages]
        assert sorted(self._free + used) == list(range(1, self.num_pages)), "KV pages leaked or lent twice"


class SlotPool:
    """Fixed rows of per-request state, one a request.

    Args:
        num_slots: rows of the state tensors, slot 0 included.
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
        """A slot for `owner`, which must not have one; None when all are taken."""
        assert owner not in self._owned, f"request {owner} has a slot"
        if not self._free:
            return None
        self._owned[owner] = self._free.pop()
        return self._owned[owner]

    def slot(self, owner: int) -> int:
        return self._owned[owner]

    def free(self, owner: int) -> None:
        """Take back the slot of `owner`; nothing happens when it has none."""
        slot = self._owned.pop(owner, None)
        if slot is not None:
            self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is either free or owned, once."""
        assert sorted([*self._free, *self._owned.values()]) == list(range(1, self.num_slots)), "slots leaked"
