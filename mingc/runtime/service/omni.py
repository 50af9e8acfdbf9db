"""`Service` over the engine threads: the running model that the HTTP layer calls.

Path of a request: preprocessing in a small thread pool, the encoders' threads, the thinker's thread, the talker's
thread, and back through a `RequestStream` to the caller's event loop. An error of one request does not affect the
others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mingc.errors import CapacityError, RequestError, ServeError, WorkerError
from mingc.prompts.conversation import MediaPart, Message, VideoParams
from mingc.prompts.media_decoder import SpeechSegment
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.prompts.thinker_prompt import VISION
from mingc.prompts.tokenizer import Detokenizer, TextTokenizer
from mingc.prompts.tools import Tool, ToolTokens, ToolUse
from mingc.prompts.transcription import answer_start, transcription_message
from mingc.runtime.images.worker import Drawing
from mingc.runtime.noise import NoiseSource, PhiloxNoise, random_seed
from mingc.runtime.request import (
    NOTHING_TO_SPEAK,
    ChatRequest,
    Done,
    Event,
    ImageDone,
    ImageEvent,
    ImageProgress,
    ImageRequest,
    MemoryUse,
    PartialImage,
    Recorder,
    SamplingParams,
    ServiceInfo,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextRequest,
    TranscriptEvent,
    TranscriptionRequest,
    Usage,
)
from mingc.runtime.request_stream import (
    EventQueue,
    FailedItem,
    HiddenRowsItem,
    Item,
    RequestStream,
    TextEndItem,
    TokenItem,
)
from mingc.runtime.service.drawing import (
    ImagePipeline,
    check_request,
    decode_reference,
    negative_messages,
    picture_prompts,
    picture_sizes,
    plan_batch,
)
from mingc.runtime.service.output_processor import (
    ChatOutputProcessor,
    SpeechOutputProcessor,
    SpeechStream,
    Timings,
)
from mingc.runtime.service.pipelines import (
    ChatPipeline,
    Prepared,
    SpeechPipeline,
    media_embeds,
    picture_embeds,
)
from mingc.runtime.service.tool_calls import CallParser, tool_sampling
from mingc.runtime.service.transcriber import transcribe
from mingc.runtime.service.voices import Voices
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.token_matcher import TokenMatcher
from mingc.runtime.voices import NewVoice, VoiceInfo
from mingc.text.spoken import SpeechText, SpokenText, spoken_pieces
from mingc.text.spoken_piece import SpokenPiece

_JOIN_S, _FAILED_JOIN_S = 10.0, 1.0
_NUM_SEEDS = 1 << 64
_NUM_DRAWN_SEEDS = 1 << 32  # of pictures without one; clients read it and send it again
_SHORT = 1000  # characters of a text that is mostly read or tokenized faster than it is handed to a thread
_PART = 20  # characters whose tokenizing takes as long as a message or a part without text
_INLINE_S = 0.003  # reading takes so long at most: numbers and marks may take fifteen times as long as words

_T = TypeVar("_T")


class OmniService:
    """Serves one artifact; `mingc.runtime.service.builder` builds its parts.

    `chat` and `speech` are called on an event loop, one loop at a time.

    Args:
        chat: None without a thinker.
        speech: None without a talker.
        images: None without the stages of pictures.
        ranks: the group of the thinker's ranks, which the service closes; None for one rank.
        num_threads: how many threads preprocess requests.
        max_pending_patches: see `SpeechStream`.
        memory: what was allocated at start.
    """

    def __init__(
        self,
        info: ServiceInfo,
        *,
        chat: ChatPipeline | None,
        speech: SpeechPipeline | None,
        images: ImagePipeline | None = None,
        ranks: RankGroup | None = None,
        num_threads: int = 2,
        max_pending_patches: int = 128,
        memory: tuple[MemoryUse, ...] = (),
    ) -> None:
        self.info = info
        self._chat = chat
        self._speech = speech
        self._images = images
        self._ranks = ranks
        self._max_pending_patches = max_pending_patches
        self._num_threads, self._num_offloaded = num_threads, 0
        self._memory = memory
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mingc-preprocess")
        self._loops = [
            *(() if chat is None else (chat.loop,)),
            *(() if speech is None else speech.talkers.loops),
            *(() if images is None else (images.loop,)),
        ]
        encoders = () if chat is None else (chat.vision, chat.audio)
        self._encoders = [each for each in encoders if each is not None]
        self._event_queue: EventQueue | None = None
        self._running: set[RequestStream] = set()
        self._running_chats: set[RequestStream] = set()
        # Files that are read for transcripts; of one event loop, like the queue.
        self._files = asyncio.Semaphore(num_threads)
        self._is_closing = self._is_stopped = False
        self._failure: ServeError | None = None
        self._report_failure: Callable[[ServeError], None] = lambda error: None
        self._failure_lock = threading.Lock()
        for loop in (*self._encoders, *self._loops):
            loop.start()

    @property
    def is_ready(self) -> bool:
        """Whether all threads and ranks are alive and new requests are accepted."""
        has_all_ranks = self._ranks is None or self._ranks.is_alive
        threads = (*self._encoders, *self._loops)
        return not self._is_closing and has_all_ranks and all(each.is_healthy for each in threads)

    @property
    def max_segment_length(self) -> int:
        """Longest piece of text that is spoken as one segment. Raises: RequestError without speech stages."""
        return self._speech_pipeline().max_segment_length

    @property
    def speech_text(self) -> SpeechText:
        """The rules by which texts are read. Raises: RequestError without speech stages."""
        return self._speech_pipeline().speech_text

    @property
    def load(self) -> ServiceLoad:
        """See `Service`. Reads lengths without locks (atomic in CPython), and listeners under the talkers' locks."""
        waiting: dict[str, int] = {}
        used = total = 0
        caches: dict[str, int] = {}
        limits = {"preprocessing": (self._num_offloaded, self._num_threads)}
        if self._event_queue is not None:
            queue = self._event_queue
            limits["unread_speech_bytes"] = (queue.unread_bytes, queue.max_unread_bytes)
        if self._chat is not None:
            scheduler = self._chat.loop.scheduler
            total = scheduler.pool.num_pages - 1
            used = total - scheduler.pool.num_free
            waiting["thinker"] = scheduler.num_waiting
            limits |= {
                "chats": (scheduler.num_running, scheduler.max_running),
                "chat_queue": (scheduler.num_waiting, scheduler.max_waiting),
                "kv_pages": (used, total),
            }
            caches = {
                "prefilled_tokens": scheduler.num_prefilled,
                "reused_tokens": scheduler.num_reused,
                "num_preempted": scheduler.num_preempted,
                "cached_pages": scheduler.pool.num_published,
                "evicted_pages": scheduler.pool.num_evicted,
            }
            if self._chat.encoder_cache is not None:
                embeddings = self._chat.encoder_cache
                limits["encoder_cache_bytes"] = (embeddings.num_bytes, embeddings.max_bytes)
                caches |= {
                    "encoder_hits": embeddings.num_hits,
                    "encoder_misses": embeddings.num_misses,
                    "encoder_cache_bytes": embeddings.num_bytes,
                }
        listeners: Mapping[str, int] = {}
        num_underruns = 0
        if self._speech is not None:
            talkers = self._speech.talkers
            waiting["talker"] = talkers.num_waiting
            listeners, num_underruns = talkers.listeners, talkers.num_underruns
            limits |= {**talkers.limits}
            if self._speech.voices is not None:
                limits |= self._speech.voices.limits
        if self._images is not None:
            drawing = self._images.loop
            waiting["image"] = drawing.num_waiting
            limits["image_queue"] = (drawing.num_waiting_jobs, drawing.max_waiting)
            caches |= {
                "drawing_pictures": drawing.num_running,
                "drawn_pictures": drawing.num_drawn,
                "image_steps": drawing.num_steps,
            }
        return ServiceLoad(
            kv_pages_used=used,
            kv_pages_total=total,
            num_waiting=waiting,
            listeners=listeners,
            num_underruns=num_underruns,
            limits=limits,
            memory=self._memory,
            **caches,
        )

    @property
    def has_prefix_cache(self) -> bool:
        """Whether chats may reuse KV pages of earlier ones."""
        return self._chat is not None and self._chat.loop.has_prefix_cache

    def forget_caches(self) -> None:
        """Prevent later requests from reusing results of earlier requests. For checks and measurements."""
        if self._chat is not None:
            self._chat.loop.forget_prefixes()
            self._chat.processor.forget_texts()
            if self._chat.encoder_cache is not None:
                self._chat.encoder_cache.clear()

    @property
    def thinker(self) -> ThinkerLoop | None:
        """The thinker's loop, for checks and measurements; None without a thinker."""
        return None if self._chat is None else self._chat.loop

    @property
    def talkers(self) -> Sequence[TalkerLoop]:
        """The talkers' loops, for checks and measurements."""
        return () if self._speech is None else self._speech.talkers.loops

    @property
    def held(self) -> Mapping[str, int]:
        """Resources that requests hold at present, by kind: all 0 when no request runs. For checks; see `load`."""
        held = Counter({"requests": len(self._running), "chat requests": len(self._running_chats)})
        for loop in (*self._encoders, *self._loops):
            held.update(loop.held)  # adds: talkers hold the same kinds
        return held

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Event]:
        """Events of one answer. See `Service`."""
        async with aclosing(self.answers(request)) as answers:
            async for _, event in answers:
                yield event

    def answers(self, request: TextRequest) -> AsyncGenerator[tuple[int, Event]]:
        """Events of all answers. See `Service`."""
        if not isinstance(request, ChatRequest):
            return self._answers(
                lambda: self._prepare(request),
                request.sampling,
                None,
                num_answers=request.num_answers,
                priority=request.priority,
                is_short=len(request.prompt) <= _SHORT,
            )
        use, tokens = request.tools, self._chat_pipeline().processor.tool_tokens
        has_tools = use.tools or any(message.has_tools for message in request.messages)
        sampling = request.sampling
        if has_tools and tokens is not None:
            sampling = tool_sampling(sampling, use, tokens, thinking=request.thinking)
        return self._answers(
            lambda: self._prepare(request),
            sampling,
            request.speech,
            num_answers=request.num_answers,
            is_live=request.is_live,
            priority=request.priority,
            calls=(tokens, use) if has_tools and tokens is not None else None,
            thinking=request.thinking,
            is_short=not has_tools and _is_short(request.messages),
        )

    def _prepare(self, request: TextRequest) -> PreparedPrompt:
        if isinstance(request, ChatRequest):
            return self.prepare(
                request.messages, tools=request.tools.tools, video=request.video, thinking=request.thinking
            )
        return self._chat_pipeline().processor.prepare_text(request.prompt)

    @property
    def tokenizer(self) -> TextTokenizer:
        """See `Service`."""
        return self._chat_pipeline().tokenizer

    async def tokenize(self, prompt: str | ChatRequest) -> Sequence[int]:
        """See `Service`."""
        if isinstance(prompt, str):
            processor = self._chat_pipeline().processor
            return await self._offload(lambda: processor.tokenize(prompt))
        prepared = await self._offload(lambda: self._prepare(prompt))
        tokens: list[int] = prepared.tokens.input_ids.tolist()
        return tokens

    async def count_tokens(self, request: ChatRequest) -> Sequence[int]:
        """See `Service`."""
        count = self._chat_pipeline().processor.count
        return await self._offload(
            lambda: count(
                request.messages, tools=request.tools.tools, video=request.video, thinking=request.thinking
            )
        )

    async def decode_media(self, part: MediaPart) -> MediaPart:
        """See `Service`."""
        processor = self._chat_pipeline().processor
        with self._begin(is_chat=True):
            return await self._offload(lambda: processor.decode(part))

    async def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
        """Events of a transcript. See `Service`.

        At most `num_threads` files are read at a time, as each of them keeps a decoder process; others wait.
        """
        processor = self._chat_pipeline().processor
        reader = processor.read_speech(request.audio, request.where, request.rules)

        def answer(segment: SpeechSegment) -> AsyncGenerator[Event]:
            message = transcription_message(
                segment.features, request.where, topic=request.topic, keywords=request.keywords
            )
            start = answer_start(request.language)
            return self.answer(
                lambda: processor.prepare([message], answer=start), request.sampling, is_part=True
            )

        with self._begin(is_chat=True):
            events = transcribe(
                reader, lambda: self._offload(reader.read), answer, request.language, self._files
            )
            async with aclosing(events):
                async for event in events:
                    yield event

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        video: VideoParams | None = None,
        thinking: bool = False,
    ) -> PreparedPrompt:
        """Decode media and build the prompt of a conversation, the input of `answer`. Blocks; runs no engine."""
        return self._chat_pipeline().processor.prepare(messages, tools=tools, video=video, thinking=thinking)

    async def answer(
        self,
        prepare: Callable[[], PreparedPrompt],
        sampling: SamplingParams,
        speech_params: SpeechParams | None = None,
        *,
        noise: NoiseSource | None = None,
        recorder: Recorder | None = None,
        is_live: bool = False,
        speech_text: SpeechText | None = None,
        priority: int = 0,
        is_part: bool = False,
    ) -> AsyncGenerator[Event]:
        """Events of the answer to the prompt that `prepare` returns; a preprocessing thread calls it.

        Args:
            noise: noise of the speech; None: derived from its seed.
            recorder: gets the logits of all tokens and the values of all patches.
            is_live, priority: see `ChatRequest`.
            speech_text: the rules by which the answer is read; None: the service's.
            is_part: whether the answer belongs to a request that has begun, which goes on while the service closes.
        """
        answers = self._answers(
            prepare,
            sampling,
            speech_params,
            noise=noise,
            recorder=recorder,
            is_live=is_live,
            speech_text=speech_text,
            priority=priority,
            is_part=is_part,
        )
        async with aclosing(answers):
            async for _, event in answers:
                yield event

    async def _answers(
        self,
        prepare: Callable[[], PreparedPrompt],
        sampling: SamplingParams,
        speech_params: SpeechParams | None,
        *,
        num_answers: int = 1,
        noise: NoiseSource | None = None,
        recorder: Recorder | None = None,
        is_live: bool = False,
        speech_text: SpeechText | None = None,
        priority: int = 0,
        calls: tuple[ToolTokens, ToolUse] | None = None,
        thinking: bool = False,
        is_part: bool = False,
        is_short: bool = False,
    ) -> AsyncGenerator[tuple[int, Event]]:
        """Events of the answers to one prompt, of which only a single one may be spoken. See `answer`.

        `calls`: the tools that they may call; None: tokens of calls are as any special tokens. `thinking`: whether
        their thoughts are separated from their texts. `is_short`: whether the prompt is written here, not in a thread.
        """
        timings = Timings()
        pipeline = self._chat_pipeline()
        speech = self._speech_pipeline() if speech_params is not None else None
        sampling_seed = sampling.seed if sampling.seed is not None else random_seed()
        with self._begin(is_chat=True, is_part=is_part) as stream:
            speech_stream: SpeechStream | None = None
            spoken_text: SpokenText | None = None
            jobs: dict[int, int] = {}  # of the thinker, by answer
            try:
                if speech is not None and speech_params is not None:
                    speech_params = await self.find_voice(speech_params, "audio.")
                    seed = speech_params.seed if speech_params.seed is not None else sampling.seed
                    speech_stream = self._open_speech_stream(
                        speech,
                        speech_params,
                        stream,
                        seed,
                        noise,
                        is_live=is_live,
                        priority=priority,
                        recorder=recorder,
                        thinker=pipeline.loop,
                    )
                    spoken_text = SpokenText(speech.max_segment_length, speech_text or speech.speech_text)

                def prepared() -> tuple[Sequence[TokenMatcher | None], Prepared]:
                    matchers = pipeline.matchers(sampling.constraint, num_answers)
                    return matchers, pipeline.prepare(prepare, timings, stream)

                is_short = is_short and sampling.constraint is None
                found = prepared() if is_short else await self._offload(prepared)
                matchers, (prompt, keys, encoded) = found
                if encoded:
                    prompt = replace(
                        prompt,
                        media_embeds=await media_embeds(
                            prompt.embed_kind, encoded, pipeline.loop.runner.device
                        ),
                    )
                timings.mark("encoded")
                detokenizers = [Detokenizer(pipeline.tokenizer) for _ in range(num_answers)]
                runs = [
                    ChatOutputProcessor(
                        detokenizer,
                        sampling,
                        prompt_tokens=len(prompt.input_ids),
                        speech_stream=speech_stream,
                        spoken_text=spoken_text,
                        sample_rate=self.info.sample_rate,
                        timings=timings.copy(),
                        calls=None if calls is None else CallParser(*calls, detokenizer),
                        thinking=thinking,
                    )
                    for detokenizer in detokenizers
                ]

                def submit(answer: int) -> None:
                    jobs[answer] = pipeline.loop.submit(
                        prompt,
                        sampling,
                        (sampling_seed + answer) % _NUM_SEEDS,
                        partial(_put, stream, answer) if answer else stream.put,
                        keys=keys,
                        recorder=recorder,
                        matcher=matchers[answer],
                        wakes=False,
                    )
                    # Once all that this turn of the event loop submits is there, so that it shares a chunk.
                    asyncio.get_running_loop().call_soon(pipeline.loop.wake)

                submit(0)
                begun = 1
                while not all(run.is_done for run in runs):
                    item = await stream.get()
                    answer = item.answer if isinstance(item, TokenItem) else 0
                    for event in runs[answer].accept(item):
                        yield answer, _counting_the_prompt_once(event) if answer else event
                    if runs[answer].is_text_done and answer in jobs:
                        pipeline.loop.cancel(jobs.pop(answer))  # after a stop string, the thinker still runs
                    # By its first token the prefix cache has the pages of the prompt.
                    while begun < num_answers:
                        try:
                            submit(begun)
                        except CapacityError:
                            if not jobs:
                                raise
                            break  # another answer of this request makes room for it
                        begun += 1
            finally:
                for job in jobs.values():
                    pipeline.loop.cancel(job)
                if speech_stream is not None:
                    speech_stream.close()

    def speech(
        self,
        request: SpeechRequest,
        *,
        noise: NoiseSource | None = None,
        recorder: Recorder | None = None,
        speech_text: SpeechText | None = None,
    ) -> AsyncGenerator[Event]:
        """Events of the speech of one text. See `Service`, and `answer` for the other arguments."""
        speech = self._speech_pipeline()
        pieces = spoken_pieces(request.text, speech.max_segment_length, speech_text or speech.speech_text)
        return self.speak(
            map(SpokenPiece, pieces),
            request.speech,
            noise,
            is_live=request.is_live,
            priority=request.priority,
            recorder=recorder,
            is_short=len(request.text) <= _SHORT,
        )

    async def speak(
        self,
        pieces: Iterable[SpokenPiece],
        params: SpeechParams,
        noise: NoiseSource | None = None,
        *,
        is_live: bool = False,
        priority: int = 0,
        recorder: Recorder | None = None,
        is_short: bool = False,
    ) -> AsyncGenerator[Event]:
        """Events of the speech of pieces of text, one segment each. Another thread reads them unless they are short."""
        timings = Timings()
        speech = self._speech_pipeline()
        with self._begin(is_chat=False) as stream:
            params = await self.find_voice(params)
            speech_stream = self._open_speech_stream(
                speech,
                params,
                stream,
                params.seed,
                noise,
                is_live=is_live,
                priority=priority,
                recorder=recorder,
            )
            try:
                # One task per request, so early requests speak before later ones are parsed.
                await self._enqueue(speech_stream, pieces, is_short=is_short)
                if speech_stream.is_finished:
                    raise RequestError(NOTHING_TO_SPEAK, param="input", code="nothing_to_speak")
                timings.mark("prepared")
                run = SpeechOutputProcessor(speech_stream, sample_rate=self.info.sample_rate, timings=timings)
                while not run.is_done:
                    for event in run.accept(await stream.get()):
                        yield event
            finally:
                speech_stream.close()

    async def draw(
        self, request: ImageRequest, *, recorder: Recorder | None = None
    ) -> AsyncGenerator[ImageEvent]:
        """Events of pictures. See `Service`. `recorder`: gets the latents of all pictures."""
        chat, images = self._chat_pipeline(), self._image_pipeline()
        check_request(request)
        timings = Timings()
        dit = images.memory.sampler
        guidance = dit.guidance if request.guidance is None else request.guidance
        with self._begin(is_chat=True) as stream:
            reference = await self._offload(lambda: decode_reference(request, chat.media))
            sizes = picture_sizes(request, reference)
            has_negative = request.negative_prompt is not None and guidance > 1
            conversations = [request.messages, *([negative_messages(request)] if has_negative else [])]
            names = (request.where, "negative_prompt")
            found = [
                await self._hidden_rows(each, name, timings, stream)
                for each, name in zip(conversations, names, strict=False)
            ]
            timings.mark("condition")
            usage = sum((usage for _, _, usage in found), Usage())
            hidden, texts, _ = zip(*found, strict=True)
            prompts = picture_prompts(images, hidden, texts)
            drawing = Drawing(
                size=sizes.inner,
                num_steps=dit.num_steps if request.num_steps is None else request.num_steps,
                guidance=guidance,
                prompt=prompts[0],
                negative=prompts[1] if has_negative else None,
                reference=None if reference is None else reference.pixels,
            )
            first = random_seed() % _NUM_DRAWN_SEEDS if request.seed is None else request.seed
            job = images.loop.submit(
                drawing,
                range(first, first + request.num_pictures),
                stream.put,
                asked=sizes.drawn,
                batch_size=plan_batch(images, drawing),
                num_partials=request.num_partials,
                priority=request.priority,
                recorder=recorder,
            )
            try:
                num_left = request.num_pictures
                while num_left:
                    match await stream.get():
                        case FailedItem(error=error):
                            raise error
                        case ImageProgress() | PartialImage() | ImageDone() as event:
                            timings.mark("first_step")
                            if isinstance(event, ImageDone):
                                timings.mark("first_image")
                                num_left -= 1
                            yield event
            finally:
                images.loop.cancel(job)
            timings.mark("done")
            tokens = request.num_pictures * images.memory.num_tokens(sizes.inner)
            yield Done(
                finish_reason="stop",
                usage=replace(usage, image_tokens=tokens),
                timings_ms=timings.to_dict(),
            )

    async def _hidden_rows(
        self, messages: Sequence[Message], param: str, timings: Timings, stream: RequestStream
    ) -> tuple[HiddenRowsItem, str, Usage]:
        """The thinker's rows at the queries behind a conversation, the text of that prompt, and its tokens.

        `param`: what errors call the conversation.
        """
        chat, images = self._chat_pipeline(), self._image_pipeline()
        texts: list[str] = []

        def prepare() -> PreparedPrompt:
            prepared, text = chat.processor.prepare_picture(
                messages, num_queries=images.num_queries, param=param
            )
            texts.append(text)
            return prepared

        prompt, keys, encoded = await self._offload(lambda: chat.prepare(prepare, timings, stream))
        embeds = await picture_embeds(prompt, encoded, images.queries, chat.loop.runner.device)
        timings.mark("encoded")
        job = chat.loop.submit_queries(replace(prompt, media_embeds=embeds), stream.put, keys=keys)
        try:
            item = await stream.get()
        finally:
            chat.loop.cancel(job)
        if isinstance(item, FailedItem):
            raise item.error
        assert isinstance(item, HiddenRowsItem), "the answer to a prompt with queries"
        timings.mark_at("prefill", item.begun_at)
        usage = Usage(
            prompt_tokens=prompt.num_tokens,
            prompt_image_tokens=int((prompt.embed_kind == VISION).sum()) - sum(images.num_queries),
            cached_tokens=item.reused_tokens,
        )
        return item, texts[0], usage

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        """See `Service`."""
        if self._speech is None or self._speech.voices is None:
            return ()
        return await self._speech.voices.list(self._offload)

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        """See `Service`."""
        with self._begin(is_chat=False):
            return await self._voices().add(voice, self._offload)

    async def remove_voice(self, name: str) -> VoiceInfo:
        """See `Service`."""
        return await self._voices().remove(name, self._offload)

    async def find_voice(self, params: SpeechParams, prefix: str = "") -> SpeechParams:
        """`params` with the voice that they name or bring along, unless it is one of the artifact's.

        Raises: RequestError when it is unknown or cannot be used; `prefix` is the path of its fields in the request.
        """
        if self._speech_pipeline().voices is None and params.reference is None:
            return params
        return await self._voices().resolve(params, self._offload, prefix=prefix)

    async def stream_speech(
        self, request: SpeechRequest, deltas: AsyncIterator[str], *, starts_early: bool = True
    ) -> AsyncGenerator[Event]:
        """Events of the speech of a text that is still being written. See `Service`."""
        timings = Timings()
        speech = self._speech_pipeline()
        spoken = SpokenText(speech.max_segment_length, speech.speech_text, starts_early=starts_early)
        with self._begin(is_chat=False) as stream:
            params = await self.find_voice(request.speech)
            speech_stream = self._open_speech_stream(
                speech,
                params,
                stream,
                params.seed,
                None,
                is_live=request.is_live,
                priority=request.priority,
                recorder=None,
            )

            failure: Exception | None = None

            async def read() -> None:
                """Queue the segments."""
                nonlocal failure
                unread = 0  # characters, at most, from which no segment has come yet
                try:
                    async for delta in deltas:
                        unread += len(delta)
                        before = speech_stream.num_segments
                        await speak(spoken.push(delta), unread)
                        if speech_stream.num_segments > before:
                            unread = 0
                    await speak(spoken.finish(), unread)
                    if not speech_stream.num_segments:
                        raise RequestError(NOTHING_TO_SPEAK, param="input", code="nothing_to_speak")
                    stream.put(TextEndItem())
                except Exception as error:
                    failure = error
                    stream.put(FailedItem(error=WorkerError("the text failed")))  # wakes the reader

            async def speak(pieces: Iterable[SpokenPiece], num_characters: int) -> None:
                await self._enqueue(speech_stream, pieces, is_short=num_characters <= _SHORT)

            reading = asyncio.ensure_future(read())
            try:
                run = SpeechOutputProcessor(
                    speech_stream, sample_rate=self.info.sample_rate, timings=timings, is_text_done=False
                )
                while not run.is_done:
                    item = await stream.get()
                    if failure is not None:
                        raise failure
                    for event in run.accept(item):
                        yield event
            finally:
                speech_stream.close()  # before the wait, which a second cancellation may end
                reading.cancel()
                await asyncio.wait((reading,))

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """See `Service`. Calling it again does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._speech is not None:
            self._speech.talkers.stop_pacing()  # paced speech would mostly be cut off
        deadline = asyncio.get_running_loop().time() + shutdown_timeout_s
        while self._running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._is_stopped = True
        for stream in list(self._running):
            stream.put(FailedItem(error=WorkerError("the server is stopping", status=503)))
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        """See `Service`."""
        with self._failure_lock:
            self._report_failure = report
            error = self._failure
        if error is not None:
            report(error)

    def fail(self, error: ServeError) -> None:
        """Fail all chats and report `error` to `on_failure`, when a rank of the thinker is lost. Thread-safe.

        Speech requests continue until the process ends.
        """
        if self._chat is not None:
            self._chat.loop.fail(error)
        for stream in list(self._running_chats):
            stream.put(FailedItem(error=error))
        with self._failure_lock:
            self._failure = self._failure or error
            report = self._report_failure
        report(error)

    def _stop(self) -> None:
        for encoder in self._encoders:
            encoder.stop(_JOIN_S)
        for loop in self._loops:
            # A thread whose ranks are gone may be inside a call that never returns.
            loop.stop(_JOIN_S if loop.is_healthy else _FAILED_JOIN_S)
        if self._ranks is not None:
            self._ranks.close()
        for media in (
            None if self._chat is None else self._chat.media,
            None if self._speech is None or self._speech.voices is None else self._speech.voices.media,
        ):
            if media is not None:
                media.close()
        if self._chat is not None and self._chat.grammars is not None:
            self._chat.grammars.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _chat_pipeline(self) -> ChatPipeline:
        if self._chat is None:
            raise RequestError(
                "this model was exported without its thinker: it cannot chat", code="unsupported_model"
            )
        return self._chat

    def _speech_pipeline(self) -> SpeechPipeline:
        if self._speech is None:
            raise RequestError(
                "this model was exported without its talker: it cannot speak", code="unsupported_model"
            )
        return self._speech

    def _image_pipeline(self) -> ImagePipeline:
        if self._images is None:
            raise RequestError(
                "this model was exported without the stages of pictures: it cannot draw",
                code="unsupported_model",
            )
        return self._images

    def _voices(self) -> Voices:
        voices = self._speech_pipeline().voices
        if voices is None:
            raise RequestError("this service registers no voices", code="unsupported_parameter")
        return voices

    def _open_speech_stream(
        self,
        pipeline: SpeechPipeline,
        params: SpeechParams,
        stream: RequestStream,
        seed: int | None,
        noise: NoiseSource | None,
        *,
        is_live: bool,
        priority: int = 0,
        recorder: Recorder | None,
        thinker: ThinkerLoop | None = None,
    ) -> SpeechStream:
        """`thinker`: writes the text."""
        pipeline.planner.check(params)
        talker = pipeline.talkers.place()
        starts = None
        if thinker is not None and is_live and thinker.runner.device == talker.worker.device:
            starts = thinker.speech_starts
        return SpeechStream(
            pipeline.planner,
            talker,
            params,
            stream,
            noise=noise or PhiloxNoise(random_seed() if seed is None else seed),
            max_pending_patches=self._max_pending_patches,
            is_live=is_live,
            priority=priority,
            recorder=recorder,
            starts=starts,
        )

    @contextmanager
    def _begin(self, *, is_chat: bool, is_part: bool = False) -> Iterator[RequestStream]:
        if self._is_stopped if is_part else self._is_closing:
            raise CapacityError("the server is stopping", code="stopping")
        loop = asyncio.get_running_loop()
        if self._event_queue is None or self._event_queue.loop is not loop:
            self._event_queue = EventQueue(loop)
            self._files = asyncio.Semaphore(self._num_threads)
        stream = RequestStream(self._event_queue)
        self._running.add(stream)
        if is_chat:
            self._running_chats.add(stream)
        try:
            yield stream
        finally:
            stream.close()
            self._running.discard(stream)
            self._running_chats.discard(stream)

    async def _enqueue(self, stream: SpeechStream, pieces: Iterable[SpokenPiece], *, is_short: bool) -> None:
        """Read and queue pieces of text: for a moment here if the text `is_short`, the others in a thread."""
        pieces = iter(pieces)
        if is_short:
            is_whole = stream.enqueue(pieces, until=time.perf_counter() + _INLINE_S, wakes=False)
            # Once the segments of all requests of this turn of the event loop are there, so that they share a patch.
            asyncio.get_running_loop().call_soon(stream.wake)
            if is_whole:
                return
        await self._offload(lambda: stream.enqueue(pieces))

    async def _offload(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the preprocessing threads."""
        self._num_offloaded += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_offloaded -= 1


def _is_short(messages: Sequence[Message]) -> bool:
    """Whether messages have no media, and little text: an empty part counts, too."""
    parts = [part for message in messages for part in message.parts]
    size = sum(_PART + part.size for part in parts) + _PART * len(messages)
    return size <= _SHORT and not any(isinstance(part, MediaPart) for part in parts)


def _put(stream: RequestStream, answer: int, item: Item) -> None:
    """Pass on an item of a later answer."""
    stream.put(replace(item, answer=answer) if isinstance(item, TokenItem) else item)


def _counting_the_prompt_once(event: Event) -> Event:
    """An event of a later answer."""
    if not isinstance(event, Done):
        return event
    return replace(event, usage=replace(event.usage, prompt_tokens=0, cached_tokens=0))
