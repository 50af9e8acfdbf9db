"""A stage and a backend outside mingc are exported, loaded, run, verified, probed and listed; a toy encoder serves."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mingc_command import CHECKPOINT, REPOSITORY, mingc_here
from safetensors.torch import load_file

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.stage_graph import CLIENT, Edge
from mingc.errors import ArtifactError, ConfigError, ExportError
from mingc.runtime.engines.stage_loader import load_stage

TOY = Path(__file__).parent / "toy"
THINKER = ("--max-model-len", 256, "--prefill-chunk-size", 64)
pytestmark = pytest.mark.timeout(300)  # exports


def mingc(*words: object) -> Any:
    """Run `mingc WORDS --json` in a process that finds the toy distribution; returns the document on stdout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TOY), str(REPOSITORY)))}
    done = subprocess.run(
        [sys.executable, "-m", "mingc", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


_STAGE = """
from mingc.export.stage import Stage
Stage = type("Any", (Stage,), dict.fromkeys(Stage.__abstractmethods__))
STAGE = Stage()
"""


@pytest.fixture
def toy_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy distribution on the import path of this process."""
    monkeypatch.syspath_prepend(str(TOY))
    yield
    for name in ("toy_filter", "toy_encoder", "toy_backend", "toy_engine"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def filter_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy stage, compiled by the toy backend."""
    root = tmp_path_factory.mktemp("plugins") / "filter"
    words = ("--output", root, "--stages", "toy_filter", "--backend", "toy_program", "--batch-sizes", "1,4")
    report = mingc("export", CHECKPOINT, *words, "--jobs", 1)
    assert [(row["stage"], row["graph"], row["backend"]) for row in report["graphs"]] == [
        ("toy_filter", "filter", "toy_program")
    ]
    return root


def test_a_stage_and_a_backend_from_outside_are_listed(filter_artifact: Path, toy_installed: None) -> None:
    (stage,) = mingc_here("bundle", "inspect", filter_artifact, "--json").document["stages"]
    assert (stage["stage"], stage["policy"], stage["backends"]) == ("toy_filter", "once", ["toy_program"])
    assert stage["graphs"] == ["filter"]


def test_a_stage_and_a_backend_from_outside_are_verified(filter_artifact: Path, toy_installed: None) -> None:
    report = mingc_here("verify", filter_artifact, "--json").document
    assert report["passed"] and report["checked"] >= 1


def test_a_stage_and_a_backend_from_outside_are_probed(filter_artifact: Path, toy_installed: None) -> None:
    words = ("--repetitions", 1, "--no-cold-start", "--no-transfers", "--json")
    report = mingc_here("probe", filter_artifact, *words).document
    rows = {(row["engine"], row["sizes"]["B"]) for row in report["engines"]}
    assert rows == {("toy_filter.filter", 1), ("toy_filter.filter", 4)}


def test_a_stage_without_a_consumer_is_loaded_and_run_on_its_own(
    filter_artifact: Path, toy_installed: None
) -> None:
    artifact = open_artifact(filter_artifact)
    parameters = importlib.import_module("toy_filter").ToyParameters
    norm = "model.model.norm.weight"
    shard = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"][norm]
    scale = load_file(CHECKPOINT / shard)[norm].float()
    assert artifact.manifest.parameters_of("toy_filter", parameters) == parameters(len(scale), -1.0)
    assert "toy_filter" not in {edge.source for edge in artifact.manifest.graph.edges}
    x = torch.arange(4.0 * len(scale)).view(4, -1)
    outputs = load_stage(artifact, "toy_filter", torch.device("cpu"))["filter"].run(x=x)
    torch.testing.assert_close(outputs["y"], 2 * scale * x - 1)


def test_an_engine_without_its_loader_is_refused(filter_artifact: Path) -> None:
    with pytest.raises(ArtifactError, match="backend toy_program is not one of aoti"):
        load_stage(open_artifact(filter_artifact), "toy_filter", torch.device("cpu"))


def test_a_backend_says_why_it_cannot_build(toy_installed: None, tmp_path: Path) -> None:
    from mingc.export.recipe import ExportRecipe

    with pytest.raises(ConfigError, match="--backend toy_program: runs on the CPU only"):
        ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path, target="cuda", backend=("toy_program",))
    mixed = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path, backend=("aoti", "toy_program:cfm,talker"))
    assert [mixed.backends_of(name) for name in ("cfm", "thinker", "talker")] == [
        ("toy_program",),
        ("aoti",),
        ("toy_program",),
    ]
    with pytest.raises(
        ConfigError, match=r"--backend none: not one of auto, aoti, eager, onnx, tensorrt, toy_program"
    ):
        ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path, backend=("none",))


