"""A thinker in bfloat16 against float32 records: rounding may send rows to other experts, a fault may not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from thinker_session import EagerEngine, EagerStage, eager_stage, golden_prompt
from torch import Tensor

from mingc.artifacts.manifest import ModelParameters, QuantizationError
from mingc.artifacts.parameters import ThinkerParameters
from mingc.export.checkpoint import Checkpoint
from mingc.export.layers.decoder import Decoder
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.weights.loading import load_module, write_weights
from mingc.verify.comparison import Comparison
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.thinker import replay
from mingc.verify.replays.thinker_prompts import Prompt
from mingc.verify.replays.thinker_teacher_forced import FollowedCase, FollowedThinker
from mingc.verify.stages import Engines

DATA = Path(__file__).parents[1] / "data"
OPTIONS = StageOptions(dtype=torch.bfloat16, max_model_len=128, prefill_chunk_size=64)
SEVERAL = replace(OPTIONS, batch_sizes=(1, 2, 4))


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "thinker.safetensors")


@pytest.fixture
def ranks(
    checkpoint: Checkpoint, config: ThinkerConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> list[Decoder]:
    """The tiny thinker in bfloat16, one module a rank; one rank unless asked for more."""
    world_size = getattr(request, "param", 1)
    modules = []
    for rank in range(world_size):
        shard, path = Shard(rank=rank, world_size=world_size), tmp_path / f"rank{rank}"
        write_weights(checkpoint, STAGE, config, shard, torch.bfloat16, path)
        modules.append(load_module(STAGE, config, shard, path))
    return modules


class Found:
    """What a followed run of one case said."""

    def __init__(self, ledger: ComparisonLog, case: FollowedCase) -> None:
        self.comparisons = ledger.comparisons
        self.case = case

    @property
    def failed(self) -> list[Comparison]:
        return [each for each in self.comparisons if each.outcome == "FAIL"]


def stages(ranks: Sequence[Decoder], config: ThinkerConfig) -> list[EagerStage]:
    shard = Shard(world_size=len(ranks))
    return [eager_stage(module, STAGE.graphs(config, shard, OPTIONS)) for module in ranks]


def beginning(golden: dict[str, Tensor], case: str, length: int) -> dict[str, Tensor]:
    """The first tokens of a prompt of text: what later ones are does not change what is recorded of them."""
    names = ("input_ids", "position_ids", "inputs_embeds", "layer_out", "logits")
    axes = {"layer_out": 2, "position_ids": 2}
    made = {f"{case}.{name}": golden[f"{case}.{name}"].narrow(axes.get(name, 1), 0, length) for name in names}
    made[f"{case}.rope_deltas"] = golden[f"{case}.rope_deltas"]
    return made


def follow(parts: Sequence[EagerStage], config: ThinkerConfig, golden: dict[str, Tensor], case: str) -> Found:
    references = {name: value.numpy() for name, value in golden.items()}
    ledger = ComparisonLog("thinker.safetensors", references, tolerance=0.1, is_exact=False)
    thinker = FollowedThinker(
        parts[0],
        [(part, torch.device("cpu")) for part in parts[1:]],
        STAGE.parameters(config, OPTIONS),
        quantization_error=None,
        longest=100,
        device=torch.device("cpu"),
    )
    given = golden_prompt(golden, case)
    prompt = Prompt(
        input_ids=given.input_ids.numpy(),
        positions=given.positions.numpy(),
        rope_delta=given.delta,
        embed_kind=given.embed_kind.numpy(),
        embeds=given.embeds.bfloat16() if given.embed_kind.any() else None,
    )
    with torch.inference_mode():
        return Found(ledger, thinker.check(case, [prompt], ledger))


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("case", ["text", "image", "audio"])
def test_rows_that_rounding_sends_elsewhere_are_followed_and_counted(
    case: str, ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    found = follow(stages(ranks, config), config, golden, case)
    assert not found.failed
    shares = [each for each in found.comparisons if each.kind == "share"]
    assert shares and all("went to other experts by rounding" in each.note for each in shares)
    assert any(each.error for each in shares), "no row went elsewhere: the case tests nothing"
    assert found.case.excuse


def test_an_unrouted_run_leaves_the_record(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    """The reason for all of this: the same graphs without the record give other logits."""
    found = follow(stages(ranks, config), config, golden, "image")
    (whole, *_) = found.case.free.values()
    recorded = golden["image.logits_last"][0].numpy()
    assert abs(whole - recorded).max() > 0.1 * abs(recorded).max()


def exchange_experts(module: Decoder) -> None:
    layer = module.layers[2].feed_forward
    layer.gate_up[[5, 6]] = layer.gate_up[[6, 5]]


def weaken_an_expert(module: Decoder) -> None:
    module.layers[3].feed_forward.down[9] *= 0.7


def turn_a_gate(module: Decoder) -> None:
    module.layers[1].feed_forward.router.weight[0, 4] *= -1


def forget_the_bias(module: Decoder) -> None:
    module.layers[2].feed_forward.router.bias.zero_()


def shake_the_router(module: Decoder) -> None:
    weight = module.layers[2].feed_forward.router.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    weight += (0.2 * noise * weight.float().std()).to(weight.dtype)


def lose_the_shared_expert(module: Decoder) -> None:
    module.layers[1].feed_forward.shared.down.zero_()


def turn_a_head(module: Decoder) -> None:
    qkv = module.layers[2].attention.qkv
    qkv[:128] = (-qkv[:128].float()).to(qkv.dtype)


@pytest.mark.parametrize(
    "spoil",
    [
        exchange_experts,
        weaken_an_expert,
        turn_a_gate,
        forget_the_bias,
        shake_the_router,
        lose_the_shared_expert,
        turn_a_head,
    ],
)
def test_a_fault_is_no_rounding(
    spoil: Callable[[Decoder], None], ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    (module,) = (copied(each) for each in ranks)
    spoil(module)
    found = follow(stages([module], config), config, beginning(golden, "text", 20), "text")
    assert {"layer_out"} <= {each.name.split()[1].split(".")[1] for each in found.failed}


def grow(value: Tensor) -> None:
    value.copy_(value.float() * 1.05)


def grow_the_last_experts(module: Decoder) -> None:
    grow(module.layers[3].feed_forward.down)


def grow_the_last_half(module: Decoder) -> None:
    experts = module.layers[3].feed_forward
    grow(experts.down_scale)
    grow(experts.shared.down_scale)


def grow_the_last_values(module: Decoder) -> None:
    grow(module.layers[3].attention.dense)


def grow_the_head(module: Decoder) -> None:
    grow(module.head.lm_head)


@pytest.mark.parametrize(
    "spoil, name",
    [
        (grow_the_last_experts, "scale of the feed_forward of layer 3"),
        (grow_the_last_values, "scale of the attention of layer 3"),
        (grow_the_head, "text.logits "),
    ],
)
def test_a_scale_that_is_a_twentieth_off_is_found(
    spoil: Callable[[Decoder], None],
    name: str,
    ranks: list[Decoder],
    config: ThinkerConfig,
    golden: dict[str, Tensor],
) -> None:
    (module,) = (copied(each) for each in ranks)
    spoil(module)
    found = follow(stages([module], config), config, beginning(golden, "text", 20), "text")
    assert found.failed and all(name in each.name for each in found.failed)


def copied(module: Decoder) -> Decoder:
    """The module with weights that may be written: those of a file are mapped."""
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(value.clone(), requires_grad=False)
    return module


def test_a_fault_of_decode_steps_alone_is_found(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    (stage,) = stages(ranks, config)
    name = stage["decode_experts"].spec.layer_instances[0]
    right = stage.engines["decode_experts", name]
    stage.engines["decode_experts", name] = EagerEngine(
        lambda residual, delta: [each.roll(1, -1) for each in right.run([residual, delta])]
    )
    found = follow([stage], config, beginning(golden, "text", 20), "text")
    assert found.failed and all("by decode steps" in each.name for each in found.failed)


def test_a_rank_with_anothers_experts_is_found(
    checkpoint: Checkpoint, config: ThinkerConfig, golden: dict[str, Tensor], tmp_path: Path
) -> None:
    shard = Shard(rank=0, world_size=2)
    write_weights(checkpoint, STAGE, config, shard, torch.bfloat16, tmp_path / "rank0")
    twice = [load_module(STAGE, config, shard, tmp_path / "rank0") for _ in range(2)]
    found = follow(stages(twice, config), config, beginning(golden, "text", 20), "text")
    assert found.failed


class EagerEngines(Engines):
    """An artifact of the thinker alone, whose engines are eager modules."""

    def __init__(
        self,
        stage: EagerStage,
        parameters: ThinkerParameters,
        quantization_error: QuantizationError | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        manifest = SimpleNamespace(
            parameters=ModelParameters(thinker=parameters),
            fingerprint=SimpleNamespace(world_size=1),
            stages={"thinker": SimpleNamespace(quantization_error=quantization_error)},
        )
        self.artifact = SimpleNamespace(manifest=manifest)
        self._stages = {"thinker": stage}


def replayed(
    stage: EagerStage,
    config: ThinkerConfig,
    golden: dict[str, Tensor],
    case: str,
    quantization_error: QuantizationError | None = None,
) -> ComparisonLog:
    """What `mingc verify --against` says of one case."""
    references = {name: value.numpy() for name, value in golden.items() if name.startswith(f"{case}.")}
    ledger = ComparisonLog("thinker.safetensors", references, tolerance=0.1, is_exact=False)
    with torch.inference_mode():
        replay(EagerEngines(stage, STAGE.parameters(config, OPTIONS), quantization_error), ledger)
    return ledger


def failed_names(ledger: ComparisonLog) -> list[str]:
    return [each.name for each in ledger.comparisons if each.outcome == "FAIL"]


def test_steps_of_several_requests_are_held_against_each_ones_own(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    stage = eager_stage(ranks[0], STAGE.graphs(config, Shard(), SEVERAL))
    ledger = replayed(stage, config, beginning(golden, "text", 20), "text")
    assert not failed_names(ledger)
    found = [each.name for each in ledger.comparisons if "each as it is alone" in each.name]
    assert [int(re.findall(r"\d+", name)[0]) for name in found] == [2, 2, 4, 3]


def mix_rows(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Experts whose rows are another request's where there are several."""
    return [each.roll(1, 0) for each in engine.run(tensors)]


