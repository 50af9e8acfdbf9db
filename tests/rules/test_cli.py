"""The command line: every option is pinned, exit codes, where errors go, and that help needs no torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import mingc
from mingc.cli import commands, main

OPTIONS = {
    "bundle diff": "--debug --json FIRST SECOND",
    "bundle inspect": "--debug --json ARTIFACT",
    "bundle keygen": "--debug --json KEY",
    "bundle pack": "--debug --force --json --model-licence --oci --with-tensorrt --with-wheels ARTIFACT OUTPUT",
    "bundle prune": "--cache --debug --dry-run --json FOLDER",
    "bundle sign": "--comment --debug --json --secret-key BUNDLE",
    "bundle unpack": "--debug --force --json --share BUNDLE OUTPUT",
    "bundle verify-signature": "--debug --json --public-key BUNDLE",
    "demo": "--checkpoint --debug --force --json --output",
    "doctor": "--debug --json --strict ARTIFACTS",
    "export": "--autotune --backend --batch-sizes --cache --cache-limit --debug --dtype --force --jobs --json "
    "--max-model-len --model-name --no-cache --output --prefill-chunk-size --quantize --stages "
    "--synthetic --target --tp CHECKPOINT",
    "plan": "--answer-tokens --chats --debug --gpu --json --listeners --prompt-tokens --thinker --token-rate "
    "--utilisation",
    "probe": "--baseline --batch --beside --cache --cold-start --compare --context --debug --engine --html "
    "--jobs --json --repetitions --synthetic --tolerance --transfers ARTIFACT",
    "serve": "--allow-media-host --api-key-file --body-idle-timeout --body-timeout --check-hashes --cors-origin "
    "--debug --drain-seconds --encoder-cache --header-timeout --host --json "
    "--log-format --log-level --max-body-bytes --max-concurrent-requests --max-connections --max-media-bytes "
    "--max-media-memory --max-queue --max-speech-characters --max-speech-seqs --max-total-body-bytes "
    "--max-total-tokens --media-decode-timeout --media-root --media-timeout --open-metrics --parse-special-tokens "
    "--port --prefix-cache --require-signature --self-check --served-model-name --shutdown-timeout --speech-lead "
    "--step-timeout --talker-device --threads --tp --write-timeout ARTIFACT",
    "synth": "--config --debug --json --layers --seed OUTPUT",
    "verify": "--against --debug --json --no-replay --reference ARTIFACT",
}


# What an option is when it is not given; those that are not named here are off, empty or chosen later.
DEFAULTS: dict[str, dict[str, object]] = {
    "demo": {"--output": Path("demo")},
    "export": {
        **{
            "--target": "cpu",
            "--dtype": "float32",
            "--tp": 1,
            "--jobs": 1,
            "--autotune": True,
            "--cache-limit": 20.0,
        },
        **{"--max-model-len": 4096, "--prefill-chunk-size": 256, "--batch-sizes": "1,2,4,8"},
        **{"--backend": ("aoti",), "--model-name": "ming-omni"},
    },
    "plan": {
        **{"--listeners": 0, "--chats": 0, "--gpu": "h200", "--thinker": "fp8", "--prompt-tokens": 1024},
        **{"--answer-tokens": 300, "--token-rate": 20.0, "--utilisation": 0.7},
    },
    "probe": {"--context": 256, "--tolerance": 0.1, "--cold-start": True, "--transfers": True},
    "serve": {
        **{"--host": "127.0.0.1", "--port": 8000, "--max-concurrent-requests": 256, "--max-queue": 128},
        **{"--max-body-bytes": 128 << 20, "--max-total-body-bytes": 512 << 20, "--max-media-bytes": 96 << 20},
        **{
            "--encoder-cache": 512 << 20,
            "--max-media-memory": 384 << 20,
            "--media-decode-timeout": 60.0,
            "--max-speech-characters": 32768,
        },
        **{
            "--header-timeout": 10.0,
            "--body-timeout": 60.0,
            "--body-idle-timeout": 15.0,
            "--write-timeout": 60.0,
        },
        **{
            "--media-timeout": 30.0,
            "--speech-lead": 3,
            "--step-timeout": 60.0,
            "--drain-seconds": 2.0,
            "--shutdown-timeout": 5.0,
        },
        **{"--log-level": "info", "--log-format": "text", "--check-hashes": True, "--prefix-cache": True},
    },
    "synth": {"--config": "tiny", "--seed": 0},
    "bundle unpack": {"--share": True},
}


@pytest.fixture(autouse=True)
def logging_of_other_tests() -> Iterator[None]:
    """A command in this process sends logs to the stderr of its test, which is closed after it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


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


