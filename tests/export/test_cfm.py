"""Flow-matching sampler, aggregator and heads compared with goldens: speech loops, captured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checks import BACKENDS, check_bfloat16, check_engine
from safetensors.torch import load_file
from stage_checks import check_sources
from torch import Tensor, nn

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.layers.dit import read_dit_config
from mingc.export.layers.flow_times import flow_times
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages import talker as talker_stage
from mingc.export.stages.cfm import STAGE, Cfm, CfmConfig
from mingc.export.weights.loading import float32_module
from mingc.kernels.linear import begin_residual
from mingc.numerics.relative_error import relative_error

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-5
CASES = ["zero_history", "clone_history", "sde_temperature"]


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "talker.safetensors")


def arguments(golden: dict[str, Tensor], case: str) -> tuple[Tensor, ...]:
    """Inputs of `sample` of one golden case, B = 1."""
    prefix = f"cfm.{case}."
    controls = golden[prefix + "sde_args"]
    return (
        golden[prefix + "llm_cond"][:, 0],
        golden[prefix + "lat_cond"],
        golden[prefix + "y0"],
        golden[prefix + "sde_rnd"].transpose(0, 1),
        controls[0:1],
        controls[1:2],
        controls[2:3],
    )


def test_weights_match_the_checkpoint(checkpoint: Checkpoint, config: CfmConfig) -> None:
    check_sources(STAGE, checkpoint, config)


# In 32nds, before the sway (talker.md §6, step 2); every other number of steps is uniform.
PRUNED_GRIDS = {
    5: "0 2 4 8 16 32",
    6: "0 2 4 6 8 16 32",
    7: "0 2 4 6 8 16 24 32",
    10: "0 2 4 6 8 12 16 20 24 28 32",
    12: "0 2 4 6 8 10 12 14 16 20 24 28 32",
    16: "0 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32",
}


def expected_times(num_steps: int) -> list[float]:
    """t = 1 - cos(πu/2) (talker.md §6, step 3)."""
    uniform = [step / num_steps for step in range(num_steps + 1)]
    pruned = [int(place) / 32 for place in PRUNED_GRIDS.get(num_steps, "").split()]
    return [1 - math.cos(math.pi * place / 2) for place in pruned or uniform]


@pytest.mark.parametrize("num_steps", range(1, 34))
def test_time_grids_and_step_sizes_are_those_of_the_specification(config: CfmConfig, num_steps: int) -> None:
    expected = torch.tensor(expected_times(num_steps), dtype=torch.float64)
    torch.testing.assert_close(flow_times(num_steps).double(), expected, rtol=0, atol=2e-7)
    sources = {each.name: each for each in STAGE.weights(replace(config, num_steps=num_steps), Shard())}
    sizes = sources["step_sizes"].compute()
    torch.testing.assert_close(sizes.double(), expected.diff(), rtol=0, atol=4e-7)
    # Step k starts at t[k]: a sine of 1000·t at frequency 1 needs the right time.
    identity = torch.eye(256)
    embedded = sources["time_embeddings"].compute(identity, torch.zeros(256), identity, torch.zeros(256))
    sinusoid = torch.sin(1000 * expected[:-1])
    torch.testing.assert_close(embedded[:, 0].double(), sinusoid * torch.sigmoid(sinusoid), rtol=0, atol=5e-4)


def test_time_grid_and_embeddings_match(module: Cfm, golden: dict[str, Tensor]) -> None:
    assert torch.equal(flow_times(10)[:-1], golden["cfm.zero_history.t_step"])
    assert relative_error(module.time_embeddings, golden["cfm.zero_history.t_emb"][:, 0]) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_trajectory_and_network_output_match(module: Cfm, golden: dict[str, Tensor], case: str) -> None:
    inputs = arguments(golden, case)
    expected = golden[f"cfm.{case}.trajectory"]
    assert relative_error(torch.stack(module.trajectory(*inputs)), expected) < TOLERANCE
    first, history = module.prefix(inputs[0], inputs[1])
    for step, velocity in enumerate(golden[f"cfm.{case}.pred_cfg"]):
        got = module.velocity(first[:, step : step + 1], history, expected[step])
        assert relative_error(got, velocity) < TOLERANCE, f"step {step}"


def test_blocks_match_at_the_first_step(module: Cfm, golden: dict[str, Tensor]) -> None:
    hidden, latents, noise = arguments(golden, "zero_history")[:3]
    first, history = module.prefix(hidden, latents)
    x = torch.cat((first[:, :1], history, module.dit.embed_latents(noise).repeat(2, 1, 1)), dim=1)
    norms = module.dit.norms()
    rows = begin_residual(x, norms[0], 1e-6)
    blocks = zip(module.dit.blocks, norms[1:], golden["cfm.zero_history.step0.blocks"], strict=True)
    for block, norm, expected in blocks:
        rows = block(rows, module.dit.cos, module.dit.sin, norm)
        assert relative_error(rows.values, expected) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_patch_matches(module: Cfm, golden: dict[str, Tensor], case: str) -> None:
    inputs = arguments(golden, case)
    latents, embeds, history, stop = module.sample(*inputs)
    assert relative_error(latents, golden[f"cfm.{case}.out"]) < TOLERANCE
    assert relative_error(embeds, golden[f"agg.{case}.out"][:, 0]) < TOLERANCE
    assert relative_error(stop, golden[f"stop.{case}.softmax"][:, 1]) < TOLERANCE
    assert torch.equal(history, torch.cat((inputs[1][:, 4:], latents), dim=1))


@pytest.mark.parametrize("case", CASES)
def test_aggregator_blocks_match(module: Cfm, golden: dict[str, Tensor], case: str) -> None:
    tokens = module.aggregator.embed_latents(golden[f"cfm.{case}.out"])
    x = torch.cat((module.aggregator_query.unsqueeze(0), tokens), dim=1)
    norms = module.aggregator.norms()
    rows = begin_residual(x, norms[0], 1e-6)
    blocks = zip(module.aggregator.blocks, norms[1:], golden[f"agg.{case}.blocks"], strict=True)
    for block, norm, expected in blocks:
        rows = block(rows, module.aggregator.cos, module.aggregator.sin, norm)
        assert relative_error(rows.values, expected) < TOLERANCE


@pytest.mark.parametrize("voice", ["DB30", "lingguang"])
def test_voice_embeddings_match(module: Cfm, golden: dict[str, Tensor], voice: str) -> None:
    patches = golden[f"voice.{voice}.prompt_wav_lat"].view(-1, 4, 64)
    expected = golden[f"voice.{voice}.prompt_wav_emb"][0]
    assert relative_error(module.aggregate(patches)[0], expected) < TOLERANCE
    speaker = module.speaker(golden[f"voice.{voice}.spk_emb_raw"])[0]
    assert relative_error(speaker, golden[f"voice.{voice}.spk_emb"]) < TOLERANCE


def test_rows_of_a_batch_are_independent(module: Cfm, golden: dict[str, Tensor]) -> None:
    rows = [arguments(golden, case) for case in CASES]
    batch = module.sample(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    for index, row in enumerate(rows):
        for got, expected in zip(batch, module.sample(*row), strict=True):
            assert relative_error(got[index : index + 1], expected) < TOLERANCE


@pytest.mark.parametrize("case", ["plain", "clone", "sde"])
def test_speech_loop_matches(
    module: Cfm, checkpoint: Checkpoint, golden: dict[str, Tensor], case: str
) -> None:
    """Prefill, then patch by patch from the recorded noise, up to the step where the reference stopped."""
    stage = talker_stage.STAGE
    llm_config = stage.config(checkpoint)
    llm = float32_module(stage, llm_config, checkpoint)
    assert isinstance(llm, talker_stage.Talker)
    size = llm_config.llm
    shape = (2, llm_config.slot_tokens, size.num_kv_heads, size.head_dim)
    slots = [torch.zeros(shape) for _ in range(2 * size.num_layers)]
    prefix = f"loop.{case}."
    embeds, slot = golden[prefix + "inputs_embeds"][0], torch.tensor([1])
    ids, use_embed = torch.zeros(len(embeds), dtype=torch.int64), torch.ones(len(embeds), dtype=torch.bool)
    hidden = llm.prefill(
        ids,
        embeds,
        use_embed,
        torch.zeros_like(ids),
        torch.arange(len(ids)),
        slot,
        torch.tensor([len(embeds) - 1]),
        *slots,
    )[0]
    history, controls = golden[prefix + "first_history"], golden[prefix + "sde_args"]
    values = stage.parameters(llm_config, StageOptions())
    for step, noise in enumerate(golden[prefix + "y0"]):
        recorded = golden.get(prefix + "sde_rnd")
        step_noise = torch.zeros(1, 10, 4, 64) if recorded is None else recorded[step].transpose(0, 1)
        assert relative_error(hidden, golden[prefix + "last_hidden"][:, step]) < TOLERANCE
        if step == len(golden[prefix + "y0"]) - 1:
            assert relative_error(history, golden[prefix + "last_history"]) < TOLERANCE
        latents, next_embeds, history, stop = module.sample(
            hidden, history, noise, step_noise, controls[0:1], controls[1:2], controls[2:3]
        )
        assert relative_error(latents, golden[prefix + "gen_lat"][step]) < TOLERANCE
        assert relative_error(next_embeds, golden[prefix + "next_embeds"][:, step]) < TOLERANCE
        assert abs(stop.item() - golden[prefix + "stop_prob"][step, 1].item()) < TOLERANCE
        ended = step > values.min_stop_step and stop.item() > values.stop_threshold
        assert ended == bool(golden[prefix + "ended"][step]), f"patch {step}"
        hidden = llm.step(next_embeds, slot, torch.tensor([len(embeds) + step]), *slots)[0]


def other_config(config: CfmConfig) -> CfmConfig:
    """Dims that all differ from the tiny checkpoint's, and a patch longer than the history."""
    dit = replace(
        config.dit, depth=3, hidden_size=48, num_heads=2, mlp_size=72, latent_dim=6, out_size=6, num_tokens=6
    )
    aggregator = replace(dit, depth=1, hidden_size=24, num_heads=3, mlp_size=36, out_size=20, num_tokens=4)
    return replace(
        config,
        num_steps=7,
        latents_per_patch=3,
        history_latents=2,
        llm_hidden_size=20,
        speaker_dim=11,
        dit=dit,
        aggregator=aggregator,
    )


