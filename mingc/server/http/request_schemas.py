"""JSON bodies of the routes that run the model or its tokenizer: names, types and ranges of all fields, declared once.

Decoding, range checks, error messages and the OpenAPI document come from these structs. Every field may be null, which
counts as absent. A field of the type `Raw` is not decoded: it is ignored or refused. Unknown fields are refused at the
top level, where a typing error would change the answer; messages and their parts may have any, because clients send
back what other servers and libraries added to them. `mingc.server.http.parsing` makes the checks that need the artifact
or another field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from msgspec import Meta, Raw, Struct, defstruct, field, json

from mingc.runtime.request import (
    MAX_GUIDANCE,
    MAX_IMAGE_SIDE,
    MAX_IMAGE_STEPS,
    MAX_PARTIAL_IMAGES,
    MAX_PICTURES,
)
from mingc.server.audio_format import MAX_RATE, MIN_RATE
from mingc.server.http.body import MediaString
from mingc.server.http.forms import File

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOKENS = 1 << 24  # a sanity bound; the service checks the context length
MAX_PIXELS = 1 << 30
LOW_DETAIL_PIXELS = 512 * 512  # as with OpenAI
MAX_PRIORITY = (1 << 31) - 1
MAX_SPEECH_LEAD = 10**6
MAX_REF_TEXT = 1000  # words of a recording
MAX_EMBEDDING = 4096
MAX_SAMPLE_BYTES = 10 << 20  # of a recording
MAX_RECORDING_S = 30
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 16
MAX_TOKEN_ID = 1 << 24
MAX_TOOLS = 128
MAX_TOOL_NAME = 128
MAX_STOP_CHARACTERS = 1000  # the most text that is held back and searched at each token
MIN_PENALTY = 0.01  # logits are divided by it
MAX_ANSWERS = 128  # as with OpenAI; each takes a place in the thinker's queue
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 5  # of completions
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_SCHEMA_NAME = 64  # as with OpenAI
MAX_DRAWING_PROMPT = 32_000  # characters, as with OpenAI
MAX_EDITED_PICTURES = 16  # as with OpenAI

_ABSENT: Raw = field(default_factory=Raw)  # no default: Raw has none in a JSON schema

# Integers are declared with a float beside them: JSON has one kind of number, so 4.0 counts as 4. Floats take integers.
_COUNT = Meta(ge=1, le=MAX_TOKENS)
_MIN_COUNT = Meta(ge=0, le=MAX_TOKENS)
_TOP_K = Meta(ge=-1, le=MAX_TOKENS)
_PIXELS = Meta(ge=1, le=MAX_PIXELS)
_PRIORITY = Meta(
    ge=-MAX_PRIORITY,
    le=MAX_PRIORITY,
    description="Requests with a lower one are served earlier; 0 is the default.",
)
_SPEECH_LEAD = Meta(
    ge=0,
    le=MAX_SPEECH_LEAD,
    description="Patches of 0.32 s that streamed speech may be ahead of its playback; 0: no limit. The default is the "
    "server's --speech-lead.",
)
_SAMPLE_RATE = Meta(
    ge=MIN_RATE,
    le=MAX_RATE,
    description="Hz of the clip; by default the model's, and 24000 for raw PCM. Of mp3, aac and opus only some.",
)
_TOKEN_ID = Meta(ge=0, le=MAX_TOKEN_ID)
_NUM_ANSWERS = Meta(ge=1, le=MAX_ANSWERS)
_TOP_LOGPROBS = Meta(ge=0, le=MAX_TOP_LOGPROBS)
_LOGPROBS = Meta(ge=0, le=MAX_LOGPROBS)
_STEPS = Meta(ge=1, le=MAX_IMAGE_STEPS)
_NUM_PICTURES = Meta(ge=1, le=MAX_PICTURES)
_NUM_PARTIALS = Meta(ge=0, le=MAX_PARTIAL_IMAGES)
_PERCENT = Meta(ge=0, le=100)
_SIDE = Meta(ge=1, le=MAX_IMAGE_SIDE)
Count = Annotated[int, _COUNT] | Annotated[float, _COUNT]
MinCount = Annotated[int, _MIN_COUNT] | Annotated[float, _MIN_COUNT]
TopK = Annotated[int, _TOP_K] | Annotated[float, _TOP_K]
Pixels = Annotated[int, _PIXELS] | Annotated[float, _PIXELS]
Priority = Annotated[int, _PRIORITY] | Annotated[float, _PRIORITY]
SpeechLead = Annotated[int, _SPEECH_LEAD] | Annotated[float, _SPEECH_LEAD]
TokenId = Annotated[int, _TOKEN_ID] | Annotated[float, _TOKEN_ID]
NumAnswers = Annotated[int, _NUM_ANSWERS] | Annotated[float, _NUM_ANSWERS]
TopLogprobs = Annotated[int, _TOP_LOGPROBS] | Annotated[float, _TOP_LOGPROBS]
Logprobs = Annotated[int, _LOGPROBS] | Annotated[float, _LOGPROBS]
Steps = Annotated[int, _STEPS] | Annotated[float, _STEPS]
NumPictures = Annotated[int, _NUM_PICTURES] | Annotated[float, _NUM_PICTURES]
NumPartials = Annotated[int, _NUM_PARTIALS] | Annotated[float, _NUM_PARTIALS]
Percent = Annotated[int, _PERCENT] | Annotated[float, _PERCENT]
Side = Annotated[int, _SIDE] | Annotated[float, _SIDE]
Guidance = Annotated[float, Meta(ge=0.0, le=MAX_GUIDANCE)]
DrawingPrompt = Annotated[str, Meta(max_length=MAX_DRAWING_PROMPT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_NUMERALS = Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,7}$"}})
Biases = Annotated[dict[str, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]], _NUMERALS]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
Media = Annotated[MediaString, Meta(extra_json_schema={"type": "string"})]
JsonSchema = dict[str, Any] | bool
MediaList = Annotated[list[Media], Meta(max_length=MAX_PARTS)]
SampleRate = Annotated[int, _SAMPLE_RATE] | Annotated[float, _SAMPLE_RATE]


_REF_AUDIO = Meta(
    description="A recording of the voice to speak with, as base64, data or other URL. It and `speaker_embedding` are "
    "used instead of `voice`.",
    extra_json_schema={"type": "string"},
)
SpeakerEmbedding = Annotated[list[float], Meta(max_length=MAX_EMBEDDING)]


class TextContent(Struct, tag_field="type", tag="text"):
    text: str


class RefusalContent(Struct, tag_field="type", tag="refusal"):
    """What an earlier answer said instead of an answer."""

    refusal: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    """Thoughts of an earlier answer, which are no part of the prompt."""


class RedactedThinkingContent(Struct, tag_field="type", tag="redacted_thinking"):
    """Like `thinking`."""


class ReasoningContent(Struct, tag_field="type", tag="reasoning"):
    """Like `thinking`."""


class MediaUrl(Struct):
    """An http(s) or data URL, or a local path."""

    url: Media


class ImageUrl(MediaUrl):
    """`detail`: `low` scales a picture down to 262,144 pixels. `max_pixels`: scales it down to so many."""

    detail: Literal["auto", "low", "high", "original"] | None = None
    max_pixels: Pixels | None = None


class ImageContent(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl
    max_pixels: Pixels | None = None


class AudioUrlContent(Struct, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl


class VideoContent(Struct, tag_field="type", tag="video_url"):
    video_url: MediaUrl


class AudioData(Struct):
    """Base64 audio. The decoder detects the format from the bytes, whatever `format` says."""

    data: Media
    format: str | None = None


class AudioContent(Struct, tag_field="type", tag="input_audio"):
    input_audio: AudioData


Thoughts = ThinkingContent | RedactedThinkingContent | ReasoningContent
MediaContent = ImageContent | AudioContent | AudioUrlContent | VideoContent
ContentPart = TextContent | RefusalContent | Thoughts | MediaContent
Content = str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class _GivenMessage(Struct, tag_field="role"):
    content: Content | None = None


class SystemMessage(_GivenMessage, tag="system"):
    pass


class DeveloperMessage(_GivenMessage, tag="developer"):
    pass


class UserMessage(_GivenMessage, tag="user"):
    pass


class ToolMessage(_GivenMessage, tag="tool"):
    """Result of a call that an earlier answer made."""


class FunctionMessage(_GivenMessage, tag="function"):
    """The older name of `tool`."""


class FunctionCall(Struct):
    """`arguments`: JSON as text, as OpenAI sends it, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallBody(Struct):
    function: FunctionCall


