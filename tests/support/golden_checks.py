"""Expected result of `mingc verify --reference` for an artifact of the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

from mingc_command import DATA, mingc

from mingc.verify.verification import verify

_TENSORS = ("thinker", "talker", "vae", "vision", "audio", "preprocess")
_VALUES = ("greedy_ids", "moe_topk_ids", "position", "loop.clone", "stream_sliding", "end_to_end")


def check_goldens(artifact: Path) -> None:
    """Replay all reference values: every comparison passes, and every kind of value was compared."""
    done = mingc("verify", artifact, "--reference", DATA, "--json")
    assert done.code == 0, done.stdout[-3000:] + done.stderr
    result = done.document
    assert result["passed"] and result["failed"] == 0
    _check_kinds({row["file"] for row in result["files"]}, [row["name"] for row in result["comparisons"]])


def check_goldens_in_process(artifact: Path) -> None:
    """The same without a process of its own."""
    report = verify(artifact, reference=DATA)
    assert report.passed, [each for each in report.comparisons if each.outcome == "FAIL"]
    _check_kinds({row.file for row in report.files}, [row.name for row in report.comparisons])


def _check_kinds(files: set[str], names: list[str]) -> None:
    assert {f"{name}.safetensors" for name in _TENSORS} <= files
    for part in _VALUES:
        assert any(part in name for name in names), part
