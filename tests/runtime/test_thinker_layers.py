"""A thinker of two ranks, simulated in one process: partial sums, shares of the logits, rank 0's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from collector import Collector
from fake_engines import HIDDEN, make_graph
from fake_thinker import PAGE, VOCAB, make_prompt, make_thinker_loop, make_thinker_stage, make_thinker_worker
from hand_run import run_until_idle
from torch import Tensor

from mingc.kernels.sample_tokens import NUM_COLUMNS
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker import device_sampler, layers, worker
from mingc.runtime.thinker.device_sampler import sampling_columns
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.step import DecodeStep, PrefillStep
from mingc.runtime.thinker.worker import ThinkerWorker

PROMPTS = [
    make_prompt(list(range(40, 104)), media=[10, 11, 60], rope_delta=-3),  # two overlapped chunks
    make_prompt([3, 1, 4, 1, 5]),
    make_prompt([9] * 100),
]
# One layer group per step beside decoding requests.
SLOW_CHUNKS = ChunkedPrefillPolicy(
    num_layer_groups=3, latency_model=StepLatencyModel(chunks=((64, 400.0),), decodes=((8, 1.0),))
)


class TwoRanks:
    """Rank 0 of two. Every half-layer returns a half of its sum, the head a half of the logits.

    `all_reduce_` adds the other rank's equal half. `num_sums` counts partial sums, `num_all_reduces` those summed.
    """

    def __init__(self, stage: LoadedStage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = stage
        self.num_sums = self.num_all_reduces = 0
        self._logits: list[Tensor] = []
        for name in ("prefill_attention", "decode_attention", "dense"):
            self._wrap(name, self._half_of_the_sum)
        self._wrap("head", self._half_of_the_logits)
        reducer = SimpleNamespace(all_reduce_=self.all_reduce_)
        monkeypatch.setattr(worker, "create_all_reduce", lambda *_args, **_options: reducer)

    def all_reduce_(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self.num_all_reduces += 1
        x.mul_(2)

    def gather(self, share: Tensor) -> Tensor:
        """Both halves, and columns beyond the vocabulary, as a sharded head has them."""
        logits = self._logits.pop()
        assert torch.equal(share, logits[:, : VOCAB // 2])
        return torch.cat([logits, torch.full((len(logits), 4), 1e9)], dim=1)

    def _half_of_the_sum(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        residual, partial = outputs
        self.num_sums += 1
        return [residual, partial / 2]

    def _half_of_the_logits(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        self._logits.append(outputs[0])
        return [outputs[0][:, : VOCAB // 2]]

    def _wrap(self, name: str, share: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        engine = self.stage.graphs[name].engines[None]
        run = engine.run
        engine.run = lambda tensors: share(run(tensors))  # type: ignore[method-assign]


class LateCommStream:
    """A communication stream that works when it is waited for, and never if it is not."""

    num_started = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def start(self, run: Callable[[], None]) -> Callable[[], None]:
        LateCommStream.num_started += 1
        pending = [run]

        def wait() -> None:
            if pending:
                pending.pop()()

        return wait


def make_stage() -> LoadedStage:
    return make_thinker_stage(num_layers=3, max_prompts=2)


def ask_all(loop: ThinkerLoop) -> list[list[int]]:
    answers = [Collector() for _ in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        loop.submit(prompt, SamplingParams(max_tokens=6), 5, answer.put)
    run_until_idle(loop)
    return [answer.tokens() for answer in answers]


def worker_of(loop: ThinkerLoop) -> ThinkerWorker:
    assert isinstance(loop.runner, ThinkerWorker)
    return loop.runner


@pytest.mark.parametrize("two_batch_overlap", [False, True])
@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_two_ranks_answer_as_one(
    is_static: bool, two_batch_overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask_all(make_thinker_loop(make_stage(), is_static=is_static))
    ranks = TwoRanks(make_stage(), monkeypatch)
    monkeypatch.setattr(layers, "CommStream", LateCommStream)
    monkeypatch.setattr(LateCommStream, "num_started", 0)
    loop = make_thinker_loop(
        ranks.stage, is_static=is_static, two_batch_overlap=two_batch_overlap, prefill_policy=SLOW_CHUNKS
    )
    monkeypatch.setattr(worker_of(loop)._layers, "_gather", ranks.gather)
    assert ask_all(loop) == expected
    assert ranks.num_all_reduces == ranks.num_sums, "one all-reduce after every half-layer of every chunk"
    # All tokens of the first prompt, and the last 36 of the third one, when nothing decodes any more.
    num_overlapped = 2 + 2 if two_batch_overlap else 0
    assert LateCommStream.num_started == num_overlapped * 6, "chunks, six half-layers each"


@pytest.mark.parametrize(("num_tokens", "rest"), [(33, 8), (40, 8), (41, 16), (53, 32), (64, 32)])
@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_a_rest_of_any_length_overlaps_with_the_chunk_before_it(
    num_tokens: int, rest: int, is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest runs on the engines of its own size, in turns with the chunk of 32; the answer is that of one rank."""
    prompt = make_prompt(list(range(100, 100 + num_tokens)), media=[3, num_tokens - 2], rope_delta=-2)

    def ask(loop: ThinkerLoop) -> list[int]:
        answer = Collector()
        loop.submit(prompt, SamplingParams(max_tokens=6, repetition_penalty=1.3), 5, answer.put)
        run_until_idle(loop)
        return answer.tokens()

    expected = ask(make_thinker_loop(make_stage(), is_static=is_static))
    ranks = TwoRanks(make_stage(), monkeypatch)
    monkeypatch.setattr(layers, "CommStream", LateCommStream)
    monkeypatch.setattr(LateCommStream, "num_started", 0)
    loop = make_thinker_loop(ranks.stage, is_static=is_static, two_batch_overlap=True)
    monkeypatch.setattr(worker_of(loop)._layers, "_gather", ranks.gather)
    sizes = record_rows(ranks.stage, "prefill_attention")
    assert ask(loop) == expected
    assert sizes == [32, rest] * 3, "in each of three layers"
    assert LateCommStream.num_started == 2 * 6, "two chunks, six half-layers"


