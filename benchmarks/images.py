"""Speed of image generation on one GPU at the released dims: random weights, one engine for all sizes.

Three parts: a step of the sampler (begin, all blocks, end), with engines in bfloat16 and with FP8 weights; what runs
once a picture; whole pictures through the server's worker. Each beside the same modules in plain torch (eager,
bfloat16). Peak memory is compared with the server's plan, and a velocity with float32.

    python benchmarks/images.py --json benchmarks/results/images-h200-….json

`--device cpu --configs DIR --sizes 64` rehearses all of it without a GPU; its times say nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arguments
import harness
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mingc.artifacts.parameters import ImageDitParameters
from mingc.artifacts.spec import Quantization
from mingc.export.compile.backends import aoti
from mingc.export.compile.trace import capture, share_weights
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.weights.quantization import prepare, stored_tensors
from mingc.kernels.dispatch import plain_torch
from mingc.numerics.relative_error import relative_error
from mingc.probe.stopwatch import Stopwatch
from mingc.prompts.picture_sizes import RESOLUTIONS, Size, sizes
from mingc.runtime.engines.backends.aoti import AotiEngine
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.tokens import TokenLayout, padded, token_layout
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt

CONFIGS = Path(__file__).resolve().parent / "released-images"
STAGES = ("image_condition", "image_dit", "image_vae")
PARTS = ("step", "once", "picture")
VARIANTS = ("bfloat16", "fp8", "plain")
_MAX_PICTURES = 4
_SPENT_MS = 2000  # on the timed runs of one case, if they are more than a few
_SEED = 41
_TIME = 0.5
Figure = dict[str, Any]
Values = Callable[[WeightSource, torch.Size], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of pictures with guidance. `rows` of the caption: 256 of the queries, 512 with glyphs."""

    size: Size
    pictures: int = 1
    frames: int = 1
    rows: int = 256

    @property
    def figure(self) -> Figure:
        return {
            "size": list(self.size),
            "pictures": self.pictures,
            "frames": self.frames,
            "caption_rows": self.rows,
        }


@dataclass(frozen=True, kw_only=True)
class Job:
    """An engine to compile."""

    stage: str
    graph: str
    quantization: Quantization | None = None

    @property
    def file(self) -> str:
        return f"{self.stage}.{self.graph}{f'-{self.quantization}' if self.quantization else ''}.pt2"


class EagerEngine(Engine):
    """A graph of a module in plain torch; of several layers, with the weights of the layer that runs."""

    def __init__(self, module: nn.Module, plan: GraphDef) -> None:
        self._module, self._method, self._weights = module, plan.method, plan.spec.weights

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        pass  # the module has them

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        count = len(tensors) - len(self._weights)
        if self._weights:
            weights = dict(zip(self._weights, tensors[count:], strict=True))
            self._module.load_state_dict(weights, assign=True)
        with plain_torch():
            return list(getattr(self._module, self._method)(*tensors[:count]))


