"""Cost of a graph, counted from its trace, compared with the FLOPs that torch counts while the module runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import mingc.kernels
from mingc.artifacts.manifest import EngineCost
from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.export.compile.trace import capture
from mingc.export.cost.graph_cost import count_cost
from mingc.export.cost.kernel_cost import CONTEXT, KERNELS
from mingc.export.stage import GraphDef

WIDTH, HEADS, VOCABULARY, EXPERTS, ROWS = 32, 4, 100, 6, 10


class Model(nn.Module):
    """One operation of each kind: embedding, GEMM, convolution, attention, experts, state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))
        self.unused = nn.Parameter(torch.randn(1000))

    def attend(self, ids: Tensor) -> tuple[Tensor]:
        x = F.embedding(ids, self.table)
        x = self.mix(x.transpose(0, 1).unsqueeze(0)).squeeze(0).transpose(0, 1)
        q, k, v = self.packed(x).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        return (F.scaled_dot_product_attention(q, k, v),)

    def iterate(self, ids: Tensor) -> tuple[Tensor]:
        x = F.embedding(ids, self.table)
        for _ in range(5):
            x = F.linear(x, self.packed.weight)[:, :WIDTH]
        return (x,)

    def route(self, ids: Tensor) -> tuple[Tensor]:
        return ((self.experts[ids % EXPERTS] * 2.0).sum(-1),)

    def remember(self, ids: Tensor, slots: Tensor, pool: Tensor) -> tuple[Tensor]:
        pool.index_put_((slots,), ids[:, None].float().expand(-1, ROWS))
        return (pool[slots],)


