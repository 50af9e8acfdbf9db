"""What the host knows of patches under way."""

from __future__ import annotations

import pytest

from mingc.runtime.talker.launch_timing import LaunchTimingPolicy, PatchLatencyModel


def test_patches_under_way_end_one_after_the_other() -> None:
    times = PatchLatencyModel()
    times.see(16, launched=0.0, ended=0.008)
    times.see(1, launched=0.001, ended=0.011)  # it began when the one before it had ended
    assert times.remaining_s([(16, 0.010)], now=0.012) == pytest.approx(0.011 + 0.008 - 0.012)
    assert times.remaining_s([(16, 0.010), (1, 0.012)], now=0.012) == pytest.approx(
        0.011 + 0.008 + 0.003 - 0.012
    )
    assert times.remaining_s([(1, 0.030)], now=0.031) == pytest.approx(0.002)
    assert times.remaining_s([(1, 0.030)], now=0.035) == 0.0


def test_nothing_is_told_of_a_new_size_or_of_an_idle_device() -> None:
    times = PatchLatencyModel()
    assert times.remaining_s([], now=1.0) == 0.0
    assert times.remaining_s([(4, 1.0)], now=1.0) == 0.0
    times.see(4, launched=1.0, ended=1.005)
    assert times.remaining_s([(4, 2.0), (16, 2.0)], now=2.0) == 0.0
    assert times.remaining_s([], now=2.0) == 0.0


def test_a_patch_that_waited_counts_little() -> None:
    times = PatchLatencyModel()
    times.see(4, launched=0.0, ended=0.005)
    times.see(4, launched=0.005, ended=0.100)
    assert times.remaining_s([(4, 0.100)], now=0.100) == pytest.approx(0.0051)
    for number in range(1, 100):
        times.see(4, launched=0.0, ended=0.100 + 0.006 * number)
    assert times.remaining_s([(4, 1.0)], now=1.0) == pytest.approx(0.006)


def test_patches_are_launched_earlier_where_it_was_close_and_later_again() -> None:
    lead = LaunchTimingPolicy()
    least = lead.seconds
    lead.see(left_s=0.002, was_held=True)
    assert lead.seconds == least
    for _ in range(3):
        lead.see(left_s=0.0005, was_held=True)
    assert lead.seconds == pytest.approx(8 * least)
    lead.see(left_s=0.010, was_held=True)
    assert least < lead.seconds < 8 * least
    for _ in range(300):
        lead.see(left_s=0.010, was_held=True)
    assert lead.seconds == least
    for _ in range(30):
        lead.see(left_s=-0.050, was_held=True)
    assert lead.seconds == 1.0
    lead.see(left_s=0.0, was_held=False)  # joins had taken the time, not the launch
    assert lead.seconds < 1.0
