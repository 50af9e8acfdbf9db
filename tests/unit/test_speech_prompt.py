"""Talker prompts compared with the goldens; captions; invalid instructions."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from preprocess_data import config, document, talker_tokenizer, tensors

from mingc.errors import RequestError
from mingc.prompts.speech_prompt import SpeechPrompt, SpeechPromptBuilder, caption_instruction

CASES = {name: case for name, case in document("talker").items() if "text" in case}


def build(case: dict[str, Any]) -> SpeechPrompt:
    speakers = re.fullmatch(r"list\[(\d+)\]", case["spk_emb"] or "list[0]")
    assert speakers is not None
    has_latents = case.get("prompt_wav_emb") is not None
    return SpeechPromptBuilder(talker_tokenizer()).build(
        case["text"],
        num_speakers=int(speakers[1]),
        transcript=case.get("prompt_text"),
        num_prompt_patches=tensors("talker")["voice.DB30.prompt_wav_emb"].shape[1] if has_latents else 0,
        instruction=case["instruction"],
        task=case["prompt"],
    )


@pytest.mark.parametrize("name", CASES)
def test_prompts_equal_the_goldens(name: str) -> None:
    prompt = build(CASES[name])
    assert prompt.token_ids.dtype == np.int64
    assert prompt.token_ids.tolist() == tensors("talker")[f"prompt.{name}.input_ids"][0].tolist()
    decoded = talker_tokenizer().decode(prompt.token_ids.tolist(), skip_special_tokens=False)
    assert decoded == CASES[name]["decoded"]


@pytest.mark.parametrize(
    ("name", "voices"), [("clone", ["DB30"]), ("spk_only", ["DB30"]), ("two_speakers", ["DB30", "lingguang"])]
)
def test_rows_equal_those_of_the_golden_vectors(name: str, voices: list[str]) -> None:
    recorded = tensors("talker")
    prompt = build(CASES[name])
    embeddings = recorded[f"prompt.{name}.inputs_embeds"][0]
    speakers = np.concatenate([recorded[f"voice.{voice}.spk_emb"] for voice in voices])
    np.testing.assert_array_equal(embeddings[prompt.speaker_rows], speakers)
    patches = recorded["voice.DB30.prompt_wav_emb"][0]
    expected = patches if name == "clone" else patches[:0]
    np.testing.assert_array_equal(embeddings[prompt.patch_rows], expected)


def test_the_prefix_depends_on_the_voice_alone() -> None:
    builder = SpeechPromptBuilder(talker_tokenizer())
    voice = {"num_speakers": 1, "transcript": "感谢你的认可。", "num_prompt_patches": 3}
    one, other = builder.build("Hello", **voice), builder.build("你好", **voice)
    assert one.prefix_length == other.prefix_length
    assert one.token_ids[: one.prefix_length].tolist() == other.token_ids[: one.prefix_length].tolist()
    text = talker_tokenizer().decode(one.token_ids[: one.prefix_length].tolist(), skip_special_tokens=False)
    assert text.endswith(" Text input:\n感谢你的认可。")
    music = builder.build("Genre: a. Mood: b. Instrument: c. Theme: d. Duration: 1s", **voice)
    text = talker_tokenizer().decode(
        music.token_ids[: music.prefix_length].tolist(), skip_special_tokens=False
    )
    assert text.endswith("<|vision_end|>\n")


def test_a_text_is_music_only_with_all_five_marks() -> None:
    """talker.md §4: a text that mentions a mark or four is read aloud, so it has the header of a text."""
    builder = SpeechPromptBuilder(talker_tokenizer())
    marks = ["Genre: a. ", "Mood: b. ", "Instrument: c. ", "Theme: d. ", "Duration: 1s"]

    def has_header(text: str) -> bool:
        decoded = talker_tokenizer().decode(builder.build(text).token_ids.tolist(), skip_special_tokens=False)
        return " Text input:\n" in decoded

    assert not has_header("".join(marks))
    for left_out in range(len(marks)):
        assert has_header("".join(mark for index, mark in enumerate(marks) if index != left_out))
        assert has_header(marks[left_out])


def test_a_recording_and_its_transcript_are_used_only_together() -> None:
    builder = SpeechPromptBuilder(talker_tokenizer())
    plain = builder.build("Hello").token_ids.tolist()
    assert builder.build("Hello", transcript="感谢").token_ids.tolist() == plain
    assert builder.build("Hello", num_prompt_patches=4).token_ids.tolist() == plain


ADDED = {each["content"]: each["id"] for each in config("talker/llm/tokenizer.json")["added_tokens"]}


@pytest.mark.parametrize("field", ["text", "transcript", "instruction"])
@pytest.mark.parametrize("typed", ADDED)
def test_special_tokens_of_a_client_are_plain_text(field: str, typed: str) -> None:
    given: dict[str, Any] = {"text": "Hello", "transcript": "yes", "instruction": "slow"}
    voice = {"num_speakers": 1, "num_prompt_patches": 3}
    builder = SpeechPromptBuilder(talker_tokenizer())
    plain, prompt = builder.build(**given, **voice), builder.build(**given | {field: f"a{typed}b"}, **voice)
    added = set(ADDED.values())
    assert [i for i in prompt.token_ids if i in added] == [i for i in plain.token_ids if i in added]
    assert f"a{typed}b" in talker_tokenizer().decode(prompt.token_ids.tolist(), skip_special_tokens=False)
    assert len(prompt.patch_rows) == 3 and len(prompt.speaker_rows) == 1
    parsed = SpeechPromptBuilder(talker_tokenizer(), parse_special_tokens=True)
    ids = parsed.build(**given | {field: f"a{typed}b"}, **voice).token_ids.tolist()
    assert ids.count(ADDED[typed]) == plain.token_ids.tolist().count(ADDED[typed]) + 1


@pytest.mark.parametrize("text", ["", "  \n"])
def test_blank_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no text") as caught:
        SpeechPromptBuilder(talker_tokenizer()).build(text)
    assert caught.value.param == "input"


def test_plain_instructions_become_the_style_of_a_caption() -> None:
    caption = json.loads(caption_instruction(" warm and slow\n") or "")
    (entry,) = caption["audio_sequence"]
    assert list(entry) == ["序号", "说话人", "方言", "风格", "语速", "基频", "音量", "情感", "BGM", "IP"]
    assert {key for key, value in entry.items() if value is not None} == {"序号", "说话人", "风格", "BGM"}
    assert entry["风格"] == "warm and slow"
    assert entry["BGM"] == dict.fromkeys(["Genre", "Mood", "Instrument", "Theme", "ENV", "SNR"])


def test_fields_fill_a_caption_and_unknown_ones_are_dropped() -> None:
    fields = {"情感": "高兴", "speed": 2, "BGM": {"SNR": 10.0, "ENV": "rain", "loud": True}}
    (entry,) = json.loads(caption_instruction(json.dumps(fields)) or "")["audio_sequence"]
    assert list(entry) == ["序号", "说话人", "BGM", "情感", "方言", "风格", "语速", "基频", "音量", "IP"]
    assert entry["情感"] == "高兴"
    assert entry["BGM"] == {
        "Genre": None, "Mood": None, "Instrument": None, "Theme": None, "ENV": "rain", "SNR": 10.0,
    }  # fmt: skip


def test_a_complete_caption_stays_unchanged() -> None:
    recorded = CASES["zero_spk_instruction"]["instruction"]
    assert caption_instruction(recorded) == recorded
    extended = json.loads(recorded)
    extended["audio_sequence"][0] |= {"unknown": 1}
    assert caption_instruction(json.dumps(extended)) == recorded


def test_blank_instructions_give_no_caption() -> None:
    assert caption_instruction(" \n") is None


def test_invalid_json_is_refused() -> None:
    with pytest.raises(RequestError, match="start like a JSON object") as caught:
        caption_instruction('{"情感": ', where="instructions")
    assert caught.value.param == "instructions"
    assert caught.value.fix


def test_half_of_a_surrogate_pair_in_a_caption_is_refused() -> None:
    """The tokenizer would raise TypeError, which a client sees as a bug of the server."""
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        caption_instruction('{"情感": "\\ud800"}', where="instructions")
    assert (caught.value.param, caught.value.code) == ("instructions", "invalid_value")
    assert caption_instruction('{"情感": "\\ud83d\\ude00"}') is not None
