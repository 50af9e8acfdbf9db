"""The thinker's eager module compared with goldens (spec: thinker.md), and the stage's declarations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stage_checks import altered, graph_of
from thinker_session import EagerStage, Prompt, Session, eager_stage, golden_prompt
from torch import Tensor

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.eager_reference import float32_inputs
from mingc.export.compile.trace import check_example
from mingc.export.layers.decoder import PAGE_SIZE, Attention, Decoder, DecoderConfig
from mingc.export.layers.decoder_weights import decoder_weights
from mingc.export.layers.moe import MoeFeedForward
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.weights.loading import check_weights, load_module, write_weights
from mingc.kernels.mrope import mrope_cos_sin

DATA = Path(__file__).parents[1] / "data"
CASES = ("text", "image", "audio", "mixed", "video")
# An independent implementation stays below 2e-6 relative L2 on every tensor; noise of one ulp gives 2e-5 absolute.
ABSOLUTE = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "thinker.safetensors")


@pytest.fixture
def stage(module: Decoder, config: ThinkerConfig) -> EagerStage:
    return eager_stage(module, STAGE.graphs(config, Shard(), StageOptions()))


@pytest.fixture
def session(stage: EagerStage, config: ThinkerConfig) -> Session:
    return Session(stage, config.decoder.vocab_size)


def test_the_reference_holds_experts_once(module: Decoder) -> None:
    """Experts keep the checkpoint's dtype: one released layer would take 13 GB in float32. All else is float32."""
    narrow = {name for name, value in module.state_dict().items() if value.dtype == torch.bfloat16}
    layers = [name for name, each in module.named_modules() if isinstance(each, MoeFeedForward)]
    assert layers and narrow == {f"{name}.{matrix}" for name in layers for matrix in ("gate_up", "down")}


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    error = (got - expected).abs().max().item()
    assert error < ABSOLUTE, f"off by {error}"
    assert ((got - expected).norm() / expected.norm()).item() < 4e-6


def by_expert(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.long().argsort(-1)
    return ids.long().gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize("case", CASES)
def test_prefill_layers_routing_and_logits(
    case: str, stage: EagerStage, session: Session, golden: dict[str, Tensor]
) -> None:
    logits = session.prefill(golden_prompt(golden, case), chunk=1 << 20)
    attention = stage["prefill_attention"].spec.layer_instances
    streams = [stage.engines["prefill_attention", name].outputs[0] for name in attention]
    last = stage.engines["prefill_experts", attention[-1].replace("attention", "feed_forward")].outputs
    assert torch.equal(streams[0], golden[f"{case}.inputs_embeds"][0])
    close(torch.stack([*streams[1:], last[0] + last[1]]), golden[f"{case}.layer_out"][:, 0])
    ids, weights = (torch.stack([each[index] for each in session.routing]) for index in (0, 1))
    found = by_expert(ids, weights)
    expected = by_expert(golden[f"{case}.moe_topk_ids"][:, 0], golden[f"{case}.moe_topk_weights"][:, 0])
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
    recorded = golden["text.logits"][:, -1] if case == "text" else golden[f"{case}.logits_last"]
    close(logits, recorded)


@pytest.mark.parametrize("gate", ["gate", "image_gate", "audio_gate"])
@pytest.mark.parametrize("case", ["image", "audio"])
def test_every_router_selects_the_recorded_experts(
    case: str, gate: str, module: Decoder, session: Session, golden: dict[str, Tensor]
) -> None:
    seen: list[Tensor] = []
    feed_forward = module.layers[1].feed_forward
    assert isinstance(feed_forward, MoeFeedForward)
    hook = feed_forward.router.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    session.prefill(golden_prompt(golden, case), chunk=1 << 20)
    hook.remove()
    number = ["gate", "image_gate", "audio_gate"].index(gate)
    tokens = seen[0].shape[0]
    found = by_expert(*feed_forward.router(seen[0], torch.full((tokens,), number)))
    expected = by_expert(
        golden[f"{case}.router0.{gate}.topk_ids"][0], golden[f"{case}.router0.{gate}.topk_weights"][0]
    )
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "layer", "kind", "name"),
    [
        ("image", 0, "k", "image.kv.layer0_keys_rotated"),
        ("text", 1, "k", "text.kv.layer1_keys_rotated"),
        ("text", 1, "v", "text.kv.layer1_values"),
    ],
)
def test_pool_holds_rotated_keys_and_values(
    case: str, layer: int, kind: str, name: str, session: Session, golden: dict[str, Tensor]
) -> None:
    prompt = golden_prompt(golden, case)
    session.prefill(prompt, chunk=1 << 20)
    kept = session.state[f"layers.{layer}.attention.{kind}_pages"][prompt.rows[: prompt.length]]
    close(kept.transpose(0, 1), golden[name][0])