def random_module(config: CfmConfig) -> Cfm:
    torch.manual_seed(0)
    built = STAGE.build(config, Shard())
    assert isinstance(built, Cfm)
    for value in built.state_dict().values():
        nn.init.normal_(value, std=0.2)
    built.step_sizes.copy_(flow_times(config.num_steps).diff())
    return built.eval().requires_grad_(False)


def test_other_dims(config: CfmConfig) -> None:
    other = other_config(config)
    module = random_module(other)
    plan = STAGE.graphs(other, Shard(), StageOptions())[0]
    example = plan.example({"B": 3}, torch.Generator().manual_seed(1))
    latents, embeds, history, stop = module.sample(*example.values())
    assert (latents.shape, embeds.shape, stop.shape) == ((3, 3, 6), (3, 20), (3,))
    assert torch.equal(history, latents[:, -2:])
    still = module.sample(*{**example, "temperature": torch.zeros(3)}.values())
    assert relative_error(still[0][:1], latents[:1]) < 1e-6, "the example's row 0 has temperature 0"
    assert relative_error(still[0][2:], latents[2:]) > 1e-3


def test_unsupported_variants_are_refused() -> None:
    raw = {"depth": 1, "hidden_size": 8, "num_heads": 2, "in_channels": 4}
    with pytest.raises(CheckpointError, match="qk_norm"):
        read_dit_config({**raw, "qk_norm": "rms_norm"}, "here", num_tokens=3, out_size=None)
    with pytest.raises(CheckpointError, match="does not divide"):
        read_dit_config({**raw, "num_heads": 3}, "here", num_tokens=3, out_size=None)
    with pytest.raises(CheckpointError, match="depth, in_channels"):
        read_dit_config({"hidden_size": 8, "num_heads": 2}, "here", num_tokens=3, out_size=None)


def test_bfloat16_stays_close(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_bfloat16(STAGE, checkpoint, tmp_path, similarity=0.99)


@BACKENDS
def test_captured_graphs(config: CfmConfig, tmp_path: Path, backend: Backend) -> None:
    """The dims differ from the tiny model. Two sampler steps suffice: ten steps repeat the same operations.

    The compiled sampler of the tiny model is compared with the goldens in tests/artifact.
    """
    short = replace(other_config(config), num_steps=2)
    module = random_module(short)
    plans = STAGE.graphs(short, Shard(), StageOptions())
    check_engine(module, plans[0], [{"B": 1}, {"B": 2}, {"B": 8}], tmp_path, TOLERANCE, backend)
    check_engine(module, plans[1], [{"N": 1}, {"N": 5}], tmp_path, TOLERANCE, backend)
    check_engine(module, plans[2], [{"N": 1}, {"N": 2}], tmp_path, TOLERANCE, backend)
