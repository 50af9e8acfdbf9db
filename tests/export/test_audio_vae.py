"""AudioVAE compared with goldens: decode, streamed decode, encode; other dims, captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checks import BACKENDS, check_bfloat16, check_engine
from safetensors.torch import load_file
from stage_checks import check_sources
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.layers.istft import IstftHead, istft_weights, overlap_add
from mingc.export.layers.qwen2 import Qwen2Config, inverse_frequencies
from mingc.export.layers.vae_decoder import VaeDecoderConfig, blend_weights
from mingc.export.layers.vae_encoder import VaeEncoderConfig
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.audio_vae import STAGE, AudioVae, AudioVaeConfig
from mingc.export.weights.loading import float32_module
from mingc.numerics.relative_error import relative_error

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "vae.safetensors")


def without_window(config: AudioVaeConfig) -> AudioVaeConfig:
    encoder, decoder = config.encoder, config.decoder
    return replace(
        config,
        encoder=replace(encoder, stack=replace(encoder.stack, windows=(None,) * encoder.stack.num_layers)),
        decoder=replace(decoder, stack=replace(decoder.stack, windows=(None,) * decoder.stack.num_layers)),
    )


@pytest.fixture(scope="module", params=["sliding", "full"])
def variant(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, config: AudioVaeConfig
) -> tuple[str, AudioVaeConfig, AudioVae]:
    """Both variants of the golden: the config's window, and no window."""
    chosen = config if request.param == "sliding" else without_window(config)
    module = float32_module(STAGE, chosen, checkpoint)
    assert isinstance(module, AudioVae)
    return request.param, chosen, module


def used_state(config: VaeDecoderConfig, num_slots: int = 3) -> list[Tensor]:
    """State left by an earlier utterance, which must not affect the next one."""
    torch.manual_seed(5)
    stack = config.stack
    rings = [
        torch.randn(num_slots, config.ring_rows(layer), stack.num_kv_heads, stack.head_dim)
        for layer in range(stack.num_layers)
        for _ in "kv"
    ]
    return [
        *rings,
        torch.randn(num_slots, config.latent_dim),
        torch.randn(num_slots, config.n_fft - config.hop),
    ]


def emitted(config: VaeDecoderConfig, samples: Tensor, patch: int, num_patches: int) -> Tensor:
    """The part of one patch's samples (patch samples + tail) that the runtime sends.

    The utterance begins `tail_samples` into the first call's samples, or later where patches are shorter.
    """
    length = config.patch_frames * config.hop
    start = max(0, config.tail_samples - patch * length)
    end = None if patch == num_patches - 1 else length
    return samples[start:end]


def stream(module: AudioVae, config: VaeDecoderConfig, latents: Tensor) -> list[Tensor]:
    """The chunks emitted for latents (1, L, latent_dim), from a used slot."""
    state, size = used_state(config), config.latents_per_patch
    num_patches = latents.shape[1] // size
    chunks = []
    for patch in range(num_patches):
        part = latents[:, patch * size : (patch + 1) * size]
        samples = module.stream(part, torch.tensor([2]), torch.tensor([patch]), *state)[0]
        chunks.append(emitted(config, samples[0], patch, num_patches))
    return chunks


def test_weights_match_the_checkpoint(checkpoint: Checkpoint, config: AudioVaeConfig) -> None:
    check_sources(STAGE, checkpoint, config)


def test_every_tensor_is_used_or_ignored(checkpoint: Checkpoint, config: AudioVaeConfig) -> None:
    assert checkpoint.vae is not None
    used = {tensor for source in STAGE.weights(config, Shard()) for tensor in source.tensors}
    ignored = tuple(prefix for prefix, _ in STAGE.ignored(checkpoint))
    assert [
        name for name in checkpoint.vae.tensors if name not in used and not name.startswith(ignored)
    ] == []
    assert "encoder.encoder.layers.4." in ignored


