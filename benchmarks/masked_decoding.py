"""Time per token of requests that are decoded together, some of them constrained, with penalties or log probabilities.

A server's worker, scheduler and loop, over random weights at the released dims or an artifact. For every batch size:
layers and sampling as two CUDA graphs, as served, and as one graph, which steps without edits could run instead; then
batches in which some requests have masks, penalties and a bias, or log probabilities. All cases run in turns; times are
those of a request without edits, if there is one. Each mask takes `--fill-us` of the loop's thread, as a grammar does.

    python benchmarks/masked_decoding.py --quantize fp8 --json benchmarks/results/masked-decoding-….json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import thinker_engines as engines
import torch
from arguments import whole, wholes
from torch import Tensor

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.parameters import ThinkerParameters
from mingc.export.layers.decoder import PAGE_SIZE
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.kernels.sample_tokens import NUM_COLUMNS
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.cuda_graphs import GraphPool, GraphRunner, Shapes
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import FailedItem, Item
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.scheduler import ThinkerScheduler
from mingc.runtime.thinker.step_options import StepOptions
from mingc.runtime.thinker.token_matcher import MaskWords, full_mask
from mingc.runtime.thinker.worker import GraphKey, ThinkerWorker

CONFIGS = Path(__file__).resolve().parent / "released"
_CHUNK = 16  # tokens: the shortest chunk there is, and the fewest engines
_ONE_GRAPH = 1  # marks keys of graphs with layers and sampling
_LIMIT_S = 300.0


class Worker(ThinkerWorker):
    """Also captures layers and sampling as one graph; `is_one_graph`: its steps run that."""

    is_one_graph = False
    _held: Mapping[str, Tensor]  # inputs of the layers, until the sampling has its own

    def capture_one_graphs(self) -> None:
        pool = GraphPool(self.device) if self._is_captured else None
        for size in sorted(self.batches, reverse=True):
            ints = (torch.int64, (size,))
            shapes: Shapes = {
                **dict.fromkeys(("input_ids", "positions", "lengths", "slots"), ints),
                "page_table": (torch.int32, (size, max(self._decode.spec.dim("P").buckets))),
                "sampling": (torch.float32, (size, NUM_COLUMNS)),
            }
            for is_random in (True, False):
                key = GraphKey("next_tokens", size, layer_group=_ONE_GRAPH, is_random=is_random)
                run = self._layers_and_sampling(key)
                self._graphs[key] = GraphRunner(shapes, run, device=self.device, pool=pool, name="one graph")

    def _layers_and_sampling(self, key: GraphKey) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            served = self._decode_logits[key.size]
            self._run_decode(inputs, size=key.size)
            tokens = self._sample(inputs, key=key)
            self._decode_logits[key.size] = served
            return tokens

        return run

    def _run(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if not self.is_one_graph or key.kind not in ("decode", "next_tokens"):
            return super()._run(key, inputs)
        if key.kind == "decode":
            self._held = inputs
            return (self._decode_logits[key.size],)
        return self._graphs[key._replace(layer_group=_ONE_GRAPH)]({**self._held, **inputs})


class RandomMatcher:
    """Allows one of a few random halves of the vocabulary; filling takes `fill_us` microseconds of this thread."""

    is_active, is_stopped = True, False

    def __init__(self, vocab_size: int, fill_us: float) -> None:
        self._masks = np.random.default_rng(0).integers(
            -(1 << 31), 1 << 31, (8, len(full_mask(vocab_size))), np.int32
        )
        self._fill_s = 1e-6 * fill_us
        self._count = 0

    def fill(self, words: MaskWords) -> None:
        until = time.perf_counter() + self._fill_s
        words[:] = self._masks[self._count % len(self._masks)]
        self._count += 1
        while time.perf_counter() < until:
            pass

    def accept(self, token: int) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch. `num_edited` of its requests have the `rules`, or masks."""

    name: str
    num_edited: int = 0
    is_masked: bool = False
    is_one_graph: bool = False
    temperature: float = 0.0
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_PENALTIES = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": tuple((token, 1.0) for token in range(300)),
}
PLAIN, RANDOM = Case(name="plain"), Case(name="random", temperature=0.7)
CASES = (
    PLAIN,
    Case(name="plain, one graph", is_one_graph=True),
    RANDOM,
    Case(name="random, one graph", is_one_graph=True, temperature=0.7),
    Case(name="1 masked", num_edited=1, is_masked=True),
    Case(name="8 masked", num_edited=8, is_masked=True),
    Case(name="1 with logprobs", num_edited=1, rules={"num_logprobs": 20}),
    Case(name="8 with logprobs", num_edited=8, rules={"num_logprobs": 20}),
    Case(name="1 with penalties and bias", num_edited=1, rules=_PENALTIES),
    Case(name="8 with penalties and bias", num_edited=8, rules=_PENALTIES),
)


