"""A server without a model; `media_decode.py` measures with it what media cost the event loop.

HTTP, preprocessing, decoder processes, encoder threads, scheduler and output are those of `mingc serve`, with the
parameters of the released model. Only the engines are missing: encoders return zeros at once, and a thinker's step
takes `STEP_S` and always gives the same token.

Prints its URL. A line on stdin ends a measurement: it answers with a line of JSON, the gaps of the loop since the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingc.artifacts.parameters import AudioParameters, ThinkerParameters, VisionParameters
from mingc.export.stage import StageOptions
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.media.decoder_pool import DecoderPool
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.encoders import host_tensors
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.request import ServiceInfo
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.pipelines import ChatPipeline
from mingc.runtime.thinker.logit_edits import NO_OPTIONS, SampleOptions
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.scheduler import ChunkShape, ThinkerScheduler
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, SampleStep
from mingc.runtime.thinker.worker import LaunchedTokens
from mingc.server.app import create_app
from mingc.server.lifecycle import serve
from mingc.server.options import ServeOptions

STEP_S = 0.02  # 50 tokens per second
ROOT = Path(__file__).resolve().parent.parent
_TOKENIZER = ROOT / "tests" / "data" / "tiny-ming" / "tokenizer.json"
_VOCAB = 576  # of this tokenizer
_CONTEXT, _PAGE = 1 << 17, 64
_CACHE_BYTES = 1 << 16  # less than any medium needs, so every medium is encoded
_TICK_S = 0.001


def parameters(stage: str) -> Any:
    """Parameters of a stage of the released model, as an export for a GPU writes them."""
    found = find(stage)
    options = StageOptions(dtype=torch.bfloat16, device="cuda", static_buckets=True, batch_sizes=(1,))
    config: Any = found.config(open_synthetic(ROOT / "benchmarks" / "released"))
    return found.parameters(config, options)


def vision_parameters() -> VisionParameters:
    found = parameters("vision_encoder")
    assert isinstance(found, VisionParameters)
    return found


def audio_parameters() -> AudioParameters:
    found = parameters("audio_encoder")
    assert isinstance(found, AudioParameters)
    return found


class LoopWatch:
    """Gaps of an event loop: how much later than asked a task of it runs that sleeps for a millisecond at a time.

    A gap is also long when the system runs other processes. What this process did is at most the smaller of the gap
    and the processor time of all its threads meanwhile: its own share. Gaps are counted in steps of 0.1 ms, as sorting
    them would keep Python's lock. `take` may be called from another thread.
    """

    def __init__(self) -> None:
        self._gaps, self._own = Histogram(), Histogram()

    async def run(self) -> None:
        while True:
            used, due = time.process_time(), time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            gap, work = time.perf_counter() - due, time.process_time() - used
            self._gaps.add(1e3 * gap)
            self._own.add(1e3 * min(gap, work))

    def take(self) -> dict[str, dict[str, float]]:
        """The gaps since the last call, and this process's own share of them."""
        gaps, own = self._gaps, self._own
        self._gaps, self._own = Histogram(), Histogram()
        return {"gap": gaps.summary(), "own": own.summary()}


