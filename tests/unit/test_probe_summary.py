"""What `mingc probe` says first: where the time of a token, a patch and a first audio goes."""

from __future__ import annotations

import pytest
from probe_rows import latency

from mingc.artifacts.manifest import EngineCost
from mingc.probe.report import EngineFigures, PeakRates, roofline_bound
from mingc.probe.summary import summarize

ROOF = PeakRates(device="none", copy_tb_s=1.0, matmul_tflop_s=1e9, matmul_dtype="float32")


def figures(
    engine: str, ms: float, layers: int = 1, context: int | None = None, **sizes: int
) -> EngineFigures:
    """An engine whose fastest call takes `ms`; its median is thrice as long."""
    return EngineFigures(
        engine=engine,
        sizes=sizes,
        context_tokens=context,
        latency=latency(ms, 3 * ms),
        layer_instances=layers,
    )


TALKER = [
    figures("talker.prefill", 2.0, T=32, context=224),
    figures("talker.prefill", 5.0, T=256, context=0),
    figures("talker.prefill", 9.0, T=512, context=0),
    *(figures("talker.step", 1.0 * batch, context=256, B=batch) for batch in (8, 1)),
    *(figures("cfm.sample", 6.0 * batch, B=batch) for batch in (1, 8)),
    *(figures("audio_vae.stream", 3.0 * batch, B=batch) for batch in (1, 8)),
]
THINKER = [
    figures("thinker.embed", 0.5, N=1),
    figures("thinker.embed", 0.1, N=4),
    figures("thinker.dense", 0.5, N=1),
    figures("thinker.decode_attention", 1.0, layers=4, context=31, B=1, P=2),
    figures("thinker.decode_attention", 3.0, layers=4, context=256, B=1, P=64),
    figures("thinker.decode_attention", 2.0, layers=4, context=256, B=1, P=17),
    figures("thinker.decode_experts", 3.0, layers=3, B=1),
    figures("thinker.head", 2.0, B=1),
]


def rows(*engines: EngineFigures, memory_ms: dict[str, float] | None = None) -> list[tuple[object, ...]]:
    """Each row as it is read: of what, engine, calls, milliseconds, share in %, milliseconds above the roof."""
    bounds = [
        roofline_bound(
            each, EngineCost(dims=each.sizes, weight_bytes=int(1e9 * ms), flops=0, state_bytes=0), 0, ROOF
        )
        for each in engines
        if (ms := (memory_ms or {}).get(each.title)) is not None
    ]
    return [
        (each.of, each.engine, each.calls, each.ms, round(100 * each.share), each.gap_ms)
        for each in summarize(engines, bounds, context=256)
    ]


def test_engines_of_one_request_are_sorted_by_what_could_be_gained() -> None:
    """The fastest calls count, at the smallest batch and the asked context; without a bound all may be gained."""
    known = {"cfm.sample B=1": 5.5, "talker.step B=1 +256": 0.25}
    assert rows(*TALKER, memory_ms=known) == [
        ("patch", "audio_vae.stream B=1", 1, 3.0, 30, None),
        ("patch", "talker.step B=1 +256", 1, 1.0, 10, 0.75),
        ("patch", "cfm.sample B=1", 1, 6.0, 60, 0.5),
        ("first-audio", "talker.prefill T=256 +0", 1, 5.0, 36, None),
        ("first-audio", "audio_vae.stream B=1", 1, 3.0, 21, None),
        ("first-audio", "cfm.sample B=1", 1, 6.0, 43, 0.5),
    ]


def test_layers_that_share_an_engine_count_each() -> None:
    assert rows(*THINKER) == [
        ("token", "thinker.decode_experts B=1", 3, 9.0, 45, None),
        ("token", "thinker.decode_attention B=1 P=17 +256", 4, 8.0, 40, None),
        ("token", "thinker.head B=1", 1, 2.0, 10, None),
        ("token", "thinker.embed N=1", 1, 0.5, 2, None),
        ("token", "thinker.dense N=1", 1, 0.5, 2, None),
    ]


def test_the_higher_roof_and_the_medians_are_those_of_all_layers() -> None:
    attention = THINKER[5]
    slow = PeakRates(device="none", copy_tb_s=1.0, matmul_tflop_s=1.0, matmul_dtype="float32")
    cost = EngineCost(dims=attention.sizes, weight_bytes=int(1e8), flops=int(5e8), state_bytes=0)
    bound = roofline_bound(attention, cost, 0, slow)  # 0.1 ms of memory, 0.5 ms of arithmetic
    (part,) = [each for each in summarize(THINKER, [bound], context=256) if each.engine == attention.title]
    assert (part.ms, part.median_ms) == (8.0, 24.0)
    assert (part.roof_ms, part.gap_ms) == (pytest.approx(2.0), pytest.approx(6.0))


def test_where_no_size_holds_the_context_the_longest_one_counts() -> None:
    short = [figures("talker.prefill", 1.0 + size, T=size, context=0) for size in (64, 128, 32)]
    found = rows(*short, *(each for each in TALKER if each.engine != "talker.prefill"))
    assert ("first-audio", "talker.prefill T=128 +0", 1, 129.0, 93, None) in found


@pytest.mark.parametrize("without", ["cfm.sample", "audio_vae.stream"])
def test_what_was_timed_in_part_has_no_shares(without: str) -> None:
    assert rows(*(each for each in TALKER if each.engine != without)) == []
