"""Builds the image pipeline of a service: the stages behind the thinker, and the memory that drawing may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from mingc.errors import ArtifactError
from mingc.host.machine import free_memory_bytes
from mingc.prompts.glyph import GlyphTokenizer
from mingc.prompts.picture_sizes import RESOLUTIONS, sizes
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.tokens import padded
from mingc.runtime.images.worker import ImageWorker
from mingc.runtime.service.build_context import BuildContext
from mingc.runtime.service.drawing import ImagePipeline
from mingc.runtime.service.served_stages import ImageStages
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.thinker.loop import ThinkerLoop

_LARGEST_PICTURES = 2  # drawing may take as much as so many of the largest pictures with a reference
_HOST_SHARE = 0.5  # of the free memory of a host


def build_images(
    context: BuildContext,
    stages: ImageStages,
    devices: Sequence[torch.device],
    ranks: Sequence[torch.device],
) -> ImagePipeline:
    """Load the stages on the first of `devices`, and the sampler once more on a second one. `ranks`: of the thinker.

    Raises: ArtifactError when they do not fit each other.
    """
    device = devices[0]
    with current_device(device):
        condition, decoder = (context.load(name, device) for name in (stages.condition, stages.decoder))
        glyph = None if stages.glyph is None else context.load(stages.glyph, device)
        sampler = context.load(stages.sampler, device)
    problem = next(_mismatches(stages, len(condition.weights["queries"])), None)
    if problem is not None:
        raise ArtifactError(problem, where="manifest.json", fix="export again")
    engines = ImageEngines(
        condition, glyph, sampler, decoder, parameters=stages.dit, vae=stages.vae, device=device
    )
    second = None
    for other in devices[1:]:
        with current_device(other):
            copy = context.load(stages.sampler, other, copied=sampler.weights)
        second = ImageSampler(copy, stages.dit, other)
    worker = ImageWorker(engines, second)
    memory = ImageMemory(
        sampler=stages.dit,
        vae=stages.vae,
        itemsize=engines.sampler.itemsize,
        max_samples=engines.sampler.max_batch,
        num_samplers=len(worker.samplers),
    )
    most = memory.most_bytes(_LARGEST_PICTURES, _most_rows(stages))
    num_bytes = int(min(most, *(_free_bytes(each, len(devices), ranks) for each in devices)))
    for each in devices:
        context.memory.add(each, "image_workspace", num_bytes)
    return ImagePipeline(
        loop=ImageLoop(worker, max_waiting=context.options.max_waiting),
        memory=memory,
        num_bytes=num_bytes,
        num_queries=stages.queries.num_queries,
        queries=condition.weights["queries"].to(ranks[0]),
        glyphs=None
        if stages.glyphs is None
        else GlyphTokenizer(stages.glyphs.added_tokens, stages.glyphs.max_length),
    )


def others_have_work(
    devices: Sequence[torch.device], thinker: ThinkerLoop | None, talkers: Sequence[TalkerLoop]
) -> Callable[[], bool]:
    """Whether the thinker, which is on one of `devices`, or those of the talkers that are there have work.

    A loop that has failed has none, whatever it left behind.
    """
    loops: list[ThinkerLoop | TalkerLoop] = [
        *([] if thinker is None else [thinker]),
        *(each for each in talkers if each.worker.device in devices),
    ]
    return lambda: any(each.has_work and each.is_healthy for each in loops)


def _free_bytes(device: torch.device, num_devices: int, ranks: Sequence[torch.device]) -> float:
    """Bytes of `device` that batches may take at most, after everything else but KV pages is there."""
    if device.type == "cpu":
        return int(free_memory_bytes() * _HOST_SHARE) // num_devices  # all are the host
    if device in ranks:
        return math.inf  # KV pages leave it free
    return torch.cuda.mem_get_info(device)[0]


def _most_rows(stages: ImageStages) -> int:
    """Rows of the longest caption, padding included."""
    rows = stages.queries.num_queries[-1] + (0 if stages.glyphs is None else stages.glyphs.max_length)
    return padded(rows, stages.dit.token_multiple)


def _mismatches(stages: ImageStages, num_rows: int) -> Iterator[str]:
    """What does not fit of the stages, of which the first has `num_rows` learned rows."""
    dit, counts = stages.dit, stages.queries.num_queries
    if sum(counts) != num_rows:
        yield f"{stages.condition} has {num_rows} learned rows for {' + '.join(map(str, counts))} queries"
    for name, width in (
        (stages.condition, stages.queries.width),
        (stages.glyph, dit.caption_width if stages.glyphs is None else stages.glyphs.width),
    ):
        if width != dit.caption_width:
            yield f"{name} makes rows of width {width}; {stages.sampler} reads rows of width {dit.caption_width}"
    if stages.vae.latent_channels != dit.latent_channels:
        yield (
            f"{stages.sampler} makes {dit.latent_channels} channels of latents; {stages.decoder} reads "
            f"{stages.vae.latent_channels}"
        )
    side = stages.vae.scale * dit.patch_size
    largest = [size for resolution in RESOLUTIONS for size in sizes(resolution)]
    needed = (_most_rows(stages) + 3, *(max(each) // side for each in zip(*largest, strict=True)))
    if any(count > most for count, most in zip(needed, dit.max_positions, strict=True)):
        yield f"{stages.sampler} has positions for {dit.max_positions}, and pictures need {needed}"
