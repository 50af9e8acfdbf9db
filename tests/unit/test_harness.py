"""Benchmark results: no result is measured or written without its commit and command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch

RESULT: dict[str, Any] = {"commit": "0123abc", "command": "python benchmarks/talker.py", "figures": []}


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A script with `--json`, on a GPU machine without git."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "_output", lambda *command: "")
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    return parser


def parse(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmarks/script.py", *words])
    harness.parse_args(parser)
    return harness._commit


def test_a_result_without_a_known_commit_is_refused_before_measuring(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(parser, monkeypatch, "--json", "out.json")
    assert "pass --commit HASH" in capsys.readouterr().err


@pytest.mark.parametrize("commit", ["main", "0123abc-dirty", "0123ab"])
def test_a_word_that_is_no_commit_is_refused(
    commit: str,
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(parser, monkeypatch, "--json", "out.json", "--commit", commit)
    assert "pass --commit HASH" in capsys.readouterr().err


def test_a_result_without_a_device_is_refused_before_measuring(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(parser, monkeypatch, "--json", "out.json", "--commit", "0123abc")
    assert "CUDA device" in capsys.readouterr().err


def test_a_commit_comes_from_the_option(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_commit", "")
    assert parse(parser, monkeypatch, "--json", "out.json", "--commit", "0123abc") == "0123abc"


def test_a_commit_comes_from_git(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_commit", "")
    monkeypatch.setattr(harness, "_output", lambda *command: "f" * 40)
    assert parse(parser, monkeypatch, "--json", "out.json") == "f" * 40


def test_without_json_no_commit_is_needed(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_commit", "")
    assert parse(parser, monkeypatch) == ""


@pytest.mark.parametrize("key", ["commit", "command"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_result_without_commit_or_command_is_not_written(
    key: str, value: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(ValueError, match=rf"result\.json: a result needs the .*{key}"):
        harness.write(path, {**RESULT, key: value})
    assert not path.exists()


def test_a_result_with_provenance_is_written(tmp_path: Path) -> None:
    path = tmp_path / "results" / "result.json"
    harness.write(path, RESULT)
    assert json.loads(path.read_text()) == RESULT


def test_the_command_of_a_result_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.0"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA H200")
    )
    monkeypatch.setattr(harness, "_output", lambda *command: "")
    words = [
        "/home/me/mingc/benchmarks/talker.py",
        "/data/artifacts/tiny",
        "--json",
        "/tmp/r.json",
        "--batch",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    rates = {"copy_tb_s": 4.2}
    result = harness.result("talker", rates, [], artifact="tiny")
    assert result["command"] == "python benchmarks/talker.py tiny --json r.json --batch 1"
    assert (result["benchmark"], result["peak_rates"], result["artifact"]) == ("talker", rates, "tiny")
    assert result["hardware"]["gpu"] == "NVIDIA H200"


def test_a_summary_has_the_percentiles_of_its_samples() -> None:
    assert harness.summary([float(value) for value in range(100, 0, -1)]) == {
        "median": 50.5,
        "p95": 96.0,
        "min": 1.0,
        "n": 100,
    }
    assert harness.summary([2.0]) == {"median": 2.0, "p95": 2.0, "min": 2.0, "n": 1}