@pytest.mark.parametrize(("max_chunk", "longest"), [(None, 32), (32, 32), (31, 16), (16, 16), (8, 8), (1, 8)])
def test_no_chunk_is_longer_than_allowed_unless_all_engines_are(max_chunk: int | None, longest: int) -> None:
    """The stage has engines of 8, 16 and 32 rows."""
    assert make_thinker_worker(make_stage(), max_chunk=max_chunk).chunk.max_rows == longest


def record_rows(stage: LoadedStage, graph: str) -> list[int]:
    """Rows of each call of a graph's engine."""
    rows: list[int] = []
    engine = stage.graphs[graph].engines[None]
    run = engine.run

    def record(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows.append(len(tensors[0]))
        return run(tensors)

    engine.run = record  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize(("num_rows", "last"), [(64, 63), (64, 40), (80, 79), (80, 70)])
def test_the_last_part_of_a_split_chunk_gives_the_logits_of_its_own_row(num_rows: int, last: int) -> None:
    rows = torch.arange(num_rows)
    names = ("input_ids", "embeds", "embed_kind", "segment", "index", "row_slots")
    parts = layers.split_chunk(
        {
            **dict.fromkeys(names, rows),
            "positions": rows.expand(3, -1),
            "page_table": torch.zeros(1, 16),
            "last": torch.tensor([last]),
        },
        32,
    )
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), rows)
    assert torch.equal(torch.cat([part["positions"] for part in parts], dim=1), rows.expand(3, -1))
    assert parts[-1]["input_ids"][parts[-1]["last"]].tolist() == [last]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_rank_goes_on_with_the_tokens_of_rank_0(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks round differently, so each may sample another token: all must use those of rank 0."""
    of_rank_0 = [[417], [33, 34], [5, 6]]
    shared: list[list[int]] = []

    def broadcast_(x: Tensor) -> None:
        tokens = of_rank_0[len(shared)]
        shared.append(x.tolist())
        x[: len(tokens)] = torch.tensor(tokens)

    monkeypatch.setattr(device_sampler, "broadcast_from_rank0_", broadcast_)
    stage = make_stage()
    rank = make_thinker_worker(stage, is_static=True)
    embedded = record_ids(stage)
    sampling = np.array([sampling_columns(SamplingParams(temperature=temperature), 0.5)])
    prefill = PrefillStep(
        input_ids=np.array([5, 6, 7]),
        positions=np.zeros((3, 3), np.int64),
        embed_kind=np.zeros(3, np.int64),
        embeds=None,
        counts=np.array([3]),
        starts=np.zeros(1, np.int64),
        pages=np.array([[1]]),
        slots=np.array([2]),
        ended=np.array([0]),
        sampling=sampling,
    )
    assert rank.launch_prefill(prefill).wait() == [417]
    decode = DecodeStep(
        input_ids=np.array([-1, 8]),
        positions=np.array([3, 3]),
        lengths=np.array([4, 4]),
        pages=np.array([[1], [2]]),
        slots=np.array([2, 3]),
        sampling=np.repeat(sampling, 2, axis=0),
    )
    assert rank.launch_decode(decode).wait() == [33, 34]
    assert embedded[-1][:2] == [417, 8], "-1 is the token that rank 0 sampled for the slot"
    rank.launch_decode(replace(decode, input_ids=np.array([-1, -1])))
    assert embedded[-1][:2] == [33, 34]
    assert len(shared) == 3 and shared[0][0] != 417, "this rank sampled something else"


def test_an_artifact_with_a_graph_for_sampling_samples_with_it() -> None:
    """Tokens of random rows are the graph's, from the tokens seen; greedy steps do not run it."""
    calls: list[list[int]] = []

    def run(logits: Tensor, sampling: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        assert logits.is_contiguous()
        calls.append(seen[0].nonzero()[:, 0].tolist())
        return (400 + torch.arange(len(logits)) + sampling[:, 5].mul(8).long(),)

    sample = make_graph(
        "sample",
        run,
        inputs={
            "logits": ("float32", ("B", VOCAB)),
            "sampling": ("float32", ("B", NUM_COLUMNS)),
            "seen": ("bool", ("B", VOCAB)),
        },
        outputs=("tokens",),
        state={},
        dims={"B": tuple(range(1, 65))},
        layer_instances=("sampler",),
    )
    stage = make_stage()
    rank = make_thinker_worker(LoadedStage("thinker", {**stage.graphs, "sample": sample}), is_static=True)

    def prefill(temperature: float) -> int:
        calls.clear()
        step = PrefillStep(
            input_ids=np.array([5, 6, 7]),
            positions=np.zeros((3, 3), np.int64),
            embed_kind=np.zeros(3, np.int64),
            embeds=None,
            counts=np.array([3]),
            starts=np.zeros(1, np.int64),
            pages=np.array([[1]]),
            slots=np.array([2]),
            ended=np.array([0]),
            sampling=np.array([sampling_columns(SamplingParams(temperature=temperature), 0.5)]),
        )
        (token,) = rank.launch_prefill(step).wait()
        return token

    assert prefill(1.0) == 404 and calls == [[5, 6, 7]]
    assert prefill(0.0) not in range(400, 465) and not calls


def record_ids(stage: LoadedStage) -> list[list[int]]:
    """The ids of each call of the embedding engine."""
    calls: list[list[int]] = []
    engine = stage.graphs["embed"].engines[None]
    run = engine.run

    def record(tensors: Sequence[Tensor]) -> list[Tensor]:
        calls.append(tensors[0].tolist())
        return run(tensors)

    engine.run = record  # type: ignore[method-assign]
    return calls


def test_every_layer_runs_once_in_every_division_into_groups() -> None:
    """20 layers do not divide by the 16 groups of a chunk; two overlapped chunks run all layers at once."""
    prompt = make_prompt(list(range(100, 164)))
    answers = []
    for two_batch_overlap in (False, True):
        stage = make_thinker_stage(num_layers=20)
        num_calls = count_calls(stage, "prefill_attention")
        loop = make_thinker_loop(stage, two_batch_overlap=two_batch_overlap)
        answer = Collector()
        loop.submit(prompt, SamplingParams(max_tokens=4), 5, answer.put)
        run_until_idle(loop)
        answers.append(answer.tokens())
        assert num_calls == [2 * 20], "two chunks"
    assert answers[0] == answers[1]
    assert worker_of(loop).num_layer_groups == 16


def count_calls(stage: LoadedStage, graph: str) -> list[int]:
    """The number of calls of a graph's engine, kept up to date."""
    count = [0]
    engine = stage.graphs[graph].engines[None]
    run = engine.run

    def counted(tensors: Sequence[Tensor]) -> list[Tensor]:
        count[0] += 1
        return run(tensors)

    engine.run = counted  # type: ignore[method-assign]
    return count


def test_every_layer_has_pages_of_its_own() -> None:
    rank = make_thinker_worker(make_thinker_stage(num_layers=3), num_pages=9)
    rank.prefill(prefill_step([5, 6, 7], page=4))
    for layer in range(3):
        rows = rank.state[f"layers.{layer}.attention.k_pages"][:, 0, 0].view(-1, PAGE)
        assert rows[4].tolist() == [5, 6, 7, 0], f"layer {layer}"


def prefill_step(ids: Sequence[int], *, page: int) -> PrefillStep:
    """The whole prompt of a request with one page."""
    return PrefillStep(
        input_ids=np.array(ids),
        positions=np.zeros((3, len(ids)), np.int64),
        embed_kind=np.zeros(len(ids), np.int64),
        embeds=None,
        counts=np.array([len(ids)]),
        starts=np.zeros(1, np.int64),
        pages=np.array([[page]]),
        slots=np.zeros(1, np.int64),
    )


def test_experts_of_chunks_and_of_decode_steps_have_engines_of_their_own() -> None:
    """Layer 0 is dense, layers 1 and 2 have experts, whose routes are those of the last chunk only."""
    stage = make_thinker_stage(num_layers=3)
    calls: list[str] = []

    def experts(name: str, *, has_routes: bool) -> Graph:
        def run(residual: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
            calls.append(name)
            routes = (torch.full((len(residual), 2), len(calls)), torch.ones(len(residual), 2))
            return (residual + delta, torch.zeros_like(residual), *(routes if has_routes else ()))

        return make_graph(
            name,
            run,
            inputs={key: ("float32", ("N", HIDDEN)) for key in ("residual", "delta")},
            outputs=("residual", "partial", *(("expert_ids", "expert_weights") if has_routes else ())),
            state={},
            dims={"N": (1, 2, 4, 8, 16, 32)},
            layer_instances=("layers.1.feed_forward", "layers.2.feed_forward"),
        )

    dense = stage.graphs["dense"]
    graphs = {
        **stage.graphs,
        "dense": Graph(replace(dense.spec, layer_instances=("layers.0.feed_forward",)), dense.engines),
        "prefill_experts": experts("prefill", has_routes=True),
        "decode_experts": experts("decode", has_routes=False),
    }
    rank = make_thinker_worker(LoadedStage("thinker", graphs))
    for num_tokens in (3, 10):
        rank.prefill(prefill_step(range(1, num_tokens + 1), page=1))
    assert calls == ["prefill"] * 4
    assert [(ids.shape, int(ids[0, 0])) for ids, _ in rank.routes] == [((16, 2), 3), ((16, 2), 4)]
    rank.decode(
        DecodeStep(
            input_ids=np.array([8]), positions=np.array([3]), lengths=np.array([4]), pages=np.array([[1]])
        )
    )
    assert calls[4:] == ["decode"] * 2
