"""The plan of an export: what it lists, and that planning writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mingc.errors import ConfigError
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
GRAPHS = {
    "cfm.sample",
    "cfm.aggregate",
    "cfm.speaker",
    "audio_vae.decode",
    "audio_vae.stream",
    "audio_vae.encode",
}


def test_a_plan_lists_engines_weights_and_jobs_and_writes_nothing(tmp_path: Path) -> None:
    recipe = ExportRecipe(checkpoint=TINY, output=tmp_path / "out", stages=("cfm", "audio_vae"), jobs=3)
    plan = plan_export(recipe)
    assert {each.name for each in plan.graphs} == GRAPHS
    assert plan.num_engines == len(GRAPHS), "one engine for every size on a CPU"
    first, *rows, weights, voices = str(plan).splitlines()
    assert first == f"{tmp_path / 'out'}, for cpu: 6 engines, 3 at a time"
    assert {*rows} == {f"{name}: 1 engine(s) of aoti" for name in GRAPHS}
    assert (weights, voices) == ("weights: cfm, audio_vae", "voices: none")
    # Engines and checks, two weights files, goldens and the manifest.
    assert plan.num_steps == 2 * len(GRAPHS) + 2 + 2
    assert not [*tmp_path.iterdir()]


def test_an_output_that_may_not_be_replaced_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    recipe = ExportRecipe(checkpoint=tmp_path / "nowhere", output=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not an artifact"):
        plan_export(recipe)
