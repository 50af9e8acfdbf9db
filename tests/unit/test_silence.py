"""The silence holder: recorded cases without the official fault; other cases neither lose nor repeat samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mingc.runtime.text.silence import SilenceHolder

DATA = Path(__file__).parents[1] / "data"
SPECS: dict[str, Any] = json.loads((DATA / "vae.json").read_text(encoding="utf-8"))
TENSORS = load_file(DATA / "vae.safetensors")
RATE = 1000
TAIL = 300
Waveform = NDArray[np.float32]


def chunks_of(case: str) -> list[Waveform]:
    sizes = [chunk["chunk"] for chunk in SPECS[f"sil.{case}"]["chunks"]]
    return np.split(TENSORS[f"sil.{case}.in"][0], np.cumsum(sizes)[:-1])


def run(chunks: list[Waveform]) -> list[Waveform]:
    holder = SilenceHolder(RATE)
    return [holder.push(chunk, index == len(chunks) - 1) for index, chunk in enumerate(chunks)]


def loud(size: int, value: float = 0.1) -> Waveform:
    return np.full(size, value, dtype=np.float32)


def silent(size: int) -> Waveform:
    return np.full(size, 1e-4, dtype=np.float32)


@pytest.mark.parametrize("case", ["all_silent", "short_last", "offline"])
def test_cases_without_the_fault_match_the_recording(case: str) -> None:
    outputs = run(chunks_of(case))
    for index, output in enumerate(outputs):
        np.testing.assert_array_equal(output, TENSORS[f"sil.{case}.out{index}"][0])


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        # The pause after the last loud frame is kept; the silent end of the utterance is shortened to 0.3 s.
        ("speech_then_silence", [300, 100, 300]),
        ("pause_inside", [300, 100, 500, 110]),
        ("silent_chunk_then_speech", [300, 0, 600, 300, 200]),
    ],
)
def test_cases_with_the_fault_neither_lose_nor_repeat(case: str, sizes: list[int]) -> None:
    chunks = chunks_of(case)
    outputs = run(chunks)
    assert [output.size for output in outputs] == sizes
    whole = np.concatenate(chunks)
    np.testing.assert_array_equal(np.concatenate(outputs), whole[: sum(sizes)])
    assert np.abs(whole[sum(sizes) :]).max(initial=0.0) < 1e-3


def test_a_pause_is_sent_with_the_speech_after_it() -> None:
    outputs = run([loud(100), silent(250), silent(250), loud(100), loud(100)])
    assert [output.size for output in outputs] == [100, 0, 0, 600, 100]


def test_the_incomplete_last_frame_is_sent() -> None:
    assert [output.size for output in run([loud(100), loud(130)])] == [100, 130]
    assert [output.size for output in run([silent(500), loud(50)])] == [0, 550]


def test_the_tail_is_cut_after_the_last_loud_frame() -> None:
    assert [output.size for output in run([loud(200), silent(1000), silent(50)])] == [200, 0, TAIL]
    assert [output.size for output in run([np.concatenate([loud(200), silent(1000)])])] == [200 + TAIL]
    assert [output.size for output in run([silent(1000)])] == [TAIL]
    assert [output.size for output in run([loud(37)])] == [37]


def test_any_chunking_gives_the_same_samples_in_order() -> None:
    generator = np.random.default_rng(5)
    blocks = [loud(int(n)) if i % 2 else silent(int(n)) for i, n in enumerate(generator.integers(1, 500, 30))]
    whole = np.concatenate([*blocks, loud(90)])
    whole += np.arange(whole.size, dtype=np.float32) * np.float32(1e-9)
    for _ in range(20):
        cuts = np.sort(generator.integers(0, whole.size + 1, 25))
        np.testing.assert_array_equal(np.concatenate(run(np.split(whole, cuts))), whole)


def test_an_empty_last_chunk_ends_the_utterance() -> None:
    holder = SilenceHolder(RATE)
    assert holder.push(loud(150), False).size == 100
    assert holder.push(np.zeros(0, dtype=np.float32), True).size == 50
    assert holder.push(loud(100), True).size == 100, "ready for the next utterance"


def test_outputs_are_float32() -> None:
    assert all(output.dtype == np.float32 for output in run([loud(150), silent(150), loud(100)]))


def test_wrong_shapes_and_rates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 100\)"):
        SilenceHolder(RATE).push(np.zeros((1, 100), dtype=np.float32), False)
    with pytest.raises(ValueError, match="5 Hz"):
        SilenceHolder(5)
