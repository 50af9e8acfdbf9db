"""Build one graph of one stage in a worker process: trace, compile, write the golden file, check parity."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from mingc.artifacts.manifest import (
    EngineRecord,
    EngineTiming,
    GraphRecord,
    Parity,
    QuantizationError,
    TunedKernel,
)
from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import CompileError, ExportError, MingcError, WorkerError
from mingc.export.autotune.tuning import tuned_table
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks import experts, routing
from mingc.export.checks import parity as parity_rule
from mingc.export.checks.eager_reference import EagerRanks, float32_inputs, pad_like
from mingc.export.compile.backend import Backend
from mingc.export.compile.backends import find_backend
from mingc.export.compile.capture import capture, share_weights
from mingc.export.compile.engine_cache import trim
from mingc.export.compile.fastest import distinct_sizes
from mingc.export.cost.graph_cost import count_cost
from mingc.export.process_pool import gives_memory_back, peak_rss_bytes
from mingc.export.recipe import BACKEND, ExportRecipe
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.stages import find
from mingc.export.weights.loading import float32_module, load_module, stored_meta_module
from mingc.export.weights.quantization import in_float32
from mingc.export.weights.source import open_source
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.triton.moe_config import use_tuned_configs

_Tensors = Mapping[str, torch.Tensor]
_OTHER_BACKEND = "compile this stage with another backend: --backend NAME:STAGE"


class Replay(Protocol):
    """Runs a compiled engine with each rank's weights file, those of its first instance; given by the CLI.

    Returns for each call the outputs by name, combined over ranks, and rank 0's state afterwards as `state.<name>`.
    """

    def __call__(
        self,
        engine: Path,
        backend: str,
        spec: GraphSpec,
        weights: Sequence[Path],
        calls: Sequence[Mapping[str, torch.Tensor]],
        device: str,
    ) -> list[dict[str, torch.Tensor]]: ...


class Timer(Protocol):
    """Times engines of several backends alternately; given by the CLI.

    Returns the name of the device, and the seconds of every run for each call and engine.
    """

    def __call__(
        self,
        engines: Sequence[tuple[str, Path]],
        spec: GraphSpec,
        weights: Path,
        calls: Sequence[Mapping[str, torch.Tensor]],
        device: str,
    ) -> tuple[str, list[list[list[float]]]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTask:
    """One graph to compile with `backend` and to check.

    `folder` is the artifact under construction; `weights` one file per rank, relative to it; `kernel_configs` are the
    timed configurations of the stage's kernels.
    """

    recipe: ExportRecipe
    stage: str
    graph: str
    folder: Path
    weights: tuple[str, ...]
    kernel_configs: tuple[TunedKernel, ...] = ()
    backend: str = BACKEND

    @property
    def name(self) -> str:
        """The graph's name among those of all stages: `cfm.sample`."""
        return f"{self.stage}.{self.graph}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """A compiled engine and the most memory its process held."""

    record: EngineRecord
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphResult:
    """A built and checked graph and the most memory the process that checked it held."""

    stage: str
    record: GraphRecord
    peak_rss_bytes: int


def stage_options(recipe: ExportRecipe) -> StageOptions:
    """The recipe as stages see it."""
    return StageOptions(
        dtype=torch_dtype(recipe.dtype),
        device=recipe.device,
        static_buckets=recipe.target == "cuda",
        batch_sizes=recipe.batch_sizes,
        max_model_len=recipe.max_model_len,
        prefill_chunk_size=recipe.prefill_chunk_size,
    )


def engine_sizes(plan: GraphDef, options: StageOptions) -> list[dict[str, int] | None]:
    """The sizes that engines of a graph are compiled for; None is one engine for every size."""
    return [*(plan.sizes or plan.spec.bucket_sizes())] if options.static_buckets else [None]


def engine_label(graph: str, static_shapes: dict[str, int] | None) -> str:
    """Name of an engine of the graph `STAGE.GRAPH`, and of its file without a suffix."""
    return graph + "".join(f"-{name}{size}" for name, size in (static_shapes or {}).items())


@gives_memory_back()
def build_engine(task: GraphTask, static_shapes: dict[str, int] | None) -> BuiltEngine:
    """Trace and compile `task.graph` for the sizes `static_shapes`.

    Raises: CaptureError, CompileError.
    """
    stage = find(task.stage)
    config = stage.config(open_source(task.recipe))
    options, shard = stage_options(task.recipe), first_shard(stage, task.recipe)
    plan = _find_plan(stage, config, shard, options, task.graph)
    module = _load(task, stage, config, shard, plan).to(options.device)
    plan = share_weights(plan, module)
    table = {}
    if plan.routing is not None and static_shapes is not None:
        (tokens,) = static_shapes.values()
        table = tuned_table(task.kernel_configs, tokens)
    with use_tuned_configs(table):
        record = _compile(task, plan, module, static_shapes, options)
    return BuiltEngine(record=record, peak_rss_bytes=peak_rss_bytes())


@gives_memory_back()
def check_graph(
    task: GraphTask, engines: tuple[EngineRecord, ...], replay: Replay, writes_golden: bool = True
) -> GraphResult:
    """Measure the parity of `engines`, those of `task.backend`, and write the golden file of the graph.

    The engine of the golden's sizes and the one for a single request are run.

    Raises: ParityError, CompileError, ArtifactError.
    """
    stage = find(task.stage)
    checkpoint = open_source(task.recipe)
    config = stage.config(checkpoint)
    options, shard = stage_options(task.recipe), first_shard(stage, task.recipe)
    plan = _find_plan(stage, config, shard, options, task.graph)
    module = _load(task, stage, config, shard, plan).to(options.device)
    plan = share_weights(plan, module)
    golden = f"goldens/{task.name}.safetensors"
    recorded, parity = _check(task, plan, stage, config, checkpoint, module, engines, options, replay)
    if writes_golden:
        save_file(recorded, task.folder / golden)
    record = GraphRecord(spec=plan.spec, engines=engines, golden=golden, parity=parity)
    return GraphResult(stage=task.stage, record=record, peak_rss_bytes=peak_rss_bytes())


@contextmanager
def _library_errors(problem: str, where: str) -> Iterator[None]:
    """Convert any error of a library that compiles or runs engines into an error of the export.

    `problem` begins its message. Engines report that their library failed by a WorkerError, as a server expects.
    """
    try:
        yield
    except WorkerError as error:
        raise CompileError(f"{problem}: {error.message}", where=where, fix=_OTHER_BACKEND) from error
    except (MingcError, OSError, torch.OutOfMemoryError, AssertionError):
        raise
    except Exception as error:  # libraries have no common base class
        reason = f"{type(error).__name__}: {error}"
        raise CompileError(f"{problem}: {reason}", where=where, fix=_OTHER_BACKEND) from error


@gives_memory_back()
def time_graph(
    task: GraphTask, records: Sequence[GraphRecord], timer: Timer
) -> tuple[str, tuple[EngineTiming, ...]]:
    """Time the engines of a graph, one record per backend, alternately at each size. Nothing else may run.

    Returns the name of the device and the timings.

    Raises: CompileError, ArtifactError.
    """
    stage = find(task.stage)
    shard, options = first_shard(stage, task.recipe), stage_options(task.recipe)
    plan = _find_plan(stage, stage.config(open_source(task.recipe)), shard, options, task.graph)
    spec, built = records[0].spec, [engine for record in records for engine in record.engines]
    device, timings = "", []
    for dims in distinct_sizes(built):
        engines = [each for each in built if each.dims == dims]
        # Dims without buckets have the sizes at which the golden is taken.
        sizes = [{**plan.check_dims, **each} for each in (spec.bucket_sizes() if dims is None else [dims])]
        backends = " or ".join(dict.fromkeys(each.backend for each in engines))
        with _library_errors(f"the engine of {backends} does not run", task.name):
            device, samples = timer(
                [(each.backend, task.folder / each.file) for each in engines],
                spec,
                task.folder / task.weights[0],
                [plan.example(each, torch.Generator().manual_seed(1)) for each in sizes],
                options.device,
            )
        timings += [
            EngineTiming(
                backend=engine.backend,
                dims=size,
                median_us=round(1e6 * statistics.median(seconds), 1),
                calls=len(seconds),
            )
            for size, of_size in zip(sizes, samples, strict=True)
            for engine, seconds in zip(engines, of_size, strict=True)
        ]
    return device, tuple(timings)


def early_refusals(
    recipe: ExportRecipe, stage: Stage, config: Any, plans: Sequence[GraphDef]
) -> dict[str, dict[str, str]]:
    """Reasons of backends that cannot build a graph of `stage`, by graph (`STAGE.GRAPH`) and backend. Builds nothing.

    Raises: CompileError when such a backend was requested by name, or none remains.
    """
    refused: dict[str, dict[str, str]] = {}
    options, shard = stage_options(recipe), first_shard(stage, recipe)
    whole = functools.cache(
        lambda: stored_meta_module(
            stage, config, shard, recipe.quantization(stage.name), torch_dtype(recipe.dtype)
        )
    )
    for plan in plans:
        name = f"{stage.name}.{plan.spec.name}"
        found = refused.setdefault(name, dict(recipe.unsupported()) if recipe.is_measured(stage.name) else {})
        backends = recipe.backends_of(stage.name)
        for named in map(find_backend, backends):
            backend = named.for_graph(plan, engine_sizes(plan, options)[-1], recipe.target)
            if type(backend).check_graph is Backend.check_graph:
                continue
            module = whole().get_submodule(plan.spec.layer_instances[0])

            def trace(
                plan: GraphDef = plan, module: nn.Module = module, backend: Backend = backend
            ) -> torch.export.ExportedProgram:
                return trace_graph(
                    backend,
                    share_weights(plan, module),
                    module,
                    stage=stage.name,
                    sizes=engine_sizes(plan, options)[-1],
                    device="meta",
                )

            try:
                backend.check_graph(plan, module, trace, where=name)
            except CompileError as error:
                found[backend.name] = error.message
                if not recipe.is_measured(stage.name) or not {*backends} - {*found}:
                    raise
    return refused


@gives_memory_back()
def measure_quantization_error(
    recipe: ExportRecipe, stage_name: str, folder: Path, weights: tuple[str, ...]
) -> QuantizationError | None:
    """End-to-end error of the quantized weights of a stage; None when the stage does not measure it."""
    stage = find(stage_name)
    checkpoint = open_source(recipe)
    config = stage.config(checkpoint)

    def exact(submodule: str) -> nn.Module:
        return float32_module(stage, config, checkpoint, submodule=submodule)

    def stored(submodule: str) -> list[nn.Module]:
        return stored_modules(recipe, stage, config, folder, weights, submodule)

    return stage.quantization_error(config, exact, stored)


def stored_modules(
    recipe: ExportRecipe, stage: Stage, config: Any, folder: Path, weights: Sequence[str], submodule: str
) -> list[nn.Module]:
    """The module of every rank, or its part `submodule`, computing in float32 over its weights file in `folder`."""
    quantization = recipe.quantization(stage.name)
    return [
        in_float32(load_module(stage, config, shard, folder / file, quantization, submodule=submodule))
        for shard, file in zip(_shards(weights), weights, strict=True)
    ]


def _load(task: GraphTask, stage: Stage, config: Any, shard: Shard, plan: GraphDef) -> nn.Module:
    quantization = task.recipe.quantization(stage.name)
    path = task.folder / task.weights[shard.rank]
    return load_module(stage, config, shard, path, quantization, submodule=plan.spec.layer_instances[0])


def first_shard(stage: Stage, recipe: ExportRecipe) -> Shard:
    """The rank whose graphs are compiled; its engines serve all ranks."""
    return Shard(rank=0, world_size=recipe.world_size if stage.is_sharded else 1)


def _shards(weights: Sequence[str]) -> list[Shard]:
    """A shard for each rank's file."""
    return [Shard(rank=rank, world_size=len(weights)) for rank in range(len(weights))]


