"""`mingc bundle diff`: what differs between two artifacts or bundles. Reads manifests only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.artifact import open_unchecked
from mingc.artifacts.bundle_manifest import BUNDLE_FILE, parse_bundle_manifest
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import FILE_NAME, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One file that differs."""

    file: str
    change: str  # added, removed, changed
    bytes_before: int | None
    bytes_after: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffReport:
    """`transfer_bytes`: size of the files that `first` has under no name, so that an upgrade must transfer them."""

    first: Path
    second: Path
    is_same: bool
    same_files: int
    same_bytes: int
    transfer_bytes: int
    settings: tuple[str, ...]
    changes: tuple[FileChange, ...]


def diff(first: Path, second: Path) -> DiffReport:
    """Raises: ManifestError, IntegrityError for a damaged bundle."""
    (before, old), (after, new) = _read(first), _read(second)
    changes = [
        FileChange(
            file=name,
            change="added" if name not in old else "removed" if name not in new else "changed",
            bytes_before=old[name][0] if name in old else None,
            bytes_after=new[name][0] if name in new else None,
        )
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    settings = tuple(_settings(before, after))
    same = {name for name in old if old[name] == new.get(name)}
    known = {sha256 for _, sha256 in old.values()}
    return DiffReport(
        first=first,
        second=second,
        is_same=not changes and not settings,
        same_files=len(same),
        same_bytes=sum(old[name][0] for name in same),
        transfer_bytes=sum({sha: size for size, sha in new.values() if sha not in known}.values()),
        settings=settings,
        changes=tuple(changes),
    )


def _read(path: Path) -> tuple[Manifest, Mapping[str, tuple[int, str]]]:
    """Read the manifest, and size and sha256 of every file, including files that a bundle adds."""
    artifact = open_unchecked(path)
    files = {name: (record.size_bytes, record.sha256) for name, record in artifact.manifest.files.items()}
    table = None
    if artifact.packed is not None:
        table = artifact.packed.bundle
    elif (path / BUNDLE_FILE).is_file():
        table = parse_bundle_manifest((path / BUNDLE_FILE).read_bytes(), str(path / BUNDLE_FILE))
    if table is not None:
        files |= {
            name: (record.size_bytes, record.sha256)
            for name, record in table.files.items()
            if name
            != FILE_NAME  # it records compile times, which always differ; `settings` compares the rest
        }
    return artifact.manifest, files


def _settings(before: Manifest, after: Manifest) -> list[str]:
    """Describe every manifest value that differs, in one line each. Files are left out."""
    lines = []
    for name, old, new in (
        ("model", before.model, after.model),
        *(
            (
                f"fingerprint {field.name}",
                getattr(before.fingerprint, field.name),
                getattr(after.fingerprint, field.name),
            )
            for field in dataclasses.fields(before.fingerprint)
        ),
        ("stages", ", ".join(before.stages), ", ".join(after.stages)),
        ("voices", ", ".join(v.name for v in before.voices), ", ".join(v.name for v in after.voices)),
        ("stage graph", before.graph, after.graph),
        ("tokenizers", before.tokenizers, after.tokenizers),
        ("speaker network", before.speaker_network, after.speaker_network),
        ("recorded requests", before.served_goldens, after.served_goldens),
    ):
        if old != new:
            shown = "differs" if isinstance(old, dict) or name == "stage graph" else f"{old} → {new}"
            lines.append(f"{name}: {shown}")
    voices = {voice.name: voice for voice in before.voices}
    for voice in after.voices:
        fields = [
            field.name
            for field in dataclasses.fields(voice)
            if voice.name in voices and getattr(voice, field.name) != getattr(voices[voice.name], field.name)
        ]
        if fields:
            lines.append(f"voice {voice.name}: {', '.join(fields)}")
    parameters, changed = encode(before.parameters), encode(after.parameters)
    for stage in sorted({*parameters} & {*changed}):
        one, other = parameters[stage], changed[stage]
        keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        if keys:
            lines.append(f"parameters of {stage}: {', '.join(keys)}")
    return lines
