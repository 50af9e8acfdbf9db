"""Check of expert layers: at any batch size all experts are tested, and a fault of any of them is found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_checks import graph_of
from torch import Tensor

from mingc.artifacts.manifest import EngineRecord, Parity
from mingc.artifacts.spec import GraphSpec, Quantization
from mingc.errors import ParityError
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.checks.eager_reference import run_eager
from mingc.export.checks.experts import _cover, find_expert_tokens
from mingc.export.checks.routing import select_experts
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.stage import Shard
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.tasks.check_graph import check_graph
from mingc.export.tasks.graph_task import GraphTask
from mingc.export.weights.loading import float32_module, load_module, write_weights
from mingc.numerics.gather_shards import gather_shards

ALLOWED = 3e-2  # of a bfloat16 engine
EXPERTS = 16
# Changes the weights of a layer, by name; a fault of one expert changes the given expert.
Fault = Callable[[dict[str, Tensor], int], None]


def no_fault(weights: dict[str, Tensor], expert: int) -> None:
    """No fault."""


def weaken(weights: dict[str, Tensor], expert: int) -> None:
    """Scale the expert down by a twentieth, through its quantization scale if it has one."""
    weight = weights.get("down_scale", weights["down"])
    weight[expert] = (weight[expert].float() * 0.95).to(weight.dtype)


def swap(weights: dict[str, Tensor], expert: int) -> None:
    """Swap the expert with its neighbour."""
    for name in ("gate_up", "gate_up_scale"):
        if name in weights:
            bits = weights[name].view(torch.uint8)
            bits[[expert, expert ^ 1]] = bits[[expert ^ 1, expert]]


def rotate(weights: dict[str, Tensor], expert: int) -> None:
    """Rotate the rows of the expert's down projection."""
    bits = weights["down"].view(torch.uint8)
    bits[expert] = bits[expert].roll(1, 0)


def scale_router(weights: dict[str, Tensor], expert: int) -> None:
    weights["router.weight"] *= 0.8


def drop_shared(weights: dict[str, Tensor], expert: int) -> None:
    weights["shared.down"].zero_()


