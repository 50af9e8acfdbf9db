"""An artifact on disk: whole or not there, and every change found."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from manifest_edit import edit_manifest
from safetensors.numpy import save_file

import mingc
from mingc.artifacts import file_region
from mingc.artifacts.artifact import (
    Artifact,
    check_fingerprint,
    check_hashes,
    check_replaceable,
    new_artifact,
    open_artifact,
    write_manifest,
)
from mingc.artifacts.manifest import FILE_NAME, FileRecord, Manifest, StageRecord, TunedKernel
from mingc.artifacts.stage_graph import CLIENT, Edge, StageGraph, StageNode
from mingc.artifacts.target import Host, KernelConfig
from mingc.bundles.inspection import summarize
from mingc.console.report import show
from mingc.errors import ArtifactError, ConfigError, IncompatibleError, IntegrityError
from mingc.runtime.talker.planner import load_voice


def test_an_artifact_opens_and_its_hashes_hold(artifact_path: Path) -> None:
    artifact = open_artifact(artifact_path)
    check_hashes(artifact)
    assert artifact.path("weights/audio.bin").is_file()


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(ZeroDivisionError), new_artifact(tmp_path / "b", replace_existing=False) as work:
        (work / "half").write_text("half")
        write_manifest(work, replace(manifest, stages={}, parameters={}, graph=StageGraph(), voices=()))
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_failed_replacement_leaves_the_old_artifact(artifact_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_artifact(artifact_path, replace_existing=True):
        raise ZeroDivisionError
    check_hashes(open_artifact(artifact_path))
    assert list(artifact_path.parent.iterdir()) == [artifact_path]


def test_a_replacement_takes_the_place_of_the_old_artifact(artifact_path: Path, manifest: Manifest) -> None:
    with new_artifact(artifact_path, replace_existing=True) as work:
        write_manifest(
            work, replace(manifest, model="second", stages={}, parameters={}, graph=StageGraph(), voices=())
        )
    artifact = open_artifact(artifact_path)
    assert artifact.manifest.model == "second"
    assert not artifact.manifest.files
    assert list(artifact_path.parent.iterdir()) == [artifact_path]


# Replaces the artifact argv[1] again and again, killed before the first rename or removal, then the second, and so on.
_REPLACE = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path
from mingc.artifacts.artifact import check_hashes, new_artifact, open_artifact, write_manifest
from mingc.errors import ArtifactError

root = Path(sys.argv[1])

def replace_artifact(left):
    def kill_at_last(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    old = open_artifact(root)
    with new_artifact(root, replace_existing=True) as work:
        for name in old.manifest.files:
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes((root / name).read_bytes())
        write_manifest(work, replace(old.manifest, model="second"))
        sys.addaudithook(kill_at_last)

def whole_artifacts():
    for folder in root.parent.iterdir():
        if folder.suffix != ".partial":  # which the next export removes
            try:
                found = open_artifact(folder)
                check_hashes(found)
                yield folder.name, found.manifest.model
            except ArtifactError:
                pass

for left in range(50):
    child = os.fork()
    if not child:
        replace_artifact(left)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    whole = dict(whole_artifacts())
    print(json.dumps([code, whole]), flush=True)
    if code == 0 or not whole:
        break
    if root.name not in whole:  # between two renames: put it back, as its user would
        root.with_name(next(iter(whole))).rename(root)
"""