class Networks:
    """The stages' modules and engines over one set of random bfloat16 weights, which is drawn on the device."""

    def __init__(self, configs: Path, device: torch.device, folder: Path) -> None:
        self.configs, self.device, self.folder = configs, device, folder
        generator = torch.Generator(device).manual_seed(_SEED)

        def draw(source: WeightSource, shape: torch.Size) -> Tensor:
            if not source.tensors:
                return source.compute().to(device)
            value = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            if len(shape) > 1:
                return value.mul_(value[0].numel() ** -0.5)
            is_norm = "norm" in source.name and not source.name.endswith("bias")
            return 1 + 0.1 * value if is_norm else 0.02 * value

        self._weights = {name: tensors_of(name, configs, None, draw) for name in STAGES}

    @functools.cache  # noqa: B019 - lives as long as the script
    def weights(
        self, name: str, quantization: Quantization | None, device: torch.device
    ) -> dict[str, Tensor]:
        """The weights of a stage on a device; tensors that are not quantized are shared."""
        found = self._weights[name]
        if quantization:
            found = tensors_of(name, self.configs, quantization, lambda source, _: found[source.name])
        return {key: each.to(device) for key, each in found.items()}

    def parameters(self, name: str) -> Any:
        return find(name).parameters(config_of(name, self.configs), options(self.device.type))

    def float32(self, name: str) -> nn.Module:
        return module_of(
            name, self.configs, None, {key: each.float() for key, each in self._weights[name].items()}
        )

    def engines(self, variant: str) -> ImageEngines:
        """The engines of one of `VARIANTS`, as a server has them."""
        stages = {name: self._stage(name, variant, self.device) for name in STAGES}
        return ImageEngines(
            stages["image_condition"],
            None,
            stages["image_dit"],
            stages["image_vae"],
            parameters=self.parameters("image_dit"),
            vae=self.parameters("image_vae"),
            device=self.device,
        )

    def sampler(self, variant: str, device: torch.device) -> ImageSampler:
        """The sampler on another device."""
        with current_device(device):
            stage = self._stage("image_dit", variant, device)
        return ImageSampler(stage, self.parameters("image_dit"), device)

    def _stage(self, name: str, variant: str, device: torch.device) -> LoadedStage:
        quantization = quantization_of(name, variant)
        weights = self.weights(name, quantization, device)
        graphs = {}
        for plan in plans_of(name, self.configs, device.type):
            # Each graph with a module of its own, because layers assign theirs.
            part, shared = part_of(plan, module_of(name, self.configs, quantization, weights))
            job = Job(stage=name, graph=plan.spec.name, quantization=quantization)
            engine = (
                EagerEngine(part, shared)
                if variant == "plain"
                else AotiEngine(self.folder / job.file, device)
            )
            engine.bind(part.state_dict())
            graphs[plan.spec.name] = Graph(shared.spec, {None: engine}, part.state_dict())
        return LoadedStage(name, graphs, weights)


def quantization_of(stage: str, variant: str) -> Quantization | None:
    return "fp8" if variant == "fp8" and "fp8" in find(stage).quantizations else None


def options(device: str) -> StageOptions:
    return StageOptions(
        dtype=torch.bfloat16,
        device=device,
        static_buckets=device == "cuda",
        batch_sizes=(1, 2 * _MAX_PICTURES),
    )


def config_of(stage: str, configs: Path) -> Any:
    return find(stage).config(open_synthetic(configs))


def plans_of(stage: str, configs: Path, device: str) -> Sequence[GraphDef]:
    return find(stage).graphs(config_of(stage, configs), Shard(), options(device))


def tensors_of(
    name: str, configs: Path, quantization: Quantization | None, value: Values
) -> dict[str, Tensor]:
    """The stored tensors of a stage: in bfloat16, or quantized, from the `value` of each weight."""
    stage: Stage = find(name)
    config = config_of(name, configs)
    with torch.device("meta"):
        shapes = stage.build(config, Shard()).state_dict()
    found: dict[str, Tensor] = {}
    for source in stage.weights(config, Shard()):
        made = value(source, shapes[source.name].shape)
        found |= stored_tensors(source, made, quantization, source.dtype or torch.bfloat16)
    return found


def module_of(
    name: str, configs: Path, quantization: Quantization | None, tensors: Mapping[str, Tensor]
) -> nn.Module:
    stage: Stage = find(name)
    config = config_of(name, configs)
    with torch.device("meta"):
        module = prepare(stage.build(config, Shard()), stage.weights(config, Shard()), quantization)
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def part_of(plan: GraphDef, module: nn.Module) -> tuple[nn.Module, GraphDef]:
    """What a graph is traced from; if several layers share it, the first one, whose weights become arguments."""
    part = module.get_submodule(plan.spec.layer_instances[0])
    return part, share_weights(plan, part)