def tensor(name: str, dtype: DType, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def count(
    model: Model, method: str, static_shapes: dict[str, int] | None = None, *, only: int | None = None
) -> tuple[EngineCost, ...]:
    state = (tensor("pool", "float32", "S", ROWS),) if method == "remember" else ()
    inputs = [tensor("ids", "int64", "T")]
    dims = [Dim(name="T", minimum=2, maximum=64, buckets=(4, 16))]
    if only is not None:
        dims = [Dim(name="T", minimum=only, maximum=only, buckets=(only,))]
    if state:
        inputs.append(tensor("slots", "int64", "T"))
        dims.append(Dim(name="S", minimum=2, maximum=999))
    spec = GraphSpec(
        name=method,
        inputs=tuple(inputs),
        outputs=(tensor("out", "float32", "T"),),
        state=state,
        dims=tuple(dims),
    )

    def example(sizes: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.arange(sizes["T"])
        return {"ids": ids, "slots": ids % sizes.get("S", 1), "pool": torch.zeros(sizes.get("S", 1), ROWS)}

    sizes = {"T": 5, **({"S": 7} if state else {})}
    plan = GraphDef(spec=spec, method=method, example=example, trace_dims=sizes, check_dims=sizes)
    program = capture(plan, model, stage="toy", static_shapes=static_shapes, device=torch.device("cpu"))
    return count_cost(program, spec, static_shapes)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model().eval().requires_grad_(False)


def test_flops_at_every_bucket_equal_those_that_torch_counts(model: Model) -> None:
    works = count(model, "attend")
    assert [work.dims for work in works] == [{"T": 4}, {"T": 16}]
    for work in works:
        with FlopCounterMode(display=False) as counter:
            model.attend(torch.arange(work.dims["T"]))
        assert work.flops == counter.get_total_flops()


def test_a_dim_with_a_single_size_is_static(model: Model) -> None:
    assert count(model, "attend", only=16) == (count(model, "attend")[1],)
    assert [work.dims for work in count(model, "attend", only=1)] == [{"T": 1}]


def test_a_static_engine_has_the_same_cost(model: Model) -> None:
    assert count(model, "attend", {"T": 16}) == (count(model, "attend")[1],)


def test_tables_count_gathered_rows_and_weights_count_whole(model: Model) -> None:
    products = sum(each.numel() for each in (*model.packed.parameters(), *model.mix.parameters()))
    for work in count(model, "attend"):
        assert work.weight_bytes == 4 * (products + work.dims["T"] * WIDTH)


def test_a_repeated_read_of_a_weight_counts_as_reuse(model: Model) -> None:
    work = count(model, "iterate")[0]
    whole = 4 * 3 * WIDTH * WIDTH
    assert work.weight_bytes == whole + 4 * work.dims["T"] * WIDTH
    assert work.reuse_bytes == 4 * whole


def test_a_table_counts_at_most_once(model: Model) -> None:
    few, many = count(model, "route")
    assert few.weight_bytes == 4 * 4 * 8 * WIDTH
    assert many.weight_bytes == 4 * EXPERTS * 8 * WIDTH
    assert many.reuse_bytes == 0
    assert many.flops == 2 * 16 * 8 * WIDTH, "sums of products are products"


def test_state_bytes_do_not_depend_on_the_pool_size(model: Model) -> None:
    for work in count(model, "remember"):
        assert work.state_bytes == 2 * 4 * work.dims["T"] * ROWS
        assert work.uncounted == ()


def test_decode_attention_grows_with_the_context() -> None:
    shapes = {"q": (3, 8, 64), "k_pages": (1000, 2, 64)}
    work = KERNELS["paged_decode_attention"](shapes, {})
    assert work.flops.subs({CONTEXT: 99}) == 4 * 3 * 8 * 64 * 100
    assert work.state_elements.subs({CONTEXT: 99}) == 2 * 3 * 2 * 64 * 100


def test_a_prefill_chunk_attends_to_the_context_and_half_of_itself() -> None:
    shapes = {"q": (4, 8, 64), "k_pages": (1000, 2, 64)}
    work = KERNELS["paged_prefill_attention"](shapes, {})
    assert work.flops.subs({CONTEXT: 10}) == 4 * 8 * 64 * (11 + 12 + 13 + 14)
    assert work.state_elements.subs({CONTEXT: 10}) == 2 * 2 * 64 * 14


def test_contiguous_kv_attention_is_limited_to_its_window() -> None:
    shapes = {"qkv": (2, (8 + 4) * 64), "k_slots": (5, 300, 2, 64)}
    whole = KERNELS["contiguous_kv_attention"](shapes, {"window": 300})
    near = KERNELS["contiguous_kv_attention"](shapes, {"window": 50})
    assert whole.flops.subs({CONTEXT: 9}) == 4 * 2 * 8 * 64 * 10
    assert near.flops == 4 * 2 * 8 * 64 * 50


def test_experts_count_by_their_expected_number_under_uniform_routing() -> None:
    shapes = {
        "x": (4, 64),
        "ids": (4, 2),
        "gate_up": (16, 2 * 32, 64),
        "down": (16, 64, 32),
        "shared_gate_up": (2 * 32, 64),
    }
    work = KERNELS["moe_decode"](shapes, {})
    assert work.flops == 2 * 4 * (2 + 1) * (3 * 32 * 64)
    assert float(work.weight_shares["gate_up"]) == pytest.approx(1 - (14 / 16) ** 4)
    one = KERNELS["moe_decode"]({**shapes, "x": (1, 64), "ids": (1, 2)}, {})
    assert float(one.weight_shares["down"]) == pytest.approx(2 / 16)


@torch.library.custom_op("mingc::moe_prefill_stand_in", mutates_args=())
def _stand_in(x: Tensor, ids: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(x)


@_stand_in.register_fake
def _(x: Tensor, ids: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_kernel_without_a_cost_rule_is_reported(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    def blend(ids: Tensor) -> tuple[Tensor]:
        x = model.table[ids]
        return (torch.ops.mingc.moe_prefill_stand_in(x, ids[:, None] % EXPERTS, model.experts),)

    monkeypatch.setattr(model, "blend", blend, raising=False)
    whole = count(model, "blend", {"T": 4})[0]
    assert whole.uncounted == ("mingc::moe_prefill_stand_in",)
    assert whole.weight_bytes == 4 * (4 * WIDTH + EXPERTS * 8 * WIDTH)
    monkeypatch.setitem(KERNELS, "moe_prefill_stand_in", KERNELS["moe_prefill"])
    part = count(model, "blend", {"T": 4})[0]
    assert part.uncounted == () and part.flops == 3 * 4 * WIDTH * 8
    share = 1 - (1 - 1 / EXPERTS) ** 4
    assert part.weight_bytes == pytest.approx(4 * (4 * WIDTH + share * EXPERTS * 8 * WIDTH), abs=1)


def test_every_custom_kernel_has_a_cost_rule() -> None:
    folder = Path(mingc.kernels.__path__[0])
    files = (file for package in ("triton", "cuda") for file in (folder / package).glob("*.py"))
    ops = {name for file in files for name in re.findall(r'"mingc::(\w+)"', file.read_text())}
    assert ops and ops <= set(KERNELS)