def _find_plan(stage: Stage, config: Any, shard: Shard, options: StageOptions, graph: str) -> GraphDef:
    for plan in stage.graphs(config, shard, options):
        if plan.spec.name == graph:
            return plan
    raise ExportError(f"stage {stage.name} has no graph {graph}")


def _compile(
    task: GraphTask,
    plan: GraphDef,
    module: nn.Module,
    static_shapes: dict[str, int] | None,
    options: StageOptions,
) -> EngineRecord:
    backend = find_backend(task.backend).for_graph(plan, static_shapes, task.recipe.target)
    file = f"engines/{engine_label(task.name, static_shapes)}{_suffix(task, backend)}"
    program = trace_graph(backend, plan, module, stage=task.stage, sizes=static_shapes, device=options.device)
    with _library_errors(f"{backend.name} does not compile the graph", task.name):
        seconds = backend.compile(
            program,
            task.folder / file,
            device=task.recipe.target,
            cache=task.recipe.cache,
            where=task.name,
        )
    if task.recipe.cache is not None:
        trim(task.recipe.cache, task.recipe.cache_gigabytes * 1e9)
    return EngineRecord(
        backend=backend.name,
        file=file,
        dims=static_shapes,
        compile_seconds=round(seconds, 1),
        cost=count_cost(program, plan.spec, static_shapes),
    )


