"""The running chats of the thinker loop, and the inputs of steps, which are built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.errors import WorkerError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.request import FinishReason, Recorder, TokenLogprobs
from mingc.runtime.request_stream import HiddenRowsItem, Item, TokenItem
from mingc.runtime.thinker.device_sampler import sampling_columns
from mingc.runtime.thinker.logit_edits import SampleOptions, logit_edits, needs_edits
from mingc.runtime.thinker.sampler import SamplerRow, uniform
from mingc.runtime.thinker.scheduler import PromptSlice
from mingc.runtime.thinker.step import DecodeStep, Ints, PrefillStep, chunk_embeds
from mingc.runtime.thinker.token_matcher import MaskWords, TokenMatcher

Masks = Sequence[MaskWords | None]  # of each chat, the tokens that may come next; None: all


@dataclass(slots=True, eq=False)
class RunningChat:
    """Host state of one chat. `prefilled` and `reused` change when a chunk takes some of its prompt.

    A preempted chat keeps its answer, whose tokens are prefilled again with its prompt.
    """

    prompt: ThinkerPrompt
    max_tokens: int
    row: SamplerRow
    emit: Callable[[Item], None]
    recorder: Recorder | None
    keys: (
        Sequence[bytes] | None
    )  # keys of the prompt's full pages; None: it takes no part in the prefix cache
    matcher: TokenMatcher | None = None
    answer: list[int] = field(default_factory=list)
    context: ThinkerPrompt = field(init=False)  # what is prefilled: the prompt, then an answer begun before
    begun_at: float | None = None  # start of the prefill (`time.perf_counter`)
    pending: int = 0  # tokens of the answer that are launched on the device and not yet known to the host
    prefilled: int = 0  # tokens of `context` in chunks that were started, including reused tokens
    reused: int = 0  # prompt tokens that were not computed, because their pages were cached
    hidden: list[tuple[AsyncHostCopy, slice]] = field(
        default_factory=list
    )  # its part of copies of hidden rows

    def __post_init__(self) -> None:
        self.context = self.prompt

    def begin_again(self) -> None:
        """Drop what was prefilled, after a preemption."""
        self.prefilled = 0
        if not self.answer:
            self.reused = 0
        if not self.pending:  # otherwise its prompt is complete, and its answer is about to be collected
            self.hidden.clear()

    def begin_prefill(self) -> None:
        """Fix what is prefilled; all tokens of the answer must be known."""
        assert not self.pending, "a step before the preemption was not collected"
        if self.answer:
            self.context = self.prompt.followed_by(self.answer)

    def emit_token(
        self, token: int | None, finish: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> None:
        self.emit(
            TokenItem(
                token=token,
                finish=finish,
                reused_tokens=self.reused,
                begun_at=self.begun_at,
                logprobs=logprobs,
            )
        )

    def hidden_rows(self) -> HiddenRowsItem:
        """The answer to a prompt with `queries`, after its last chunk. Waits for the device."""
        rows = torch.cat([copy.wait()[0][:, part] for copy, part in self.hidden], dim=1)
        if not rows.isfinite().all():
            raise WorkerError("the model's hidden rows are not finite", where="thinker")
        residual, delta = rows
        return HiddenRowsItem(
            residual=residual, delta=delta, reused_tokens=self.reused, begun_at=self.begun_at
        )

    def queries_in(self, prompt: PromptSlice) -> Ints:
        """The query rows among these tokens of the prompt, counted from the first of them."""
        first, end = self.prompt.queries or (0, 0)
        return np.arange(max(first, prompt.start), min(end, prompt.start + prompt.count)) - prompt.start

    def logprobs(self, values: NDArray[np.float32] | None) -> TokenLogprobs | None:
        """What the request asked for of `values` (1 + 2 m,), see `top_logprobs`."""
        count = self.row.params.num_logprobs
        if values is None or count is None:
            return None
        top, ids = values[1:].reshape(2, -1)[:, :count]
        return TokenLogprobs(
            logprob=float(values[0]), top=tuple(zip(ids.astype(int).tolist(), top.tolist(), strict=True))
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, including pending tokens."""
        return len(self.prompt.input_ids) + len(self.answer) + self.pending

    @property
    def is_launchable(self) -> bool:
        """Whether to launch a further token, as far as the host knows."""
        return len(self.answer) + self.pending < self.max_tokens

    def take_slice(self, prompt: PromptSlice) -> Ints:
        """Record that a chunk has these tokens of the prompt. Returns the reused tokens before them."""
        skipped = self.context.input_ids[self.prefilled : prompt.start]
        self.prefilled = prompt.start + prompt.count
        assert prompt.is_end == (self.prefilled == self.context.num_tokens), "the scheduler counts otherwise"
        if not self.answer:
            self.reused += len(skipped)
        return skipped


