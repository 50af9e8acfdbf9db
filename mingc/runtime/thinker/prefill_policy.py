"""Chunked prefill policy: how much of a prefill chunk a step runs while requests decode. Plain numbers, no torch.

The scheduler asks it for every step; the loop reports measured step times back to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Prefill may add this share of a decode step's time. Startup measurements use random tokens, which reach more experts
# than real text: a served step may take little more than half as long. The share of served steps is therefore larger.
_SHARE_OF_MEASURED = 0.5
_SHARE_OF_SERVED = 0.8
_EMA_WEIGHT = 0.05  # weight of a new sample in the moving averages: about the last 20 steps count
_MIN_FACTOR = 0.25  # outliers (the host was late) are clipped to this factor and its inverse
_UNMEASURED_TOKENS = 64  # without a latency model: tokens of a whole chunk per prompt while requests decode
_SHORT_QUEUE = 3  # at most so many prompts wait, including the one in prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLatencyModel:
    """Milliseconds of one call at each compiled size, as (size, ms) in ascending order of size.

    Attributes:
        chunks: prefill chunks by tokens; with two-batch overlap also the longest chunk and any other, together.
        decodes: decode steps by requests.
    """

    chunks: tuple[tuple[int, float], ...]
    decodes: tuple[tuple[int, float], ...]

    def chunk_ms(self, num_tokens: int) -> float:
        """Time of the smallest chunk size that holds `num_tokens`."""
        return next(ms for size, ms in self.chunks if size >= num_tokens)

    def decode_ms(self, num_requests: int) -> float:
        """Time of the smallest decode batch that holds `num_requests`."""
        return next(ms for size, ms in self.decodes if size >= num_requests)

    def decode_size(self, num_requests: int) -> int:
        """The smallest decode batch that holds `num_requests`."""
        return next(size for size, _ in self.decodes if size >= num_requests)


@dataclass(kw_only=True, slots=True)
class ChunkedPrefillPolicy:
    """Chooses how many layer groups of a chunk a step runs.

    Chunks are as long as possible: a short chunk takes nearly as long as a long one, because both read most experts. To
    bound the delay of decoding requests, a chunk runs in `num_layer_groups` groups of layers, with decode steps in
    between. Without decoding requests, a step runs all groups. With them, it runs as many groups as roughly double the
    time of the decode step, and at least one. With two or three waiting prompts it runs at least half a chunk per step,
    with four or more a whole one: a queue takes precedence over decode latency, a single prompt does not.

    Without a latency model, a step with decoding requests runs groups worth 64 tokens of the chunk per prompt.

    Attributes:
        served: moving average of decode step milliseconds, by batch size.
        chunk_factor: moving average of served over measured time of layer groups.
    """

    num_layer_groups: int
    latency_model: StepLatencyModel | None = None
    served: dict[int, float] = field(default_factory=dict, init=False)
    chunk_factor: float = field(default=1.0, init=False)

    def measured_ms(self, num_tokens: int, num_groups: int) -> float:
        """Time of `num_groups` layer groups of a chunk, as measured at startup; 0 without a latency model."""
        if self.latency_model is None:
            return 0.0
        return self.latency_model.chunk_ms(num_tokens) * num_groups / self.num_layer_groups

    def observe(self, ms: float, *, prefill_ms: float, num_decoding: int) -> None:
        """Record the device time `ms` of a step.

        Args:
            prefill_ms: startup measurement of the layer groups that the step ran; 0 for none.
            num_decoding: requests of its decode step; 0 for none.
        """
        if self.latency_model is None:
            return
        size = self.latency_model.decode_size(num_decoding) if num_decoding else 0
        if num_decoding and not prefill_ms:
            measured = self.latency_model.decode_ms(num_decoding)
            mean = self.served.get(size, min(ms, measured))  # the first sample may be late
            self.served[size] = mean + _EMA_WEIGHT * (min(ms, measured / _MIN_FACTOR) - mean)
        elif prefill_ms and (not num_decoding or size in self.served):
            factor = (ms - self.served.get(size, 0.0)) / prefill_ms
            factor = min(max(factor, _MIN_FACTOR), 1 / _MIN_FACTOR)
            self.chunk_factor += _EMA_WEIGHT * (factor - self.chunk_factor)

    def groups_per_step(self, num_tokens: int, *, num_prompts: int, num_decoding: int) -> int:
        """Layer groups of a chunk to run in the next step, 1 to `num_layer_groups`.

        Args:
            num_tokens: rows of the chunk.
            num_prompts: admitted prompts that are not prefilled yet, including the prompts of the chunk.
            num_decoding: requests that decode in the same step.
        """
        if not num_decoding:
            return self.num_layer_groups
        if self.latency_model is None:
            share = _UNMEASURED_TOKENS * num_prompts / num_tokens
        else:
            share = self._budget_ms(self.latency_model, num_decoding) / self.latency_model.chunk_ms(
                num_tokens
            )
        groups = min(self.num_layer_groups, max(1, int(share * self.num_layer_groups)))
        if num_prompts == 1:
            return groups
        steps_per_chunk = 2 if num_prompts <= _SHORT_QUEUE else 1
        return max(groups, math.ceil(self.num_layer_groups / steps_per_chunk))

    def _budget_ms(self, model: StepLatencyModel, num_decoding: int) -> float:
        """Time that layer groups may add to a decode step, on the scale of their startup measurement."""
        served = self.served.get(model.decode_size(num_decoding))
        if served is None:
            return _SHARE_OF_MEASURED * model.decode_ms(num_decoding)
        return _SHARE_OF_SERVED * served / self.chunk_factor