def test_decode_matches(variant: tuple[str, AudioVaeConfig, AudioVae], golden: dict[str, Tensor]) -> None:
    name, _, module = variant
    upsampled = module.decoder.upsample(golden["dec.latent"])
    assert relative_error(upsampled, golden["dec.upsampled"]) < TOLERANCE
    waveform = module.decode(golden["dec.latent"])[0]
    assert waveform.shape == (16, 3528)
    assert relative_error(waveform.flatten(), golden[f"dec.{name}.wav"].flatten()) < TOLERANCE


def test_stream_matches(variant: tuple[str, AudioVaeConfig, AudioVae], golden: dict[str, Tensor]) -> None:
    """All samples of the golden's streams, also split into the golden's chunks."""
    name, config, module = variant
    chunks = stream(module, config.decoder, golden["dec.latent"])
    assert [len(chunk) for chunk in chunks] == [11025, 14112, 14112, 17199]
    waveform = torch.cat(chunks)
    for case in ("stream_sliding", "stream_sliding_uneven") if name == "sliding" else ("stream_full",):
        start = 0
        for index in range(3 if case.endswith("uneven") else 4):
            expected = golden[f"dec.{case}.chunk{index}.wav"].flatten()
            part = waveform[start : start + len(expected)]
            start += len(expected)
            if len(expected):
                assert relative_error(part, expected) < TOLERANCE, f"{case} chunk {index}"
        assert start == len(waveform)


def test_stream_keeps_the_reference_cache(
    variant: tuple[str, AudioVaeConfig, AudioVae], golden: dict[str, Tensor]
) -> None:
    """After 16 frames are final, layer 0 holds the golden's keys; row of frame f is f modulo the rows."""
    name, config, module = variant
    state = used_state(config.decoder)
    for patch in range(2):
        part = golden["dec.latent"][:, 4 * patch : 4 * patch + 4]
        module.stream(part, torch.tensor([1]), torch.tensor([patch]), *state)
    for kind, ring in (("keys", state[0]), ("values", state[1])):
        expected = golden[f"dec.stream_{name}.chunk1.kv0_{kind}"][0].transpose(0, 1)
        assert relative_error(ring[1, :16], expected) < TOLERANCE


@pytest.mark.parametrize("num_patches", [1, 2, 3, 4, 5])
def test_stream_equals_decode(variant: tuple[str, AudioVaeConfig, AudioVae], num_patches: int) -> None:
    _, config, module = variant
    torch.manual_seed(num_patches)
    latents = torch.randn(1, 4 * num_patches, 64)
    waveform = torch.cat(stream(module, config.decoder, latents))
    assert len(waveform) == 14112 * num_patches
    assert relative_error(waveform, module.decode(latents)[0].flatten()) < TOLERANCE


def test_slots_at_different_patches_are_independent(
    variant: tuple[str, AudioVaeConfig, AudioVae],
) -> None:
    """Three utterances join one after the other; each call is one batch with padding."""
    _, config, module = variant
    torch.manual_seed(0)
    latents = torch.randn(3, 12, 64)
    state = used_state(config.decoder, num_slots=5)
    slots, chunks = (4, 1, 3), [[], [], []]
    for call in range(5):
        active = [row for row in range(3) if 0 <= call - row < 3]
        parts = [latents[row, 4 * (call - row) : 4 * (call - row) + 4] for row in active]
        batch = torch.stack([*parts, torch.zeros(4, 64), torch.zeros(4, 64)])
        indices = torch.tensor([*(call - row for row in active), 0, 0])
        where = torch.tensor([*(slots[row] for row in active), 0, 0])
        samples = module.stream(batch, where, indices, *state)[0]
        for index, row in enumerate(active):
            chunks[row].append(emitted(config.decoder, samples[index], call - row, 3))
    for row in range(3):
        alone = torch.cat(stream(module, config.decoder, latents[row : row + 1]))
        assert relative_error(torch.cat(chunks[row]), alone) < TOLERANCE


