"""The export recipe: every choice of an export, validated when it is created."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mingc.artifacts.spec import Quantization
from mingc.artifacts.target import is_rtx, rtx_capabilities
from mingc.errors import ConfigError
from mingc.export.defaults import BATCH_SIZES, MAX_MODEL_LEN, PREFILL_CHUNK_SIZE
from mingc.options import GIGABYTES, REQUIRED, check, option, options_of

if TYPE_CHECKING:
    from mingc.export.stage import Shard, Stage, StageOptions

TARGETS = ("cpu", "cuda")
AUTO = "auto"
"""Stands for a backend's name: time every backend that can build for the target, and keep the fastest."""
BACKEND = "aoti"
RTX_BACKEND = "tensorrt"  # the only one that builds for RTX cards that are not in the machine
_WHAT, _SIZES, _HOW, _CACHE = "What to export", "Sizes", "Compilation", "Cache of engines"
# Far above what a device can hold: a larger number is a mistake, and sizes of tensors would overflow.
MAX_BATCH_SIZE = 1024
MAX_TOKENS = 1 << 20
MIN_MODEL_LEN = 128  # engines are traced and checked at tables of up to eight pages of 16 tokens
_OF_STAGES = (
    "world_size",
    "max_model_len",
    "prefill_chunk_size",
)  # fields that stages name in `Stage.options`


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecipe:
    """One export, validated on construction."""

    checkpoint: Path
    output: Path = option(REQUIRED, "--output", group=_WHAT, help="Folder of the artifact to write.")
    target: str = option(
        "cpu", "--target", group=_WHAT, metavar="TARGET",
        help="Device that the engines are for: cpu, cuda, or RTX cards such as rtx:sm86,sm89,sm120. RTX cards need not "
        "be in this machine; the GPU for cuda must be, and cuda:smNN refuses other GPUs.",
    )  # fmt: skip
    dtype: str = option(
        "float32", "--dtype", choices=("float32", "bfloat16"), group=_WHAT, help="Weights and arithmetic."
    )
    world_size: int = option(
        1, "--tp", choices=(1, 2, 4, 8), group=_WHAT, help="Tensor-parallel ranks of the thinker."
    )
    stages: tuple[str, ...] | None = option(
        None, "--stages", group=_WHAT, metavar="STAGE,…", shown_default="all that the checkpoint holds",
        help="Stages to export.",
    )  # fmt: skip
    model_name: str = option(
        "ming-omni",
        "--model-name",
        group=_WHAT,
        metavar="NAME",
        help="Name of the model that a server reports.",
    )
    force: bool = option(False, "--force", group=_WHAT, help="Replace an artifact that is already there.")
    synthetic: bool = option(
        False, "--synthetic", group=_WHAT,
        help="Read only configs and sample random weights on the target device, to measure speed.",
    )  # fmt: skip
    max_model_len: int = option(
        MAX_MODEL_LEN, "--max-model-len", least=1, most=MAX_TOKENS, group=_SIZES,
        help="Longest request, prompt and answer, in tokens.",
    )  # fmt: skip
    prefill_chunk_size: int = option(
        PREFILL_CHUNK_SIZE,
        "--prefill-chunk-size",
        least=16,
        group=_SIZES,
        help="Tokens of one prefill chunk.",
    )
    batch_sizes: tuple[int, ...] = option(
        BATCH_SIZES, "--batch-sizes", group=_SIZES,
        help="Numbers of requests in one step, ascending; a step is padded to the next of them. On CUDA each has "
        "engines for itself.",
    )  # fmt: skip
    quantize: tuple[str, ...] = option(
        (), "--quantize", repeats=True, group=_HOW, metavar="FORMAT",
        help="Store weights in fewer bits: fp8 for all stages that support it, STAGE=fp8 for one, thinker=int4; may be "
        "given several times.",
    )  # fmt: skip
    backend: tuple[str, ...] = option(
        (BACKEND,), "--backend", repeats=True, group=_HOW, metavar="NAME[:STAGE,…]",
        shown_default=f"{BACKEND}; for RTX cards {RTX_BACKEND}",
        help="Compiler of all engines, or of the engines of STAGE; may be given several times. `auto`: time all "
        "installed backends, and keep the fastest engines.",
    )  # fmt: skip
    autotune: bool = option(
        True, "--autotune/--no-autotune", group=_HOW,
        help="On CUDA, time configurations of the expert kernels first and use the fastest.",
    )  # fmt: skip
    jobs: int = option(
        1, "--jobs", least=1, group=_HOW,
        help="Most engines compiled at the same time, as far as memory allows; on CUDA spread over all GPUs of one "
        "model.",
    )  # fmt: skip
    cache: Path | None = option(
        None, "--cache", group=_CACHE, shown_default="$XDG_CACHE_HOME/mingc/engines",
        help="Folder that keeps compiled engines for later exports, keyed by everything that affects their code.",
    )  # fmt: skip
    cache_gigabytes: float = option(
        20.0, "--cache-limit", unit=GIGABYTES, least=0, group=_CACHE,
        help="Size of the cache; above it the least recently used engines are removed.",
    )  # fmt: skip

    @property
    def device(self) -> str:
        """The device of this machine that graphs are traced and checked on."""
        return "cpu" if is_rtx(self.target) else self.target

    def __post_init__(self) -> None:
        problems = [*self._own_problems(), *self._quantize_problems(), *self._backend_problems()]
        check(self, *problems, where="mingc export", fix="see mingc export --help")

    def _own_problems(self) -> list[str]:
        problems = []
        if is_rtx(self.target):
            try:
                rtx_capabilities(self.target)
            except ValueError as error:
                problems.append(f"--target {self.target}: {error}")
        elif self.target not in TARGETS:
            problems.append(f"--target {self.target}: not one of {', '.join(TARGETS)}, rtx:smNN,…")
        sizes = ",".join(map(str, self.batch_sizes))
        if not sizes or self.batch_sizes[0] < 1 or sorted(set(self.batch_sizes)) != [*self.batch_sizes]:
            problems.append(f"--batch-sizes {sizes}: must be ascending and at least 1")
        elif self.batch_sizes[-1] > MAX_BATCH_SIZE:
            problems.append(
                f"--batch-sizes {self.batch_sizes[-1]}: more than {MAX_BATCH_SIZE} requests in one step"
            )
        if self.stages is not None and (not self.stages or len(set(self.stages)) < len(self.stages)):
            problems.append(f"--stages {','.join(self.stages)}: must name at least one stage, and each once")
        if self.max_model_len < MIN_MODEL_LEN and self._concerns("max_model_len"):
            problems.append(f"--max-model-len {self.max_model_len}: must be at least {MIN_MODEL_LEN}")
        elif self.max_model_len < self.prefill_chunk_size and self._concerns("max_model_len"):
            problems.append(f"--max-model-len {self.max_model_len}: less than one prefill chunk")
        if not self.model_name.strip():
            problems.append("--model-name: is empty")
        elif not self.model_name.isprintable():
            problems.append(f"--model-name {self.model_name!r}: contains unprintable characters")
        return problems

    def _concerns(self, field: str) -> bool:
        """Whether a stage that may be exported depends on `field`."""
        return any(
            field in stage.options
            for name, stage in _stages().items()
            if self.stages is None or name in self.stages
        )

    def _quantize_problems(self) -> list[str]:
        if not self.quantize:
            return []
        choices = {name: stage.quantizations for name, stage in _stages().items() if stage.quantizations}
        words = ["fp8", *(f"{name}={kind}" for name, kinds in choices.items() for kind in kinds)]
        problems = [
            f"--quantize {word}: not one of {', '.join(words)}" for word in self.quantize if word not in words
        ]
        if len({word.rpartition("=")[0] for word in self.quantize}) < len(self.quantize):
            problems.append(f"--quantize {','.join(self.quantize)}: names a stage twice")
        return problems

    def _backend_problems(self) -> list[str]:
        if self.backend == (BACKEND,) and not is_rtx(self.target):
            return []
        from mingc.export.compile.backends import BACKENDS, find_backend

        problems, known = [], BACKENDS.names()
        if not self.backend:
            problems.append("--backend: is empty")
        for word in self.backend:
            _, colon, listed = word.partition(":")
            if colon and not all(map(str.strip, listed.split(","))):
                problems.append(f"--backend {word}: names no stage after the colon or a comma")
        chosen = [_parse_backend(word) for word in self.backend]
        for name in dict.fromkeys(name for name, _ in chosen):
            if name == AUTO:
                if not self._candidates():
                    refused = "; ".join(f"{each}: {reason}" for each, reason in self.unsupported().items())
                    problems.append(f"--backend auto: no backend can be used: {refused}")
            elif name not in known:
                problems.append(f"--backend {name or 'is empty'}: not one of {', '.join((AUTO, *known))}")
            elif (reason := find_backend(name).unsupported_reason(self.target, self.dtype)) is not None:
                problems.append(f"--backend {name}: {reason}")
        stages = [stage for _, each in chosen for stage in each or ("",)]
        for stage in sorted({stage for stage in stages if stages.count(stage) > 1}):
            of = f"stage {stage}" if stage else "all stages"
            problems.append(f"--backend {' '.join(self.backend)}: names a backend for {of} twice")
        unknown = [stage for stage in stages if stage and stage not in _stages()]
        problems += [f"--backend: unknown stage {stage}" for stage in unknown]
        return problems

    def check_stages(self, stages: Sequence[Stage]) -> None:
        """Raises: ConfigError when an option has no effect on any of `stages`, the stages to be built."""
        options = options_of(ExportRecipe)
        names = [stage.name for stage in stages]
        known = _stages()
        chosen: list[tuple[str, Collection[str]]] = [
            (
                f"{options[field].label} {getattr(self, field)}",
                [name for name, stage in known.items() if field in stage.options],
            )
            for field in _OF_STAGES
            if getattr(self, field) != options[field].default
        ]
        for word in self.quantize:
            stage = word.rpartition("=")[0]
            quantizable = [name for name, each in known.items() if each.quantizations]
            chosen.append((f"--quantize {word}", [stage] if stage else quantizable))
        for word in self.backend:
            _, backed = _parse_backend(word)
            chosen += [(f"--backend {word}", [name]) for name in backed]
        problems = [
            f"{choice}: is for {' and '.join(concerned)}"
            for choice, concerned in chosen
            if not {*concerned} & {*names}
        ]
        if problems:
            raise ConfigError(
                "\n".join(problems),
                where="mingc export",
                fix=f"leave them out, or name the stages in --stages; {', '.join(names)} would be exported",
            )

    def quantization(self, stage: str) -> Quantization | None:
        """Storage format of the quantizable weights of `stage`; None: not quantized. `STAGE=` overrides."""
        chosen = {word.rpartition("=")[0]: word.rpartition("=")[2] for word in self.quantize}
        if not chosen:
            return None
        found = _stages().get(stage)
        kinds = () if found is None else found.quantizations
        general = chosen.get("")
        return cast("Quantization | None", chosen.get(stage, general if general in kinds else None))

    def backends_of(self, stage: str) -> tuple[str, ...]:
        """The backend that compiles `stage`, or for `auto` all that can build for the target.

        `NAME:STAGE` overrides `NAME`.
        """
        return self._candidates() if self.is_measured(stage) else (self._backend_of(stage),)

    def is_measured(self, stage: str) -> bool:
        """Whether the backends of `stage` are timed; a backend that cannot build a graph is then skipped."""
        return self._backend_of(stage) == AUTO

    def runs_alone(self, stage: str) -> bool:
        """Whether each engine of `stage` is compiled and run in a process of its own, because that may crash."""
        from mingc.export.compile.backends import find_backend

        return self.is_measured(stage) or find_backend(self._backend_of(stage)).may_crash

    def unsupported(self) -> dict[str, str]:
        """Why backends cannot build for the target, by name."""
        return {name: reason for name, reason in self._reasons().items() if reason is not None}

    def _backend_of(self, stage: str) -> str:
        chosen = {
            each: name for name, stages in map(_parse_backend, self.backend) for each in stages or ("",)
        }
        return chosen.get(stage, chosen.get("", BACKEND))

    def _candidates(self) -> tuple[str, ...]:
        usable = [name for name, reason in self._reasons().items() if reason is None]
        return tuple(sorted(usable, key=lambda name: (name != BACKEND, name)))

    def _reasons(self) -> dict[str, str | None]:
        from mingc.export.compile.backends import BACKENDS, find_backend

        return {
            name: find_backend(name).unsupported_reason(self.target, self.dtype) for name in BACKENDS.names()
        }


