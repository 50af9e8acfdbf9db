"""Token ids of texts, and incremental detokenization."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_data import CHECKPOINT, config, document, talker_tokenizer, tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.processors import TemplateProcessing

from mingc.errors import IntegrityError
from mingc.prompts.tokenizer import CachedEncoder, Detokenizer, TextTokenizer

CASES = document("preprocess")["tokenizer"]


def stream(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer())
    return [detokenizer.push(each) for each in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", CASES)
def test_ids_equal_the_goldens(text: str) -> None:
    case = CASES[text]
    assert tokenizer().encode(text) == case["ids"]
    assert tokenizer().decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert tokenizer().decode(case["ids"]) == case["decoded_skip_special"]
    assert "".join(stream(case["ids"])) == case["decoded_skip_special"]


@pytest.mark.parametrize("text", CASES)
def test_plain_ids_equal_the_goldens_of_texts_without_special_tokens(text: str) -> None:
    added = {each["content"] for each in config("tokenizer.json")["added_tokens"]}
    if not any(token in text for token in added):
        assert tokenizer().encode_plain(text) == CASES[text]["ids"]


@given(
    st.lists(st.sampled_from(["<|role_end|>", "<role>", "<tool_call>", "<|im_end|>", "é", " \n", "x<", "\0"]))
)
def test_plain_ids_are_never_added_tokens_and_keep_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    for path, each in (("tokenizer.json", tokenizer()), ("talker/llm/tokenizer.json", talker_tokenizer())):
        added = {token["id"] for token in config(path)["added_tokens"]}
        ids = each.encode_plain(text)
        assert not added & set(ids)
        assert each.decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token_and_special_tokens_have_no_bytes() -> None:
    """The vocabulary of bytes by the reference's own encoder of byte-level vocabularies."""
    special = {each["id"] for each in config("tokenizer.json")["added_tokens"] if each["special"]}
    alphabet = ByteLevel(add_prefix_space=False, use_regex=False)
    found = set()
    for token in range(tokenizer().vocab_size):
        data, name = tokenizer().token_bytes(token), tokenizer().token_name(token)
        assert (data is None) == (token in special)
        if data is not None:
            found.add(data)
            text = data.decode(errors="replace")
            if text.encode() == data:
                assert alphabet.pre_tokenize_str(text)[0][0] == name
    assert {bytes((byte,)) for byte in range(256)} <= found
    assert tokenizer().token_bytes(1 << 20) is None and tokenizer().token_name(1 << 20) == ""


@given(st.text())
def test_bytes_of_a_texts_tokens_are_its_utf8(text: str) -> None:
    ids = tokenizer().encode_plain(text)
    assert b"".join(tokenizer().token_bytes(each) or b"" for each in ids) == text.encode()
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_a_character_is_returned_whole_with_its_last_token() -> None:
    ids = tokenizer().encode("a😀b")
    assert len(ids) > 3
    assert stream(ids) == ["a", *[""] * (len(ids) - 3), "😀", "b", ""]


def test_an_incomplete_character_at_the_end_is_one_replacement_mark() -> None:
    ids = tokenizer().encode("ok😀")[:-1]
    assert "".join(stream(ids)) == "ok\ufffd"


def test_special_tokens_give_no_text_even_inside_a_character() -> None:
    ids = tokenizer().encode("é")
    end = tokenizer().token_id("<|role_end|>")
    assert len(ids) == 2
    assert "".join(stream([end, *ids, end])) == "é"


def test_pending_invalid_bytes_are_bounded() -> None:
    first = tokenizer().encode("é")[0]  # the first byte of a character, never the second
    text = "".join(stream([first] * 300 + tokenizer().encode("é!")))
    assert text == "\ufffd" * 300 + "é!"


@given(st.lists(st.integers(min_value=0, max_value=515), max_size=60))
def test_concatenated_pieces_equal_the_decoded_text(ids: list[int]) -> None:
    pieces = stream(ids)
    assert "".join(pieces) == tokenizer().decode(ids)


@given(st.text(max_size=40))
def test_encoding_and_decoding_any_text_is_lossless(text: str) -> None:
    assert "".join(stream(tokenizer().encode(text))) == tokenizer().decode(tokenizer().encode(text))


@given(st.text(max_size=40))
def test_no_token_is_longer_than_longest_token(text: str) -> None:
    assert len(text) <= tokenizer().longest_token * len(tokenizer().encode(text))