class Server:
    """A worker with the loop that runs it."""

    def __init__(self, worker: Worker, parameters: ThinkerParameters, given: argparse.Namespace) -> None:
        self._worker, self._given, self._vocab_size = worker, given, parameters.vocab_size
        self._loop = ThinkerLoop(
            worker,
            ThinkerScheduler(
                PagePool(worker.num_pages, worker.page_size),
                max_running=worker.max_batch,
                chunk=worker.chunk,
                prefill_policy=ChunkedPrefillPolicy(num_layer_groups=worker.num_layer_groups),
                max_context=given.prompt + given.tokens,
                max_waiting=worker.max_batch,
            ),
            stop_ids=(),
            vocab_size=parameters.vocab_size,
        )
        self._loop.start()

    def close(self) -> None:
        self._loop.stop(_LIMIT_S)
        self._worker.close()

    def step_ms(self, batch: int, case: Case) -> list[float]:
        """Milliseconds between the tokens of the last request while all of the batch are decoded."""
        self._worker.is_one_graph = case.is_one_graph
        times: list[list[float]] = [[] for _ in range(batch)]
        errors: list[Exception] = []
        ended = threading.Semaphore(0)

        def receive(row: int, item: Item) -> None:
            times[row].append(time.perf_counter())
            if isinstance(item, FailedItem):
                errors.append(item.error)
            if isinstance(item, FailedItem) or getattr(item, "finish", None) is not None:
                ended.release()

        for row in range(batch):
            is_edited = row < case.num_edited
            sampling = SamplingParams(
                max_tokens=self._given.tokens,
                temperature=case.temperature,
                **(case.rules if is_edited else {}),
            )
            matcher = RandomMatcher(self._vocab_size, self._given.fill_us)
            self._loop.submit(
                self._prompt(row),
                sampling,
                row,
                lambda item, row=row: receive(row, item),
                matcher=matcher if is_edited and case.is_masked else None,
            )
        for _ in range(batch):
            if not ended.acquire(timeout=_LIMIT_S):
                raise RuntimeError(f"{case.name}: no end after {_LIMIT_S:g} s")
        if errors:
            raise errors[0]
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        window = [at for at in times[-1] if first <= at <= last]
        return [1e3 * (end - start) for start, end in itertools.pairwise(window)]

    def _prompt(self, row: int) -> ThinkerPrompt:
        count = self._given.prompt
        return ThinkerPrompt(
            input_ids=np.random.default_rng(row).integers(0, self._vocab_size, count),
            positions=np.tile(np.arange(count), (3, 1)),
            rope_delta=0,
            embed_kind=np.zeros(count, np.int64),
            media_embeds=None,
        )


def load(given: argparse.Namespace, device: torch.device) -> tuple[LoadedStage, ThinkerParameters]:
    """The thinker of the artifact, or of random weights, whose engines are compiled unless they are there."""
    if given.artifact is not None:
        artifact = open_artifact(given.artifact)
        parameters = artifact.manifest.parameters_of("thinker", ThinkerParameters)
        return load_stage(artifact, "thinker", device), parameters
    setup = engines.Setup(
        configs=str(given.configs),
        world_size=1,
        batches=given.batches,
        chunks=(_CHUNK,),
        max_model_len=-(-(given.prompt + given.tokens) // PAGE_SIZE) * PAGE_SIZE,
        device=device.type,
        layers=given.layers,
        quantize=given.quantize,
    )
    full = find("thinker").config(open_synthetic(given.configs))
    parameters = find("thinker").parameters(
        dataclasses.replace(full, decoder=setup.config()), setup.options()
    )
    assert isinstance(parameters, ThinkerParameters)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [
            engines.engine_path(folder, setup, graph, sizes)
            for graph in setup.plans()
            for sizes in setup.sizes(graph)
        ]
        if not all(path.exists() for path in paths):
            engines.build_all(setup, folder, given.jobs)
        weights = engines.random_weights(setup, device, distinct=given.distinct)
        return engines.load(setup, folder, weights, device), parameters


def measure(server: Server, batches: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Step times of every case that a batch has enough requests for."""
    figures: list[dict[str, Any]] = []
    for batch in batches:
        cases = [case for case in CASES if case.num_edited <= batch]
        samples: dict[str, list[float]] = {case.name: [] for case in cases}
        for turn in range(rounds + 1):  # the first one warms up
            for case in cases:
                found = server.step_ms(batch, case)
                samples[case.name] += found if turn else []
        for case in cases:
            plain = (RANDOM if case.temperature else PLAIN).name
            medians = [harness.summary(samples[name])["median"] for name in (case.name, plain)]
            figure = {
                "name": "step_ms",
                "batch": batch,
                "case": case.name,
                **harness.summary(samples[case.name]),
                "unit": "ms",
                "of_plain": round(medians[0] / medians[1], 4),
            }
            print(" ".join(f"{key}={value}" for key, value in figure.items()), file=sys.stderr, flush=True)
            figures.append(figure)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, help="an exported thinker instead of random weights")
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of the model's configs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to test this script")
    parser.add_argument("--batches", type=wholes(1), default=(1, 16), help="requests decoded together")
    parser.add_argument("--prompt", type=whole(1), default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=whole(8), default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=whole(1), default=3, help="how often every case runs")
    parser.add_argument("--fill-us", type=whole(0), default=25, help="time to fill a mask, in microseconds")
    parser.add_argument("--quantize", choices=["fp8", "int4"], help="weight format of the engines")
    parser.add_argument("--layers", type=whole(1), help="fewer layers than released")
    parser.add_argument("--distinct", type=whole(1), help="expert layers with weights of their own")
    parser.add_argument(
        "--engines", type=Path, help="keep compiled engines in this folder, and use what it has"
    )
    parser.add_argument("--jobs", type=whole(1), default=8, help="compiler processes")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = harness.parse_args(parser)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    with torch.inference_mode():
        stage, parameters = load(given, device)
        pages = -(-(given.prompt + given.tokens) // parameters.page_size)
        worker = Worker(
            stage,
            parameters,
            num_pages=1 + (1 + pages) * max(given.batches),
            device=device,
            options=StepOptions(is_static=True),
        )
        worker.capture_one_graphs()
    server = Server(worker, parameters, given)
    try:
        figures = measure(server, given.batches, given.rounds)
    finally:
        server.close()
    if given.json:
        same = ("prompt", "tokens", "rounds", "fill_us", "quantize", "layers", "distinct")
        more = {name: getattr(given, name) for name in same}
        harness.write(given.json, harness.result("masked_decoding", harness.peak_rates(), figures, **more))


if __name__ == "__main__":
    main()
