"""The export recipe: every choice of an export, validated when it is created."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mingc.artifacts.spec import Quantization
from mingc.artifacts.target import is_rtx, rtx_capabilities
from mingc.defaults import (
    BACKEND,
    BATCH_SIZES,
    CACHE_GIGABYTES,
    MAX_MODEL_LEN,
    MODEL_NAME,
    PREFILL_CHUNK_SIZE,
)
from mingc.errors import ConfigError

if TYPE_CHECKING:
    from mingc.export.stage import Stage

TARGETS = ("cpu", "cuda")
AUTO = "auto"
"""In place of a backend's name: every one that can build for the target, of which the fastest is kept."""
DTYPES = ("float32", "bfloat16")
# Far above what a device can hold: a larger number is a mistake, and sizes of tensors would overflow.
MAX_BATCH_SIZE = 1024
MAX_TOKENS = 1 << 20
MIN_MODEL_LEN = 128  # engines are traced and checked at tables of up to eight pages of 16 tokens
# How the command line spells the fields that stages name in `Stage.options`.
_FLAGS = {
    "world_size": "--tp",
    "max_model_len": "--max-model-len",
    "prefill_chunk_size": "--prefill-chunk-size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecipe:
    """One export.

    Attributes:
        target: `cpu`, `cuda`, or RTX cards as `rtx:sm86,sm89`.
        checkpoint: folder in the released layout; with `synthetic` only its configs are read.
        stages: None means all that the checkpoint holds.
        cache: None means no compile cache.
        cache_gigabytes: of 10^9 bytes, above which the least recently used engines are removed.
        batch_sizes: requests in one step, ascending; a step is padded to the next of these. On CUDA each has its own
            engine.
        synthetic: random weights, generated on the target device; no weights are read.
        quantize: storage format of weights: `fp8` for every stage that supports it, `STAGE=fp8` for one,
            `thinker=int4`. Empty: all in `dtype`.
        autotune: on CUDA, time configurations of the expert kernels on this GPU and use the fastest.
        backend: compilers: `NAME` for every stage, `NAME:STAGE,…` for these. `auto`: the installed backends are timed,
            and the fastest is kept.
    """

    checkpoint: Path
    output: Path
    target: str = "cpu"
    dtype: str = "float32"
    world_size: int = 1
    stages: tuple[str, ...] | None = None
    jobs: int = 1
    cache: Path | None = None
    cache_gigabytes: float = CACHE_GIGABYTES
    force: bool = False
    max_model_len: int = MAX_MODEL_LEN
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE
    model_name: str = MODEL_NAME
    synthetic: bool = False
    quantize: tuple[str, ...] = ()
    autotune: bool = True
    backend: tuple[str, ...] = (BACKEND,)

    @property
    def device(self) -> str:
        """The device of this machine that graphs are traced and checked on."""
        return "cpu" if is_rtx(self.target) else self.target

    def __post_init__(self) -> None:
        problems = [*self._own_problems(), *self._quantize_problems(), *self._backend_problems()]
        if problems:
            raise ConfigError("\n".join(problems), where="mingc export", fix="see mingc export --help")

    def _own_problems(self) -> list[str]:
        problems = []
        if is_rtx(self.target):
            try:
                rtx_capabilities(self.target)
            except ValueError as error:
                problems.append(f"--target {self.target}: {error}")
        elif self.target not in TARGETS:
            problems.append(f"--target {self.target}: not one of {', '.join(TARGETS)}, rtx:smNN,…")
        if self.dtype not in DTYPES:
            problems.append(f"--dtype {self.dtype}: not one of {', '.join(DTYPES)}")
        if self.world_size not in (1, 2, 4, 8):
            problems.append(f"--tp {self.world_size}: not one of 1, 2, 4, 8")
        if self.jobs < 1:
            problems.append(f"--jobs {self.jobs}: must be at least 1")
        if not 0 <= self.cache_gigabytes < math.inf:
            problems.append(f"--cache-limit {self.cache_gigabytes}: must be at least 0 and finite")
        sizes = ",".join(map(str, self.batch_sizes))
        if not sizes or self.batch_sizes[0] < 1 or sorted(set(self.batch_sizes)) != [*self.batch_sizes]:
            problems.append(f"--batch-sizes {sizes}: must be ascending and at least 1")
        elif self.batch_sizes[-1] > MAX_BATCH_SIZE:
            problems.append(
                f"--batch-sizes {self.batch_sizes[-1]}: more than {MAX_BATCH_SIZE} requests in one step"
            )
        if self.prefill_chunk_size < 16:
            problems.append(f"--prefill-chunk-size {self.prefill_chunk_size}: must be at least 16")
        if self.stages is not None and (not self.stages or len(set(self.stages)) < len(self.stages)):
            problems.append(f"--stages {','.join(self.stages)}: must name at least one stage, and each once")
        if self.max_model_len < MIN_MODEL_LEN and self._concerns("max_model_len"):
            problems.append(f"--max-model-len {self.max_model_len}: must be at least {MIN_MODEL_LEN}")
        elif self.max_model_len < self.prefill_chunk_size and self._concerns("max_model_len"):
            problems.append(f"--max-model-len {self.max_model_len}: less than one prefill chunk")
        if self.max_model_len > MAX_TOKENS:
            problems.append(f"--max-model-len {self.max_model_len}: more than {MAX_TOKENS}")
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
        defaults = {each.name: each.default for each in fields(self)}
        names = [stage.name for stage in stages]
        known = _stages()
        chosen: list[tuple[str, Collection[str]]] = [
            (
                f"{flag} {getattr(self, field)}",
                [name for name, stage in known.items() if field in stage.options],
            )
            for field, flag in _FLAGS.items()
            if getattr(self, field) != defaults[field]
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
        """Storage format of the quantizable weights of `stage`; None: as all others. `STAGE=` overrides."""
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
        """Whether the backends of `stage` are timed, and one that cannot build a graph is skipped."""
        return self._backend_of(stage) == AUTO

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


def _parse_backend(word: str) -> tuple[str, tuple[str, ...]]:
    """`NAME:STAGE,…` → name and stages; no stages: all."""
    name, _, stages = word.partition(":")
    return name.strip(), tuple(filter(None, map(str.strip, stages.split(","))))


def _stages() -> dict[str, Stage]:
    # Imported here: the stages need torch, and most recipes are refused or accepted without them.
    from mingc.export.stages import discover

    return discover()
