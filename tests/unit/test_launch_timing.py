"""Launch timing: latency estimates of patches, and the launch lead."""

from __future__ import annotations

import pytest

from mingc.runtime.talker.launch_timing import LaunchTimingPolicy, PatchLatencyModel


def test_patches_under_way_end_one_after_the_other() -> None:
    model = PatchLatencyModel()
    model.observe(16, launched=0.0, ended=0.008)
    model.observe(1, launched=0.001, ended=0.011)  # it began when the one before it had ended
    assert model.remaining_s([(16, 0.010)], now=0.012) == pytest.approx(0.011 + 0.008 - 0.012)
    assert model.remaining_s([(16, 0.010), (1, 0.012)], now=0.012) == pytest.approx(
        0.011 + 0.008 + 0.003 - 0.012
    )
    assert model.remaining_s([(1, 0.030)], now=0.031) == pytest.approx(0.002)
    assert model.remaining_s([(1, 0.030)], now=0.035) == 0.0


def test_a_new_size_and_an_idle_device_have_no_estimate() -> None:
    model = PatchLatencyModel()
    assert model.remaining_s([], now=1.0) == 0.0
    assert model.remaining_s([(4, 1.0)], now=1.0) == 0.0
    model.observe(4, launched=1.0, ended=1.005)
    assert model.remaining_s([(4, 2.0), (16, 2.0)], now=2.0) == 0.0
    assert model.remaining_s([], now=2.0) == 0.0


def test_a_delayed_patch_changes_the_estimate_little() -> None:
    model = PatchLatencyModel()
    model.observe(4, launched=0.0, ended=0.005)
    model.observe(4, launched=0.005, ended=0.100)
    assert model.remaining_s([(4, 0.100)], now=0.100) == pytest.approx(0.0051)
    for number in range(1, 100):
        model.observe(4, launched=0.0, ended=0.100 + 0.006 * number)
    assert model.remaining_s([(4, 1.0)], now=1.0) == pytest.approx(0.006)


def test_the_lead_grows_after_late_launches_and_decays() -> None:
    timing = LaunchTimingPolicy()
    least = timing.lead_s
    timing.observe(left_s=0.002, was_held=True)
    assert timing.lead_s == least
    for _ in range(3):
        timing.observe(left_s=0.0005, was_held=True)
    assert timing.lead_s == pytest.approx(8 * least)
    timing.observe(left_s=0.010, was_held=True)
    assert least < timing.lead_s < 8 * least
    for _ in range(300):
        timing.observe(left_s=0.010, was_held=True)
    assert timing.lead_s == least
    for _ in range(30):
        timing.observe(left_s=-0.050, was_held=True)
    assert timing.lead_s == 1.0
    timing.observe(left_s=0.0, was_held=False)  # joins had taken the time, not the launch
    assert timing.lead_s < 1.0
