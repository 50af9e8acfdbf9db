"""Sampling on a GPU without a sort, over the released vocabulary: tokens, shares, batches, and the compiled engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from exact_sampling import cases, columns, distributions, possible_tokens
from torch import Tensor

from mingc.export.compile.backends import aoti
from mingc.export.compile.trace import capture
from mingc.export.layers.decoder import Sampler
from mingc.export.layers.decoder_graphs import thinker_graphs
from mingc.export.stage import GraphDef, Shard, StageOptions
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.sample_tokens import sample_greedy, sample_tokens
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.cuda_graphs import GraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "released"
VOCAB = 157_184
SIZES = (1, 300, 2048, 2049, VOCAB)


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [each.cuda() for each in tensors]


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("name", distributions(8))
def test_tokens_are_those_of_exact_arithmetic(name: str, vocab: int) -> None:
    given = cases(distributions(vocab)[name], seed=1)
    found = sample_tokens(*on_gpu(*given)).tolist()
    for row, (token, possible) in enumerate(zip(found, possible_tokens(*given), strict=True)):
        rules = given[1][row, :6].tolist()
        assert token in possible, f"row {row}, {rules}: {token}, not {sorted(possible)[:9]}"


@pytest.mark.parametrize("name", ["random", "bfloat16", "peaked"])
def test_tokens_are_those_of_the_sort(name: str) -> None:
    """The same numbers give the same tokens as before, where probabilities are larger than rounding error."""
    same = total = 0
    for seed in range(20):
        given = on_gpu(*cases(2 * distributions(VOCAB)[name], seed))
        found = sample_tokens(*given)
        with plain_torch():
            sorted_first = sample_tokens(*given)
        same, total = same + int((found == sorted_first).sum()), total + len(found)
    assert same >= 0.95 * total, f"{same} of {total}"


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (400, 0.7), (0, 0.05)])
def test_evenly_spread_numbers_sample_every_token_as_often_as_is_likely(top_k: int, top_p: float) -> None:
    """Of n numbers at equal distances a token takes n times its probability, to within one."""
    count = 512
    logits = 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    points = [(each + 0.5) / count for each in range(count)]
    sampling = torch.tensor([columns((1.0, top_k, top_p, 0.0), point) for point in points])
    seen = torch.zeros(1, VOCAB, dtype=torch.bool, device="cuda").expand(count, -1)
    found = sample_tokens(logits.cuda().expand(count, -1), sampling.cuda(), seen).cpu()
    ranked = logits.double().softmax(0).sort(descending=True, stable=True)
    kept = ranked.values * (torch.arange(VOCAB) < (top_k or VOCAB))
    kept /= kept.sum()
    kept = kept * (kept.cumsum(0) - kept < top_p)
    expected = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, ranked.indices, count * kept / kept.sum())
    assert (torch.bincount(found, minlength=VOCAB) - expected).abs().max() <= 1.01


def test_a_row_does_not_depend_on_the_batch_and_repeats() -> None:
    logits, sampling, seen = on_gpu(*cases(distributions(VOCAB)["bfloat16"], seed=2))
    together = sample_tokens(logits, sampling, seen)
    for _ in range(20):
        assert torch.equal(sample_tokens(logits, sampling, seen), together)
    for row in range(len(logits)):
        one = slice(row, row + 1)
        assert torch.equal(sample_tokens(logits[one], sampling[one], seen[one]), together[one])


def test_greedy_rows_are_those_of_greedy_sampling() -> None:
    logits = torch.stack([*distributions(VOCAB).values()]).cuda()
    sampling = torch.tensor([columns((0.0, 0, 1.0, 0.0), 0.5)] * len(logits)).cuda()
    seen = torch.zeros(logits.shape, dtype=torch.bool, device="cuda")
    found, expected = sample_tokens(logits, sampling, seen), sample_greedy(logits)
    highest = torch.where(expected < 0, torch.nan, logits.gather(1, expected.clamp_min(0)[:, None])[:, 0])
    assert torch.equal(found < 0, expected < 0)
    assert (logits.gather(1, found.clamp_min(0)[:, None])[:, 0] == highest)[expected >= 0].all()


def graph_of(batch: int) -> GraphDef:
    config = find("thinker").config(open_synthetic(CONFIGS)).decoder
    options = StageOptions(
        dtype=torch.bfloat16, device="cuda", static_buckets=True, batch_sizes=(1, batch), max_model_len=1024
    )
    return next(each for each in thinker_graphs(config, Shard(), options) if each.spec.name == "sample")


@pytest.mark.parametrize("batch", [1, 32])
def test_the_compiled_engine_in_a_cuda_graph(batch: int, tmp_path: Path) -> None:
    plan, module, device = graph_of(batch), Sampler(), torch.device("cuda")
    program = capture(plan, module, stage="thinker", static_shapes={"B": batch}, device=device)
    aoti.compile_graph(program, tmp_path / "sample.pt2", device="cuda", cache=None, where="thinker.sample")
    engine = load_engine("aoti", tmp_path / "sample.pt2", torch.device("cuda", torch.cuda.current_device()))
    engine.bind({})
    static = [each.cuda() for each in inputs_of(plan, batch, seed=0).values()]

    def run() -> tuple[Tensor, ...]:
        return tuple(engine.run(static))

    graph, (tokens,) = GraphPool(torch.device("cuda", torch.cuda.current_device())).capture(run, "sampling")
    for seed in range(8):
        given = [*inputs_of(plan, batch, seed).values()]
        for target, value in zip(static, given, strict=True):
            target.copy_(value)
        graph.replay()
        for token, possible in zip(tokens.tolist(), possible_tokens(*given), strict=True):
            assert token in possible


def inputs_of(plan: GraphDef, batch: int, seed: int) -> Mapping[str, Tensor]:
    return plan.example({"B": batch}, torch.Generator().manual_seed(seed))
