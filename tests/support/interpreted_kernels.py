"""Runs the cases of `kernel_cases` in Triton's interpreter and in plain torch; prints as JSON how they compare.

    python tests/support/interpreted_kernels.py     # {case: {"launched": …, "error": …} or {"raised": …}}

Run as a script in a process of its own: Triton reads the variable that selects its interpreter once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

launched: list[str] = []


class Launcher:
    """In place of `torch.library.wrap_triton`: calls the kernel at once, without launch options and PTX."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, num_stages: int = 0, **keywords: Any) -> None:
            launched.append(self._kernel.__name__)
            if "PDL" in keywords:
                keywords["PDL"] = False
            self._kernel[grid](*arguments, **keywords)

        return launch


def compare(run: Any) -> dict[str, Any]:
    """Which kernels a case launches, and how far its results are from those of plain torch."""
    from mingc.kernels.dispatch import plain_torch

    results = []
    for is_plain in (True, False):
        torch.manual_seed(3)
        launched.clear()
        if is_plain:
            with plain_torch():
                results.append(run())
        else:
            results.append(run())
    differences = [
        (float((mine.double() - plain.double()).abs().max()) / max(1.0, float(plain.double().abs().max())))
        for plain, mine in zip(*results, strict=True)
    ]
    return {"launched": [*launched], "error": max(differences)}


def read_scalars() -> None:
    """Let the interpreter of Triton 3.6 read scalars, which are arrays of one element, with NumPy 2.4 or later."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    read_scalars()
    torch.library.triton_op = lambda name, *, mutates_args: lambda function: function  # type: ignore[assignment]
    torch.library.wrap_triton = Launcher  # type: ignore[assignment]
    from mingc.artifacts.target import lookup
    from mingc.host import machine
    from mingc.kernels import dispatch

    machine.gpu_target = lambda device=None: lookup((9, 0), "NVIDIA H100", 132)
    dispatch._has_kernels = lambda index, family: family == "triton"  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment,method-assign]
    from kernel_cases import cases

    found: dict[str, Any] = {}
    for name, case in cases("cpu", torch.float16).items():
        try:
            found[name] = compare(case.run)
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
