"""Where the time of a token, a patch and a first audio goes, and how much of it could be gained. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from mingc.probe.options import request_counts
from mingc.probe.report import EngineFigures, Part, RooflineBound

# Engines that one request runs, one after the other; each as often as it has layers.
_PATHS = {
    "token": tuple(
        f"thinker.{name}" for name in ("embed", "dense", "decode_attention", "decode_experts", "head")
    ),
    "patch": ("cfm.sample", "audio_vae.stream", "talker.step"),
    "first-audio": ("talker.prefill", "cfm.sample", "audio_vae.stream"),  # of a text to speak
}


def summarize(
    figures: Sequence[EngineFigures], bounds: Sequence[RooflineBound], context: int
) -> tuple[Part, ...]:
    """Parts of each path whose engines were all timed, sorted by what could be gained.

    Figures are those for one request that has `context` tokens, or for the next size that was timed.
    """
    roofs = {each.engine: max(each.memory_bound_ms, each.compute_bound_ms) for each in bounds}
    parts: list[Part] = []
    for path, engines in _PATHS.items():
        timed = [[each for each in figures if each.engine == name] for name in engines]
        if not all(timed):
            continue
        chosen = [_for_one(each, context) for each in timed]
        total_ms = sum(each.layer_instances * each.latency.min_ms for each in chosen)
        found = [_part(path, each, total_ms, roofs.get(each.title)) for each in chosen]
        parts += sorted(found, key=lambda part: -(part.ms if part.gap_ms is None else part.gap_ms))
    return tuple(parts)


def _for_one(rows: Sequence[EngineFigures], context: int) -> EngineFigures:
    def order(row: EngineFigures) -> tuple[float, ...]:
        prompt = row.sizes.get("T", context)
        is_short = prompt < context
        return (
            max(request_counts(row.sizes), default=1),
            is_short,
            -prompt if is_short else prompt,
            -(row.context_tokens or 0),
            row.sizes.get("P", 0),  # pages of the longest request
        )

    return min(rows, key=order)


def _part(path: str, row: EngineFigures, total_ms: float, roof_ms: float | None) -> Part:
    ms, calls = row.layer_instances * row.latency.min_ms, row.layer_instances
    return Part(
        of=path,
        engine=row.title,
        backend=row.backend,
        calls=calls,
        ms=ms,
        median_ms=calls * row.latency.median_ms,
        share=ms / total_ms,
        roof_ms=None if roof_ms is None else calls * roof_ms,
        gap_ms=None if roof_ms is None else ms - calls * roof_ms,
    )
