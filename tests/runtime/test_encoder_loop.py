"""The encoder thread over an encoder that waits for the test: each content once, errors, cancelling, the cache."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch
from held_resources import wait_until_equal
from torch import Tensor

from mingc.errors import RequestError, WorkerError
from mingc.runtime.encoders import loop as encoder_loop
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.loop import EncoderLoop, _is_finite

WAIT_S = 20.0
WIDTH = 4
LARGEST = 32
BYTES = 1 << 20
IDLE = {"media in the encoder": 0}
ENTRY = 8 * WIDTH * 4  # bytes of the embeddings of a picture of 8 tokens


def embeddings_of(picture: str) -> Tensor:
    """(8, WIDTH) float32 that no other picture has."""
    return (
        torch.frombuffer(bytearray(hashlib.sha512(picture.encode()).digest() * 2), dtype=torch.uint8)
        .view(8, -1)[:, :WIDTH]
        .float()
    )


class Name(str):
    """The features of a picture."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        return BYTES * len(self)


class Gate:
    """An encoder of names, each call of which waits until the test lets it go on. `broken` names fail.

    A name has as many tokens as letters; buckets are powers of two, up to `LARGEST`.
    """

    max_batch_tokens = 16

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.broken: set[str] = set()
        self.outputs: list[Tensor] = []
        self.values: Callable[[str], Tensor] = embeddings_of
        self._begun = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def padded_tokens(self, features: Sequence[str]) -> int:
        bucket = 1 << (sum(map(len, features)) - 1).bit_length()
        if bucket > LARGEST:
            raise RequestError(f"{features} have too many tokens")
        return bucket

    def encode(self, features: Sequence[str]) -> list[Tensor]:
        self.calls.append(list(features))
        self._begun.release()
        assert self._open.acquire(timeout=WAIT_S)
        for each in features:
            if each in self.broken:
                raise RequestError(f"{each} is broken")
        together = torch.cat([self.values(each) for each in features])
        self.outputs.append(together)
        return list(together.tensor_split(len(features)))

    def wait_for_call(self) -> None:
        assert self._begun.acquire(timeout=WAIT_S)

    def open(self, count: int = 1000) -> None:
        self._open.release(count)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def cache() -> EncoderCache:
    return EncoderCache(10 * ENTRY)


@pytest.fixture
def loop(gate: Gate, cache: EncoderCache) -> Iterator[EncoderLoop[Name]]:
    yield from running(EncoderLoop("encoder", gate, cache), gate)


def running(loop: EncoderLoop[Name], gate: Gate) -> Iterator[EncoderLoop[Name]]:
    loop.start()
    yield loop
    gate.open()
    loop.stop()
    assert not loop._thread.is_alive()
    assert loop.held == IDLE and not loop._by_key


def submit(loop: EncoderLoop[Name], *pictures: str) -> list[Future[Tensor]]:
    return loop.submit([Name(each) for each in pictures], [each.encode() for each in pictures])


def check(future: Future[Tensor], picture: str) -> None:
    assert torch.equal(future.result(WAIT_S), embeddings_of(picture))


def test_the_same_content_is_encoded_once_for_all_that_wait(
    loop: EncoderLoop[Name], gate: Gate, cache: EncoderCache
) -> None:
    """The second request comes while the first one's is encoded; the third one later."""
    (first,) = submit(loop, "a")
    gate.wait_for_call()
    second = submit(loop, "a", "b", "b")
    gate.open()
    for future, picture in zip((first, *second), "aabb", strict=True):
        check(future, picture)
    check(submit(loop, "a")[0], "a")
    assert gate.calls == [["a"], ["b"]]
    wait_until_equal(IDLE, lambda: loop.held)
    assert (cache.num_misses, cache.num_hits, cache.num_bytes) == (2, 3, 2 * ENTRY)


def test_without_a_cache_every_request_encodes_its_own(gate: Gate) -> None:
    for loop in running(EncoderLoop("encoder", gate), gate):
        gate.open()
        for future in (*submit(loop, "a"), *submit(loop, "a")):
            check(future, "a")
        assert sum(map(len, gate.calls)) == 2


def test_two_encoders_share_a_cache_and_no_entries(cache: EncoderCache) -> None:
    """Media of two kinds whose digests were equal would still differ by their encoder."""
    gates = [Gate(), Gate()]
    gates[1].values = lambda name: -embeddings_of(name)
    loops = [EncoderLoop(name, gate, cache) for name, gate in zip(("vision", "audio"), gates, strict=True)]
    for loop, gate in zip(loops, gates, strict=True):
        loop.start()
        gate.open()
    found = [submit(loop, "a")[0].result(WAIT_S) for loop in loops]
    for loop in loops:
        loop.stop()
    assert torch.equal(found[0], embeddings_of("a")) and torch.equal(found[1], -embeddings_of("a"))