def build(job: Job, folder: Path, configs: Path, device: str) -> float:
    """Compile an engine into `folder`, from weights without values; returns the seconds it took."""
    path = folder / job.file
    if path.exists():
        return 0.0
    started = time.perf_counter()
    shaped = tensors_of(
        job.stage, configs, job.quantization, lambda _, shape: torch.empty(shape, device="meta")
    )
    tensors = {name: torch.empty_like(each, device=device) for name, each in shaped.items()}
    (plan,) = [each for each in plans_of(job.stage, configs, device) if each.spec.name == job.graph]
    part, shared = part_of(plan, module_of(job.stage, configs, job.quantization, tensors))
    program = capture(
        shared,
        part,
        stage=job.stage,
        static_shapes=None,
        device=torch.device(device),
    )
    traced = time.perf_counter()
    aoti.compile_graph(program, path, device=device, cache=None, where=f"{job.stage}.{job.graph}")
    print(f"{job.file}: traced in {traced - started:.0f} s", flush=True)
    return time.perf_counter() - started


class Measurement:
    """Measures engines on one device; `figures` grow by each case."""

    def __init__(self, networks: Networks, rates: Mapping[str, float], count: int) -> None:
        self.networks, self.device, self.count = networks, networks.device, count
        self.peak = rates["bf16_tflop_s"]
        self.figures: list[Figure] = []
        self.breakdown: dict[str, list[Figure]] = {}
        self.failures: list[str] = []
        self._watch = Stopwatch(self.device)
        self._flops: dict[tuple[object, ...], int] = {}
        self._exact: dict[Case, Tensor] = {}
        with torch.device("meta"):
            self._meta = {
                name: find(name).build(config_of(name, networks.configs), Shard()) for name in STAGES
            }

    def attempt(self, measure: Callable[[], Figure]) -> None:
        """Add a figure. A case that fails leaves the others: the script ends with an error after them."""
        try:
            self.figures.append(measure())
            print(self.figures[-1], flush=True)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def times(self, call: Callable[[], object]) -> dict[str, float]:
        """Summary of at most `count` timed runs; fewer if one is slow."""
        (once,) = self._watch.samples_ms(call, 1)
        return harness.summary(self._watch.samples_ms(call, max(3, min(self.count, int(_SPENT_MS / once)))))

    def memory(self, call: Callable[[], object]) -> int | None:
        """Bytes that a call takes at the most, its results included; None on the CPU."""
        if self.device.type == "cpu":
            call()
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def randn(self, *shape: int) -> Tensor:
        """The same values at every call."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        return torch.randn(shape, generator=generator, device=self.device)

    def inputs(
        self, parameters: ImageDitParameters, scale: int, case: Case
    ) -> tuple[Tensor, Tensor, TokenLayout]:
        """Latents, caption and layout of a step with guidance."""
        latent = (case.size[0] // scale, case.size[1] // scale)
        layout = token_layout(parameters, latent, case.frames, case.rows)
        samples, values = 2 * case.pictures, parameters.patch_size**2 * parameters.latent_channels
        return (
            self.randn(samples, len(layout.is_pad), values),
            self.randn(samples, case.rows, parameters.hidden_size).bfloat16(),
            layout.to(self.device),
        )

    def rates(self, summary: Mapping[str, float], stage: str, method: str, *shaped: Tensor) -> Figure:
        """Arithmetic of a method, counted from the shapes of its inputs, and its rate at the median."""
        key = (stage, method, *(each.shape for each in shaped))
        if key not in self._flops:
            with FlopCounterMode(display=False) as counter:
                getattr(self._meta[stage], method)(*(each.to("meta") for each in shaped))
            self._flops[key] = counter.get_total_flops()
        tflop = self._flops[key] / 1e12
        rate = 1e3 * tflop / summary["median"]
        return {
            "tflop": round(tflop, 3),
            "tflop_s": round(rate, 1),
            "share_of_bf16_peak": round(rate / self.peak, 3),
        }

    def plan(self, engines: ImageEngines, num_samplers: int = 1) -> ImageMemory:
        return ImageMemory(
            sampler=engines.parameters,
            vae=engines.vae,
            itemsize=engines.sampler.itemsize,
            max_samples=engines.sampler.max_batch,
            num_samplers=num_samplers,
        )

    def step(self, engines: ImageEngines, variant: str, case: Case) -> Figure:
        """A step with guidance; `enqueue_ms`: the host's time for it."""
        latents, caption, layout = self.inputs(engines.parameters, engines.vae.scale, case)

        def call() -> Tensor:
            return engines.sampler.velocity(latents, caption, layout, _TIME)

        summary = self.times(call)
        shaped = (latents, layout.positions, layout.is_pad, caption.float(), self.randn(len(latents)))
        planned = self.plan(engines).step_bytes(
            case.size, case.pictures, num_caption=case.rows, num_samples=2, num_frames=case.frames
        )
        return {
            "name": "image_step_ms",
            "variant": variant,
            **case.figure,
            "tokens": len(layout.is_pad),
            "blocks": engines.sampler.num_blocks,
            **summary,
            "unit": "ms",
            "enqueue_ms": self._watch.enqueue_ms(call, 3),
            **self.rates(summary, "image_dit", "velocity", *shaped),
            "memory_bytes": self.memory(call),
            "planned_bytes": planned,
        }

    def error(self, engines: ImageEngines, variant: str, case: Case) -> Figure:
        """Error of a velocity against float32 over the weights before quantization."""
        latents, caption, layout = self.inputs(engines.parameters, engines.vae.scale, case)
        if case not in self._exact:
            times = torch.full((len(latents),), _TIME, device=self.device)
            with plain_torch():
                (self._exact[case],) = self.networks.float32("image_dit").velocity(
                    latents, layout.positions, layout.is_pad, caption.float(), times
                )
        exact, found = self._exact[case], engines.sampler.velocity(latents, caption, layout, _TIME)
        return {
            "name": "image_velocity_error",
            "variant": variant,
            **case.figure,
            "unit": "max |error| / max |fp32 reference|",
            "value": relative_error(found, exact),
            "relative_l2": float((found - exact).norm() / exact.norm()),
        }

    def kernels(self, engines: ImageEngines, case: Case) -> list[Figure]:
        """The kernels of a step that take the most time."""
        latents, caption, layout = self.inputs(engines.parameters, engines.vae.scale, case)
        return harness.kernel_table(lambda: engines.sampler.velocity(latents, caption, layout, _TIME), 2)[:24]

    def caption(self, engines: ImageEngines, variant: str, rows: int) -> Figure:
        parameters = engines.parameters
        given = self.randn(rows, parameters.caption_width)
        summary = self.times(lambda: engines.sampler.caption(given))
        is_pad = torch.zeros(padded(rows, parameters.token_multiple), dtype=torch.bool)
        return {
            "name": "image_caption_ms",
            "variant": variant,
            "caption_rows": rows,
            **summary,
            "unit": "ms",
            **self.rates(summary, "image_dit", "caption", given[None], is_pad),
            "memory_bytes": self.memory(lambda: engines.sampler.caption(given)),
        }

    def vae(self, engines: ImageEngines, variant: str, method: str, size: Size) -> Figure:
        scale = engines.vae.scale
        height, width = size[0] // scale, size[1] // scale
        if method == "decode":
            given = self.randn(engines.vae.latent_channels, height, width)
            shaped = given[None]
        else:
            given = self.randn(3, *size).tanh()
            shaped = given.view(1, 3, height, scale, width, scale)
        call = functools.partial(getattr(engines, method), given)
        summary = self.times(call)
        return {
            "name": f"image_{method}_ms",
            "variant": variant,
            "size": list(size),
            **summary,
            "unit": "ms",
            **self.rates(summary, "image_vae", method, shaped),
            "memory_bytes": self.memory(call),
            "planned_bytes": self.plan(engines).decode_bytes(size),
        }

    def picture(
        self, engines: ImageEngines, second: ImageSampler | None, variant: str, case: Case, num_steps: int
    ) -> Figure:
        """Whole pictures of one request, from the queries' hidden rows to pixels on the host.

        `second`: computes the negative samples, on a device of its own.
        """
        worker = ImageWorker(engines, second)
        (count,) = self.networks.parameters("image_condition").num_queries[-1:]
        width = config_of("image_condition", self.networks.configs).hidden_size
        reference = np.random.default_rng(_SEED).integers(256, size=(*case.size, 3), dtype=np.uint8)
        drawing = Drawing(
            size=case.size,
            num_steps=num_steps,
            guidance=2.0,
            prompt=PicturePrompt(residual=self.randn(count, width), delta=self.randn(count, width)),
            reference=reference if case.frames == 2 else None,
        )
        moments: list[float] = []

        def draw(most_steps: int) -> None:
            moments.append(time.perf_counter())
            batch = worker.begin(worker.prepare(drawing), range(case.pictures))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            moments.append(time.perf_counter())
            for step in range(min(most_steps, batch.prepared.num_steps)):
                worker.step(batch)  # waits for the step before
                if step:
                    moments.append(time.perf_counter())
            worker.wait(batch)
            moments.append(time.perf_counter())
            for index in range(case.pictures):
                worker.decode(batch, index)
            moments.append(time.perf_counter())

        draw(2)  # warm-up
        moments.clear()
        memory = self.memory(lambda: draw(num_steps))
        planned = self.plan(engines, len(worker.samplers)).batch_bytes(
            case.size, case.pictures, num_caption=case.rows, num_samples=2, num_frames=case.frames
        )
        passed = [after - before for before, after in itertools.pairwise(moments)]
        total = moments[-1] - moments[0]
        return {
            "name": "image_s",
            "variant": variant,
            "gpus": len(worker.samplers),
            **case.figure,
            "steps": num_steps,
            "evaluated_steps": len(passed) - 2,
            "value": round(total, 4),
            "a_picture": round(total / case.pictures, 4),
            "unit": "s",
            "prepare_s": round(passed[0], 4),
            "step_ms": harness.summary([1e3 * each for each in passed[1:-1]]),
            "decode_s": round(passed[-1], 4),
            "memory_bytes": memory,
            "planned_bytes": planned,
        }


