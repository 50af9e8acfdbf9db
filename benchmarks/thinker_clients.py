"""Clients of a thinker loop in one process: 32 ragged requests, arrival patterns, and the answer of each request.

It uses a server's engines, worker, scheduler and loop; the worker also records the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.parameters import ThinkerParameters
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import FailedItem, Item, TokenItem
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.scheduler import ChunkShape, ThinkerScheduler
from mingc.runtime.thinker.worker import GraphKey, StepOptions, ThinkerWorker

NUM_REQUESTS = 32
CONTEXT_TOKENS = 256
# Tokens: more than there are chunks of prompts, so that the first answers still run when the last prompts arrive.
_SHORTEST_ANSWER = 48
_ANSWER_TIMEOUT_S = 300
# Most prompts are one chunk, so that all requests are decoded together in the end.
_PROMPT_TOKENS = (5, 64, 1, 23, 130, 40, 12, 63)
_RULES: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request."""

    prompt: ThinkerPrompt
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to one request.

    Attributes:
        logits: (n, V) float32; the last rows may belong to a discarded token.
    """

    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalPattern:
    """When requests arrive and leave.

    Attributes:
        arrivals: (tokens received by all clients before it comes, request), in order of the first.
        max_running: requests running at once; later ones reuse slots and pages of earlier ones.
        patience: tokens after which every third client disconnects; None: no client does.
    """

    name: str
    arrivals: tuple[tuple[int, int], ...]
    max_running: int = NUM_REQUESTS
    patience: int | None = None


def arrival_patterns(count: int = NUM_REQUESTS, last_start: int = 600) -> list[ArrivalPattern]:
    """Three orders of simultaneous arrival, a small batch limit, two staggered patterns, early disconnects.

    Random starts come before `last_start` tokens have been received.
    """
    random = np.random.default_rng(3)
    backwards = range(count - 1, -1, -1)
    shuffled: list[int] = random.permutation(count).tolist()
    moments: list[int] = sorted(random.integers(0, last_start, count).tolist())

    def at_once(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple((0, request) for request in order)

    return [
        ArrivalPattern(name="given order", arrivals=at_once(range(count))),
        ArrivalPattern(name="reversed", arrivals=at_once(backwards)),
        ArrivalPattern(name="shuffled", arrivals=at_once(shuffled)),
        ArrivalPattern(name="five at a time", arrivals=at_once(shuffled), max_running=5),
        ArrivalPattern(
            name="one every seventh token", arrivals=tuple((7 * i, r) for i, r in enumerate(backwards))
        ),
        ArrivalPattern(name="random starts", arrivals=tuple(zip(moments, shuffled, strict=True))),
        ArrivalPattern(
            name="a third leaves", arrivals=tuple(zip(moments, backwards, strict=True)), patience=11
        ),
    ]


def make_requests(
    parameters: ThinkerParameters, count: int = NUM_REQUESTS, shortest_answer: int = _SHORTEST_ANSWER
) -> list[Request]:
    """`count` requests: prompt length, media, sampling rules, seed and answer length all vary."""
    return [_request(parameters, index, shortest_answer) for index in range(count)]


def _request(parameters: ThinkerParameters, index: int, shortest_answer: int) -> Request:
    random = np.random.default_rng(index)
    count = _PROMPT_TOKENS[index % len(_PROMPT_TOKENS)] + index // len(_PROMPT_TOKENS)
    has_media = index % 4 == 1
    rows = np.arange(count // 4, count // 2) if has_media else np.zeros(0, np.int64)
    kind = np.zeros(count, np.int64)
    kind[rows] = 1 + index // 4 % 2
    generator = torch.Generator().manual_seed(index)
    return Request(
        prompt=ThinkerPrompt(
            input_ids=random.integers(0, parameters.image_patch_token, count),
            positions=np.arange(count) // np.array([[1], [1 + has_media], [1 + has_media]]),
            rope_delta=-3 * has_media,
            embed_kind=kind,
            media_embeds=torch.randn(len(rows), parameters.hidden_size, generator=generator)
            if has_media
            else None,
        ),
        sampling=SamplingParams(
            max_tokens=shortest_answer + 3 * (index % 9),
            banned_tokens=tuple(parameters.stop_token_ids),  # every answer has its full length
            **_RULES[index % len(_RULES)],  # type: ignore[arg-type]
        ),
        seed=100 + index,
    )


def thinker_parameters(artifact: Artifact) -> ThinkerParameters:
    return artifact.manifest.parameters_of("thinker", ThinkerParameters)


class TracingWorker(ThinkerWorker):
    """A worker that records the logits of every step by the first page of each request.

    Attributes:
        largest_batch: largest decode batch so far.
    """

    def __init__(self, artifact: Artifact, device: torch.device, *, is_static: bool | None = None) -> None:
        parameters = thinker_parameters(artifact)
        pages = CONTEXT_TOKENS // parameters.page_size
        super().__init__(
            load_stage(artifact, "thinker", device),
            parameters,
            num_pages=1 + NUM_REQUESTS * pages,
            device=device,
            options=StepOptions(is_static=is_static),
        )
        self.largest_batch = 0
        self._traces: dict[int, list[Tensor]] = {}
        self._prefilled: list[int] = []  # first pages of the prompts in the chunk under way

    def trace(self, page: int) -> list[Tensor]:
        """Logits (1, V) of each token of the request that started last in `page`."""
        return self._traces[page]

    def _run(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = super()._run(key, inputs)
        if key.kind == "chunk":  # what an earlier chunk gave is not kept: no token is chosen from it
            if inputs:  # of its first part
                self._prefilled = inputs["page_table"][:, 0].tolist()
            for page, row in zip(self._prefilled, outputs[0], strict=False):  # rows come with its last part
                self._traces[page] = [row[None].clone()]
            return outputs
        if key.kind != "decode":  # a choice from the logits of a chunk or a decode step
            return outputs
        first_pages: list[int] = inputs["page_table"][:, 0].tolist()
        self.largest_batch = max(self.largest_batch, sum(page > 0 for page in first_pages))
        for row, page in enumerate(first_pages):
            if page:  # page 0 belongs to padding
                self._traces[page].append(outputs[0][row : row + 1].clone())
        return outputs


@contextmanager
def only_bucket(worker: ThinkerWorker, size: int) -> Iterator[None]:
    """Run every decode step inside the block in the bucket `size`."""
    graph = worker._decode

    def bucket(dim: str, count: int) -> int:
        return size if dim == "B" else Graph.bucket(graph, dim, count)

    graph.bucket = bucket  # type: ignore[method-assign]
    try:
        yield
    finally:
        del graph.bucket


@dataclass(slots=True)
class _Client:
    """One running request."""

    job: int
    tokens: list[int] = field(default_factory=list)
    trace: list[Tensor] = field(default_factory=list)


class _Visit:
    """Runs one arrival pattern on one loop. Arrivals and departures depend on received tokens, not on the clock."""

    def __init__(
        self,
        worker: TracingWorker,
        parameters: ThinkerParameters,
        requests: Sequence[Request],
        pattern: ArrivalPattern,
    ) -> None:
        self._worker = worker
        self._requests = requests
        self._gathering = pattern
        self._coming = list(pattern.arrivals)
        self._clients: dict[int, _Client] = {}
        self._num_received = self._num_ended = 0
        self._errors: list[Exception] = []
        self._is_over = threading.Event()
        self._pool = PagePool(worker.num_pages, worker.page_size)
        self._loop = ThinkerLoop(
            worker,
            ThinkerScheduler(
                self._pool,
                max_running=pattern.max_running,
                chunk=ChunkShape(max_rows=worker.max_chunk),  # a prompt's alone: always cut the same
                prefill_policy=ChunkedPrefillPolicy(num_layer_groups=worker.num_layer_groups),
                max_context=CONTEXT_TOKENS,
                max_waiting=NUM_REQUESTS,
            ),
            stop_ids=parameters.stop_token_ids,
            vocab_size=parameters.vocab_size,
        )

    def answers(self) -> dict[int, Answer]:
        self._submit_due()
        self._loop.start()
        try:
            if not self._is_over.wait(_ANSWER_TIMEOUT_S):
                raise RuntimeError(f"{self._gathering.name}: no end after {self._num_received} tokens")
        finally:
            self._loop.stop()
        if self._errors:
            raise RuntimeError(f"{self._gathering.name}: {self._errors[0]}") from self._errors[0]
        self._loop.scheduler.check()
        return {
            request: Answer(tokens=client.tokens, logits=torch.cat(client.trace).cpu())
            for request, client in self._clients.items()
        }

    def _submit_due(self) -> None:
        """Submit the requests that are due; if all others have ended, the next one."""
        while self._coming and (
            self._coming[0][0] <= self._num_received or self._num_ended == len(self._clients)
        ):
            _, index = self._coming.pop(0)
            request = self._requests[index]
            self._clients[index] = _Client(
                self._loop.submit(
                    request.prompt,
                    request.sampling,
                    request.seed,
                    lambda item, i=index: self._receive(i, item),
                )
            )

    def _receive(self, index: int, item: Item) -> None:
        """Callback on the loop's thread. Must not raise: the loop would go on with other requests."""
        client = self._clients[index]
        if isinstance(item, FailedItem):
            self._errors.append(item.error)
            self._is_over.set()
            return
        assert isinstance(item, TokenItem)
        if not client.trace:
            client.trace = self._worker.trace(self._pool.pages(client.job)[0])
        if item.token is not None:
            client.tokens.append(item.token)
            self._num_received += 1
        patience = self._gathering.patience
        leaves = patience is not None and index % 3 == 0 and len(client.tokens) == patience
        if leaves and item.finish is None:
            self._loop.cancel(client.job)
        if leaves or item.finish is not None:
            self._num_ended += 1
        try:
            self._submit_due()
        except Exception as error:
            self._errors.append(error)
            self._is_over.set()
        if not self._coming and self._num_ended == len(self._clients):
            self._is_over.set()


def answer_together(
    worker: TracingWorker, parameters: ThinkerParameters, requests: Sequence[Request], pattern: ArrivalPattern
) -> dict[int, Answer]:
    """What each request of `pattern` gets.

    Raises: RuntimeError when one fails, or all together take too long.
    """
    return _Visit(worker, parameters, requests, pattern).answers()


def answer_alone(
    worker: TracingWorker, parameters: ThinkerParameters, requests: Sequence[Request]
) -> dict[int, Answer]:
    """What each request gets when it runs alone."""
    answers: dict[int, Answer] = {}
    for index in range(len(requests)):
        answers |= answer_together(
            worker, parameters, requests, ArrivalPattern(name="alone", arrivals=((0, index),))
        )
    return answers