def read_anothers_pages(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Attention whose last request of four reads the pages of the first."""
    residual, delta, cos, sin, page_table, *others = tensors
    if len(residual) == 4:
        page_table = torch.cat([page_table[:-1], page_table[:1]])
    return engine.run([residual, delta, cos, sin, page_table, *others])


def forget_rows(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Attention that loses what several requests write into the pages."""
    *inputs, k_pages, v_pages = tensors
    if len(inputs[0]) > 1:
        k_pages, v_pages = k_pages.clone(), v_pages.clone()
    return engine.run([*inputs, k_pages, v_pages])


@pytest.mark.parametrize(
    "graph, spoil",
    [
        ("decode_experts", mix_rows),
        ("decode_attention", read_anothers_pages),
        ("decode_attention", forget_rows),
    ],
)
def test_a_fault_of_steps_of_several_requests_alone_is_found(
    graph: str,
    spoil: Callable[..., Sequence[Tensor]],
    ranks: list[Decoder],
    config: ThinkerConfig,
    golden: dict[str, Tensor],
) -> None:
    stage = eager_stage(ranks[0], STAGE.graphs(config, Shard(), SEVERAL))
    for name in stage[graph].spec.layer_instances:
        right = stage.engines[graph, name]
        stage.engines[graph, name] = EagerEngine(partial(spoil, right))
    failed = failed_names(replayed(stage, config, beginning(golden, "text", 20), "text"))
    assert any("4 requests, each as it is alone" in each for each in failed)
    assert all("decode steps" in each for each in failed), "nothing else runs several requests"


@pytest.mark.parametrize(
    "spoil", [None, exchange_experts, lose_the_shared_expert, turn_a_head, grow_the_last_half]
)
def test_quantized_weights_are_held_to_what_the_manifest_says_they_lose(
    spoil: Callable[[Decoder], None] | None,
    checkpoint: Checkpoint,
    config: ThinkerConfig,
    golden: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    write_weights(checkpoint, STAGE, config, Shard(), torch.bfloat16, tmp_path / "rank0", "fp8")
    module = copied(load_module(STAGE, config, Shard(), tmp_path / "rank0", "fp8"))
    if spoil is not None:
        spoil(module)
    quantization_error = QuantizationError(
        tokens=64,
        layer_cosine=(0.998012, 0.995316, 0.998968, 0.996457),
        logit_kl=0.29,
        same_argmax=0.53,
        layer_scale=(0.999516, 0.996743, 0.996849, 1.000041),
    )
    options = replace(OPTIONS, batch_sizes=(1,))
    stage = eager_stage(module, STAGE.graphs(config, Shard(), options))
    ledger = replayed(stage, config, beginning(golden, "text", 20), "text", quantization_error)
    if spoil is None:
        assert not failed_names(ledger)
        assert any("own experts followed" in each.name for each in ledger.comparisons)
    else:
        what = "scale of layer 3" if spoil is grow_the_last_half else "tokens of layer"
        assert [name for name in failed_names(ledger) if f"after recorded layers: {what}" in name]


def test_a_replay_tells_whole_runs_that_leave_the_record_from_faults(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    (stage,) = stages(ranks, config)
    ledger = replayed(stage, config, golden, "image")
    outcomes = {each.name: each for each in ledger.comparisons}
    assert "FAIL" not in {each.outcome for each in ledger.comparisons}
    assert outcomes["thinker: image.logits_last (experts followed)"].outcome == "pass"
    assert outcomes["thinker: image.logits_last (graph by graph)"].outcome == "pass"
    whole = outcomes["thinker: image.logits_last"]
    assert whole.outcome == "expected difference"
    assert re.search(r"\d of 228 rows go to other experts by rounding", whole.note)
