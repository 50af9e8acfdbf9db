"""The command line: help that fits a terminal and needs no torch, exit codes, where errors go.

docs/cli.md, which is generated from the declarations, pins every option and default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from restored_logging import restored_logging

import mingc
from mingc.cli import COMMANDS, commands, main


@pytest.fixture(autouse=True)
def logging_of_other_tests() -> Iterator[None]:
    """A command in this process sends logs to the stderr of its test, which is closed after it."""
    with restored_logging():
        yield


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "mingc", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment,
        check=False,
    )


def leaves() -> dict[str, click.Command]:
    """Every command by its words."""
    context, found = click.Context(commands), dict[str, click.Command]()
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found.update({f"{name} {word}": each for word, each in command.commands.items()})
        else:
            found[name] = command
    return found


LEAVES = leaves()


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `mingc WORDS --help` prints."""
    with pytest.raises(SystemExit) as exited:
        main([*words.split(), "--help"])
    assert exited.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_has_help_and_is_spelled_in_full(name: str) -> None:
    for parameter in LEAVES[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help.endswith("."), f"{name} {parameter.opts}"
            assert all(word.startswith("--") for word in parameter.opts), f"{name} {parameter.opts}"


@pytest.mark.parametrize("name", ["", "bundle", *LEAVES])
def test_help_fits_80_columns_and_ends_lines_between_words(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(name, capsys)
    assert max(map(len, text.splitlines())) <= 80
    command = LEAVES.get(name)
    options = [each for each in command.params if isinstance(each, click.Option)] if command else []
    monkeypatch.setenv("COLUMNS", "10000")
    shown = {word for line in text.splitlines() for word in line.split()}
    for option in options:
        assert option.help is not None
        assert {*option.opts, *option.secondary_opts, *option.help.split()} <= shown, option.opts


@pytest.mark.parametrize("group", ["", "bundle"])
def test_the_summary_of_every_command_is_its_whole_first_line(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(group, capsys)
    for name, command in LEAVES.items():
        if name.rpartition(" ")[0] == group:
            assert command.help is not None
            first = command.help.partition("\n")[0]
            assert f"{name.rpartition(' ')[2]} " in text and f" {first}\n" in text, name


def test_help_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy was imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mingc.cli import main; main(sys.argv[1:])"
    )
    for words in (["--help"], *([name, "--help"] for name in COMMANDS), ["bundle", "inspect", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("Usage: mingc")


@pytest.mark.parametrize(
    "words, says",
    [
        (["nosuch"], "No such command"),
        (["export"], "Missing argument"),
        (["export", "x"], "--output"),
        (["export", "x", "--output", "y", "--tp", "3"], "--tp 3: must be one of 1, 2, 4, 8"),
        (["export", "x", "--output", "y", "--tp", "two"], "--tp two: not a whole number"),
        (["export", "x", "--output", "y", "--target", "tpu"], "tpu"),
        (["export", "x", "--output", "y", "--batch-sizes", "2,1"], "--batch-sizes 2,1: must be ascending"),
        (["export", "x", "--output", "y", "--batch-sizes", "0,1"], "--batch-sizes 0,1: must be ascending"),
        (
            ["export", "x", "--output", "y", "--batch-sizes", "1,4,4"],
            "--batch-sizes 1,4,4: must be ascending",
        ),
        (["export", "x", "--output", "y", "--batch-sizes", "1,two"], "--batch-sizes 1,two: not a whole"),
        (["export", "x", "--output", "y", "--batch-sizes", ""], "--batch-sizes: is empty"),
        (["export", "x", "--output", "y", "--batch-sizes", "1,,2"], "--batch-sizes 1,,2: an item"),
        (["export", "x", "--output", "y", "--stages", "talker,"], "--stages talker,: an item"),
        (["export", "x", "--output", ""], "--output: the path is empty"),
        (["export", "x", "--output", "y", "--cache-limit", "20MW"], "MW is not one of the units TB, GB, MB"),
        (["probe", "x", "--batch", ",8"], "--batch ,8: an item"),
        (["probe", "x", "--engine", "talker, ,cfm"], "--engine talker, ,cfm: an item"),
        (["serve", "x", "--port", "99999"], "--port 99999: must be from 0 to 65535"),
        (["serve", "x", "--port", "http"], "--port http: not a whole number"),
        (
            ["serve", "x", "--max-body-bytes", "0.3B"],
            "--max-body-bytes 0.3B: not a whole number, nor one with",
        ),
        (
            ["serve", "x", "--body-timeout", "soon"],
            "--body-timeout soon: not a number, nor one with a unit: h,",
        ),
        (["probe"], "nothing to probe"),
        (["probe", "x", "--batch", "1,two"], "--batch 1,two: not a whole number"),
        (["probe", "x", "--engine", ","], "--engine ,: is empty"),
        (["probe", "x", "--engine", "cfm", "--compare", "patch-embed"], "--compare patch-embed: --engine"),
        (["probe", "x", "--compare", "other"], "--compare other: must be one of patch-embed"),
        (["probe", "x", "--tolerance", "-1"], "--tolerance -1: must be at least 0"),
        (["probe", "x", "--tolerance", "nan"], "--tolerance nan"),
        (["probe", "x", "--baseline", "nowhere.json"], "nowhere.json"),
        (["serve", "x", "--shutdown-timeout", "nan"], "--shutdown-timeout nan: must be a finite number"),
        (
            ["serve", "x", "--max-total-body-bytes", "1000"],
            "--max-total-body-bytes 1kB: is below --max-body-bytes 128MiB",
        ),
        (["serve", "x", "--cors-origin", "example.org"], "--cors-origin example.org: is not"),
        (["serve", "x", "--api-key-file", "nowhere.txt", "--port", "0"], "no API keys in nowhere.txt"),
        (["serve", "x", "--max-speech-seqs", "0"], "--max-speech-seqs 0: must be from 1 to 10000"),
        (["serve", "x", "--media-root", ""], "--media-root: the path is empty"),
        (["export", "x", "--output", "y", "--no-cache", "--cache", "z"], "--cache and --no-cache contradict"),
        (["synth", "x", "--config", "nowhere"], "nowhere holds no config.json"),
        (["synth", ".", "--config", "tiny"], ". exists"),
        (["synth", "x", "--layers", "0"], "--layers 0: must be at least 1"),
        (["export", "", "--output", "y"], "'CHECKPOINT': the path is empty"),
        (["serve", "x", "--host", "a" * 300, "--port", "0"], "not a host name"),
        (["serve", "x", "--served-model-name", " "], "--served-model-name: is empty"),
        (["probe", "--synthetic", "x", "--baseline", "nowhere.json"], "nowhere.json is not a baseline"),
        (["probe", "x", "--jobs", "0"], "--jobs and --cache are for an export"),
        (["probe", "x", "--cache", "y"], "--jobs and --cache are for an export"),
        (["probe", ".", "--synthetic", "x"], ". exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_asking_wrongly_exits_with_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: a new one would import torch for each of them."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    stdout, stderr = capsys.readouterr()
    assert exited.value.code == 2, stderr
    assert stdout == ""
    assert says in stderr
    assert "fix:" in stderr
    assert "Traceback" not in stderr


def test_all_wrong_values_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words, problems in (
        (
            ["--port", "x", "--threads", "y"],
            ["--port x: not a whole number", "--threads y: not a whole number"],
        ),
        (["--port", "-1", "--drain-seconds", "-1s"], ["--drain-seconds -1s: not a number, nor one"]),
        (
            ["--port", "-1", "--body-timeout", "0"],
            ["--port -1: must be", "--body-timeout 0s: must be above 0s"],
        ),
    ):
        with pytest.raises(SystemExit):
            main(["serve", "x", *words])
        error = capsys.readouterr().err.removeprefix("mingc: error: ").splitlines()
        assert all(line.strip().startswith(each) for line, each in zip(error, problems, strict=False)), error


def test_a_process_that_is_asked_wrongly_exits_with_2() -> None:
    result = run("nosuch")
    assert (result.returncode, result.stdout) == (2, "")
    assert "No such command" in result.stderr and "fix:" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["bundle", "inspect", "nowhere"],
        ["verify", "nowhere"],
        ["probe", "nowhere"],
        ["export", "nowhere", "--output", "out"],
    ],
)
def test_failing_exits_with_1_and_says_where_and_what_to_do(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as above."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(words)
    stdout, stderr = capsys.readouterr()
    check_failure(exited.value.code, stdout, stderr)
    assert not list(tmp_path.iterdir())


def test_a_process_that_fails_exits_with_1(tmp_path: Path) -> None:
    result = run("serve", "nowhere", cwd=tmp_path)
    check_failure(result.returncode, result.stdout, result.stderr)
    assert not list(tmp_path.iterdir())


def check_failure(code: object, stdout: str, stderr: str) -> None:
    """A path `nowhere` was not found."""
    assert (code, stdout) == (1, ""), stderr
    assert all(each in stderr for each in ("nowhere", "where:", "fix:")), stderr
    assert "Traceback" not in stderr


def test_a_path_that_is_no_text_is_reported_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    result = run("bundle", "inspect", "\udcff", "--json", cwd=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert json.loads(result.stdout)["error"]["where"] == "\udcff"


def test_with_json_a_failure_is_one_object_on_stdout(tmp_path: Path) -> None:
    result = run("bundle", "inspect", "nowhere", "--json", cwd=tmp_path)
    assert result.returncode == 1
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"type", "message", "where", "fix"}
    assert error["type"] == "ManifestError"
    wrongly = run("export", "x", "--json")
    assert wrongly.returncode == 2
    assert json.loads(wrongly.stdout)["error"]["type"] == "ConfigError"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("bundle", "inspect", "nowhere", "--debug", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_doctor_reports_the_documented_fields() -> None:
    result = run("doctor", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document) == {"can_export", "can_serve", "checks", "verdicts"}
    assert set(document["checks"][0]) == {"name", "state", "detail", "needed_for", "fix"}
    assert {check["name"] for check in document["checks"]} >= {
        "python",
        "torch",
        "C++ compiler",
        "cuda",
    }
