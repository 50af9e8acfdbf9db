"""text.json: text normalisation, segmentation, and the strings that reach the acoustic model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.text.reference.normalize import normalize_fragment, normalize_text
from mingc.text.reference.segment import cut_by_length, iter_speech_segments

NORMALISED_SHARE = 0.95  # minimum fraction of recorded texts that must match


def replay_texts(_: Engines, log: ReferenceLog, document: Mapping[str, Any]) -> None:
    """Replay the cases of `document`, the content of text.json."""
    cases = document.get("cases", [])
    for name, function in (("pipeline", normalize_fragment), ("talker_tn", normalize_text)):
        wrong = [case["text"] for case in cases if function(case["text"]) != case[name]]
        note = f"different: {'; '.join(wrong)}"[:200] if wrong else ""
        if cases:
            log.share(
                f"cases.{name}",
                same=len(cases) - len(wrong),
                total=len(cases),
                minimum=NORMALISED_SHARE,
                note=note,
            )
    for index, case in enumerate(document.get("segmentation", [])):
        found = cut_by_length(case["text"], case["max_semantic_length"])
        log.text(f"segmentation.{index}", found, case["fragments"])
    _replay_spoken(log, document.get("end_to_end", []))


def _replay_spoken(log: ReferenceLog, cases: list[Mapping[str, Any]]) -> None:
    """Compare the strings that reach the acoustic model: all segment boundaries, and the text of most segments."""
    same = total = 0
    for index, case in enumerate(cases):
        given = case.get("chunks") or case["text"]
        found = list(iter_speech_segments(given, case["max_length"]))
        expected = [call["text"] for call in case["synthesis_calls"]]
        total += len(expected)
        if len(found) != len(expected):
            log.text(f"end_to_end.{index}", found, expected)
            continue
        same += sum(one == other for one, other in zip(found, expected, strict=True))
    if total:
        log.share("end_to_end.synthesis_calls", same=same, total=total, minimum=NORMALISED_SHARE)
