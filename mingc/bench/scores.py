"""Scores of answers to a data set, as those who published it compute them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal

from mingc.bench.records import Item, Run
from mingc.text.error_rate import normalised, word_errors

Judge = Callable[[Item, str], float]
"""1 of a right answer, 0 of a wrong one; of what is spoken or transcribed, its error rate."""

TRANSCRIBED = ("speech", "speech-stream", "transcription")
_NUMBER = re.compile(r"(?<![\d.,)])-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|-?\.\d+")
_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_MARKS = ",.!?;:'"


def score(items: Sequence[Item], judge: Judge, runs: Sequence[Run]) -> dict[str, float]:
    """Score all answers of `runs` to items with an expected answer; a request that failed is answered wrongly."""
    expected = {item.id: item for item in items if item.expected is not None}
    values: dict[str, list[float]] = {}
    failed = 0
    for sample in (sample for run in runs for sample in run.samples if sample.item in expected):
        item = expected[sample.item]
        is_rate = item.path in TRANSCRIBED
        failed += bool(sample.error)
        value = float(is_rate) if sample.error else judge(item, sample.text)
        values.setdefault("word or character error rate, %" if is_rate else "accuracy, %", []).append(value)
    if not values:
        return {}
    means = {name: 100 * sum(each) / len(each) for name, each in values.items()}
    return {**means, "answers": float(sum(map(len, values.values()))), "failed": float(failed)}


def same_words(item: Item, answer: str) -> float:
    """Compare by words without case and punctuation: error rate of a transcript, equality of another answer.

    The mean of these rates is what Seed-TTS reports (https://arxiv.org/abs/2406.02430, seed-tts-eval).
    """
    expected = item.expected or ""
    if item.path in TRANSCRIBED:
        return word_errors(expected, answer).rate
    return float(normalised(expected) == normalised(answer))


def last_number(item: Item, answer: str) -> float:
    """Compare the last number of the answer with the one behind `####` of the reference (GSM8K, arXiv 2110.14168)."""
    wanted, found = ([*_numbers(text)] for text in (item.expected or "", answer))
    return float(bool(found) and found[-1] == wanted[-1])


def _numbers(text: str) -> Iterator[Decimal]:
    for found in _NUMBER.finditer(text.replace("$", "").replace("−", "-")):
        yield Decimal(found[0].replace(",", ""))


def chosen_option(answer: str, options: Mapping[str, str], item: str) -> str:
    """Find the letter of the option that an answer names, by the rules of MMMU (arXiv 2311.16502, `eval_utils.py`).

    Letters in brackets count first, then letters that stand alone, then letters before a point, then the texts of the
    options; of several, the last one. Where nothing is found, the rules choose by chance: the same for the same `item`.
    """
    text = f" {answer.strip(_MARKS + ' ')} "
    found: dict[str, int] = {}
    for form in ("({})", " {} ", "{}."):
        found = {letter: text.rfind(form.format(letter)) for letter in options}
        if max(found.values()) >= 0:
            break
    else:
        if len(text.split()) > 5:
            found = {letter: text.lower().rfind(option.lower()) for letter, option in options.items()}
    if max(found.values()) < 0:
        return random.Random(item).choice([*options])
    return max(found, key=lambda letter: found[letter])


def is_open_answer(answer: str, expected: Sequence[str]) -> bool:
    """Whether an answer without options has one of `expected`, by the same rules.

    What stands behind words such as "is" or "answer" counts, and the numbers in it, rounded to two digits.
    """
    lines = answer.strip().strip(".").lower().split("\n")
    keys = []
    for index, line in enumerate(lines):
        marks = (*_KEYS, "=") if index == len(lines) - 1 else _KEYS
        tails = [line.rpartition(mark)[2].strip() for mark in marks if mark in line]
        keys += [tail for tail in (min(tails, key=len, default=""),) if tail.strip(_MARKS)]
    texts = keys or [answer.strip().strip(".").lower()]
    found = {value for text in texts for value in (text, *_PLAIN_NUMBER.findall(text))}
    values = {value for text in found for value in _comparable(text)}
    wanted = {value for text in expected for value in _comparable(text)}
    return any(
        want in value if isinstance(want, str) and isinstance(value, str) else want == value
        for want in wanted
        for value in values
    )


def _comparable(text: str) -> tuple[float | str, ...]:
    text = text.strip()
    if _PLAIN_NUMBER.fullmatch(text):
        return (round(float(text.replace(",", "")), 2),)
    return (f" {text.lower()}", f"{text.lower()} ") if len(text) == 1 else (text.lower(),)
