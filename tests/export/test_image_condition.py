"""Stages `image_condition` and `glyph` compared with goldens (spec: imagegen.md §1, §2), and their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checks import BACKENDS_AND_ONNX
from mingc_command import CACHE
from safetensors.torch import load_file
from stage_checks import assert_close, check_sources, set_key, with_random_weights
from torch import Tensor

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.checks.coverage import check_coverage
from mingc.export.compile.backend import Backend
from mingc.export.compile.trace import capture
from mingc.export.layers.t5 import distance_buckets
from mingc.export.stage import Shard, Stage, StageOptions
from mingc.export.stages import discover, glyph, image_condition
from mingc.export.stages.glyph import Glyph
from mingc.export.stages.image_condition import ImageCondition
from mingc.export.weights.loading import float32_module
from mingc.runtime.engines.backends import load_engine

DATA = Path(__file__).parents[1] / "data" / "imagegen"
CASES = ("t2i", "edit", "two_refs", "glyph", "glyph_long", "edit_glyph")
GLYPHS = CASES[3:]
STAGES = (image_condition.STAGE, glyph.STAGE)
CPU = torch.device("cpu")
LIMIT = 5e-6  # README of the golden set, §6


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(DATA / "imagegen_condition.safetensors")


@pytest.fixture(scope="module")
def checkpoint(image_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(image_checkpoint)


@pytest.fixture(scope="module")
def condition(checkpoint: Checkpoint) -> ImageCondition:
    module = float32_module(image_condition.STAGE, image_condition.STAGE.config(checkpoint), checkpoint)
    assert isinstance(module, ImageCondition)
    return module


@pytest.fixture(scope="module")
def glyphs(checkpoint: Checkpoint) -> Glyph:
    module = float32_module(glyph.STAGE, glyph.STAGE.config(checkpoint), checkpoint)
    assert isinstance(module, Glyph)
    return module


def stream(hidden: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """A residual stream and a delta whose final norm is `hidden`, but for the eps of the norm."""
    total = 1e3 * hidden / norm
    return 0.25 * total, 0.75 * total


@pytest.mark.parametrize("case", CASES)
def test_rows_match_golden(case: str, condition: ImageCondition, golden: dict[str, Tensor]) -> None:
    """Of the rows after the thinker's norm, so this test does not run the thinker."""
    hidden = golden[f"{case}.query_hidden"][0]
    seen: dict[str, Tensor] = {}
    parts = {
        "proj_in": condition.proj_in,
        "connector_out": condition.connector,
        "proj_out": condition.proj_out,
    }
    handles = [
        part.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output}))
        for name, part in parts.items()
    ]
    (rows,) = condition.condition(*stream(hidden, condition.norm))
    for handle in handles:
        handle.remove()
    for name, value in seen.items():
        assert_close(value, golden[f"{case}.{name}"][0], LIMIT)
    assert_close(rows, golden[f"{case}.condition"][0], LIMIT)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(len(rows)))


@pytest.mark.parametrize("case", GLYPHS)
def test_glyph_rows_match_golden(case: str, glyphs: Glyph, golden: dict[str, Tensor]) -> None:
    ids, mask = golden[f"{case}.glyph.ids"], golden[f"{case}.glyph.mask"].bool()[0]
    (rows,) = glyphs.encode(ids)
    assert rows.dtype == torch.float32
    assert_close(rows[0], golden[f"{case}.caption"][0, 16:], LIMIT)
    assert_close(rows[0][mask], golden[f"{case}.glyph.mapper_out"][0][mask], LIMIT)
    assert not rows[0][~mask].any()


def test_texts_of_a_batch_are_independent(glyphs: Glyph, golden: dict[str, Tensor]) -> None:
    """Also of one that is nothing but an end token, whose rows the official batch has."""
    empty = torch.zeros(1, 64, dtype=torch.int64)
    empty[0, 0] = 1
    (rows,) = glyphs.encode(torch.cat([empty, golden["glyph.glyph.ids"]]))
    assert_close(rows, golden["batch.caption"][:, 16:], LIMIT)


def test_a_padding_token_within_a_text_is_a_token(glyphs: Glyph) -> None:
    """`<pad>` may be written in a quotation; the official mask comes from the padding, not from the id."""
    ids = torch.zeros(1, 64, dtype=torch.int64)
    ids[0, :4] = torch.tensor([1, 123, 0, 1])
    (rows,) = glyphs.encode(ids)
    assert rows[0, :4].norm(dim=-1).min() > 1 and not rows[0, 4:].any()