def test_an_error_is_the_first_requests_and_the_second_tries_again(
    loop: EncoderLoop[Name], gate: Gate, cache: EncoderCache
) -> None:
    gate.broken.add("a")
    (first,) = submit(loop, "a")
    gate.wait_for_call()
    (second,) = submit(loop, "a")
    gate.open(1)
    with pytest.raises(RequestError, match="a is broken"):
        first.result(WAIT_S)
    gate.wait_for_call()
    gate.broken.clear()
    gate.open()
    check(second, "a")
    check(submit(loop, "a")[0], "a")
    assert gate.calls == [["a"], ["a"]]


def test_a_request_that_leaves_does_not_take_the_result_from_another(
    loop: EncoderLoop[Name], gate: Gate
) -> None:
    """Before its call and during it."""
    (first,) = submit(loop, "a")
    gate.wait_for_call()
    waiting, others = submit(loop, "b"), submit(loop, "a", "b")
    assert first.cancel() and waiting[0].cancel()
    gate.open()
    for future, picture in zip(others, "ab", strict=True):
        check(future, picture)
    assert gate.calls == [["a"], ["b"]]


def test_a_request_that_leaves_at_any_moment_leaves_no_trace(loop: EncoderLoop[Name], gate: Gate) -> None:
    """Cancelled while the next call is put together: the same content is encoded for the next request."""
    moments = iter([False, True])

    class Leaving(Future[Tensor]):
        def cancelled(self) -> bool:
            return next(moments, True) or super().cancelled()

    (first,) = submit(loop, "first")
    gate.wait_for_call()
    (left,) = submit(loop, "a")
    loop._by_key[b"encoder a"].futures = [Leaving()]
    gate.open()
    check(first, "first")
    (last,) = submit(loop, "b")
    check(last, "b")
    check(submit(loop, "a")[0], "a")
    assert not left.done()


def test_what_no_request_waits_for_is_not_encoded(loop: EncoderLoop[Name], gate: Gate) -> None:
    (first,) = submit(loop, "a")
    gate.wait_for_call()
    left, kept = submit(loop, "b", "c")
    assert left.cancel()
    gate.open()
    check(first, "a")
    check(kept, "c")
    assert gate.calls == [["a"], ["c"]]
    check(submit(loop, "b")[0], "b")


@pytest.mark.parametrize(
    ("waiting", "calls"),
    [
        ("a b c d", "a b c d"),  # four of one token: a bucket of four
        ("a b c", "a b, c"),  # three would be padded to four
        ("aaaa b", "aaaa, b"),  # five would be padded to eight
        ("aaa bb", "aaa, bb"),
        ("aaa b c", "aaa b, c"),
        ("aaa b cccc", "aaa b cccc"),
        ("a b cccccc", "a b cccccc"),  # more fits than the first two, which would fill a bucket as well
        (16 * "a" + " b", 16 * "a" + ", b"),
        (8 * "a" + " " + 8 * "b" + " " + 8 * "c", 8 * "a" + " " + 8 * "b" + ", " + 8 * "c"),  # at most 16
        (20 * "a" + " b c", 20 * "a" + ", b c"),  # more than 16 alone
        (40 * "a" + " b c", 40 * "a" + ", b c"),  # no call can hold it; the encoder says so
        ("b " + 40 * "a" + " c", "b, " + 40 * "a" + ", c"),
    ],
)
def test_what_waits_shares_calls_without_more_padding(
    waiting: str, calls: str, loop: EncoderLoop[Name], gate: Gate
) -> None:
    """Oldest first: nothing overtakes, however large."""
    (first,) = submit(loop, "first")
    gate.wait_for_call()
    futures = [future for name in waiting.split() for future in submit(loop, name)]  # a request each
    gate.open()
    for future, name in zip((first, *futures), ("first", *waiting.split()), strict=True):
        check(future, name)
    assert gate.calls == [["first"], *(call.split() for call in calls.split(", "))]


def test_a_request_fails_alone(loop: EncoderLoop[Name], gate: Gate) -> None:
    (first,) = submit(loop, "first")
    gate.wait_for_call()
    gate.broken.add("b")
    futures = [submit(loop, name)[0] for name in "abcd"]
    gate.open()
    check(first, "first")
    for name, future in zip("abcd", futures, strict=True):
        if name == "b":
            with pytest.raises(RequestError, match="b is broken"):
                future.result(WAIT_S)
        else:
            check(future, name)
    assert gate.calls == [["first"], ["a", "b", "c", "d"], ["a"], ["b"], ["c"], ["d"]]


