"""What a probe times. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mingc.options import check, option

_BATCH_DIMS = ("B", "N")  # dims that count requests, clips or rows
_WHAT, _COMPARISON = "What to time", "Comparison"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """What to time, validated on construction."""

    engines: tuple[str, ...] | None = option(
        None, "--engine", group=_WHAT, metavar="ENGINE,…", shown_default="all",
        help="Stages (cfm) or graphs (cfm.sample) to time.",
    )  # fmt: skip
    batch_sizes: tuple[int, ...] | None = option(
        None, "--batch", group=_WHAT, shown_default="all", help="Numbers of requests in a call."
    )
    context: int = option(
        256, "--context", least=0, group=_WHAT,
        help="Tokens in the KV cache of every request, limited by its slot or pages.",
    )  # fmt: skip
    repetitions: int | None = option(
        None, "--repetitions", least=1, group=_WHAT, shown_default="200, CPU: 3 to 10",
        help="Timed calls per engine.",
    )  # fmt: skip
    has_cold_start: bool = option(
        True, "--cold-start/--no-cold-start", group=_WHAT,
        help="First serve ARTIFACT in a separate process, and time each phase until it is ready.",
    )  # fmt: skip
    has_transfers: bool = option(
        True, "--transfers/--no-transfers", group=_WHAT,
        help="Measure memory rates: of the host, between host and GPU, between GPUs.",
    )  # fmt: skip
    tolerance: float = option(
        0.1, "--tolerance", least=0, group=_COMPARISON,
        help="Fraction by which the fastest call of an engine may be slower than the baseline's.",
    )  # fmt: skip
    compare: str | None = option(
        None, "--compare", choices=("patch-embed",), group=_COMPARISON,
        help="Also time the patch embedding as a convolution; --engine must then include vision_encoder.",
    )  # fmt: skip
    beside: Path | None = option(
        None, "--beside", group=_COMPARISON, metavar="ARTIFACT",
        help="Another artifact of the same model: time its engines and the engines of ARTIFACT alternately.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = []
        if self.engines == ():
            problems.append("--engine: is empty")
        if self.batch_sizes == ():
            problems.append("--batch: is empty")
        if self.compare == "patch-embed" and self.engines and not self._names_patch_embed():
            problems.append("--compare patch-embed: --engine must include vision_encoder")
        check(self, *problems, where="mingc probe", fix="see mingc probe --help")

    def choose(self, engine: str, sizes: Mapping[str, int]) -> bool:
        """Whether to time `stage.graph` at `sizes`."""
        batch = request_counts(sizes)
        return self.names(engine) and (
            self.batch_sizes is None or not batch or bool({*batch} & {*self.batch_sizes})
        )

    def _names_patch_embed(self) -> bool:
        return any(name.partition(".")[0] == "vision_encoder" for name in self.engines or ())

    def names(self, engine: str) -> bool:
        """Whether to time `stage.graph` at any size."""
        return self.engines is None or bool({engine, engine.partition(".")[0]} & {*self.engines})


def request_counts(sizes: Mapping[str, int]) -> list[int]:
    return [sizes[dim] for dim in _BATCH_DIMS if dim in sizes]
