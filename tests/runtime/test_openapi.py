"""`/openapi.json` describes what is served: real responses fit it, and requests made from it get no 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from fake_service import SPEECH_ONLY, FakeService
from openai.types import completion_create_params as completion_params
from openai.types import image_edit_params, image_generate_params
from openai.types.audio import speech_create_params, voice_create_params
from openai.types.audio import transcription_create_params as transcription_params
from openai.types.chat import completion_create_params as chat_params
from openapi_fuzz import fuzz
from server_thread import run_server

from mingc.server.app import create_app
from mingc.server.error_objects import ErrorResponse
from mingc.server.http import response_schemas
from mingc.server.http.openapi import openapi_document
from mingc.server.http.pictures import ImagesResponse
from mingc.server.http.request_schemas import (
    CHAT_BODY,
    COMPLETION_BODY,
    DETOKENIZE_BODY,
    IMAGE_BODY,
    IMAGE_EDIT_BODY,
    IMAGE_EDIT_JSON_BODY,
    NEW_VOICE_FORM,
    SPEECH_BODY,
    TOKENIZE_BODY,
)
from mingc.server.http.transcriptions import TRANSCRIPTION_BODY, Transcription
from mingc.server.options import ServeOptions

CHAT = "/v1/chat/completions"
IMAGES, EDITS = "/v1/images/generations", "/v1/images/edits"
SPEECH, TRANSCRIPTIONS, VOICES = (f"/v1/audio/{name}" for name in ("speech", "transcriptions", "voices"))
CLIP = Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_server(FakeService) as url:
        yield url


def test_every_route_is_in_the_document() -> None:
    document = msgspec.json.decode(openapi_document())
    app = create_app(FakeService(), ServeOptions())
    assert document["openapi"].startswith("3.1.")
    served = {
        (route.path.replace(":path", ""), method.lower())  # type: ignore[attr-defined]
        for route in app.routes
        if getattr(route, "include_in_schema", False)  # a WebSocket is none of OpenAPI's
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    assert served == {(path, method) for path, item in document["paths"].items() for method in item}


def test_operations_of_the_document() -> None:
    """Schemas and content types of each response, bodies, and which routes need no key: docs/http-api.md."""
    document = msgspec.json.decode(openapi_document())
    audio = dict.fromkeys(
        (
            *(f"audio/{kind}" for kind in ("mpeg", "ogg", "aac", "flac", "wav", "pcm", "PCMU", "PCMA")),
            "text/event-stream",
        )
    )
    errors = ("400", "401", "404", "408", "413", "415", "500", "503")
    lists = ("401", "404")
    form = "multipart/form-data"
    pictures = {"application/json": "ImagesResponse", "text/event-stream": None}
    both = ("200", "503")
    expected = {
        CHAT: ("ChatBody", True, {"application/json": "ChatCompletion", "text/event-stream": None}, errors),
        "/v1/completions": (
            "CompletionBody",
            True,
            {"application/json": "TextCompletion", "text/event-stream": None},
            errors,
        ),
        "/tokenize": ("TokenizeBody", True, {"application/json": "TokenList"}, errors),
        "/detokenize": ("DetokenizeBody", True, {"application/json": "Detokenized"}, errors),
        "/version": (None, True, {"application/json": "Version"}, lists),
        "/v1/audio/speech": ("SpeechBody", True, audio, errors),
        "/v1/audio/transcriptions": (
            {form: "TranscriptionBody"},
            True,
            dict.fromkeys(("application/json", "text/plain", "text/vtt", "text/event-stream")),
            (*errors, "403"),
        ),
        "/v1/audio/translations": (None, True, None, ("400", "401")),
        IMAGES: ("ImageBody", True, pictures, (*errors, "507")),
        EDITS: (
            {"application/json": "ImageEditJsonBody", form: "ImageEditBody"},
            True,
            pictures,
            (*errors, "403", "507"),
        ),
        "/v1/models": (None, True, {"application/json": "ModelList"}, lists),
        "/v1/models/{model}": (None, True, {"application/json": "ModelObject"}, lists),
        "/v1/audio/voices": (None, True, {"application/json": "VoiceList"}, lists),
        "post /v1/audio/voices": (
            {form: "NewVoiceForm"},
            True,
            {"application/json": "VoiceObject"},
            (*errors, "403", "409", "507"),
        ),
        "/v1/audio/voices/{voice}": (
            None,
            True,
            {"application/json": "VoiceDeleted"},
            (*lists, "400", "403"),
        ),
        "/health": (None, False, {"application/json": "HealthResponse"}, both),
        "/ready": (None, False, {"application/json": "ReadyResponse"}, both),
        "/metrics": (None, True, {"text/plain": None}, lists),
        "/openapi.json": (None, True, {"application/json": None}, lists),
    }

    def schemas(content: dict[str, Any]) -> dict[str, str | None]:
        found = {kind: each.get("schema", {}).get("$ref") for kind, each in content.items()}
        return {kind: ref and ref.removeprefix("#/components/schemas/") for kind, ref in found.items()}

    assert document["security"] == [{}, {"key": []}]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    failed = document["components"]["responses"]["error"]
    assert failed["description"] and schemas(failed["content"]) == {"application/json": "ErrorResponse"}
    operations = {
        path if method == "get" or len(item) == 1 else f"{method} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    assert operations.keys() == expected.keys()
    for path, (body, needs_key, content, others) in expected.items():
        operation = operations[path]
        assert operation["summary"] and ("security" in operation) is not needs_key, path
        assert operation.get("security", [{}]) == [{}], path
        answers = operation["responses"]
        assert answers.keys() == {*(() if content is None else ("200",)), *others}
        assert content is None or schemas(answers["200"]["content"]) == content, path
        for status in {*others} - {"200"}:
            if others is both:
                assert answers[status]["description"] and schemas(answers[status]["content"]) == content
            else:
                assert answers[status] == {"$ref": "#/components/responses/error"}
        if body is not None:
            assert operation["requestBody"]["required"] is True
            bodies = {"application/json": body} if isinstance(body, str) else body
            assert schemas(operation["requestBody"]["content"]) == bodies
        named = [(each["name"], each["in"], each["required"]) for each in operation.get("parameters", [])]
        assert named == [(name, "path", True) for name in ("model", "voice") if f"{{{name}}}" in path]


def test_every_field_is_in_the_document() -> None:
    schemas = msgspec.json.decode(openapi_document())["components"]["schemas"]
    assert schemas["TranscriptionBody"]["properties"]["file"] == {"type": "string", "format": "binary"}
    for body in (
        CHAT_BODY, COMPLETION_BODY, TOKENIZE_BODY, DETOKENIZE_BODY, SPEECH_BODY, TRANSCRIPTION_BODY, NEW_VOICE_FORM,
        IMAGE_BODY, IMAGE_EDIT_BODY, IMAGE_EDIT_JSON_BODY,
    ):  # fmt: skip
        schema = schemas[body.__name__]
        assert set(schema["properties"]) == set(body.__struct_fields__)
        assert schema["additionalProperties"] is False
    assert schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number", "minimum": 0.0, "maximum": 2.0,
    }  # fmt: skip


# Fields of requests, from the sources of the servers (vLLM 0.2x `entrypoints/openai/*/protocol.py`, SGLang
# `srt/entrypoints/openai/protocol.py`, both of late 2026).
_OF_BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user top_k min_p min_tokens repetition_penalty stop_token_ids ignore_eos skip_special_tokens
    session_id response_format cache_salt priority"""
