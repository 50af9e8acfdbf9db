"""Bucket sizes of dims that count requests, tokens, pages or latents."""

from __future__ import annotations


def doubling_buckets(minimum: int, maximum: int) -> tuple[int, ...]:
    """`minimum`, doubled repeatedly, and `maximum`: padding at most doubles the cost."""
    sizes = []
    size = minimum
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)
