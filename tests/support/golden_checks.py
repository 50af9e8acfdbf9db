"""Expected result of `mingc verify --reference` for an artifact of the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

from mingc_command import DATA, mingc


def check_goldens(artifact: Path) -> None:
    """Replay all reference values: every comparison passes, and every kind of value was compared."""
    done = mingc("verify", artifact, "--reference", DATA, "--json")
    assert done.code == 0, done.stdout[-3000:] + done.stderr
    result = done.document
    assert result["passed"] and result["failed"] == 0
    seen = {row["file"] for row in result["files"]}
    for name in ("thinker", "talker", "vae", "vision", "audio", "preprocess"):
        assert f"{name}.safetensors" in seen
    names = [row["name"] for row in result["comparisons"]]
    for part in ("greedy_ids", "moe_topk_ids", "position", "loop.clone", "stream_sliding", "end_to_end"):
        assert any(part in name for name in names), part