def test_rotary_tables(module: Decoder, golden: dict[str, Tensor]) -> None:
    cos, sin = mrope_cos_sin(torch.arange(4).expand(3, -1), module.embed.inv_freq, module.embed.position_rows)
    torch.testing.assert_close(cos.repeat(1, 2), golden["text.rope_cos"], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.repeat(1, 2), golden["text.rope_sin"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rotary_dim", "rows"),
    [(64, [1, 2] * 12 + [0] * 8), (48, [1, 2] * 12), (32, [1, 2] * 8), (66, [1, 2] * 12 + [0] * 9)],
)
def test_the_highest_24_frequencies_are_spatial(
    checkpoint: Checkpoint, rotary_dim: int, rows: list[int]
) -> None:
    """Rows of time, height and width are 0, 1, 2 (thinker.md §3, the table by f); 64 is the released width."""
    decoder = replace(STAGE.config(checkpoint).decoder, rotary_dim=rotary_dim, head_dim=128)
    sources = {each.name: each for each in decoder_weights(decoder, Shard(), is_tied=False)}
    assert sources["embed.position_rows"].compute().tolist() == rows
    frequencies = [2.4e6 ** (-2 * f / rotary_dim) for f in range(rotary_dim // 2)]
    assert sources["embed.inv_freq"].compute().tolist() == pytest.approx(frequencies, rel=1e-6)


@pytest.mark.parametrize(("chunk", "padding"), [(1 << 20, 5), (17, 0), (16, 3), (2, 0)])
@pytest.mark.parametrize("case", ["text", "mixed"])
def test_chunks_and_padding_change_nothing(
    case: str, chunk: int, padding: int, session: Session, golden: dict[str, Tensor]
) -> None:
    logits = session.prefill(golden_prompt(golden, case), chunk=chunk, padding=padding)
    close(logits, golden["text.logits"][:, -1] if case == "text" else golden[f"{case}.logits_last"])


def test_padding_of_chunks_that_computes_nan_reaches_no_request(
    session: Session, golden: dict[str, Tensor]
) -> None:
    """Padding rows write to page 0, which every request reads, masked, behind its own pages."""
    for case in ("text", "mixed"):
        prompt = golden_prompt(golden, case)
        logits = session.prefill(prompt, chunk=17, padding=11, padding_kind=1)
        close(logits, golden["text.logits"][:, -1] if case == "text" else golden[f"{case}.logits_last"])
        assert all(pages.isfinite().all() for pages in session.state.values())
    prompts = ragged_prompts(golden)
    steps = [torch.cat([session.prefill(each, chunk=32, padding=3, padding_kind=1) for each in prompts])]
    for _ in range(golden["batch_left.greedy_ids"].shape[1] - 1):
        steps.append(session.decode(prompts, steps[-1].argmax(-1).tolist(), padding=2))
    assert torch.equal(torch.stack(steps, dim=1).argmax(-1), golden["batch_left.greedy_ids"])


@pytest.mark.parametrize("together", [2, 3])
def test_chunks_in_one_call_are_bitwise_equal(
    together: int, session: Session, golden: dict[str, Tensor]
) -> None:
    prompt = golden_prompt(golden, "mixed")
    expected = session.prefill(prompt, chunk=16)
    assert torch.equal(session.prefill(prompt, chunk=16, together=together), expected)
    at_last = len(prompt.input_ids) % (16 * together) or 16 * together
    assert {len(ids) for ids, _ in session.routing} == {at_last}


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(case: str, session: Session, golden: dict[str, Tensor]) -> None:
    expected = golden[f"{case}.greedy_ids"][0].tolist()
    ids, logits = session.greedy(golden_prompt(golden, case), len(expected))
    assert ids == expected
    close(logits, golden[f"{case}.greedy_logits"][0])


def ragged_prompts(golden: dict[str, Tensor]) -> list[Prompt]:
    """The rows of `batch_left` without their padding."""
    prompts = []
    for ids, mask in zip(golden["batch_left.input_ids"], golden["batch_left.attention_mask"], strict=True):
        kept = ids[mask.bool()]
        prompts.append(
            Prompt(
                input_ids=kept,
                embeds=torch.full((len(kept), golden["text.inputs_embeds"].shape[-1]), torch.nan),
                embed_kind=torch.zeros_like(kept),
                positions=torch.arange(len(kept)).expand(3, -1),
                delta=0,
            )
        )
    return prompts


def test_ragged_batch_matches_golden(session: Session, golden: dict[str, Tensor]) -> None:
    prompts = ragged_prompts(golden)
    steps = [torch.cat([session.prefill(prompt, chunk=32) for prompt in prompts])]
    close(steps[0], golden["batch_left.logits_last_valid"])
    for _ in range(golden["batch_left.greedy_ids"].shape[1] - 1):
        steps.append(session.decode(prompts, steps[-1].argmax(-1).tolist(), padding=2))
    logits = torch.stack(steps, dim=1)
    assert torch.equal(logits.argmax(-1), golden["batch_left.greedy_ids"])
    close(logits, golden["batch_left.greedy_logits"])


def test_unused_prompt_embeddings_do_not_matter(session: Session, golden: dict[str, Tensor]) -> None:
    prompt = golden_prompt(golden, "text")
    assert prompt.embeds.isnan().all(), "text tokens must not read `embeds`"
    assert session.prefill(prompt, chunk=1 << 20).isfinite().all()


def test_every_weight_has_a_source_of_the_right_shape(checkpoint: Checkpoint, config: ThinkerConfig) -> None:
    for world_size in (1, 2, 4, 8):
        for rank in range(world_size):
            assert (
                check_weights(checkpoint, STAGE.weights(config, Shard(rank=rank, world_size=world_size)))
                == []
            )
    used = {tensor for source in STAGE.weights(config, Shard()) for tensor in source.tensors}
    assert used == {name for name in checkpoint.main.tensors if name.startswith("model.")}


def test_bfloat16_recipe_stays_close(
    checkpoint: Checkpoint, config: ThinkerConfig, module: Decoder, tmp_path: Path
) -> None:
    write_weights(checkpoint, STAGE, config, Shard(), torch.bfloat16, tmp_path / "weights")
    bfloat16 = load_module(STAGE, config, Shard(), tmp_path / "weights")
    for plan in STAGE.graphs(config, Shard(), StageOptions(dtype=torch.bfloat16)):
        example = plan.example(plan.check_dims, torch.Generator().manual_seed(2))
        check_example(plan.spec, example, plan.check_dims, STAGE.name)
        float32 = {
            name: value.float() if value.is_floating_point() else value for name, value in example.items()
        }
        names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
        for instance in plan.spec.layer_instances:
            run = getattr(bfloat16.get_submodule(instance), plan.method)
            reference = getattr(module.get_submodule(instance), plan.method)
            outputs = run(*[example[name].clone() for name in names])
            expected = reference(*[float32[name].clone() for name in names])
            for spec, got, value in zip(plan.spec.outputs, outputs, expected, strict=True):
                assert str(got.dtype) == f"torch.{spec.dtype}", f"{plan.spec.name}: {spec.name}"
                # One rerouted token changes the tiny model a lot: this finds a wrong cast, not rounding error.
                cosine = torch.cosine_similarity(got.float().flatten(), value.float().flatten(), dim=0)
                assert cosine > 0.9 or value.count_nonzero() == 0, f"{instance}: {spec.name}"


def test_parameters(config: ThinkerConfig) -> None:
    values = STAGE.parameters(config, StageOptions())
    assert values.page_size == PAGE_SIZE
    assert (values.vocab_size, values.hidden_size, values.num_layers) == (576, 64, 4)
    assert values.stop_token_ids == (520, 517)
    assert (values.image_patch_token, values.frame_patch_token, values.audio_patch_token) == (539, 557, 550)
    assert (values.video_start_token, values.video_end_token) == (542, 543)  # not the config's mislabel


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("num_experts", "many", "num_experts is 'many'"),
        ("n_group", 3, "16 experts cannot form 3 equal groups"),
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling.type='yarn'"),
        ("image_start_token", 3, "<image> is token 540"),
    ],
)
def test_unusable_configs_are_refused(checkpoint: Checkpoint, key: str, value: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        STAGE.config(altered(checkpoint, "llm_config", key, value=value))
    assert "config.json" in str(caught.value)


def test_config_keys_of_the_release(checkpoint: Checkpoint) -> None:
    def decoder(key: str, value: object, given: Checkpoint = checkpoint) -> DecoderConfig:
        return STAGE.config(altered(given, "llm_config", key, value=value)).decoder

    assert decoder("hidden_size", 512, altered(checkpoint, "llm_config", "head_dim")).head_dim == 128
    assert decoder("routed_scaling_factor", 1.5).routed_scale == 1.5
    assert decoder("moe_router_topk_scaling_factor", 3).routed_scale == 3.0
    assert decoder("num_shared_experts", 2).shared_intermediate_size == 64


def test_tokens_are_sampled_for_every_size_of_logits(config: ThinkerConfig) -> None:
    """After a chunk there is a row for each of its prompts, after a decode step for each request of the batch."""
    options = StageOptions(static_buckets=True, batch_sizes=(1, 2, 32), max_model_len=2048)
    graphs = {plan.spec.name: plan.spec for plan in STAGE.graphs(config, Shard(world_size=2), options)}
    assert graphs["sample"].dim("B").buckets == graphs["head"].dim("B").buckets == (1, 2, 16, 32)
    assert graphs["sample"].inputs[0].shape == ("B", config.decoder.vocab_size), "of all ranks"
    assert not any(plan.spec.name == "sample" for plan in STAGE.graphs(config, Shard(), StageOptions()))


def test_examples_suit_every_bucket(config: ThinkerConfig) -> None:
    options = StageOptions(static_buckets=True, batch_sizes=(1, 2, 4), max_model_len=2048)
    for plan in STAGE.graphs(config, Shard(), options):
        for dim in plan.spec.dims:
            for size in dim.buckets:
                sizes = {**plan.trace_dims, dim.name: size}
                example = plan.example(sizes, torch.Generator().manual_seed(0))
                check_example(plan.spec, example, sizes, STAGE.name)
                if "page_table" in example:
                    assert 0 < example["page_table"].max() < sizes["KV"] // PAGE_SIZE


@pytest.mark.parametrize("batch_sizes", [(1, 2), (1, 2, 4, 8)])
def test_trace_and_check_sizes_are_in_range(config: ThinkerConfig, batch_sizes: tuple[int, ...]) -> None:
    options = StageOptions(batch_sizes=batch_sizes, max_model_len=512)
    for plan in STAGE.graphs(config, Shard(), options):
        for dim in plan.spec.dims:
            for sizes in (plan.trace_dims, plan.check_dims):
                assert dim.minimum <= sizes[dim.name] <= dim.maximum, f"{plan.spec.name}: {dim.name}"


def test_prompts_that_share_a_chunk_are_independent(config: ThinkerConfig) -> None:
    """Static graphs take several prompts per chunk; each has the same result as in a separate chunk."""
    options = StageOptions(
        dtype=torch.bfloat16,
        static_buckets=True,
        batch_sizes=(1, 2, 4),
        max_model_len=256,
        prefill_chunk_size=256,
    )
    plan = graph_of(STAGE, config, "prefill_attention", options)
    sizes = {"T": 256, "P": 16, "KV": 80 * PAGE_SIZE}
    generator = torch.Generator().manual_seed(0)
    example = {name: each.float() if each.is_floating_point() else each
               for name, each in plan.example(sizes, generator).items()}  # fmt: skip
    assert example["segment"].unique().tolist() == [0, 1, 2, 3]
    attention = Attention(config.decoder, 1)
    for weight in attention.parameters():
        weight.data.normal_(0, 0.1, generator=generator)
    names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
    _, together = attention.prefill(*(example[name].clone() for name in names))
    for prompt in range(4):
        own = example["segment"] == prompt
        alone = {name: each[own] if each.shape[0] == 256 and "pages" not in name else each
                 for name, each in example.items()}  # fmt: skip
        alone["page_table"] = example["page_table"][prompt : prompt + 1]
        alone["segment"] = torch.zeros_like(alone["segment"])
        _, expected = attention.prefill(*(alone[name].clone() for name in names))
        torch.testing.assert_close(together[own], expected)


def test_a_reference_accepts_the_inputs_of_the_checked_engine(config: ThinkerConfig) -> None:
    """Float32 chunks have one prompt: the page table of several must not be replaced like a sharded state."""
    options = StageOptions(dtype=torch.bfloat16, static_buckets=True, batch_sizes=(1, 4), max_model_len=256)
    plan, exact = (
        graph_of(STAGE, config, "prefill_attention", chosen)
        for chosen in (options, StageOptions(batch_sizes=(1, 4), max_model_len=256))
    )
    sizes = {"T": 32, "P": 16, "KV": 80 * PAGE_SIZE}
    example = plan.example(sizes, torch.Generator().manual_seed(0))
    taken = float32_inputs(exact, example, sizes)
    assert plan.check_dims["T"] == 128, "a chunk of two prompts is checked"
    assert plan.example({**sizes, "T": 128}, torch.Generator())["segment"].unique().tolist() == [0, 1]
    assert example["page_table"].shape == (4, 16) and taken["page_table"] is example["page_table"]
    assert taken["residual"].dtype == torch.float32
    assert torch.equal(taken["k_pages"], example["k_pages"].float())