_OF_VLLM = """use_beam_search watermarking length_penalty include_stop_str_in_output spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    add_special_tokens structured_outputs request_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval"""
_OF_SGLANG = """return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_token_ids ebnf regex stop_regex no_stop_trim lora_path session_params custom_params custom_logit_processor
    images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
    rid extra_key ngram_corpus_id"""
_CHATS = "messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort parallel_tool_calls"
OTHER_APIS = {
    "vLLM": {
        CHAT: f"""{_OF_BOTH} {_OF_VLLM} {_CHATS} include_reasoning echo add_generation_prompt continue_final_message
            documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
        "/v1/completions": f"{_OF_BOTH} {_OF_VLLM} prompt echo suffix prompt_embeds",
        "/tokenize": """model prompt messages add_special_tokens return_token_strs add_generation_prompt
            continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
        "/detokenize": "model tokens",
        TRANSCRIPTIONS: """file model language hotwords prompt response_format timestamp_granularities stream
            stream_include_usage stream_continuous_usage_stats vllm_xargs to_language use_beam_search n length_penalty
            include_stop_str_in_output temperature top_p top_k min_p seed frequency_penalty repetition_penalty
            penalty_decay presence_penalty max_completion_tokens""",
    },
    "SGLang": {
        CHAT: f"""{_OF_BOTH} {_OF_SGLANG} {_CHATS} return_prompt_token_ids return_meta_info task
            continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
            min_dynamic_patch use_audio_in_video input_ids reasoning""",
        "/v1/completions": f"{_OF_BOTH} {_OF_SGLANG} prompt best_of echo suffix json_schema custom_labels",
    },
    "OpenAI": {
        CHAT: " ".join(chat_params.CompletionCreateParamsBase.__annotations__),
        "/v1/completions": " ".join(completion_params.CompletionCreateParamsBase.__annotations__),
        SPEECH: " ".join(speech_create_params.SpeechCreateParams.__annotations__),
        TRANSCRIPTIONS: " ".join(transcription_params.TranscriptionCreateParamsBase.__annotations__),
        VOICES: " ".join(
            name for each in get_args(voice_create_params.VoiceCreateParams) for name in each.__annotations__
        ),
        IMAGES: " ".join(image_generate_params.ImageGenerateParamsBase.__annotations__),
        EDITS: " ".join(image_edit_params.ImageEditParamsBase.__annotations__),
    },
    "OpenAI, as JSON": {  # `EditImageBodyJsonParam` of the API's document, which the client does not send
        EDITS: """background images input_fidelity mask model moderation n output_compression output_format
            partial_images prompt quality size stream user""",
    },
    "vLLM-Omni": {  # `entrypoints/openai/protocol/`, chats as its documentation has them
        SPEECH: """input model voice speaker instructions response_format sample_rate speed stream_format stream
            task_type language ref_audio ref_text ref_audio_2 references ambient_sound duration_seconds
            x_vector_only_mode speaker_embedding max_new_tokens seed initial_codec_chunk_frames non_streaming_mode
            extra_params word_timestamps""",
        IMAGES: """prompt model n size response_format user negative_prompt num_inference_steps guidance_scale
            true_cfg_scale seed vae_use_slicing vae_use_tiling""",
        CHAT: "modalities height width num_inference_steps guidance_scale seed negative_prompt extra_body",
    },
    "SGLang-Omni": {CHAT: "modalities image_generation"},
}


