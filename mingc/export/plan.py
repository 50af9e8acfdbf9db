"""The plan of an export: what will be written, and what is compiled, checked and timed for it. Builds nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mingc.artifacts.artifact import check_replaceable
from mingc.artifacts.codec import encode
from mingc.artifacts.stage_graph import StageGraph
from mingc.errors import CheckpointError, ConfigError, ExportError
from mingc.export.assets.voices import VoiceSource, find_voices
from mingc.export.autotune.tuning import problems_to_tune
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.coverage import check_coverage
from mingc.export.config_fields import field_notes
from mingc.export.preflight import check_host, check_space
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import ExpertDims, GraphDef, Stage
from mingc.export.stages import build_graph, discover, find
from mingc.export.tasks.early_refusals import early_refusals
from mingc.export.tasks.memory_needs import Needs, stage_needs
from mingc.export.tasks.rank_weights import RankWeights, rank_weights
from mingc.kernels.triton.moe_config import MoeProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGraph:
    """One graph, and the engines to compile for it.

    Attributes:
        backends: the backends that compile it; with several, their engines are timed and the fastest are kept.
        refused: the reason of each backend that `--backend auto` cannot use, by name.
        sizes: the sizes that each backend compiles an engine for; None is one engine for every size.
        compile_cost: graphs with the largest cost are compiled first.
    """

    stage: str
    graph: str
    backends: tuple[str, ...]
    refused: Mapping[str, str]
    sizes: tuple[dict[str, int] | None, ...]
    compile_cost: int

    @property
    def name(self) -> str:
        """The graph's name among the graphs of all stages: `cfm.sample`."""
        return f"{self.stage}.{self.graph}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """Everything that an export does, decided before anything is built; `str` lists it.

    Attributes:
        stages: in data-flow order.
        configs: the config of each stage, by name.
        graphs: of all stages.
        weights: of each stage, one per rank.
        repeated: as in `StageRecord`: of random weights one layer of each kind is stored, and loading draws the rest.
        voices: of the checkpoint, to be registered.
        to_tune: problems of the expert kernels that are timed first, by stage.
        needs: memory that tasks take.
        notes: fix-ups and omissions so far, for the manifest.
    """

    recipe: ExportRecipe
    checkpoint: Checkpoint
    stages: tuple[Stage, ...]
    configs: Mapping[str, Any]
    stage_graph: StageGraph
    graphs: tuple[PlannedGraph, ...]
    weights: Mapping[str, tuple[RankWeights, ...]]
    repeated: Mapping[str, dict[str, str]]
    voices: tuple[VoiceSource, ...]
    to_tune: Mapping[str, tuple[ExpertDims, tuple[MoeProblem, ...]]]
    notes: tuple[str, ...]
    needs: Needs

    @property
    def num_engines(self) -> int:
        """Number of engines to compile."""
        return sum(len(each.backends) * len(each.sizes) for each in self.graphs)

    @property
    def weights_folders(self) -> dict[str, tuple[str, ...]]:
        """The folders of all ranks' weights by stage, relative to the artifact."""
        return {stage: tuple(rank.path for rank in ranks) for stage, ranks in self.weights.items()}

    @property
    def is_measured(self) -> bool:
        """Whether engines of several backends may have to be timed."""
        return any(self.recipe.is_measured(stage.name) for stage in self.stages)

    @property
    def num_steps(self) -> int:
        """Number of progress steps: engines, checks, timings, weights, voices, goldens and the manifest."""
        timed = sum(self.recipe.is_measured(each.stage) and len(each.backends) > 1 for each in self.graphs)
        weights = sum(map(len, self.weights.values()))
        shared = weights + len(self.voices) + len(self.to_tune) + 2
        return self.num_engines + len(self.graphs) + timed + shared

    def parameters(self) -> dict[str, dict[str, Any]]:
        """The parameters of every stage as JSON values. Raises: ExportError when they are not JSON values."""
        options = stage_options(self.recipe)
        return {
            stage.name: _json_values(stage.name, stage.parameters(self.configs[stage.name], options))
            for stage in self.stages
        }

    def __str__(self) -> str:
        weights = [rank.name for each in self.weights.values() for rank in each]
        rows = [
            f"{each.name}: {len(each.sizes)} engine(s) of {' or '.join(each.backends)}"
            for each in self.graphs
        ]
        return "\n".join(
            (
                f"{self.recipe.output}, for {self.recipe.target}: {self.num_engines} engines, "
                f"{self.recipe.jobs} at a time",
                *rows,
                f"weights: {', '.join(weights)}",
                f"voices: {', '.join(voice.name for voice in self.voices) or 'none'}",
            )
        )