def step_cases(largest: Size, smaller: Sequence[Size]) -> list[Case]:
    """The most wanted first, so that a run that is cut short has them."""
    return [
        Case(size=largest),
        Case(size=largest, rows=512),
        Case(size=largest, frames=2),
        *(Case(size=size) for size in smaller),
        *(Case(size=largest, pictures=count) for count in (2, _MAX_PICTURES)),
    ]


def picture_cases(largest: Size, smaller: Sequence[Size]) -> list[Case]:
    return [
        Case(size=largest),
        *(Case(size=size) for size in smaller),
        Case(size=largest, frames=2),
        *(Case(size=largest, pictures=count) for count in (2, _MAX_PICTURES)),
    ]


def largest_bucket() -> Size:
    return max((size for each in RESOLUTIONS for size in sizes(each)), key=lambda size: size[0] * size[1])


def measure(given: argparse.Namespace, bench: Measurement, save: Callable[[], None]) -> None:
    squares = [(side, side) for side in sorted(given.sizes, reverse=True)]
    largest, smaller = squares[0], squares[1:]
    variants = {name: bench.networks.engines(name) for name in given.variants}
    print(f"loaded {', '.join(variants)}", flush=True)
    if "step" in given.parts:
        for name in given.profile:
            bench.breakdown[name] = bench.kernels(variants[name], Case(size=largest))
            print(name, *bench.breakdown[name], sep="\n", flush=True)
        for case, (name, engines) in itertools.product(step_cases(largest, smaller), variants.items()):
            bench.attempt(functools.partial(bench.step, engines, name, case))
            save()
        for name, engines in variants.items():
            bench.attempt(functools.partial(bench.error, engines, name, Case(size=squares[-1])))
        save()
    if "picture" in given.parts:
        others: dict[str, list[ImageSampler | None]] = {name: [None] for name in variants}
        if given.gpus == 2:
            # A rehearsal has both halves on the CPU.
            device = torch.device("cuda", 1) if bench.device.type == "cuda" else bench.device
            for name, found in others.items():
                found.append(bench.networks.sampler(name, device))
        for case, (name, engines) in itertools.product(picture_cases(largest, smaller), variants.items()):
            if name == "plain" and case.pictures > 1:
                continue
            for second in others[name]:
                bench.attempt(functools.partial(bench.picture, engines, second, name, case, given.steps))
                save()
    if "once" in given.parts:
        buckets = dict.fromkeys([*squares, largest_bucket() if bench.device.type == "cuda" else largest])
        for name, engines in variants.items():
            for rows in (256, 512):
                bench.attempt(functools.partial(bench.caption, engines, name, rows))
            if name == "fp8" and len(variants) > 1:
                continue  # its VAE is that of bfloat16
            for size, method in itertools.product(buckets, ("decode", "encode")):
                bench.attempt(functools.partial(bench.vae, engines, name, method, size))
        save()


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text} is not of {','.join(allowed)}")
        return found

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=words(PARTS), default=PARTS, help="of step, once, picture")
    parser.add_argument("--variants", type=words(VARIANTS), default=VARIANTS, help="of bfloat16, fp8, plain")
    parser.add_argument(
        "--sizes", type=arguments.wholes(16, 2048), default=(1024, 512), help="sides in pixels"
    )
    parser.add_argument("--profile", type=words(VARIANTS), default=(), help="variants with a kernel table")
    parser.add_argument(
        "--gpus",
        type=arguments.whole(1, 2),
        default=1,
        help="2: whole pictures also with a half of the guidance on each",
    )
    parser.add_argument("--steps", type=arguments.whole(2), default=30, help="of a whole picture")
    parser.add_argument("--count", type=arguments.whole(1), default=30, help="timed runs of one graph")
    parser.add_argument("--engines", type=Path, help="folder of engines to use and to leave for the next run")
    parser.add_argument("--jobs", type=arguments.whole(1), default=8, help="compiler processes at a time")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of a checkpoint's configs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write the result here, again after each figure")
    given = harness.parse_args(parser)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = given.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = dict.fromkeys(
            Job(stage=stage, graph=plan.spec.name, quantization=quantization_of(stage, variant))
            for variant in given.variants
            if variant != "plain"
            for stage in ("image_dit", "image_vae", "image_condition")
            for plan in reversed(plans_of(stage, given.configs, given.device))  # the longest compile first
        )
        count = len(jobs)
        with harness.compiler_pool(given.jobs) as pool:
            seconds = list(
                pool.map(build, jobs, [folder] * count, [given.configs] * count, [given.device] * count)
            )
        compiled = {job.file: round(each) for job, each in zip(jobs, seconds, strict=True)}
        print(compiled, flush=True)
        rates = harness.peak_rates() if given.device == "cuda" else {"bf16_tflop_s": 1.0}
        print(rates, flush=True)
        bench = Measurement(Networks(given.configs, device, folder), rates, given.count)

        def save() -> None:
            if given.json:
                document = harness.result(
                    "images",
                    rates,
                    bench.figures,
                    gpus=given.gpus,
                    compile_s=compiled,
                    kernels=bench.breakdown,
                )
                harness.write(given.json, document)

        measure(given, bench, save)
        if bench.failures:
            raise SystemExit("\n".join(["failed:", *bench.failures]))


if __name__ == "__main__":
    main()
