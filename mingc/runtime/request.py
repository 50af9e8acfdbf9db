"""Requests and events: plain data between the HTTP layer and the service, and the service's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mingc.errors import ServeError
from mingc.prompts.conversation import MediaPart, Message, VideoParams
from mingc.prompts.media_decoder import TurnRules
from mingc.prompts.picture_sizes import DEFAULT_RESOLUTION
from mingc.prompts.tools import ToolUse
from mingc.runtime.voices import NewVoice, VoiceInfo, VoicePack, VoiceSample

if TYPE_CHECKING:
    from mingc.prompts.tokenizer import TextTokenizer

FinishReason = Literal["stop", "length", "tool_calls"]
TextKind = Literal["text", "thought", "call"]


NOTHING_TO_SPEAK = (
    "the text has nothing to speak: no letter and no number outside of thoughts, blocks of code and markup"
)

# Below this, sampling is greedy in effect, and logit differences divided by it exceed the range of float32.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the text of an answer must match.

    Attributes:
        kind: `json`: a JSON schema; `regex`; `choice`: a JSON array of strings; `grammar`: Lark.
        text: the schema, pattern, strings or grammar.
        param: the field of the request that has it, for error messages.
        after: token after which the constraint begins, and begins again; None: at the answer's first token.
        thinking: whether a thought may come first.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    param: str
    after: int | None = None
    thinking: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling of text tokens and the end of an answer.

    Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. An answer ends at the model's stop tokens,
    unless `ignore_eos`, and at `stop_token_ids`. Before it has `min_tokens` tokens, none of them is sampled and no stop
    string ends it. `presence_penalty` and `frequency_penalty` count tokens of the answer. `logit_bias` has (token,
    bias) pairs; `banned_tokens` are never sampled.

    `num_logprobs`: how many of the most likely tokens each `TextDelta` has; 0: the sampled token alone; None: nothing.
    """

    max_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    num_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled at random; otherwise the most likely token is taken."""
        return self.temperature >= MIN_TEMPERATURE and self.top_k != 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechParams:
    """Parameters of speech generation. None selects the artifact's default.

    `voice`: a name, or the id of an uploaded voice. `reference`: a voice that the request brings along, which is used
    instead.

    `speech_lead`: patches that live speech may be ahead of its playback, 0: no limit; None: the server's.
    """

    voice: str | None = None
    reference: VoiceSample | VoicePack | None = None
    instructions: str | None = None
    seed: int | None = None
    max_steps: int | None = None
    guidance: float | None = None
    sigma: float | None = None
    temperature: float | None = None
    speech_lead: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A conversation to answer. The answer has text, or calls of `tools`; it has speech if `speech` is given.

    `is_live`: the client plays the speech while it is generated, so it need not be generated faster. `priority`:
    requests with a lower one are served earlier. `num_answers`: how many answers of text; answer i is sampled with the
    seed of `sampling` plus i.
    """

    request_id: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    speech: SpeechParams | None = None
    tools: ToolUse = field(default_factory=ToolUse)
    video: VideoParams = field(default_factory=VideoParams)
    thinking: bool = False
    is_live: bool = False
    priority: int = 0
    num_answers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A text, or its token ids, to continue; no chat template. `priority` and `num_answers`: see `ChatRequest`."""

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    num_answers: int = 1


TextRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechRequest:
    """A text to convert to speech. `is_live` and `priority`: see `ChatRequest`."""

    request_id: str
    text: str
    speech: SpeechParams
    is_live: bool = False
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptionRequest:
    """A file of sound to transcribe.

    Attributes:
        audio: the encoded file; `where` names it in errors.
        language: the model's name of the language; None: the model recognizes it.
        topic, keywords: what the speech is about, and words that may occur.
        sampling: of the answer to each segment of speech.
        rules: how segments are found.
    """

    request_id: str
    audio: bytes | memoryview
    where: str
    sampling: SamplingParams
    language: str | None = None
    topic: str = ""
    keywords: tuple[str, ...] = ()
    rules: TurnRules = field(default_factory=TurnRules)


# Limits of a request for pictures.
MAX_PICTURES = 10
MAX_IMAGE_STEPS = 200
MAX_GUIDANCE = 100.0
MAX_IMAGE_SIDE = 8192  # of the size that is asked for
MAX_PARTIAL_IMAGES = 3
MAX_SEED = (1 << 53) - 1  # as the numbers of JSON; picture i has the seed of the request plus i


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """A conversation to answer with pictures, which may change a picture of it. None selects the model's default.

    A picture is drawn in the bucket of the `resolution` (see `mingc.prompts.picture_sizes`) whose ratio is nearest to
    the asked one. Without a size or an aspect it is square, or has the ratio of the `reference`.

    Attributes:
        height, width: the size asked for, in pixels; both or neither.
        aspect: width / height, instead of a size.
        num_pictures: picture i is drawn with `seed` + i, all in batches of their own.
        seed: None: a random one; `ImageDone` has it.
        num_steps: evaluations of the sampler's schedule, 1 to `MAX_IMAGE_STEPS`.
        guidance: at most 1: none, which takes half the time.
        negative_prompt: what the pictures shall not show, in a prompt of its own; None: the official zeros.
        reference: the picture to change, which `messages` have, too; its pixels go to the sampler.
        num_partials: how many unfinished states of each picture are sent, at most `MAX_PARTIAL_IMAGES`.
        priority: requests with a lower one are drawn earlier.
        where: what errors call the `messages`.
    """

    request_id: str
    messages: tuple[Message, ...]
    height: int | None = None
    width: int | None = None
    aspect: float | None = None
    resolution: int = DEFAULT_RESOLUTION
    num_pictures: int = 1
    seed: int | None = None
    num_steps: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    reference: MediaPart | None = None
    num_partials: int = 0
    priority: int = 0
    where: str = "messages"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of a request. The prefix cache held `cached_tokens` of the `prompt_tokens`.

    `image_tokens`: of the drawn pictures, one for 16 × 16 pixels; for these, `prompt_image_tokens` of the prompt are
    pictures.
    """

    prompt_tokens: int = 0
    prompt_image_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_patches: int = 0
    audio_seconds: float = 0.0
    image_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Usage)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one step, by the raw logits: float32 log-softmax before penalties, bans and temperature.

    Attributes:
        logprob: of the sampled token.
        top: (token, log probability) of the most likely tokens, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """Text added by one token; empty while a character is incomplete.

    Attributes:
        token: None if the text completes an answer or a thought without a new token.
        kind: `text` is the answer; a `thought` is not spoken; a token of a `call` has no text, its call is in events of
            its own.
        logprobs: if the request asked for them: by token, in order, of the tokens whose text this delta begins or
            completes. Those of a stop string have none.
    """

    text: str
    token: int | None = None
    kind: TextKind = "text"
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallDelta:
    """Part of a call: first its `name` alone, then the `arguments`, the next characters of their JSON object."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallDone:
    """A call is complete. `arguments`: a JSON object, whose parts were sent before."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallFailed:
    """What was to be a call is none: its JSON is broken or unfinished, or its function may not be called.

    Attributes:
        index: None if no part of it was sent.
        text: all of it as the model wrote it, with its tags.
    """

    index: int | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AudioDelta:
    """One patch of speech, from the talker's worker to the client.

    Attributes:
        samples: (n,) float32 mono in [-1, 1] at the artifact's sample rate.
        is_segment_end: whether the segment ends with this patch.
        is_capped: whether the segment ends because of its cap and not by the stop rule.
        segment_text: what is said in a segment that begins with this patch, numbers as words; the worker leaves it out.
        text_end: on the same patch of an answer: how many characters of its text (`TextDelta` of kind `text`) are said
            when the segment ends. What is never spoken, such as blocks of code, belongs to the segment after it.
    """

    samples: NDArray[np.float32]
    is_segment_end: bool = False
    is_capped: bool = False
    segment_text: str | None = None
    text_end: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDone:
    """The text of the answer is complete; speech may follow."""

    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Last event of a request.

    `has_nothing_to_speak`: speech was requested, and no word of the answer can be spoken.

    `timings_ms`: milliseconds from arrival to named moments: `preprocessing` (a thread takes the request), `prepared`
    (media are decoded, the prompt is tokenized), `encoded`, `prefill` (it begins), `first_token`, `first_segment` (the
    talker gets it), `first_audio`, `text_done`, `condition` (the thinker has read the prompt of a picture),
    `first_step`, `first_image`, `done`.
    """

    finish_reason: FinishReason
    usage: Usage
    timings_ms: dict[str, float] = field(default_factory=dict)
    has_nothing_to_speak: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProgress:
    """The steps of picture `index` that are done: `step` of `num_steps`."""

    index: int
    step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartialImage:
    """A state of picture `index` before its last step: what the model expects it to become.

    Attributes:
        number: counts the partial pictures of one picture from 0.
        pixels: (H, W, 3) uint8 RGB of the bucket.
        height, width: size to which the picture is to be resized for the client.
    """

    index: int
    number: int
    pixels: NDArray[np.uint8]
    height: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageDone:
    """Picture `index` is drawn, from `seed`. Other attributes: see `PartialImage`."""

    index: int
    pixels: NDArray[np.uint8]
    height: int
    width: int
    seed: int


ImageEvent = ImageProgress | PartialImage | ImageDone | Done

Event = TextDelta | ToolCallDelta | ToolCallDone | ToolCallFailed | AudioDelta | TextDone | Done


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptDelta:
    """Text added to a transcript. All of them joined are the transcript.

    `logprobs`: as in `TextDelta`, of the tokens that have a part in the text; not of the language and of white space
    around a segment.
    """

    text: str
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptSegment:
    """One segment of speech, after its deltas.

    Attributes:
        start_ms, end_ms: from its first to its last speech.
        language: as the model names it; None: it did not.
        speech_probability: mean over the segment.
        tokens: of the answer, with its language.
        avg_logprob: mean log probability of the tokens; 0 if the request asked for none, or there are no tokens.
        audio_tokens: how many of the prompt's tokens are sound.
    """

    start_ms: int
    end_ms: int
    text: str
    language: str | None
    speech_probability: float
    tokens: tuple[int, ...]
    avg_logprob: float
    usage: Usage
    audio_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptDone:
    """Last event of a transcription. `duration_ms`: of the file. The sums of all segments."""

    duration_ms: int
    usage: Usage
    audio_tokens: int


TranscriptEvent = TranscriptDelta | TranscriptSegment | TranscriptDone


@dataclass(frozen=True, slots=True, eq=False)
class Recorder:
    """Values of one request that no client gets; verification passes a recorder with its request.

    The engine threads add each value before the event of its token or patch.

    Attributes:
        logits: (V,) float32 that each token of the answer was sampled from.
        latents: (p, latent) float32 that each patch was decoded from.
        stop_probabilities: what the stop rule compared with its threshold, for each patch.
        image_latents: (16, H / 8, W / 8) float32 that each picture was decoded from, in the order of completion.
    """

    logits: list[NDArray[np.float32]] = field(default_factory=list)
    latents: list[NDArray[np.float32]] = field(default_factory=list)
    stop_probabilities: list[float] = field(default_factory=list)
    image_latents: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceInfo:
    """Name, abilities and limits of the served artifact. Clients may also call it by one of the `aliases`."""

    model: str
    sample_rate: int
    voices: tuple[str, ...]  # of the artifact
    default_voice: str | None
    has_text: bool  # the artifact has a thinker, so chat works
    has_image: bool
    has_video: bool
    has_audio_input: bool
    has_speech: bool
    has_image_output: bool = False  # it draws pictures
    has_tools: bool = False  # its tokenizer has the tokens of calls
    max_model_len: int | None = None  # tokens of one prompt and its answer; None without a thinker
    max_total_tokens: int | None = None  # tokens of all running requests together; None without a thinker
    all_reduce: str | None = None  # all-reduce algorithm of the thinker's ranks, and why; None for one rank
    aliases: tuple[str, ...] = ()
    artifact: str = ""  # hash of its manifest
    media_limits: Mapping[str, float] = field(default_factory=dict)  # docs/http-api.md has their names

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model; responses have the first."""
        return (self.model, *self.aliases)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes that one part of a running model has allocated on one device.

    `device`: `cpu`, `cuda:N`, or `host` for host memory that does not depend on the device of the model. `owner`: the
    weights of a stage (`thinker_weights`), `kv_pages`, `talker_slots`, or `encoder_cache`, `voice_cache` and
    `image_workspace` (what a batch of pictures may take), whose bytes are limits.
    """

    device: str
    owner: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLoad:
    """Load of a running model.

    At present: the thinker's KV pages (`kv_pages_used`, `kv_pages_total`; 0 without a thinker), the chats that wait
    for the thinker and the requests whose next speech segment waits for the talker, pictures whose batch has not
    begun (`num_waiting`, by engine), pages in the prefix cache, also while in use (`cached_pages`), bytes of cached
    embeddings (`encoder_cache_bytes`), and live speech by state (`listeners`), and pictures of the batch that is
    being drawn (`drawing_pictures`). Since the start: prompt tokens that were computed (`prefilled_tokens`) or not
    (`reused_tokens`), pages of the prefix cache that were given to other requests (`evicted_pages`), how often a
    chat lost its pages to an older one (`num_preempted`), images, videos and clips that were encoded
    (`encoder_misses`) or not (`encoder_hits`), patches of live speech that were ready after their playback time
    (`num_underruns`), pictures (`drawn_pictures`) and steps of their batches (`image_steps`). `memory` was
    allocated at start. `limits`: how much of each limit is in use, and the limit.
    """

    kv_pages_used: int = 0
    kv_pages_total: int = 0
    num_waiting: Mapping[str, int] = field(default_factory=dict)
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    num_preempted: int = 0
    cached_pages: int = 0
    evicted_pages: int = 0
    encoder_hits: int = 0
    encoder_misses: int = 0
    encoder_cache_bytes: int = 0
    listeners: Mapping[str, int] = field(default_factory=dict)
    num_underruns: int = 0
    drawing_pictures: int = 0
    drawn_pictures: int = 0
    image_steps: int = 0
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()


class Service(Protocol):
    """Interface of the running model for the HTTP layer.

    `answers`, `chat`, `speech` and `stream_speech` yield events until `Done`, `transcribe` until `TranscriptDone`;
    closing the iterator cancels the request, which frees its pages and slots at the next step. They raise RequestError
    before the first event when the request cannot be served, CapacityError when queues are full, WorkerError when an
    engine fails.
    """

    @property
    def info(self) -> ServiceInfo: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def load(self) -> ServiceLoad:
        """The load at this moment. Reads counters; waits for no engine thread."""
        ...

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        """Register a callback for a failure after which the process must end.

        `report` is called on any thread, and at once if the failure has already happened.
        """
        ...

    def answers(self, request: TextRequest) -> AsyncIterator[tuple[int, Event]]:
        """Events of all answers to a prompt, each with the number of its answer, until the `Done` of every answer.

        The prompt is prepared and its media are encoded once. Later answers begin when the prefix cache has its pages.
        The usage of the prompt is in the `Done` of answer 0 only, so the sum of all is that of the request.
        """
        ...

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Events of the one answer to a conversation."""
        ...

    async def tokenize(self, prompt: str | ChatRequest) -> Sequence[int]:
        """Token ids of a text, or of a conversation's prompt with the placeholders of its media.

        Raises: RequestError as `answers` does; a text may exceed the context.
        """
        ...

    async def count_tokens(self, request: ChatRequest) -> Sequence[int]:
        """How many tokens of the prompt belong to each message; before them, how many are of the rest.

        The sum is the length of the prompt, which may exceed the context: so a caller can leave out the oldest turns.
        System messages at the beginning belong to the rest, and have none. Encoded media are decoded; see
        `decode_media`.
        """
        ...

    async def decode_media(self, part: MediaPart) -> MediaPart:
        """The part with its features instead of encoded bytes, so that prompts that repeat it do not decode it again.

        A video loses its sound. Raises: RequestError when it cannot be decoded or exceeds a limit.
        """
        ...

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of prompts and answers. Raises: RequestError without a thinker."""
        ...

    def draw(self, request: ImageRequest) -> AsyncIterator[ImageEvent]:
        """Events of the pictures, until `Done`; closing the iterator ends them within a step.

        Raises: as `answers` does, 507 when a batch of one does not fit the memory.
        """
        ...

    def speech(self, request: SpeechRequest) -> AsyncIterator[Event]: ...

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        """All voices: the artifact's, then the uploaded ones, the oldest first."""
        ...

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        """Register a voice and keep it.

        Raises: RequestError when it cannot be used, its name is taken, or voices are not kept; 507 without space.
        """
        ...

    async def remove_voice(self, name: str) -> VoiceInfo:
        """Remove an uploaded voice by id or name. Raises: RequestError (404; 403 for one of the artifact's)."""
        ...

    def stream_speech(
        self, request: SpeechRequest, deltas: AsyncIterator[str], *, starts_early: bool = True
    ) -> AsyncIterator[Event]:
        """Like `speech`, of a text that is still being written: `deltas`, not the text of `request`.

        The speech depends on the whole text alone, not on where it is cut. `starts_early`: the first segment may end
        with a clause; otherwise the speech is that of `speech` by the natural rules. An error of `deltas` ends the
        request.
        """
        ...

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]: ...

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """Refuse new requests, let running ones continue for `shutdown_timeout_s`, then fail them with WorkerError.

        May be called twice.
        """
        ...