def test_distances_have_the_buckets_of_t5() -> None:
    """By hand from §2.3: exact below 8, then by the logarithm up to 15; +16 for keys on the right."""
    buckets = distance_buckets(300, 32, 128)
    wanted = {
        0: 0,
        1: 1,
        7: 7,
        8: 8,
        11: 8,
        12: 9,
        15: 9,
        16: 10,
        22: 10,
        23: 11,
        32: 12,
        64: 14,
        91: 15,
        299: 15,
    }
    assert {distance: int(buckets[299, 299 - distance]) for distance in wanted} == wanted
    assert {distance: int(buckets[0, distance]) for distance in wanted} == {
        distance: bucket + 16 * (distance > 0) for distance, bucket in wanted.items()
    }


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_weight_has_a_source(stage: Stage, checkpoint: Checkpoint) -> None:
    check_sources(stage, checkpoint, stage.config(checkpoint))


def test_every_tensor_of_the_folders_is_used_or_named(checkpoint: Checkpoint) -> None:
    configs = {stage.name: stage.config(checkpoint) for stage in STAGES}
    notes = check_coverage(checkpoint, configs, discover().values())
    own = [note for note in notes if any(part in note for part in ("mlp", "connector", "byt5"))]
    assert len(own) == 1 and "model.embed_tokens." in own[0]


def test_other_geometries_trace(checkpoint: Checkpoint, condition: ImageCondition, glyphs: Glyph) -> None:
    """Several scales, of which the last is read; another length of texts."""
    drawn = replace(image_condition.STAGE.config(checkpoint), scales=(2, 3), width=20)
    shown = replace(glyph.STAGE.config(checkpoint), max_length=21, width=12)
    for stage, config, module, outputs in (
        (image_condition.STAGE, drawn, ImageCondition(drawn), (9, 20)),
        (glyph.STAGE, shown, Glyph(shown), (2, 21, 12)),
    ):
        with_random_weights(module)
        for source in stage.weights(config, Shard()):
            value = source.compute(*[torch.zeros(shape) for shape in source.shapes])
            assert value.shape == module.state_dict()[source.name].shape, source.name
            if not source.tensors:
                module.state_dict()[source.name].copy_(value)
        (plan,) = stage.graphs(config, Shard(), StageOptions())
        program = capture(plan, module, stage=stage.name, static_shapes=None, device=CPU)
        example = plan.example(plan.check_dims, torch.Generator().manual_seed(3))
        inputs = tuple(example[tensor.name] for tensor in plan.spec.inputs)
        (traced,) = program.module()(*inputs)
        assert traced.shape == outputs
        assert_close(traced, getattr(module, plan.method)(*inputs)[0], 1e-5)
    assert image_condition.STAGE.parameters(drawn, StageOptions()).num_queries == (4, 9)
    parameters = glyph.STAGE.parameters(shown, StageOptions())
    table = json.loads((DATA / "imagegen.json").read_text("utf-8"))["byt5_tokenizer"]["added"]
    assert list(parameters.added_tokens) == sorted(table, key=table.get)


def test_bfloat16_stays_near_golden(
    checkpoint: Checkpoint, condition: ImageCondition, glyphs: Glyph, golden: dict[str, Tensor]
) -> None:
    for stage, module, inputs, name in (
        (
            image_condition.STAGE,
            condition,
            stream(golden["t2i.query_hidden"][0], condition.norm),
            "t2i.condition",
        ),
        (glyph.STAGE, glyphs, (golden["glyph.glyph.ids"],), "glyph.caption"),
    ):
        config = stage.config(checkpoint)
        sources = {source.name: source.dtype for source in stage.weights(config, Shard())}
        half = {key: value.to(sources[key] or torch.bfloat16) for key, value in module.state_dict().items()}
        with torch.device("meta"):
            other = stage.build(config, Shard()).eval()
        other.load_state_dict(half, assign=True)
        (rows,) = getattr(other, stage.graphs(config, Shard(), StageOptions())[0].method)(
            *(each.bfloat16() if each.is_floating_point() else each for each in inputs)
        )
        reference = golden[name][0, -len(rows[-1]) :] if name.startswith("glyph") else golden[name][0]
        rows = rows.reshape(-1, rows.shape[-1])[: len(reference)]
        used = reference.norm(dim=-1) > 0
        assert rows.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(rows[used], reference[used]).min() > 0.99


