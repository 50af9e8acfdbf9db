"""Backends of the engines of an artifact: why they were kept, what their loaders lack, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import (
    BackendRefusal,
    BackendTrial,
    EngineRecord,
    EngineTiming,
    FileRecord,
    GraphRecord,
    Manifest,
    parse_manifest,
)
from mingc.bundles.inspection import explain_trial, summarize
from mingc.errors import ArtifactError, ManifestError
from mingc.host import onnx_library
from mingc.runtime.engines import backends as loaders
from mingc.runtime.engines.backends import check_loadable

FILE = FileRecord(size_bytes=0, sha256="")


def engine(backend: str, dims: dict[str, int] | None = None) -> EngineRecord:
    size = "" if dims is None else "-".join(map(str, dims.values()))
    return EngineRecord(backend=backend, file=f"{backend}{size}", dims=dims, compile_seconds=0.0)


@pytest.fixture
def graph(manifest: Manifest) -> GraphRecord:
    return manifest.stages["audio_encoder"].graphs["encode"]


def with_graph(manifest: Manifest, graph: GraphRecord) -> Manifest:
    stage = replace(manifest.stages["audio_encoder"], graphs={"encode": graph})
    return replace(manifest, stages={"audio_encoder": stage})


def test_a_trial_is_explained_in_one_line() -> None:
    timings = tuple(
        EngineTiming(backend=backend, dims={"N": size}, median_us=us, calls=5)
        for backend, size, us in [("aoti", 1, 10.0), ("onnx", 1, 40.0), ("aoti", 2, 30.0), ("onnx", 2, 15.0)]
    )
    refused = (BackendRefusal(backend="rt", reason="no driver\n  here"),)
    trial = BackendTrial(device="Xeon", timings=timings, refused=refused)
    assert explain_trial(trial) == (
        "time relative to the fastest, 2 sizes, Xeon: aoti 1.41, onnx 2.00; rt refused: no driver here"
    )
    one = BackendTrial(device="Xeon", timings=timings[:2])
    assert explain_trial(one) == ("time relative to the fastest, one size, Xeon: aoti 1.00, onnx 4.00")
    assert explain_trial(BackendTrial(device="")) == "no other backend is installed"


def test_inspect_lists_graphs_with_a_choice(manifest: Manifest, graph: GraphRecord) -> None:
    def rows(each: GraphRecord) -> list[tuple[Any, ...]]:
        found = summarize(Artifact(root=Path("a"), manifest=with_files(with_graph(manifest, each))))
        return [(row.graph, row.runs, row.reason) for row in found.backends]

    def with_files(manifest: Manifest) -> Manifest:
        files = {name: replace(FILE, size_bytes=1) for name in manifest.named_files()}
        return replace(manifest, files=files)

    assert rows(graph) == []
    tried = replace(graph, trial=BackendTrial(device=""))
    assert rows(tried) == [("audio_encoder.encode", ("aoti",), "no other backend is installed")]


def test_backends_of_a_manifest_are_listed_with_their_stages(manifest: Manifest, graph: GraphRecord) -> None:
    both = replace(graph, engines=(engine("aoti", {"N": 1}), engine("onnx", {"N": 2})))
    stage = replace(manifest.stages["audio_encoder"], graphs={"encode": both})
    two = replace(manifest, stages={"a": stage, "b": manifest.stages["audio_encoder"]})
    assert two.stages_by_backend() == {"aoti": ["a", "b"], "onnx": ["a"]}


def test_a_backend_that_cannot_be_loaded_is_refused_and_nothing_takes_its_place(
    manifest: Manifest, graph: GraphRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = replace(graph, engines=(engine("aoti", {"N": 1}), engine("rt", {"N": 2})))
    artifact = Artifact(root=Path("here"), manifest=with_graph(manifest, mixed))
    monkeypatch.setattr(
        loaders,
        "unavailable",
        lambda name, device: ("no driver", "pip install rt") if (name, device) == ("rt", "cpu") else None,
    )
    with pytest.raises(ArtifactError, match="engines of audio_encoder need backend rt: no driver") as refused:
        check_loadable(artifact)
    assert (refused.value.where, refused.value.fix) == ("here", "pip install rt")
    check_loadable(artifact, ("cfm",))  # its engines are not loaded
    check_loadable(replace(artifact, manifest=with_graph(manifest, graph)))


def test_a_loader_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        assert loaders.unavailable("aoti", device) is None
    assert loaders.unavailable("onnx", "cpu") is None
    assert loaders.unavailable("onnx", "cuda") == (
        "this ONNX Runtime has no CUDA provider",
        "pip uninstall onnxruntime; pip install 'mingc[onnx-gpu]'",
    ), "the tests have the distribution for CPUs"
    reason, fix = loaders.unavailable("none", "cpu") or ("", "")
    assert reason.startswith("backend none is not one of aoti") and "install the distribution" in fix

    def find_nothing(name: str) -> ModuleSpec | None:
        return None

    def find_here(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))

    def use(find: Callable[[str], ModuleSpec | None]) -> None:
        monkeypatch.setattr(onnx_library, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=find)))

    use(find_here)
    assert loaders.unavailable("onnx", "cuda") is not None
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").touch()
    assert loaders.unavailable("onnx", "cuda") is None
    use(find_nothing)
    for device, extra in (("cpu", "onnx"), ("cuda", "onnx-gpu")):
        reason, fix = loaders.unavailable("onnx", device) or ("", "")
        assert reason == "ONNX Runtime is not installed" and fix.endswith(f"pip install 'mingc[{extra}]'")


def test_two_engines_of_one_size_are_refused(manifest: Manifest, graph: GraphRecord) -> None:
    def read(each: GraphRecord) -> Manifest:
        changed = with_graph(manifest, each)
        files = {name: FILE for name in changed.named_files()}
        return parse_manifest(replace(changed, files=files).to_json().encode(), "m")

    one, two = {"N": 1, "T4": 8}, {"N": 2, "T4": 8}
    mixed = replace(graph, engines=(engine("aoti", one), engine("onnx", two)))
    assert read(mixed).stages["audio_encoder"].graphs["encode"].backends == ("aoti", "onnx")
    for engines in (
        (engine("aoti"), engine("onnx")),
        (engine("aoti", one), engine("onnx", one)),
        (engine("aoti"), engine("onnx", two)),
    ):
        with pytest.raises(ManifestError, match="two engines for the same sizes"):
            read(replace(graph, engines=engines))
