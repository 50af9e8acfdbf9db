"""When turns begin and end, by sequences of probabilities written by hand. A frame has 32 ms."""

from __future__ import annotations

import random

import pytest

from mingc.media.turns import FRAME_MS, TurnDetector, TurnEnd, TurnStart
from mingc.prompts.media_decoder import TurnRules

RULES = TurnRules(threshold=0.5, prefix_padding_ms=64, silence_ms=96)


def turns(frames: list[float], rules: TurnRules = RULES) -> list[TurnStart | TurnEnd]:
    detector = TurnDetector(rules)
    return [event for each in frames for event in detector.push(each)] + detector.finish()


def ends(frames: list[float], rules: TurnRules = RULES) -> list[tuple[int, int, int, int]]:
    """Turn and speech of each turn, in frames."""
    found = [each for each in turns(frames, rules) if isinstance(each, TurnEnd)]
    times = [(each.start_ms, each.end_ms, each.speech_start_ms, each.speech_end_ms) for each in found]
    return [tuple(ms // FRAME_MS for ms in each) for each in times]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([0.1] * 9, []),
        ([0.1] * 3 + [0.9] + [0.1] * 5, []),  # one frame is a click
        ([0.9, 0.1] * 9, []),
        ([0.1] * 4 + [0.9] * 2 + [0.1] * 9, [(2, 9, 4, 6)]),
        ([0.9] * 2 + [0.1] * 3, [(0, 5, 0, 2)]),  # nothing is before the beginning
        ([0.5] * 2 + [0.34] * 3, [(0, 5, 0, 2)]),
        ([0.5] * 2 + [0.36] * 4 + [0.1] * 3, [(0, 9, 0, 6)]),  # 0.35 is the threshold of silence
        ([0.9] * 2 + [0.1] * 2 + [0.4] + [0.1] * 3, [(0, 8, 0, 5)]),  # too short a silence
        (
            [0.9] * 2 + [0.1] * 3 + [0.9] * 2 + [0.1] * 3,
            [(0, 5, 0, 2), (5, 10, 5, 7)],
        ),  # no padding of another turn
        ([0.1] * 4 + [0.9] * 3, [(2, 7, 4, 7)]),  # the stream ends
        ([0.1] * 4 + [0.9] * 3 + [0.1], [(2, 8, 4, 7)]),
    ],
)
def test_turns(frames: list[float], expected: list[tuple[int, int, int, int]]) -> None:
    assert ends(frames) == expected


def test_a_start_is_told_at_its_second_frame_and_an_end_after_the_silence() -> None:
    detector = TurnDetector(RULES)
    told = [detector.push(each) for each in [0.1] * 4 + [0.9] * 2 + [0.1] * 3]
    assert told[:5] == [[]] * 5 and told[5] == [TurnStart(64)] and told[6:8] == [[], []]
    (end,) = told[8]
    assert isinstance(end, TurnEnd) and end.probability == pytest.approx(0.9) and not end.is_cut


def test_a_low_threshold_keeps_a_threshold_of_silence() -> None:
    assert ends([0.02] * 2 + [0.005] * 3, TurnRules(threshold=0.02, prefix_padding_ms=0, silence_ms=96)) == [
        (0, 5, 0, 2)
    ]


def test_a_reset_ends_a_turn_without_an_event() -> None:
    detector = TurnDetector(RULES)
    for each in [0.9] * 4:
        detector.push(each)
    detector.reset(140)
    assert detector.finish() == [] and detector.needed_from_ms == 140
    assert [detector.push(0.9) for _ in range(2)] == [[], [TurnStart(140)]]


def test_a_long_turn_is_cut_where_speech_is_least_probable() -> None:
    rules = TurnRules(threshold=0.5, prefix_padding_ms=0, silence_ms=96, max_ms=10 * FRAME_MS)
    frames = [0.9] * 3 + [0.3] + [0.9] * 4 + [0.4] + [0.9] * 8 + [0.1] * 3
    assert ends(frames, rules) == [
        (0, 8, 0, 8),
        (8, 18, 8, 17),
    ]  # at 0.4; then in the silence behind the speech
    found = [each for each in turns(frames, rules) if isinstance(each, TurnEnd)]
    assert [each.is_cut for each in found] == [True, False]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([0.1] * 3, [(0, 10, 0, 9, False)]),  # the silence goes on, and ends the turn
        ([0.1] + [0.9] * 2 + [0.1] * 3, [(0, 9, 0, 9, True), (9, 16, 11, 13, False)]),
        ([0.9] * 2 + [0.1] * 3, [(0, 9, 0, 9, True), (9, 15, 10, 12, False)]),
    ],
)
def test_a_silence_at_the_longest_length_ends_a_turn_if_it_is_long_enough(
    after: list[float], expected: list[tuple[int, int, int, int, bool]]
) -> None:
    rules = TurnRules(threshold=0.5, prefix_padding_ms=64, silence_ms=96, max_ms=10 * FRAME_MS)
    frames = [0.9] * 9 + [0.1] + after
    found = [each for each in turns(frames, rules) if isinstance(each, TurnEnd)]
    assert [(*times, each.is_cut) for times, each in zip(ends(frames, rules), found, strict=True)] == expected


@pytest.mark.parametrize("seed", range(30))
def test_turns_cover_all_speech_once_and_are_short_enough(seed: int) -> None:
    """Any probabilities, with and without a longest turn: in order, apart, no speech left out, none twice."""
    generator = random.Random(seed)
    frames = [generator.choice([0.01, 0.4, 0.6, 0.99]) for _ in range(400)]
    if seed % 3 == 0:
        frames = [0.99 if (index // 40) % 2 else each for index, each in enumerate(frames)]
    max_ms = None if seed % 2 else 20 * FRAME_MS
    rules = TurnRules(threshold=0.5, prefix_padding_ms=64, silence_ms=96, max_ms=max_ms)
    found = ends(frames, rules)
    covered: set[int] = set()
    before = 0
    for start, end, first, last in found:
        assert before <= start <= first < last <= end
        assert max_ms is None or end - start <= 20
        covered |= {*range(first, last)}
        before = end
    pairs = [index for index in range(399) if min(frames[index : index + 2]) >= 0.5]
    assert all(index in covered and index + 1 in covered for index in pairs)