def test_a_kill_during_the_replacement_leaves_a_whole_artifact(artifact_path: Path) -> None:
    """Killed before each rename and removal in turn: the old artifact or the new one is always there, complete."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
    command = [sys.executable, "-c", _REPLACE, str(artifact_path)]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes, wholes = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert all(wholes), f"killed before change {len(codes) - 1}: no complete artifact is left"
    assert codes[:-1] == (-signal.SIGKILL,) * (len(codes) - 1) and codes[-1] == 0 and len(codes) > 4
    assert wholes[0] == {artifact_path.name: "tiny"}
    assert wholes[-1] == {artifact_path.name: "second"}
    assert list(artifact_path.parent.iterdir()) == [artifact_path]


def test_a_new_artifact_that_cannot_be_put_in_place_leaves_the_old_one(artifact_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No such file"),
        new_artifact(artifact_path, replace_existing=True) as work,
    ):
        work.rename(work.with_name("gone"))
    check_hashes(open_artifact(artifact_path))


def test_an_existing_artifact_is_kept_without_force(artifact_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="exists") as caught,
        new_artifact(artifact_path, replace_existing=False),
    ):
        pass
    assert caught.value.fix is not None and "--force" in caught.value.fix


def test_a_folder_that_is_no_artifact_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(ConfigError, match="is not an artifact"),
        new_artifact(tmp_path / "mine", replace_existing=True),
    ):
        pass
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("replace_existing", [False, True])
def test_what_appears_at_the_output_during_a_build_is_kept_and_so_is_the_build(
    tmp_path: Path, manifest: Manifest, replace_existing: bool
) -> None:
    root = tmp_path / "out"
    with (
        pytest.raises(ConfigError, match="is not an artifact") as caught,
        new_artifact(root, replace_existing=replace_existing) as work,
    ):
        write_manifest(work, replace(manifest, stages={}, parameters={}, graph=StageGraph(), voices=()))
        root.mkdir()
        (root / "thesis.txt").write_text("years of work")
    assert (root / "thesis.txt").read_text() == "years of work"
    (kept,) = set(tmp_path.iterdir()) - {root}
    assert str(kept) in caught.value.message
    assert open_artifact(kept).manifest.model == manifest.model


def test_an_artifact_that_appears_during_a_build_is_kept_without_force(
    tmp_path: Path, manifest: Manifest
) -> None:
    root = tmp_path / "out"
    with pytest.raises(ConfigError, match="exists"), new_artifact(root, replace_existing=False) as work:
        write_manifest(work, replace(manifest, stages={}, parameters={}, graph=StageGraph(), voices=()))
        root.mkdir()
        write_manifest(
            root,
            replace(
                manifest, model="of somebody else", stages={}, parameters={}, graph=StageGraph(), voices=()
            ),
        )
    assert open_artifact(root).manifest.model == "of somebody else"


def test_a_replaced_artifact_that_a_killed_build_left_goes_with_the_next(
    artifact_path: Path, manifest: Manifest
) -> None:
    left = artifact_path.with_name(f".{artifact_path.name}.0123abcd.old")
    mine = artifact_path.with_name(f".{artifact_path.name}.notes.old")
    for folder in (left, mine):
        folder.mkdir()
        (folder / "part").touch()
    with new_artifact(artifact_path, replace_existing=True) as work:
        write_manifest(work, replace(manifest, stages={}, parameters={}, graph=StageGraph(), voices=()))
    assert set(artifact_path.parent.iterdir()) == {artifact_path, mine}


@pytest.mark.parametrize("target", ["artifact", "nowhere"])
def test_a_link_is_never_replaced(artifact_path: Path, target: str) -> None:
    link = artifact_path.with_name("latest")
    link.symlink_to({"artifact": artifact_path.name}.get(target, target))
    with pytest.raises(ConfigError, match="symbolic link"), new_artifact(link, replace_existing=True):
        pytest.fail("nothing is built")
    assert link.is_symlink()
    assert set(artifact_path.parent.iterdir()) == {artifact_path, link}


def test_a_path_that_ends_in_its_parent_is_never_replaced(artifact_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"ends in \.\."),
        new_artifact(artifact_path / "weights" / "..", replace_existing=True),
    ):
        pytest.fail("nothing is built")
    check_hashes(open_artifact(artifact_path))


@pytest.mark.parametrize("words", [".", "/"])
def test_the_working_folder_is_never_replaced(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="working folder"), new_artifact(Path(words), replace_existing=True):
        pytest.fail("nothing is built")
    assert not list(tmp_path.iterdir())


def test_an_artifact_inside_the_working_folder_may_be_replaced_and_one_around_it_not(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact_path.parent)
    check_replaceable(artifact_path, replace_existing=True)
    monkeypatch.chdir(artifact_path / "weights")
    with pytest.raises(ConfigError, match="holds the working folder"):
        check_replaceable(artifact_path, replace_existing=True)


def test_force_is_not_advised_where_it_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError) as caught, new_artifact(tmp_path / "mine", replace_existing=True):
        pytest.fail("nothing is built")
    assert caught.value.fix == "pass another folder"


def test_one_changed_byte_is_found_by_hash(artifact_path: Path) -> None:
    path = artifact_path / "engines/encode.pt2"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    artifact = open_artifact(artifact_path)
    with pytest.raises(IntegrityError, match=r"engines/encode\.pt2: sha256 differs") as caught:
        check_hashes(artifact)
    assert caught.value.fix == "copy the artifact again, or export again"


def test_missing_and_truncated_files_are_all_named_at_once(artifact_path: Path) -> None:
    (artifact_path / "weights/audio.bin").write_bytes(b"short")
    (artifact_path / "voices/DB30.bin").unlink()
    with pytest.raises(IntegrityError) as caught:
        open_artifact(artifact_path)
    assert "2 file(s)" in caught.value.message
    assert "voices/DB30.bin: file is missing" in caught.value.message
    assert "weights/audio.bin: 5 bytes, 850 recorded" in caught.value.message


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_all_files_have_the_permissions_that_the_umask_leaves(
    tmp_path: Path, manifest: Manifest, mask: int
) -> None:
    """safetensors writes files that only their owner may read."""
    before = os.umask(mask)
    try:
        with new_artifact(tmp_path / "out", replace_existing=False) as work:
            (work / "engines").mkdir()
            for name in ("engines/encode.pt2", "weights.safetensors"):
                (work / name).write_bytes(b"x")
                (work / name).chmod(0o600)
            write_manifest(work, manifest)
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {0o666 & ~mask}


@contextmanager
def as_other_user() -> Iterator[None]:
    """Runs as another user, because root may read everything."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["engines/encode.pt2", FILE_NAME])
