"""Dispatch of every family of kernels by size: a kernel where its sizes fit, plain torch where they do not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_cases import cases

import mingc.kernels.triton
from mingc.kernels import dispatch

ROOT = Path(__file__).parents[2]
CASES = cases("meta", torch.bfloat16)


class _LaunchedError(Exception):
    """A kernel would run."""


class _Recorder(ModuleType):
    """Stands in for a module of `mingc.kernels.triton`; any function of it ends the call."""

    NUM_COUNTERS = 64
    ACTIVATIONS = {"none": 0, "gelu": 1, "swiglu": 2}  # noqa: RUF012
    NONE = 0

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def launch(*_: object, **__: object) -> None:
            raise _LaunchedError(name)

        return launch


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_runs_where_its_sizes_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, as if they were on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda index, family: family == "triton")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # nothing may depend on values
    for file in Path(mingc.kernels.triton.__file__).parent.glob("*.py"):
        if file.stem not in ("__init__", "moe_config"):
            recorder = _Recorder(f"mingc.kernels.triton.{file.stem}")
            monkeypatch.setitem(sys.modules, recorder.__name__, recorder)
            monkeypatch.setattr(mingc.kernels.triton, file.stem, recorder, raising=False)
    launched = False
    try:
        CASES[name].run()
    except _LaunchedError:
        launched = True
    assert launched == CASES[name].has_kernel


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_every_family_agrees_with_plain_torch_at_odd_sizes() -> None:
    """The kernels run in Triton's interpreter."""
    script = ROOT / "tests" / "support" / "interpreted_kernels.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    output = subprocess.run(
        [sys.executable, script], env=environment, check=True, capture_output=True, timeout=300
    ).stdout
    found = json.loads(output)
    assert found.keys() == CASES.keys()
    for name, result in found.items():
        assert result.get("error", 1.0) < 0.01, f"{name}: {result}"
        assert bool(result["launched"]) == CASES[name].has_kernel, f"{name}: {result}"
