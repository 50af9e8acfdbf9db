"""Bucket sizes of a dim that counts requests, tokens or latents."""

from __future__ import annotations


def doubling_buckets(minimum: int, maximum: int) -> tuple[int, ...]:
    """`minimum`, twice that, … and `maximum` itself: padding never more than doubles the work."""
    sizes = []
    size = minimum
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)
