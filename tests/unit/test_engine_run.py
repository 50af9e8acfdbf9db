"""Run of one engine: every call and every rank starts with the given state, and ranks are combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mingc.artifacts.spec import GraphSpec, Ranks, TensorSpec
from mingc.errors import ArtifactError
from mingc.runtime.engines.base import Engine
from mingc.verify import engine_run
from mingc.verify.engine_run import run_engine


class Counter(Engine):
    """Adds its weights to the input and to the state, which it updates in place as every engine does."""

    def __init__(self) -> None:
        self._weights: dict[str, torch.Tensor] = {}

    def constants(self) -> Sequence[str]:
        return ["bias"]

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = dict(weights)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x, cache, scale = tensors
        cache += self._weights["bias"]
        x *= scale
        return [x + cache]


def spec(ranks: Ranks) -> GraphSpec:
    return GraphSpec(
        name="count",
        inputs=(TensorSpec(name="x", dtype="float32", shape=(2,)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(2,), ranks=ranks),),
        state=(TensorSpec(name="cache", dtype="float32", shape=(2,)),),
        layer_instances=("layers.1", "layers.2"),
        weights=("scale",),
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """Two files of each of two ranks; biases 10 and 20, and those of the second instance are of no use here."""
    monkeypatch.setattr(engine_run, "load_engine", lambda *_: Counter())
    files = []
    for rank, bias in enumerate((10.0, 20.0)):
        files.append([tmp_path / f"rank{rank}.{part}" for part in range(2)])
        for path, name, value in zip(files[-1], ("bias", "scale"), (bias, 2.0), strict=True):
            save_file(
                {f"layers.1.{name}": torch.full((2,), value), f"layers.2.{name}": torch.full((2,), 1e6)}, path
            )
    return files


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("same", [13.0, 15.0]), ("sum", [36.0, 40.0]), ("concat", [13.0, 15.0, 23.0, 25.0])],
)
def test_every_call_and_rank_starts_with_the_given_state(
    ranks: Ranks, expected: list[float], weights: list[list[Path]]
) -> None:
    """2 x + (cache + bias) with x = (1, 2), cache = 1; the state returned is that of rank 0."""
    call = {"x": torch.tensor([1.0, 2.0]), "cache": torch.ones(2)}
    results = run_engine(Path("engine"), "aoti", spec(ranks), weights, [call, call], "cpu")
    assert [made["y"].tolist() for made in results] == [expected, expected]
    assert [made["state.cache"].tolist() for made in results] == [[11.0, 11.0]] * 2
    assert call["x"].tolist() == [1.0, 2.0] and call["cache"].tolist() == [1.0, 1.0], "not modified"


def test_weights_that_the_file_lacks_are_named(tmp_path: Path, weights: list[list[Path]]) -> None:
    save_file({"bias": torch.ones(2)}, tmp_path / "rank1.0")
    given: list[dict[str, Any]] = [{"x": torch.ones(2), "cache": torch.ones(2)}]
    with pytest.raises(ArtifactError, match=r"layers\.1\.bias") as caught:
        run_engine(Path("engine"), "aoti", spec("sum"), weights, given, "cpu")
    assert caught.value.where == "engine, rank1.0, rank1.1"
