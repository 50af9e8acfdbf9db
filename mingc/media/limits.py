"""Limits of one medium: bytes of host memory while it is decoded, and tokens of the context.

Headers are checked against both before anything is decoded, so a small file cannot claim memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from mingc.errors import RequestError

MIB = 1 << 20
DEFAULT_MEDIA_BYTES = 384 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """`max_bytes`: most host memory for decoding and the result. `max_tokens`: of the prompt; None: no limit."""

    max_bytes: int = DEFAULT_MEDIA_BYTES
    max_tokens: int | None = None

    def check_bytes(self, num_bytes: int, where: str, what: str) -> None:
        """Raises: RequestError when `what` needs more than the remaining bytes."""
        if num_bytes > self.max_bytes:
            raise too_large(
                f"{what} takes {-(-num_bytes // MIB)} MiB of memory; {self.max_bytes // MIB} MiB are left for it",
                where,
            )

    def check_tokens(self, num_tokens: int, where: str, kind: str) -> None:
        """Raises: RequestError when the tokens of one medium alone leave no room in the context."""
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            raise RequestError(
                f"the {kind} has {num_tokens} tokens, the context holds {self.max_tokens} with the answer",
                where=where,
                fix="send a smaller or shorter one",
                param=where,
                code="context_length_exceeded",
            )


def too_large(what: str, where: str) -> RequestError:
    """The error for a medium whose memory would exceed the limit."""
    return RequestError(
        what,
        where=where,
        fix="send a smaller or shorter one, or have the server started with a larger --max-media-memory",
        status=413,
        param=where,
        code="media_too_large",
    )


def undecodable(what: str, where: str, fix: str) -> RequestError:
    """The error for bytes that are no image, sound or video."""
    return RequestError(what, where=where, fix=fix, param=where, code="undecodable_media")
