"""Replay of a bfloat16 thinker with a float32 reference: rounding may reroute rows, a fault may not."""

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

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from conformance.thinker.prompt_replay import replay_prompts
from conformance.thinker.reference_routing import ReferenceRoutedThinker, RoutingResult
from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.parameters import ThinkerParameters
from mingc.artifacts.stage_graph import StageGraph
from mingc.export.checkpoint import Checkpoint
from mingc.export.layers.decoder import Decoder
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.weights.loading import load_module, write_weights
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.verify.comparison import Comparison

DATA = Path(__file__).parents[1] / "data"
OPTIONS = StageOptions(dtype=torch.bfloat16, max_model_len=128, prefill_chunk_size=64)
SEVERAL = replace(OPTIONS, batch_sizes=(1, 2, 4))
PROMPT_TOKENS, BATCH_TOKENS = 6, 20  # the first of a recorded prompt; batches of four need more


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


class CaseRun:
    """Result of the reference-routed runs of one case."""

    def __init__(self, log: ReferenceLog, case: RoutingResult) -> None:
        self.comparisons = log.comparisons
        self.case = case

    @property
    def failed(self) -> list[Comparison]:
        return [each for each in self.comparisons if each.outcome == "FAIL"]


def stages(ranks: Sequence[Decoder], config: ThinkerConfig) -> list[EagerStage]:
    shard = Shard(world_size=len(ranks))
    return [eager_stage(module, STAGE.graphs(config, shard, OPTIONS)) for module in ranks]


def beginning(golden: dict[str, Tensor], case: str, length: int) -> dict[str, Tensor]:
    """The first tokens of a text prompt; later tokens do not affect their references."""
    names = ("input_ids", "position_ids", "inputs_embeds", "layer_out", "logits")
    axes = {"layer_out": 2, "position_ids": 2}
    made = {f"{case}.{name}": golden[f"{case}.{name}"].narrow(axes.get(name, 1), 0, length) for name in names}
    made[f"{case}.rope_deltas"] = golden[f"{case}.rope_deltas"]
    return made


def run_case(
    parts: Sequence[EagerStage], config: ThinkerConfig, golden: dict[str, Tensor], case: str
) -> CaseRun:
    references = {name: value.numpy() for name, value in golden.items()}
    log = ReferenceLog("thinker.safetensors", references, tolerance=0.1, is_exact=False)
    thinker = ReferenceRoutedThinker(
        parts[0],
        [(part, torch.device("cpu")) for part in parts[1:]],
        STAGE.parameters(config, OPTIONS),
        quantization_error=None,
        longest=100,
        device=torch.device("cpu"),
    )
    given = golden_prompt(golden, case)
    prompt = ThinkerPrompt(
        input_ids=given.input_ids.numpy(),
        positions=given.positions.numpy(),
        rope_delta=given.delta,
        embed_kind=given.embed_kind.numpy(),
        media_embeds=given.embeds[given.embed_kind != 0].bfloat16() if given.embed_kind.any() else None,
    )
    with torch.inference_mode():
        return CaseRun(log, thinker.check(case, [prompt], log))


