"""Which engines of an artifact are run: the default ones, those asked for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manifest_edit import edit_manifest

from mingc import doctor
from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.engine_choice import (
    backend_views,
    choose_engines,
    default_engines,
    explain,
    parse_choice,
    used_backends,
)
from mingc.artifacts.inspection import summarize
from mingc.artifacts.manifest import (
    BackendRefusal,
    BackendTrial,
    EngineRecord,
    EngineTiming,
    FileRecord,
    GraphRecord,
    Manifest,
    Parity,
    parse_manifest,
)
from mingc.errors import ArtifactError, ConfigError, ManifestError
from mingc.host import onnx_library
from mingc.host.machine import Host
from mingc.runtime.engines import backends as loaders
from mingc.runtime.engines import choice
from mingc.runtime.engines.choice import with_engines

FILE = FileRecord(size_bytes=0, sha256="")


def engine(backend: str, dims: dict[str, int] | None = None) -> EngineRecord:
    size = "" if dims is None else "-".join(map(str, dims.values()))
    return EngineRecord(backend=backend, file=f"{backend}{size}", dims=dims, compile_seconds=0.0)


def parity(error: float) -> Parity:
    return Parity(compiled=error, eager=0.0)


@pytest.fixture
def graph(manifest: Manifest) -> GraphRecord:
    return manifest.stages["audio_encoder"].graphs["encode"]


def with_graph(manifest: Manifest, graph: GraphRecord) -> Manifest:
    stage = replace(manifest.stages["audio_encoder"], graphs={"encode": graph})
    return replace(manifest, stages={"audio_encoder": stage})


def chosen_files(manifest: Manifest, graph: GraphRecord, choice: Mapping[str, str]) -> list[str]:
    found = choose_engines(with_graph(manifest, graph), choice).stages["audio_encoder"].graphs["encode"]
    return [each.file for each in found.engines]


def test_words_name_a_backend_for_each_stage() -> None:
    assert parse_choice(()) == {}
    assert parse_choice(("cfm=onnx", " talker = aoti ")) == {"cfm": "onnx", "talker": "aoti"}


@pytest.mark.parametrize("word", ["cfm", "cfm=", "=onnx", "cfm=onnx=aoti", "", "="])
def test_a_word_of_another_form_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="not of the form STAGE=BACKEND") as refused:
        parse_choice((word,))
    assert refused.value.where == "--engines" and "cfm=onnx" in str(refused.value.fix)


def test_every_wrong_word_is_reported() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_choice(("cfm=a", "x", "cfm=b"))
    assert refused.value.message.splitlines() == [
        "--engines x: not of the form STAGE=BACKEND",
        "--engines cfm=b: names stage cfm twice",
    ]


def test_the_first_backend_is_run_unless_another_one_is_asked_for(
    manifest: Manifest, graph: GraphRecord
) -> None:
    both = replace(graph, engines=(engine("aoti"), engine("onnx")))
    assert both.backends == ("aoti", "onnx")
    assert chosen_files(manifest, both, {}) == ["aoti"]
    assert chosen_files(manifest, both, {"audio_encoder": "onnx"}) == ["onnx"]
    assert chosen_files(manifest, both, {"audio_encoder": "aoti"}) == ["aoti"]
    swapped = replace(graph, engines=(engine("onnx"), engine("aoti")))
    assert chosen_files(manifest, swapped, {}) == ["onnx"]


def test_each_size_has_its_own_first_backend(manifest: Manifest, graph: GraphRecord) -> None:
    mixed = replace(
        graph,
        engines=(
            engine("aoti", {"N": 1}),
            engine("rt", {"N": 1}),
            engine("rt", {"N": 2}),
            engine("aoti", {"N": 2}),
        ),
    )
    assert chosen_files(manifest, mixed, {}) == ["aoti1", "rt2"]
    assert chosen_files(manifest, mixed, {"audio_encoder": "rt"}) == ["rt1", "rt2"]
    assert chosen_files(manifest, mixed, {"audio_encoder": "aoti"}) == ["aoti1", "aoti2"]


def test_an_engine_of_every_size_is_not_mixed_with_others(manifest: Manifest, graph: GraphRecord) -> None:
    sizes = [engine("aoti", {"N": size}) for size in (1, 2, 8)]
    first = replace(graph, engines=(engine("onnx"), *sizes))
    assert chosen_files(manifest, first, {}) == ["onnx"]
    assert chosen_files(manifest, first, {"audio_encoder": "aoti"}) == ["aoti1", "aoti2", "aoti8"]
    last = replace(graph, engines=(engine("aoti", {"N": 1}), engine("onnx"), engine("aoti", {"N": 2})))
    assert chosen_files(manifest, last, {}) == ["aoti1", "aoti2"], (
        "a Graph would run the other for every size"
    )
    assert chosen_files(manifest, last, {"audio_encoder": "onnx"}) == ["onnx"]


def test_a_backend_with_some_sizes_only_is_refused(manifest: Manifest, graph: GraphRecord) -> None:
    sparse = replace(graph, engines=(engine("aoti", {"N": 1}), engine("rt", {"N": 2})))
    assert chosen_files(manifest, sparse, {}) == ["aoti1", "rt2"]
    with pytest.raises(
        ConfigError, match=r"engines of rt for audio_encoder.encode only for some sizes, not for N 1"
    ):
        chosen_files(manifest, sparse, {"audio_encoder": "rt"})
    dynamic = replace(graph, engines=(engine("onnx"), engine("aoti", {"N": 1})))
    with pytest.raises(ConfigError, match="only for some sizes, not for N 2"):
        chosen_files(manifest, dynamic, {"audio_encoder": "aoti"})


def test_what_the_artifact_lacks_is_refused_with_what_it_has(manifest: Manifest, graph: GraphRecord) -> None:
    with pytest.raises(ConfigError, match="the artifact has no stage cfm") as refused:
        chosen_files(manifest, graph, {"cfm": "onnx"})
    assert refused.value.fix == "it has audio_encoder" and refused.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"no engine of onnx for audio_encoder\.encode\n") as refused:
        chosen_files(manifest, graph, {"audio_encoder": "onnx"})
    assert refused.value.fix == "it has aoti; or export again with --backend aoti+onnx:audio_encoder"
    tried = replace(
        graph, trial=BackendTrial(device="", refused=(BackendRefusal(backend="onnx", reason="no FFT"),))
    )
    with pytest.raises(ConfigError, match="it was refused at export, no FFT"):
        chosen_files(manifest, tried, {"audio_encoder": "onnx"})


def test_the_parity_is_that_of_the_engines_that_are_run(manifest: Manifest, graph: GraphRecord) -> None:
    both = replace(
        graph,
        engines=(engine("aoti"), engine("onnx")),
        parity=parity(1e-6),
        backend_parity={"aoti": parity(1e-6), "onnx": parity(1e-3)},
    )

    def error(choice: Mapping[str, str]) -> float:
        found = choose_engines(with_graph(manifest, both), choice)
        chosen = found.stages["audio_encoder"].graphs["encode"]
        assert not chosen.backend_parity, "of one choice there is one parity"
        return chosen.parity.compiled

    assert (error({}), error({"audio_encoder": "onnx"})) == (1e-6, 1e-3)
    mixed = replace(both, engines=(engine("aoti", {"N": 1}), engine("onnx", {"N": 2})))
    assert backend_views(mixed)[0].parity.compiled == 1e-3, "the worst of those that are run"


def test_every_engine_is_in_one_of_the_views_that_verify_replays(graph: GraphRecord) -> None:
    assert [view.engines for view in backend_views(graph)] == [graph.engines]
    both = replace(graph, engines=(engine("aoti"), engine("onnx"), engine("rt")))
    assert [view.backends for view in backend_views(both)] == [("aoti",), ("onnx",), ("rt",)]
    mixed = replace(
        graph, engines=(engine("aoti", {"N": 1}), engine("rt", {"N": 2}), engine("aoti", {"N": 2}))
    )
    views = backend_views(mixed)
    assert [each.file for each in views[0].engines] == ["aoti1", "rt2"]
    assert {each.file for view in views for each in view.engines} == {"aoti1", "rt2", "aoti2"}


def test_a_trial_is_explained_in_one_line(graph: GraphRecord) -> None:
    assert explain(graph) == ""
    assert explain(replace(graph, engines=(engine("aoti"), engine("onnx")))) == "asked for by name"
    timings = tuple(
        EngineTiming(backend=backend, dims={"N": size}, median_us=us, calls=5)
        for backend, size, us in [("aoti", 1, 10.0), ("onnx", 1, 40.0), ("aoti", 2, 30.0), ("onnx", 2, 15.0)]
    )
    refused = (BackendRefusal(backend="rt", reason="no driver\n  here"),)
    trial = BackendTrial(device="Xeon", timings=timings, refused=refused)
    assert explain(replace(graph, trial=trial)) == (
        "time relative to the fastest, 2 sizes, Xeon: aoti 1.41, onnx 2.00; rt refused: no driver here"
    )
    one = BackendTrial(device="Xeon", timings=timings[:2])
    assert explain(replace(graph, trial=one)) == (
        "time relative to the fastest, one size, Xeon: aoti 1.00, onnx 4.00"
    )
    assert explain(replace(graph, trial=BackendTrial(device=""))) == "no other backend is installed"


def test_inspect_lists_graphs_with_a_choice(manifest: Manifest, graph: GraphRecord) -> None:
    def rows(each: GraphRecord) -> list[tuple[Any, ...]]:
        found = summarize(Artifact(root=Path("a"), manifest=with_files(with_graph(manifest, each))))
        return [(row.graph, row.runs, row.also, row.reason) for row in found.backends]

    def with_files(manifest: Manifest) -> Manifest:
        files = {name: replace(FILE, size_bytes=1) for name in manifest.named_files()}
        return replace(manifest, files=files)

    assert rows(graph) == []
    both = replace(graph, engines=(engine("aoti"), engine("onnx")))
    assert rows(both) == [("audio_encoder.encode", ("aoti",), ("onnx",), "asked for by name")]
    tried = replace(graph, trial=BackendTrial(device=""))
    assert rows(tried) == [("audio_encoder.encode", ("aoti",), (), "no other backend is installed")]


def test_used_backends_lists_the_stages_of_each(manifest: Manifest, graph: GraphRecord) -> None:
    both = replace(graph, engines=(engine("aoti"), engine("onnx")))
    stage = replace(manifest.stages["audio_encoder"], graphs={"encode": both})
    two = replace(manifest, stages={"a": stage, "b": manifest.stages["audio_encoder"]})
    assert used_backends(two) == {"aoti": ["a", "b"], "onnx": ["a"]}


def test_a_backend_that_cannot_be_loaded_is_refused_and_nothing_takes_its_place(
    manifest: Manifest, graph: GraphRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Artifact(
        root=Path("here"),
        manifest=with_graph(manifest, replace(graph, engines=(engine("rt"), engine("aoti")))),
    )
    monkeypatch.setattr(
        choice,
        "unavailable",
        lambda name, device: ("no driver", "pip install rt") if (name, device) == ("rt", "cpu") else None,
    )
    with pytest.raises(ArtifactError, match="engines of audio_encoder need backend rt: no driver") as refused:
        with_engines(both, ())
    assert refused.value.fix == (
        "pip install rt; or ask for other engines of this artifact: --engines audio_encoder=aoti"
    )
    with monkeypatch.context() as neither:
        neither.setattr(choice, "unavailable", lambda name, device: ("no driver", f"pip install {name}"))
        with pytest.raises(ArtifactError) as refused:
            with_engines(both, ())
        assert refused.value.fix == "pip install rt", "the other one is not installed either"
    found = with_engines(both, ("audio_encoder=aoti",))
    assert found.manifest.stages["audio_encoder"].graphs["encode"].backends == ("aoti",)
    assert with_engines(both, (), loads=("cfm",)), "its engines are not loaded"
    alone = replace(both, manifest=with_graph(manifest, replace(graph, engines=(engine("rt"),))))
    with pytest.raises(ArtifactError) as refused:
        with_engines(alone, ())
    assert refused.value.fix == "pip install rt"
    # The other backend has no engine of a second graph.
    graphs = {"encode": replace(graph, engines=(engine("rt"), engine("aoti"))),
              "more": replace(graph, spec=replace(graph.spec, name="more"), engines=(engine("rt"),))}  # fmt: skip
    stage = replace(manifest.stages["audio_encoder"], graphs=graphs)
    partly = replace(both, manifest=replace(manifest, stages={"audio_encoder": stage}))
    with pytest.raises(ArtifactError) as refused:
        with_engines(partly, ())
    assert refused.value.fix == "pip install rt"


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


def test_two_engines_of_one_backend_and_size_are_refused(manifest: Manifest, graph: GraphRecord) -> None:
    def read(each: GraphRecord) -> Manifest:
        changed = with_graph(manifest, each)
        files = {name: FILE for name in changed.named_files()}
        return parse_manifest(replace(changed, files=files).to_json().encode(), "m")

    both = replace(graph, engines=(engine("aoti"), engine("onnx")))
    assert read(both).stages["audio_encoder"].graphs["encode"].backends == ("aoti", "onnx")
    with pytest.raises(ManifestError, match="two engines of one backend for the same sizes"):
        read(replace(graph, engines=(engine("onnx"), engine("aoti"), engine("onnx"))))
    with pytest.raises(ManifestError, match="the parity of rt, but no engine of it"):
        read(replace(both, backend_parity={"aoti": parity(0.0), "rt": parity(0.0)}))


def test_default_engines_of_a_graph_with_one_backend_are_all_of_them(graph: GraphRecord) -> None:
    sizes = tuple(engine("aoti", {"N": size}) for size in (1, 2, 8))
    assert default_engines(replace(graph, engines=sizes)) == sizes
    assert default_engines(graph) == graph.engines


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(
        doctor, "current_host", lambda device: Host(torch="2.13.0", device="cpu", capability="AVX512")
    )
    return monkeypatch


def test_doctor_names_the_backends_of_a_stage(artifact_path: Path, here: pytest.MonkeyPatch) -> None:
    (verdict,) = doctor._verdicts(artifact_path, set())
    assert (verdict.backend, verdict.others, verdict.works) == ("aoti", (), True)
    add_engine(artifact_path, "onnx")
    (verdict,) = doctor._verdicts(artifact_path, set())
    assert (verdict.backend, verdict.others, verdict.works) == ("aoti", ("onnx",), True)
    here.setattr(
        doctor,
        "unavailable",
        lambda name, device: ("no driver", "pip install rt") if (name, device) == ("aoti", "cpu") else None,
    )
    (verdict,) = doctor._verdicts(artifact_path, set())
    assert not verdict.works and verdict.problem == "its engines need backend aoti: no driver"
    assert verdict.fix == "pip install rt; or pass --engines audio_encoder=onnx"
    here.setattr(doctor, "unavailable", lambda name, device: ("no driver", "pip install rt"))
    (verdict,) = doctor._verdicts(artifact_path, set())
    assert (verdict.others, verdict.fix) == ((), "pip install rt")


def test_doctor_offers_backends_with_engines_of_all_graphs(manifest: Manifest, graph: GraphRecord) -> None:
    """`--engines` refuses others."""
    both, one = (replace(graph, engines=tuple(map(engine, names))) for names in (("aoti", "onnx"), ("aoti",)))
    stage = manifest.stages["audio_encoder"]
    assert doctor._backends(replace(stage, graphs={"encode": both}), "cpu") == (("aoti",), ("onnx",))
    assert doctor._backends(replace(stage, graphs={"encode": both}), "cuda") == (("aoti",), ()), (
        "not for CUDA here"
    )
    assert doctor._backends(replace(stage, graphs={"encode": both, "more": one}), "cpu") == (("aoti",), ())


def test_doctor_wants_the_aoti_loader_for_aoti_engines_alone(
    artifact_path: Path, here: pytest.MonkeyPatch
) -> None:
    (verdict,) = doctor._verdicts(artifact_path, {"engine loader"})
    assert "cannot load AOTInductor packages" in verdict.problem and not verdict.works

    def only_onnx(document: dict[str, Any]) -> None:
        document["stages"]["audio_encoder"]["graphs"]["encode"]["engines"][0]["backend"] = "onnx"

    edit_manifest(artifact_path, only_onnx)
    (verdict,) = doctor._verdicts(artifact_path, {"engine loader"})
    assert verdict.works and verdict.backend == "onnx"


def add_engine(artifact: Path, backend: str) -> None:
    def change(document: dict[str, Any]) -> None:
        engines = document["stages"]["audio_encoder"]["graphs"]["encode"]["engines"]
        engines.append({**engines[0], "backend": backend})

    edit_manifest(artifact, change)
    open_artifact(artifact)