@cache
def _weights_of_rank(
    checkpoint: Path, dtype: str, quantization: Quantization | None, rank: int, world_size: int
) -> bytes:
    """The file of one rank."""
    opened, shard = open_checkpoint(checkpoint), Shard(rank=rank, world_size=world_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_weights(opened, STAGE, STAGE.config(opened), shard, getattr(torch, dtype), path, quantization)
        return (path / "000.safetensors").read_bytes()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An expert layer of the tiny thinker as it is exported into `folder`."""

    checkpoint: Checkpoint
    config: ThinkerConfig
    folder: Path
    graph: str
    dtype: str = "bfloat16"
    quantization: Quantization | None = None
    num_ranks: int = 1
    batch: int | None = None

    def write_weights(self) -> tuple[str, ...]:
        """Write the weights of each rank and return their folders. Files of equal content are computed once."""
        files = []
        for rank in range(self.num_ranks):
            made = _weights_of_rank(self.checkpoint.root, self.dtype, self.quantization, rank, self.num_ranks)
            files.append(f"rank{rank}")
            (self.folder / files[-1]).mkdir()
            (self.folder / files[-1] / "000.safetensors").write_bytes(made)
        return tuple(files)

    def check(self, fault: Fault, *, is_stored: bool = False) -> Parity:
        """Run the export's check with eager modules as the engine, the last rank's changed by `fault`.

        With `is_stored` the fault is in the weights file, so that the check's own eager modules have it too.
        """
        recipe = ExportRecipe(
            checkpoint=self.checkpoint.root,
            output=self.folder,
            stages=("thinker",),
            dtype=self.dtype,
            max_model_len=256,
            world_size=self.num_ranks,
            quantize=(f"thinker={self.quantization}",) if self.quantization is not None else (),
        )
        (self.folder / "goldens").mkdir()
        shard = Shard(rank=0, world_size=self.num_ranks)
        files = self.write_weights()
        plan = graph_of(STAGE, self.config, self.graph, stage_options(recipe), shard)
        submodule = plan.spec.layer_instances[0]

        def load(path: Path) -> Any:
            module = load_module(STAGE, self.config, shard, path, self.quantization, submodule=submodule)
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()  # loaded parameters are read-only views of the file
            return module

        # The expert with the fewest tokens of the example.
        sizes = {**plan.check_dims, **({"B": self.batch} if self.batch is not None else {})}
        example = plan.example(sizes, torch.Generator().manual_seed(1))
        ids, _ = select_experts(plan, load(self.folder / files[0]), example)
        expert = int(torch.bincount(ids.flatten(), minlength=EXPERTS).argmin())

        def replay(
            engine: Path,
            backend: str,
            spec: GraphSpec,
            weights: Sequence[Sequence[Path]],
            calls: Sequence[Mapping[str, Tensor]],
            device: str,
        ) -> list[dict[str, Tensor]]:
            modules = [load(files[0].parent) for files in weights]
            if not is_stored:
                fault(dict(modules[-1].named_parameters()), expert)
            made = []
            for tensors in calls:
                assert {len(value) for value in tensors.values()} == {*sizes.values()}
                parts = [run_eager(plan, module, tensors) for module in modules]
                names = {each.name: each for each in spec.outputs}
                made.append(
                    {name: gather_shards(names[name], [part[name] for part in parts]) for name in names}
                )
            return made

        if is_stored:
            file = self.folder / files[-1] / "000.safetensors"
            tensors = load_file(file)
            fault({name.removeprefix(f"{submodule}."): value for name, value in tensors.items()}, expert)
            save_file(tensors, file)
        task = GraphTask(recipe=recipe, stage="thinker", graph=self.graph, folder=self.folder, weights=files)
        dims = None if self.batch is None else {"B": self.batch}
        engine = EngineRecord(backend="none", file="none", dims=dims, compile_seconds=0.0)
        return check_graph(task, (engine,), replay).record.parity


@pytest.fixture
def layer(checkpoint: Checkpoint, config: ThinkerConfig, tmp_path: Path) -> Callable[..., Layer]:
    return lambda **choices: Layer(checkpoint=checkpoint, config=config, folder=tmp_path, **choices)


KINDS = [
    {"graph": "prefill_experts"},
    {"graph": "decode_experts"},
    {"graph": "decode_experts", "batch": 1},
    {"graph": "prefill_experts", "dtype": "float32"},
    {"graph": "decode_experts", "dtype": "float32"},
    {"graph": "decode_experts", "dtype": "float32", "batch": 1},
    {"graph": "prefill_experts", "quantization": "fp8"},
    {"graph": "decode_experts", "quantization": "fp8", "batch": 1},
    {"graph": "prefill_experts", "quantization": "int4"},
    {"graph": "decode_experts", "quantization": "int4", "batch": 1},
    {"graph": "decode_experts", "num_ranks": 2},
    {"graph": "decode_experts", "num_ranks": 4},
]


def name_kind(kind: dict[str, Any]) -> str:
    return "-".join(map(str, kind.values()))


@pytest.mark.parametrize("kind", KINDS, ids=name_kind)
def test_a_correct_engine_passes_with_every_expert_tested(
    kind: dict[str, Any], layer: Callable[..., Layer]
) -> None:
    parity = layer(**kind).check(no_fault)
    assert parity.untested_experts == 0
    assert parity.compiled < ALLOWED
    assert (parity.rerouted is None) == (kind.get("dtype") == "float32")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, (weaken, swap, rotate)[place % 3]) for place, kind in enumerate(KINDS)],
    ids=[name_kind(kind) for kind in KINDS],
)
def test_a_fault_of_one_expert_is_reported(
    kind: dict[str, Any], fault: Fault, layer: Callable[..., Layer]
) -> None:
    with pytest.raises(ParityError, match="float32 reference"):
        layer(**kind).check(fault)


@pytest.mark.parametrize(
    ("quantization", "fault"),
    [(None, weaken), (None, swap), ("fp8", weaken), ("fp8", rotate), ("int4", swap), ("int4", rotate)],
)
def test_a_fault_in_the_weights_file_is_reported(
    quantization: Quantization | None, fault: Fault, layer: Callable[..., Layer]
) -> None:
    with pytest.raises(ParityError, match="float32 reference"):
        layer(graph="decode_experts", quantization=quantization).check(fault, is_stored=True)


@pytest.mark.parametrize("fault", [scale_router, drop_shared])
def test_a_fault_that_affects_all_tokens_is_reported(fault: Fault, layer: Callable[..., Layer]) -> None:
    with pytest.raises(ParityError, match="differ from the float32 reference"):
        layer(graph="prefill_experts").check(fault)


def test_untested_experts_are_counted(checkpoint: Checkpoint, config: ThinkerConfig, tmp_path: Path) -> None:
    write_weights(checkpoint, STAGE, config, Shard(), torch.bfloat16, tmp_path / "weights")
    recipe = ExportRecipe(checkpoint=checkpoint.root, output=tmp_path, stages=("thinker",), dtype="bfloat16")
    plan = graph_of(STAGE, config, "decode_experts", stage_options(recipe))
    module = load_module(STAGE, config, Shard(), tmp_path / "weights", submodule=plan.spec.layer_instances[0])
    router = module.get_submodule("router")
    bias = router.get_parameter("bias").clone()
    bias[:, [2, 7]] = -100.0
    router.register_parameter("bias", torch.nn.Parameter(bias, requires_grad=False))
    tokens = find_expert_tokens(plan, module).with_tokens_per_call(3)
    assert tokens.num_untested == 2
    assert not {2, 7} & {*tokens.ids.flatten().tolist()}
    assert len(tokens.ids) % 3 == 0 and len(tokens.calls()) == len(tokens.ids) // 3
    assert torch.cat([each["delta"] for each in tokens.calls()]).equal(tokens.inputs["delta"])


@pytest.mark.parametrize(
    ("count", "num_experts", "top_k"), [(96, 16, 4), (400, 16, 2), (20, 8, 8), (3, 16, 2)]
)
def test_each_token_of_a_cover_reaches_most_experts_that_lack_tokens(
    count: int, num_experts: int, top_k: int
) -> None:
    ids = torch.rand(count, num_experts, generator=torch.Generator().manual_seed(count)).topk(top_k).indices
    experts = [{*row} for row in ids.tolist()]
    experts[1] = set()  # a token that rounding reroutes
    is_routed = torch.tensor([[each in row for each in range(num_experts)] for row in experts])
    lacking = {each: min(16, sum(each in row for row in experts)) for each in range(num_experts)}
    left = dict(enumerate(experts))
    for token in _cover(is_routed):
        useful = {number: sum(lacking[each] > 0 for each in row) for number, row in left.items()}
        assert useful[token] == max(useful.values()) > 0
        for each in left.pop(token):
            lacking[each] = max(0, lacking[each] - 1)
    assert not any(lacking.values())


def test_the_reference_is_built_on_its_device(checkpoint: Checkpoint, config: ThinkerConfig) -> None:
    """On the device "meta" no operation can read values, or mix them with those of the CPU."""
    submodule = f"layers.{config.decoder.num_dense_layers}.feed_forward"
    on_cpu, on_meta = (
        float32_module(STAGE, config, checkpoint, submodule=submodule, device=device).state_dict()
        for device in ("cpu", "meta")
    )
    assert {value.device.type for value in on_meta.values()} == {"meta"}
    assert {name: (value.shape, value.dtype) for name, value in on_meta.items()} == {
        name: (value.shape, value.dtype) for name, value in on_cpu.items()
    }