def test_preprocessing_waits_while_too_many_features_wait(loop: EncoderLoop[Name], gate: Gate) -> None:
    (first,) = submit(loop, "first")
    gate.wait_for_call()
    submit(loop, 30 * "a", 30 * "b", 10 * "c")  # 70 MiB
    added: list[Future[Tensor]] = []
    thread = threading.Thread(target=lambda: added.extend(submit(loop, "d")))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not added
    gate.open()
    thread.join(WAIT_S)
    check(first, "first")
    check(added[0], "d")


def test_a_preprocessing_thread_that_waits_ends_with_the_loop(gate: Gate) -> None:
    loop: EncoderLoop[Name] = EncoderLoop("encoder", gate)
    loop.start()
    submit(loop, "first")
    gate.wait_for_call()
    second, _, _ = submit(loop, 30 * "a", 30 * "b", 10 * "c")
    errors: list[WorkerError] = []

    def add() -> None:
        try:
            submit(loop, "d")
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    loop.stop(0.0)
    gate.open()
    thread.join(WAIT_S)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(WorkerError):
        second.result(WAIT_S)


def test_results_that_are_not_finite_are_not_kept(
    loop: EncoderLoop[Name], gate: Gate, cache: EncoderCache
) -> None:
    gate.open()
    gate.values = lambda name: torch.full((8, WIDTH), torch.nan)
    assert submit(loop, "a")[0].result(WAIT_S).isnan().all()
    wait_until_equal(IDLE, lambda: loop.held)
    gate.values = embeddings_of
    check(submit(loop, "a")[0], "a")
    assert cache.num_hits == 0


def test_what_is_kept_is_no_part_of_a_larger_result(
    loop: EncoderLoop[Name], gate: Gate, cache: EncoderCache
) -> None:
    """Nor is it written to with it: an engine may use the memory of its outputs again."""
    gate.open()
    for future, picture in zip(submit(loop, "a", "b"), "ab", strict=True):
        check(future, picture)
    wait_until_equal(IDLE, lambda: loop.held)
    assert gate.calls == [["a", "b"]] and cache.num_bytes == 2 * ENTRY
    for each in gate.outputs:
        each.zero_()
    for picture in "ab":
        (future,) = submit(loop, picture)
        check(future, picture)
        assert future.result().untyped_storage().nbytes() == ENTRY
    assert len(gate.calls) == 1


