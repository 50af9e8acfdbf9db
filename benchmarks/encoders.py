"""Speed of the vision and audio encoders on one GPU at the released dims: random weights, one engine a bucket.

For every size: the engine in a CUDA graph and called directly, its error against float32, and the same modules in plain
torch in a CUDA graph. Plain torch calls SDPA without a mask, which is right for one image or clip. Several clips in one
call are compared with as many calls for one clip.

    python benchmarks/encoders.py --json benchmarks/results/encoders-h200-….json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import arguments
import harness
import talker_engines
import torch
import torch.nn.functional as F
from talker import Run, engine_run, module_run
from torch import Tensor, nn

from mingc.artifacts.spec import GraphSpec
from mingc.export.compile.backends import aoti
from mingc.export.compile.trace import capture
from mingc.export.layers.patch_grid import example_tables
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.kernels.dispatch import plain_torch
from mingc.numerics.relative_error import relative_error

PATCHES = (256, 1024, 4096, 16384, 65536)
SECONDS = (1, 8, 10, 30, 300)
TOKENS_PER_SECOND = 25  # of audio
_LARGEST_REFERENCE = 16384  # patches; plain float32 attention of the largest image does not fit
_SPENT_MS = 2000  # on the timed runs of one case, if they are more than a few
Figure = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an encoder: images of `sizes` patches, or clips of `sizes` audio tokens, in a bucket."""

    stage: str
    sizes: tuple[int, ...]
    bucket: int

    @property
    def dims(self) -> dict[str, int]:
        if self.stage == "vision_encoder":
            return {"M": self.bucket}
        return {"N": len(self.sizes), "T4": self.bucket}

    @property
    def file(self) -> str:
        return "-".join([self.stage, *map(str, self.dims.values())]) + ".pt2"

    @property
    def alone(self) -> Case:
        """A call for the first clip."""
        return Case(stage=self.stage, sizes=self.sizes[:1], bucket=self.bucket)


def spec_of(stage: str) -> GraphSpec:
    return talker_engines.plan_of(stage, "encode").spec