def copies_state(backend: str) -> bool:
    """Whether engines of `backend` copy their state in every call."""
    from mingc.export.compile.backends import find_backend

    return find_backend(backend).copies_state


def stage_options(recipe: ExportRecipe) -> StageOptions:
    """The recipe as stages see it."""
    from mingc.dtypes import torch_dtype
    from mingc.export.stage import StageOptions

    return StageOptions(
        dtype=torch_dtype(recipe.dtype),
        device=recipe.device,
        static_buckets=recipe.target != "cpu",
        batch_sizes=recipe.batch_sizes,
        max_model_len=recipe.max_model_len,
        prefill_chunk_size=recipe.prefill_chunk_size,
    )


def first_shard(stage: Stage, recipe: ExportRecipe) -> Shard:
    """The rank whose graphs are compiled; its engines serve all ranks."""
    from mingc.export.stage import Shard

    return Shard(rank=0, world_size=recipe.world_size if stage.is_sharded else 1)


def _parse_backend(word: str) -> tuple[str, tuple[str, ...]]:
    """`NAME:STAGE,…` → name and stages; no stages: all."""
    name, _, stages = word.partition(":")
    return name.strip(), tuple(filter(None, map(str.strip, stages.split(","))))


def _stages() -> dict[str, Stage]:
    # Imported here: the stages need torch, and most recipes are refused or accepted without them.
    from mingc.export.stages import discover

    return discover()
