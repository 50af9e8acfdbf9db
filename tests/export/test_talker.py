"""Speech LLM compared with goldens: chunked, batched, with a window, traced and compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checks import BACKENDS, check_bfloat16, check_engine
from safetensors.torch import load_file
from stage_checks import check_sources
from torch import Tensor

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.layers.qwen2 import read_qwen2_config
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.talker import STAGE, Talker, TalkerConfig
from mingc.export.weights.loading import float32_module
from mingc.kernels.chunk_layout import SLOT_CHUNK_ALIGNMENT
from mingc.numerics.relative_error import relative_error

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "talker.safetensors")


def empty_slots(config: TalkerConfig, num_slots: int = 4, fill: float = 0.0) -> list[Tensor]:
    llm = config.llm
    shape = (num_slots, config.slot_tokens, llm.num_kv_heads, llm.head_dim)
    return [torch.full(shape, fill) for _ in range(2 * llm.num_layers)]


def prefill(
    module: Talker, embeds: Tensor, slots: list[Tensor], *, slot: int, start: int = 0, pad: int = 0
) -> Tensor:
    """Hidden (1, D) of the last of `embeds` (T, D), with `pad` garbage tokens behind them."""
    return prefill_all(module, {slot: (embeds, start)}, slots, pad=pad)


def prefill_all(
    module: Talker, prompts: dict[int, tuple[Tensor, int]], slots: list[Tensor], *, pad: int = 0
) -> Tensor:
    """Hidden (R, D) of the last of the embeddings (T, D) of each prompt, by slot with the position of its first."""
    embeds, segment, index, last = list[Tensor](), list[int](), list[int](), list[int]()
    for number, (own, start) in enumerate(prompts.values()):
        gap = -len(segment) % SLOT_CHUNK_ALIGNMENT
        embeds += [torch.full((gap, own.shape[1]), 9.0), own]
        segment += [-1] * gap + [number] * len(own)
        index += [0] * gap + list(range(start, start + len(own)))
        last.append(len(segment) - 1)
    given = torch.cat([*embeds, torch.full((pad, embeds[0].shape[1]), 9.0)])
    segment, index = segment + [-1] * pad, index + [0] * pad
    words = torch.zeros(len(given), dtype=torch.int64)
    places = map(torch.tensor, (segment, index, list(prompts), last))
    hidden: Tensor = module.prefill(words, given, words == 0, *places, *slots)[0]
    return hidden


def test_prompts_of_one_chunk_are_independent(
    module: Talker, config: TalkerConfig, golden: dict[str, Tensor]
) -> None:
    """Of other lengths, one of which is continued: each as alone, in every row of its slot."""
    plain, clone = (golden[f"prompt.{case}.inputs_embeds"][0] for case in ("plain", "clone"))
    slots = empty_slots(config, fill=3.0)
    prefill(module, plain[:21], slots, slot=2)
    together = {1: (clone, 0), 2: (plain[21:], 21), 3: (plain[:5], 0)}
    hidden = prefill_all(module, together, slots, pad=7)
    for row, (case, end) in enumerate((("clone", len(clone)), ("plain", len(plain)), ("plain", 5))):
        assert relative_error(hidden[row], golden[f"llm.{case}.last_hidden_state"][0, end - 1]) < TOLERANCE
    alone = empty_slots(config, fill=3.0)
    prefill(module, clone, alone, slot=1)
    for together_, alone_ in zip(slots, alone, strict=True):
        assert relative_error(together_[1], alone_[1]) < TOLERANCE


def test_weights_match_the_checkpoint(checkpoint: Checkpoint, config: TalkerConfig) -> None:
    check_sources(STAGE, checkpoint, config)


@pytest.mark.parametrize("case", ["plain", "clone"])
def test_prefill_matches_every_layer(
    module: Talker, config: TalkerConfig, golden: dict[str, Tensor], case: str
) -> None:
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _module, _inputs, out: outputs.append(out.values))
        for layer in module.stack.layers
    ]
    hidden = prefill(module, golden[f"prompt.{case}.inputs_embeds"][0], empty_slots(config), slot=1)
    for handle in handles:
        handle.remove()
    assert relative_error(torch.stack(outputs), golden[f"llm.{case}.layers"][:, 0]) < TOLERANCE
    assert relative_error(hidden, golden[f"llm.{case}.last_hidden_state"][:, -1]) < TOLERANCE


def test_ids_and_embeddings_mix(module: Talker, config: TalkerConfig, golden: dict[str, Tensor]) -> None:
    """The assembled prompt from ids, with embeddings only at positions that ids do not determine."""
    ids, embeds = golden["prompt.clone.input_ids"][0], golden["prompt.clone.inputs_embeds"][0]
    use_embed = (module.word_embeddings[ids] != embeds).any(dim=1)
    assert 0 < use_embed.sum() < len(ids)
    given = torch.where(use_embed.unsqueeze(1), embeds, 0)
    places = (torch.zeros_like(ids), torch.arange(len(ids)), torch.tensor([1]), torch.tensor([len(ids) - 1]))
    hidden = module.prefill(ids, given, use_embed, *places, *empty_slots(config))[0]
    assert relative_error(hidden, golden["llm.clone.last_hidden_state"][:, -1]) < TOLERANCE


@pytest.mark.parametrize(("chunk", "pad"), [(16, 0), (30, 5), (76, 20)])
def test_chunks_and_padding_change_nothing(
    module: Talker, config: TalkerConfig, golden: dict[str, Tensor], chunk: int, pad: int
) -> None:
    embeds, slots = golden["prompt.plain.inputs_embeds"][0], empty_slots(config, fill=3.0)
    for start in range(0, len(embeds), chunk):
        hidden = prefill(module, embeds[start : start + chunk], slots, slot=2, start=start, pad=pad)
        end = min(start + chunk, len(embeds))
        expected = golden["llm.plain.last_hidden_state"][:, end - 1]
        assert relative_error(hidden, expected) < TOLERANCE, f"chunk from {start}"


def test_padding_beyond_the_end_of_a_slot_is_not_written(module: Talker, config: TalkerConfig) -> None:
    slots = empty_slots(config)
    before = [slot.clone() for slot in slots]
    hidden = prefill(
        module, torch.randn(3, config.llm.hidden_size), slots, slot=1, start=config.slot_tokens - 3, pad=9
    )
    assert hidden.isfinite().all()
    for now, then in zip(slots, before, strict=True):
        assert torch.equal(now[1, :-3], then[1, :-3])
        assert torch.equal(now[2:], then[2:])


def test_steps_continue_a_prefill(module: Talker, config: TalkerConfig, golden: dict[str, Tensor]) -> None:
    embeds, slots = golden["prompt.plain.inputs_embeds"][0], empty_slots(config)
    prefill(module, embeds[:40], slots, slot=3)
    for index in range(40, len(embeds)):
        hidden = module.step(embeds[index : index + 1], torch.tensor([3]), torch.tensor([index]), *slots)[0]
        expected = golden["llm.plain.last_hidden_state"][:, index]
        assert relative_error(hidden, expected) < TOLERANCE, f"token {index}"


def test_rows_of_a_batch_are_independent(
    module: Talker, config: TalkerConfig, golden: dict[str, Tensor]
) -> None:
    prompts = {1: golden["prompt.plain.inputs_embeds"][0], 3: golden["prompt.clone.inputs_embeds"][0]}
    slots = empty_slots(config)
    for slot, embeds in prompts.items():
        prefill(module, embeds[:-1], slots, slot=slot)
    rows = torch.stack([prompts[3][-1], prompts[1][-1], torch.zeros(config.llm.hidden_size)])
    lengths = torch.tensor([len(prompts[3]) - 1, len(prompts[1]) - 1, 0])
    hidden = module.step(rows, torch.tensor([3, 1, 0]), lengths, *slots)[0]
    for row, case in ((0, "clone"), (1, "plain")):
        assert relative_error(hidden[row], golden[f"llm.{case}.last_hidden_state"][0, -1]) < TOLERANCE
    assert hidden.isfinite().all()


def test_windows_agree_between_prefill_and_step(
    checkpoint: Checkpoint, config: TalkerConfig, golden: dict[str, Tensor]
) -> None:
    embeds = golden["prompt.plain.inputs_embeds"][0]
    results = {}
    for window in (9, len(embeds)):
        windowed = replace(config, llm=replace(config.llm, windows=(window, None)))
        module = float32_module(STAGE, windowed, checkpoint)
        assert isinstance(module, Talker)
        slots = empty_slots(windowed)
        whole = prefill(module, embeds, slots, slot=1)
        prefill(module, embeds[:-1], slots, slot=2)
        length = torch.tensor([len(embeds) - 1])
        stepped = module.step(embeds[-1:], torch.tensor([2]), length, *slots)[0]
        assert relative_error(stepped, whole) < TOLERANCE
        results[window] = whole
    expected = golden["llm.plain.last_hidden_state"][:, -1]
    assert relative_error(results[len(embeds)], expected) < TOLERANCE
    assert relative_error(results[9], expected) > 1e-3


def test_layer_windows_match_the_config() -> None:
    raw = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "sliding_window": 16,
    }
    assert read_qwen2_config(raw, "here").windows == (None,) * 4
    windowed = {**raw, "use_sliding_window": True, "max_window_layers": 1}
    assert read_qwen2_config(windowed, "here").windows == (None, 16, 16, 16)
    assert read_qwen2_config(windowed, "here", max_layers=2).windows == (None, 16)
    typed = {**windowed, "layer_types": ["sliding_attention"] + ["full_attention"] * 3}
    assert read_qwen2_config(typed, "here").windows == (16, None, None, None)
    with pytest.raises(CheckpointError, match="intermediate_size, rope_theta"):
        read_qwen2_config(
            {key: raw[key] for key in raw if key not in ("intermediate_size", "rope_theta")}, "here"
        )
    for key in ("rope_type", "type"):  # newer and older configs
        with pytest.raises(CheckpointError, match="only plain rope"):
            read_qwen2_config({**raw, "rope_scaling": {key: "linear", "factor": 4.0}}, "here")
    with pytest.raises(CheckpointError, match="gelu"):
        read_qwen2_config({**raw, "hidden_act": "gelu"}, "here")


def test_the_head_size_is_that_of_the_config_or_a_share_of_the_hidden_size() -> None:
    """As in HF Qwen2, whose projection has (Hq + 2 Hk) d rows."""
    raw = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    for given, size in (({}, 2), ({"head_dim": None}, 2), ({"head_dim": 16}, 16)):
        config = read_qwen2_config({**raw, **given}, "here")
        assert (config.head_dim, config.qkv_size) == (size, 8 * size)


def test_parameters(config: TalkerConfig) -> None:
    values = STAGE.parameters(config, StageOptions())
    assert (values.hidden_size, values.num_layers, values.vocab_size) == (64, 2, 512)
    assert values.default_voice == "DB30"
    assert values.slot_tokens == 2048


def test_bfloat16_stays_close(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_bfloat16(STAGE, checkpoint, tmp_path, similarity=0.99)


@BACKENDS
def test_compiled_graphs(module: Talker, config: TalkerConfig, backend: Backend, tmp_path: Path) -> None:
    prefill_plan, step_plan = STAGE.graphs(config, Shard(), StageOptions())
    check_engine(
        module, prefill_plan, [{"T": 1}, {"T": 33, "S": 2}, {"T": 256}], tmp_path, TOLERANCE, backend
    )
    check_engine(
        module, step_plan, [{"B": 1}, {"B": 4, "S": 3}, {"B": 8, "S": 9}], tmp_path, TOLERANCE, backend
    )