def cases(patches: Sequence[int], seconds: Sequence[int]) -> list[Case]:
    vision, audio = spec_of("vision_encoder").dim("M").buckets, spec_of("audio_encoder").dim("T4").buckets

    def bucket(buckets: Sequence[int], size: int) -> int:
        return min(each for each in buckets if each >= size)

    images = [(size,) for size in patches] + ([(1024,) * 8] if 1024 in patches else [])
    lengths = [TOKENS_PER_SECOND * each for each in seconds]
    clips = [
        Case(stage="audio_encoder", sizes=(length,) * count, bucket=bucket(audio, length))
        for count in spec_of("audio_encoder").dim("N").buckets
        for length in lengths
    ]
    built = talker_engines.plan_of("audio_encoder", "encode").sizes
    return [
        *(Case(stage="vision_encoder", sizes=each, bucket=bucket(vision, sum(each) // 4)) for each in images),
        *(each for each in clips if each.dims in built),
    ]


def build(case: Case, folder: Path) -> float:
    """Compile the engine of a case into `folder`; returns the seconds it took."""
    path = folder / case.file
    if path.exists():
        return 0.0
    started = time.perf_counter()
    program = capture(
        talker_engines.plan_of(case.stage, "encode"),
        talker_engines.module_of(case.stage, torch.bfloat16),
        stage=case.stage,
        static_shapes=case.dims,
        device=torch.device("cuda"),
    )
    aoti.compile_graph(program, path, device="cuda", cache=None, where=f"{case.stage}.encode")
    return time.perf_counter() - started


def inputs(case: Case) -> dict[str, Tensor]:
    """Random pixels of square images or log-mel of clips, and the tables that belong to them."""
    generator = torch.Generator("cuda").manual_seed(case.bucket)
    if case.stage == "audio_encoder":
        shape = spec_of(case.stage).input("mel").shape
        mel = torch.rand(len(case.sizes), case.bucket, *shape[2:], generator=generator, device="cuda")
        lengths = torch.tensor(case.sizes, device="cuda") * int(shape[2])
        return {"mel": (3 * mel - 1.5).bfloat16(), "lengths": lengths}
    config: Any = find(case.stage).config(open_synthetic(talker_engines.CONFIGS))
    group = config.patches_per_token
    tables = [
        example_tables(size // group, config.merge_size, config.position_grid_size) for size in case.sizes
    ]
    joined = {name: torch.cat([each[name] for each in tables]) for name in tables[0]}
    # The example's two frames are one image here.
    ends = torch.tensor(case.sizes).cumsum(0)
    starts = ends - torch.tensor(case.sizes)
    ranges = torch.stack((starts, ends), -1).repeat_interleave(torch.tensor(case.sizes), 0)
    joined["segment"] = ranges.view(-1, group, 2).int()
    pixels = torch.randn(case.bucket, group, config.patch_values, generator=generator, device="cuda")
    if sum(case.sizes) != case.bucket * group:
        raise ValueError(f"{sum(case.sizes)} patches do not fill the bucket of {case.bucket} tokens")
    return {"pixels": pixels.bfloat16(), **{name: each.cuda() for name, each in joined.items()}}


def attend_to_all(q_BQHd: Tensor, k_BKHd: Tensor, v_BKHd: Tensor, segments: object) -> Tensor:
    """`varlen_attention` of a single image or clip that fills the bucket: SDPA without a mask."""
    heads_first = [each.transpose(1, 2) for each in (q_BQHd, k_BKHd, v_BKHd)]
    return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def plain(module: nn.Module, spec: GraphSpec) -> Run:
    """The module in plain torch; its dense mask is neither built nor used."""
    run = module_run(module, "encode", spec)
    places = ("mingc.kernels.rotary_varlen_attention", "mingc.export.stages.audio_encoder")
    masks = ("mingc.export.stages.vision_encoder", "mingc.export.stages.audio_encoder")

    def patched(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with plain_torch():
            for place in places:
                mock.patch(f"{place}.varlen_attention", attend_to_all).start()
            for place in masks:
                mock.patch(f"{place}.make_segments", lambda *_: None).start()
            try:
                return run(tensors)
            finally:
                mock.patch.stopall()

    return patched


def times(step: Callable[[], object], count: int) -> dict[str, float]:
    """Summary of at most `count` timed runs; fewer if a step is slow."""
    (once,) = harness.time_ms(step, 1, warmups=2)
    return harness.summary(harness.time_ms(step, max(3, min(count, int(_SPENT_MS / once))), warmups=1))


def measure(case: Case, folder: Path, modules: Mapping[str, Mapping[str, nn.Module]], count: int) -> Figure:
    spec, values = spec_of(case.stage), inputs(case)
    module, wide = modules["bfloat16"][case.stage], modules["float32"][case.stage]
    ours = engine_run(folder / case.file, spec, dict(module.state_dict()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = ours(values)["embeddings"]
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - before
    captured = harness.capture(lambda: ours(values))
    figure = {
        "name": "encoder_ms",
        "stage": case.stage,
        "sizes": list(case.sizes),
        "bucket": case.bucket,
        **times(captured.replay, count),
        "unit": "ms",
        "without_cuda_graph": times(lambda: ours(values), count),
        "memory_mb": round(memory / 1e6),
    }
    if len(case.sizes) == 1:
        reference = harness.capture(lambda: plain(module, spec)(values))
        figure["reference"] = {
            "name": "plain torch, SDPA without mask, CUDA graph",
            **times(reference.replay, count),
        }
        reference.reset()
    elif case.stage == "audio_encoder":
        single = engine_run(folder / case.alone.file, spec, dict(module.state_dict()))
        one = inputs(case.alone)
        each_alone = harness.capture(lambda: single(one))
        figure["as_many_calls"] = times(lambda: [each_alone.replay() for _ in case.sizes], count)
        each_alone.reset()
    if sum(case.sizes) <= _LARGEST_REFERENCE:
        with plain_torch():
            exact = module_run(wide, "encode", spec)(
                {
                    name: value.float() if value.is_floating_point() else value
                    for name, value in values.items()
                }
            )["embeddings"]
            eager = module_run(module, "encode", spec)(values)["embeddings"]
        figure["error"] = {
            "unit": "max |error| / max |fp32 reference|",
            "value": relative_error(found, exact),
            "reference": {"name": "eager bf16", "value": relative_error(eager, exact)},
        }
    captured.reset()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=arguments.wholes(256, 65536), default=PATCHES)
    parser.add_argument("--seconds", type=arguments.wholes(1, 300), default=SECONDS)
    parser.add_argument("--engines", type=Path, help="folder of engines to use and to leave for the next run")
    parser.add_argument("--jobs", type=arguments.whole(1), default=8, help="compiler processes at a time")
    parser.add_argument("--count", type=arguments.whole(1), default=30, help="timed runs")
    parser.add_argument("--profile", type=arguments.wholes(0), default=(), help="patches with a kernel table")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = harness.parse_args(parser)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = given.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        todo = cases(given.patches, given.seconds)
        singles = [case.alone for case in todo if case.stage == "audio_encoder"]
        unique = {case.file: case for case in (*todo, *singles)}
        with harness.compiler_pool(given.jobs) as pool:
            seconds = list(pool.map(build, unique.values(), [folder] * len(unique)))
        print({file: round(each) for file, each in zip(unique, seconds, strict=True)}, flush=True)
        rates = harness.peak_rates()
        print(rates, flush=True)
        modules = {
            name: {
                stage: talker_engines.module_of(stage, getattr(torch, name))
                for stage in ("vision_encoder", "audio_encoder")
            }
            for name in ("bfloat16", "float32")
        }
        figures, breakdown = [], {}
        for case in todo:
            figures.append(measure(case, folder, modules, given.count))
            print(figures[-1], flush=True)
            if sum(case.sizes) in given.profile:
                module = modules["bfloat16"][case.stage]
                run, values = (
                    engine_run(folder / case.file, spec_of(case.stage), dict(module.state_dict())),
                    inputs(case),
                )
                breakdown[case.file] = harness.kernel_table(lambda run=run, values=values: run(values))[:12]
                print(*breakdown[case.file], sep="\n", flush=True)
        if given.json:
            harness.write(given.json, harness.result("encoders", rates, figures, kernels=breakdown))


if __name__ == "__main__":
    main()