def plan_export(recipe: ExportRecipe) -> ExportPlan:
    """Choose what an export of `recipe` builds, and check that it can be built here.

    Raises: ConfigError, CheckpointError; CompileError when a requested backend cannot build a graph.
    """
    check_host(recipe)
    check_replaceable(recipe.output, replace_existing=recipe.force)
    checkpoint = open_source(recipe)
    stages = _choose_stages(checkpoint, recipe)
    stage_graph = build_graph(stages)
    configs = {stage.name: stage.config(checkpoint) for stage in stages}
    notes = [
        *checkpoint.notes,
        *field_notes(checkpoint),
        *check_coverage(checkpoint, configs, discover().values()),
    ]
    options = stage_options(recipe)
    graphs = {
        stage.name: stage.graphs(configs[stage.name], first_shard(stage, recipe), options) for stage in stages
    }
    repeated = {name: _repeated(each) if recipe.synthetic else {} for name, each in graphs.items()}
    plan = ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        stages=tuple(stages),
        configs=configs,
        stage_graph=stage_graph,
        graphs=tuple(
            planned
            for stage in stages
            for planned in _plan_graphs(recipe, stage, configs[stage.name], graphs[stage.name])
        ),
        weights={stage.name: rank_weights(stage, recipe, repeated[stage.name]) for stage in stages},
        repeated=repeated,
        voices=find_voices(checkpoint, notes) if stage_graph.speech_path() is not None else (),
        to_tune={
            stage.name: found
            for stage in stages
            if (found := problems_to_tune(recipe, stage, configs[stage.name], graphs[stage.name])) is not None
        },
        notes=tuple(notes),
        needs={
            key: need
            for stage in stages
            for key, need in stage_needs(
                recipe, checkpoint, stage, configs[stage.name], graphs[stage.name]
            ).items()
        },
    )
    check_space(recipe, checkpoint, stages, configs, plan.num_engines)
    return plan


def _choose_stages(checkpoint: Checkpoint, recipe: ExportRecipe) -> list[Stage]:
    stages = (
        [find(name) for name in recipe.stages] if recipe.stages is not None else list(discover().values())
    )
    if recipe.stages is None:
        checkpoint.check_pictures()
    present = [stage for stage in stages if stage.is_present(checkpoint)]
    if recipe.stages is not None and len(present) < len(stages):
        absent = ", ".join(stage.name for stage in stages if stage not in present)
        raise ConfigError(f"the checkpoint does not hold {absent}", where="--stages", fix="leave them out")
    if not present:
        raise CheckpointError("the checkpoint holds no stage that mingc knows", where=str(checkpoint.root))
    recipe.check_stages(present)
    return present


def _plan_graphs(
    recipe: ExportRecipe, stage: Stage, config: Any, graphs: Sequence[GraphDef]
) -> list[PlannedGraph]:
    refused = early_refusals(recipe, stage, config, graphs)
    options = stage_options(recipe)
    return [
        PlannedGraph(
            stage=stage.name,
            graph=graph.spec.name,
            backends=recipe.backends_of(stage.name),
            refused=refused[f"{stage.name}.{graph.spec.name}"],
            sizes=tuple(options.engine_sizes(graph)),
            compile_cost=graph.compile_cost,
        )
        for graph in graphs
    ]


def _repeated(graphs: Sequence[GraphDef]) -> dict[str, str]:
    """For each layer instance but the first of its kind, the first one."""
    return {
        instance: graph.spec.layer_instances[0]
        for graph in graphs
        for instance in graph.spec.layer_instances[1:]
    }


def _json_values(stage: str, parameters: Any) -> dict[str, Any]:
    encoded: Any = encode(parameters)
    try:
        json.dumps(encoded, allow_nan=False)
        problem = None if isinstance(encoded, dict) else f"{encoded!r}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise ExportError(
            f"the parameters of {stage} are not a dataclass of JSON values: {problem}",
            where=stage,
            fix="correct what its `parameters` returns",
        )
    return cast("dict[str, Any]", encoded)
