"""Planned memory of an export's tasks, compared with what the same code allocates."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mingc.export.checks import experts
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import Shard
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.tasks import memory_needs

_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_RELEASED = Path(__file__).parents[2] / "benchmarks" / "released"


class _CountedBytes(TorchDispatchMode):
    """Counts the storages that operations make, until each is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._held += storage.nbytes()
                    self.peak = max(self.peak, self._held)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._held -= size


def test_the_search_for_tokens_of_every_expert_takes_no_more_than_planned() -> None:
    recipe = ExportRecipe(
        checkpoint=_RELEASED, output=Path("unused"), dtype="bfloat16", stages=("thinker",), synthetic=True
    )
    stage = find("thinker")
    released = stage.config(open_source(recipe))
    decoder = replace(
        released.decoder,
        hidden_size=256,
        num_layers=2,
        num_experts=64,
        expert_intermediate_size=8,
        shared_intermediate_size=8,
        dense_intermediate_size=8,
        vocab_size=64,
        num_heads=2,
        num_kv_heads=1,
    )
    config = replace(released, decoder=decoder)
    graphs = stage.graphs(config, Shard(), stage_options(recipe))
    plan = next(each for each in graphs if each.spec.name == "prefill_experts")
    module = stage.build(config, Shard()).get_submodule(plan.spec.layer_instances[0])
    module = module.to(torch.bfloat16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.normal_(0, 0.05, generator=generator)
    module.get_submodule("router").get_parameter("bias").zero_()
    counted = _CountedBytes()
    with counted:
        tokens = experts.find_expert_tokens(plan, module)
    assert tokens.num_untested == 0
    planned = memory_needs._routing_bytes(stage, config, Shard())
    assert counted.peak <= planned < 4 * counted.peak


def test_experts_of_the_release_have_processes_of_their_own_on_a_gpu() -> None:
    recipe = ExportRecipe(
        checkpoint=_RELEASED,
        output=Path("unused"),
        target="cuda",
        dtype="bfloat16",
        synthetic=True,
        prefill_chunk_size=4096,
        quantize=("thinker=fp8",),
    )
    source, stage = open_source(recipe), find("thinker")
    config = stage.config(source)
    graphs = stage.graphs(config, first_shard(stage, recipe), stage_options(recipe))
    needs = memory_needs.stage_needs(recipe, source, stage, config, graphs)
    alone = {(kind, name) for (kind, name), need in needs.items() if need.has_process}
    assert alone == {
        (kind, f"thinker.{name}")
        for kind in ("engine", "check")
        for name in ("prefill_experts", "decode_experts")
    }
    # The FP8 module and the engine's copy, and the float32 module's experts in bfloat16.
    layer = 3 * 257 * 1024 * 4096
    assert needs["check", "thinker.decode_experts"].device > 2 * layer + 2 * layer
    assert needs["engine", "thinker.prefill_experts"].device < 16 << 30


def test_random_weights_take_no_more_of_a_gpu_than_planned() -> None:
    recipe = ExportRecipe(
        checkpoint=_TINY, output=Path("unused"), target="cuda", dtype="bfloat16", synthetic=True
    )
    source, stage = open_synthetic(_TINY), find("thinker")  # a CPU's values take as much as a GPU's
    config = stage.config(source)
    counted = _CountedBytes()
    with counted:
        for each in stage.weights(config, Shard()):
            for name in each.tensors:
                source.part(each.part).read(name)
    needs = memory_needs.stage_needs(recipe, source, stage, config, ())
    assert counted.peak <= needs["weights", "thinker"].device < 2 * counted.peak