@pytest.mark.parametrize(
    ("api", "path"), [(api, path) for api, paths in OTHER_APIS.items() for path in paths]
)
def test_every_field_of_another_api_is_accepted_refused_by_name_or_ignored(api: str, path: str) -> None:
    document = msgspec.json.decode(openapi_document())
    bodies = document["paths"][path]["post"]["requestBody"]["content"].values()
    names = [body["schema"]["$ref"].rpartition("/")[2] for body in bodies]
    fields = [set(document["components"]["schemas"][name]["properties"]) for name in names]
    assert any(set(OTHER_APIS[api][path].split()) <= each for each in fields)


def test_responses_are_those_of_the_document(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        spoken = {**body, "modalities": ["text", "audio"]}
        probable: dict[str, Any] = {**body, "logprobs": True, "top_logprobs": 2, "n": 2}
        continued = {"prompt": "a", "logprobs": 2, "n": 2}
        for response, type_ in (
            (http.post(CHAT, json=body), response_schemas.ChatCompletion),
            (http.post(CHAT, json=probable), response_schemas.ChatCompletion),
            (http.post("/v1/completions", json=continued), response_schemas.TextCompletion),
            (http.post("/tokenize", json={**body, "return_token_strs": True}), response_schemas.TokenList),
            (http.post("/detokenize", json={"tokens": [70]}), response_schemas.Detokenized),
            (http.post("/detokenize", json={"tokens": [70, 5000]}), ErrorResponse),
            (http.get("/version"), response_schemas.Version),
            (http.post(CHAT, json=spoken), response_schemas.ChatCompletion),
            (http.post(CHAT, json={}), ErrorResponse),
            (http.post("/v1/audio/transcriptions", files={"file": CLIP.read_bytes()}), Transcription),
            (http.post("/v1/audio/translations"), ErrorResponse),
            (http.post(IMAGES, json={"prompt": "x", "n": 2, "size": "512x512"}), ImagesResponse),
            (
                http.post(EDITS, files={"image": b"x"}, data={"prompt": "x", "size": "512x512"}),
                ImagesResponse,
            ),
            (http.post(CHAT, json={**body, "modalities": ["image"]}), response_schemas.ChatCompletion),
            (http.get("/v1/models"), response_schemas.ModelList),
            (http.get("/v1/models/ming-omni"), response_schemas.ModelObject),
            (http.get("/v1/models/other"), ErrorResponse),
            (http.get("/v1/audio/voices"), response_schemas.VoiceList),
            (http.get("/health"), response_schemas.HealthResponse),
            (http.get("/ready"), response_schemas.ReadyResponse),
        ):
            assert msgspec.json.decode(response.content, type=type_)
        assert http.get("/openapi.json").content == openapi_document()


def test_a_voice_list_without_a_default_fits() -> None:
    with run_server(lambda: FakeService(SPEECH_ONLY)) as url:
        assert msgspec.json.decode(
            httpx.get(f"{url}/v1/audio/voices", trust_env=False).content, type=response_schemas.VoiceList
        )


def test_generated_requests_get_no_server_error(url: str) -> None:
    """A bounded run; `python benchmarks/openapi_fuzz.py` sends 10,000 requests."""
    report = fuzz(url, num_requests=1, seconds=60, round_size=4)  # one turn
    assert not report.faults, report.faults[0]
    assert report.requests >= 20 and len(report.statuses) == 18  # `/openapi.json` itself is skipped
