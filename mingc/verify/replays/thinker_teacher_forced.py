"""A thinker in half precision against thinker.safetensors, after the experts that were recorded (`followed_stage`).

In whole runs of such an artifact some rows go to other experts than in float32, and nothing behind them can be
compared. Here runs return to the record where that happens: every layer of every token is, and so are the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.parameters import ThinkerParameters
from mingc.numerics.tolerances import GRAPH_TOLERANCES
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.step import DecodeStep
from mingc.runtime.thinker.worker import ThinkerWorker
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.teacher_forced_stage import RoutingObserver, followed_stage
from mingc.verify.replays.thinker_batches import Request
from mingc.verify.replays.thinker_prompts import Prompt
from mingc.verify.replays.thinker_quantization import measure_quantization_error
from mingc.verify.scale import worst_scale
from mingc.verify.stages import to_numpy

Floats = NDArray[np.float32]

UNEVEN_CHUNK = 7  # tokens; divides neither pages nor buckets
_TOLERANCE = GRAPH_TOLERANCES["bfloat16"]  # of a layer's rows
_LEAST_KEPT = (
    0.9  # share of rows; of the tiny thinker's 2 in 100 are followed, of random ones of the release 1 in 40
)
_SHAKES = 64  # steps of one request that are tried for one of several; several layers must turn the same way
_HOW = "experts followed"
_QUANTIZED_LOGITS = 0.1  # what the head alone may take, as much as half precision
_QUANTIZED = "the record is of other weights than the quantized ones"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Record:
    """What followed runs of a prompt must give: `layers` (L, T, D), and logits where they are known.

    Attributes:
        last: (V,) behind its last token.
        every: (T, V) behind each token.
        how: what is followed.
    """

    layers: Floats
    last: Floats | None
    every: Floats | None
    how: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FollowedCase:
    """What is known of whole runs of a case.

    Attributes:
        excuse: why they may leave the record; empty when they may not.
        free: (V,) float32 behind the only prompt when it runs through the same graphs and nothing is followed, by
            the tokens of a chunk; none of several prompts.
    """

    excuse: str
    free: Mapping[int, Floats]


class FollowedThinker:
    """Runs one prompt at a time.

    Args:
        first: the first rank's share, and `others` those of the ranks behind it, with their devices.
        quantization_error: what quantization cost; None: the weights are not quantized. Quantized ones are held
            against their own whole run, and layer by layer against what is recorded.
        longest: tokens of a prompt and its continuation.
    """

    def __init__(
        self,
        first: LoadedStage,
        others: Sequence[tuple[LoadedStage, torch.device]],
        parameters: ThinkerParameters,
        *,
        quantization_error: QuantizationError | None,
        longest: int,
        device: torch.device,
    ) -> None:
        self._quantization_error = quantization_error
        num_pages = -(-longest // parameters.page_size)
        self._watch = RoutingObserver(_TOLERANCE)
        self._num_layers = parameters.num_layers
        # Last page first, so that rows in memory are not in token order.
        self._pages = np.arange(1, num_pages + 1)[::-1].copy()
        self._worker = ThinkerWorker(
            followed_stage(first, others, self._watch),
            parameters,
            num_pages=num_pages + 1,
            device=device,
            is_static=False,
        )

    def check(self, case: str, prompts: Sequence[Prompt], ledger: ComparisonLog) -> FollowedCase:
        """Compare all that the case records with followed runs; without recorded layers only look for ties."""
        recorded = ledger.references.get(f"{case}.layer_out")
        if recorded is None or len(prompts) > 1:
            excuse = _QUANTIZED if self._quantization_error is not None else self._find_ties(prompts)
            return FollowedCase(excuse=excuse, free={})
        (prompt,) = prompts
        layers = recorded[:, 0].astype(np.float32)
        self._watch.begin("off")
        whole = self._prefill(prompt, self._worker.max_chunk)[-1]
        own_layers = self._watch.layers
        free = {self._worker.max_chunk: whole, UNEVEN_CHUNK: self._prefill(prompt, UNEVEN_CHUNK)[-1]}
        if self._quantization_error is not None:
            self._watch.begin("lead", layers)
            led = self._prefill(prompt, self._worker.max_chunk)[-1]
            measure_quantization_error(case, self._watch.layers, layers, self._quantization_error, ledger)
            how = "after recorded layers"
            ledger.tensor(f"{case}.logits_last", led[None], how=how, tolerance=_QUANTIZED_LOGITS)
            own = _Record(layers=own_layers, last=whole, every=None, how="own experts followed")
            self._compare_runs(case, prompt, own, ledger)
            return FollowedCase(excuse=_QUANTIZED, free=free)
        last, every = (ledger.references.get(f"{case}.{name}") for name in ("logits_last", "logits"))
        record = _Record(
            layers=layers,
            last=None if last is None else last[0].astype(np.float32),
            every=None if every is None else every[0].astype(np.float32),
            how=_HOW,
        )
        num_followed, logits = self._compare_runs(case, prompt, record, ledger)
        found = []
        if num_followed:
            rows = layers.shape[0] * layers.shape[1]
            found.append(f"{num_followed} of {rows} rows go to other experts by rounding")
        if self._compare_greedy(case, prompt, logits, ledger):
            found.append("the answer comes to a tie of experts")
        return FollowedCase(excuse=", ".join(found), free=free)

    def _find_ties(self, prompts: Sequence[Prompt]) -> str:
        """What excuses runs of prompts without recorded layers; empty when roundings send no row elsewhere."""
        num_ties = 0
        for prompt in prompts:
            self._watch.begin("ties")
            self._prefill(prompt, self._worker.max_chunk)
            num_ties += self._watch.num_ties
        rows = self._num_layers * sum(len(prompt.input_ids) for prompt in prompts)
        return f"{num_ties} of {rows} rows score alike for other experts" if num_ties else ""

    def run_alone(self, request: Request) -> Floats:
        """Logits (n, V) behind each of a request's tokens, nothing followed."""
        self._watch.begin("off")
        self._prefill(request.beginning, self._worker.max_chunk)
        return np.stack([self._decode_token(request, place) for place in range(len(request.tokens))])

    def can_give(
        self, request: Request, done: int, logits: Floats, is_near: Callable[[Floats, Floats], bool]
    ) -> bool:
        """Whether roundings can lead to the `logits` (steps, V) behind the tokens of `request` after `done`."""
        self._watch.begin("off")
        self._prefill(request.beginning, self._worker.max_chunk)
        for place in range(done):
            self._decode_token(request, place)
        for place, wanted in enumerate(logits, start=done):
            self._watch.begin("off")
            is_there = is_near(self._decode_token(request, place), wanted)
            self._watch.begin("shake")
            for _ in range(_SHAKES):
                if is_there:
                    break
                is_there = is_near(self._decode_token(request, place), wanted)
            if not is_there:
                return False
        return True

    def _decode_token(self, request: Request, place: int) -> Floats:
        position = len(request.beginning.input_ids) + place
        return self._decode(int(request.tokens[place]), position, position + 1)

    def _prefill(self, prompt: Prompt, size: int) -> list[Floats]:
        """Logits (V,) of the last token of every chunk of at most `size`."""
        logits = []
        for step in prompt.chunks(size, self._pages):
            self._watch.next(int(step.starts[0]), len(step.input_ids))
            logits.append(to_numpy(self._worker.prefill(step))[0].astype(np.float32))
        return logits

    def _decode(self, token: int, position: int, length: int) -> Floats:
        """Logits (V,) behind `token`, the last of `length` tokens."""
        step = DecodeStep(
            input_ids=np.array([token]),
            positions=np.array([position]),
            lengths=np.array([length]),
            pages=self._pages[None],
        )
        self._watch.next(length - 1, 1)
        logits: Floats = to_numpy(self._worker.decode(step))[0].astype(np.float32)
        return logits

    def _decode_prompt(self, prompt: Prompt) -> list[Floats]:
        """As if every token of the prompt were an answer's."""
        return [
            self._decode(int(token), int(prompt.positions[0, index]), index + 1)
            for index, token in enumerate(prompt.input_ids)
        ]

    def _compare_runs(
        self, case: str, prompt: Prompt, record: _Record, ledger: ComparisonLog
    ) -> tuple[int, Floats]:
        """Followed runs of all kinds; the most rows of one that were followed, and the logits (V,) behind the last."""
        num_followed = 0
        for size, how in (
            (self._worker.max_chunk, ""),
            (UNEVEN_CHUNK, ", in uneven chunks"),
            (1, ", token by token"),
        ):
            self._watch.begin("follow", record.layers)
            logits = self._prefill(prompt, size)
            num_followed = max(num_followed, self._compare(case, record, logits, how, ledger))
        if prompt.embeds is None:
            self._watch.begin("follow", record.layers)
            logits = self._decode_prompt(prompt)
            num_followed = max(num_followed, self._compare(case, record, logits, ", by decode steps", ledger))
        return num_followed, logits[-1]

    def _compare(
        self, case: str, record: _Record, logits: list[Floats], how: str, ledger: ComparisonLog
    ) -> int:
        """The layers and logits of a run that was watched; returns how many rows were followed."""
        layers, how = record.layers, f"{record.how}{how}"
        followed, num_rows = self._watch.num_followed, layers.shape[0] * layers.shape[1]
        scale = np.abs(layers).max(axis=(1, 2), keepdims=True)
        ledger.tensor(
            f"{case}.layer_out",
            self._watch.layers / scale,
            reference=layers / scale,
            how=how,
            tolerance=_TOLERANCE,
        )
        ledger.share(
            f"{case}.layer_out ({how}: rows)",
            same=num_rows - followed,
            total=num_rows,
            minimum=_LEAST_KEPT,
            note="the others went to other experts by rounding",
        )
        scales = {
            f"{half} of layer {layer}": scale
            for layer, fit in sorted(self._watch.fits.items())
            for half, scale in fit.scales()
        }
        if scales:  # not every row was followed
            name, worst = worst_scale(scales)
            ledger.scale(f"{case}.layer_out", worst, how=f"{how}: scale of the {name}, the worst")
        if record.last is not None:
            ledger.tensor(f"{case}.logits_last", logits[-1], reference=record.last, how=how)
        if record.every is not None and len(logits) == len(record.every):
            ledger.tensor(f"{case}.logits", np.stack(logits), reference=record.every, how=how)
        return followed

    def _compare_greedy(self, case: str, prompt: Prompt, logits: Floats, ledger: ComparisonLog) -> int:
        """Decode the recorded answer behind a followed prompt, up to the first tie; returns the number of ties."""
        if f"{case}.greedy_ids" not in ledger:
            return 0
        ids = ledger.references[f"{case}.greedy_ids"][0]
        rows = [logits]
        for index, token in enumerate(ids[:-1]):
            # What an answer's tokens did is not recorded: a row that could go elsewhere may have.
            self._watch.begin("ties")
            length = len(prompt.input_ids) + index + 1
            found = self._decode(int(token), length - 1 + prompt.rope_delta, length)
            if self._watch.num_ties:
                break
            rows.append(found)
        reference = ledger.references.get(f"{case}.greedy_logits")
        if reference is not None:
            how = f"{_HOW}, {len(rows)} of {len(ids)} steps before a tie"
            ledger.tensor(
                f"{case}.greedy_logits", np.stack(rows)[None], reference=reference[:, : len(rows)], how=how
            )
        return self._watch.num_ties
