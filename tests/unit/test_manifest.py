"""The manifest on disk: read back whole, refused with words otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from manifest_edit import edit_manifest, read_document

from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import FILE_NAME, SCHEMA, Manifest, read_manifest
from mingc.errors import ManifestError

_OLD = Path(__file__).parent / "manifests"


def change(artifact: Path, **changes: Any) -> None:
    edit_manifest(artifact, lambda document: document.update(changes))


def test_a_manifest_reads_back_as_it_was_written(artifact_path: Path, manifest: Manifest) -> None:
    read = read_manifest(artifact_path)
    assert read.stages == manifest.stages
    assert read.parameters == manifest.parameters
    assert read.voices == manifest.voices
    assert sorted(read.files) == [
        "engines/encode.pt2",
        "goldens/encode.safetensors",
        "voices/DB30.bin",
        "weights/audio.bin",
    ]


def test_voices_are_found_by_name(manifest: Manifest) -> None:
    voice = manifest.voice("DB30")
    assert voice is not None and voice.num_patches == 5
    assert manifest.voice("absent") is None


@pytest.mark.parametrize("name", ["", "manifest.json"])  # a folder of something else, and the file itself
def test_what_holds_no_manifest_is_named(tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / name).touch()
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / name)
    assert "holds no manifest.json" in caught.value.message
    assert caught.value.fix == "pass a folder that mingc export wrote"


def test_a_path_without_anything_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "absent.mingc")
    assert caught.value.message == f"{tmp_path / 'absent.mingc'} does not exist"


@pytest.mark.parametrize("text", ["", "{", "\xff", "[1, 2]", "null"])
def test_a_manifest_that_is_not_ours_is_refused(artifact_path: Path, text: str) -> None:
    (artifact_path / FILE_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError):
        read_manifest(artifact_path)


def test_another_schema_is_refused_with_both_numbers(artifact_path: Path) -> None:
    for other, fix in (
        (
            SCHEMA - 1,
            "export the checkpoint again with this mingc, or install the mingc 0.1.0 that wrote the artifact, "
            f"from before schema {SCHEMA}",
        ),
        (
            99,
            "install the mingc 0.1.0 that wrote the artifact, or a later one; or export the checkpoint again with "
            "this mingc",
        ),
    ):
        change(artifact_path, schema=other)
        with pytest.raises(
            ManifestError, match=f"manifest schema {other}, this mingc reads schema {SCHEMA}"
        ) as caught:
            read_manifest(artifact_path)
        assert caught.value.fix == fix


def test_the_schema_is_read_and_the_one_before_refused(tmp_path: Path) -> None:
    """`manifests/schema-N.json` was written by the code of that schema; keep the last two."""
    files = {int(path.stem.partition("-")[2]): path for path in _OLD.glob("schema-*.json")}
    assert [*sorted(files)] == [SCHEMA - 1, SCHEMA]
    for schema, path in files.items():
        (tmp_path / FILE_NAME).write_bytes(path.read_bytes())
        if schema == SCHEMA:
            manifest = read_manifest(tmp_path)
            assert manifest.model == "tiny" and manifest.voice("DB30") is not None
            assert encode(manifest) | {"sha256": json.loads(path.read_text())["sha256"]} == json.loads(
                path.read_text()
            )
            continue
        with pytest.raises(
            ManifestError, match=f"manifest schema {schema}, this mingc reads schema {SCHEMA}"
        ) as caught:
            read_manifest(tmp_path)
        assert str(caught.value.fix).startswith("export the checkpoint again with this mingc")
        assert caught.value.where == str(tmp_path / FILE_NAME)


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all numbers, strings and nulls, and of empty lists and objects."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not value or not items:
        yield path
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _changed(value: Any) -> Any:
    """Another value of the same kind that a reader would accept in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {None: "x", "": "x"}.get(value, f"{value}x") if not isinstance(value, dict | list) else [value]


