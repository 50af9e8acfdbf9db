"""Coverage of a checkpoint: every tensor is used or known to be left out, and every one that is needed is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint, TensorEntry
from mingc.export.checks.coverage import check_coverage
from mingc.export.stages import discover


def check(checkpoint: Checkpoint, *names: str) -> list[str]:
    """The check as an export of the stages `names` runs it; of all stages by default."""
    stages = [stage for stage in discover().values() if not names or stage.name in names]
    return check_coverage(
        checkpoint, {stage.name: stage.config(checkpoint) for stage in stages}, discover().values()
    )


def changed(checkpoint: Checkpoint, *, without: str | None = None, **added: tuple[int, ...]) -> Checkpoint:
    """The checkpoint without the tensor `without` of its main part, and with the tensors `added`."""
    tensors = {name: entry for name, entry in checkpoint.main.tensors.items() if name != without}
    assert without is None or len(tensors) < len(checkpoint.main.tensors)
    entry = next(iter(tensors.values()))
    for name, shape in added.items():
        tensors[name] = TensorEntry(file=entry.file, dtype=entry.dtype, shape=shape)
    return checkpoint.with_part(replace(checkpoint.main, tensors=tensors))


def test_the_tiny_checkpoint_is_covered_with_a_note_on_what_is_left_out(checkpoint: Checkpoint) -> None:
    assert all("not used" in note for note in check(checkpoint))


def test_a_part_that_no_stage_knows_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"unknown: main: adapter \[3, 5\]"):
        check(changed(checkpoint, adapter=(3, 5)))


@pytest.mark.parametrize("shape", [None, (2, 3, 7)])
def test_a_missing_or_misshaped_tensor_is_found_before_anything_is_built(
    shape: tuple[int, ...] | None, checkpoint: Checkpoint
) -> None:
    name = next(name for name in checkpoint.main.tensors if name.startswith("vision."))
    damaged = changed(checkpoint, **{name: shape}) if shape else changed(checkpoint, without=name)
    with pytest.raises(
        CheckpointError, match="misshaped: main: vision" if shape else "missing: main: vision"
    ):
        check(damaged)
    check(damaged, "thinker")  # an export without the stage needs no tensor of it


def test_all_problems_come_in_one_error(checkpoint: Checkpoint) -> None:
    name = next(name for name in checkpoint.main.tensors if name.startswith("vision."))
    with pytest.raises(CheckpointError) as caught:
        check(changed(checkpoint, without=name, adapter=(3, 5), other=(1,)))
    message = caught.value.message
    assert message.startswith("3 tensor(s) do not match")
    assert all(word in message for word in (f"missing: main: {name}", "main: adapter", "main: other"))


def test_notes_are_on_stages_that_are_exported(checkpoint: Checkpoint) -> None:
    notes = check(checkpoint, "thinker")
    assert notes == [] and any(note.startswith("vision_encoder") for note in check(checkpoint))


@pytest.mark.parametrize("has_scales", [True, False])
def test_a_quantized_checkpoint_is_refused_as_such(has_scales: bool, checkpoint: Checkpoint) -> None:
    name = "model.lm_head.weight"
    entry = checkpoint.main.tensors[name]
    tensors = {**checkpoint.main.tensors, name: replace(entry, dtype="F8_E4M3")}
    if has_scales:
        tensors[f"{name}_scale"] = TensorEntry(file=entry.file, dtype="F32", shape=(576,))
    quantized = checkpoint.with_part(replace(checkpoint.main, tensors=tensors))
    says = r"F8_E4M3, with 1 scales such as model\.lm_head" if has_scales else "F8_E4M3, without scales"
    with pytest.raises(CheckpointError, match=says) as caught:
        check(quantized)
    assert "--quantize fp8" in str(caught.value.fix)
