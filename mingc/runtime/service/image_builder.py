"""Builds the image pipeline of a service: the stages behind the thinker, and the memory that drawing may take."""

from __future__ import annotations

import torch

from mingc.host.machine import free_memory_bytes
from mingc.prompts.glyph import GlyphTokenizer
from mingc.runtime.images.engines import ImageEngines
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.tokens import padded
from mingc.runtime.images.worker import ImageWorker
from mingc.runtime.service.build_context import BuildContext
from mingc.runtime.service.drawing import ImagePipeline
from mingc.runtime.service.served_stages import ImageStages

_LARGEST_PICTURES = 2  # drawing may take as much as so many of the largest pictures with a reference
_HOST_SHARE = 0.5  # of the free memory of a host


def build_images(context: BuildContext, stages: ImageStages, device: torch.device) -> ImagePipeline:
    """Load the stages on `device`, that of the thinker's first rank."""
    condition, sampler, decoder = (
        context.load(name, device) for name in (stages.condition, stages.sampler, stages.decoder)
    )
    engines = ImageEngines(
        condition,
        None if stages.glyph is None else context.load(stages.glyph, device),
        sampler,
        decoder,
        parameters=stages.dit,
        vae=stages.vae,
        device=device,
    )
    rows = stages.queries.num_queries[-1] + (0 if stages.glyphs is None else stages.glyphs.max_length)
    memory = ImageMemory(
        sampler=stages.dit, vae=stages.vae, itemsize=engines.itemsize, max_samples=engines.max_batch
    )
    num_bytes = memory.most_bytes(_LARGEST_PICTURES, padded(rows, stages.dit.token_multiple))
    if device.type == "cpu":
        num_bytes = min(num_bytes, int(free_memory_bytes() * _HOST_SHARE))
    context.memory.add(device, "image_workspace", num_bytes)
    return ImagePipeline(
        loop=ImageLoop(ImageWorker(engines), max_waiting=context.options.max_waiting),
        memory=memory,
        num_bytes=num_bytes,
        num_queries=stages.queries.num_queries,
        queries=condition.weights["queries"],
        glyphs=None
        if stages.glyphs is None
        else GlyphTokenizer(stages.glyphs.added_tokens, stages.glyphs.max_length),
    )
