"""Names of the stages of an answer. Standard library only: clients read it too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Stages of the time to the first token and the first audio: the moments of `Done.timings_ms` at their ends.
STAGES = {
    "preprocess_queue": (None, "preprocessing"),
    "preprocess": ("preprocessing", "prepared"),
    "encode": ("prepared", "encoded"),
    "queue": ("encoded", "prefill"),
    "prefill": ("prefill", "first_token"),
    "first_segment": ("first_token", "first_segment"),
    "first_patch": ("first_segment", "first_audio"),
}


def stages_ms(timings_ms: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The stages that a request had, and how long each took."""
    moments: dict[str | None, float] = {None: 0.0, **timings_ms}
    for stage, (begin, end) in STAGES.items():
        if begin in moments and end in moments:
            yield stage, max(0.0, moments[end] - moments[begin])
