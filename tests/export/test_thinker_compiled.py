"""The thinker's attention and experts compiled for the CPU: eager module, goldens, in-place writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checks import BACKENDS, check_engine, compiled_engine, compiled_file
from safetensors.torch import load_file, save_file
from thinker_session import Session, compiled_stage, golden_prompt
from torch import Tensor

from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.compile.trace import capture, check_example, share_weights
from mingc.export.layers.decoder import PAGE_SIZE, Decoder
from mingc.export.stage import GraphDef, Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.weights.loading import float32_module
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.stage_loader import LoadedStage

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def module(checkpoint: Checkpoint, config: ThinkerConfig) -> Decoder:
    """As in a weights file: the reference keeps routed experts in the checkpoint's dtype."""
    return float32_module(STAGE, config, checkpoint).float()


@pytest.fixture(scope="module")
def plans(config: ThinkerConfig, module: Decoder) -> dict[str, GraphDef]:
    """With weights as arguments where layers share an engine."""
    plans = STAGE.graphs(config, Shard(), StageOptions())
    shared = [share_weights(plan, module.get_submodule(plan.spec.layer_instances[0])) for plan in plans]
    return {plan.spec.name: plan for plan in shared}


@pytest.fixture
def stage(plans: dict[str, GraphDef], compiled_artifact: Path, module: Decoder) -> LoadedStage:
    engines = {name: compiled_engine(compiled_artifact, "thinker", name) for name in plans}
    return compiled_stage([plan.spec for plan in plans.values()], engines, module)


@pytest.mark.parametrize(
    ("graph", "sizes"),
    [
        ("prefill_attention", {}),
        ("prefill_attention", {"T": 2, "P": 1, "KV": 32}),
        ("prefill_attention", {"T": 128, "P": 32, "KV": 2048}),
        ("decode_attention", {}),
        ("decode_attention", {"B": 1, "P": 1, "KV": 32}),
        ("decode_attention", {"B": 8, "P": 16, "KV": 4096}),
        ("prefill_experts", {"T": 64}),
        ("decode_experts", {"B": 1}),
    ],
)
def test_every_instance_agrees_with_its_module(
    graph: str, sizes: dict[str, int], module: Decoder, plans: dict[str, GraphDef], stage: LoadedStage
) -> None:
    plan = plans[graph]
    full = {**plan.check_dims, **sizes}
    example = plan.example(full, torch.Generator().manual_seed(3))
    check_example(plan.spec, example, full, "thinker")
    names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
    kept = {each.name for each in plan.spec.state}
    for instance, run in stage.layer_instances(graph).items():
        eager = {name: example[name].clone() for name in names}
        compiled = {name: example[name].clone() for name in names}
        with torch.no_grad():
            expected = getattr(module.get_submodule(instance), plan.method)(*eager.values())
        got = run.run(**compiled)
        for each, reference in zip(plan.spec.outputs, expected, strict=True):
            assert got[each.name].is_contiguous(), f"{each.name}: the next engine would read it wrongly"
            if reference.dtype == torch.int32 or not reference.any():
                assert torch.equal(got[each.name], reference), f"{instance}: {each.name}"
            else:
                assert relative_error(got[each.name], reference) < TOLERANCE, f"{instance}: {each.name}"
        for name in names:
            if name not in kept:
                assert torch.equal(compiled[name], example[name]), f"{name} was changed"
                continue
            assert relative_error(compiled[name], eager[name]) < TOLERANCE, name
            untouched = torch.ones(full["KV"], dtype=torch.bool)
            untouched.index_fill_(0, written_rows(example), False)
            assert torch.equal(compiled[name][untouched], example[name][untouched]), f"{name}: other rows"


@BACKENDS
@pytest.mark.parametrize("graph", ["embed", "dense"])
def test_graphs_without_state(
    graph: str, module: Decoder, plans: dict[str, GraphDef], backend: Backend, tmp_path: Path
) -> None:
    part = module.get_submodule(plans[graph].spec.layer_instances[0])
    check_engine(part, plans[graph], [{"N": 1}, {"N": 5}], tmp_path, TOLERANCE, backend)


