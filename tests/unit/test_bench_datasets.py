"""Data sets from files, and every scorer against cases made by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from mingc.bench.datasets import read_data_set
from mingc.bench.records import ClientState, Item, Load, Run, Sample
from mingc.bench.scores import chosen_option, is_open_answer, last_number, score
from mingc.errors import ConfigError

OPTIONS = {"A": "a cat", "B": "a dog", "C": "no animal at all"}


@pytest.mark.parametrize(
    ("expected", "answer", "is_right"),
    [
        ("18", "She sells 9 * 2 = 18 dollars.\n#### 18", True),
        ("18", "So the answer is $18.00.", True),
        ("18", "18 eggs, of which 4 are eaten", False),
        ("1,234", "It is 1234", True),
        ("1234", "Altogether **1,234**!", True),
        ("-5", "The change is −5", True),
        ("5", "10-5", True),
        ("5", "x = -5", False),
        ("0.5", r"\boxed{0.5}", True),
        ("7", "I do not know.", False),
        ("7", "", False),
    ],
)
def test_gsm8k_counts_the_last_number(expected: str, answer: str, is_right: bool) -> None:
    item = Item(id="1", path="text", expected=expected)
    assert last_number(item, answer) == float(is_right)


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("The answer is B.", "B"),
        ("B. a dog", "B"),
        ("I would say (A), but (B) is better", "B"),
        ("(B) and not A", "B"),  # brackets first
        ("Either A or C is possible, so C", "C"),
        ("What the picture shows is surely a dog", "B"),
        ("Not a dog, in fact there is no animal at all", "C"),
    ],
)
def test_mmmu_finds_the_option(answer: str, letter: str) -> None:
    assert chosen_option(answer, OPTIONS, "x") == letter


def test_mmmu_chooses_by_chance_where_no_option_is_named() -> None:
    chosen = [chosen_option("none of them", OPTIONS, f"question {index}") for index in range(300)]
    assert chosen == [chosen_option("none of them", OPTIONS, f"question {index}") for index in range(300)]
    assert all(80 <= chosen.count(letter) <= 120 for letter in OPTIONS)


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [
        ("42", ["42"], True),
        ("The result is 42.004", ["42"], True),  # two digits
        ("The answer is 1,200 dollars", ["1200"], True),
        ("x = 3 + 4 = 7", ["7"], True),
        ("7 of them\nThe final answer is 8", ["7"], False),
        ("It is the Krebs cycle.", ["Krebs cycle"], True),
        ("It is the Calvin cycle.", ["Krebs cycle", "citric acid cycle"], False),
        ("so it is the citric acid cycle", ["Krebs cycle", "citric acid cycle"], True),
        ("mean", ["e"], False),  # a single letter stands alone
        ("it is vitamin e", ["e"], True),
    ],
)
def test_mmmu_scores_open_answers(answer: str, expected: list[str], is_right: bool) -> None:
    assert is_open_answer(answer, expected) is is_right


def write(folder: Path, *lines: object, name: str = "data.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def answered(data_set: str, answers: dict[str, str]) -> dict[str, float]:
    """Scores of one run in which the items were answered so; an item without an answer failed."""
    data = read_data_set(data_set)
    samples = tuple(
        Sample(item=item.id, server="s", scheduled=0.0, sent=0.0, ended=1.0, text=answers.get(item.id, ""),
               error="" if item.id in answers else "refused")
        for item in data.items
    )  # fmt: skip
    client = ClientState(num_processes=1, busy=0.0, lag_s=0.0, clock_s=0.0)
    run = Run(path=data.items[0].path, load=Load(kind="closed", concurrency=1), repeat=0, began="", wall_s=1.0,
              samples=samples, client=client)  # fmt: skip
    return score(data.items, data.judge, [run])


def test_gsm8k(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question": "How many eggs?", "answer": "16 - 3 - 4 = <<16-3-4=9>>9\n#### 9"},
        {"question": "How much?", "answer": "#### 1,080"},
        {"question": "How long?", "answer": "#### 3"},
        {"question": "How far?", "answer": "#### 4"},
    )
    item = read_data_set(f"gsm8k:{path}").items[0]
    assert item.path == "text" and item.messages[0]["content"].startswith("How many eggs?")
    assert item.expected == "9" and (item.max_tokens or 0) >= 1024
    found = answered(f"gsm8k:{path}", {"1": "9", "2": "It costs $1080.", "3": "2"})
    assert found == {"accuracy, %": 50.0, "answers": 4.0, "failed": 1.0}


def test_mmmu(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    inline = "data:image/png;base64,cGljdHVyZQ=="
    path = write(
        tmp_path,
        {"id": "validation_Art_1", "question": "What is <image 1> beside <image 2>?", "answer": "B",
         "options": "['a cat', \"a dog\"]", "image_1": "a.png", "image_2": {"bytes": None, "path": "a.png"}},
        {"id": "o", "question": "How many in <image 1>?", "options": "[]", "answer": "['4', 'four']",
         "image_1": inline},
    )  # fmt: skip
    first, second = read_data_set(f"mmmu:{path}").items
    content = first.messages[0]["content"]
    picture = {"type": "image_url", "image_url": {"url": inline}}
    assert content[:4] == [
        {"type": "text", "text": "What is "}, picture, {"type": "text", "text": " beside "}, picture,
    ]  # fmt: skip
    assert "(A) a cat\n(B) a dog" in content[4]["text"] and first.path == second.path == "image"
    assert answered(f"mmmu:{path}", {"validation_Art_1": "(B)", "o": "four"})["accuracy, %"] == 100.0
    assert answered(f"mmmu:{path}", {"validation_Art_1": "(A)", "o": "There are 4"})["accuracy, %"] == 50.0


def test_seedtts(tmp_path: Path) -> None:
    (tmp_path / "prompt-wavs").mkdir()
    (tmp_path / "prompt-wavs" / "1.wav").write_bytes(b"RIFF")
    path = write(
        tmp_path,
        "a|Say this.|prompt-wavs/1.wav|Get the trust fund to the bank early.",
        "b|说。|prompt-wavs/1.wav|今天天气很好。|wavs/b.wav",
        name="meta.lst",
    )
    first, second = read_data_set(f"seedtts:{path}").items
    assert (first.text, first.clip, first.clip_text) == (
        "Get the trust fund to the bank early.",
        b"RIFF",
        "Say this.",
    )
    assert second.path == "speech-stream" and second.expected == "今天天气很好。"
    found = answered(f"seedtts:{path}", {"a": "get the trust fund the bank early", "b": "今天天汽很好"})
    assert found["word or character error rate, %"] == pytest.approx(100 * (1 / 8 + 1 / 6) / 2)
    failed = answered(f"seedtts:{path}", {"a": "get the trust fund to the bank early"})
    assert failed == {"word or character error rate, %": 50.0, "answers": 2.0, "failed": 1.0}


def test_items_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    sound = {"type": "audio_url", "audio_url": {"url": "a.wav"}}
    path = write(
        tmp_path,
        {
            "prompt": "Name the capital\u2028of\x85France.",
            "expected": "Paris",
            "max_tokens": 5,
        },  # no ends of lines
        "",
        {"id": "said", "clip": "a.wav", "expected": "hello there"},
        {"text": "Hello.", "path": "speech"},
        {"path": "clip", "messages": [{"role": "user", "content": [part, sound]}]},
    )
    data = read_data_set(str(path))
    assert [(item.id, item.path) for item in data.items] == [
        ("1", "text"), ("said", "transcription"), ("4", "speech"), ("5", "clip"),
    ]  # fmt: skip
    assert data.items[0].messages[0]["content"] == "Name the capital\u2028of\x85France."
    first, second = data.items[3].messages[0]["content"]
    assert first == part and second["audio_url"]["url"].startswith("data:audio/")
    assert base64.b64decode(second["audio_url"]["url"].partition("base64,")[2]) == b"RIFF"
    found = answered(str(path), {"1": " paris. ", "said": "Hello, their!", "4": "", "5": "x"})
    assert found == {
        "accuracy, %": 100.0,
        "word or character error rate, %": 50.0,
        "answers": 2.0,
        "failed": 0.0,
    }


@pytest.mark.parametrize(
    ("kind", "line", "why"),
    [
        ("gsm8k:", {"question": "?", "answer": "four"}, "does not end with ####"),
        ("gsm8k:", {"answer": "#### 4"}, "no 'question'"),
        ("gsm8k:", "[1]", "no JSON object"),
        ("mmmu:", {"question": "?", "options": "['x']", "answer": "D"}, "no letter of an option"),
        ("mmmu:", {"question": "<image 1>", "answer": "1"}, "no 'image_1'"),
        ("seedtts:", "a|b|c", "3 columns"),
        ("seedtts:", "a|b|missing.wav|d", "missing.wav"),
        ("", {"prompt": "?", "expeted": "1"}, "unknown field 'expeted'"),
        ("", {"path": "speech", "prompt": "?"}, "needs text"),
        ("", {"path": "smell", "prompt": "?"}, "path 'smell'"),
        ("", {"path": "picture", "prompt": "?"}, "needs text"),
        ("", {"text": 5}, "got `int` - at `$.text`"),
        ("", {"prompt": "?", "max_tokens": "8"}, "got `str` - at `$.max_tokens`"),
        ("", {"prompt": "?", "max_tokens": 0}, "max_tokens 0"),
        ("", "[" * 100_000, "recursion"),
        ("", '{"prompt": ', "Expecting value"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, kind: str, line: object, why: str) -> None:
    path = write(tmp_path, "", line)
    with pytest.raises(ConfigError) as caught:
        read_data_set(f"{kind}{path}")
    assert why in caught.value.message and "line 2" in caught.value.message


def test_a_file_without_items_or_with_an_id_twice_is_refused(tmp_path: Path) -> None:
    for lines, why in (
        ((), "empty"),
        (({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}), "more than once"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_data_set(str(write(tmp_path, *lines)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_data_set(str(tmp_path / "none.jsonl"))
