"""Expected result of `python -m conformance` for an artifact of the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from mingc_command import DATA

from conformance.check import check_conformance
from mingc.verify.served import verification as served

_TENSORS = ("thinker", "talker", "vae", "vision", "audio", "preprocess")
PAIRS = "served with pairs of small chunks"
SERVED = ("served as usual", PAIRS)
_VALUES = ("greedy_ids", "moe_topk_ids", "position", "loop.clone", "stream_sliding", "end_to_end")


def check_goldens(artifact: Path, *, ways: tuple[str, ...] = SERVED) -> None:
    """Replay all reference values: every comparison passes, and every kind of value was compared.

    `ways`: those in which recorded requests are served.
    """
    options = served.served_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "served_options", lambda *given: {name: options(*given)[name] for name in ways})
        report = check_conformance(artifact, DATA)
    assert report.passed, [each for each in report.comparisons if each.outcome == "FAIL"]
    _check_kinds(
        {row.file: row.checked for row in report.files},
        [row.name for row in report.comparisons],
        ways,
    )
    replayed = [row for row in report.files if row.file in SERVED]
    assert len(replayed) == len(ways) and max(row.worst_error for row in replayed) < 2e-5


def _check_kinds(files: dict[str, int], names: list[str], ways: tuple[str, ...] = SERVED) -> None:
    """`files`: comparisons by file."""
    assert {f"{name}.safetensors" for name in _TENSORS} <= set(files)
    for way in ways:
        assert files[way] > 150, "every recorded request is served"
    for part in _VALUES:
        assert any(part in name for name in names), part
