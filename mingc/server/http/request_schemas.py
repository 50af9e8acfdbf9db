"""JSON bodies of `/v1/chat/completions` and `/v1/audio/speech` as typed structs: names, types and ranges of all fields.

Every field may be null, which counts as absent. A field of the type `Raw` is not decoded: it is either ignored or
refused by `mingc.server.http.parsing`, which also makes the checks that need the artifact or another field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct, field

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOKENS = 1 << 24  # a sanity bound; the service checks the context length
MAX_PIXELS = 1 << 30
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 16
MAX_TOKEN_ID = 1 << 24
MAX_STOP_CHARACTERS = 1000  # the most text that is held back and searched at each token
MIN_PENALTY = 0.01  # logits are divided by it

_ABSENT: Raw = field(default_factory=Raw)  # no default: Raw has none in a JSON schema

# Integers are declared with a float beside them: JSON has one kind of number, so 4.0 counts as 4. Floats take integers.
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | Annotated[float, Meta(ge=1, le=MAX_TOKENS)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | Annotated[float, Meta(ge=-1, le=MAX_TOKENS)]
Pixels = Annotated[int, Meta(ge=1, le=MAX_PIXELS)] | Annotated[float, Meta(ge=1, le=MAX_PIXELS)]
MinCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Annotated[float, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] | Annotated[float, Meta(ge=0, le=MAX_TOKEN_ID)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
MediaList = Annotated[list[str], Meta(max_length=MAX_PARTS)]
_FORMAT_HINT = Meta(description="mp3, opus and aac are not encoded; wav is the default.")


class TextContent(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class MediaUrl(Struct, forbid_unknown_fields=True):
    """An http(s) or data URL, or a local path. `detail` is accepted: the artifact's own rule sizes pictures."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageContent(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: MediaUrl


class AudioUrlContent(Struct, tag_field="type", tag="audio_url", forbid_unknown_fields=True):
    audio_url: MediaUrl


class VideoContent(Struct, tag_field="type", tag="video_url", forbid_unknown_fields=True):
    video_url: MediaUrl


class AudioData(Struct, forbid_unknown_fields=True):
    """Base64 audio. The decoder detects the format from the bytes; `format` only catches mistakes early."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"] | None = None


class AudioContent(Struct, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    input_audio: AudioData


MediaContent = ImageContent | AudioContent | AudioUrlContent | VideoContent
Content = str | Annotated[list[TextContent | MediaContent], Meta(max_length=MAX_PARTS)]


class SystemMessage(Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    content: Content | None = None
    name: Raw = _ABSENT


class DeveloperMessage(Struct, tag_field="role", tag="developer", forbid_unknown_fields=True):
    content: Content | None = None
    name: Raw = _ABSENT


class UserMessage(Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: Content | None = None
    name: Raw = _ABSENT


class EarlierAudio(Struct):
    """Audio of an earlier answer, of which only the transcript is read."""

    transcript: str | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """An earlier answer. A client may send it back as it was received, so all fields of an answer are accepted."""

    content: Content | None = None
    audio: EarlierAudio | None = None
    name: Raw = _ABSENT
    refusal: Raw = _ABSENT
    annotations: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT


MessageBody = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage


class VoiceReference(Struct, forbid_unknown_fields=True):
    id: str


class SpeechFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Speech parameters, in the `audio` object of a chat and at the top level of a speech request."""

    voice: str | VoiceReference | None = None
    instructions: str | None = None
    seed: int | float | None = None
    max_steps: Count | None = None
    max_new_tokens: Count | None = None
    guidance: Annotated[float, Meta(ge=0.0, le=20.0)] | None = None
    sigma: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    # fields of other APIs, refused unless their value requests nothing (`parsing`)
    speed: Raw = _ABSENT
    sample_rate: Raw = _ABSENT


class ChatAudio(SpeechFields, kw_only=True):
    format: Annotated[Literal["wav", "pcm16", "flac"], _FORMAT_HINT] | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Raw = _ABSENT


