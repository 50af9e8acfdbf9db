"""Options of the thinker's steps. No torch."""

from __future__ import annotations

from dataclasses import dataclass

STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """Optional behaviour of a worker's steps, the same on all ranks. None: chosen by device and artifact.

    Attributes:
        is_static: run steps over static tensors, captured on CUDA, and sample on the device. Page tables then always
            have their largest size. None: on CUDA.
        two_batch_overlap: allow steps of two chunks of one prompt, a chunk of the largest size and the next one, where
            the all-reduce of one overlaps with the layers of the other. None: on CUDA with several ranks, if the
            context holds two largest chunks.
        max_chunk: chunks have at most so many rows.
        max_prompts: most prompts in a chunk, within what the engines take. None: what they take on CUDA, one on a CPU,
            where alignment padding costs more than a second call.
    """

    is_static: bool | None = None
    two_batch_overlap: bool | None = None
    max_chunk: int | None = None
    max_prompts: int | None = None


DEFAULT_STEPS = StepOptions()
