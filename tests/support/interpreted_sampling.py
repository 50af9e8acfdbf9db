"""Runs the kernels of `mingc.kernels.triton.sample_tokens` in Triton's interpreter; prints the tokens as JSON.

    python tests/support/interpreted_sampling.py FILE     # safetensors with logits, sampling and seen

Run as a script in a process of its own: Triton reads the variable that selects its interpreter once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from safetensors.torch import load_file


class Launcher:
    """In place of `torch.library.wrap_triton`: calls the kernel at once, without launch options."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, **keywords: Any) -> None:
            self._kernel[grid](*arguments, **keywords)

        return launch


def main() -> None:
    torch.library.triton_op = lambda name, *, mutates_args: lambda function: function  # type: ignore[assignment]
    torch.library.wrap_triton = Launcher  # type: ignore[assignment]
    from mingc.kernels.triton.sample_tokens import sample_tokens

    given = load_file(sys.argv[1])
    tokens = sample_tokens(given["logits"], given["sampling"], given["seen"], 6)
    json.dump(tokens.tolist(), sys.stdout)


if __name__ == "__main__":
    main()