class EarlierAudio(Struct):
    """Audio of an earlier answer. Only the transcript is read."""

    transcript: str | None = None


class AssistantMessage(_GivenMessage, tag="assistant"):
    """An earlier answer. A client may send it back as it was received."""

    audio: EarlierAudio | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_PARTS)] | None = None
    function_call: FunctionCall | None = None


MessageBody = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
)


class VoiceReference(Struct, forbid_unknown_fields=True):
    id: str


class SpeechFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Speech parameters, in the `audio` object of a chat and at the top level of a speech request."""

    voice: str | VoiceReference | None = None
    ref_audio: Annotated[MediaString, _REF_AUDIO] | None = None
    ref_text: Annotated[str, Meta(max_length=MAX_REF_TEXT)] | None = None
    speaker_embedding: SpeakerEmbedding | None = None
    instructions: str | None = None
    seed: int | float | None = None
    max_steps: Count | None = None
    max_new_tokens: Count | None = None
    # Integers as in `_TOP_LOGPROBS`: types with equal bounds are one type, which would have the bounds of either.
    guidance: Annotated[float, Meta(ge=0, le=20)] | None = None
    sigma: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    speech_lead: SpeechLead | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    sample_rate: SampleRate | None = None


class ChatAudio(SpeechFields, kw_only=True):
    """`format`: `wav` by default."""

    format: Literal["wav", "mp3", "opus", "aac", "flac", "pcm16"] | None = None


ToolName = Annotated[str, Meta(max_length=MAX_TOOL_NAME)]


class FunctionBody(Struct, kw_only=True):
    """A function that answers may call. The prompt has all of it, unknown fields included.

    `strict`: whether arguments are constrained to the JSON schema `parameters`.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: FunctionBody