def trace_graph(
    backend: Backend,
    plan: GraphDef,
    module: nn.Module,
    *,
    stage: str,
    sizes: Mapping[str, int] | None,
    device: str,
) -> torch.export.ExportedProgram:
    """`plan` as `backend` compiles it for `sizes`. Raises: CaptureError."""
    static = {**(sizes or {}), **backend.pool_dims}
    with _kernels_of(backend):
        return capture(plan, module, stage=stage, static_shapes=static, device=torch.device(device))


def _kernels_of(backend: Backend) -> AbstractContextManager[None]:
    """Context for tracing: graphs for a backend that does not compile mingc's kernels contain none."""
    return nullcontext() if backend.takes_kernels else plain_torch()


def _suffix(task: GraphTask, backend: Backend) -> str:
    """Ending of the file of an engine; with the backend's name where another one of the stage has the same ending."""
    others = [find_backend(name) for name in task.recipe.backends_of(task.stage) if name != backend.name]
    is_shared = any(each.suffix == backend.suffix for each in others)
    return f".{backend.name}{backend.suffix}" if is_shared else backend.suffix


def _check(
    task: GraphTask,
    plan: GraphDef,
    stage: Stage,
    config: Any,
    checkpoint: Checkpoint,
    module: nn.Module,
    engines: Sequence[EngineRecord],
    options: StageOptions,
    replay: Replay,
) -> tuple[dict[str, torch.Tensor], Parity]:
    """Tensors of the golden file (float32 reference outputs), and the worst parity of compiled graphs with them."""
    is_sharded, is_float32 = len(task.weights) > 1, options.dtype == torch.float32
    # The engine is compared with its stored weights in float32; the loss of storing them is a separate figure.
    quantization, submodule = task.recipe.quantization(task.stage), plan.spec.layer_instances[0]
    exact_plan = _float32_plan(stage, config, Shard(), options, plan)
    whole = float32_module(stage, config, checkpoint, submodule=submodule)
    stored_plan, stored = exact_plan, [whole]
    if quantization is not None:
        stored = [in_float32(_load(task, stage, config, shard, plan)) for shard in _shards(task.weights)]
        stored_plan = _float32_plan(stage, config, _shards(task.weights)[0], options, plan)
    if plan.routing is not None:
        # Their float32 references stay on the CPU for other graphs; those of 256 experts take it minutes.
        whole, stored = whole.to(options.device), [each.to(options.device) for each in stored]
    # Only low-precision engines are compared with the eager module's error.
    shards = [] if is_float32 else _shards(task.weights)[1:]
    others = [_load(task, stage, config, shard, plan) for shard in shards]
    # The reference may return more than the graph (router choices); the state of a shard has no reference.
    compared = [each.name for each in plan.spec.outputs]
    if not is_sharded:
        compared.extend(f"state.{each.name}" for each in plan.spec.state)
    of_every_expert = experts.find_expert_tokens(plan, module) if plan.routing is not None else None

    def compare(engine: EngineRecord, sizes: dict[str, int], where: str) -> tuple[Parity, _Tensors, _Tensors]:
        """Parity at these sizes, and the inputs and expected outputs."""
        tensors = plan.example(sizes, torch.Generator().manual_seed(1))
        if is_sharded:
            # A rank's state is a share of the whole one; zeros are the same in every layout.
            states = {each.name for each in plan.spec.state}
            tensors = {name: torch.zeros_like(t) if name in states else t for name, t in tensors.items()}
        reference = EagerRanks(stored_plan, stored, float32_inputs(stored_plan, tensors, sizes)).on_device()
        references = reference.run()
        tokens = None
        if of_every_expert is not None:
            tokens = of_every_expert.with_tokens_per_call(len(next(iter(tensors.values()))))
        with _library_errors(f"the engine of {engine.backend} does not run", task.name):
            compiled, *reached = replay(
                task.folder / engine.file,
                engine.backend,
                plan.spec,
                [task.folder / file for file in task.weights],
                [tensors, *(tokens.calls() if tokens is not None else ())],
                options.device,
            )
        expected = {name: pad_like(references[name], compiled[name]) for name in compared}
        moved = {name: value.to(options.device) for name, value in tensors.items()}
        eager_expected, rerouted = expected, None
        if not is_float32 and plan.routing is not None:
            chosen = routing.select_experts(plan, module, moved)
            reference_ids, _ = routing.select_experts(plan, reference.modules[0], reference.inputs)
            rerouted = routing.rerouted_share(chosen[0], reference_ids, where)
            with routing.fixed_routing(reference.modules, chosen):
                followed = reference.run()
            eager_expected = {name: pad_like(followed[name], compiled[name]) for name in compared}
            expected = routing.nearest_rows(compiled, (expected, eager_expected))
        eager, lost, narrow = 0.0, None, None
        if not is_float32:
            narrow = EagerRanks(plan, [module, *(each.to(options.device) for each in others)], moved)
            eager = parity_rule.worst_error(narrow.run(), eager_expected)
        if rerouted is not None:
            limit = parity_rule.max_error(eager, options.dtype)
            expected, others_rerouted = routing.match_perturbed_routing(
                compiled, expected, limit, plan, (module, moved), reference
            )
            rerouted += others_rerouted / len(chosen[0])
        quantized = None
        if quantization is not None:
            exact = EagerRanks(exact_plan, [whole], float32_inputs(exact_plan, tensors, sizes)).on_device()
            quantized, wide = experts.Unquantized(format=quantization, reference=exact), exact.run()
            lost = parity_rule.worst_error(
                references, {name: pad_like(wide[name], references[name]) for name in compared}
            )
        error = parity_rule.worst_error(compiled, expected)
        parity = Parity(compiled=error, eager=eager, quantization=lost, rerouted=rerouted)
        parity_rule.check_parity(parity, options.dtype, where)
        if tokens is not None:
            of_all = experts.check_experts(
                tokens, reached, reference, narrow, quantized, options.dtype, where
            )
            parity = parity_rule.worst_parity(parity, of_all)
        return parity, tensors, expected

    engine, sizes = _check_engine(plan, engines)
    parity, tensors, expected = compare(engine, sizes, task.name)
    golden = _golden_tensors(plan.spec, tensors, expected)
    single = _single_engine(engines)
    if single is not None and single is not engine:
        of_one, *_ = compare(single, {**sizes, **(single.dims or {})}, Path(single.file).stem)
        parity = parity_rule.worst_parity(parity, of_one)
    return golden, parity


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


def _float32(options: StageOptions) -> StageOptions:
    return StageOptions(
        dtype=torch.float32,
        device="cpu",
        batch_sizes=options.batch_sizes,
        max_model_len=options.max_model_len,
        prefill_chunk_size=options.prefill_chunk_size,
    )


def _float32_plan(stage: Stage, config: Any, shard: Shard, options: StageOptions, plan: GraphDef) -> GraphDef:
    """`plan` in float32 on the CPU.

    `plan` itself if only CUDA exports have this graph, which computes in float32 there too.
    """
    for each in stage.graphs(config, shard, _float32(options)):
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