@BACKENDS_AND_ONNX
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_engines_match_golden(
    stage: Stage,
    backend: Backend,
    condition: ImageCondition,
    glyphs: Glyph,
    checkpoint: Checkpoint,
    golden: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    module = condition if stage is image_condition.STAGE else glyphs
    (plan,) = stage.graphs(stage.config(checkpoint), Shard(), StageOptions())
    program = capture(plan, module, stage=stage.name, static_shapes=None, device=CPU)
    path = tmp_path / f"engine{backend.suffix}"
    backend.compile(program, path, device="cpu", cache=CACHE, where=stage.name)
    engine = load_engine(backend.name, path, CPU)
    engine.bind(module.state_dict())
    if stage is image_condition.STAGE:
        for case in CASES:
            (rows,) = engine.run(stream(golden[f"{case}.query_hidden"][0], condition.norm))
            assert_close(rows, golden[f"{case}.condition"][0], LIMIT)
        return
    for case in GLYPHS:
        (rows,) = engine.run((golden[f"{case}.glyph.ids"],))
        assert_close(rows[0], golden[f"{case}.caption"][0, 16:], LIMIT)


def edit_json(file: str, *path: str, value: object = None) -> Callable[[Path], None]:
    """Sets a key of a config, or removes it when `value` is None."""

    def edit(root: Path) -> None:
        values = json.loads((root / file).read_text("utf-8"))
        set_key(values, *path, value=value)
        (root / file).write_text(json.dumps(values), "utf-8")

    return edit


BYT5 = "byt5/byt5.json"
T5 = "byt5/google__byt5-small/config.json"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_json("mlp/config.json", "use_identity_mlp", value=False), "use_identity_mlp=False"),
        (edit_json("mlp/config.json", "use_identity_mlp"), "use_identity_mlp is missing"),
        (edit_json("mlp/config.json", "dit_type", value="sd3"), 'only "zimage" is'),
        (edit_json("mlp/config.json", "text_encoder_norm"), "text_encoder_norm is missing"),
        (edit_json("mlp/config.json", "img_gen_scales", value=[]), "img_gen_scales is []"),
        (edit_json("mlp/config.json", "img_gen_scales", value=[4, "8"]), "img_gen_scales is [4, '8']"),
        (edit_json("mlp/config.json", "diffusion_c_input_dim", value=0), "diffusion_c_input_dim is 0"),
        (edit_json("connector/config.json", "rms_norm_eps"), "rms_norm_eps"),
        (
            edit_json("connector/config.json", "layer_types", value=["sliding_attention"] * 2),
            None,
        ),
        (lambda root: shutil.rmtree(root / "connector"), "no connector/ folder"),
        (edit_json(BYT5, "byt5_max_length"), "byt5_max_length is missing"),
        (edit_json(BYT5, "byt5_max_length", value="256"), "byt5_max_length is '256'"),
        (edit_json(BYT5, "byt5_config", "multilingual", value=False), "byt5_config.multilingual=False"),
        (edit_json(BYT5, "byt5_config", "special_token"), "byt5_config.special_token is missing"),
        (edit_json(BYT5, "byt5_mapper_type", value="Other"), "byt5_mapper_type='Other'"),
        (edit_json(BYT5, "byt5_config", "font_ann_path", value="./no.json"), "no.json"),
        (edit_json(T5, "d_kv"), "d_kv"),
        (edit_json(T5, "feed_forward_proj", value="relu"), "feed_forward_proj='relu'"),
        (lambda root: (root / "byt5/color_idx.json").write_text("[1]"), "list, expected an object"),
    ],
)
def test_configs_that_are_not_implemented_are_refused_by_name(
    edit: Callable[[Path], None], words: str | None, image_checkpoint: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(image_checkpoint, tmp_path / "tiny"))
    edit(root)
    checkpoint = open_checkpoint(root)
    if words is None:  # without a window such layers attend to all
        image_condition.STAGE.config(checkpoint)
        return
    with pytest.raises(CheckpointError) as caught:
        for stage in STAGES:
            stage.config(checkpoint)
    assert words in str(caught.value) + str(caught.value.where) and caught.value.where


def test_a_sliding_window_is_refused(image_checkpoint: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(image_checkpoint, tmp_path / "tiny"))
    for key, value in (
        ("use_sliding_window", True),
        ("sliding_window", 4),
        ("layer_types", ["sliding_attention"] * 2),
    ):
        edit_json("connector/config.json", key, value=value)(root)
    with pytest.raises(CheckpointError, match="sliding windows"):
        image_condition.STAGE.config(open_checkpoint(root))


class Malicious:
    """A pickle of it calls a function when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_a_pickle_that_is_more_than_weights_is_not_read(image_checkpoint: Path, tmp_path: Path) -> None:
    """Nothing of it runs, and no other of its faults passes."""
    root = Path(shutil.copytree(image_checkpoint, tmp_path / "tiny"))
    file, marker = root / "byt5" / "byt5_model" / "byt5_model.pt", tmp_path / "marker"
    good = torch.load(file, weights_only=True)
    contents: Sequence[tuple[object, str]] = (
        ({**good, "x": Malicious(marker)}, "it would call"),
        ([*good.values()], "list, expected tensors by name"),
        ({"state_dict": good}, "'state_dict' is not a tensor in a flat dict"),
    )
    for content, words in contents:
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=words) as caught:
            open_checkpoint(root)
        assert "byt5_model.pt" in caught.value.message and not marker.exists()
    torch.save(good, file, _use_new_zipfile_serialization=False)  # as torch wrote before 1.6
    read = open_checkpoint(root).part("byt5").read("byt5_model.embed_tokens.weight")
    assert torch.equal(read, good["embed_tokens.weight"])
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="no weights that torch can read"):
        open_checkpoint(root)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="Git LFS"):
        open_checkpoint(root)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"byt5_model.pt: file is missing"):
        open_checkpoint(root)
