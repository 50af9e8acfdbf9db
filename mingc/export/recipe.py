"""What to build: every choice of an export, validated at birth."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, cast

from mingc.errors import ConfigError

TARGETS = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
# Far above what a device holds: beyond, a number is a slip, and sizes of tensors would overflow.
MOST_REQUESTS = 1024
MOST_TOKENS = 1 << 20
LEAST_CONTEXT = 128  # engines are traced and checked at tables of up to eight pages of 16 tokens
Quantization = Literal["fp8", "int4"]
# By stage; "" stands for all of them.
QUANTIZABLE: dict[str, tuple[Quantization, ...]] = {
    "": ("fp8",),
    "talker": ("fp8",),
    "cfm": ("fp8",),
    "audio_vae": ("fp8",),
    "thinker": ("fp8", "int4"),
}
# What is for some stages only: by field, its option and these stages.
_CONCERNS = {
    "world_size": ("--tp", ("thinker",)),
    "max_model_len": ("--max-model-len", ("thinker",)),
    "prefill_chunk_size": ("--prefill-chunk-size", ("thinker", "talker")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecipe:
    """One export.

    Attributes:
        checkpoint: folder in the released layout; with `synthetic` only its configs are read.
        stages: None means all that the checkpoint holds.
        cache: None means no compile cache.
        batch_sizes: requests in one step, ascending; a step is filled up to the next of these. On CUDA each is an
            engine of its own.
        synthetic: draw random weights instead of reading any, on the target device.
        quantize: how weights are stored: `fp8` for every stage that can, `STAGE=fp8` for one, `thinker=int4`. Empty:
            all in `dtype`.
        autotune: on CUDA time cuts of the experts' kernels on the device at hand, and take the fastest.
    """

    checkpoint: Path
    output: Path
    target: str = "cpu"
    dtype: str = "float32"
    world_size: int = 1
    stages: tuple[str, ...] | None = None
    jobs: int = 1
    cache: Path | None = None
    force: bool = False
    max_model_len: int = 4096
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    prefill_chunk_size: int = 256
    model_name: str = "ming-omni"
    synthetic: bool = False
    quantize: tuple[str, ...] = ()
    autotune: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.target not in TARGETS:
            problems.append(f"--target {self.target}: not one of {', '.join(TARGETS)}")
        if self.dtype not in DTYPES:
            problems.append(f"--dtype {self.dtype}: not one of {', '.join(DTYPES)}")
        if self.world_size not in (1, 2, 4, 8):
            problems.append(f"--tp {self.world_size}: not one of 1, 2, 4, 8")
        if self.jobs < 1:
            problems.append(f"--jobs {self.jobs}: must be at least 1")
        if (
            not self.batch_sizes
            or self.batch_sizes[0] < 1
            or sorted(set(self.batch_sizes)) != [*self.batch_sizes]
        ):
            sizes = ",".join(map(str, self.batch_sizes))
            problems.append(f"--batch-sizes {sizes}: must be ascending and at least 1")
        elif self.batch_sizes[-1] > MOST_REQUESTS:
            problems.append(
                f"--batch-sizes {self.batch_sizes[-1]}: more than {MOST_REQUESTS} requests in one step"
            )
        if self.prefill_chunk_size < 16:
            problems.append(f"--prefill-chunk-size {self.prefill_chunk_size}: must be at least 16")
        if self.stages is not None and (not self.stages or len(set(self.stages)) < len(self.stages)):
            problems.append(f"--stages {','.join(self.stages)}: must name at least one stage, and each once")
        has_thinker = self.stages is None or "thinker" in self.stages
        if has_thinker and self.max_model_len < LEAST_CONTEXT:
            problems.append(f"--max-model-len {self.max_model_len}: must be at least {LEAST_CONTEXT}")
        elif has_thinker and self.max_model_len < self.prefill_chunk_size:
            problems.append(f"--max-model-len {self.max_model_len}: less than one prefill chunk")
        if self.max_model_len > MOST_TOKENS:
            problems.append(f"--max-model-len {self.max_model_len}: more than {MOST_TOKENS}")
        if not self.model_name.strip():
            problems.append("--model-name: is empty")
        elif not self.model_name.isprintable():
            problems.append(f"--model-name {self.model_name!r}: holds what cannot be printed")
        for word in self.quantize:
            stage, _, kind = word.rpartition("=")
            if kind not in QUANTIZABLE.get(stage, ()):
                problems.append(f"--quantize {word}: not {_quantize_choices()}")
        if len({word.rpartition("=")[0] for word in self.quantize}) < len(self.quantize):
            problems.append(f"--quantize {','.join(self.quantize)}: names a stage twice")
        if problems:
            raise ConfigError("\n".join(problems), where="mingc export", fix="see mingc export --help")

    def check_stages(self, stages: Collection[str]) -> None:
        """Raises: ConfigError when a choice concerns none of `stages`, which are those to be built."""
        defaults = {each.name: each.default for each in fields(self)}
        chosen = [
            (f"{option} {getattr(self, name)}", concerned)
            for name, (option, concerned) in _CONCERNS.items()
            if getattr(self, name) != defaults[name]
        ]
        for word in self.quantize:
            stage = word.rpartition("=")[0]
            chosen.append((f"--quantize {word}", (stage,) if stage else tuple(filter(None, QUANTIZABLE))))
        problems = [
            f"{choice}: is for {' and '.join(concerned)}"
            for choice, concerned in chosen
            if not set(concerned) & set(stages)
        ]
        if problems:
            raise ConfigError(
                "\n".join(problems),
                where="mingc export",
                fix=f"leave them out, or name the stages in --stages; {', '.join(stages)} would be exported",
            )

    def quantization(self, stage: str) -> Quantization | None:
        """How the quantizable weights of `stage` are stored; None: like all others. Its own word wins."""
        chosen = {word.rpartition("=")[0]: word.rpartition("=")[2] for word in self.quantize}
        kind = chosen.get(stage, chosen.get("") if stage in QUANTIZABLE else None)
        return cast("Quantization | None", kind)


def _quantize_choices() -> str:
    words = [f"{stage}={kind}" if stage else kind for stage, kinds in QUANTIZABLE.items() for kind in kinds]
    return f"one of {', '.join(words)}"