class Histogram:
    """Milliseconds counted in steps of 0.1, up to a second."""

    def __init__(self) -> None:
        self._counts = [0] * 10_000
        self._longest = 0.0

    def add(self, ms: float) -> None:
        self._counts[min(9_999, max(0, int(10 * ms)))] += 1
        self._longest = max(self._longest, ms)

    def summary(self) -> dict[str, float]:
        """Longest, the upper ends of the steps of some quantiles, and how many are above 10 ms."""
        n, seen = sum(self._counts), 0
        found: dict[str, float] = {
            "n": n,
            "longest": round(self._longest, 2),
            "over_10_ms": sum(self._counts[100:]),
        }
        for step, count in enumerate(self._counts):
            for name, share in (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
                if seen < share * n <= seen + count:
                    found[name] = round(0.1 * (step + 1), 1)
            seen += count
        return found


class _Zeros:
    """An encoder that returns zeros (tokens, hidden_size) at once."""

    max_batch_tokens = 2048

    def __init__(self, merge_size: int, hidden_size: int) -> None:
        self._merge_size = merge_size
        self._hidden_size = hidden_size

    def _count(self, each: VisionFeatures | AudioFeatures) -> int:
        return each.num_tokens if isinstance(each, AudioFeatures) else each.num_tokens(self._merge_size)

    def padded_tokens(self, features: Sequence[VisionFeatures | AudioFeatures]) -> int:
        return sum(map(self._count, features))

    def encode(self, features: Sequence[VisionFeatures | AudioFeatures]) -> list[Tensor]:
        shapes = [(self._count(each), self._hidden_size) for each in features]
        return [host_tensors.empty(shape, torch.bfloat16).zero_() for shape in shapes]


class _PacedRunner:
    """A thinker's worker that waits in place of running engines."""

    device = torch.device("cpu")
    samples_on_device = False

    def __init__(self, token: int) -> None:
        self._logits = torch.zeros(_VOCAB)
        self._logits[token] = 9.0

    def prefill(self, step: PrefillStep) -> Tensor:
        return self._logits.expand(len(step.counts), -1)

    def decode(self, step: DecodeStep) -> Tensor:
        time.sleep(STEP_S)
        return self._logits.expand(len(step.input_ids), -1)

    def launch_sampling(self, step: SampleStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise NotImplementedError("the host samples")

    def launch_decode(self, step: DecodeStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise NotImplementedError("the host samples")

    def launch_prefill(self, step: PrefillStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise NotImplementedError("the host samples")


def open_service() -> OmniService:
    vision, audio = vision_parameters(), audio_parameters()
    tokenizer = TextTokenizer.from_file(_TOKENIZER)
    token = tokenizer.token_id
    thinker = ThinkerParameters(
        vocab_size=_VOCAB,
        hidden_size=vision.hidden_size,
        num_layers=1,
        max_positions=_CONTEXT,
        page_size=_PAGE,
        chunk_alignment=1,
        shared_rows=0,
        stop_token_ids=(token("<|role_end|>"),),
        image_patch_token=token("<imagePatch>"),
        frame_patch_token=token("<framePatch>"),
        audio_patch_token=token("<audioPatch>"),
        image_start_token=token("<image>"),
        image_end_token=token("</image>"),
        video_start_token=token("<video>"),
        video_end_token=token("</video>"),
        audio_start_token=token("<audio>"),
        audio_end_token=token("</audio>"),
        temporal_position_scale=2,
        default_system_text="You are a helpful assistant.",
        thinking_suffix="\n\ndetailed thinking {state}",
    )
    scheduler = ThinkerScheduler(
        PagePool(1 + 4 * _CONTEXT // _PAGE, _PAGE),
        max_running=16,
        chunk=ChunkShape(max_rows=2048),
        prefill_policy=ChunkedPrefillPolicy(num_layer_groups=1),
        max_context=_CONTEXT,
        max_waiting=64,
    )
    cache, decoders = EncoderCache(_CACHE_BYTES), DecoderPool(timeout_s=600)
    decoders.start()
    info = ServiceInfo(
        model="no model", sample_rate=0, voices=(), default_voice=None, has_text=True,
        has_image=True, has_video=True, has_audio_input=True, has_speech=False,
    )  # fmt: skip
    pipeline = ChatPipeline(
        processor=ChatProcessor(
            tokenizer, thinker, vision=vision, audio=audio, max_tokens=_CONTEXT, decoder=decoders
        ),
        tokenizer=tokenizer,
        vision=EncoderLoop("vision_encoder", _Zeros(vision.merge_size, vision.hidden_size), cache),
        audio=EncoderLoop("audio_encoder", _Zeros(1, audio.hidden_size), cache),
        loop=ThinkerLoop(
            _PacedRunner(tokenizer.encode("a")[0]),
            scheduler,
            stop_ids=thinker.stop_token_ids,
            vocab_size=_VOCAB,
            prefix_salt=b"no model",
        ),
        encoder_cache=cache,
        media=decoders,
    )
    return OmniService(info, chat=pipeline, speech=None)


def main() -> None:
    torch.set_num_threads(1)
    watch = LoopWatch()
    watching: list[asyncio.Task[None]] = []

    def begin(url: str) -> None:
        watching.append(asyncio.get_running_loop().create_task(watch.run()))
        print(url, flush=True)

    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(watch.take()), flush=True)
        os.kill(os.getpid(), signal.SIGINT)  # the benchmark has ended

    threading.Thread(target=answer, daemon=True).start()
    serve(create_app(open_service(), ServeOptions(port=0, drain_s=0)), announce=begin)


if __name__ == "__main__":
    main()
