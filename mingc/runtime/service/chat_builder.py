"""Builds the chat pipeline of a service: encoders, the thinker's ranks and their KV pages, the prompt builder."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mingc.artifacts.manifest import Manifest
from mingc.artifacts.parameters import ThinkerParameters
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.media_decoder import MediaDecoder
from mingc.prompts.tokenizer import TextTokenizer, load_tokenizer
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.encoder import AudioEncoder, VisionEncoder
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.engines.stage_loader import LoadedStage, rank_weight_bytes
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.service.build_context import HOST, BuildContext
from mingc.runtime.service.pipelines import ChatPipeline
from mingc.runtime.service.served_stages import ChatStages, largest_bucket
from mingc.runtime.thinker.create_worker import create_worker
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.scheduler import ThinkerScheduler
from mingc.runtime.thinker.worker import ThinkerWorker

if TYPE_CHECKING:
    from mingc.runtime.grammar.compiler import GrammarCompiler

log = logging.getLogger("mingc.startup")

_PREPARE_ENCODERS = "prepare encoders (CUDA: capture)"
_CACHED_CHARACTERS = (
    4 << 20
)  # texts of so many keep their token ids: 128 prompts of 8,000 tokens, at most 32 MiB

_MIN_KV_TOKENS = 16384
# KV pages get this share of the memory that is free after everything else is loaded; CUDA graphs and buffers of steps
# take the rest.
_KV_SHARE = 0.8


def build_chat(
    context: BuildContext,
    stages: ChatStages,
    devices: list[torch.device],
    media: MediaDecoder | None,
    *,
    reserved_bytes: int = 0,
) -> tuple[RankGroup | None, ChatPipeline]:
    """Load encoders, then the thinker's weights, then its KV pages. Returns no group if the thinker has one rank.

    Args:
        devices: one for each rank of the thinker; the first one runs the encoders, too.
        reserved_bytes: of each device, which KV pages leave free.
    """
    options, thinker = context.options, stages.thinker
    cache = EncoderCache(options.encoder_cache) if options.encoder_cache else None
    vision = _load_vision(context, stages, devices[0], cache)
    audio = _load_audio(context, stages, devices[0], cache)
    if vision is not None or audio is not None:
        context.memory.add(HOST, "encoder_cache", options.encoder_cache)
    tokenizer = load_tokenizer(context.artifact, stages.decoder)
    max_context = largest_bucket(context.manifest, stages.decoder, "P") * thinker.page_size
    runner, worker = _start_thinker(context, stages, devices, max_context, reserved_bytes)
    scheduler = _create_scheduler(context, stages, worker, min(max_context, thinker.max_positions))
    salt = hashlib.sha256(context.manifest.to_json().encode()).digest() if options.prefix_cache else None
    chat = ChatPipeline(
        processor=ChatProcessor(
            tokenizer,
            thinker,
            vision=stages.vision_parameters,
            audio=stages.audio_parameters,
            max_tokens=scheduler.max_context,
            parse_special_tokens=options.parse_special_tokens,
            decoder=media,
            cached_characters=_CACHED_CHARACTERS if options.prefix_cache else 0,
        ),
        tokenizer=tokenizer,
        vision=vision,
        audio=audio,
        encoder_cache=cache,
        media=media,
        grammars=_load_grammars(context, tokenizer, thinker),
        loop=ThinkerLoop(
            runner,
            scheduler,
            stop_ids=thinker.stop_token_ids,
            vocab_size=thinker.vocab_size,
            prefix_salt=salt,
        ),
    )
    return runner if isinstance(runner, RankGroup) else None, chat


def _load_grammars(
    context: BuildContext, tokenizer: TextTokenizer, thinker: ThinkerParameters
) -> GrammarCompiler | None:
    """The compiler of constraints; None without llguidance.

    It is made at the start, because it holds Python's lock for half a second with a vocabulary of 157,184 tokens.
    """
    try:
        from mingc.runtime.grammar.compiler import GrammarCompiler
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        log.warning("answers cannot be constrained by schemas: llguidance is missing; pip install llguidance")
        return None
    with context.clock.phase("prepare grammars"):
        return GrammarCompiler(tokenizer, thinker.vocab_size, thinker.stop_token_ids)


def _load_vision(
    context: BuildContext, stages: ChatStages, device: torch.device, cache: EncoderCache | None
) -> EncoderLoop[VisionFeatures] | None:
    if stages.vision is None or stages.vision_parameters is None:
        return None
    loaded = context.load(stages.vision, device)
    with context.clock.phase(_PREPARE_ENCODERS, stages.vision):
        encoder = VisionEncoder(loaded, stages.vision_parameters, device)
    return EncoderLoop(stages.vision, encoder, cache)


def _load_audio(
    context: BuildContext, stages: ChatStages, device: torch.device, cache: EncoderCache | None
) -> EncoderLoop[AudioFeatures] | None:
    if stages.audio is None or stages.audio_parameters is None:
        return None
    loaded = context.load(stages.audio, device)
    with context.clock.phase(_PREPARE_ENCODERS, stages.audio):
        encoder = AudioEncoder(loaded, stages.audio_parameters, device)
    return EncoderLoop(stages.audio, encoder, cache)


def _start_thinker(
    context: BuildContext,
    stages: ChatStages,
    devices: list[torch.device],
    max_context: int,
    reserved_bytes: int,
) -> tuple[RankGroup | ThinkerWorker, ThinkerWorker]:
    """Load the weights on every rank and then allocate the KV pages from the memory that is left.

    Returns what runs the steps, and the worker of this process.
    """
    options, decoder, page_size = context.options, stages.decoder, stages.thinker.page_size

    def load() -> LoadedStage:
        return context.load(decoder, devices[0])

    def count_pages() -> int:
        tokens = kv_tokens(
            context.manifest,
            decoder,
            devices,
            requested=options.max_total_tokens,
            context=max_context,
            reserved_bytes=reserved_bytes,
        )
        return 1 + -(-tokens // page_size)

    def start(stage: LoadedStage, num_pages: int) -> ThinkerWorker:
        with context.clock.phase("prepare steps (CUDA: capture)", stages.decoder):
            return create_worker(
                stage, context.manifest, num_pages=num_pages, device=devices[0], options=options.steps
            )

    runner: RankGroup | ThinkerWorker
    if len(devices) > 1:
        runner = RankGroup(
            context.artifact.root,
            devices,
            load,
            count_pages,
            start,
            on_failure=context.on_failure,
            step_timeout_s=options.step_timeout_s,
            options=options.steps,
        )
        context.processes.callback(runner.close)
        worker = runner.worker
    else:
        stage = load()
        runner = worker = start(stage, count_pages())
    for rank, device in enumerate(devices):
        if rank:
            num_bytes = rank_weight_bytes(context.artifact, decoder, rank)
            context.memory.add(device, f"{decoder}_weights", num_bytes)
        context.memory.add(device, "kv_pages", worker.state_bytes)
    if worker.latency_model is not None:
        log.info(
            "ms of a prompt's chunk by tokens %s, of a decode step by requests %s",
            *(
                {size: round(ms, 2) for size, ms in each}
                for each in (worker.latency_model.chunks, worker.latency_model.decodes)
            ),
        )
    return runner, worker


def kv_tokens(
    manifest: Manifest,
    decoder: str,
    devices: Sequence[torch.device],
    *,
    requested: int | None,
    context: int,
    reserved_bytes: int = 0,
) -> int:
    """Number of tokens that the KV pages hold: as `requested`, else by free memory on a GPU, or as a few requests need.

    Call it after every rank has loaded everything else: it measures the free memory of the fullest of `devices`, and
    leaves `reserved_bytes` of it.

    Raises: ArtifactError when the decoder has no attention graph.
    """
    if requested is not None:
        return requested
    if devices[0].type != "cuda":
        return max(context, _MIN_KV_TOKENS)
    record = manifest.stages[decoder].graphs.get("decode_attention")
    if record is None:
        raise ArtifactError(
            f"stage {decoder} has no graph decode_attention", where="manifest.json", fix="export again"
        )
    attention = record.spec
    row_bytes = len(attention.layer_instances) * sum(
        torch_dtype(tensor.dtype).itemsize * math.prod(size for size in tensor.shape if isinstance(size, int))
        for tensor in attention.state
    )
    free = max(0, min(torch.cuda.mem_get_info(device)[0] for device in devices) - reserved_bytes)
    return max(context, int(free * _KV_SHARE) // row_bytes)


def _create_scheduler(
    context: BuildContext, stages: ChatStages, worker: ThinkerWorker, max_context: int
) -> ThinkerScheduler:
    """Create the scheduler. The artifact allows requests of `max_context` tokens; the KV pages may hold fewer."""
    options = context.options
    batch = largest_bucket(context.manifest, stages.decoder, "B")
    scheduler = ThinkerScheduler(
        PagePool(worker.num_pages, stages.thinker.page_size),
        max_running=min(options.max_running or batch, batch),
        chunk=worker.chunk,
        prefill_policy=ChunkedPrefillPolicy(
            num_layer_groups=worker.num_layer_groups, latency_model=worker.latency_model
        ),
        max_context=max_context,
        max_waiting=options.max_waiting,
    )
    log.info(
        "KV pages for %d tokens, a request may have %d", scheduler.pool.max_tokens, scheduler.max_context
    )
    if scheduler.max_context < max_context:
        log.warning(
            "--max-total-tokens %d limits a request to %d tokens; the artifact allows %d",
            options.max_total_tokens or 0,
            scheduler.max_context,
            max_context,
        )
    return scheduler