def prefill_step(
    chats: Sequence[RunningChat], slices: Sequence[PromptSlice], pages: Sequence[Ints], slots: Sequence[int]
) -> PrefillStep:
    """Inputs of a new chunk: the tokens of its prompts, concatenated. Updates `prefilled` and `reused` of `chats`.

    `pages` has the pages of each prompt up to the end of its slice.
    """
    ranges = [slice(each.start, each.start + each.count) for each in slices]
    both = [(chat.context, where) for chat, where in zip(chats, ranges, strict=True)]
    skipped = [chat.take_slice(each) for chat, each in zip(chats, slices, strict=True)]
    is_any_skipped = any(map(len, skipped))
    return PrefillStep(
        input_ids=np.concatenate([prompt.input_ids[where] for prompt, where in both]),
        positions=np.concatenate([prompt.positions[:, where] for prompt, where in both], axis=1),
        embed_kind=np.concatenate([prompt.embed_kind[where] for prompt, where in both]),
        embeds=chunk_embeds(both),
        counts=np.array([each.count for each in slices], np.int64),
        starts=np.array([each.start for each in slices], np.int64),
        pages=_page_table(pages),
        slots=np.array(slots, np.int64),
        skipped_ids=np.concatenate(skipped) if is_any_skipped else None,
        skipped_counts=np.array([len(each) for each in skipped], np.int64) if is_any_skipped else None,
    )


def decode_step(
    chats: Sequence[RunningChat], pages: Sequence[Ints], slots: Sequence[int] | None
) -> DecodeStep:
    """Inputs of the next token of each chat; `slots` is None if the host samples."""
    lengths = np.array([each.num_tokens for each in chats])
    return DecodeStep(
        input_ids=np.array([-1 if each.pending else each.answer[-1] for each in chats]),
        positions=lengths - 1 + np.array([each.prompt.rope_delta for each in chats]),
        lengths=lengths,
        pages=_page_table(pages),
        slots=None if slots is None else np.array(slots),
        sampling=None if slots is None else sampling_rows(chats, [None] * len(chats)),
    )


def sampling_rows(chats: Sequence[RunningChat], masks: Masks) -> NDArray[np.float64]:
    """Sampling parameters (n, NUM_COLUMNS) of each chat's next token; a mask's edits include the bans."""
    return np.array(
        [
            sampling_columns(
                each.row.params,
                uniform(each.row.seed, each.row.step + each.pending),
                each.row.banned(each.pending) if mask is None else (),
                is_edited=needs_edits(each.row.params, mask),
            )
            for each, mask in zip(chats, masks, strict=True)
        ]
    )


def sample_options(chats: Sequence[RunningChat], masks: Masks, *, is_first: bool) -> SampleOptions:
    """Options of each chat's next token. `is_first`: the answers begin, or go on after a preemption."""
    asking = [row for row, chat in enumerate(chats) if chat.row.params.num_logprobs is not None]
    edited = [row for row, chat in enumerate(chats) if needs_edits(chat.row.params, masks[row])]
    rows = [chats[row] for row in edited]
    return SampleOptions(
        with_logits=any(chat.recorder is not None for chat in chats),
        logprob_rows=np.array(asking) if asking else None,
        edited_rows=np.array(edited) if edited else None,
        edits=logit_edits(
            [chat.row.params for chat in rows],
            [chat.row.banned(chat.pending) for chat in rows],
            [masks[row] for row in edited],
        )
        if edited
        else None,
        answers=tuple(np.array(chat.answer, np.int64) for chat in rows) if edited and is_first else None,
    )


def _page_table(pages: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Pages of each request as rows (n, P), padded with 0."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int64)
    for row, owned in enumerate(pages):
        table[row, : len(owned)] = owned
    return table