def leaves(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found.update(leaves(command, f"{prefix}{name} "))
        else:
            found[f"{prefix}{name}"] = command
    return found


def test_every_option_is_pinned() -> None:
    """A new option is a decision: add it here, to the README where it matters, and to the CHANGELOG."""
    seen = {}
    for name, command in leaves(commands).items():
        words = [p.opts[0] if isinstance(p, click.Option) else p.human_readable_name for p in command.params]
        seen[name] = " ".join(sorted(words))
    assert seen == OPTIONS


def test_every_default_is_pinned() -> None:
    for name, command in leaves(commands).items():
        with click.Context(command) as context:
            given = {
                option.opts[0]: option.get_default(context)
                for option in command.params
                if isinstance(option, click.Option)
            }
        chosen = {
            option: value
            for option, value in given.items()
            if isinstance(value, (str, int, float, tuple, Path)) and value is not False and value != ()
        }
        assert chosen == DEFAULTS.get(name, {}), name


def test_every_option_has_help_and_is_spelled_in_full() -> None:
    for name, command in leaves(commands).items():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"
                assert parameter.help.endswith("."), f"{name} {parameter.opts}"
                assert all(word.startswith("--") for word in parameter.opts), f"{name} {parameter.opts}"


def test_help_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mingc.cli import main; main(sys.argv[1:])"
    )
    for words in (["--help"], ["export", "--help"], ["serve", "--help"], ["bundle", "inspect", "--help"]):
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
        (["export", "x", "--output", "y", "--tp", "3"], "--tp 3"),
        (["export", "x", "--output", "y", "--target", "tpu"], "tpu"),
        (["export", "x", "--output", "y", "--batch-sizes", "2,1"], "--batch-sizes 2,1: must be ascending"),
        (["export", "x", "--output", "y", "--batch-sizes", "0,1"], "--batch-sizes 0,1: must be ascending"),
        (
            ["export", "x", "--output", "y", "--batch-sizes", "1,4,4"],
            "--batch-sizes 1,4,4: must be ascending",
        ),
        (["export", "x", "--output", "y", "--batch-sizes", "1,two"], "--batch-sizes 1,two: not a list"),
        (["export", "x", "--output", "y", "--batch-sizes", ""], "--batch-sizes is empty"),
        (["export", "x", "--output", "y", "--batch-sizes", "1,,2"], "--batch-sizes 1,,2: an item"),
        (["export", "x", "--output", "y", "--stages", "talker,"], "--stages talker,: an item"),
        (["probe", "x", "--batch", ",8"], "--batch ,8: an item"),
        (["probe", "x", "--engine", "talker, ,cfm"], "--engine talker, ,cfm: an item"),
        (["serve", "x", "--port", "99999"], "99999"),
        (["probe"], "nothing to probe"),
        (["verify", "x", "--reference", "a", "--against", "b"], "--reference and --against mean the same"),
        (["probe", "x", "--batch", "1,two"], "--batch 1,two: not a list"),
        (["probe", "x", "--engine", ","], "--engine is empty"),
        (["probe", "x", "--engine", "cfm", "--compare", "patch-embed"], "--compare patch-embed: --engine"),
        (["probe", "x", "--tolerance", "-1"], "--tolerance -1"),
        (["probe", "x", "--tolerance", "nan"], "--tolerance nan"),
        (["probe", "x", "--baseline", "nowhere.json"], "nowhere.json"),
        (["serve", "x", "--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
        (["serve", "x", "--max-total-body-bytes", "1000"], "--max-total-body-bytes 1000 is below"),
        (["serve", "x", "--cors-origin", "example.org"], "--cors-origin 'example.org' is not"),
        (["serve", "x", "--api-key-file", "nowhere.txt", "--port", "0"], "no API keys in nowhere.txt"),
        (["serve", "x", "--max-speech-seqs", "0"], "--max-speech-seqs is 0"),
        (["serve", "x", "--media-root", ""], "'--media-root': the path is empty"),
        (["export", "x", "--output", "y", "--no-cache", "--cache", "z"], "--cache and --no-cache contradict"),
        (["synth", "x", "--config", "nowhere"], "nowhere holds no config.json"),
        (["synth", ".", "--config", "tiny"], ". exists"),
        (["synth", "x", "--layers", "0"], "--layers 0: must be at least 1"),
        (["export", "", "--output", "y"], "'CHECKPOINT': the path is empty"),
        (["serve", "x", "--host", "a" * 300, "--port", "0"], "not a host name"),
        (["demo", "--output", "/dev/null"], "cannot create the folder /dev/null"),
        (["serve", "x", "--served-model-name", " "], "--served-model-name is empty"),
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
        ["serve", "nowhere"],
        ["export", "nowhere", "--output", "out"],
    ],
)
def test_failing_exits_with_1_and_says_where_and_what_to_do(words: list[str], tmp_path: Path) -> None:
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "nowhere" in result.stderr
    assert "where:" in result.stderr
    assert "fix:" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


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
    assert set(document) == {"can_export", "can_serve", "checks", "targets", "verdicts"}
    assert set(document["checks"][0]) == {"name", "state", "detail", "needed_for", "fix"}
    assert {check["name"] for check in document["checks"]} >= {
        "python",
        "torch",
        "C++ compiler",
        "engine loader",
    }
