"""Coverage check: the tensors that stages need, compared with the tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import Shard, Stage, WeightSource
from mingc.export.weights.loading import check_weights

_FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = ("_scale", "_scale_inv", "_scales", ".scales", "_zero_point", ".qzeros", ".g_idx", "_absmax")
_MAX_LISTED = 40  # problems in an error; the rest is counted


def check_coverage(checkpoint: Checkpoint, configs: Mapping[str, Any], known: Iterable[Stage]) -> list[str]:
    """Compare the tensors that stages need with the tensors of the checkpoint.

    Args:
        configs: the config of each stage to be exported, by name.
        known: every stage that may use a tensor.

    Returns: notes on tensors that these stages ignore.

    Raises: CheckpointError that lists all missing, misshaped and unknown tensors.
    """
    problems: list[str] = []
    notes: list[str] = []
    used: dict[str, set[str]] = {}
    ignored: list[tuple[str, str, str]] = []
    for stage in known:
        if not stage.is_present(checkpoint):
            continue
        config = configs.get(stage.name) or stage.config(checkpoint)
        sources = stage.weights(config, Shard())
        for source in sources:
            used.setdefault(source.part, set()).update(source.tensors)
        if stage.name in configs:
            _refuse_quantized(checkpoint, sources)
            problems.extend(check_weights(checkpoint, sources))
        ignored.extend((stage.name, prefix, why) for prefix, why in stage.ignored(checkpoint))
    counts: dict[tuple[str, str, str], int] = {}
    for part_name, names in used.items():
        found = checkpoint.parts.get(part_name)
        tensors = found.tensors if found is not None else {}
        for name in tensors:
            if name in names:
                continue
            rule = next((each for each in ignored if name.startswith(each[1])), None)
            if rule is None:
                problems.append(f"unknown: {part_name}: {name} {list(tensors[name].shape)}")
            else:
                counts[rule] = counts.get(rule, 0) + 1
    notes.extend(
        f"{stage}: {count} tensor(s) {prefix}* not used: {why}"
        for (stage, prefix, why), count in counts.items()
        if stage in configs
    )
    problems = sorted(set(problems))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:_MAX_LISTED])
        more = f"\n  … and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{len(problems)} tensor(s) do not match the configs:\n{listed}{more}",
            where=str(checkpoint.root),
            fix="check that config.json and the shards belong together and were downloaded completely",
        )
    return notes


def _refuse_quantized(checkpoint: Checkpoint, sources: Iterable[WeightSource]) -> None:
    """Raises: CheckpointError when a tensor that is used has no floating-point dtype of 16 bits or more."""
    for source in sources:
        part = checkpoint.parts.get(source.part)
        if part is None:
            continue
        for name in source.tensors:
            entry = part.tensors.get(name)
            if entry is None or entry.dtype in _FLOATS:
                continue
            scales = [each for each in part.tensors if each.endswith(_SCALES)]
            found = (
                f"with {len(scales)} scales such as {scales[0]}"
                if scales
                else "without scales, which are lost"
            )
            raise CheckpointError(
                f"a quantized checkpoint is not read: {name} is stored as {entry.dtype}, {found}",
                where=str(entry.file),
                fix="pass the checkpoint in bfloat16; --quantize fp8 stores weights in FP8",
            )