def test_two_stages_for_one_port_are_refused(toy_installed: None) -> None:
    from mingc.export.stages import build_graph, discover

    with pytest.raises(
        ConfigError, match="port audio of thinker has several producers: audio_encoder, toy_enc"
    ):
        build_graph(discover().values())


def install(root: Path, distribution: str, entry_points: str) -> None:
    """A distribution with these entry points; `root` is on the import path."""
    info = root / f"{distribution}-0.1.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def test_an_extension_with_the_name_of_a_built_in_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingc.export.stages import discover

    install(tmp_path, "other", "[mingc.stages]\ncfm = other:STAGE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="two stages are called cfm: of mingc and of other"):
        discover()


def test_two_distributions_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mingc.export.compile.backends import find_backend

    for name in ("first", "second"):
        install(tmp_path, name, f"[mingc.backends]\nextra = {name}:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"two backends are called extra: of (first and of second|second and of first)"
    ):
        find_backend("extra")


def test_an_extension_that_cannot_be_imported_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingc.export.compile.backends import find_backend

    (tmp_path / "without_backend.py").write_text("", encoding="utf-8")
    entry_points = {"absent": "no_such_module:BACKEND", "empty": "without_backend:BACKEND"}
    lines = "\n".join(f"{name} = {value}" for name, value in entry_points.items())
    install(tmp_path, "broken", f"[mingc.backends]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in entry_points.items():
        with pytest.raises(ConfigError, match=f"backend {name} cannot be loaded") as caught:
            find_backend(name)
        assert caught.value.where == f"entry point {name} = {value} of broken"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nosuch", "stage other cannot be loaded: ModuleNotFoundError: No module named 'nosuch'"),
        ("def (", "stage other cannot be loaded: SyntaxError"),
        ("{}['key']", "stage other cannot be loaded: KeyError: 'key'"),
        ("raise SystemExit(0)", "stage other cannot be loaded: SystemExit: 0"),
        ("STAGE = object()", "other is not a stage of this name"),
        (_STAGE, "other is not a stage of this name"),
        (f"{_STAGE}\nSTAGE.name = 'other'", "stage other: policy is None, expected one of once, auto"),
        (
            f"{_STAGE}\nSTAGE.name, STAGE.policy, STAGE.edges = 'other', 'once', [1]",
            "stage other: edges is \\[1\\], expected a tuple of Edge",
        ),
    ],
)
def test_a_stage_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    from mingc.export.stages import find

    (tmp_path / "other.py").write_text(code, encoding="utf-8")
    install(tmp_path, "other", "[mingc.stages]\nother = other:STAGE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other", raising=False)
    with pytest.raises(ConfigError, match=message):
        find("other")


def test_parameters_that_are_not_json_are_refused_before_anything_is_compiled(
    toy_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingc.export.plan import plan_export
    from mingc.export.recipe import ExportRecipe
    from mingc.export.run import run

    stage = importlib.import_module("toy_filter")
    recipe = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path / "out", stages=("toy_filter",))
    for wrong in (
        5,
        stage.ToyParameters(width=8, offset=math.nan),
        stage.ToyParameters(width=8, offset=object()),
    ):
        monkeypatch.setattr(stage.ToyFilterStage, "parameters", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ExportError, match="parameters of toy_filter are not a dataclass of JSON values"):
            run(plan_export(recipe), lambda *_: [], lambda step: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_an_encoder_from_outside_takes_the_place_of_the_built_in_one(
    tmp_path: Path, toy_installed: None
) -> None:
    from mingc.media.decoding import InProcessDecoder
    from mingc.prompts.features import AudioFeatures
    from mingc.runtime.service.builder import open_service

    root = tmp_path / "chat"
    words = ("--output", root, "--stages", "toy_encoder,thinker", "--backend", "toy_program")
    mingc("export", CHECKPOINT, *words, *THINKER, "--jobs", 2)
    graph = open_artifact(root).manifest.graph
    assert {*graph.edges} == {Edge("thinker", CLIENT, "text"), Edge("toy_encoder", "thinker", "audio")}
    service = open_service(root, media=InProcessDecoder())
    try:
        assert service.info.has_audio_input and not service.info.has_image and not service.info.has_speech
        assert service._chat is not None and service._chat.audio is not None
        mel = torch.randn(12, 128).numpy()
        (future,) = service._chat.audio.submit([AudioFeatures(mel=mel, num_tokens=3)], [b"the clip"])
        embeddings = future.result(timeout=60)
        assert embeddings.shape[0] == 3 and embeddings.abs().min() > 0
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
