"""Several targets in one artifact: which engines a machine loads, and why not the others. Machines are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingc.artifacts.artifact import Artifact, new_artifact, write_manifest
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import FileRecord, GraphRecord, Manifest, TargetRecord, read_manifest
from mingc.artifacts.target_choice import (
    choose_target,
    explain_targets,
    needed_machine,
    target_view,
    target_views,
    with_target,
)
from mingc.errors import ConfigError, IncompatibleError, ManifestError
from mingc.export import pipeline
from mingc.export.compile.build import GraphResult
from mingc.host.machine import Host

HostOf = Callable[[str], Host]


def machine(capability: str | None = None, *, cpu: str = "AVX2", torch: str = "2.13.0") -> HostOf:
    """A machine with a GPU of this compute capability, or without one."""
    processor = Host(torch=torch, device="cpu", capability=cpu)
    card = processor if capability is None else Host(torch=torch, device="cuda", capability=capability)
    return lambda device: card if device == "cuda" else processor


def variant(manifest: Manifest, target: str, device: str, capability: str) -> TargetRecord:
    """The stages of `manifest` with engine files of their own."""
    stages = {}
    for name, stage in manifest.stages.items():
        graphs = {
            each: replace(
                graph,
                engines=tuple(
                    replace(engine, file=f"engines/{target.replace(':', '-')}/{name}")
                    for engine in graph.engines
                ),
            )
            for each, graph in stage.graphs.items()
        }
        stages[name] = replace(stage, graphs=graphs)
    return TargetRecord(
        target=target, device=device, capability=capability, stages=stages, parameters=manifest.parameters
    )


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    """Engines for a CPU with AVX2 first, then RTX cards, then a GPU of capability 9.0."""
    return replace(
        manifest,
        other_targets=(
            variant(manifest, "rtx:sm86,sm89", "cuda", "8.6,8.9"),
            variant(manifest, "cuda", "cuda", "9.0"),
        ),
    )


def loaded(manifest: Manifest, here: HostOf, asked: str | None = None) -> str:
    return choose_target(manifest, here, asked).fingerprint.target


def test_a_gpu_comes_before_the_processor_and_only_one_that_the_engines_are_for(three: Manifest) -> None:
    assert loaded(three, machine()) == "cpu"
    assert loaded(three, machine("8.9")) == "rtx:sm86,sm89"
    assert loaded(three, machine("9.0")) == "cuda"
    assert loaded(three, machine("12.0")) == "cpu", "no engines for this GPU"
    assert loaded(three, machine("9.0", cpu="DEFAULT")) == "cuda"


def test_among_engines_for_one_gpu_the_first_of_the_export_is_loaded(manifest: Manifest) -> None:
    rtx, cuda = variant(manifest, "rtx:sm89", "cuda", "8.9"), variant(manifest, "cuda", "cuda", "8.9")
    assert loaded(replace(manifest, other_targets=(rtx, cuda)), machine("8.9")) == "rtx:sm89"
    assert loaded(replace(manifest, other_targets=(cuda, rtx)), machine("8.9")) == "cuda"


def test_a_view_has_the_engines_of_one_target_and_the_weights_of_all(three: Manifest) -> None:
    first, rtx, cuda = target_views(three)
    assert first == replace(three, other_targets=())
    assert (rtx.fingerprint.target, rtx.fingerprint.device, rtx.fingerprint.capability) == (
        "rtx:sm86,sm89",
        "cuda",
        "8.6,8.9",
    )
    assert rtx.fingerprint.torch == three.fingerprint.torch
    assert [engine.file for engine in cuda.stages["audio_encoder"].graphs["encode"].engines] == [
        "engines/cuda/audio_encoder"
    ]
    assert {view.stages["audio_encoder"].weights for view in (first, rtx, cuda)} == {("weights/audio.bin",)}
    assert not any(view.other_targets for view in (first, rtx, cuda))
    artifact = with_target(Artifact(Path("x"), three), machine("8.6"))
    assert artifact.manifest == rtx and artifact.root == Path("x")
    assert target_view(three, None) == first and target_view(three, "cuda") == cuda


def test_what_was_asked_for_is_loaded_or_refused(three: Manifest) -> None:
    assert loaded(three, machine("9.0"), "cpu") == "cpu"
    assert loaded(three, machine("8.9"), "rtx:sm89") == "rtx:sm86,sm89", "one of its cards"
    with pytest.raises(
        IncompatibleError, match="the engines for cuda do not run here: built; the GPU here"
    ) as no:
        choose_target(three, machine("8.9"), "cuda")
    assert no.value.fix == (
        "leave --target out, or pass --target cpu; cuda needs a GPU of compute capability 9.0"
    )
    with pytest.raises(ConfigError, match="no engines for rtx:sm89,sm120"):
        choose_target(three, machine("8.9"), "rtx:sm89,sm120")
    with pytest.raises(ConfigError, match="no engines for toaster") as unknown:
        choose_target(three, machine(), "toaster")
    assert "it has those for cpu, rtx:sm86,sm89, cuda:sm90;" in (unknown.value.fix or "")


def test_engines_for_cuda_may_be_asked_for_with_their_gpu(three: Manifest) -> None:
    assert loaded(three, machine("9.0"), "cuda:sm90") == loaded(three, machine("9.0"), "cuda") == "cuda"
    with pytest.raises(IncompatibleError, match="the engines for cuda do not run here"):
        choose_target(three, machine(), "cuda:sm90")
    with pytest.raises(ConfigError, match="no engines for cuda:sm89") as other:
        choose_target(three, machine("8.9"), "cuda:sm89")  # those for RTX cards are of another backend
    assert "cuda:sm90; or export again with --target cuda:sm89" in (other.value.fix or "")
    with pytest.raises(ConfigError, match="--target cuda:90: 90 is not the name of one GPU, such as sm90"):
        choose_target(three, machine("9.0"), "cuda:90")


def test_a_machine_that_no_target_is_for_gets_every_reason(three: Manifest) -> None:
    with pytest.raises(IncompatibleError) as refused:
        choose_target(three, machine("12.0", cpu="DEFAULT"))
    assert refused.value.message.splitlines()[1:] == [
        "  cpu: built; capability: built for AVX2, here DEFAULT",
        "  rtx:sm86,sm89: built; the GPU here has compute capability 12.0",
        "  cuda: built; the GPU here has compute capability 12.0",
    ]
    with pytest.raises(IncompatibleError, match=r"torch: built with 2\.13\.0, here 2\.12\.0"):
        choose_target(three, machine("9.0", torch="2.12.0"))


def test_an_artifact_for_one_target_is_as_before(manifest: Manifest) -> None:
    assert choose_target(manifest, machine()) == manifest
    assert loaded(manifest, machine("9.0"), "cpu") == "cpu"
    with pytest.raises(IncompatibleError, match="this artifact was built for something else"):
        choose_target(manifest, machine(cpu="DEFAULT"))
    (fit,) = explain_targets(manifest, machine())
    assert (fit.target, fit.needs, fit.is_loaded, fit.reason) == (
        "cpu",
        "a CPU with AVX2",
        True,
        "the only one",
    )


def test_every_target_is_explained(three: Manifest) -> None:
    def reasons(here: HostOf, asked: str | None = None) -> list[tuple[bool, str]]:
        return [(each.is_loaded, each.reason) for each in explain_targets(three, here, asked)]

    absent = (False, "built; this machine has no CUDA device")
    assert reasons(machine()) == [(True, "no CUDA device"), absent, absent]
    assert reasons(machine("8.9")) == [
        (False, "runs here as well: --target cpu asks for it"),
        (True, "the first target with engines for this GPU"),
        (False, "built; the GPU here has compute capability 8.9"),
    ]
    assert reasons(machine("12.0"))[0] == (True, "no engines for this GPU")
    assert reasons(machine("8.9"), "cpu")[:2] == [
        (True, "asked for by --target"),
        (False, "runs here as well: --target rtx:sm86,sm89 asks for it"),
    ]
    assert not any(is_loaded for is_loaded, _ in reasons(machine(), "cuda")), "nothing takes its place"
    fits = explain_targets(three, machine())
    assert [each.runs for each in fits] == [True, False, False]
    assert (
        needed_machine(target_views(three)[1].fingerprint) == "an RTX card of compute capability 8.6 or 8.9"
    )


def test_torch_is_named_where_it_alone_differs(three: Manifest) -> None:
    fits = explain_targets(three, machine("9.0", torch="2.12.0"))
    assert fits[2].reason == "built; torch: built with 2.13.0, here 2.12.0"


def written(root: Path, manifest: Manifest) -> Path:
    with new_artifact(root, replace_existing=False) as work:
        for name in {*manifest.named_files()}:
            (work / name).parent.mkdir(exist_ok=True, parents=True)
            (work / name).write_bytes(b"x")
        write_manifest(work, manifest)
    return root


def test_a_manifest_with_several_targets_reads_back(three: Manifest, tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path / "a", three))
    assert replace(manifest, files={}) == three
    assert "engines/cuda/audio_encoder" in manifest.files


def change_stage(record: TargetRecord, **changes: Any) -> TargetRecord:
    return replace(record, stages={name: replace(each, **changes) for name, each in record.stages.items()})


def without_engines(graph: GraphRecord) -> GraphRecord:
    return replace(graph, engines=())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda each: replace(each, target="cpu"), "the target cpu is there twice"),
        (lambda each: change_stage(each, weights=("voices/DB30.bin",)), "has other weights files for rtx:sm86,sm89"),
        (lambda each: change_stage(each, graphs={}), "stage audio_encoder has no graph"),
        (lambda each: replace(each, stages={}, parameters={}), "in the stage graph only"),
        (
            lambda each: replace(
                each, parameters={"audio_encoder": {**encode(each.parameters["audio_encoder"]), "max_frames": -1}}
            ),
            r"\$.other_targets\[0\].parameters.audio_encoder",
        ),
    ],
)  # fmt: skip
def test_records_of_other_targets_are_checked_like_the_first(
    edit: Callable[[TargetRecord], TargetRecord], message: str, three: Manifest, tmp_path: Path
) -> None:
    first, *others = three.other_targets
    with pytest.raises(ManifestError, match=message):
        read_manifest(written(tmp_path / "a", replace(three, other_targets=(edit(first), *others))))


def test_a_file_of_another_target_must_be_in_the_file_table(three: Manifest, tmp_path: Path) -> None:
    path = written(tmp_path / "a", three)
    manifest = read_manifest(path)
    files: dict[str, FileRecord] = {
        name: each for name, each in manifest.files.items() if "engines/cuda" not in name
    }
    (path / "manifest.json").write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    with pytest.raises(ManifestError, match="engines/cuda/audio_encoder is not in the file table"):
        read_manifest(path)


def test_a_golden_that_differs_from_that_of_the_first_target_is_kept(
    manifest: Manifest, tmp_path: Path
) -> None:
    (graph,) = manifest.stages["audio_encoder"].graphs.values()
    result = GraphResult(
        stage="audio_encoder", record=replace(graph, golden="goldens/cuda/g.bin"), peak_rss_bytes=1
    )
    (tmp_path / "goldens" / "cuda").mkdir(parents=True)
    run: Any = SimpleNamespace(_folder=tmp_path, _subfolder="cuda")
    own, shared = tmp_path / "goldens/cuda/g.bin", tmp_path / "goldens/g.bin"
    own.write_bytes(b"one")
    shared.write_bytes(b"two")
    assert pipeline._Run._with_shared_golden(run, result).record.golden == "goldens/cuda/g.bin"
    assert own.exists()
    shared.write_bytes(b"one")
    assert pipeline._Run._with_shared_golden(run, result).record.golden == "goldens/g.bin"
    assert not own.exists() and shared.exists()


def test_each_target_has_parameters_and_recorded_requests_of_its_own(three: Manifest) -> None:
    rtx, cuda = three.other_targets
    own = replace(rtx, parameters={"audio_encoder": {"hop_samples": 1}}, served_goldens="goldens/rtx")
    views = target_views(replace(three, served_goldens="goldens/first", other_targets=(own, cuda)))
    assert [view.served_goldens for view in views] == ["goldens/first", "goldens/rtx", cuda.served_goldens]
    assert [view.parameters for view in views] == [three.parameters, own.parameters, cuda.parameters]


def test_a_target_that_does_not_run_here_is_not_offered_instead(three: Manifest) -> None:
    """Only the engines for RTX cards would run on this machine."""
    here = machine("8.6", cpu="DEFAULT")
    with pytest.raises(IncompatibleError) as caught:
        choose_target(three, here, "cuda")
    assert "pass --target rtx:sm86,sm89; cuda needs" in str(caught.value.fix)
    with pytest.raises(IncompatibleError, match="this artifact was built for something else") as alone:
        choose_target(three, machine(cpu="DEFAULT"), "cpu")
    assert "--target cpu" in str(alone.value.fix), "nothing else runs here: the plain advice"