def test_every_edited_value_is_refused(artifact_path: Path) -> None:
    whole = read_document(artifact_path)
    paths = [path for path in _leaves(whole) if path not in (("schema",), ("sha256",))]
    assert ("parameters", "audio_encoder", "hop_samples") in paths and len(paths) > 50
    accepted = []
    for path in paths:
        document = copy.deepcopy(whole)
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = _changed(place[path[-1]])
        (artifact_path / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
        try:
            read_manifest(artifact_path)
        except ManifestError:
            continue
        accepted.append(path)
    assert accepted == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document["parameters"]["audio_encoder"].update(hop_samples=161),
        lambda document: document["notes"].clear(),
        lambda document: document.pop("sha256"),
        lambda document: document.update(sha256="0" * 64),
        lambda document: document.update(sha256=None),
    ],
)
def test_an_edited_manifest_says_what_to_do(
    artifact_path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    document = read_document(artifact_path)
    edit(document)
    (artifact_path / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"manifest\.json is not as exported") as caught:
        read_manifest(artifact_path)
    assert caught.value.where == str(artifact_path / FILE_NAME)
    assert caught.value.fix == "copy the artifact again; to change a value, export again"


def test_the_layout_of_a_manifest_does_not_matter(artifact_path: Path) -> None:
    document = read_document(artifact_path)
    expected = read_manifest(artifact_path)
    turned = dict(reversed(document.items()))
    (artifact_path / FILE_NAME).write_text(json.dumps(turned, indent=3), encoding="utf-8")
    assert read_manifest(artifact_path) == expected


def test_a_stage_outside_the_graph_is_refused(artifact_path: Path) -> None:
    graph = json.loads((artifact_path / FILE_NAME).read_text(encoding="utf-8"))["graph"]
    change(artifact_path, graph={**graph, "nodes": [{"name": "cfm", "policy": "loop"}]})
    with pytest.raises(ManifestError) as caught:
        read_manifest(artifact_path)
    assert "stage audio_encoder is not in the stage graph" in caught.value.message
    assert "stage cfm is in the stage graph only" in caught.value.message


def test_a_graph_with_two_producers_of_a_port_is_refused(artifact_path: Path) -> None:
    graph = json.loads((artifact_path / FILE_NAME).read_text(encoding="utf-8"))["graph"]
    edges = [{"source": name, "target": "client", "port": "text"} for name in ("audio_encoder", "client")]
    change(artifact_path, graph={**graph, "edges": edges})
    with pytest.raises(ManifestError, match="port text of client has several producers"):
        read_manifest(artifact_path)


def test_an_unknown_key_is_refused_with_the_nearest_name(artifact_path: Path) -> None:
    change(artifact_path, voizes=[])
    with pytest.raises(ManifestError, match=r"unknown key 'voizes', did you mean voices\?"):
        read_manifest(artifact_path)


def test_a_file_without_a_recorded_hash_is_refused(artifact_path: Path) -> None:
    change(artifact_path, files={})
    with pytest.raises(ManifestError, match=r"engines/encode\.pt2 is not in the file table"):
        read_manifest(artifact_path)


@pytest.mark.parametrize(
    "name",
    ["../elsewhere.bin", "voices/../../elsewhere.bin", "/etc/hostname", "..\\x", "", "a\x00b", "\ud800"],
)
def test_a_file_outside_the_artifact_is_refused(artifact_path: Path, name: str) -> None:
    record = {"size_bytes": 1, "sha256": "0" * 64}
    files = json.loads((artifact_path / FILE_NAME).read_text(encoding="utf-8"))["files"]
    change(artifact_path, files={**files, name: record})
    with pytest.raises(ManifestError, match="is not a path inside the artifact"):
        read_manifest(artifact_path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (
            {"voices": [{"name": "x", "file": "voices/o.bin", "transcript": "", "num_patches": 1}]},
            "voices/o.bin",
        ),
        ({"tokenizers": {"audio_encoder": "tokenizers/o.json"}}, "tokenizers/o.json"),
        ({"speaker_network": "voices/o.onnx"}, "voices/o.onnx"),
    ],
)
def test_records_name_files_of_the_table_only(
    artifact_path: Path, changes: dict[str, Any], name: str
) -> None:
    change(artifact_path, **changes)
    with pytest.raises(ManifestError, match=f"{name} is not in the file table"):
        read_manifest(artifact_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 6, "parameters": ' + '{"a":' * 100_000])
def test_a_manifest_that_is_nested_too_deeply_is_refused(artifact_path: Path, text: str) -> None:
    (artifact_path / FILE_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError, match="nested too deeply"):
        read_manifest(artifact_path)


_GRAPH = ("stages", "audio_encoder", "graphs", "encode")


@pytest.fixture
def sharded(artifact_path: Path) -> Path:
    """An artifact for two ranks, with two weights files for each."""

    def shard(document: dict[str, Any]) -> None:
        document["fingerprint"]["world_size"] = 2
        document["stages"]["audio_encoder"] |= {
            "is_sharded": True,
            "weights": [["weights/audio.bin"] * 2] * 2,
        }

    edit_manifest(artifact_path, shard)
    return artifact_path


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 3])
def test_a_sharded_stage_has_weights_of_every_rank(sharded: Path, num_ranks: int) -> None:
    weights = [["weights/audio.bin"] * 2] * num_ranks
    edit_manifest(sharded, lambda document: document["stages"]["audio_encoder"].update(weights=weights))
    if num_ranks == 2:
        assert read_manifest(sharded).fingerprint.world_size == 2
    else:
        with pytest.raises(ManifestError, match=f"has weights of {num_ranks} ranks, expected 2"):
            read_manifest(sharded)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("graph", "nodes", 0, "policy"), "twice", "'twice' is not one of"),
        (("graph", "nodes", 0, "name"), "a.b", "'a.b' is not a valid stage name"),
        (
            ("graph", "edges"),
            [{"source": "client", "target": "client", "port": "text"}],
            "joins the client with itself",
        ),
        (("parameters", "other"), {}, "parameters of other, which is not a stage"),
        (("parameters",), {}, "stage audio_encoder has no parameters"),
        (("fingerprint", "world_size"), 0, "world_size is 0"),
        (("fingerprint", "dtype"), "float8", "dtype is 'float8', expected float32 or bfloat16"),
        (("stages", "audio_encoder", "is_sharded"), 1, "expected bool"),
        (("stages", "audio_encoder", "weights"), [], "has weights of 0 ranks, expected 1"),
        (("stages", "audio_encoder", "graphs"), {}, "stage audio_encoder has no graph"),
        ((*_GRAPH, "engines"), [], "graph audio_encoder.encode has no engine"),
        ((*_GRAPH, "spec", "layer_instances"), [], "graph audio_encoder.encode has no layer instance"),
        ((*_GRAPH, "spec", "name"), "other", "has the signature of other"),
        ((*_GRAPH, "engines", 0, "dims"), {"T4": 1}, "encode has an engine without a size of N"),
        ((*_GRAPH, "spec", "dims"), [], "graph audio_encoder.encode has no dim N, T4"),
        ((*_GRAPH, "spec", "dims", 0, "maximum"), 10**30, f"encode has the size {10**30}, expected 0 to"),
        ((*_GRAPH, "spec", "inputs", 0, "shape"), ["N", -4], "encode has the size -4, expected 0 to"),
        ((*_GRAPH, "spec", "outputs", 0, "shape"), [2**41], "encode has the size 2199023255552"),
        ((*_GRAPH, "parity", "compiled"), 10**400, "expected a finite number"),
        ((*_GRAPH, "parity", "compiled"), float("nan"), "expected a finite number, found nan"),
        ((*_GRAPH, "parity", "eager"), float("-inf"), "expected a finite number, found -inf"),
        (
            ("stages", "audio_encoder", "weights"),
            [["weights/audio.bin"]] * 2,
            "has weights of 2 ranks, expected 1",
        ),
    ],
)
def test_a_wrong_record_is_refused_with_file_and_fix(
    artifact_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    document = json.loads((artifact_path / FILE_NAME).read_text(encoding="utf-8"))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    change(artifact_path, **document)
    with pytest.raises(ManifestError) as caught:
        read_manifest(artifact_path)
    assert message in caught.value.message
    assert str(artifact_path / FILE_NAME) in str(caught.value.where)
    assert caught.value.fix == "copy the artifact again, or export again"
