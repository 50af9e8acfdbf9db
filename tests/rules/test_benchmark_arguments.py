"""The measuring scripts refuse wrong arguments with a message and exit code 2 before they start anything."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILURE, TILES = "rank_failure.py", "moe_configs.py"
THINKER, ENGINES, CONVERSATIONS = "thinker.py", "backend_engines.py", "conversations.py"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([FAILURE, "x", "--tokens", "1"], "argument --tokens: 1 is not at least 100"),
        ([FAILURE, "x", "--clients", "300"], "argument --clients: 300 is not from 1 to 128"),
        (
            [FAILURE, "x", "--step-timeout", "nan"],
            "argument --step-timeout: nan is not a finite number above 0",
        ),
        ([CONVERSATIONS, "x", "--listeners", "850,0"], "argument --listeners: 0 is not from 1 to 1000"),
        ([CONVERSATIONS, "x", "--cases", "clip"], "argument --cases: invalid choice: 'clip'"),
        (["start.py", "x", "y", "--repeats", "0"], "argument --repeats: 0 is not at least 1"),
        ([TILES, "--tokens", "16,0"], "argument --tokens: 0 is not at least 1"),
        ([TILES, "--ranks", "9"], "argument --ranks: 9 is not from 1 to 8"),
        ([THINKER, "--prompts", ""], "argument --prompts: '' is not a whole number"),
        (
            [THINKER, "--prompts", "1024", "--chunks", "4096"],
            "error: --prompts 1024: every size of --chunks is larger; add a chunk of at most 1024 tokens",
        ),
        ([THINKER, "--prompts", "1024,1500"], "--prompts 1500 is not a multiple of its chunk size, 1024"),
        (
            [THINKER, "--prompts", "8192", "--context", "8192"],
            "--prompts 8192: with 152 output tokens it does not fit into --context 8192",
        ),
        ([THINKER, "--context", "9000"], "--context 9000 is not a multiple of the page size, 16"),
        ([THINKER, "--batches", "0"], "argument --batches: 0 is not at least 1"),
        ([THINKER, "--device", "cpu", "--ranks", "3"], "--ranks 3: 32 query heads cannot be divided"),
        ([THINKER, "--device", "cpu", "--layers", "1"], "--layers 1 is not from 2 to 32"),
        ([ENGINES], "error: --output is needed"),
        ([ENGINES, "--parts", "auto,all"], "argument --parts: 'all' is not one of released, served, auto"),
        ([ENGINES, "--parts", "auto,auto"], "argument --parts: auto,auto names a word twice"),
        ([ENGINES, "--limit", "0"], "argument --limit: 0 is not a finite number above 0"),
        ([ENGINES, "--build-limit", "inf"], "argument --build-limit: inf is not a finite number above 0"),
        ([ENGINES, "--layers", "-1"], "argument --layers: -1 is not from 0 to 64"),
        ([ENGINES, "--sizes", "4"], "argument --sizes: 4 is not from 1 to 3"),
        ([THINKER, "--measure-only"], "--measure-only needs --engines"),
        ([THINKER, "--build-only", "--measure-only"], "--build-only and --measure-only exclude each other"),
        ([THINKER, "--configs", "nosuch"], "--configs nosuch: there is no config.json in this folder"),
    ],
)
def test_numbers_out_of_range_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a new one would import torch for each of them."""
    script, *rest = words
    monkeypatch.setattr(sys, "argv", [script, *rest])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert exited.value.code == 2
    assert says in capsys.readouterr().err
