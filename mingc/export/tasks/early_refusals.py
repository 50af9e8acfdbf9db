"""Find backends that cannot build a graph, before anything is built."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mingc.dtypes import torch_dtype
from mingc.errors import CompileError
from mingc.export.compile.backend import Backend
from mingc.export.compile.backends import find_backend
from mingc.export.compile.trace import share_weights, trace_graph
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.stage import GraphDef, Stage
from mingc.export.weights.loading import stored_meta_module


def early_refusals(
    recipe: ExportRecipe, stage: Stage, config: Any, plans: Sequence[GraphDef]
) -> dict[str, dict[str, str]]:
    """Why backends cannot build graphs of `stage`, by graph (`STAGE.GRAPH`) and backend.

    Raises: CompileError when a refused backend was requested by name, or every backend refuses.
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
        backends, sizes = recipe.backends_of(stage.name), options.engine_sizes(plan)[-1]
        for named in map(find_backend, backends):
            backend = named.for_graph(plan, sizes, recipe.target)
            if type(backend).check_graph is Backend.check_graph:
                continue
            module = whole().get_submodule(plan.spec.layer_instances[0])

            def trace(
                plan: GraphDef = plan,
                module: nn.Module = module,
                backend: Backend = backend,
                sizes: dict[str, int] | None = sizes,
            ) -> torch.export.ExportedProgram:
                shared = share_weights(plan, module)
                return trace_graph(backend, shared, module, stage=stage.name, sizes=sizes, device="meta")

            try:
                backend.check_graph(plan, module, trace, where=name)
            except CompileError as error:
                found[backend.name] = error.message
                if not recipe.is_measured(stage.name) or not {*backends} - {*found}:
                    raise
    return refused
