"""The measuring scripts refuse wrong arguments with a message and exit code 2 before they start anything."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from chat_http import fitting, note_incomplete
from speech_clients import ReceivedSpeech
from speech_http import slot_figures

ROOT = Path(__file__).parents[2]
CHAT, FAILURE, SPEECH, TILES = "chat_http.py", "rank_failure.py", "speech_http.py", "moe_configs.py"
THINKER, PREFIX, ENGINES = "thinker.py", "prefix_cache.py", "backend_engines.py"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([FAILURE, "x", "--tokens", "1"], "argument --tokens: 1 is not at least 100"),
        ([FAILURE, "x", "--clients", "300"], "argument --clients: 300 is not from 1 to 128"),
        (
            [FAILURE, "x", "--step-timeout", "nan"],
            "argument --step-timeout: nan is not a finite number above 0",
        ),
        (
            [CHAT, "--artifact", "x", "--concurrency", "x"],
            "argument --concurrency: 'x' is not a whole number",
        ),
        ([CHAT, "--artifact", "x", "--concurrency", "1,0"], "argument --concurrency: 0 is not from 1 to 256"),
        ([CHAT, "--artifact", "x", "--streams", "0"], "argument --streams: 0 is not at least 1"),
        ([CHAT, "--artifact", "x", "--window", "-1"], "argument --window: -1 is not a finite number above 0"),
        (
            [PREFIX, "--artifact", "x", "--prompt-tokens", "31"],
            "argument --prompt-tokens: 31 is not at least 32",
        ),
        ([TILES, "--tokens", "16,0"], "argument --tokens: 0 is not at least 1"),
        ([TILES, "--ranks", "9"], "argument --ranks: 9 is not from 1 to 8"),
        (
            [SPEECH, "--artifact", "x", "--batch-sizes", ""],
            "argument --batch-sizes: '' is not a whole number",
        ),
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
        ([ENGINES, "--parts", "auto,all"], "argument --parts: 'all' is not one of released, auto"),
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


def test_a_shortened_prompt_is_reported() -> None:
    notes: list[str] = []
    assert fitting("--prompts", 100, 200, notes) == 100
    assert notes == []
    assert fitting("--prompts", 8192, 4080, notes) == 4080
    assert notes == ["--prompts 8192: shortened to 4080, the context holds no more beside the answer"]


def test_incomplete_answers_are_reported() -> None:
    notes: list[str] = []
    common = {"name": "incomplete_answers", "n": 48, "tokens": 152}
    note_incomplete(
        [
            {**common, "concurrency": 1, "median": 0},
            {**common, "concurrency": 16, "median": 3},
            {"name": "longest_answer", "median": 2, "unit": "of 16 tokens"},
        ],
        notes,
    )
    assert notes == [
        "3 answers of 48 at concurrency 16 had not 152 tokens",
        "the longest request was answered with 2 of 16 tokens",
    ]


def test_a_slot_is_taken_again_only_by_a_request_that_waited(capsys: pytest.CaptureFixture[str]) -> None:
    others = [ReceivedSpeech(1.0, [(1.25, 100), (1.5, 200), (1.75, 300)])]
    figures = slot_figures(2.0, ReceivedSpeech(1.0, [(2.5, 100)]), others)
    assert [(each["name"], each["median"]) for each in figures] == [
        ("slot_taken_again_ms", 500.0),
        ("slot_taken_again_patches", 2.0),
    ]
    assert slot_figures(2.0, ReceivedSpeech(1.0, [(1.5, 100)]), others) == []
    assert "left out" in capsys.readouterr().err