def written_rows(example: dict[str, Tensor]) -> Tensor:
    """Pool rows that a run may write: of its tokens, and page 0."""
    table = example["page_table"].long()
    if "lengths" in example:
        request, index = torch.arange(len(table)), example["lengths"] - 1
    else:
        is_real = example["index"] >= 0
        request, index = example["segment"][is_real], example["index"][is_real]
    rows = table[request, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
    return torch.cat((rows, torch.arange(PAGE_SIZE)))


@pytest.mark.parametrize("case", ["text", "mixed", "video"])
def test_compiled_greedy_continuation(case: str, config: ThinkerConfig, stage: LoadedStage) -> None:
    golden = load_file(DATA / "thinker.safetensors")
    prompt = golden_prompt(golden, case)
    prompt.embeds = prompt.embeds.nan_to_num()
    expected = golden[f"{case}.greedy_ids"][0].tolist()
    session = Session(stage, config.decoder.vocab_size)
    ids, logits = session.greedy(prompt, len(expected), chunk=32, padding=3)
    assert ids == expected
    torch.testing.assert_close(logits, golden[f"{case}.greedy_logits"][0], rtol=0, atol=1e-4)


def test_rows_left_by_a_request_do_not_affect_the_next(config: ThinkerConfig, stage: LoadedStage) -> None:
    """Neither unused rows of a page nor page 0 affect results, even if they are NaN."""
    golden = load_file(DATA / "thinker.safetensors")
    session = Session(stage, config.decoder.vocab_size)
    for name, pages in session.state.items():
        pages[PAGE_SIZE:] = torch.nan
        assert "pages" in name
    prompt = golden_prompt(golden, "text")
    prompt.embeds = prompt.embeds.nan_to_num()
    ids, _ = session.greedy(prompt, 6, chunk=32, padding=40)
    assert ids == golden["text.greedy_ids"][0, :6].tolist()


def test_requests_of_a_batch_are_independent(plans: dict[str, GraphDef], stage: LoadedStage) -> None:
    """Equal up to the rounding error of GEMMs, which depends on the batch size."""
    for graph, dims in (("decode_attention", {"B": 6, "P": 4, "KV": 1024}), ("decode_experts", {"B": 6})):
        plan = plans[graph]
        example = plan.example(dims, torch.Generator().manual_seed(9))
        names = [spec.name for spec in plan.spec.inputs]
        run = next(iter(stage.layer_instances(graph).values()))
        together = run.run(**{name: value.clone() for name, value in example.items()})["partial"]
        for request in range(6):
            one = {
                name: value[request : request + 1].clone() if name in names else value.clone()
                for name, value in example.items()
            }
            assert relative_error(run.run(**one)["partial"], together[request : request + 1]) < 2e-6


_MEASURE = """
import json, resource, sys
import numpy as np
import torch
from pathlib import Path
from safetensors.torch import load_file
from mingc.runtime.engines.backends.aoti import load

job = json.loads(sys.argv[1])
engine = load(Path(job["engine"]), torch.device("cpu"))
weights = load_file(job["weights"])
engine.bind(weights)
inputs = load_file(job["inputs"])
peaks = []
for rows in (1 << 10, 1 << 18):
    # NumPy's zeros are pages that the kernel has not allocated yet; torch writes its zeros.
    pools = [torch.from_numpy(np.zeros((rows, *job["shape"]), np.float32)) for _ in range(job["pools"])]
    for _ in range(3):
        engine.run([*(inputs[name] for name in job["names"]), *pools, *(weights[name] for name in job["given"])])
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps(peaks))
"""


@pytest.mark.parametrize("graph", ["prefill_attention", "decode_attention"])
def test_pools_are_written_in_place(
    graph: str,
    config: ThinkerConfig,
    module: Decoder,
    plans: dict[str, GraphDef],
    compiled_artifact: Path,
    tmp_path: Path,
) -> None:
    """Untouched zeros take no memory, so a copy of any pool would show in the peak of the process."""
    plan = plans[graph]
    example = plan.example({**plan.check_dims, "KV": 1 << 10}, torch.Generator().manual_seed(0))
    names = [spec.name for spec in plan.spec.inputs]
    save_file({name: example[name] for name in names}, tmp_path / "inputs.safetensors")
    part = module.get_submodule(plan.spec.layer_instances[0])
    save_file(part.state_dict(), tmp_path / "weights.safetensors")
    shape = (config.decoder.num_kv_heads, config.decoder.head_dim)
    job = {
        "engine": str(compiled_file(compiled_artifact, "thinker", graph)),
        "weights": str(tmp_path / "weights.safetensors"),
        "inputs": str(tmp_path / "inputs.safetensors"),
        "names": names,
        "shape": shape,
        "pools": len(plan.spec.state),
        "given": plan.spec.weights,
    }
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    pool_bytes = (1 << 18) * shape[0] * shape[1] * 4
    assert large - small < pool_bytes / 8, (
        f"{(large - small) / 1e6:.0f} MB more with pools of {pool_bytes / 1e6:.0f} MB"
    )


def test_static_buckets_capture(config: ThinkerConfig, checkpoint: Checkpoint) -> None:
    """Every combination of buckets can be traced with fixed dims over a small pool."""
    small = replace(config, decoder=replace(config.decoder, num_layers=2))
    module = float32_module(STAGE, small, checkpoint)
    options = StageOptions(static_buckets=True, batch_sizes=(1, 2), max_model_len=1024, prefill_chunk_size=32)
    for plan in STAGE.graphs(small, Shard(), options):
        fixed = {dim.name: dim.buckets[0] for dim in plan.spec.dims if dim.buckets}
        part = module.get_submodule(plan.spec.layer_instances[0])
        program = capture(plan, part, stage="thinker", static_shapes=fixed, device=CPU)
        sizes = {**plan.check_dims, **fixed}
        example = plan.example(sizes, torch.Generator().manual_seed(1))
        with torch.no_grad():
            names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
            expected: Tensor = getattr(part, plan.method)(*[example[name].clone() for name in names])[-1]
            got = program.module()(*[example[name].clone() for name in names])[-1]
        assert relative_error(got, expected) < TOLERANCE