class ToolsBody(Struct):
    """`tools` as it is checked. Parsing keeps the objects, whose order of keys the prompt repeats."""

    tools: list[FunctionTool]


class FunctionName(Struct, forbid_unknown_fields=True):
    name: ToolName


class NamedTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: FunctionName


class AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedTools


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Raw = _ABSENT


class TemplateSwitches(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to reach `thinking`, under both names that chat templates use."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ProcessorSwitches(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's name for what is done to media."""

    use_audio_in_video: bool | None = None


class DrawingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a picture is drawn; names of vLLM-Omni and SGLang-Omni beside OpenAI's `size`.

    `size`: `WIDTHxHEIGHT` or `auto`, `width` and `height`, or `aspect_ratio` (`16:9`); by default 1024x1024, or the
    shape of the picture that is changed.
    """

    size: Annotated[str, Meta(max_length=16)] | None = None
    width: Side | None = None
    height: Side | None = None
    aspect_ratio: Annotated[str, Meta(max_length=16)] | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    negative_prompt: DrawingPrompt | None = None
    seed: int | float | None = None


class ChatDrawing(DrawingFields, kw_only=True):
    """How a picture of a chat is drawn; `CHAT_DRAWING_REFUSED` has the rest."""

    num_outputs_per_prompt: Raw = _ABSENT
    true_cfg_scale: Raw = _ABSENT
    semantic_source: Raw = _ABSENT
    enable_text_rendering: Raw = _ABSENT


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The answer is free."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The answer is any JSON object."""


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema, which is always enforced. `name`, `description` and `strict` change nothing."""

    name: Annotated[str, Meta(max_length=MAX_SCHEMA_NAME)]
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The answer matches a JSON schema."""

    json_schema: NamedSchema


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to constrain an answer: one of these. `json`: a schema or its text; `grammar`: Lark."""

    json: JsonSchema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class TextBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests for text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    n: NumAnswers | None = None
    # sampling
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_PENALTY, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: MinCount | None = None
    ignore_eos: bool | None = None
    seed: int | float | None = None
    # constraints of the answer
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(TextBody, kw_only=True):
    """Fields of `POST /v1/chat/completions` that change the answer; `CHAT_BODY` has all."""

    messages: Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)] | None = None
    images: MediaList | None = None
    audios: MediaList | None = None
    videos: MediaList | None = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            Meta(
                max_length=MAX_TOOLS,
                extra_json_schema={"items": {"$ref": "#/components/schemas/FunctionTool"}},
            ),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None
    audio: ChatAudio | None = None
    max_completion_tokens: Count | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    image_max_pixels: Pixels | None = None
    # video sampling
    video_fps: Annotated[float, Meta(gt=0.0, le=1000.0)] | None = None
    video_max_frames: Count | None = None
    video_min_pixels: Pixels | None = None
    video_max_pixels: Pixels | None = None
    video_total_pixels: Pixels | None = None
    mm_processor_kwargs: ProcessorSwitches | None = None
    # pictures as answers: `image_generation` as SGLang-Omni has it; vLLM-Omni has `extra_body`, or its fields here
    image_generation: ChatDrawing | None = None
    extra_body: ChatDrawing | None = None
    width: Side | None = None
    height: Side | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    negative_prompt: DrawingPrompt | None = None


class CompletionBody(TextBody, kw_only=True):
    """Fields of `POST /v1/completions` that change the answer; `COMPLETION_BODY` has all.

    `prompt`: a text or token ids, or an array with one of them.
    """

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(max_length=MAX_TOKENS)] | None = None
    best_of: NumAnswers | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None


class TokenizeBody(ChatBody, kw_only=True):
    """Fields of `POST /tokenize`: `prompt`, or those of a chat; `TOKENIZE_BODY` has all."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds | None = None


class SpeechBody(SpeechFields, kw_only=True):
    """Fields of `POST /v1/audio/speech` that change the answer; `SPEECH_BODY` has all.

    `response_format`: `mp3` by default. `stream: false` requests one body with its length. `timestamp_granularities`:
    times among the events of `stream_format: "sse"`.
    """

    model: str | None = None
    input: str | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "pcmu", "pcma"] | None = None
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    timestamp_granularities: Annotated[list[str], Meta(max_length=8)] | None = None
    priority: Priority | None = None


