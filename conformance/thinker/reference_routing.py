"""Replay of a low-precision thinker that follows the reference's routing (`observe_stage`).

A free-running low-precision thinker routes some rows to other experts than float32; values computed from these rows
cannot be compared. Here they resume from the reference, so that every layer of every token and the logits can be
compared. Steps are repeated with perturbed inputs, and prompts are run as decode steps. No loop does that, so the steps
are built here and run by a server's worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.reference_log import ReferenceLog
from conformance.sublayer_fit import worst_scale
from conformance.thinker.layer_quantization import check_layer_quantization
from conformance.thinker.routing_observer import RoutingObserver, observe_stage
from conformance.thinker.runner import Request
from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.parameters import ThinkerParameters
from mingc.numerics.tolerances import GRAPH_TOLERANCES
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, chunk_embeds
from mingc.runtime.thinker.step_options import StepOptions
from mingc.runtime.thinker.worker import ThinkerWorker
from mingc.verify.engine_run import to_numpy

Floats = NDArray[np.float32]

UNEVEN_CHUNK = 7  # tokens; divides neither pages nor buckets
_TOLERANCE = GRAPH_TOLERANCES["bfloat16"]  # of a layer's rows
# Fraction of rows that must keep their experts: 2 in 100 rows of the tiny thinker are rerouted, 1 in 40 rows of the
# released dims with random weights.
_MIN_KEPT = 0.9
_MAX_PERTURBED_STEPS = 64  # perturbed steps tried per request: several layers must be rerouted the same way
_HOW = "reference routing"
_QUANTIZED_LOGITS = 0.1  # tolerance of the head alone, as for low precision
_QUANTIZED = "the reference comes from unquantized weights"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reference:
    """Expected results of runs of a prompt: layer outputs `layers` (L, T, D), and logits where known.

    Attributes:
        last: (V,) of the last token.
        every: (T, V) of each token.
        how: source of the routing, for names of comparisons.
    """

    layers: Floats
    last: Floats | None
    every: Floats | None
    how: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingResult:
    """Result of the reference-routed runs of a case, for its free-running runs.

    Attributes:
        waiver: why free-running runs may differ from the reference; empty when they may not.
        free_running: logits (V,) float32 of the last token without reference routing, by chunk size; empty for cases
            of several prompts.
    """

    waiver: str
    free_running: Mapping[int, Floats]


class ReferenceRoutedThinker:
    """The thinker of all ranks in one process, with observed routing; runs one prompt at a time.

    Args:
        first: the stage of rank 0.
        others: the stages of the ranks above it, with their devices.
        quantization_error: of the weights; None: they are not quantized. Results of quantized weights are compared
            with their own complete run, and layer by layer with the recorded values.
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
        self._observer = RoutingObserver(_TOLERANCE)
        self._num_layers = parameters.num_layers
        # Last page first, so that memory order differs from token order.
        self._pages = np.arange(1, num_pages + 1)[::-1].copy()
        self._worker = ThinkerWorker(
            observe_stage(first, others, self._observer),
            parameters,
            num_pages=num_pages + 1,
            device=device,
            options=StepOptions(is_static=False),
        )

    def check(self, case: str, prompts: Sequence[ThinkerPrompt], log: ReferenceLog) -> RoutingResult:
        """Compare reference-routed runs of a case with its references; without recorded layers only count ties."""
        recorded = log.references.get(f"{case}.layer_out")
        if recorded is None or len(prompts) > 1:
            waiver = _QUANTIZED if self._quantization_error is not None else self._find_ties(prompts)
            return RoutingResult(waiver=waiver, free_running={})
        (prompt,) = prompts
        layers = recorded[:, 0].astype(np.float32)
        self._observer.begin("off")
        whole = self._prefill(prompt, self._worker.max_chunk)[-1]
        free_layers = self._observer.layers
        free_running = {self._worker.max_chunk: whole, UNEVEN_CHUNK: self._prefill(prompt, UNEVEN_CHUNK)[-1]}
        if self._quantization_error is not None:
            self._observer.begin("teacher_force", layers)
            forced = self._prefill(prompt, self._worker.max_chunk)[-1]
            check_layer_quantization(case, self._observer.layers, layers, self._quantization_error, log)
            how = "teacher-forced layers"
            log.tensor(f"{case}.logits_last", forced[None], how=how, tolerance=_QUANTIZED_LOGITS)
            own = _Reference(layers=free_layers, last=whole, every=None, how="own routing")
            self._compare_runs(case, prompt, own, log)
            return RoutingResult(waiver=_QUANTIZED, free_running=free_running)
        last, every = (log.references.get(f"{case}.{name}") for name in ("logits_last", "logits"))
        reference = _Reference(
            layers=layers,
            last=None if last is None else last[0].astype(np.float32),
            every=None if every is None else every[0].astype(np.float32),
            how=_HOW,
        )
        num_rerouted, logits = self._compare_runs(case, prompt, reference, log)
        found = []
        if num_rerouted:
            rows = layers.shape[0] * layers.shape[1]
            found.append(f"rounding routes {num_rerouted} of {rows} rows to other experts")
        if self._compare_greedy(case, prompt, logits, log):
            found.append("the continuation reaches a tie between experts")
        return RoutingResult(waiver=", ".join(found), free_running=free_running)

    def _find_ties(self, prompts: Sequence[ThinkerPrompt]) -> str:
        """Waiver of prompts without recorded layers; empty when rounding can reroute no row."""
        num_ties = 0
        for prompt in prompts:
            self._observer.begin("count_ties")
            self._prefill(prompt, self._worker.max_chunk)
            num_ties += self._observer.num_ties
        rows = self._num_layers * sum(len(prompt.input_ids) for prompt in prompts)
        return f"{num_ties} of {rows} rows are near a tie between experts" if num_ties else ""

    def run_alone(self, request: Request) -> Floats:
        """Logits (n, V) of a request's tokens without reference routing."""
        self._observer.begin("off")
        self._prefill(request.prompt, self._worker.max_chunk)
        return np.stack([self._decode_token(request, place) for place in range(len(request.tokens))])

    def can_reach(self, request: Request, logits: Floats, is_near: Callable[[Floats, Floats], bool]) -> bool:
        """Whether rounding explains the `logits` (steps, V) of the tokens of `request`."""
        self._observer.begin("off")
        self._prefill(request.prompt, self._worker.max_chunk)
        for place, wanted in enumerate(logits):
            self._observer.begin("off")
            is_reached = is_near(self._decode_token(request, place), wanted)
            self._observer.begin("perturb")
            for _ in range(_MAX_PERTURBED_STEPS):
                if is_reached:
                    break
                is_reached = is_near(self._decode_token(request, place), wanted)
            if not is_reached:
                return False
        return True

    def _decode_token(self, request: Request, place: int) -> Floats:
        position = request.prompt.num_tokens + place
        return self._decode(int(request.tokens[place]), position, position + 1)

    def _prefill(self, prompt: ThinkerPrompt, size: int) -> list[Floats]:
        """Logits (V,) of the last token of every chunk of at most `size` tokens."""
        logits = []
        for step in self._chunks(prompt, size):
            self._observer.next(int(step.starts[0]), len(step.input_ids))
            logits.append(to_numpy(self._worker.prefill(step))[0].astype(np.float32))
        return logits

    def _chunks(self, prompt: ThinkerPrompt, size: int) -> Iterator[PrefillStep]:
        """Prefill steps of at most `size` tokens, in order."""
        for start in range(0, prompt.num_tokens, size):
            part = slice(start, min(start + size, prompt.num_tokens))
            yield PrefillStep(
                input_ids=prompt.input_ids[part],
                positions=prompt.positions[:, part],
                embed_kind=prompt.embed_kind[part],
                embeds=chunk_embeds([(prompt, part)]),
                counts=np.array([part.stop - start]),
                starts=np.array([start]),
                pages=self._pages[None],
                slots=np.zeros(1, np.int64),
            )

    def _decode(self, token: int, position: int, length: int) -> Floats:
        """Logits (V,) of `token`, the last of `length` tokens."""
        step = DecodeStep(
            input_ids=np.array([token]),
            positions=np.array([position]),
            lengths=np.array([length]),
            pages=self._pages[None],
        )
        self._observer.next(length - 1, 1)
        logits: Floats = to_numpy(self._worker.decode(step))[0].astype(np.float32)
        return logits

    def _decode_prompt(self, prompt: ThinkerPrompt) -> list[Floats]:
        """Logits (V,) of every prompt token, each run as a decode step."""
        return [
            self._decode(int(token), int(prompt.positions[0, index]), index + 1)
            for index, token in enumerate(prompt.input_ids)
        ]

    def _compare_runs(
        self, case: str, prompt: ThinkerPrompt, reference: _Reference, log: ReferenceLog
    ) -> tuple[int, Floats]:
        """Compare all kinds of reference-routed runs; returns the largest number of rerouted rows, and the
        last logits (V,).
        """
        num_rerouted = 0
        for size, how in (
            (self._worker.max_chunk, ""),
            (UNEVEN_CHUNK, ", in uneven chunks"),
            (1, ", token by token"),
        ):
            self._observer.begin("follow_reference", reference.layers)
            logits = self._prefill(prompt, size)
            num_rerouted = max(num_rerouted, self._compare(case, reference, logits, how, log))
        if prompt.media_embeds is None:
            self._observer.begin("follow_reference", reference.layers)
            logits = self._decode_prompt(prompt)
            num_rerouted = max(num_rerouted, self._compare(case, reference, logits, ", by decode steps", log))
        return num_rerouted, logits[-1]

    def _compare(
        self, case: str, reference: _Reference, logits: list[Floats], how: str, log: ReferenceLog
    ) -> int:
        """Compare the layers and logits of an observed run; returns the number of rerouted rows."""
        layers, how = reference.layers, f"{reference.how}{how}"
        num_rerouted, num_rows = self._observer.num_rerouted, layers.shape[0] * layers.shape[1]
        scale = np.abs(layers).max(axis=(1, 2), keepdims=True)
        log.tensor(
            f"{case}.layer_out",
            self._observer.layers / scale,
            reference=layers / scale,
            how=how,
            tolerance=_TOLERANCE,
        )
        log.share(
            f"{case}.layer_out ({how}: rows)",
            same=num_rows - num_rerouted,
            total=num_rows,
            minimum=_MIN_KEPT,
            note="rounding routed the others to other experts",
        )
        scales = {
            f"{sublayer} of layer {layer}": scale
            for layer, fit in sorted(self._observer.fits.items())
            for sublayer, scale in fit.scales()
        }
        if scales:  # empty when every row was rerouted
            name, worst = worst_scale(scales)
            log.scale(f"{case}.layer_out", worst, how=f"{how}: scale of the {name}, the worst of all")
        if reference.last is not None:
            log.tensor(f"{case}.logits_last", logits[-1], reference=reference.last, how=how)
        if reference.every is not None and len(logits) == len(reference.every):
            log.tensor(f"{case}.logits", np.stack(logits), reference=reference.every, how=how)
        return num_rerouted

    def _compare_greedy(self, case: str, prompt: ThinkerPrompt, logits: Floats, log: ReferenceLog) -> int:
        """Decode the recorded continuation of a prompt up to the first tie; returns the number of ties."""
        if f"{case}.greedy_ids" not in log:
            return 0
        ids = log.references[f"{case}.greedy_ids"][0]
        rows = [logits]
        for index, token in enumerate(ids[:-1]):
            # Routing of continuations is not recorded: a row near a tie may differ from the reference.
            self._observer.begin("count_ties")
            length = len(prompt.input_ids) + index + 1
            found = self._decode(int(token), length - 1 + prompt.rope_delta, length)
            if self._observer.num_ties:
                break
            rows.append(found)
        reference = log.references.get(f"{case}.greedy_logits")
        if reference is not None:
            how = f"{_HOW}, {len(rows)} of {len(ids)} steps before a tie"
            log.tensor(
                f"{case}.greedy_logits", np.stack(rows)[None], reference=reference[:, : len(rows)], how=how
            )
        return self._observer.num_ties