@pytest.mark.parametrize("is_finite", [True, False])
def test_requests_do_not_wait_for_the_cache(
    is_finite: bool, loop: EncoderLoop[Name], gate: Gate, cache: EncoderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that join while embeddings are checked get the copy that is kept, or try again."""
    may_end = threading.Event()

    def check_slowly(values: Tensor) -> bool:
        assert may_end.wait(WAIT_S)
        return _is_finite(values)

    monkeypatch.setattr(encoder_loop, "_is_finite", check_slowly)
    gate.open()
    if not is_finite:
        gate.values = lambda name: torch.full((8, WIDTH), torch.inf)
    found = [future.result(WAIT_S) for future in submit(loop, "a", "b")]
    assert all(each.isfinite().all() == is_finite for each in found)
    gate.values = embeddings_of
    (joined,) = submit(loop, "a")
    assert not joined.done() and cache.num_bytes == 0
    may_end.set()
    check(joined, "a")
    wait_until_equal(IDLE, lambda: loop.held)
    assert gate.calls == [["a", "b"]] + ([] if is_finite else [["a"]])
    assert cache.num_bytes == (2 if is_finite else 1) * ENTRY


def test_a_stopped_loop_fails_what_waits(gate: Gate, cache: EncoderCache) -> None:
    loop: EncoderLoop[Name] = EncoderLoop("encoder", gate, cache)
    loop.start()
    (first,) = submit(loop, "a")
    gate.wait_for_call()
    (second,) = submit(loop, "b")
    loop.stop(0.0)
    gate.open()
    check(first, "a")
    with pytest.raises(WorkerError, match="the encoder was stopped"):
        second.result(WAIT_S)
    with pytest.raises(WorkerError, match="the encoder is stopping"):
        submit(loop, "c")
    wait_until_equal({"alive": 0}, lambda: {"alive": int(loop._thread.is_alive())})


def test_the_least_recently_used_entries_are_dropped_beyond_the_budget() -> None:
    cache = EncoderCache(3 * ENTRY + ENTRY // 2)
    for picture in "abc":
        cache.put(picture.encode(), embeddings_of(picture))
    assert cache.get(b"a") is not None  # so that b is the oldest
    cache.put(b"d", embeddings_of("d"))
    assert cache.num_bytes == 3 * ENTRY
    assert [cache.get(each.encode()) is not None for each in "abcd"] == [True, False, True, True]
    cache.put(b"large", torch.zeros(4 * ENTRY))
    assert cache.get(b"large") is None and cache.num_bytes == 3 * ENTRY, "it would have driven all others out"
    cache.put(b"d", embeddings_of("d"))
    assert cache.num_bytes == 3 * ENTRY, "an entry that is put again counts once"
    cache.clear()
    assert cache.num_bytes == 0 and cache.get(b"a") is None
    assert (cache.num_hits, cache.num_misses) == (4, 3)


def test_entries_may_fill_the_budget() -> None:
    for pictures in ("a", "ab"):
        cache = EncoderCache(len(pictures) * ENTRY)
        for picture in pictures:
            cache.put(picture.encode(), embeddings_of(picture))
        assert all(cache.get(picture.encode()) is not None for picture in pictures)
        assert cache.num_bytes == len(pictures) * ENTRY


def test_every_bfloat16_that_is_no_number_is_found() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    finite = every.isfinite()
    numbers = every[finite].repeat(3)[: (2 << 16) + 5]  # blocks and a part of one
    assert _is_finite(numbers) and len(numbers) > 2 << 16
    for place in (0, (1 << 16) - 1, 1 << 16, len(numbers) - 1):
        assert not _is_finite(numbers.index_fill(0, torch.tensor(place), torch.nan))
    assert _is_finite(every[finite]) and _is_finite(every[:0])
    assert not any(_is_finite(value[None]) for value in every[~finite])
    assert not _is_finite(torch.tensor([1.0, float("nan")])) and _is_finite(torch.tensor([1.0, -3e38]))


@pytest.mark.parametrize(
    ("tokens", "calls"),
    [
        ((8, 8), [2]),  # 16 tokens, the most of one call
        ((4, 4, 8), [3]),
        ((8, 8, 8), [2, 1]),
        ((16, 16), [1, 1]),
        ((32, 1), [1, 1]),  # one medium may have more
        ((3, 1), [2]),  # 4 tokens, as many as in separate calls: 4 + 1
        ((5, 8), [2]),  # 16 of 8 + 8
        ((1, 1, 1), [2, 1]),  # the third would add one of padding
        ((1, 1, 1, 1), [4]),
    ],
)
def test_a_call_takes_what_needs_no_more_padding(
    tokens: Sequence[int], calls: list[int], gate: Gate, loop: EncoderLoop[Name]
) -> None:
    """Buckets are powers of two; a call has at most 16 tokens, unless one medium alone has more."""
    blocker = submit(loop, "z")
    gate.wait_for_call()
    waiting = submit(loop, *("abcdefgh"[index] * count for index, count in enumerate(tokens)))
    gate.open()
    for future in (*blocker, *waiting):
        future.result(WAIT_S)
    assert [len(each) for each in gate.calls[1:]] == calls


def test_a_cache_counts_the_memory_that_its_entries_keep_alive() -> None:
    """A view keeps its whole storage, and an entry that is written again is counted once."""
    cache = EncoderCache(1000)
    whole = torch.zeros(200)
    cache.put(b"view", whole[:3])
    assert cache.num_bytes == 800
    cache.put(b"view", torch.zeros(10))
    assert cache.num_bytes == 40
    cache.put(b"other", torch.zeros(10))
    for _ in range(3):
        cache.put(b"view", torch.zeros(20))
    assert cache.num_bytes == 120 and cache.get(b"other") is not None
    cache.put(b"view", torch.zeros(300))  # larger than the whole cache: the older entry is wrong as well
    assert cache.num_bytes == 40 and cache.get(b"view") is None


def test_a_medium_whose_first_request_failed_is_tried_again_before_others(
    gate: Gate, loop: EncoderLoop[Name]
) -> None:
    gate.broken.add("bad")
    first, second = submit(loop, "bad") + submit(loop, "bad")
    gate.wait_for_call()
    (other,) = submit(loop, "x" * 20)
    gate.open(1)
    with pytest.raises(RequestError, match="broken"):
        first.result(WAIT_S)
    gate.broken.clear()
    gate.open()
    check(second, "bad")
    check(other, "x" * 20)
    assert gate.calls[:3] == [["bad"], ["bad"], ["x" * 20]]
