"""Plans of exports whose engines are built by stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mingc.artifacts.stage_graph import StageGraph
from mingc.export.plan import ExportPlan, PlannedGraph
from mingc.export.recipe import ExportRecipe
from mingc.export.stages import find
from mingc.export.tasks.memory_needs import Needs
from mingc.export.tasks.rank_weights import rank_weights


def plan_of(
    recipe: ExportRecipe,
    sizes: Mapping[str, Sequence[dict[str, int] | None]],
    *,
    first: str = "",
    refused: Mapping[str, Mapping[str, str]] | None = None,
    needs: Needs | None = None,
) -> ExportPlan:
    """A plan of graphs `STAGE.GRAPH` with these `sizes` of engines, of which the graph `first` is compiled first."""
    names = [each.split(".") for each in sizes]
    stages = [find(name) for name in dict.fromkeys(stage for stage, _ in names)]
    checkpoint: Any = None  # nothing reads it
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        stages=tuple(stages),
        configs={},
        stage_graph=StageGraph(nodes=(), edges=()),
        graphs=tuple(
            PlannedGraph(
                stage=stage,
                graph=graph,
                backends=recipe.backends_of(stage),
                refused=(refused or {}).get(f"{stage}.{graph}", {}),
                sizes=tuple(sizes[f"{stage}.{graph}"]),
                compile_cost=int(f"{stage}.{graph}" == first),
            )
            for stage, graph in names
        ),
        weights={stage.name: rank_weights(stage, recipe, ()) for stage in stages},
        repeated={},
        voices=(),
        to_tune={},
        notes=(),
        needs=needs or {},
    )
