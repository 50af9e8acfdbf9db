"""The items of a conversation: inserted, deleted, cut and left out in any order, and what prompts have of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from preprocess_data import tokenizer

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaPart, Message, TextPart, TokensPart, ToolCall
from mingc.runtime.request import AudioDelta, TextDelta
from mingc.server.realtime.heard import Answer
from mingc.server.realtime.items import (
    AssistantMessage,
    AudioContent,
    Conversation,
    FunctionCall,
    FunctionOutput,
    ImageContent,
    Item,
    SystemMessage,
    TextContent,
    UserMessage,
    prompt_messages,
    turns_of,
)

TOKENIZER = tokenizer()
WORDS = "Well hello there my friend it is ten"
TOKENS = tuple(TOKENIZER.encode(WORDS))
MS = 100  # that a token is spoken for


def spoken(num_tokens: int = len(TOKENS), *, is_spoken: bool = True) -> Answer:
    """An answer of `num_tokens` tokens in one segment, which is complete."""
    answer = Answer(TOKENIZER, is_spoken=is_spoken)
    for token in TOKENS[:num_tokens]:
        answer.add_text(TextDelta(text=TOKENIZER.decode([token]), token=token))
    if is_spoken and num_tokens:
        patch = AudioDelta(
            samples=np.zeros(0, np.float32),
            is_segment_end=True,
            segment_text="said",
            text_end=len(answer.text),
        )
        answer.add_sound(24 * MS * num_tokens, patch)
    answer.finish()
    return answer


def said(num_tokens: int) -> str:
    return TOKENIZER.decode(TOKENS[:num_tokens])


def sound(num_bytes: int) -> MediaPart:
    return MediaPart(kind="audio", data=bytes(num_bytes), where="audio")


def text_of(message: Message) -> str:
    """What a message says, with media by their size and calls by their name."""
    found = ""
    for part in message.parts:
        match part:
            case TextPart(text=text):
                found += text
            case TokensPart(ids=ids):
                found += TOKENIZER.decode(ids)
            case MediaPart():
                found += f"<{part.size}>"
            case ToolCall(name=name):
                found += f"[{name}]"
    return found


@dataclass
class Entry:
    """An item of the model: plain data."""

    id: str
    kind: Literal["system", "user", "audio", "answer", "text", "history", "call", "output"]
    text: str = ""
    num_bytes: int = 0
    num_tokens: int = 0
    cut_ms: int | None = None
    is_left_out: bool = False

    @property
    def length_ms(self) -> int:
        return MS * self.num_tokens

    @property
    def said(self) -> str:
        if self.kind in ("answer", "text"):
            return said((self.length_ms if self.cut_ms is None else self.cut_ms) // MS)
        if self.kind == "audio" and self.num_bytes:
            return f"<{self.num_bytes}>"
        return f"[{self.text}]" if self.kind == "call" else self.text


ROLES = {"system": "system", "user": "user", "audio": "user", "output": "tool"}
MAX_ITEMS, MAX_BYTES = 10, 100
ITEMS = st.shared(st.integers(0, 50), key="item")


class AnyOrder(stateful.RuleBasedStateMachine):
    """A conversation beside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conversation = Conversation(max_items=MAX_ITEMS, max_media_bytes=MAX_BYTES)
        self.model: list[Entry] = []
        self.count = 0
        self.deleted: set[str] = set()

    def entry(self, place: int) -> Entry | None:
        """One of the items, or None for one that does not exist."""
        place %= len(self.model) + 1
        return self.model[place] if place < len(self.model) else None

    def new(self, kind: str, **fields: int | str) -> Entry:
        self.count += 1
        return Entry(f"id_{self.count}", kind, **fields)  # type: ignore[arg-type]

    def item(self, entry: Entry) -> Item:
        match entry.kind:
            case "system":
                return SystemMessage(id=entry.id, texts=(entry.text,))
            case "user":
                return UserMessage(id=entry.id, content=[TextContent(text=entry.text)])
            case "audio":
                media = sound(entry.num_bytes) if entry.num_bytes else None
                return UserMessage(
                    id=entry.id, content=[AudioContent(media=media, transcript=entry.text or None)]
                )
            case "answer" | "text":
                answer = spoken(entry.num_tokens, is_spoken=entry.kind == "answer")
                return AssistantMessage(id=entry.id, is_spoken=entry.kind == "answer", answer=answer)
            case "history":
                return AssistantMessage(id=entry.id, is_spoken=True, texts=(entry.text,))
            case "call":
                return FunctionCall(id=entry.id, name=entry.text, arguments="{}")
            case "output":
                return FunctionOutput(id=entry.id, call_id="call", output=entry.text)

    def added(self, index: int, entry: Entry) -> None:
        self.model.insert(index, entry)
        excess = sum(each.num_bytes for each in self.model) - MAX_BYTES
        for each in self.model:
            if excess > 0 and each is not entry:
                excess -= each.num_bytes
                each.num_bytes = 0

    @stateful.rule(
        kind=st.sampled_from(["system", "user", "audio", "history", "call", "output"]),
        text=st.sampled_from(["", "x", "yes"]),
        num_bytes=st.integers(0, 60),
        place=st.one_of(st.none(), st.just("root"), st.integers(0, 50)),
        taken=st.none() | st.integers(0, 50),
    )
    def insert(
        self, kind: str, text: str, num_bytes: int, place: int | str | None, taken: int | None
    ) -> None:
        """Of the client: `taken`: with the id of another item, or of one that was deleted."""
        entry = self.new(kind, text=text or ("f" if kind == "call" else ""))
        if kind == "audio":
            entry.num_bytes = num_bytes
        other = None if taken is None else self.entry(taken)
        if other is not None:
            entry.id = other.id
        elif taken is not None and self.deleted:
            entry.id = self.deleted.pop()
        before = self.entry(place) if isinstance(place, int) else None
        previous_id = "absent" if isinstance(place, int) and before is None else place
        if before is not None:
            previous_id = before.id
        code = None
        if other is not None:
            code = "item_create_duplicate_item_id"
        elif len(self.model) >= MAX_ITEMS:
            code = "too_many_items"
        elif previous_id == "absent":
            code = "item_create_invalid_previous_item_id"
        assert previous_id is None or isinstance(previous_id, str)
        if code is not None:
            with pytest.raises(RequestError) as found:
                self.conversation.insert(self.item(entry), previous_id)
            assert found.value.code == code
            return
        self.conversation.insert(self.item(entry), previous_id)
        index = 0 if place == "root" else len(self.model) if before is None else self.model.index(before) + 1
        self.added(index, entry)

    @stateful.rule(kind=st.sampled_from(["answer", "answer", "text"]), num_tokens=st.integers(0, len(TOKENS)))
    def answer(self, kind: str, num_tokens: int) -> None:
        entry = self.new(kind, num_tokens=num_tokens)
        self.conversation.append(self.item(entry))
        self.added(len(self.model), entry)

    @stateful.rule(num_bytes=st.integers(1, 150))
    def turn(self, num_bytes: int) -> None:
        entry = self.new("audio", num_bytes=num_bytes)
        self.conversation.append(self.item(entry))
        self.added(len(self.model), entry)

    @stateful.rule(place=st.integers(0, 50))
    def delete(self, place: int) -> None:
        if (entry := self.entry(place)) is None:
            with pytest.raises(RequestError) as found:
                self.conversation.delete("absent")
            assert (found.value.code, found.value.param) == ("item_delete_invalid_item_id", "item_id")
        else:
            assert self.conversation.delete(entry.id).id == entry.id
            self.model.remove(entry)
            self.deleted.add(entry.id)

    @stateful.rule(place=st.integers(0, 50))
    def retrieve(self, place: int) -> None:
        if (entry := self.entry(place)) is None:
            with pytest.raises(RequestError) as found:
                self.conversation.retrieve("absent")
            assert (found.value.code, found.value.param) == ("item_retrieve_invalid_item_id", "item_id")
            return
        wire = self.conversation.retrieve(entry.id).wire()
        assert wire["id"] == entry.id
        if entry.kind == "answer":
            assert wire["content"] == [{"type": "output_audio", "transcript": entry.said}]

    @stateful.rule(
        place=st.integers(0, 50), tokens=st.integers(0, 12), content_index=st.sampled_from([0, 0, 0, 1])
    )
    def truncate(self, place: int, tokens: int, content_index: int) -> None:
        entry = self.entry(place)
        code = None
        if entry is None:
            code = "item_truncate_invalid_item_id"
        elif entry.kind not in ("answer", "history") or content_index:
            code = "invalid_value"
        if code is not None:
            with pytest.raises(RequestError) as found:
                self.conversation.truncate(
                    "absent" if entry is None else entry.id, content_index, MS * tokens
                )
            assert found.value.code == code
            return
        assert entry is not None
        length_ms = entry.length_ms if entry.cut_ms is None else entry.cut_ms
        entry.cut_ms = min(MS * tokens, length_ms)
        assert self.conversation.truncate(entry.id, content_index, MS * tokens) == entry.cut_ms

    @stateful.rule(count=st.integers(0, 3))
    def leave_out(self, count: int) -> None:
        self.conversation.leave_out(self.conversation.items[:count])
        for entry in self.model[:count]:
            entry.is_left_out, entry.num_bytes = True, 0

    @stateful.invariant()
    def is_like_the_list(self) -> None:
        conversation = self.conversation
        assert [item.id for item in conversation.items] == [entry.id for entry in self.model]
        previous = None
        for item in conversation.items:
            assert conversation.find(item.id) is item and conversation.previous_id(item) == previous
            previous = item.id
        assert not any(map(conversation.find, self.deleted))
        assert conversation.num_media_bytes == sum(entry.num_bytes for entry in self.model)

    @stateful.invariant()
    def prompts_have_it(self) -> None:
        expected: list[tuple[str, str]] = []
        for entry in self.model:
            is_absent = entry.kind in ("audio", "answer", "text", "history") and not entry.said
            if entry.is_left_out or is_absent:
                continue
            role = ROLES.get(entry.kind, "assistant")
            if entry.kind == "call" and expected and expected[-1][0] == "assistant":
                expected[-1] = (role, expected[-1][1] + entry.said)
            else:
                expected.append((role, entry.said))
        turns = turns_of(self.conversation.items)
        assert [(turn.message.role, text_of(turn.message)) for turn in turns] == expected
        items = [item for turn in turns for item in turn.items]
        assert items == [item for item in self.conversation.items if item in items]


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def user(text: str) -> UserMessage:
    return UserMessage(content=[TextContent(text=text)])