class ImageBody(DrawingFields, kw_only=True):
    """Fields of `POST /v1/images/generations` that change the answer; `IMAGE_BODY` has all.

    `output_compression`: the quality of JPEG and WebP. `partial_images`: unfinished states of each picture, in a
    stream.
    """

    prompt: DrawingPrompt | None = None
    model: str | None = None
    n: NumPictures | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Percent | None = None
    stream: bool | None = None
    partial_images: NumPartials | None = None
    priority: Priority | None = None


class ImageEditBody(ImageBody, kw_only=True):
    """The form of `POST /v1/images/edits`; `IMAGE_EDIT_BODY` has all fields.

    `image`: one or several pictures. The model sees all, and the first one is changed.
    """

    image: Annotated[list[File], Meta(max_length=MAX_EDITED_PICTURES)] | None = None


class NewVoiceForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of `POST /v1/audio/voices`.

    `name`: 1 to 64 characters. `consent`: what the speaker has agreed to, or where that is recorded; it is kept with
    the voice. `audio_sample`: a recording of 1 to 30 s, at most 10 MiB, or `speaker_embedding`: its speaker vector, a
    JSON array. `ref_text`: the words of the recording.
    """

    name: str
    consent: Annotated[str, Meta(max_length=MAX_REF_TEXT)]
    audio_sample: File | None = None
    speaker_embedding: str | None = None
    ref_text: Annotated[str, Meta(max_length=MAX_REF_TEXT)] | None = None
    speaker_description: Annotated[str, Meta(max_length=MAX_REF_TEXT)] | None = None
    type: Literal["audio_sample"] | None = None
    model: str | None = None


Refused = Mapping[str, tuple[str, tuple[object, ...]]]

# Fields that other APIs define: (why they are refused, values that request nothing and are accepted).
_SAMPLING_REFUSED: Refused = {
    "use_beam_search": ("there is no beam search", (False,)),
    "length_penalty": ("there is no beam search", (1,)),
    "skip_special_tokens": ("special tokens of an answer have no text", (True,)),
    "spaces_between_special_tokens": ("special tokens of an answer have no text", (False, True)),
    "include_stop_str_in_output": ("an answer ends before its stop string", (False,)),
    "prompt_logprobs": ("log probabilities of the prompt are not computed", (0,)),
    "allowed_token_ids": ("use 'logit_bias'", ()),
    "bad_words": ("use 'logit_bias'", ([],)),
    "logits_processors": ("use 'logit_bias'", ([],)),
    "truncate_prompt_tokens": ("a prompt that is too long is refused, not cut", ()),
    "return_token_ids": ("token ids are not returned", (False,)),
    "return_tokens_as_token_ids": ("token ids are not returned", (False,)),
}
_SERVING_REFUSED: Refused = {
    **dict.fromkeys(("cache_salt", "extra_key"), ("all requests share the prefix cache", ())),
    **dict.fromkeys(
        (
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank",
            "ec_transfer_params", "kv_transfer_params", "routed_dp_rank",
        ),
        ("one replica answers the whole request, and what is before it chooses which", ()),
    ),
    **dict.fromkeys(
        (
            "return_cached_tokens_details", "return_hidden_states", "return_routed_experts", "return_token_offsets",
        ),
        ("an answer has no such part", (False,)),
    ),
    **dict.fromkeys(
        ("routed_experts_prompt_start", "routed_experts_start_len"), ("an answer has no such part", (0,))
    ),
    **dict.fromkeys(("ebnf", "regex"), ("use 'structured_outputs'", ())),
    **dict.fromkeys(("custom_logit_processor", "custom_params"), ("use 'logit_bias'", ())),
    "images_config": ("use 'image_generation'", ()),
    "logprob_token_ids": ("the likeliest tokens are returned; use 'top_logprobs' or 'logprobs'", ()),
    "lora_path": ("there are no adapters", ()),
    "ngram_corpus_id": ("tokens are not guessed ahead", ()),
    "no_stop_trim": ("an answer ends before its stop string", (False,)),
    "repetition_detection": ("use 'repetition_penalty'", ()),
    "return_mm_kwargs": ("an answer has no such part", (False, True)),
    "session_params": ("every request has its whole prompt", ({},)),
    "stop_regex": ("use 'stop'", ()),
    "stream_interval": ("every token is sent at once", (1,)),
    "thinking_token_budget": ("use 'max_tokens'", (-1,)),
    "truncation_side": ("a prompt that is too long is refused, not cut", ()),
    "vllm_xargs": ("there are no further parameters", ({},)),
    "watermarking": ("answers have no watermark", (False,)),
}  # fmt: skip
CHAT_REFUSED: Refused = {
    "functions": ("use 'tools'", ([],)),
    "function_call": ("use 'tool_choice'", ("none", "auto")),
    "prediction": ("predicted outputs are not used", ()),
    "moderation": ("nothing is moderated here", ()),
    "web_search_options": ("nothing is searched here", ()),
    "verbosity": ("the length is not steered; use 'max_tokens'", ("medium",)),
    "stage_sampling": ("sampling is set for the whole request", ({},)),
    "stage_params": ("parameters are set for the whole request", ({},)),
    "best_of": ("all answers are returned; use 'n'", (1,)),
    "echo": ("an answer does not repeat the prompt", (False,)),
    "add_special_tokens": ("the chat template alone writes special tokens", (False,)),
    "add_generation_prompt": ("every prompt ends with the assistant's turn", (True,)),
    "continue_final_message": ("every prompt ends with the assistant's turn", (False,)),
    "chat_template": ("the artifact's own template is used", ()),
    "documents": ("put the text into a message", ([],)),
    "include_reasoning": ("thoughts are returned", (True,)),
    "input_ids": ("use /v1/completions", ()),
    "reasoning": ("use 'reasoning_effort'", ()),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), ("use 'image_max_pixels'", ())),
    "media_io_kwargs": ("use the fields of images and videos", ({},)),
    **dict.fromkeys(
        ("return_meta_info", "return_prompt_text", "return_prompt_token_ids"), ("use /tokenize", (False,))
    ),
    **dict.fromkeys(
        ("separate_reasoning", "stream_reasoning"), ("thoughts are returned apart from the text", (True,))
    ),
    "task": ("the template has no tasks", ()),
    "use_audio_in_video": ("use 'mm_processor_kwargs'", (False,)),
    **_SERVING_REFUSED,
    **_SAMPLING_REFUSED,
}
COMPLETION_REFUSED: Refused = {
    "suffix": ("a text is continued, nothing is inserted", ("",)),
    "prompt_embeds": ("the prompt is a text or token ids", ()),
    "add_special_tokens": ("the prompt is used as it is", (False, True)),
    "response_format": ("use 'structured_outputs'", ({"type": "text"},)),
    "json_schema": ("use 'structured_outputs'", ()),
    **_SERVING_REFUSED,
    **_SAMPLING_REFUSED,
}
TOKENIZE_REFUSED: Refused = {**CHAT_REFUSED, "add_special_tokens": ("the tokenizer adds none", (False, True))}
_NO_INPUT: tuple[str, tuple[object, ...]] = ("the talker has no such input", ())
SPEECH_REFUSED: Refused = dict.fromkeys(
    (
        "task_type", "language", "x_vector_only_mode", "initial_codec_chunk_frames", "extra_params", "ref_audio_2",
        "ambient_sound", "duration_seconds", "non_streaming_mode",
    ),
    _NO_INPUT,
) | {
    "speaker": ("use 'voice'", ()),
    "references": ("use 'ref_audio' and 'ref_text'", ()),
    "word_timestamps": ("the times of words are not known; use 'timestamp_granularities': ['segment']", (False,)),
}  # fmt: skip
_ONE_TEMPERATURE = "tokens of a transcript are sampled by 'temperature' alone"
TRANSCRIPTION_REFUSED: Refused = {
    **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ("speakers are not told apart", ())),
    "languages": ("the model recognizes the language of each segment; use 'language' to force one", ()),
    "to_language": ("a transcript is in the language of the speech", ()),
    "hotwords": ("use 'keywords'", ()),
    "n": ("a file has one transcript", (1,)),
    "max_completion_tokens": ("a segment may have 512 tokens", ()),
    "stream_include_usage": ("the last event has the usage", (False, True)),
    "stream_continuous_usage_stats": ("the last event has the usage", (False,)),
    **dict.fromkeys(("seed", "penalty_decay"), (_ONE_TEMPERATURE, ())),
    **dict.fromkeys(("top_p", "repetition_penalty"), (_ONE_TEMPERATURE, (1,))),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), (_ONE_TEMPERATURE, (0,))),
    "top_k": (_ONE_TEMPERATURE, (0, -1)),
    **{
        name: _SAMPLING_REFUSED[name]
        for name in ("use_beam_search", "length_penalty", "include_stop_str_in_output")
    },
    "vllm_xargs": _SERVING_REFUSED["vllm_xargs"],
}
VOICE_REFUSED: Refused = dict.fromkeys(
    ("prompt", "script_hint"), ("voices are made of recordings and speaker vectors", ())
)
CHAT_DRAWING_REFUSED: Refused = {
    "true_cfg_scale": ("use 'guidance_scale'", ()),
    "num_outputs_per_prompt": ("use 'n'", (1,)),
    "semantic_source": ("the thinker alone reads the prompt", ("thinker",)),
    "enable_text_rendering": ("text in quotes is always drawn", (True,)),
}
_NO_ANIMATION: tuple[str, tuple[object, ...]] = ("pictures do not move", ())
IMAGE_REFUSED: Refused = {
    "response_format": ("pictures are not stored, so they have no URL; use 'b64_json'", ("b64_json",)),
    "background": ("pictures have no transparency", ("auto", "opaque")),
    "quality": ("use 'num_inference_steps'", ("auto", "standard", "medium")),
    "style": ("describe the style in 'prompt'", ()),
    "complexity": ("use 'num_inference_steps'", ()),
    "moderation": ("nothing is moderated here", ("auto", "low")),
    "frame_count": _NO_ANIMATION,
    "frame_duration_ms": _NO_ANIMATION,
    "svg": ("pictures have pixels", ()),
    "true_cfg_scale": CHAT_DRAWING_REFUSED["true_cfg_scale"],
    "generator_device": ("noise is drawn on the CPU, so that a seed gives one picture everywhere", ("cpu",)),
    **dict.fromkeys(("vae_use_slicing", "vae_use_tiling"), ("pictures are decoded whole", (False,))),
    "lora": ("there are no adapters", ()),
}
_NO_MASK: tuple[str, tuple[object, ...]] = (
    "the whole picture is drawn anew; say in 'prompt' what is to change",
    (),
)
IMAGE_EDIT_REFUSED: Refused = {
    **IMAGE_REFUSED,
    "mask": _NO_MASK,
    "markup": _NO_MASK,
    "input_fidelity": ("the model always gets the whole picture", ("high", "low")),
}
# Fields that change no answer.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "custom_labels", "rid", "session_id",
)  # fmt: skip

_Body = TypeVar("_Body", bound=Struct)


def _refusal(why: str, neutral: tuple[object, ...]) -> str:
    """Describe a refused field; values that request nothing are written as JSON."""
    values = " or ".join(f"`{json.encode(value).decode()}`" for value in neutral)
    return f"Refused, except {values}: {why}." if values else f"Refused: {why}."


def with_other_fields(
    body: type[_Body],
    refused: Refused,
    other: Any = Raw,
    *,
    files: Sequence[str] = (),
    lists: Sequence[str] = (),
) -> type[_Body]:
    """Define a struct of the same name that also has the refused and the ignored fields, undecoded.

    `other`: their type, which is text in a form but for `files` and `lists`, whose parts may be repeated.
    """
    others = {name: _refusal(why, neutral) for name, (why, neutral) in refused.items()}
    others |= dict.fromkeys(IGNORED, "Ignored.")
    fields = [
        (
            name,
            Annotated[
                File if name in files else list[str] if name in lists else other, Meta(description=text)
            ],
            field(default_factory=other),
        )
        for name, text in others.items()
    ]
    name, doc = body.__name__, {"__doc__": body.__doc__}
    made = cast(type[_Body], defstruct(name, fields, bases=(body,), namespace=doc, kw_only=True))
    json.Decoder(made)  # analyses the types; otherwise the first request would, which takes 7 ms
    return made


CHAT_BODY = with_other_fields(ChatBody, CHAT_REFUSED)
COMPLETION_BODY = with_other_fields(CompletionBody, COMPLETION_REFUSED)
TOKENIZE_BODY = with_other_fields(TokenizeBody, TOKENIZE_REFUSED)
IMAGE_BODY = with_other_fields(ImageBody, IMAGE_REFUSED)
IMAGE_EDIT_BODY = with_other_fields(ImageEditBody, IMAGE_EDIT_REFUSED, str, files=("mask", "markup"))
DETOKENIZE_BODY = with_other_fields(DetokenizeBody, {})
SPEECH_BODY = with_other_fields(SpeechBody, SPEECH_REFUSED)
NEW_VOICE_FORM = with_other_fields(NewVoiceForm, VOICE_REFUSED, str)
