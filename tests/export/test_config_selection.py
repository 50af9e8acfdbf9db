"""Which cut of the experts' kernels is taken, over times that are made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mingc.export.autotune.search_space import candidates
from mingc.export.autotune.selection import LEAST_GAIN, choose, families
from mingc.kernels.triton.moe_config import BF16, FP8, INT4, Cut, Kernel, Shape, Tiles, rule, using
from mingc.kernels.triton.moe_config import cut as cut_in_use

README = Path(__file__).parents[2] / "README.md"
STORAGES = (BF16, FP8, INT4)


def make_shape(kernel: Kernel = "batch", tokens: int = 16, storage: int = BF16, width: int = 256) -> Shape:
    return Shape(
        kernel=kernel, tokens=tokens, hidden_size=4096, width=width, experts=256, chosen=8, storage=storage
    )


class Clock:
    """`us` of a cut; all of the time-th timing are divided by the time-th of `speeds`, 1 beyond."""

    def __init__(self, us: Callable[[Cut], float], speeds: Sequence[float] = ()) -> None:
        self._us, self._speeds = us, speeds
        self.asked: list[tuple[Cut, ...]] = []

    def __call__(self, cuts: Sequence[Cut]) -> list[float]:
        speed = self._speeds[len(self.asked)] if len(self.asked) < len(self._speeds) else 1
        self.asked.append(tuple(cuts))
        return [self._us(cut) / speed for cut in cuts]


def test_the_fastest_is_taken_when_it_is_clearly_faster() -> None:
    cuts = candidates(make_shape())
    clock = Clock(lambda cut: 90.0 if cut == cuts[2] else 100.0)
    choice = choose(make_shape(), cuts, clock)
    assert (choice.cut, choice.us, choice.default_us) == (cuts[2], 90.0, 100.0)
    assert clock.asked[0] == cuts
    assert clock.asked[1:] == [(cuts[0], cuts[2])] * 3


@pytest.mark.parametrize("gain", [0.0, 0.01, 0.02, 0.0299])
def test_what_is_little_faster_is_not_taken(gain: float) -> None:
    cuts = candidates(make_shape())
    choice = choose(make_shape(), cuts, Clock(lambda cut: 100 * (1 - gain * (cut == cuts[1]))))
    assert (choice.cut, choice.us, choice.default_us) == (rule(make_shape()), 100.0, 100.0)


def test_nothing_is_timed_again_where_nothing_is_promising() -> None:
    cuts = candidates(make_shape())
    clock = Clock(lambda cut: 100.0 if cut == cuts[0] else 99.5)
    choose(make_shape(), cuts, clock)
    assert len(clock.asked) == 1


def test_one_fast_moment_is_not_enough() -> None:
    cuts = candidates(make_shape())
    clock = Clock(lambda cut: 100.0)
    times = iter([80.0, 80.0, 98.0, 80.0])  # of the second candidate: at first and then against the default
    choice = choose(
        make_shape(),
        cuts,
        lambda each: [
            next(times) if cut == cuts[1] else us for cut, us in zip(each, clock(each), strict=True)
        ],
    )
    assert choice.cut == cuts[0]


def test_a_device_that_slows_down_meanwhile_changes_nothing() -> None:
    cuts = candidates(make_shape())
    clock = Clock(lambda cut: 100.0 if cut == cuts[0] else 95.0, speeds=(1, 1, 0.5, 0.8))
    choice = choose(make_shape(), cuts, clock)
    assert choice.cut != cuts[0]
    assert choice.us == pytest.approx(0.95 * choice.default_us)


def test_the_fastest_first_and_second_product_are_tried_together() -> None:
    """Each saves two of a hundred alone, too little; together they save four."""
    shape = make_shape()
    default, cuts = rule(shape), candidates(shape)
    up = next(cut.up for cut in cuts if cut.up != default.up)
    down = next(cut.down for cut in cuts if cut.down != default.down)
    choice = choose(shape, cuts, Clock(lambda cut: 100.0 - 2 * (cut.up == up) - 2 * (cut.down == down)))
    assert choice.cut == replace(default, up=up, down=down)
    assert choice.cut not in cuts
    assert choice.us == 96.0


def test_products_of_other_blocks_are_not_put_together() -> None:
    """Tiles of blocks of 32 rows say nothing of those of 64."""
    shape = make_shape("grouped", tokens=1024)
    cuts = candidates(shape)
    other = next(cut for cut in cuts if cut.rows != rule(shape).rows)
    choice = choose(shape, cuts, Clock(lambda cut: 50.0 if cut.rows == other.rows else 100.0))
    assert choice.cut in cuts and choice.cut.rows == other.rows


def test_the_least_gain_is_what_is_documented() -> None:
    found = re.search(r"cut that is more than (\d+) % faster", " ".join(README.read_text().split()))
    assert found is not None and int(found[1]) == round(100 * LEAST_GAIN)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("width", [128, 256, 1024])
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [("moe_gemv", 1), ("row", 1), ("batch", 32), *(("grouped", 128 << i) for i in range(7))],
)
def test_candidates_are_few_differ_and_fit_the_weights(
    kernel: Kernel, tokens: int, width: int, storage: int
) -> None:
    shape = make_shape(kernel, tokens, storage, width)
    cuts = candidates(shape)
    assert cuts[0] == rule(shape)
    assert 2 <= len(cuts) == len(set(cuts)) <= 12
    per_item = 2 if storage == INT4 and kernel == "batch" else 1
    for cut in cuts:
        up_columns = 2 * width if kernel == "grouped" else width
        assert up_columns % cut.up.columns == 0 and 4096 // per_item % cut.up.depth == 0
        assert 4096 % (cut.down.columns * cut.down.repeats) == 0 and width // per_item % cut.down.depth == 0
        assert (kernel == "grouped") == (cut.rows > 0)
        if cut.extra:  # the kernel that takes such rows knows no other
            assert storage == BF16 and not cut.swap


def test_families_are_cut_alike_and_in_order() -> None:
    shapes = [make_shape("grouped", tokens) for tokens in (4096, 128, 1024, 256, 2048, 512)]
    shapes += [make_shape("batch", tokens) for tokens in (64, 16, 32)]
    found = [[shape.tokens for shape in family] for family in families(shapes)]
    assert found == [[16, 32, 64], [128, 256], [512, 1024], [2048, 4096]]


def test_a_table_answers_for_its_shapes_while_it_is_in_use() -> None:
    shape, other = make_shape(), make_shape(tokens=32)
    cut = Cut(up=Tiles(columns=16, depth=64), down=Tiles(columns=32, depth=64))
    with using({shape: cut}):
        assert cut_in_use(shape) == cut
        assert cut_in_use(other) == rule(other)
        with using({}):
            assert cut_in_use(shape) == rule(shape)
    assert cut_in_use(shape) == rule(shape)
