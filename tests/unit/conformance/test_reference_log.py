"""Comparisons with a golden file: waivers, expected differences, and what is not compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.reference_log import ReferenceLog
from mingc.media.dsp.audio_comparison import AudioDifference
from mingc.verify.comparison import Comparison, FileSummary
from mingc.verify.scale import Scale


def make_log() -> ReferenceLog:
    references = {
        "a.out": np.array([[1.0, -2.0]], np.float32),
        "a.in": np.array([3.0], np.float32),
        "a.ids": np.array([1, 2, 3]),
        "b.out": np.zeros(0, np.float32),
        "b.hidden": np.ones(4, np.float32),
    }
    return ReferenceLog("file.safetensors", references, tolerance=1e-4, is_exact=True)


def last(log: ReferenceLog) -> Comparison:
    return log.comparisons[-1]


@pytest.mark.parametrize(
    "value, outcome",
    [([[1.0, -2.0]], "pass"), ([[1.5, -2.0]], "expected difference"), ([[np.nan, -2.0]], "FAIL")],
)
def test_a_waiver_covers_a_difference_but_not_nan(value: list[list[float]], outcome: str) -> None:
    log = make_log()
    log.tensor("a.out", value, waiver="tokens were rerouted")
    assert last(log).outcome == outcome
    assert (last(log).note == "tokens were rerouted") == (outcome == "expected difference")


@pytest.mark.parametrize(
    "off, outcome", [(1e-4, "pass"), (0.3, "expected difference"), (0.5, "FAIL"), (np.nan, "FAIL")]
)
def test_quantized_weights_may_differ_by_a_few_times_the_error_in_the_manifest(
    off: float, outcome: str
) -> None:
    log = ReferenceLog(
        "file", {"out": np.array([1.0, -2.0])}, tolerance=1e-4, is_exact=True, quantization=0.05
    )
    log.tensor("out", [1.0 + off, -2.0])
    assert last(log).outcome == outcome
    assert ("by up to 0.05" in last(log).note) == (outcome == "expected difference")
    log.tensor("out", [1.3, -2.0], tolerance=0.01)  # not an engine output
    assert last(log).outcome == "FAIL"


def test_a_name_that_the_file_lacks_is_not_compared() -> None:
    log = make_log()
    log.tensor("absent", [1.0])
    log.ids("absent", [1])
    log.expect_difference("absent", [1.0], "why")
    assert not log.comparisons


def test_ids_may_differ_with_a_waiver_but_not_in_number() -> None:
    log = make_log()
    log.ids("a.ids", [1, 2, 4], waiver="two tokens have nearly equal logits")
    assert (last(log).outcome, last(log).note) == (
        "expected difference",
        "two tokens have nearly equal logits",
    )
    log.ids("a.ids", [1, 2, 3], waiver="two tokens have nearly equal logits")
    assert (last(log).outcome, last(log).note) == ("pass", "")
    log.ids("a.ids", [1, 2], waiver="two tokens have nearly equal logits")
    assert last(log).outcome == "FAIL"


def test_text_shows_what_differs() -> None:
    log = make_log()
    log.text("t", "abc", "abd")
    assert last(log).outcome == "FAIL"
    assert "'abc' is not 'abd'" in last(log).note


def test_a_missing_reference_fails_only_its_case() -> None:
    log = make_log()
    with log.case("first"):
        log.input("absent")
    with log.case("second"):
        log.tensor("a.out", [[1.0, -2.0]])
    assert [each.outcome for each in log.comparisons] == ["FAIL", "pass"]
    assert "file.safetensors lacks absent" in log.comparisons[0].note


def test_a_summary_counts_compared_values_inputs_and_the_rest() -> None:
    log = make_log()
    assert log.cases("out") == ["a", "b"]
    log.input("a.in")
    log.tensor("a.out", [[1.0, -2.0002]])
    log.expect_difference("b.out", np.zeros(0), "another variant")
    log.skip("a.ids", "no engine")
    summary = log.summary()
    assert (summary.checked, summary.failed, summary.inputs, summary.not_outputs) == (2, 0, 1, 2)
    assert summary.worst_error == pytest.approx(1e-4, rel=1e-2)
    assert log.not_outputs() == ["a.ids", "b.hidden"]


def test_the_console_lists_only_comparisons_that_did_not_pass() -> None:
    log = make_log()
    log.tensor("a.out", [[1.0, -2.0]], how="again")
    log.ids("a.ids", [1, 2, 4])
    log.expect_difference("b.out", np.zeros(0), "another variant")
    log.tensor("a.out", [[1.5, -2.0]])
    assert [each.cells() for each in log.comparisons] == [
        {},
        {"name": "file: a.ids", "outcome": "FAIL", "error": "different", "tolerance": "", "note": ""},
        {
            "name": "file: b.out",
            "outcome": "expected difference",
            "error": "0.0e+00",
            "tolerance": "",
            "note": "another variant",
        },
        {"name": "file: a.out", "outcome": "FAIL", "error": "2.5e-01", "tolerance": "1e-04", "note": ""},
    ]


def test_records_as_a_whole() -> None:
    """Kind, error, tolerance, identity and note of each way to compare, in the terms of docs/verification.md."""
    log = make_log()
    near = AudioDifference(figure="duration", found=1.0, recorded=1.0, difference=0.25, limit=0.5)
    far = replace(near, difference=0.75)
    log.tensor("a.out", [[1.0, -2.5]], how="again", tolerance=0.004)
    log.tensor("a.out", [[1.0, -2.5]], tolerance=0.5)
    log.tensor("given", [1.0], reference=[1.0], how="one row")
    log.ids("a.ids", [1, 2, 3], how="again")
    log.ids("given ids", [4], reference=[5])
    log.text("t", ["a", "b"], ("a", "b"))
    log.share("steps", same=19, total=20, minimum=0.9, note="of 3 answers")
    log.share("none", same=0, total=0, minimum=1.0)
    log.scale("s", Scale(factor=0.9, allowed=0.2), how="fit")
    log.scale("s", Scale(factor=1.3, allowed=0.2), how="")
    log.expect_difference("b.hidden", [1.0, 1.0, 1.0, 0.5], "another variant")
    log.audio("wave", [near, far], how="file")
    log.rule("b.out", True, "finite")
    log.skip("x", "no engine")

    def record(name: str, kind: str, outcome: str = "pass", **given: object) -> Comparison:
        return Comparison(name=f"file: {name}", kind=kind, outcome=outcome, **given)  # type: ignore[arg-type]

    expected = [
        record("a.out (again)", "tensor", "FAIL", error=0.25, tolerance=0.004),
        record("a.out", "tensor", error=0.25, tolerance=0.5),
        record("given (one row)", "tensor", error=0.0, tolerance=1e-4),
        record("a.ids (again)", "ids", identical=True),
        record("given ids", "ids", "FAIL", identical=False),
        record("t", "text", identical=True),
        record("steps", "share", error=1 - 19 / 20, tolerance=0.1, note="19 of 20 identical; of 3 answers"),
        record("none", "share", error=0.0, tolerance=0.0, note="0 of 0 identical"),
        record("s (fit)", "scale", error=abs(0.9 - 1), tolerance=0.2),
        record(
            "s",
            "scale",
            "FAIL",
            error=1.3 - 1,
            tolerance=0.2,
            note="1.300 times the reference; allowed: 1 ± 0.200",
        ),
        record("b.hidden", "tensor", "expected difference", error=0.5, note="another variant"),
        record("wave duration (file)", "audio", error=0.25, tolerance=0.5),
        record("wave duration (file)", "audio", "FAIL", error=0.75, tolerance=0.5, note=far.describe()),
        record("b.out", "text", identical=True, note="finite"),
        record("x", "text", "not checked", note="no engine"),
    ]
    assert log.comparisons == expected
    log.input("a.in")
    log.input("a.ids")  # compared as well: counted once
    log.note = "a note"
    summary = log.summary()
    assert summary == FileSummary(
        file="file.safetensors",
        checked=14,
        failed=4,
        inputs=1,
        not_outputs=0,
        worst_error=1.3 - 1,
        note="a note",
    )


def test_a_loose_tolerance_bounds_the_scale_of_all_values_too() -> None:
    log = make_log()
    reference = np.linspace(1, 2, 400)
    log.tensor("x", reference * 1.02, reference=reference, tolerance=0.01)
    assert last(log).outcome == "FAIL" and last(log).note == "", "beyond the tolerance itself"
    log.tensor("x", reference * 1.06, reference=reference, tolerance=0.1)
    assert last(log).outcome == "FAIL" and "1.060 times the reference" in last(log).note
    log.tensor("x", reference * 1.06, reference=reference, tolerance=0.1, waiver="rerouted")
    assert (last(log).outcome, last(log).note) == ("expected difference", "rerouted")
    log.tensor("x", reference * 1.001, reference=reference, tolerance=0.1)
    assert (last(log).outcome, last(log).note) == ("pass", "")


@pytest.mark.parametrize(
    ("given", "tolerance", "waiver", "outcome"),
    [(1.002, 1e-3, "", "pass"), (1.0021, 1e-3, "", "FAIL"), (1.0021, 1e-3, "w", "expected difference")],
)
def test_the_tolerance_itself_passes(given: float, tolerance: float, waiver: str, outcome: str) -> None:
    log = make_log()
    log.tensor("x", [given, 2.0], reference=[1.0, 2.0], tolerance=tolerance + 1e-12, waiver=waiver)
    assert last(log).outcome == outcome


def test_a_waiver_covers_a_scale() -> None:
    log = ReferenceLog("file", {"out": np.ones(1000)}, tolerance=0.1, is_exact=False)
    log.tensor("out", np.full(1000, 1.05), waiver="other experts")
    assert [each.outcome for each in log.comparisons] == ["expected difference"]
    assert log.comparisons[0].note == "other experts"