def system(text: str) -> SystemMessage:
    return SystemMessage(texts=(text,))


def history(text: str) -> AssistantMessage:
    return AssistantMessage(is_spoken=False, texts=(text,))


@pytest.mark.parametrize(
    ("items", "instructions", "request_", "expected"),
    [
        # The greeting of a client: nobody has said anything.
        ([], "", None, [("user", "")]),
        ([], "Be short.", None, [("system", "Be short."), ("user", "")]),
        ([], "Greet.", "Greet.", [("system", "Greet."), ("user", "Greet.")]),
        ([system("s")], "", "Greet.", [("system", "s"), ("user", "Greet.")]),
        ([user("a")], "Be short.", None, [("system", "Be short."), ("user", "a")]),
        ([user("a"), user("b")], "", None, [("user", "a"), ("user", "b")]),
        # After an answer it is the user's turn.
        ([user("a"), history("b")], "", None, [("user", "a"), ("assistant", "b"), ("user", "")]),
        ([user("a"), history("b")], "", "Go on.", [("user", "a"), ("assistant", "b"), ("user", "Go on.")]),
        ([user("a"), history("b"), user("c")], "", "x", [("user", "a"), ("assistant", "b"), ("user", "c")]),
        # A later system item stands at its place.
        (
            [user("a"), history("b"), system("s"), user("c")],
            "Be short.",
            None,
            [("system", "Be short."), ("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "c")],
        ),
        (
            [
                user("a"),
                history("b"),
                FunctionCall(name="f"),
                FunctionCall(name="g"),
                FunctionOutput(call_id="1", output="1"),
                FunctionOutput(call_id="2"),
            ],
            "",
            None,
            [("user", "a"), ("assistant", "b[f][g]"), ("tool", "1"), ("tool", "")],
        ),
        ([user("a"), history("b"), system("s")], "", None, [("user", "a"), ("assistant", "b"), ("system", "s")]),
        ([user("a"), history("")], "", None, [("user", "a")]),
        ([user("a"), FunctionCall(name="f")], "", None, [("user", "a"), ("assistant", "[f]"), ("user", "")]),
        # A call that was not completed, and an answer of which nothing was heard, are not there.
        ([user("a"), FunctionCall(name="f", status="incomplete")], "", None, [("user", "a")]),
        ([user("a"), AssistantMessage(is_spoken=True, answer=spoken(0))], "", None, [("user", "a")]),
        (
            [
                UserMessage(
                    content=[
                        TextContent(text="See "),
                        ImageContent(media=sound(7)),
                        TextContent(text=" hear "),
                        AudioContent(media=sound(3), transcript="x"),
                    ]
                )
            ],
            "",
            None,
            [("user", "See <7> hear <3>")],
        ),
    ],
)  # fmt: skip
def test_prompts_of_conversations(
    items: list[Item], instructions: str, request_: str | None, expected: list[tuple[str, str]]
) -> None:
    messages = prompt_messages(turns_of(items), instructions, request_)
    assert [(message.role, text_of(message)) for message in messages] == expected


def test_a_prompt_has_the_ids_of_an_answer_and_not_its_text() -> None:
    item = AssistantMessage(is_spoken=True, answer=spoken())
    (turn,) = turns_of([item])
    assert turn.message.parts == (TokensPart(ids=TOKENS),)
    conversation = Conversation()
    conversation.append(item)
    assert conversation.truncate(item.id, 0, 3 * MS) == 3 * MS
    assert turns_of(conversation.items)[0].message.parts == (TokensPart(ids=TOKENS[:3]),)
    assert item.transcript == said(3)


def test_an_answer_is_shown_when_its_item_is_done() -> None:
    """A spoken answer ends in a part of sound, also if it is empty: a client waits for it."""
    item = AssistantMessage(is_spoken=True, answer=spoken(0), status="in_progress")
    assert item.wire()["content"] == []
    item.status = "incomplete"
    assert item.wire()["content"] == [{"type": "output_audio", "transcript": ""}]
    text = AssistantMessage(is_spoken=False, answer=spoken(2, is_spoken=False))
    assert text.wire()["content"] == [{"type": "output_text", "text": said(2)}]


def test_a_transcript_takes_the_place_of_sound_that_was_dropped() -> None:
    conversation = Conversation(max_media_bytes=100)
    first = UserMessage(content=[AudioContent(media=sound(80))])
    conversation.append(first)
    content = first.content[0]
    assert isinstance(content, AudioContent)
    content.transcript = "hello"
    conversation.append(UserMessage(content=[AudioContent(media=sound(90))]))
    assert [text_of(turn.message) for turn in turns_of(conversation.items)] == ["hello", "<90>"]


@pytest.mark.parametrize(
    ("sizes", "newest", "left"),
    [
        ([50, 50, 10], 2, [0, 50, 10]),
        ([50, 50], 1, [50, 50]),
        ([10, 10, 101], 2, [0, 0, 101]),
        ([60, 50, 50], 2, [0, 50, 50]),
        ([10, 95, 10], 1, [0, 95, 0]),
    ],
)
def test_media_are_dropped_until_they_fit(sizes: list[int], newest: int, left: list[int]) -> None:
    """Decoded media replace encoded ones, and may be larger."""
    conversation = Conversation(max_media_bytes=100)
    items = [UserMessage(content=[ImageContent(media=sound(1))]) for _ in sizes]
    for item, size in zip(items, sizes, strict=True):
        conversation.append(item)
        for part in item.media:
            part.media = sound(size)
    conversation.limit_media(items[newest])
    assert [item.num_media_bytes for item in items] == left