def test_files_that_a_user_may_not_read_are_reported_as_such(artifact_path: Path, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tiny"
        shutil.copytree(artifact_path, root)
        for path in (Path(folder), root, *root.rglob("*")):
            path.chmod(0o755)
        (root / name).chmod(0)
        with (
            as_other_user(),
            pytest.raises(ArtifactError, match=f"this user may not read {name}\n") as caught,
        ):
            open_artifact(root)
        assert f"chmod -R a+rX {root} as the owner" in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["engines/encode.pt2", "weights/audio.bin"])
def test_bytes_appended_to_a_file_are_found_without_hashing(artifact_path: Path, name: str) -> None:
    with (artifact_path / name).open("ab") as stream:
        stream.write(b"!")
    with pytest.raises(IntegrityError, match=rf"{name}: \d+ bytes, \d+ recorded"):
        open_artifact(artifact_path)


def test_a_hash_covers_a_file_to_its_end(artifact_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is larger than what is read at once."""
    monkeypatch.setattr(file_region, "CHUNK_BYTES", 64)
    path = artifact_path / "weights/audio.bin"
    artifact = open_artifact(artifact_path)
    check_hashes(artifact)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        check_hashes(artifact)


@pytest.mark.parametrize("here", ["2.13.1", "2.13", "2.13.0a0", "2.13.01"])
def test_engines_run_on_no_other_patch_release_of_torch(manifest: Manifest, here: str) -> None:
    """Engines call torch's C++ interface, which may change with every release."""
    with pytest.raises(IncompatibleError, match=rf"torch: built with 2\.13\.0, here {here}\n"):
        check_fingerprint(manifest.fingerprint, Host(torch=here, device="cpu", capability="AVX2"))


@pytest.mark.parametrize(("built_for", "here"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_engines_run_on_no_other_device(manifest: Manifest, built_for: str, here: str) -> None:
    """The device counts even if the capability has the same name."""
    recorded = replace(manifest.fingerprint, device=built_for)
    with pytest.raises(IncompatibleError, match=f"device: built for {built_for}, here {here}"):
        check_fingerprint(recorded, Host(torch="2.13.0", device=here, capability="AVX2"))


def test_all_differences_of_a_machine_come_in_one_error(manifest: Manifest) -> None:
    check_fingerprint(manifest.fingerprint, Host(torch="2.13.0", device="cpu", capability="AVX2"))
    with pytest.raises(IncompatibleError) as caught:
        check_fingerprint(manifest.fingerprint, Host(torch="2.12.1", device="cuda", capability="9.0"))
    assert "torch: built with 2.13.0, here 2.12.1" in caught.value.message
    assert "device: built for cpu, here cuda" in caught.value.message
    assert caught.value.fix is not None and "pip install 'torch==2.13.0'" in caught.value.fix


@pytest.mark.parametrize(
    "here, runs", [("AVX512", True), ("AVX2", True), ("DEFAULT", False), ("NEON", False)]
)
def test_cpu_engines_run_on_their_instruction_set_and_later_ones(
    manifest: Manifest, here: str, runs: bool
) -> None:
    machine = Host(torch="2.13.0", device="cpu", capability=here)
    if runs:
        check_fingerprint(manifest.fingerprint, machine)
    else:
        with pytest.raises(IncompatibleError, match=f"capability: built for AVX2, here {here}"):
            check_fingerprint(manifest.fingerprint, machine)


def test_contents_sum_up_an_artifact(artifact_path: Path) -> None:
    contents = summarize(open_artifact(artifact_path))
    assert contents.files == 4
    assert contents.voices == ("DB30",)
    (stage,) = contents.stages
    assert stage.stage == "audio_encoder"
    assert stage.graphs == ("encode",)
    assert (stage.engines, stage.engine_bytes, stage.weight_bytes) == (1, 900, 850)
    assert (stage.policy, stage.backends, stage.worst_relative_error) == ("once", ("aoti",), 1e-6)


def test_a_summary_lists_stages_in_the_order_of_the_graph_with_their_edges(
    tmp_path: Path, manifest: Manifest
) -> None:
    names = ("voice", "brain", "ear")
    graph = StageGraph(
        nodes=(
            StageNode(name="ear", policy="once"),
            StageNode(name="brain", policy="autoregressive"),
            StageNode(name="voice", policy="stream"),
        ),
        edges=(Edge("ear", "brain", "audio"), Edge("voice", CLIENT, "speech")),
    )
    ranks = (("weights/0", "weights/1"), ("weights/2",))
    stages = {name: StageRecord(is_sharded=True, weights=ranks, graphs={}) for name in names}
    files = {
        f"weights/{index}": FileRecord(size_bytes=size, sha256="")
        for index, size in enumerate((200, 100, 40))
    }
    contents = summarize(
        Artifact(root=tmp_path, manifest=replace(manifest, stages=stages, graph=graph, files=files))
    )
    assert [(stage.stage, stage.policy) for stage in contents.stages] == [
        ("ear", "once"),
        ("brain", "autoregressive"),
        ("voice", "stream"),
    ]
    assert contents.edges == ("ear → brain.audio", "voice → client.speech")
    assert [stage.weight_bytes for stage in contents.stages] == [340, 340, 340], "all ranks"


def test_a_summary_lists_kernel_configurations(
    tmp_path: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    config = KernelConfig(block_n=64, block_k=256, num_warps=4, num_stages=3, tiles_per_program=1)
    kernel = TunedKernel(
        kernel="grouped", tokens=256, hidden_size=4096, intermediate_size=256, experts=256, top_k=8,
        weight_format="bfloat16", up=config, down=replace(config, tiles_per_program=2), block_m=16, swap_operands=True,
        extra_rows=0, us=9.5, default_us=10.5, device="H200",
    )  # fmt: skip
    stage = StageRecord(is_sharded=True, weights=(), graphs={}, kernel_configs=(kernel,))
    only_thinker = replace(manifest, stages={"thinker": stage}, graph=StageGraph())
    contents = summarize(Artifact(root=tmp_path, manifest=only_thinker))
    (row,) = contents.kernel_configs
    assert (row.stage, row.kernel, row.tokens, row.device) == ("thinker", "grouped", 256, "H200")
    assert (row.up, row.down) == ("16 rows 64x256 w4 s3", "16 rows 64x256 w4 s3 x2")
    assert (row.us, row.default_us) == (9.5, 10.5)
    show(contents, as_json=False)
    shown = capsys.readouterr().out
    assert "kernel configs" in shown and "9.50" in shown and "10.5" in shown


def test_an_output_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.raises(ConfigError, match="cannot create a folder"),
        new_artifact(tmp_path / "file" / "artifact", replace_existing=False),
    ):
        pass


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ArtifactError, match="cannot be written"),
        new_artifact(tmp_path / "artifact", replace_existing=False) as work,
    ):
        (work / "part").write_text("some")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_in_the_words_of_a_library_is_reported_as_such(tmp_path: Path) -> None:
    """torch and safetensors do not raise OSError."""
    words = "Error while serializing: I/O error: No space left on device (os error 28)"
    with (
        pytest.raises(
            ArtifactError, match="the artifact cannot be written: No space left on device"
        ) as caught,
        new_artifact(tmp_path / "out", replace_existing=False),
    ):
        raise RuntimeError(words)
    assert "free some space" in (caught.value.fix or "")
    assert not list(tmp_path.iterdir())


def test_a_voice_that_cannot_be_read_is_named(artifact_path: Path) -> None:
    artifact = open_artifact(artifact_path)
    with pytest.raises(ArtifactError, match="voice DB30 cannot be read"):
        load_voice(artifact, artifact.manifest.voices[0])


@pytest.mark.parametrize("num_patches", [4, 5, 6])
def test_a_voice_has_as_many_patches_as_recorded(artifact_path: Path, num_patches: int) -> None:
    """The manifest says 5: a file of another export has another prompt than its transcript."""
    artifact = open_artifact(artifact_path)
    (record,) = artifact.manifest.voices
    tensors = {
        "latents": np.zeros((1, 4 * num_patches, 64), np.float32),
        "embeds": np.zeros((num_patches, 8), np.float32),
        "speaker": np.zeros(8, np.float32),
    }
    save_file(tensors, artifact_path / record.file)
    if num_patches == record.num_patches:
        assert load_voice(artifact, record).embeds.shape == (5, 8)
    else:
        with pytest.raises(ArtifactError, match=f"voice DB30 has {num_patches} patches, 5 recorded"):
            load_voice(artifact, record)


def test_a_folder_in_the_file_table_is_refused(artifact_path: Path) -> None:
    size = (artifact_path / "engines").stat().st_size
    record = {"size_bytes": size, "sha256": "0" * 64}
    edit_manifest(artifact_path, lambda document: document["files"].update(engines=record))
    with pytest.raises(IntegrityError, match="engines: is not a file"):
        open_artifact(artifact_path)


def test_a_summary_has_the_worst_error_and_counts_a_shared_file_once(
    tmp_path: Path, manifest: Manifest
) -> None:
    stage = manifest.stages["audio_encoder"]
    graph = stage.graphs["encode"]
    graphs = {
        name: replace(graph, parity=replace(graph.parity, compiled=error))
        for name, error in (("a", 1e-6), ("b", 3e-4), ("c", 2e-5))
    }
    twice = replace(stage, graphs=graphs, weights=(*stage.weights, *stage.weights))
    files = {
        name: FileRecord(size_bytes=size, sha256="")
        for name, size in (("weights/audio.bin", 300), ("engines/encode.pt2", 40))
    }
    contents = summarize(
        Artifact(root=tmp_path, manifest=replace(manifest, stages={"audio_encoder": twice}, files=files))
    )
    (row,) = contents.stages
    assert (row.worst_relative_error, row.weight_bytes) == (3e-4, 300)
    assert (row.graphs, row.engines, row.engine_bytes) == (("a", "b", "c"), 1, 40)
    assert (contents.files, contents.total_bytes, contents.schema) == (2, 340, manifest.schema)
    assert (contents.model, contents.notes, contents.backends) == (
        "tiny",
        ("one fix-up",),
        (),
    )