@pytest.mark.parametrize(("case", "ranks"), [("text", 1), ("image", 1), ("audio", 2)], indirect=["ranks"])
def test_rows_that_rounding_reroutes_resume_from_the_reference_and_are_counted(
    case: str, ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    found = run_case(stages(ranks, config), config, golden, case)
    assert not found.failed
    shares = [each for each in found.comparisons if each.kind == "share"]
    assert shares and all("rounding routed the others to other experts" in each.note for each in shares)
    assert any(each.error for each in shares), "no row was rerouted: the case tests nothing"
    assert found.case.waiver


def test_a_free_running_thinker_leaves_the_reference(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    """Without reference routing the same graphs give other logits: the reason for reference routing."""
    found = run_case(stages(ranks, config), config, golden, "image")
    (whole, *_) = found.case.free_running.values()
    recorded = golden["image.logits_last"][0].numpy()
    assert abs(whole - recorded).max() > 0.1 * abs(recorded).max()


def exchange_experts(module: Decoder) -> None:
    layer = module.layers[2].feed_forward
    layer.gate_up[[5, 6]] = layer.gate_up[[6, 5]]


def weaken_an_expert(module: Decoder) -> None:
    module.layers[3].feed_forward.down[9] *= 0.7


def negate_a_router_weight(module: Decoder) -> None:
    module.layers[1].feed_forward.router.weight[0, 4] *= -1


def zero_the_router_bias(module: Decoder) -> None:
    module.layers[2].feed_forward.router.bias.zero_()


def add_noise_to_the_router(module: Decoder) -> None:
    weight = module.layers[2].feed_forward.router.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    weight += (0.2 * noise * weight.float().std()).to(weight.dtype)


def zero_the_shared_expert(module: Decoder) -> None:
    module.layers[1].feed_forward.shared.down.zero_()


def negate_a_head(module: Decoder) -> None:
    qkv = module.layers[2].attention.qkv
    qkv[:128] = (-qkv[:128].float()).to(qkv.dtype)


@pytest.mark.parametrize(
    "spoil",
    [
        weaken_an_expert,
        zero_the_router_bias,
        add_noise_to_the_router,
        # Faults of the same parts; the test of quantized weights below has three of them.
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (exchange_experts, negate_a_router_weight, zero_the_shared_expert, negate_a_head)
        ),
    ],
)
def test_perturbation_does_not_hide_a_fault(
    spoil: Callable[[Decoder], None], ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    (module,) = (copied(each) for each in ranks)
    spoil(module)
    found = run_case(stages([module], config), config, beginning(golden, "text", PROMPT_TOKENS), "text")
    assert {"layer_out"} <= {each.name.split()[1].split(".")[1] for each in found.failed}


def scale_up(value: Tensor) -> None:
    value.copy_(value.float() * 1.05)


def scale_the_last_experts(module: Decoder) -> None:
    scale_up(module.layers[3].feed_forward.down)


def scale_the_last_feed_forward(module: Decoder) -> None:
    experts = module.layers[3].feed_forward
    scale_up(experts.down_scale)
    scale_up(experts.shared.down_scale)


def scale_the_last_attention(module: Decoder) -> None:
    scale_up(module.layers[3].attention.dense)


def scale_the_head(module: Decoder) -> None:
    scale_up(module.head.lm_head)


@pytest.mark.parametrize(
    "spoil, name",
    [
        (scale_the_last_experts, "scale of the feed_forward of layer 3"),
        (scale_the_last_attention, "scale of the attention of layer 3"),
        (scale_the_head, "text.logits "),
    ],
)
def test_a_scale_error_of_five_percent_is_found(
    spoil: Callable[[Decoder], None],
    name: str,
    ranks: list[Decoder],
    config: ThinkerConfig,
    golden: dict[str, Tensor],
) -> None:
    (module,) = (copied(each) for each in ranks)
    spoil(module)
    found = run_case(stages([module], config), config, beginning(golden, "text", PROMPT_TOKENS), "text")
    assert found.failed and all(name in each.name for each in found.failed)


def copied(module: Decoder) -> Decoder:
    """The module with writable copies of its weights, which are mapped from a file."""
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
    found = run_case([stage], config, beginning(golden, "text", PROMPT_TOKENS), "text")
    assert found.failed and all("by decode steps" in each.name for each in found.failed)


def test_a_rank_with_the_experts_of_another_is_found(
    checkpoint: Checkpoint, config: ThinkerConfig, golden: dict[str, Tensor], tmp_path: Path
) -> None:
    shard = Shard(rank=0, world_size=2)
    write_weights(checkpoint, STAGE, config, shard, torch.bfloat16, tmp_path / "rank0")
    twice = [load_module(STAGE, config, shard, tmp_path / "rank0") for _ in range(2)]
    found = run_case(stages(twice, config), config, beginning(golden, "text", PROMPT_TOKENS), "text")
    assert found.failed


class EagerEngines(Engines):
    """A thinker artifact whose engines are eager modules."""

    def __init__(
        self,
        stage: EagerStage,
        parameters: ThinkerParameters,
        quantization_error: QuantizationError | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        manifest = SimpleNamespace(
            parameters_of=lambda stage, kind: parameters,
            fingerprint=SimpleNamespace(world_size=1),
            graph=StageGraph(),
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
) -> ReferenceLog:
    """The comparisons of `python -m conformance` for one case."""
    references = {name: value.numpy() for name, value in golden.items() if name.startswith(f"{case}.")}
    log = ReferenceLog("thinker.safetensors", references, tolerance=0.1, is_exact=False)
    with torch.inference_mode():
        replay_prompts(EagerEngines(stage, STAGE.parameters(config, OPTIONS), quantization_error), log, {})
    return log


def failed_names(log: ReferenceLog) -> list[str]:
    return [each.name for each in log.comparisons if each.outcome == "FAIL"]


def test_batches_are_compared_with_batch_1_steps(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    stage = eager_stage(ranks[0], STAGE.graphs(config, Shard(), SEVERAL))
    log = replayed(stage, config, beginning(golden, "text", BATCH_TOKENS), "text")
    assert not failed_names(log)
    found = [each.name for each in log.comparisons if "vs batch 1" in each.name]
    assert [int(re.findall(r"\d+", name)[0]) for name in found] == [2, 2, 4, 3]


def mix_rows(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Experts that exchange the rows of a batch."""
    return [each.roll(1, 0) for each in engine.run(tensors)]


def read_pages_of_another_request(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Attention that reads the pages of the first request for the last one of a batch of four."""
    residual, delta, cos, sin, page_table, *others = tensors
    if len(residual) == 4:
        page_table = torch.cat([page_table[:-1], page_table[:1]])
    return engine.run([residual, delta, cos, sin, page_table, *others])


def drop_kv_writes(engine: EagerEngine, *tensors: Tensor) -> Sequence[Tensor]:
    """Attention that drops the KV writes of a batch."""
    *inputs, k_pages, v_pages = tensors
    if len(inputs[0]) > 1:
        k_pages, v_pages = k_pages.clone(), v_pages.clone()
    return engine.run([*inputs, k_pages, v_pages])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "graph, spoil",
    [
        ("decode_experts", mix_rows),
        ("decode_attention", read_pages_of_another_request),
        ("decode_attention", drop_kv_writes),
    ],
)
def test_a_fault_of_batches_alone_is_found(
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
    failed = failed_names(replayed(stage, config, beginning(golden, "text", BATCH_TOKENS), "text"))
    assert any("batch of 4 vs batch 1" in each for each in failed)
    assert all("decode steps" in each for each in failed), "nothing else runs a batch"


@pytest.mark.parametrize(
    "spoil", [None, exchange_experts, zero_the_shared_expert, negate_a_head, scale_the_last_feed_forward]
)
def test_quantized_weights_are_compared_with_the_error_in_the_manifest(
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
    log = replayed(stage, config, beginning(golden, "text", PROMPT_TOKENS), "text", quantization_error)
    if spoil is None:
        assert not failed_names(log)
        assert any("own routing" in each.name for each in log.comparisons)
    else:
        what = "scale of layer 3" if spoil is scale_the_last_feed_forward else "tokens of layer"
        assert [name for name in failed_names(log) if f"teacher-forced layers: {what}" in name]


def test_rounding_in_free_running_runs_is_no_fault(
    ranks: list[Decoder], config: ThinkerConfig, golden: dict[str, Tensor]
) -> None:
    (stage,) = stages(ranks, config)
    log = replayed(stage, config, golden, "image")
    outcomes = {each.name: each for each in log.comparisons}
    assert "FAIL" not in {each.outcome for each in log.comparisons}
    assert outcomes["thinker: image.logits_last (reference routing)"].outcome == "pass"
    assert outcomes["thinker: image.logits_last (sequential ranks)"].outcome == "pass"
    whole = outcomes["thinker: image.logits_last"]
    assert whole.outcome == "expected difference"
    assert re.search(r"rounding routes \d of 228 rows to other experts", whole.note)
