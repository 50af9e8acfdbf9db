"""Triton launches, checked without Triton: arguments match the kernel."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mingc.kernels

KERNELS = Path(mingc.kernels.__file__).parent
TRITON = sorted((KERNELS / "triton").glob("*.py"))
OPTIONS = {"num_warps", "num_stages"}  # launch options, not parameters of the kernel


def trees(paths: list[Path]) -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


TREES = trees(TRITON)


def is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "triton.jit" for each in function.decorator_list)


JIT = {
    node.name: node
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and is_jit(node)
}


def launches(tree: ast.Module) -> list[ast.Call]:
    """Calls `torch.library.wrap_triton(kernel)[grid](…)`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).startswith("torch.library.wrap_triton(")
    ]


def literal_keys(tree: ast.Module, call: ast.Call, name: str) -> set[str]:
    """Keys of the dict literal that `name` was last assigned before `call`."""
    assigned = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == name
        and node.lineno < call.lineno
    ]
    keys = max(assigned, key=lambda node: node.lineno).value
    assert isinstance(keys, ast.Dict)
    return {key.value for key in keys.keys if isinstance(key, ast.Constant)}


def tuple_length(tree: ast.Module, call: ast.Call, name: str) -> int:
    """Length of the tuple literal that `name` was last assigned before `call`."""
    assigned = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and ast.unparse(node.targets[0]) == name
        and node.lineno < call.lineno
    ]
    value = max(assigned, key=lambda node: node.lineno).value
    assert isinstance(value, ast.Tuple)
    return len(value.elts)


LAUNCHES = [(module, call) for module, tree in TREES.items() for call in launches(tree)]


def launch_id(launch: tuple[str, ast.Call]) -> str:
    return f"{launch[0]}:{launch[1].lineno}"


def problems(tree: ast.Module, call: ast.Call) -> list[str]:
    """Differences between the arguments of a launch and the parameters of its kernel."""
    assert isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Call)
    name = ast.unparse(call.func.value.args[0])
    if name not in JIT:
        return [f"{name} is no kernel"]
    parameters = [each.arg for each in JIT[name].args.args]
    count = sum(
        tuple_length(tree, call, ast.unparse(each.value)) if isinstance(each, ast.Starred) else 1
        for each in call.args
    )
    keywords: list[str] = []
    for each in call.keywords:
        keywords += [each.arg] if each.arg else sorted(literal_keys(tree, call, ast.unparse(each.value)))
    given = parameters[:count] + [each for each in keywords if each not in OPTIONS]
    found = [
        f"{name}: {each} given twice" for each in sorted({each for each in given if given.count(each) > 1})
    ]
    found += [f"{name} has no parameter {each}" for each in given if each not in parameters]
    return found + [f"{name}: no argument {each}" for each in parameters if each not in given]


@pytest.mark.parametrize("launch", LAUNCHES, ids=launch_id)
def test_a_launch_gives_every_parameter_of_its_kernel_once(launch: tuple[str, ast.Call]) -> None:
    module, call = launch
    assert problems(TREES[module], call) == []


def test_every_kernel_is_launched_or_called() -> None:
    names = {ast.unparse(call.func.value.args[0]) for _, call in LAUNCHES}  # type: ignore[attr-defined]
    called = {
        node.func.id
        for function in JIT.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert len(LAUNCHES) >= 20
    assert {*JIT} == {name for name in JIT if name in names | called}


def test_wrong_launches_are_found() -> None:
    """The check itself: a keyword that is missing, unknown or given twice."""
    source = """
def launch():
    torch.library.wrap_triton(mingc_moe_sum)[(1, 1)](o, w, out, t, K=1, D=2, HAS_SHARED=True, BN=4, num_warps=4)
    torch.library.wrap_triton(mingc_moe_sum)[(1, 1)](o, w, out, t, K=1, D=2, out=3, HAS_SHARED=True, BLOCK_N=4)
    torch.library.wrap_triton(mingc_moe_lost)[(1, 1)](o)
"""
    tree = ast.parse(source)
    assert [problems(tree, call) for call in launches(tree)] == [
        ["mingc_moe_sum has no parameter BN", "mingc_moe_sum: no argument BLOCK_N"],
        ["mingc_moe_sum: out given twice"],
        ["mingc_moe_lost is no kernel"],
    ]


@pytest.mark.parametrize("name", JIT)
def test_a_kernel_uses_every_parameter_that_it_has(name: str) -> None:
    function = JIT[name]
    used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    assert {each.arg for each in function.args.args} - used <= {"SPLITS"}


@pytest.mark.parametrize("name", ["int4_experts", "rotary_varlen_attention"])
def test_symbols_of_a_cuda_source_are_those_that_are_launched(name: str) -> None:
    source = (KERNELS / "cuda" / f"{name}.cu").read_text(encoding="utf-8")
    declared = re.findall(r"(mingc_\w+)\(const __grid_constant__", source)
    launcher = (KERNELS / "cuda" / f"{name}.py").read_text(encoding="utf-8")
    assert sorted(declared) == sorted(re.findall(r'"(mingc_\w+)"', launcher))


def test_symbols_of_the_sampler_source_are_those_that_are_launched() -> None:
    source = (KERNELS / "cuda" / "flow_sampler.cu").read_text(encoding="utf-8")
    declared = set(re.findall(r"^\s+mingc_dit_(\w+)\(const __grid_constant__", source, re.MULTILINE))
    declared |= set(re.findall(r"__launch_bounds__\(256\) mingc_dit_(\w+)\(", source))
    declared |= {f"{name}_pdl" for name in re.findall(r"^GEMM\((\w+),", source, re.MULTILINE)}
    declared.discard("name")
    declared |= {
        f"{name}_pdl" for name in re.findall(r"__launch_bounds__\(192\) mingc_dit_(\w+)_pdl\(", source)
    }
    matrices = ("qkv", "up", "down", "out")
    launched = {f"{name}{suffix}_pdl" for name in matrices for suffix in ("", "_few")}
    assert declared == launched | {"attend_pdl", "project_pdl", "enter_pdl", "turn_pdl"}
