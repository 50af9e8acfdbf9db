"""Speed of one talker patch on one GPU at the released dims: random weights, stop head ignored.

A patch is everything a request needs for 0.32 s of sound: ten flow-matching steps with guidance, aggregator, stop
head, streaming VAE decode, one step of the speech LLM, and the gathering and scattering of per-request state.
Timed from patch to patch as a server runs them (`mingc.runtime.talker.patch_pipeline`), and compared with the same
modules in plain torch: eager, and in a CUDA graph.

    python benchmarks/talker.py --batches 1,2,4,8,16,32 --json benchmarks/results/talker-h200-….json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import talker_engines
import torch
from torch import Tensor, nn

from mingc.artifacts.spec import GraphSpec
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.kernels.dispatch import plain_torch
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.backends.aoti import AotiEngine
from mingc.runtime.talker.patch_pipeline import LaunchedPatch, PatchPipeline

CONTEXT = 256  # tokens of each request in the speech LLM: a prompt of about 150 and 100 patches
PATCH_INDEX = 100
SAMPLER_INPUTS = ("noise", "step_noise", "guidance", "sigma", "temperature")
WARM_UPS = 10
_PARITY_INPUTS = 8
Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Step:
    """The device work of one patch of B requests over static tensors; `runs` gives the three networks."""

    def __init__(self, batch: int, runs: Mapping[str, Run], specs: Mapping[str, GraphSpec]) -> None:
        self.runs = runs
        sizes = {"B": batch, "S": batch + 1}
        generator = torch.Generator("cuda").manual_seed(batch)

        def state(spec: GraphSpec) -> dict[str, Tensor]:
            return {
                each.name: torch.randn(each.shape_at(sizes), generator=generator, device="cuda").to(
                    getattr(torch, each.dtype)
                )
                for each in spec.state
            }

        def normal(spec: GraphSpec, name: str, rows: int) -> Tensor:
            tensor = spec.input(name)
            shape = [rows, *tensor.shape[1:]]
            return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, tensor.dtype))

        flow = specs["cfm"]
        self.talker_state, self.vae_state = state(specs["talker"]), state(specs["audio_vae"])
        self.hidden, self.history = (normal(flow, name, batch + 1) for name in ("hidden", "history"))
        slots = torch.arange(1, batch + 1, device="cuda")
        self.inputs = {
            **{name: normal(flow, name, batch) for name in ("noise", "step_noise")},
            **{
                name: torch.full((batch,), value, device="cuda")
                for name, value in (("guidance", 2.0), ("sigma", 0.25), ("temperature", 0.5))
            },
            "slots": slots,
            "step_slots": slots,
            "lengths": torch.full((batch,), CONTEXT, device="cuda"),
            "patch_index": torch.full((batch,), PATCH_INDEX, device="cuda"),
        }

    def in_sequence(self) -> tuple[Tensor, Tensor]:
        """Compute samples and stop probabilities on one stream."""
        made = self.sample(self.inputs)
        samples = self.decode(made["latents"], self.inputs["slots"], self.inputs["patch_index"])
        self.advance(made, self.inputs)
        return samples, made["stop_probability"]

    def sample(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        slots = inputs["slots"]
        made = self.runs["cfm"](
            {
                "hidden": self.hidden.index_select(0, slots),
                "history": self.history.index_select(0, slots),
                **{name: inputs[name] for name in SAMPLER_INPUTS},
            }
        )
        self.history.index_copy_(0, slots, made["next_history"])
        return made

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        given = {"latents": latents, "slots": slots, "patch_index": patch_index, **self.vae_state}
        return self.runs["audio_vae"](given)["samples"]

    def advance(self, sampled: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        slots = inputs["step_slots"]
        stepped = self.runs["talker"](
            {
                "embeds": sampled["next_embeds"],
                "slots": slots,
                "lengths": inputs["lengths"],
                **self.talker_state,
            }
        )
        self.hidden.index_copy_(0, slots, stepped["hidden"])


def served_times(step: Step, batch: int, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from patch to patch, launched two ahead as in a server; and the latency of single patches, from the
    launch until samples and stop probabilities are on the host.
    """
    noise = step.inputs["step_noise"]
    pipeline = PatchPipeline(
        step,
        [batch],
        num_steps=noise.shape[1],
        patch=(noise.shape[2], noise.shape[3]),
        device=noise.device,
    )
    inputs = {name: value.cpu() for name, value in step.inputs.items()}
    under_way: deque[LaunchedPatch] = deque()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(count + WARM_UPS)]
    for start in starts:
        if len(under_way) == 2:
            under_way.popleft().wait()
        start.record()
        under_way.append(pipeline.launch(batch, inputs))
    torch.cuda.synchronize()
    periods = [start.elapsed_time(end) for start, end in itertools.pairwise(starts[WARM_UPS:])]
    alone = []
    for _ in range(max(1, count // 4)):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pipeline.launch(batch, inputs).wait()
        alone.append(1e3 * (time.perf_counter() - begun))
    torch.cuda.synchronize()
    return periods, alone


def engine_run(path: Path, spec: GraphSpec, weights: Mapping[str, Tensor]) -> Run:
    engine = AotiEngine(path, torch.device("cuda", 0))
    engine.bind(weights)
    names = [each.name for each in (*spec.inputs, *spec.state)]
    outputs = [each.name for each in spec.outputs]
    return lambda tensors: dict(zip(outputs, engine.run([tensors[name] for name in names]), strict=True))


def module_run(module: nn.Module, method: str, spec: GraphSpec) -> Run:
    names = [each.name for each in (*spec.inputs, *spec.state)]
    outputs = [each.name for each in spec.outputs]

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(outputs, getattr(module, method)(*[tensors[name] for name in names]), strict=True))

    return run


def parity(stage: str, batch: int, run: Run, module: nn.Module, reference: nn.Module) -> list[dict[str, Any]]:
    """Error of engine and of eager bf16 against eager fp32, of each output and the worst state tensor.

    Returns the worst of several inputs: the largest error of a decoder's samples differs between inputs by a factor
    of seventy.
    """
    graph = dict(talker_engines.GRAPHS)[stage]
    plan = talker_engines.plan_of(stage, graph)
    states = [each.name for each in plan.spec.state]
    kinds = {each.name: [each.name] for each in plan.spec.outputs}
    if states:
        kinds["state"] = states
    errors: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for seed in range(_PARITY_INPUTS):
        example = plan.example({"B": batch, "S": batch + 1}, torch.Generator().manual_seed(seed))
        tensors = {name: value.cuda() for name, value in example.items()}
        with plain_torch():
            expected = outcome(module_run(reference, plan.method, plan.spec), tensors, states, is_wide=True)
            eager = outcome(module_run(module, plan.method, plan.spec), tensors, states)
        ours = outcome(run, tensors, states)
        for kind, names in kinds.items():
            for name in names:
                errors[kind].append(
                    (relative_error(ours[name], expected[name]), relative_error(eager[name], expected[name]))
                )
    return [
        {
            "name": "engine_error",
            "engine": f"{stage}.{graph}",
            "output": kind,
            "batch": batch,
            "unit": "max |error| / max |fp32 reference|",
            "inputs": _PARITY_INPUTS,
            "value": max(ours for ours, _ in found),
            "reference": {"name": "eager bf16", "value": max(eager for _, eager in found)},
        }
        for kind, found in errors.items()
    ]


def outcome(
    call: Run, tensors: Mapping[str, Tensor], states: Sequence[str], *, is_wide: bool = False
) -> dict[str, Tensor]:
    """Outputs and updated state of a call; `tensors` are not modified."""
    copied = {
        name: (value.float() if is_wide and value.is_floating_point() else value).clone()
        for name, value in tensors.items()
    }
    found = {**call(copied), **{name: copied[name] for name in states}}
    torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", type=Path, help="folder of engines to use and to leave for the next run")
    parser.add_argument("--jobs", type=int, default=8, help="compiler processes at a time")
    parser.add_argument("--count", type=int, default=200, help="timed replays")
    parser.add_argument("--profile", default="1,32", help="batches with a per-kernel breakdown")
    parser.add_argument("--no-references", action="store_true")
    parser.add_argument(
        "--quantize", choices=["fp8"], help="weights of our engines; the references stay bf16"
    )
    given = harness.parse_args(parser)
    batches = [int(size) for size in given.batches.split(",")]
    profiled = [int(size) for size in given.profile.split(",") if size]
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = given.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        missing = [
            batch
            for batch in batches
            if not all(
                (folder / talker_engines.engine_file(*graph, batch, given.quantize)).exists()
                for graph in talker_engines.GRAPHS
            )
        ]
        built = talker_engines.build_all(missing, folder, given.jobs, given.quantize)
        for each in built:
            print(f"{each.stage}.{each.graph} B={each.batch}: compiled in {each.seconds:.0f} s", flush=True)
        measure(given, batches, profiled, folder, built)


def measure(
    given: argparse.Namespace,
    batches: list[int],
    profiled: list[int],
    folder: Path,
    built: list[talker_engines.Built],
) -> None:
    rates = harness.peak_rates()
    print(rates, flush=True)
    figures: list[dict[str, Any]] = []
    breakdown: dict[str, Any] = {}
    vae = find("audio_vae")
    parameters = vae.parameters(vae.config(open_synthetic(talker_engines.CONFIGS)), talker_engines.options())
    modules = {stage: talker_engines.module_of(stage, torch.bfloat16) for stage, _ in talker_engines.GRAPHS}
    plans = {stage: talker_engines.plan_of(stage, graph) for stage, graph in talker_engines.GRAPHS}
    specs = {stage: plan.spec for stage, plan in plans.items()}
    weights = {
        stage: dict(talker_engines.module_of(stage, torch.bfloat16, given.quantize).state_dict())
        for stage in modules
    }
    plain_runs = {
        stage: module_run(module, plans[stage].method, specs[stage]) for stage, module in modules.items()
    }
    wide: dict[str, nn.Module] = {}
    seconds = 4 * parameters.samples_per_latent / parameters.sample_rate
    for batch in batches:
        runs = {
            stage: engine_run(
                folder / talker_engines.engine_file(stage, graph, batch, given.quantize),
                specs[stage],
                weights[stage],
            )
            for stage, graph in talker_engines.GRAPHS
        }
        step = Step(batch, runs, specs)
        times, alone = served_times(step, batch, given.count)
        figure = {
            "name": "patch_step_ms",
            "batch": batch,
            "context": CONTEXT,
            **harness.summary(times),
            "unit": "ms",
        }
        figures.append(figure)
        figures.append({"name": "patch_latency_ms", "batch": batch, **harness.summary(alone), "unit": "ms"})
        single = harness.capture(step.in_sequence)
        print(f"B={batch}: {figure['median']:.3f} ms", flush=True)
        figures.append(
            {
                "name": "patch_step_ms",
                "batch": batch,
                "streams": 1,
                **harness.summary(harness.time_ms(single.replay, given.count)),
                "unit": "ms",
            }
        )
        made = step.sample(step.inputs)
        parts: dict[str, Callable[[], object]] = {
            "cfm": lambda step=step: step.sample(step.inputs),
            "audio_vae": lambda made=made, step=step: step.decode(
                made["latents"], step.inputs["slots"], step.inputs["patch_index"]
            ),
            "talker": lambda made=made, step=step: step.advance(made, step.inputs),
        }
        for name, part in parts.items():
            alone = harness.capture(part)
            samples = harness.time_ms(alone.replay, given.count)
            figures.append(
                {
                    "name": "engine_ms",
                    "engine": name,
                    "batch": batch,
                    **harness.summary(samples),
                    "unit": "ms",
                }
            )
            if batch in profiled:
                breakdown[f"{name} B={batch}"] = harness.kernel_table(alone.replay)
        if not given.no_references:
            with plain_torch():
                plain = Step(batch, plain_runs, specs)
                eager = harness.time_ms(plain.in_sequence, 10, 2)
                captured = harness.time_ms(harness.capture(plain.in_sequence).replay, 30)
            figure["reference"] = {"name": "eager torch", **harness.summary(eager)}
            figure["reference_graph"] = {"name": "torch in a CUDA graph", **harness.summary(captured)}
            del plain
        audio = batch * seconds / (statistics.median(times) / 1e3)
        figures.append(
            {
                "name": "audio_s_per_s",
                "batch": batch,
                "median": round(audio, 1),
                "unit": "s/s",
                "n": given.count,
            }
        )
        if not given.no_references:
            for stage, _ in talker_engines.GRAPHS:
                if stage not in wide:
                    wide[stage] = talker_engines.module_of(stage, torch.float32)
                figures += parity(stage, batch, runs[stage], modules[stage], wide[stage])
        del single, step, runs
    if given.quantize:
        figures = [{**figure, "quantize": given.quantize} for figure in figures]
    report(figures)
    if given.json:
        compiled = [
            {"engine": f"{e.stage}.{e.graph}", "batch": e.batch, "seconds": round(e.seconds, 1)}
            for e in built
        ]
        harness.write(
            given.json, harness.result("talker", rates, figures, compile=compiled, breakdown=breakdown)
        )


def report(figures: list[dict[str, Any]]) -> None:
    for figure in figures:
        if figure["name"] == "engine_error":
            ours, eager = figure["value"], figure["reference"]["value"]
            print(
                f"{figure['engine']} {figure['output']} B={figure['batch']}: {ours:.2e} (eager bf16 {eager:.2e})"
            )
    for figure in figures:
        if figure["name"] == "engine_ms":
            print(f"B={figure['batch']:<3} {figure['engine']:10} {figure['median']:8.3f} ms")
    for figure in figures:
        if figure["name"] == "patch_step_ms":
            others = "".join(
                f"  {reference['name']} {reference['median']:.2f} ms ({reference['median'] / figure['median']:.1f}x)"
                for key in ("reference", "reference_graph")
                if (reference := figure.get(key))
            )
            streams = "one stream" if figure.get("streams") == 1 else "patch step"
            print(
                f"B={figure['batch']:<3} {streams} {figure['median']:.3f} ms p95 {figure['p95']:.3f}{others}"
            )
        if figure["name"] == "patch_latency_ms":
            print(f"B={figure['batch']:<3} launch to samples on the host {figure['median']:.3f} ms")
        if figure["name"] == "audio_s_per_s":
            print(f"B={figure['batch']:<3} {figure['median']:.0f} audio s/s")


if __name__ == "__main__":
    main()
