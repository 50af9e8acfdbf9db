"""The stages: one file each, or an entry point `mingc.stages` of another distribution.

A file that fails to import is an error, not a missing stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from mingc.artifacts.stage_graph import CLIENT, Edge, Policy, StageGraph, StageNode
from mingc.errors import ConfigError
from mingc.export.stage import Stage
from mingc.plugins import ExtensionPoint

STAGES = ExtensionPoint(noun="stage", package="mingc.export.stages", attribute="STAGE", group="mingc.stages")


def discover() -> dict[str, Stage]:
    """Every stage by name, in data-flow order: producers before consumers."""
    found = {name: find(name) for name in STAGES.names()}
    # Stages that offer the same port are alternatives; an export has to choose between them.
    graph = _graph(found.values())
    return {name: found[name] for name in graph.data_flow()}


def find(name: str) -> Stage:
    """The stage called `name`. Raises ConfigError listing the known ones."""
    stage: Stage = STAGES.find(name, Stage, option="--stages")
    problem = _declaration_problem(stage)
    if problem is not None:
        raise ConfigError(f"stage {name}: {problem}", where=STAGES.group, fix="see mingc.export.stage.Stage")
    return stage


def _declaration_problem(stage: Stage) -> str | None:
    policy = getattr(stage, "policy", None)
    if policy not in get_args(Policy):
        return f"policy is {policy!r}, expected one of {', '.join(get_args(Policy))}"
    if not isinstance(stage.edges, tuple) or not all(isinstance(edge, Edge) for edge in stage.edges):
        return f"edges is {stage.edges!r}, expected a tuple of Edge"
    return None


def build_graph(stages: Iterable[Stage]) -> StageGraph:
    """The stage graph of an export of `stages`, in data-flow order.

    Raises: ConfigError when a declared edge is wrong or two stages produce the same port.
    """
    chosen = {stage.name: stage for stage in stages}
    graph = _graph(chosen.values())
    if problems := [*graph.problems()]:
        raise ConfigError(
            "\n".join(problems), where="stage graph", fix="name the stages to export in --stages"
        )
    nodes = {node.name: node for node in graph.nodes}
    return StageGraph(nodes=tuple(nodes[name] for name in graph.data_flow()), edges=graph.edges)


def _graph(stages: Iterable[Stage]) -> StageGraph:
    """Nodes and declared edges of `stages`, without edges to stages that are not among them."""
    by_name = {stage.name: stage for stage in stages}
    edges: dict[Edge, None] = {}
    for stage in by_name.values():
        for edge in stage.edges:
            if stage.name not in (edge.source, edge.target):
                raise ConfigError(
                    f"stage {stage.name} declares an edge between others: {edge}",
                    where="stage graph",
                    fix="declare it in one of these stages",
                )
            if {edge.source, edge.target} <= {*by_name, CLIENT}:
                edges[edge] = None
    nodes = tuple(StageNode(name=stage.name, policy=stage.policy) for stage in by_name.values())
    return StageGraph(nodes=nodes, edges=tuple(edges))