def test_the_path_may_be_a_file_or_its_folder() -> None:
    assert TextTokenizer.from_file(CHECKPOINT / "tokenizer.json").vocab_size == tokenizer().vocab_size
    assert talker_tokenizer().token_id("<|im_end|>") != tokenizer().token_id("<|role_end|>")


def test_truncation_and_padding_of_a_file_are_disabled(tmp_path: Path) -> None:
    data = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    text = "Hello, how are you today?"
    assert len(Tokenizer.from_file(str(file)).encode(text).ids) == 20, "three tokens and padding"
    assert TextTokenizer.from_file(file).encode(text) == CASES[text]["ids"]


def word_tokenizer() -> Tokenizer:
    """A tokenizer of whole words that marks spaces, drops the first one, and adds a begin token when asked to."""
    words = Tokenizer(WordLevel({"[BEGIN]": 0, "▁one": 1, "▁two": 2, "▁three": 3}, unk_token="[BEGIN]"))
    words.pre_tokenizer, words.decoder = Metaspace(), decoders.Metaspace()
    words.post_processor = TemplateProcessing(single="[BEGIN] $0", special_tokens=[("[BEGIN]", 0)])
    return words


def test_spaces_between_words_are_kept_where_decoding_drops_the_first() -> None:
    detokenizer = Detokenizer(TextTokenizer(word_tokenizer()))
    assert [detokenizer.push(token) for token in (1, 2, 3)] == ["one", " two", " three"]


def test_no_special_token_is_added_to_a_text() -> None:
    assert word_tokenizer().encode("one two").ids == [0, 1, 2]
    tokenizer = TextTokenizer(word_tokenizer())
    for count in (1, 1000):  # by one thread, and by several
        for encode in (tokenizer.encode, tokenizer.encode_plain):
            assert encode(" ".join(["one two"] * count)) == [1, 2] * count


def test_invalid_files_and_unknown_tokens_are_named(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        TextTokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(IntegrityError, match="not a tokenizer file"):
        TextTokenizer.from_file(tmp_path)
    with pytest.raises(IntegrityError, match="<none>"):
        tokenizer().token_id("<none>")


def test_a_cached_encoder_gives_the_ids_of_the_goldens_and_tokenizes_a_long_text_once() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [tokenizer().encode_plain(text) for text in texts]

    encoder = CachedEncoder(encode, 10_000, None)
    (short, case), *_ = CASES.items()
    long = "The quick brown fox. 你好，世界！ " * 20
    assert len(short) < 256 <= len(long)
    for _ in range(3):
        assert [*encoder(short)] == case["ids"], "not special in this text, and never kept"
        assert [*encoder(long)] == tokenizer().encode(long)
    assert asked == [short, long, short, short]
    encoder.clear()
    assert [*encoder(long)] == tokenizer().encode(long) and asked[-1] == long and len(asked) == 5


def test_a_cached_encoder_keeps_the_texts_that_were_used_last_within_its_limit() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(text[0] for text in texts)
        return [[ord(each) for each in text] for text in texts]

    encoder = CachedEncoder(encode, 900, None)
    for letter in "abca" + "d" + "acb" + "b":  # three of 300 characters fit; `b` goes for `d`, `d` for `b`
        assert [*encoder(letter * 300)] == [ord(letter)] * 300
    assert "".join(asked) == "abcdb"
    whole, larger, shortest = "e" * 900, "f" * 901, "g" * 256
    for text in (whole, whole, larger, larger, shortest, shortest, whole):
        encoder(text)
    assert "".join(asked) == "abcdb" + "e" + "ff" + "g" + "e", "`g` beside `e` exceeds the limit"
    asked.clear()
    nothing = CachedEncoder(encode, 0, None)
    nothing("h" * 300), nothing("h" * 300)
    assert asked == ["h", "h"]


def test_a_block_that_two_threads_tokenize_at_once_is_kept_once() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(text[0] for text in texts)
        if len(asked) == 1:
            encoder(texts[0])  # by another thread meanwhile
        return [[ord(each) for each in text] for text in texts]

    encoder = CachedEncoder(encode, 900, None)
    for letter in "abcabc":  # three of 300 characters fit
        assert [*encoder(letter * 300)] == [ord(letter)] * 300
    assert "".join(asked) == "aabc"


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    """Such as the event loop and the thinker's thread, beside a long prompt."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    has_begun, has_ended, num_steps = threading.Event(), threading.Event(), 0

    def encode() -> None:
        has_begun.set()
        tokenizer().encode_plain(text)
        has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    has_begun.wait()
    while not has_ended.wait(1e-3):
        num_steps += 1
    thread.join()
    assert num_steps > 5, "with the lock kept, this thread would next run at the end"
