"""Audio encoder compared with goldens (spec: audio.md): padding, batching, tracing and compilation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_checks import compiled_engine
from fake_engines import FunctionEngine
from safetensors.torch import load_file
from stage_checks import altered, assert_close, check_sources, with_random_weights
from torch import Tensor

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.trace import capture, check_example
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.audio_encoder import STAGE, AudioBlock, AudioConfig, AudioEncoder, RowConvolution
from mingc.export.weights.loading import float32_module
from mingc.media.dsp.log_mel import log_mel
from mingc.prompts.features import AudioFeatures
from mingc.runtime.encoders import encoder as encoders
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.stage_loader import LoadedStage

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "audio.safetensors")


@pytest.fixture(scope="module")
def long_mel(golden: dict[str, Tensor], config: AudioConfig) -> Tensor:
    """The features of the long utterance, (3400, mels), rebuilt from its one second of sound."""
    tiles = int(golden["long.tiles"])
    gains = torch.tensor([(tile + 1) / tiles for tile in range(tiles)], dtype=torch.float32)
    wave = (gains[:, None] * golden["long.base_1s"]).flatten().numpy()
    values = STAGE.parameters(config, StageOptions())
    return torch.from_numpy(
        log_mel(
            wave,
            sample_rate=values.sample_rate,
            num_mels=values.num_mels,
            fft_size=values.fft_size,
            hop_samples=values.hop_samples,
        )
    )


def batch(clips: list[Tensor], group: int, num_clips: int = 0, num_tokens: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of `encode` for `clips` (frames, mels), in a bucket; noise beyond the end of each clip."""
    num_tokens = num_tokens or max(-(-len(clip) // group) for clip in clips)
    shape = (max(num_clips, len(clips)), num_tokens * group, clips[0].shape[1])
    mel = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=clips[0].dtype)
    lengths = torch.zeros(shape[0], dtype=torch.int64)
    for row, clip in enumerate(clips):
        mel[row, : len(clip)] = clip
        lengths[row] = len(clip)
    return mel.view(shape[0], num_tokens, group, shape[2]), lengths


def watch(module: AudioEncoder, seen: dict[str, Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    """Record the intermediate outputs that the goldens contain."""
    return [
        # A block leaves its last residual sum to the next norm.
        module.blocks[0].register_forward_hook(
            lambda _module, _inputs, output: seen.update(block0=sum(output))
        ),
        module.projector.register_forward_hook(
            lambda _module, inputs, output: seen.update(encoder=inputs[0], projector=output)
        ),
    ]


@pytest.mark.parametrize("case", ["single", "second_alone"])
def test_one_clip_matches_golden(case: str, module: AudioEncoder, golden: dict[str, Tensor]) -> None:
    seen: dict[str, Tensor] = {}
    handles = watch(module, seen)
    (embeddings,) = module.encode(*batch([golden[f"{case}.audio_feats"][0]], 4))
    for handle in handles:
        handle.remove()
    positions = golden[f"{case}.block0_out"].shape[1]
    assert_close(seen["block0"][:, :positions], golden[f"{case}.block0_out"])
    assert_close(seen["encoder"][:, :positions], golden[f"{case}.encoder_out"])
    assert_close(seen["projector"], golden[f"{case}.proj_unnormalised"])
    assert_close(embeddings, golden[f"{case}.audio_embeds"])
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(1, embeddings.shape[1]))


def test_clips_of_a_batch_are_encoded_independently(module: AudioEncoder, golden: dict[str, Tensor]) -> None:
    first, second = golden["two_clips.audio_feats_lengths"][0].tolist()
    feats = golden["two_clips.audio_feats"][0]
    (embeddings,) = module.encode(*batch([feats[:first], feats[first : first + second]], 4))
    # In the reference's batch the shorter clip attends to its padding; the longest clip is not affected.
    assert_close(embeddings[0], golden["two_clips.audio_embeds"][0, :25])
    assert_close(embeddings[1, :13], golden["second_alone.audio_embeds"][0])
    assert embeddings[1, 13:].abs().max() == 0


def test_long_clip_matches_golden(module: AudioEncoder, golden: dict[str, Tensor], long_mel: Tensor) -> None:
    torch.testing.assert_close(long_mel[:40], golden["long.audio_feats_first40"], rtol=0, atol=1e-4)
    torch.testing.assert_close(long_mel[-40:], golden["long.audio_feats_last40"], rtol=0, atol=1e-4)
    seen: dict[str, Tensor] = {}
    handles = watch(module, seen)
    (embeddings,) = module.encode(*batch([long_mel], 4))
    for handle in handles:
        handle.remove()
    # The features are recomputed, not stored: their rounding error (1e-6) adds up.
    assert_close(seen["encoder"][0, ::32], golden["long.encoder_out_every_32nd"], 1e-5)
    assert_close(embeddings, golden["long.audio_embeds"], 1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 7, 49, 50, 51])
def test_padding_never_changes_results(frames: int, module: AudioEncoder, golden: dict[str, Tensor]) -> None:
    clip, other = golden["single.audio_feats"][0][:frames], golden["second_alone.audio_feats"][0]
    # The exact length has no bucket padding within a token: compute it with unpadded convolutions.
    alone = exact(module, clip)
    for inputs in (batch([clip], 4), batch([clip], 4, 4, 50), batch([other, clip], 4, 2, 13)):
        (embeddings,) = module.encode(*inputs)
        row = int((inputs[1] == frames).nonzero()[0])
        assert embeddings.isfinite().all()
        assert_close(embeddings[row, : len(alone)], alone)
        assert embeddings[row, len(alone) :].count_nonzero() == 0
        assert embeddings[inputs[1] == 0].count_nonzero() == 0


def exact(module: AudioEncoder, mel_FC: Tensor) -> Tensor:
    """One clip through the module's parts without any padding (spec: audio.md §3, §4)."""
    x = F.gelu(convolve(module.conv2, F.gelu(convolve(module.conv1, mel_FC[None]))))
    x = x + module.positions[: x.shape[1]]
    for block in module.blocks:
        assert isinstance(block, AudioBlock)
        heads = block.attention.qkv(block.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(1, x.shape[1], block.attention.num_heads, -1).transpose(1, 2) for part in heads)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        x = x + block.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + block.fc2(F.gelu(block.fc1(block.mlp_norm(x))))
    x = convolve(module.projector.conv, module.norm(x))
    for layer in module.projector.layers:
        x = layer(F.gelu(x))
    return F.normalize(x, dim=-1)[0]


def convolve(layer: RowConvolution, x_NLC: Tensor) -> Tensor:
    """The result of torch's convolution with the layer's weight and stride."""
    weight = layer.weight.view(layer.out_features, layer.kernel, -1).transpose(1, 2)
    padding = layer.kernel // 2
    return F.conv1d(x_NLC.mT, weight, layer.bias, layer.stride, padding).mT


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (3, 4), (5, 3)])
def test_a_convolution_over_rows_is_that_of_torch(kernel: int, stride: int, length: int) -> None:
    layer = RowConvolution(4, 6, kernel, stride).requires_grad_(False)
    x_NLC = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(length))
    found = layer(x_NLC)
    assert found.shape == (2, -(-length // stride), 6)
    torch.testing.assert_close(found, convolve(layer, x_NLC))


def test_bfloat16_stays_near_golden(
    checkpoint: Checkpoint, config: AudioConfig, golden: dict[str, Tensor]
) -> None:
    module = float32_module(STAGE, config, checkpoint)
    assert isinstance(module, AudioEncoder)
    halved = {name: t if name == "positions" else t.bfloat16() for name, t in module.state_dict().items()}
    module.load_state_dict(halved, assign=True)
    (embeddings,) = module.encode(*batch([golden["single.audio_feats"][0].bfloat16()], 4))
    assert embeddings.dtype == torch.bfloat16
    assert F.cosine_similarity(embeddings.float(), golden["single.audio_embeds"], dim=-1).min() > 0.999


def test_unnormalised_embeddings_are_the_projection(
    module: AudioEncoder, config: AudioConfig, golden: dict[str, Tensor]
) -> None:
    plain = AudioEncoder(replace(config, is_normalised=False)).eval().requires_grad_(False)
    plain.load_state_dict(module.state_dict())
    (embeddings,) = plain.encode(*batch([golden["second_alone.audio_feats"][0]], 4))
    assert_close(embeddings, golden["second_alone.proj_unnormalised"])


def test_weight_sources_match_module_and_checkpoint(checkpoint: Checkpoint, config: AudioConfig) -> None:
    used = {name for source in check_sources(STAGE, checkpoint, config) for name in source.tensors}
    stored = {name for name in checkpoint.main.tensors if name.startswith(("audio.", "linear_proj_audio."))}
    assert stored == used


def odd_configs(config: AudioConfig) -> list[AudioConfig]:
    """Geometries that differ from the tiny and the released model."""
    return [
        replace(
            config, num_layers=1, width=40, num_heads=5, num_mels=80, num_positions=97, projector_depth=1
        ),
        replace(config, downsample_stride=3, downsample_kernel=5, num_positions=64, is_normalised=False),
        replace(config, projector_depth=4, hidden_size=20, downsample_kernel=1, num_heads=1),
        replace(config, downsample_stride=1, width=24, num_positions=50),
    ]


@pytest.mark.parametrize("which", range(4))
def test_other_geometries_trace_with_any_number_of_clips(which: int, config: AudioConfig) -> None:
    config = odd_configs(config)[which]
    module = with_random_weights(AudioEncoder(config))
    for source in STAGE.weights(config, Shard()):
        value = source.compute(*[torch.zeros(shape) for shape in source.shapes])
        assert value.shape == module.state_dict()[source.name].shape, source.name
    (plan,) = STAGE.graphs(config, Shard(), StageOptions())
    program = capture(plan, module, stage=STAGE.name, static_shapes=None, device=CPU)
    for clips, tokens in ((1, 1), (1, config.max_tokens), (5, 7), (8, 2)):
        dims = {"N": clips, "T4": tokens}
        example = plan.example(dims, torch.Generator().manual_seed(clips))
        check_example(plan.spec, example, dims, STAGE.name)
        inputs = tuple(example[tensor.name] for tensor in plan.spec.inputs)
        (traced,), (eager,) = program.module()(*inputs), module.encode(*inputs)
        assert traced.shape == (clips, tokens, config.hidden_size)
        assert_close(traced, eager, 1e-5)


def test_longest_clip_uses_every_stored_position(config: AudioConfig) -> None:
    config = replace(config, num_positions=97)
    assert (config.max_frames, config.max_tokens, config.table_rows) == (194, 49, 98)
    module = with_random_weights(AudioEncoder(config))
    clip = torch.randn(config.max_frames, config.num_mels, generator=torch.Generator().manual_seed(2))
    (embeddings,) = module.encode(*batch([clip], 4))
    assert_close(embeddings[0], exact(module, clip), 1e-5)


def test_compiled_engine_matches_golden_at_every_size(
    module: AudioEncoder,
    config: AudioConfig,
    golden: dict[str, Tensor],
    long_mel: Tensor,
    compiled_artifact: Path,
) -> None:
    (plan,) = STAGE.graphs(config, Shard(), StageOptions())
    engine = compiled_engine(compiled_artifact, STAGE.name, "encode")
    engine.bind(module.state_dict())
    one, two = golden["single.audio_feats"][0], golden["second_alone.audio_feats"][0]
    for size in ((1, 25), (2, 25), (3, 26), (8, 100)):
        (embeddings,) = engine.run(batch([one], 4, *size))
        assert_close(embeddings[0, :25], golden["single.audio_embeds"][0])
        assert embeddings[0, 25:].count_nonzero() == embeddings[1:].count_nonzero() == 0
        if size[0] > 1:
            (embeddings,) = engine.run(batch([two, one], 4, *size))
            assert_close(embeddings[0, :13], golden["second_alone.audio_embeds"][0])
            assert_close(embeddings[1, :25], golden["single.audio_embeds"][0])
    (embeddings,) = engine.run(batch([long_mel], 4, 1, config.max_tokens))
    assert_close(embeddings[:, :850], golden["long.audio_embeds"], 1e-5)
    for clips, tokens in ((1, 1), (1, 2), (2, 1), (8, 3)):
        example = plan.example({"N": clips, "T4": tokens}, torch.Generator().manual_seed(clips))
        inputs = tuple(example[tensor.name] for tensor in plan.spec.inputs)
        assert_close(engine.run(inputs)[0], module.encode(*inputs)[0])


def test_released_geometry_has_the_released_size(config: AudioConfig) -> None:
    released = replace(config, num_layers=32, width=1280, num_heads=20, num_positions=15000, hidden_size=4096)
    with torch.device("meta"):
        weights = STAGE.build(released, Shard()).state_dict()
    total = sum(tensor.numel() for tensor in weights.values())
    # spec: checkpoint.md §7: encoder, position table, projector; and the zero key biases of the packed layers.
    assert total == 635_048_960 + 19_200_000 + 32_514_048 + 32 * 1280


def test_buckets_end_at_the_longest_clip_and_batch(config: AudioConfig) -> None:
    (plan,) = STAGE.graphs(config, Shard(), StageOptions(batch_sizes=(1, 2, 4, 6)))
    assert plan.spec.dim("N").buckets == (1, 2, 4, 6)
    assert plan.spec.dim("T4").buckets == (25, 50, 100, 200, 250, 375, 750, 1100)
    (plan,) = STAGE.graphs(config, Shard(), StageOptions(static_buckets=True, dtype=torch.bfloat16))
    assert plan.spec.dim("N").buckets == (1, 4), "no more than the largest batch, 8"
    assert [tensor.dtype for tensor in (*plan.spec.inputs, *plan.spec.outputs)] == [
        "bfloat16",
        "int64",
        "bfloat16",
    ]


def released(config: AudioConfig) -> AudioConfig:
    """Clips may be as long as in the released model."""
    return replace(config, num_positions=15_000)


def test_engines_for_several_clips_are_few(config: AudioConfig) -> None:
    """CUDA engines take one clip of each length, four clips of up to 30 s, or sixteen of up to 8 s."""
    options = StageOptions(static_buckets=True, dtype=torch.bfloat16, batch_sizes=(1, 2, 4, 8, 16, 32))
    (plan,) = STAGE.graphs(released(config), Shard(), options)
    sizes = options.engine_sizes(plan)
    by_clips = {
        clips: [size["T4"] for size in sizes if size is not None and size["N"] == clips]
        for clips in (1, 4, 16)
    }
    assert by_clips == {
        1: [25, 50, 100, 200, 250, 375, 750, 1500, 3000, 7500],
        4: [25, 50, 100, 200, 250, 375, 750],
        16: [25, 50, 100, 200],
    }
    assert len(sizes) == 21
    assert {name: plan.check_dims[name] for name in ("N", "T4")} in sizes, "compared with float32 at export"
    (one,) = STAGE.graphs(released(config), Shard(), replace(options, batch_sizes=(1, 2)))
    assert {size["N"] for size in options.engine_sizes(one) if size is not None} == {1}
    (cpu,) = STAGE.graphs(config, Shard(), StageOptions())
    assert StageOptions().engine_sizes(cpu) == [None]


@pytest.fixture(scope="module")
def static_encoder(module: AudioEncoder, config: AudioConfig) -> encoders.AudioEncoder:
    """A server's encoder over one traced program per size, as on CUDA, but on the CPU in float32."""
    options = StageOptions(static_buckets=True, batch_sizes=(1, 16))
    (plan,) = STAGE.graphs(config, Shard(), options)
    names = [tensor.name for tensor in plan.spec.inputs]

    def engine(size: Mapping[str, int]) -> FunctionEngine:
        @cache  # traced when it is used first: the tests use half of the sizes
        def program() -> Any:
            return capture(plan, module, stage=STAGE.name, static_shapes=size, device=CPU).module()

        return FunctionEngine(names, lambda **inputs: program()(*(inputs[name] for name in names)))

    engines: dict[tuple[int, ...] | None, Engine] = {
        (size["N"], size["T4"]): engine(size) for size in plan.sizes
    }
    encoder = encoders.AudioEncoder(
        LoadedStage(STAGE.name, {"encode": Graph(plan.spec, engines)}), STAGE.parameters(config, options), CPU
    )
    encoder.max_batch_tokens = 3200  # as on CUDA
    return encoder


def features_of(clip: Tensor) -> AudioFeatures:
    return AudioFeatures(mel=clip.numpy(), num_tokens=-(-len(clip) // 4))


def test_several_clips_in_a_static_call_are_each_as_alone(
    static_encoder: encoders.AudioEncoder,
    module: AudioEncoder,
    golden: dict[str, Tensor],
    long_mel: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other size for several clips: clips of different lengths, full rows, and padding clips."""
    seen: list[tuple[int, int]] = []
    call = static_encoder._call

    def record(inputs: dict[str, Tensor], rows: int) -> Tensor:
        seen.append((inputs["mel"].shape[0], inputs["mel"].shape[1]))
        return call(inputs, rows)

    monkeypatch.setattr(static_encoder, "_call", record)
    one, two = golden["single.audio_feats"][0], golden["second_alone.audio_feats"][0]
    several = [size for size in static_encoder._sizes if size[0] > 1][::2]
    for count, tokens in several:
        frames = 4 * tokens
        longest = torch.cat([long_mel, long_mel])[:frames]
        clips = [
            one,
            two,
            longest,
            *(long_mel[40 * row : 40 * row + 1 + 7 * row] for row in range(count - 3)),
        ]
        for used in (clips, clips[: count - 1]):  # the second with a padding clip
            found = static_encoder.encode([features_of(clip) for clip in used])
            assert_close(found[0], golden["single.audio_embeds"][0])
            assert_close(found[1], golden["second_alone.audio_embeds"][0])
            for clip, embeddings in zip(used[2:], found[2:], strict=True):
                assert_close(embeddings, exact(module, clip), 1e-5)
    assert seen == [size for size in several for _ in range(2)]


def test_padding_clips_of_a_static_call_do_not_matter(
    static_encoder: encoders.AudioEncoder, golden: dict[str, Tensor]
) -> None:
    """Values beyond the end of a clip do not matter either: with noise there the embeddings are bitwise equal."""
    graph = static_encoder._graph
    one = golden["single.audio_feats"][0]
    for clips, tokens in ((4, 25), (16, 50)):
        noisy, lengths = batch([one], 4, clips, tokens)
        plain = noisy.clone().flatten(1, 2)
        for row, length in enumerate(lengths.tolist()):
            plain[row, length:] = 0
        empty, single = lengths.clone(), lengths.clamp(min=1)
        found = [
            graph.run(mel=mel, lengths=each)["embeddings"][0]
            for mel in (noisy, plain.view(noisy.shape))
            for each in (empty, single)
        ]
        assert_close(found[0][:25], golden["single.audio_embeds"][0])
        assert found[0][25:].count_nonzero() == 0
        assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize(
    ("waiting", "calls"),
    [
        ([25] * 16, [(16, 25)]),
        ([20] * 17, [(16, 25), (1, 25)]),
        ([25] * 3, [(1, 25)] * 3),  # four would compute more than three alone
        ([25] * 9, [(4, 25), (4, 25), (1, 25)]),
        ([200] * 16, [(16, 200)]),
        ([375] * 16, [(4, 375)] * 4),
        ([750, 700, 750, 600], [(4, 750)]),
        ([750, 25, 25, 25, 25], [(1, 750), (4, 25)]),
        ([100, 90, 60, 51], [(4, 100)]),
        ([25, 100, 25, 25], [(1, 25), (1, 100), (1, 25), (1, 25)]),  # 400 tokens, 175 alone
        ([1000] * 4, [(1, 1100)] * 4),
    ],
)
def test_clips_that_wait_share_the_calls_that_cost_no_more_padding(
    waiting: list[int],
    calls: list[tuple[int, int]],
    static_encoder: encoders.AudioEncoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The encoder's thread over the sizes of CUDA engines, while a first call runs."""
    seen: list[tuple[int, int]] = []
    begun, gate = threading.Event(), threading.Event()

    def call(inputs: dict[str, Tensor], rows: int) -> Tensor:
        seen.append((inputs["mel"].shape[0], inputs["mel"].shape[1]))
        begun.set()
        assert gate.wait(60)
        return inputs["mel"].new_zeros(rows, inputs["mel"].shape[1], 1)

    monkeypatch.setattr(static_encoder, "_call", call)
    mels = static_encoder._parameters.num_mels
    clips = [
        AudioFeatures(mel=np.zeros((4 * tokens, mels), np.float32), num_tokens=tokens) for tokens in waiting
    ]
    loop = EncoderLoop("audio_encoder", static_encoder)
    loop.start()
    try:
        futures = loop.submit(clips[:1], [b""])
        assert begun.wait(60)
        for each in clips:
            futures += loop.submit([each], [b""])
        gate.set()
        found = [future.result(60) for future in futures[1:]]
    finally:
        gate.set()
        loop.stop()
    assert [len(each) for each in found] == waiting
    assert seen[1:] == calls


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("audio_config", "norm_query_embeds"), None, "audio_config.norm_query_embeds is missing"),
        (
            ("audio_config", "whisper_encoder_config", "n_ctx"),
            None,
            "audio_config.whisper_encoder_config.n_ctx is missing",
        ),
        (("audio_config", "whisper_encoder_config", "n_head"), 5, "not a multiple of n_head 5"),
        (("audio_config", "ds_kernel_size"), 4, "ds_kernel_size 4 is even"),
        (("mlp_depth",), 0, "mlp_depth is 0"),
    ],
)
def test_config_errors_name_the_key(
    checkpoint: Checkpoint, path: tuple[str, ...], value: object, words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        STAGE.config(altered(checkpoint, *path, value=value))
    assert words in caught.value.message
    assert caught.value.where
