"""Encoder calls on a stream of their own: CUDA graphs give what direct calls give, beside work of other streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import talker_engines
import torch
from fake_engines import FunctionEngine, make_graph
from torch import Tensor

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.runtime.encoders import encoder as encoders
from mingc.runtime.encoders.encoder import AudioEncoder, VisionEncoder
from mingc.runtime.encoders.graph import EncoderGraph
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
WIDTH, BUCKETS, CAPTURED = 512, (8, 64, 512), (64, 8)
TOLERANCE = 1e-2  # rounding error of bfloat16, relative to the largest value
# Of whole encoders in buckets of different size, each 1.7 % from float32 at most (`encoders-h200-2026-11-23.json`).
BETWEEN_BUCKETS = 3e-2
LONG_CYCLES = 6_000_000_000  # about three seconds


def inputs_of(bucket: int, seed: int) -> dict[str, Tensor]:
    """Host tensors; `x` is converted to bfloat16 by the call."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(bucket, WIDTH, generator=generator),
        "scale": torch.rand(bucket, generator=generator),
    }


def make_calls(captured: Sequence[int]) -> EncoderGraph:
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator("cuda").manual_seed(0), device=DEVICE)

    def encode(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (torch.softmax((x @ weight.bfloat16()).float() * scale.unsqueeze(1), -1),)

    graph = make_graph(
        "encode",
        encode,
        inputs={"x": ("bfloat16", ("M", WIDTH)), "scale": ("float32", ("M",))},
        outputs=["embeddings"],
        state={},
        dims={"M": BUCKETS},
    )
    calls = EncoderGraph(graph, DEVICE, (inputs_of(size, 0) for size in captured))
    assert calls.num_captured == len(captured)
    return calls


def test_captured_calls_give_what_direct_calls_give() -> None:
    """Sizes in turn, in one pool of memory; results stay as they are when later calls run."""
    captured, direct = make_calls(CAPTURED), make_calls(())
    order = [(bucket, bucket - seed % 5, seed) for seed in range(20) for bucket in BUCKETS]
    found, expected = (
        [calls(inputs_of(bucket, seed), rows) for bucket, rows, seed in order] for calls in (captured, direct)
    )
    for (_, rows, _), mine, wanted in zip(order, found, expected, strict=True):
        assert mine.device.type == "cpu" and mine.shape == (rows, WIDTH)
        torch.testing.assert_close(mine, wanted, atol=1e-3, rtol=0)
    assert not torch.allclose(found[0][:7], found[len(BUCKETS)], atol=1e-3), "inputs of the first call"


def test_a_call_does_not_wait_for_other_streams() -> None:
    calls = make_calls(CAPTURED)
    before = [calls(inputs_of(bucket, 1), bucket) for bucket in BUCKETS]  # allocates what the next ones reuse
    expected = [each.clone() for each in before]
    del before
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)  # on the default stream
    ended = torch.cuda.Event()
    ended.record()
    found = [calls(inputs_of(bucket, 1), bucket) for bucket in BUCKETS]
    assert not ended.query()
    torch.cuda.synchronize()
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine, wanted)


def test_calls_beside_work_that_allocates_and_frees() -> None:
    """Both threads get and free device memory all the time; neither sees the other's values."""
    calls = make_calls(CAPTURED)
    expected = [calls(inputs_of(bucket, 1), bucket).clone() for bucket in BUCKETS]
    problems: list[int] = []
    has_ended = threading.Event()

    def encode() -> None:
        try:
            for _ in range(100):
                for bucket, wanted in zip(BUCKETS, expected, strict=True):
                    if not torch.equal(calls(inputs_of(bucket, 1), bucket), wanted):
                        problems.append(bucket)
        finally:
            has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    rounds = 0
    while not has_ended.is_set():
        values = torch.full((512, WIDTH), float(rounds), device=DEVICE)
        for _ in range(20):
            values = values.clone() + 1
        assert (values == rounds + 20).all()
        rounds += 1
    thread.join()
    assert not problems and rounds > 0


