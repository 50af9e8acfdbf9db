"""Task of a worker process: compare the engines of a graph with its float32 reference, and write the golden file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from mingc.artifacts.artifact import writing
from mingc.artifacts.manifest import EngineRecord, GraphRecord, Parity
from mingc.artifacts.spec import GraphSpec
from mingc.export.checks import experts, routing
from mingc.export.checks import parity as parity_rule
from mingc.export.checks.eager_reference import EagerRanks, float32_inputs, pad_like
from mingc.export.process_pool import gives_memory_back, peak_rss_bytes
from mingc.export.source import open_source
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.tasks.graph_task import (
    GraphTask,
    OpenGraph,
    library_errors,
    load_shard,
    open_graph,
    shards_of,
)
from mingc.export.weights.loading import float32_module, weights_files
from mingc.export.weights.quantization import in_float32

_Tensors = Mapping[str, torch.Tensor]


class Replay(Protocol):
    """Runs a compiled engine with each rank's weights of its first layer instance; the command line passes it.

    Returns for each call the outputs by name, combined over ranks, and rank 0's state afterwards as `state.<name>`.
    """

    def __call__(
        self,
        engine: Path,
        backend: str,
        spec: GraphSpec,
        weights: Sequence[Sequence[Path]],
        calls: Sequence[Mapping[str, torch.Tensor]],
        device: str,
    ) -> list[dict[str, torch.Tensor]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphResult:
    """A built and checked graph, and the peak memory of the process that checked it."""

    stage: str
    record: GraphRecord
    peak_rss_bytes: int


@gives_memory_back()
def check_graph(
    task: GraphTask, engines: tuple[EngineRecord, ...], replay: Replay, writes_golden: bool = True
) -> GraphResult:
    """Measure the parity of `engines`, which `task.backend` compiled, and write the golden file of the graph.

    The engine of the golden's sizes and the one for a single request are run.

    Raises: ParityError, CompileError, ArtifactError.
    """
    opened = open_graph(task)
    check = _GraphCheck(task, opened, replay)
    engine, sizes = _check_engine(opened.plan, engines)
    parity, tensors, expected = check.compare(engine, sizes, task.name)
    single = _single_engine(engines)
    if single is not None and single is not engine:
        of_one, *_ = check.compare(single, {**sizes, **(single.dims or {})}, Path(single.file).stem)
        parity = parity_rule.worst_parity(parity, of_one)
    golden = f"goldens/{task.name}.safetensors"
    if writes_golden:
        kept = _golden_tensors(opened.plan.spec, tensors, expected)
        with writing(task.folder / golden, sum(each.nbytes for each in kept.values())):
            save_file(kept, task.folder / golden)
    record = GraphRecord(spec=opened.plan.spec, engines=engines, golden=golden, parity=parity)
    return GraphResult(stage=task.stage, record=record, peak_rss_bytes=peak_rss_bytes())


class _GraphCheck:
    """A graph with its float32 references and, in low precision, its eager modules.

    An engine is compared with its stored weights in float32; the error of storing them is a separate figure.
    """

    def __init__(self, task: GraphTask, opened: OpenGraph, replay: Replay) -> None:
        stage, config, options, plan = opened.stage, opened.config, opened.options, opened.plan
        self._task, self._plan, self._module, self._options = task, plan, opened.module, options
        self._replay = replay
        self._quantization = task.recipe.quantization(task.stage)
        self._is_sharded, self._is_float32 = len(task.weights) > 1, options.dtype == torch.float32
        shards = shards_of(task.weights)
        self._exact_plan = _float32_plan(stage, config, Shard(), options, plan)
        submodule = plan.spec.layer_instances[0]
        # The float32 references of other graphs stay on the CPU; it would take minutes for 256 experts.
        place = "cpu" if plan.routing is None else options.device
        whole = float32_module(stage, config, open_source(task.recipe), submodule=submodule, device=place)
        torch.cuda.empty_cache()  # the experts one by one, before they were stacked
        self._stored_plan, stored = self._exact_plan, [whole]
        if self._quantization is not None:
            stored = [in_float32(load_shard(task, stage, config, shard, plan).to(place)) for shard in shards]
            self._stored_plan = _float32_plan(stage, config, shards[0], options, plan)
        self._whole, self._stored = whole, stored
        # Only low-precision engines are compared with the eager module's error.
        others = [] if self._is_float32 else shards[1:]
        self._others = [load_shard(task, stage, config, shard, plan) for shard in others]
        # The reference may return more than the graph (router choices); the state of a shard has no reference.
        self._compared = [each.name for each in plan.spec.outputs]
        if not self._is_sharded:
            self._compared.extend(f"state.{each.name}" for each in plan.spec.state)
        self._of_every_expert = (
            experts.find_expert_tokens(plan, opened.module) if plan.routing is not None else None
        )

    def compare(
        self, engine: EngineRecord, sizes: dict[str, int], where: str
    ) -> tuple[Parity, _Tensors, _Tensors]:
        """Parity of `engine` at these sizes, and the inputs and expected outputs. Raises: ParityError, CompileError."""
        plan, module, options = self._plan, self._module, self._options
        tensors = plan.example(sizes, torch.Generator().manual_seed(1))
        if self._is_sharded:
            # A rank's state is a share of the whole state; zeros are the same in every layout.
            states = {each.name for each in plan.spec.state}
            tensors = {name: torch.zeros_like(t) if name in states else t for name, t in tensors.items()}
        stored_inputs = float32_inputs(self._stored_plan, tensors, sizes)
        reference = EagerRanks(self._stored_plan, self._stored, stored_inputs).on_device()
        references = reference.run()
        tokens = None
        if self._of_every_expert is not None:
            tokens = self._of_every_expert.with_tokens_per_call(len(next(iter(tensors.values()))))
        compiled, *reached = self._run(engine, [tensors, *(tokens.calls() if tokens is not None else ())])
        expected = self._padded(references, compiled)
        moved = {name: value.to(options.device) for name, value in tensors.items()}
        eager_expected, rerouted = expected, None
        if not self._is_float32 and plan.routing is not None:
            chosen = routing.select_experts(plan, module, moved)
            reference_ids, _ = routing.select_experts(plan, reference.modules[0], reference.inputs)
            rerouted = routing.rerouted_share(chosen[0], reference_ids, where)
            with routing.fixed_routing(reference.modules, chosen):
                followed = reference.run()
            eager_expected = self._padded(followed, compiled)
            expected = routing.nearest_rows(compiled, (expected, eager_expected))
        eager, lost, narrow = 0.0, None, None
        if not self._is_float32:
            narrow = EagerRanks(plan, [module, *(each.to(options.device) for each in self._others)], moved)
            eager = parity_rule.worst_error(narrow.run(), eager_expected)
        if rerouted is not None:
            limit = parity_rule.max_error(eager, options.dtype)
            expected, others_rerouted = routing.match_perturbed_routing(
                compiled, expected, limit, plan, (module, moved), reference
            )
            rerouted += others_rerouted / len(chosen[0])
        quantized = None
        if self._quantization is not None:
            exact_inputs = float32_inputs(self._exact_plan, tensors, sizes)
            exact = EagerRanks(self._exact_plan, [self._whole], exact_inputs).on_device()
            quantized = experts.Unquantized(format=self._quantization, reference=exact)
            lost = parity_rule.worst_error(references, self._padded(exact.run(), references))
        error = parity_rule.worst_error(compiled, expected)
        parity = Parity(compiled=error, eager=eager, quantization=lost, rerouted=rerouted)
        parity_rule.check_parity(parity, options.dtype, where)
        if tokens is not None:
            of_all = experts.check_experts(
                tokens, reached, reference, narrow, quantized, options.dtype, where
            )
            parity = parity_rule.worst_parity(parity, of_all)
        return parity, tensors, expected

    def _run(self, engine: EngineRecord, calls: Sequence[_Tensors]) -> list[dict[str, torch.Tensor]]:
        """Outputs and state of `engine` after each of `calls`."""
        task = self._task
        if task.recipe.device != task.recipe.target:
            # The cards are not here: the manifest notes that their engines did not run.
            return [EagerRanks(self._plan, [self._module], call).run() for call in calls]
        with library_errors(f"the engine of {engine.backend} does not run", task.name):
            return self._replay(
                task.folder / engine.file,
                engine.backend,
                self._plan.spec,
                [weights_files(task.folder / path) for path in task.weights],
                calls,
                self._options.device,
            )

    def _padded(self, reference: _Tensors, like: _Tensors) -> dict[str, torch.Tensor]:
        """The compared tensors of `reference`, zero-padded to the shapes of `like`."""
        return {name: pad_like(reference[name], like[name]) for name in self._compared}


def _check_engine(plan: GraphDef, engines: Sequence[EngineRecord]) -> tuple[EngineRecord, dict[str, int]]:
    """The engine to check and the sizes to check it at."""
    if engines[0].dims is None:
        return engines[0], plan.check_dims
    wanted = {dim.name: plan.check_dims[dim.name] for dim in plan.spec.dims if dim.buckets}
    engine = next((each for each in engines if each.dims == wanted), engines[0])
    return engine, {**plan.check_dims, **(engine.dims or {})}


def _single_engine(engines: Sequence[EngineRecord]) -> EngineRecord | None:
    """The engine for a single request, if there is one: on CUDA it uses other kernels than larger batches."""
    return next((each for each in engines if 1 in (each.dims or {}).values()), None)


def _float32_plan(stage: Stage, config: Any, shard: Shard, options: StageOptions, plan: GraphDef) -> GraphDef:
    """`plan` in float32 on the CPU.

    `plan` itself if only CUDA exports have this graph, which computes in float32 there too.
    """
    float32 = replace(options, dtype=torch.float32, device="cpu", static_buckets=False)
    for each in stage.graphs(config, shard, float32):
        if each.spec.name == plan.spec.name:
            return each
    return plan


def _golden_tensors(
    spec: GraphSpec, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    result = {f"in.{each.name}": tensors[each.name].contiguous() for each in spec.inputs}
    result.update({f"state.{each.name}": tensors[each.name].contiguous() for each in spec.state})
    for name, value in expected.items():
        key = f"state_after.{name.removeprefix('state.')}" if name.startswith("state.") else f"out.{name}"
        result[key] = value.cpu().contiguous()
    return result
