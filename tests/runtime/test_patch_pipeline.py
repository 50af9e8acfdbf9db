"""Patch pipeline: overlapping the decoder with the next patch gives the same results as sequential execution."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from simulated_streams import Device
from torch import Tensor

from mingc.runtime.talker import patch_pipeline
from mingc.runtime.talker.patch_pipeline import LaunchedPatch, PatchPipeline

SLOTS, STEPS, LATENTS, DIM = 6, 2, 3, 4
SLOW = 4_000_000  # clocks, some 2 ms: many times what everything else takes


class CountingWork:
    """Whole numbers small enough for float32, so that every order of the same work gives the same bits.

    Every tensor passes through further kernels before it is read, so that a graph's intermediates are in use."""

    def __init__(self, device: torch.device, slow: str | None = None) -> None:
        self._slow = slow
        self.hidden, self.decoded = (torch.zeros(SLOTS, device=device) for _ in range(2))

    def forget(self) -> None:
        for state in (self.hidden, self.decoded):
            state.zero_()

    def _delay(self, part: str) -> None:
        if part == self._slow and self.hidden.is_cuda:
            torch.cuda._sleep(SLOW)  # type: ignore[no-untyped-call]

    def sample(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._delay("sample")
        base = self.hidden.index_select(0, inputs["slots"]) + inputs["guidance"]
        latents = (inputs["noise"] + inputs["step_noise"].sum(1) + base[:, None, None]) % 251
        return {
            "latents": latents,
            "next_embeds": latents.sum((1, 2)) % 241,
            "stop_probability": latents.amax((1, 2)) % 11,
        }

    def advance(self, sampled: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        self._delay("advance")
        hidden_row = (sampled["next_embeds"] * 3 + inputs["lengths"]) % 239
        self.hidden.index_copy_(0, inputs["step_slots"], hidden_row)

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        self._delay("decode")
        before = torch.where(patch_index == 0, 0.0, self.decoded.index_select(0, slots))
        self.decoded.index_copy_(0, slots, (before * 5 + latents.sum((1, 2))) % 233)
        return latents.flatten(1) + before[:, None]


def patch_inputs(size: int, number: int) -> dict[str, Tensor]:
    """Slots take turns, also between batch sizes; a slot's patches begin anew now and then."""
    generator = torch.Generator().manual_seed(number)

    def whole(*shape: int) -> Tensor:
        return torch.randint(0, 50, shape, generator=generator).float()

    slots = 1 + (torch.arange(size) + number) % (SLOTS - 1)
    return {
        "slots": slots,
        "step_slots": slots,
        "lengths": torch.full((size,), number),
        "patch_index": torch.full((size,), number % 7),
        **{name: whole(size) for name in ("guidance", "sigma", "temperature")},
        "noise": whole(size, LATENTS, DIM),
        "step_noise": whole(size, STEPS, LATENTS, DIM),
    }


def speak(device: torch.device, work: CountingWork) -> list[tuple[NDArray[np.float32], ...]]:
    sizes = (1, 2, 4)
    pipeline = PatchPipeline(work, sizes, num_steps=STEPS, patch=(LATENTS, DIM), device=device)
    work.forget()  # what captures did
    results = []
    under_way: deque[LaunchedPatch] = deque()
    for number in range(60):
        if len(under_way) == 3:
            results.append(under_way.popleft().wait())
        size = sizes[(number // 3) * (number // 2) % 3]
        under_way.append(pipeline.launch(size, patch_inputs(size, number)))
    return results + [each.wait() for each in under_way]


def check(made: list[tuple[NDArray[np.float32], ...]]) -> None:
    """Samples, their sums, stop probabilities and latents of every patch are those of the CPU."""
    cpu = torch.device("cpu")
    for samples, sums, *_ in made:  # of whole numbers, so in any order
        assert np.array_equal(sums, samples.sum(1))
    for found, wanted in zip(made, speak(cpu, CountingWork(cpu)), strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert np.array_equal(one, other)


class NarrowWork(CountingWork):
    """The same with latents in bfloat16, which holds whole numbers up to 256."""

    def sample(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sampled = super().sample(inputs)
        return {**sampled, "latents": sampled["latents"].bfloat16()}

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        return super().decode(latents.float(), slots, patch_index)


def test_latents_of_a_bfloat16_model_are_returned_in_float32() -> None:
    made = speak(torch.device("cpu"), NarrowWork(torch.device("cpu")))
    assert all(value.dtype == np.float32 for each in made for value in each)
    check(made)


@pytest.mark.parametrize("seed", range(12))
def test_every_device_order_gives_the_same_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(seed)
    for name in ("torch", "GraphPool", "StagingBuffer", "AsyncHostCopy"):
        monkeypatch.setattr(patch_pipeline, name, getattr(device, name))
    check(speak(torch.device("cuda"), CountingWork(torch.device("cpu"))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("slow", [None, "sample", "advance", "decode"])
def test_a_slow_network_on_a_device_changes_no_result(slow: str | None) -> None:
    device = torch.device("cuda", 0)
    with torch.inference_mode():
        check(speak(device, CountingWork(device, slow)))
