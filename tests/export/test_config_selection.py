"""Selection of kernel configurations, with made-up times."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mingc.artifacts.target import KernelConfig
from mingc.export.autotune.search_space import search_space
from mingc.export.autotune.selection import MIN_GAIN, group_by_default, select_fastest
from mingc.kernels.triton.moe_config import (
    BF16,
    FP8,
    INT4,
    Kernel,
    MoeConfig,
    MoeProblem,
    default_config,
    select_config,
    use_tuned_configs,
)

ROOT = Path(__file__).parents[2]
WEIGHT_FORMATS = (BF16, FP8, INT4)


def make_problem(
    kernel: Kernel = "batch", tokens: int = 16, weight_format: int = BF16, width: int = 256
) -> MoeProblem:
    return MoeProblem(
        kernel=kernel,
        tokens=tokens,
        hidden_size=4096,
        intermediate_size=width,
        experts=256,
        top_k=8,
        weight_format=weight_format,
    )


class FakeTimer:
    """Times of `us(config)`; call i divides them by `speeds[i]`, or by 1 beyond the last."""

    def __init__(self, us: Callable[[MoeConfig], float], speeds: Sequence[float] = ()) -> None:
        self._us, self._speeds = us, speeds
        self.asked: list[tuple[MoeConfig, ...]] = []

    def __call__(self, configs: Sequence[MoeConfig]) -> list[float]:
        speed = self._speeds[len(self.asked)] if len(self.asked) < len(self._speeds) else 1
        self.asked.append(tuple(configs))
        return [self._us(config) / speed for config in configs]


def test_a_clearly_faster_configuration_is_selected() -> None:
    configs = search_space(make_problem())
    timer = FakeTimer(lambda config: 90.0 if config == configs[2] else 100.0)
    selection = select_fastest(make_problem(), configs, timer)
    assert (selection.config, selection.us, selection.default_us) == (configs[2], 90.0, 100.0)
    assert timer.asked[0] == configs
    assert timer.asked[1:] == [(configs[0], configs[2])] * 3


@pytest.mark.parametrize("gain", [0.0, 0.01, 0.02, 0.0299])
def test_a_slightly_faster_configuration_is_not_selected(gain: float) -> None:
    configs = search_space(make_problem())
    selection = select_fastest(
        make_problem(), configs, FakeTimer(lambda config: 100 * (1 - gain * (config == configs[1])))
    )
    assert (selection.config, selection.us, selection.default_us) == (
        default_config(make_problem()),
        100.0,
        100.0,
    )


def test_nothing_is_timed_again_without_a_promising_configuration() -> None:
    configs = search_space(make_problem())
    timer = FakeTimer(lambda config: 100.0 if config == configs[0] else 99.5)
    select_fastest(make_problem(), configs, timer)
    assert len(timer.asked) == 1


def test_one_fast_measurement_is_not_enough() -> None:
    configs = search_space(make_problem())
    timer = FakeTimer(lambda config: 100.0)
    times = iter(
        [80.0, 80.0, 98.0, 80.0]
    )  # of the second configuration: first alone, then against the default
    selection = select_fastest(
        make_problem(),
        configs,
        lambda each: [
            next(times) if config == configs[1] else us for config, us in zip(each, timer(each), strict=True)
        ],
    )
    assert selection.config == configs[0]


def test_a_gpu_that_slows_down_between_calls_does_not_matter() -> None:
    configs = search_space(make_problem())
    timer = FakeTimer(lambda config: 100.0 if config == configs[0] else 95.0, speeds=(1, 1, 0.5, 0.8))
    selection = select_fastest(make_problem(), configs, timer)
    assert selection.config != configs[0]
    assert selection.us == pytest.approx(0.95 * selection.default_us)


def test_the_fastest_first_and_second_gemm_are_combined() -> None:
    """Each alone saves 2 %, too little; together they save 4 %."""
    problem = make_problem()
    default, configs = default_config(problem), search_space(problem)
    up = next(config.up for config in configs if config.up != default.up)
    down = next(config.down for config in configs if config.down != default.down)
    selection = select_fastest(
        problem, configs, FakeTimer(lambda config: 100.0 - 2 * (config.up == up) - 2 * (config.down == down))
    )
    assert selection.config == replace(default, up=up, down=down)
    assert selection.config not in configs
    assert selection.us == 96.0


def test_gemms_of_different_block_sizes_are_not_combined() -> None:
    """Configurations with block_m 32 and 64 cannot be combined."""
    problem = make_problem("grouped", tokens=1024)
    configs = search_space(problem)
    other = next(config for config in configs if config.block_m != default_config(problem).block_m)
    selection = select_fastest(
        problem, configs, FakeTimer(lambda config: 50.0 if config.block_m == other.block_m else 100.0)
    )
    assert selection.config in configs and selection.config.block_m == other.block_m


def test_the_minimum_gain_is_documented() -> None:
    text = " ".join((ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split())
    assert re.findall(r"more than (\d+) % faster", text) == [str(round(100 * MIN_GAIN))]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("width", [128, 256, 1024])
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [("moe_gemv", 1), ("expert_gemv", 1), ("batch", 32), *(("grouped", 128 << i) for i in range(7))],
)
def test_the_search_space_is_small_distinct_and_divides_the_weights(
    kernel: Kernel, tokens: int, width: int, weight_format: int
) -> None:
    problem = make_problem(kernel, tokens, weight_format, width)
    configs = search_space(problem)
    assert configs[0] == default_config(problem)
    assert 2 <= len(configs) == len(set(configs)) <= 12
    per_item = 2 if weight_format == INT4 and kernel == "batch" else 1
    for config in configs:
        up_rows = 2 * width if kernel == "grouped" else width
        assert up_rows % config.up.block_n == 0 and 4096 // per_item % config.up.block_k == 0
        assert (
            4096 % (config.down.block_n * config.down.tiles_per_program) == 0
            and width // per_item % config.down.block_k == 0
        )
        assert (kernel == "grouped") == (config.block_m > 0)
        if config.extra_rows:  # the kernel that supports extra rows supports no other
            assert weight_format != INT4 and not config.swap_operands


def test_groups_share_a_default_and_are_ordered() -> None:
    problems = [make_problem("grouped", tokens) for tokens in (4096, 128, 1024, 256, 2048, 512)]
    problems += [make_problem("batch", tokens) for tokens in (64, 16, 32)]
    found = [[problem.tokens for problem in family] for family in group_by_default(problems)]
    assert found == [[16, 32, 64], [128, 256], [512, 1024], [2048, 4096]]


def test_a_table_of_tuned_configs_applies_inside_its_context() -> None:
    problem, other = make_problem(), make_problem(tokens=32)
    config = MoeConfig(up=KernelConfig(block_n=16, block_k=64), down=KernelConfig(block_n=32, block_k=64))
    with use_tuned_configs({problem: config}):
        assert select_config(problem) == config
        assert select_config(other) == default_config(other)
        with use_tuned_configs({}):
            assert select_config(problem) == default_config(problem)
    assert select_config(problem) == default_config(problem)
