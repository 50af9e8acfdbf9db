"""Replay of the silence holder: which outputs keep the silence rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mingc.runtime.text.silence import SilenceHolder
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.vae import _replay_holder, follows_silence_rule, num_frames, stream_wave

RATE = 1000
FRAME = 100
Floats = NDArray[np.float32]


def wave(*levels: float) -> Floats:
    """One frame of 0.1 s per level, of alternating sign."""
    signs = np.where(np.arange(FRAME) % 2, -1, 1)
    return np.concatenate([level * signs for level in levels]).astype(np.float32)


def replay(
    samples: Floats, chunk: int, change: Callable[[Floats], Floats] = lambda out: out
) -> dict[str, str]:
    """Outcomes by name; `change` makes the recorded outputs of those of the holder."""
    parts = np.split(samples, range(chunk, samples.size, chunk))
    holder = SilenceHolder(RATE)
    outputs = [holder.push(part, index + 1 == len(parts)) for index, part in enumerate(parts)]
    references = {f"sil.case.out{index}": change(output)[None] for index, output in enumerate(outputs)}
    log = ComparisonLog(
        "vae.safetensors", {"sil.case.in": samples[None], **references}, tolerance=1e-4, is_exact=True
    )
    chunks = {"sil.case": {"sample_rate": RATE, "chunks": [{"chunk": part.size} for part in parts]}}
    _replay_holder("sil.case", log, chunks)
    return {each.name.removeprefix("vae: sil.case "): each.outcome for each in log.comparisons}


@pytest.mark.parametrize(
    "levels",
    [
        (1e-4, 1e-4, 1e-4, 1e-4, 5e-4),  # all silent, the loudest frame in the dropped tail
        (1e-4, 5e-4, 1e-4, 1e-4, 1e-4),
        (0.5, 0.5, 1e-4, 1e-4, 1e-4, 5e-4, 1e-4),
        (0.5, 1e-4, 0.5),
    ],
)
@pytest.mark.parametrize("chunk", [70, 250, 1000])
def test_the_holder_keeps_the_silence_rule(levels: tuple[float, ...], chunk: int) -> None:
    found = replay(wave(*levels), chunk)
    assert set(found.values()) == {"pass"}
    assert "rule" in found


def test_a_dropped_word_or_changed_samples_break_the_rule() -> None:
    samples = wave(0.5, 1e-4, 1e-4, 1e-4, 1e-4, 0.4, 1e-4, 1e-4, 1e-4, 1e-4)
    assert follows_silence_rule(samples, samples[:900], RATE)
    assert not follows_silence_rule(samples, samples[:400], RATE), "the second word is lost"
    assert not follows_silence_rule(samples, np.delete(samples, 150)[:900], RATE), "a sample is lost"
    assert not follows_silence_rule(samples, np.insert(samples, 150, 0.0), RATE), "a sample is repeated"
    assert not follows_silence_rule(samples, samples[:900][::-1], RATE), "samples are out of order"


def test_silence_is_a_frame_whose_mean_is_low() -> None:
    """A click of one sample does not make a frame loud, whatever its sign."""
    for click in (0.05, -0.05):
        samples = wave(0.5, 1e-4, 1e-4, 1e-4, 1e-4)
        samples[450] = click
        assert follows_silence_rule(samples, samples[:400], RATE)
    offset = np.concatenate([wave(0.5), np.full(FRAME, -0.4, np.float32)])
    assert not follows_silence_rule(offset, offset[:FRAME], RATE), "a loud frame of negative samples is lost"


def test_outputs_are_compared_with_a_reference_only_where_it_lost_nothing() -> None:
    samples = wave(0.5, 0.4, 0.3)
    wrong = replay(samples, FRAME, lambda out: out * np.float32(1.5))
    assert sorted(wrong.values()) == ["expected difference"] * 3 + ["pass"]
    assert wrong["rule"] == "pass"
    # The beginning of the wave, which the reference may keep: a difference is a fault.
    short = replay(samples, FRAME, lambda out: out[:-1] if np.allclose(np.abs(out), 0.3) else out)
    assert sorted(short.values()) == ["FAIL", "pass", "pass", "pass"]


class FakeEngines:
    """A decoder of 2 samples a latent, 4 latents a patch; each call also returns the 3 samples after its patch."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def parameters_of(self, stage: str, kind: type) -> SimpleNamespace:
        return SimpleNamespace(frames_per_latent=4, samples_per_latent=2, tail_samples=3)

    def stage(self, name: str) -> dict[str, SimpleNamespace]:
        wave = SimpleNamespace(name="waveform", shape=("T", 40))
        latents = SimpleNamespace(name="latents", shape=("B", 4, 64))
        return {
            "encode": SimpleNamespace(spec=SimpleNamespace(inputs=[wave])),
            "stream": SimpleNamespace(spec=SimpleNamespace(inputs=[latents]), run=self.run),
        }

    def stateful_stage(self, name: str) -> Any:
        graphs = self.stage(name)
        return type("Stage", (dict,), {"allocate_state": lambda self, sizes, device: {}})(graphs)

    def padded_size(self, graph: object, dim: str, size: int) -> int:
        return size

    def put(self, value: NDArray[np.generic], graph: object, name: str) -> NDArray[np.generic]:
        return value

    def run(
        self, *, latents: Floats, slots: object, patch_index: NDArray[np.int64]
    ) -> dict[str, torch.Tensor]:
        index = int(patch_index[0])
        assert latents[0, 0, 0] == 4 * index
        # Samples end at the end of the patch; what the patches before withheld comes first.
        first = 8 * index - 3
        return {"samples": torch.arange(first, first + 11, dtype=torch.float32)[None]}


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (10, 1), (11, 2), (40, 4), (41, 5)])
def test_a_partial_frame_counts(samples: int, frames: int) -> None:
    engines: Any = FakeEngines()
    assert num_frames(engines, np.zeros(samples, np.float32)) == frames


@pytest.mark.parametrize("patches", [1, 2, 5])
def test_a_streamed_wave_has_every_sample_once(patches: int) -> None:
    """8 samples a patch: the first withholds its tail, the last one adds it."""
    engines: Any = FakeEngines()
    latents = np.repeat(np.arange(4 * patches, dtype=np.float32)[:, None], 64, axis=1)
    assert stream_wave(engines, latents).tolist() == [*range(8 * patches)]
