"""Preflight: an artifact that cannot fit is refused before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_compiler import fake_compiler
from preprocess_data import CHECKPOINT
from safetensors import safe_open

from mingc.errors import ConfigError
from mingc.export import preflight
from mingc.export.checkpoint import open_checkpoint
from mingc.export.plan import plan_export
from mingc.export.preflight import check_space, resolve_target
from mingc.export.recipe import ExportRecipe
from mingc.export.run import run
from mingc.export.stages import find

MIB = 1 << 20


def needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, name: str = "audio_encoder", **options: object
) -> None:
    """Check the export of a stage, without engines, on a disk with `free` bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    recipe = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path / "a" / "out", **options)  # type: ignore[arg-type]
    checkpoint, stage = open_checkpoint(CHECKPOINT), find(name)
    check_space(recipe, checkpoint, [stage], {stage.name: stage.config(checkpoint)}, 0)


def stored_values() -> int:
    """Values of the audio encoder in the checkpoint's own files."""
    count = 0
    for file in CHECKPOINT.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.startswith(("audio.", "linear_proj_audio.")):
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    count += size
    return count


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_space_for_all_weights_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, size: int
) -> None:
    exact = size * stored_values()
    assert exact > 0
    needed(monkeypatch, tmp_path, exact, dtype=dtype)
    with pytest.raises(ConfigError, match=r"needs at least \d+ MiB, .* has \d+ MiB free") as caught:
        needed(monkeypatch, tmp_path, exact - 1, dtype=dtype)
    assert caught.value.where == "--output"


def test_quantized_weights_need_a_byte_or_half_a_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def suffices(free: int, **options: object) -> bool:
        """Whether an export begins with `free` bytes."""
        try:
            needed(monkeypatch, tmp_path, free, "thinker", **options)
        except ConfigError:
            return False
        return True

    low, whole = MIB, MIB << 10
    while low < whole:
        middle = (low + whole) // 2
        low, whole = (low, middle) if suffices(middle) else (middle + 1, whole)
    assert MIB < whole < MIB << 10
    for quantize, share in ((None, 1), ("thinker=fp8", 4), ("thinker=int4", 8)):
        words = {} if quantize is None else {"quantize": (quantize,)}
        assert suffices(whole // share, **words) and not suffices(whole // share - 1, **words), quantize


def test_random_weights_need_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed(monkeypatch, tmp_path, 0, synthetic=True)


def test_an_export_onto_a_full_disk_ends_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    steps: list[object] = []
    recipe = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path / "out")
    with pytest.raises(ConfigError, match="1 MiB free"):
        run(plan_export(recipe), None, steps.append)  # type: ignore[arg-type]
    assert not steps and not list(tmp_path.iterdir())


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(name="NVIDIA H200", capability=(9, 0))
    monkeypatch.setattr(preflight, "gpu", lambda: card)
    return monkeypatch


def test_a_target_may_name_the_gpu_of_this_machine(h200: pytest.MonkeyPatch) -> None:
    assert list(map(resolve_target, ["cuda:sm90", "rtx:sm89", "cpu"])) == ["cuda", "rtx:sm89", "cpu"]
    card = SimpleNamespace(name="NVIDIA GB10", capability=(12, 1))
    h200.setattr(preflight, "gpu", lambda: card)
    assert resolve_target("cuda:sm121") == "cuda"


@pytest.mark.parametrize("name", ["sm89", "sm100", "sm80"])
def test_a_target_that_names_another_gpu_is_refused(name: str, h200: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the GPU here is sm90 \(NVIDIA H200\)") as refused:
        resolve_target(f"cuda:{name}")
    assert refused.value.where == f"--target cuda:{name}"
    assert f"export on a machine with {name}, or pass --target cuda" in (refused.value.fix or "")


@pytest.mark.parametrize(
    "target", ["cuda:", "cuda:90", "cuda:sm", "cuda:sm9", "cuda:sm090", "cuda:sm90,sm100"]
)
def test_a_target_that_names_no_gpu_is_refused(target: str, h200: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not the name of one GPU, such as sm90"):
        resolve_target(target)


@pytest.mark.parametrize(
    ("backend", "cxx", "says", "fix"),
    [
        ("aoti", "compiler", "links libstdc++ statically", "CXX=/usr/bin/g++"),
        ("aoti:cfm", "compiler", "links libstdc++ statically", "CXX=/usr/bin/g++"),
        ("aoti", "none", "none: not tried: No such file or directory", "apt-get install g++"),
        ("aoti", None, "there is no C++ compiler", "apt-get install g++"),
        ("onnx", "compiler", None, ""),
    ],
)
def test_a_compiler_whose_engines_would_crash_is_refused_at_once(
    backend: str, cxx: str | None, says: str | None, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, "static")
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", str(tmp_path / cxx))
    recipe = ExportRecipe(
        checkpoint=CHECKPOINT, output=tmp_path / "out", backend=(backend,), stages=("cfm",), cache=None
    )
    if says is None:
        preflight.check_host(recipe)
        return
    with pytest.raises(ConfigError) as caught:
        plan_export(recipe)
    assert says in caught.value.message and fix in str(caught.value.fix)
    assert caught.value.where == f"--backend {backend}"
