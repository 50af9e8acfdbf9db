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
    for stage, (begin, end) in STAGES.items():
        first = 0.0 if begin is None else timings_ms.get(begin)
        last = timings_ms.get(end)
        if first is not None and last is not None:
            yield stage, max(0.0, last - first)