def encode(module: AudioVae, wave: Tensor, noise: Tensor, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Encode wave (samples,) with noise (T, 64), in a bucket `padding` latents longer."""
    frames = -(-len(wave) // 882)
    rows = len(noise) + padding
    padded = F.pad(wave, (0, rows * 3528 - len(wave))).view(rows, 3528)
    out = module.encode(padded, torch.tensor([frames]), F.pad(noise, (0, 0, 0, padding)))
    latents, mean, std = (value[: len(noise)] for value in out)
    return latents, mean, std


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("case", ["exact", "ragged"])
def test_encode_matches(
    variant: tuple[str, AudioVaeConfig, AudioVae], golden: dict[str, Tensor], case: str, padding: int
) -> None:
    name, _, module = variant
    if f"enc.{name}_{case}.latent" not in golden:
        pytest.skip("the goldens have no ragged encode without a window")
    prefix = f"enc.{name}_{case}."
    wave = golden[f"enc.sliding_{case}.wav"][0]
    latents, mean, std = encode(module, wave, golden[prefix + "noise"][0], padding)
    assert relative_error(latents, golden[prefix + "latent"][0]) < TOLERANCE
    assert relative_error(mean, golden[prefix + "params"][0, :, :64]) < TOLERANCE
    assert relative_error(std, golden[prefix + "std"][0]) < TOLERANCE


@pytest.mark.parametrize("voice", ["DB30", "lingguang"])
def test_voice_latents_match(checkpoint: Checkpoint, config: AudioVaeConfig, voice: str) -> None:
    golden = load_file(DATA / "talker.safetensors")
    module = float32_module(STAGE, config, checkpoint)
    assert isinstance(module, AudioVae)
    noise = golden[f"voice.{voice}.vae_noise"][0].T
    latents = encode(module, golden[f"voice.{voice}.vae_input"][0], noise)[0]
    assert relative_error(latents, golden[f"voice.{voice}.prompt_wav_lat"][0]) < TOLERANCE


@pytest.mark.parametrize("hop", [1, 6, 22, 882])
def test_inverse_transform_equals_the_complex_one(hop: int) -> None:
    n_fft, hidden = 4 * hop, 5
    head = IstftHead(hidden, n_fft, hop)
    torch.manual_seed(hop)
    stored = {
        "out.weight": torch.randn(n_fft + 2, hidden),
        "out.bias": torch.randn(n_fft + 2),
        "window": torch.hann_window(n_fft),
    }
    sources = istft_weights(hidden, n_fft, part="vae", head="out", window="window", target="")
    head.load_state_dict(
        {each.name: each.compute(*(stored[name] for name in each.tensors)) for each in sources}
    )
    x = torch.randn(2, 3, hidden)
    magnitude, phase = F.linear(x, stored["out.weight"], stored["out.bias"]).chunk(2, dim=-1)
    spectrum = torch.polar(magnitude.exp().clamp(max=100), phase)
    expected = torch.fft.irfft(spectrum, n=n_fft) * stored["window"]
    assert relative_error(head(x).flatten(2), expected) < TOLERANCE


def test_overlap_add_places_frames_one_hop_apart() -> None:
    frames = torch.arange(1.0, 7.0).view(1, 2, 3, 1)
    assert overlap_add(frames).flatten().tolist() == [1, 2 + 4, 3 + 5, 6]


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_blend_weights_interpolate_linearly(frames: int) -> None:
    x = torch.randn(1, 1, 7)
    expected = F.interpolate(x, scale_factor=frames, mode="linear", align_corners=False)
    weights = blend_weights(frames).float()
    before = torch.cat((x[..., :1], x[..., :-1]), dim=-1)
    after = torch.cat((x[..., 1:], x[..., -1:]), dim=-1)
    got = sum(each.unsqueeze(-1) * weight for each, weight in zip((before, x, after), weights, strict=True))
    assert isinstance(got, Tensor)
    assert relative_error(got.flatten(2), expected) < TOLERANCE


def other_config(
    frames_per_latent: int, latents_per_patch: int, hop: int, windows: tuple[int | None, ...]
) -> AudioVaeConfig:
    stack = Qwen2Config(
        hidden_size=12,
        intermediate_size=20,
        num_heads=3,
        num_kv_heads=1,
        head_dim=6,
        rope_theta=1e4,
        eps=1e-6,
        max_positions=4096,
        windows=windows,
    )
    return AudioVaeConfig(
        sample_rate=8000,
        encoder=VaeEncoderConfig(stack=stack, latent_dim=5, frames_per_latent=frames_per_latent, hop=hop),
        decoder=VaeDecoderConfig(
            stack=stack,
            latent_dim=5,
            frames_per_latent=frames_per_latent,
            hop=hop,
            latents_per_patch=latents_per_patch,
            max_frames=200,
        ),
    )


def random_module(config: AudioVaeConfig) -> AudioVae:
    torch.manual_seed(1)
    module = STAGE.build(config, Shard())
    assert isinstance(module, AudioVae)
    for value in module.state_dict().values():
        nn.init.normal_(value, std=0.3)
    for source in STAGE.weights(config, Shard()):
        if not source.tensors:
            module.state_dict()[source.name].copy_(source.compute())
    module.decoder.head.window.copy_(torch.hann_window(config.decoder.n_fft))
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("frames_per_latent", "latents_per_patch", "hop", "windows"),
    [
        (1, 1, 4, (3, 3)),
        (1, 2, 6, (None, 2)),
        (2, 1, 4, (1,)),
        (3, 2, 10, (7, None)),
        (4, 1, 2, (40,)),
        (5, 3, 6, (4, 9)),
    ],
)
def test_stream_equals_decode_at_other_dims(
    frames_per_latent: int, latents_per_patch: int, hop: int, windows: tuple[int | None, ...]
) -> None:
    config = other_config(frames_per_latent, latents_per_patch, hop, windows)
    module = random_module(config)
    for num_patches in (1, 2, 7):
        latents = torch.randn(1, num_patches * latents_per_patch, 5)
        waveform = torch.cat(stream(module, config.decoder, latents))
        assert relative_error(waveform, module.decode(latents)[0].flatten()) < TOLERANCE


def test_long_streams_wrap_the_ring() -> None:
    config = other_config(2, 2, 4, (5, 11))
    module = random_module(config)
    latents = torch.randn(1, 120, 5)
    waveform = torch.cat(stream(module, config.decoder, latents))
    assert relative_error(waveform, module.decode(latents)[0].flatten()) < TOLERANCE


def test_inverse_frequencies_start_at_one() -> None:
    assert inverse_frequencies(1e4, 6)[0] == 1


def test_parameters(config: AudioVaeConfig) -> None:
    values = STAGE.parameters(config, StageOptions())
    assert (values.sample_rate, values.hop_samples, values.samples_per_latent) == (44100, 882, 3528)
    assert (values.lookahead_frames, values.tail_samples) == (2, 2 * 882 + 1323)


def test_bfloat16_stays_close(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_bfloat16(STAGE, checkpoint, tmp_path, similarity=0.99)


@BACKENDS
def test_captured_graphs(tmp_path: Path, backend: Backend) -> None:
    """The dims differ from the tiny model, whose captured stream tests/artifact compares with the goldens."""
    config = other_config(3, 2, 10, (7, None))
    module = random_module(config)
    decode, streamed, encoded = STAGE.graphs(config, Shard(), StageOptions())
    check_engine(module, decode, [{"L": 1}, {"L": 2}, {"L": 50}], tmp_path, TOLERANCE, backend)
    check_engine(
        module, streamed, [{"B": 1}, {"B": 3, "S": 4}, {"B": 8, "S": 9}], tmp_path, TOLERANCE, backend
    )
    check_engine(module, encoded, [{"T": 1}, {"T": 2}, {"T": 40}], tmp_path, TOLERANCE, backend)