def stage_of(name: str) -> tuple[LoadedStage, VisionParameters | AudioParameters]:
    """The stage at the released dims over random weights in bfloat16, its module called operation by operation."""
    module = talker_engines.module_of(name, torch.bfloat16)
    plan = talker_engines.plan_of(name, "encode")
    spec = plan.spec
    names = [each.name for each in spec.inputs]
    engine = FunctionEngine(names, lambda **tensors: module.encode(*(tensors[each] for each in names)))
    stage = find(name)
    parameters = stage.parameters(
        stage.config(open_synthetic(talker_engines.CONFIGS)), talker_engines.options()
    )
    assert isinstance(parameters, VisionParameters | AudioParameters)
    sizes = talker_engines.options().engine_sizes(plan)
    engines = {tuple(size.values()): engine for size in sizes if size is not None}
    return LoadedStage(name, {"encode": Graph(spec, engines)}), parameters


def check(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.shape == wanted.shape and mine.isfinite().all()
        error = (mine.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error < tolerance


def picture(height: int, width: int, parameters: VisionParameters) -> VisionFeatures:
    generator, channels = np.random.default_rng(height * width), parameters.in_channels
    colours = generator.integers(0, 256, (height * width, channels * parameters.patch_size**2)).astype(
        np.uint8
    )
    levels = np.linspace(-1.8, 2.2, 256 * channels, dtype=np.float32).reshape(channels, 256)
    return VisionFeatures(
        patches=colours, grid=(1, height, width), levels=levels, repeats=parameters.temporal_patch_size
    )


def test_images_at_released_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured sizes and a larger one, alone and together, against direct calls of one image each."""
    stage, parameters = stage_of("vision_encoder")
    assert isinstance(parameters, VisionParameters)
    encoder = VisionEncoder(stage, parameters, DEVICE)
    assert encoder._call.num_captured == 5  # 64 to 1,024 tokens
    monkeypatch.setattr(encoders, "_CAPTURED_VISION_TOKENS", 0)
    direct = VisionEncoder(stage, parameters, DEVICE)
    assert direct._call.num_captured == 0
    pictures = [picture(*size, parameters) for size in ((16, 16), (10, 26), (32, 32), (44, 64), (80, 64))]
    expected = [direct.encode([each])[0] for each in pictures]
    check([encoder.encode([each])[0] for each in (*pictures, *pictures)], [*expected, *expected])
    check(encoder.encode(pictures[:3]), expected[:3], BETWEEN_BUCKETS)  # 385 tokens, captured
    check(encoder.encode(pictures), expected, BETWEEN_BUCKETS)


def test_clips_at_released_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, parameters = stage_of("audio_encoder")
    assert isinstance(parameters, AudioParameters)
    encoder = AudioEncoder(stage, parameters, DEVICE)
    assert encoder._call.num_captured == 13  # one of 1 to 30 s, four of 1 to 8 s, sixteen of 1 and 2 s
    monkeypatch.setattr(encoders, "_CAPTURED_AUDIO_TOKENS", 0)
    direct = AudioEncoder(stage, parameters, DEVICE)
    assert direct._call.num_captured == 0
    clips = []
    for frames in (90, 700, 3000, 4100):
        mel = np.random.default_rng(frames).uniform(-1.5, 1.5, (frames, parameters.num_mels))
        clips.append(
            AudioFeatures(mel=mel.astype(np.float32), num_tokens=-(-frames // parameters.frames_per_token))
        )
    expected = direct.encode(clips)
    check(encoder.encode(clips), expected)
    check(encoder.encode(clips[::-1]), expected[::-1])
    # In one call: captured, with padding clips, and too large to be captured.
    for several in (
        [clips[0]] * 4,
        [clips[0]] * 7,
        [clips[1], clips[0]],
        [clips[1]] * 16,
        [clips[2], clips[0], clips[2]],
    ):
        wanted = [direct.encode([each])[0] for each in several]
        check(encoder.encode(several), wanted, BETWEEN_BUCKETS)