class TemplateSwitches(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to reach `thinking`, under both names that chat templates use."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    model: str | None = None
    messages: Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)] | None = None
    images: MediaList | None = None
    audios: MediaList | None = None
    videos: MediaList | None = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None
    audio: ChatAudio | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    thinking: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    # sampling
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_PENALTY, le=10.0)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: MinCount | None = None
    ignore_eos: bool | None = None
    seed: int | float | None = None
    # video sampling
    video_fps: Annotated[float, Meta(gt=0.0, le=1000.0)] | None = None
    video_max_frames: Count | None = None
    video_min_pixels: Pixels | None = None
    video_max_pixels: Pixels | None = None
    video_total_pixels: Pixels | None = None
    # fields of other APIs, refused unless their value requests nothing (`parsing`)
    n: Raw = _ABSENT
    tools: Raw = _ABSENT
    tool_choice: Raw = _ABSENT
    parallel_tool_calls: Raw = _ABSENT
    functions: Raw = _ABSENT
    function_call: Raw = _ABSENT
    logprobs: Raw = _ABSENT
    top_logprobs: Raw = _ABSENT
    logit_bias: Raw = _ABSENT
    response_format: Raw = _ABSENT
    frequency_penalty: Raw = _ABSENT
    presence_penalty: Raw = _ABSENT
    prediction: Raw = _ABSENT
    moderation: Raw = _ABSENT
    web_search_options: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    verbosity: Raw = _ABSENT
    image_generation: Raw = _ABSENT
    stage_sampling: Raw = _ABSENT
    stage_params: Raw = _ABSENT
    best_of: Raw = _ABSENT
    use_beam_search: Raw = _ABSENT
    length_penalty: Raw = _ABSENT
    skip_special_tokens: Raw = _ABSENT
    spaces_between_special_tokens: Raw = _ABSENT
    include_stop_str_in_output: Raw = _ABSENT
    prompt_logprobs: Raw = _ABSENT
    allowed_token_ids: Raw = _ABSENT
    bad_words: Raw = _ABSENT
    logits_processors: Raw = _ABSENT
    truncate_prompt_tokens: Raw = _ABSENT
    echo: Raw = _ABSENT
    add_generation_prompt: Raw = _ABSENT
    continue_final_message: Raw = _ABSENT
    add_special_tokens: Raw = _ABSENT
    chat_template: Raw = _ABSENT
    documents: Raw = _ABSENT
    mm_processor_kwargs: Raw = _ABSENT
    structured_outputs: Raw = _ABSENT
    guided_json: Raw = _ABSENT
    guided_regex: Raw = _ABSENT
    guided_choice: Raw = _ABSENT
    guided_grammar: Raw = _ABSENT
    return_token_ids: Raw = _ABSENT
    return_tokens_as_token_ids: Raw = _ABSENT
    priority: Raw = _ABSENT
    # ignored
    user: Raw = _ABSENT
    metadata: Raw = _ABSENT
    store: Raw = _ABSENT
    service_tier: Raw = _ABSENT
    safety_identifier: Raw = _ABSENT
    request_id: Raw = _ABSENT
    prompt_cache_key: Raw = _ABSENT
    prompt_cache_options: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT


class SpeechBody(SpeechFields, kw_only=True):
    """Body of `POST /v1/audio/speech`."""

    model: str | None = None
    input: str | None = None
    response_format: Annotated[Literal["wav", "pcm", "flac"], _FORMAT_HINT] | None = None
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    # fields of other APIs, refused unless their value requests nothing (`parsing`)
    task_type: Raw = _ABSENT
    language: Raw = _ABSENT
    ref_audio: Raw = _ABSENT
    ref_text: Raw = _ABSENT
    x_vector_only_mode: Raw = _ABSENT
    speaker_embedding: Raw = _ABSENT
    initial_codec_chunk_frames: Raw = _ABSENT
    extra_params: Raw = _ABSENT
    word_timestamps: Raw = _ABSENT
    # ignored
    user: Raw = _ABSENT
    metadata: Raw = _ABSENT
    store: Raw = _ABSENT
    service_tier: Raw = _ABSENT
    safety_identifier: Raw = _ABSENT
    request_id: Raw = _ABSENT
    prompt_cache_key: Raw = _ABSENT
    prompt_cache_options: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT
