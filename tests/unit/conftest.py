"""A small artifact made by hand: no engine runs, but every file and record is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mingc.artifacts.artifact import new_artifact, write_manifest
from mingc.artifacts.manifest import (
    SCHEMA,
    EngineRecord,
    Fingerprint,
    GraphRecord,
    Manifest,
    Parity,
    StageRecord,
    VoiceRecord,
)
from mingc.artifacts.parameters import AudioParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import StageGraph, StageNode

PARAMETERS = AudioParameters(
    sample_rate=16000,
    num_mels=128,
    fft_size=400,
    hop_samples=160,
    max_frames=256,
    frames_per_token=4,
    hidden_size=64,
)


@pytest.fixture
def manifest() -> Manifest:
    """A manifest of one stage with one graph; its file table is still empty."""
    spec = GraphSpec(
        name="encode",
        inputs=(TensorSpec(name="mel", dtype="float32", shape=("N", "T4", 4, 128)),),
        outputs=(TensorSpec(name="embeddings", dtype="float32", shape=("N", "T4", 64)),),
        dims=(
            Dim(name="N", minimum=1, maximum=8, buckets=(1, 2, 8)),
            Dim(name="T4", minimum=1, maximum=64),
        ),
    )
    engine = EngineRecord(backend="aoti", file="engines/encode.pt2", dims=None, compile_seconds=1.5)
    graph = GraphRecord(
        spec=spec,
        engines=(engine,),
        golden="goldens/encode.safetensors",
        parity=Parity(compiled=1e-6, eager=0.0),
    )
    return Manifest(
        schema=SCHEMA,
        model="tiny",
        fingerprint=Fingerprint(
            mingc="0.1.0",
            torch="2.13.0",
            target="cpu",
            device="cpu",
            capability="AVX2",
            dtype="float32",
            world_size=1,
            config_sha256="0" * 64,
            checkpoint_sha256="1" * 64,
        ),
        stages={
            "audio_encoder": StageRecord(
                is_sharded=False, weights=(("weights/audio.bin",),), graphs={"encode": graph}
            )
        },
        graph=StageGraph(nodes=(StageNode(name="audio_encoder", policy="once"),)),
        parameters={"audio_encoder": PARAMETERS},
        tokenizers={},
        speaker_network=None,
        voices=(
            VoiceRecord(name="DB30", file="voices/DB30.bin", transcript="感谢你的认可。", num_patches=5),
        ),
        notes=("one fix-up",),
        files={},
    )


@pytest.fixture
def artifact_path(tmp_path: Path, manifest: Manifest) -> Path:
    """The artifact on disk."""
    root = tmp_path / "artifact"
    with new_artifact(root, replace_existing=False) as work:
        for name in (
            "engines/encode.pt2",
            "goldens/encode.safetensors",
            "weights/audio.bin",
            "voices/DB30.bin",
        ):
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(name.encode() * 50)
        write_manifest(work, manifest)
    return root
