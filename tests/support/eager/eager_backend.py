"""A backend for tests that compiles nothing: an engine is the Python code of the captured graph."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.fx.graph import CodeGen, Graph

from mingc.export.compile.backend import Backend


class EagerBackend(Backend):
    """Writes the code of the graph, the names of its weights, and tensors that it holds as constants."""

    name = "eager"
    suffix = ".eager"

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        return None if target == "cpu" else "runs on the CPU only"

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        started = time.perf_counter()
        module = program.module(check_guards=False)
        _simplify(module.graph)
        module.graph.set_codegen(CodeGen())  # tensors in, tensors out: no pytrees
        code = module.graph.python_code("self").src
        constants = {name: value.contiguous() for name, value in program.constants.items()}
        weights = "\n".join(program.state_dict)
        save_file(constants, path, metadata={"code": code, "weights": weights})
        return time.perf_counter() - started


def _simplify(graph: Graph) -> None:
    """Remove conversions to the dtype that a tensor has, and the assertions that captures put before conversions.

    They are a third of the operations of some graphs.
    """
    for node in graph.nodes:
        if node.target == torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target == torch.ops.aten.to.dtype and node.args[1] == node.args[0].meta["val"].dtype:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


BACKEND = EagerBackend()
