"""The prompt of a transcription by its token ids, and what of an answer is the transcript."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from preprocess_data import audio_parameters, thinker_parameters, tokenizer
from tokenizers import Tokenizer

from mingc.prompts.chat import ChatProcessor
from mingc.prompts.features import AudioFeatures
from mingc.prompts.thinker_prompt import AUDIO
from mingc.prompts.transcription import Transcript, answer_start, separator, transcription_message

FILE = Path(__file__).parents[1] / "data" / "tiny-ming" / "tokenizer.json"
REQUEST = "Please recognize the language of this speech and transcribe it. Format: oral."


@pytest.mark.parametrize(
    ("topic", "keywords", "language", "context", "start"),
    [
        ("", (), None, "", ""),
        ("", (), "English", "", "English\t"),
        ("ships", (), "上海", "This is an audio about ships.", "上海\t"),
        ("", ("mast", "keel"), None, "This audio may contains the following words or phrases:mast,keel.", ""),
        ("<role>", ("a",), "Chinese",
         "This is an audio about <role>.This audio may contains the following words or phrases:a.", "Chinese\t"),
    ],
)  # fmt: skip
def test_the_ids_are_those_of_the_specification(
    topic: str, keywords: tuple[str, ...], language: str | None, context: str, start: str
) -> None:
    """Written by hand and tokenized by the library alone; what a client sends holds no special token."""
    library = Tokenizer.from_file(str(FILE))
    plain = Tokenizer(library.model)
    plain.pre_tokenizer, plain.normalizer = library.pre_tokenizer, library.normalizer

    def special(text: str) -> list[int]:
        return library.encode(text, add_special_tokens=False).ids

    def ordinary(text: str) -> list[int]:
        return plain.encode(text, add_special_tokens=False).ids

    expected = [
        *special(
            "<role>SYSTEM</role>你是一个友好的AI助手。\n\ndetailed thinking off<|role_end|><role>HUMAN</role>"
        ),
        *ordinary(REQUEST + context),
        *special("<audio>" + "<audioPatch>" * 5 + "</audio><|role_end|><role>ASSISTANT</role>"),
        *ordinary(start),
    ]
    processor = ChatProcessor(
        tokenizer(), thinker_parameters(), vision=None, audio=audio_parameters(), decoder=None
    )
    features = AudioFeatures(mel=np.zeros((20, 128), np.float32), num_tokens=5)
    message = transcription_message(features, "file", topic=topic, keywords=keywords)
    prompt = processor.prepare([message], answer=answer_start(language)).tokens
    assert prompt.input_ids.tolist() == expected
    assert int((prompt.embed_kind == AUDIO).sum()) == 5
    np.testing.assert_array_equal(prompt.positions, np.tile(np.arange(len(expected)), (3, 1)))


@pytest.mark.parametrize(
    ("answer", "forced", "language", "text"),
    [
        ("English\thello there", None, "English", "hello there"),
        ("Chinese\t你好\t再见", None, "Chinese", "你好\t再见"),
        ("上海\t侬好", None, "上海", "侬好"),
        ("  hello there \n", None, None, "hello there"),
        ("a long answer that states no language\tbut has a tab", None, None,
         "a long answer that states no language\tbut has a tab"),
        ("hello\tthere", "English", "English", "hello\tthere"),
        ("English\t \n", None, "English", ""),
        ("\tno name", None, None, "no name"),
        ("", None, None, ""),
    ],
)  # fmt: skip
def test_the_language_and_outer_white_space_are_no_part_of_a_transcript(
    answer: str, forced: str | None, language: str | None, text: str
) -> None:
    generator = random.Random(0)
    for _ in range(40):
        cuts = sorted(generator.choices(range(len(answer) + 1), k=generator.randrange(4)))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        transcript = Transcript(forced)
        shown = [transcript.push(each) for each in pieces] + [transcript.finish()]
        assert "".join(shown) == transcript.text == text
        assert transcript.language == language


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [("One.", "Two.", " "), ("好。", "你", ""), ("AI", "好", ""), ("안녕", "하세요", " "), ("", "a", "")],
)
def test_what_stands_between_segments(before: str, after: str, between: str) -> None:
    assert separator(before, after) == between
