"""Triton kernels of `mingc.kernels.sample_tokens`: thresholds of top_k and top_p without sorting the vocabulary.

Probabilities are added as integers, so a sum depends neither on the order of its terms nor on the other rows.

Where a kernel scatters, its helpers take no pointers: torch would assume that the kernel writes to them when an address
depends on what a helper returns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # tokens of a program
BINS = 1024  # of a row's histogram
LIST = 2048  # candidates that a program holds in registers

_ONE = tl.constexpr(17592186044416.0)  # weight of the most likely token, 2^44: 2^19 of them fit into int64
_LOWEST_SCALED = tl.constexpr(-100.0)  # exp of it is far below 1 / _ONE
_RANGE = tl.constexpr(31.0)  # below exp(-31) the weight is 0
_MIN_SPAN = tl.constexpr(1e-30)  # of a histogram, so that its scale is finite
_LOG2_E = tl.constexpr(1.44269502162933349609375)  # log2(e) in float32
_LOG2_E_REST = tl.constexpr(1.92596298909109e-8)  # and what is missing
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST_KEY = tl.constexpr(-2147483648)
_HIGHEST_KEY = tl.constexpr(2147483647)
_NOT_FINITE = tl.constexpr(-1)


@triton.jit
def _key(x):
    """Integers int64 in the order of finite or infinite float32 numbers `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _probability(x, highest, temperature):
    """exp((x - highest) / temperature) in float32, to 2 units in the last place.

    The same bits in every kernel: no sum of products is left to the compiler.
    """
    difference = x - highest
    scaled = tl.div_rn(difference, temperature + tl.zeros_like(difference))
    scaled = tl.maximum(scaled, _LOWEST_SCALED)
    power = scaled * _LOG2_E
    rest = tl.fma(scaled, tl.zeros_like(scaled) + _LOG2_E, -power)
    rest = tl.fma(scaled, tl.zeros_like(scaled) + _LOG2_E_REST, rest)
    return tl.exp2(power) * tl.fma(rest, tl.zeros_like(rest) + _LN_2, tl.zeros_like(rest) + 1.0)


@triton.jit
def _bin(x, highest, span, BINS: tl.constexpr):
    """The bin of logits `x`, from the highest ones down; equal logits are in one bin."""
    distance = highest - x
    scale = tl.div_rn(tl.zeros_like(distance) + BINS, span + tl.zeros_like(distance))
    return tl.minimum(distance * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _is_random(temperature, top_k, highest):
    """Whether a token is sampled at random; otherwise it is the most likely one, or the row fails."""
    is_finite = (highest > float("-inf")) & (highest < float("inf"))
    return (temperature > 0.0) & (top_k != 1.0) & is_finite


@triton.jit
def _has_limit(temperature, top_k, top_p, highest):
    """Whether top_k or top_p removes tokens that could be sampled at random."""
    return _is_random(temperature, top_k, highest) & ((top_k >= 1.0) | (top_p < 1.0))


@triton.jit
def _span(temperature, highest, lowest):
    """Distance below the highest logit that the histogram covers: every token with a weight lies within it."""
    return tl.maximum(tl.minimum(_RANGE * temperature, highest - lowest), _MIN_SPAN)


@triton.jit
def _share(share, total):
    """The least integer that is at least `share` times `total`, and at least 1."""
    return tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _crossings(count, mass, top_k, top_p, BINS: tl.constexpr):
    """Bins in which the sums over a histogram, `count` and `mass` (BINS,), reach top_k and top_p; BINS if they do not.

    Returns: the bin of top_k, count and mass before it, first and last possible bin of top_p, mass before the first.
    The mass of the top_k tokens is known only to lie between two bounds, so that there may be several bins.
    """
    b = tl.arange(0, BINS)
    counted, massed = tl.cumsum(count, 0), tl.cumsum(mass, 0)
    is_limited = (top_k >= 1.0) & (tl.sum(count, 0).to(tl.float32) > top_k)
    k_bin = tl.sum((counted.to(tl.float32) < top_k).to(tl.int32), 0)
    k_bin = tl.where(is_limited, k_bin, BINS)
    k_count = tl.sum(tl.where(b < k_bin, count, 0), 0)
    k_mass = tl.sum(tl.where(b < k_bin, mass, 0), 0)
    most = k_mass + tl.sum(tl.where(b == k_bin, mass, 0), 0)
    p_first = tl.sum((massed < _share(top_p, k_mass)).to(tl.int32), 0)
    p_last = tl.sum((massed < _share(top_p, most)).to(tl.int32), 0)
    p_first = tl.where(top_p < 1.0, p_first, BINS)
    p_last = tl.where(top_p < 1.0, p_last, BINS)
    p_mass = tl.sum(tl.where(b < p_first, mass, 0), 0)
    return k_bin, k_count, k_mass, p_first, p_last, p_mass


@triton.jit
def _candidates(values, start, n, highest, span, temperature, first, last,
                BY_MASS: tl.constexpr, BINS: tl.constexpr, LIST: tl.constexpr):  # fmt: skip
    """Keys of LIST candidates from `start`, their masses, and what each counts; a candidate of another bin counts 0."""
    place = start + tl.arange(0, LIST)
    x = tl.load(values + place, mask=place < n, other=0.0)
    x = tl.where(place < n, x, highest)
    b = _bin(x, highest, span, BINS)
    is_own = (place < n) & (b >= first) & (b <= last)
    mass = tl.where(is_own, (_probability(x, highest, temperature) * _ONE).to(tl.int64), 0)
    unit = mass if BY_MASS else is_own.to(tl.int64)
    return _key(x), mass, unit, is_own


@triton.jit
def _search(values, n, highest, span, temperature, first, last, target,
            BY_MASS: tl.constexpr, BINS: tl.constexpr, LIST: tl.constexpr):  # fmt: skip
    """The largest key with which the candidates of bins `first` to `last` at or above it reach `target`.

    Returns: the key, and count or mass, and mass, of the candidates above it.
    """
    keys, mass, unit, is_own = _candidates(
        values, 0, n, highest, span, temperature, first, last, BY_MASS, BINS, LIST
    )
    low = tl.min(tl.where(is_own, keys, _HIGHEST_KEY), 0)
    high = tl.max(tl.where(is_own, keys, _LOWEST_KEY), 0)
    for start in range(LIST, n, LIST):
        more, _, _, is_more = _candidates(
            values, start, n, highest, span, temperature, first, last, BY_MASS, BINS, LIST
        )
        low = tl.minimum(low, tl.min(tl.where(is_more, more, _HIGHEST_KEY), 0))
        high = tl.maximum(high, tl.max(tl.where(is_more, more, _LOWEST_KEY), 0))
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum(tl.where(keys >= middle, unit, 0), 0)
        for start in range(LIST, n, LIST):
            more, _, units, _ = _candidates(
                values, start, n, highest, span, temperature, first, last, BY_MASS, BINS, LIST
            )
            reached += tl.sum(tl.where(more >= middle, units, 0), 0)
        is_enough = reached >= target
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    above = tl.sum(tl.where(keys > low, unit, 0), 0)
    above_mass = tl.sum(tl.where(keys > low, mass, 0), 0)
    for start in range(LIST, n, LIST):
        more, masses, units, _ = _candidates(
            values, start, n, highest, span, temperature, first, last, BY_MASS, BINS, LIST
        )
        above += tl.sum(tl.where(more > low, units, 0), 0)
        above_mass += tl.sum(tl.where(more > low, masses, 0), 0)
    return low, above, above_mass


@triton.jit
def _probability_of_key(key, highest, temperature):
    """`_probability` of the logit with this key, a scalar, as a tensor of 1."""
    keys = key.to(tl.int32) + tl.zeros([1], tl.int32)
    x = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return _probability(x, highest, temperature)


@triton.jit
def mingc_sample_prepare(
    logits, sampling, seen, prepared, chunk_max, chunk_min, chunk_first, counts, masses, num_candidates, V, C,
    COLUMNS: tl.constexpr, RULES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """Logits after penalty and bans; for each chunk the highest logit, its first token, and the lowest finite logit.

    Clears the histogram as well.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = token < V
    x = tl.load(logits + row * V + token, mask=is_token, other=float("-inf"))
    penalty = tl.load(sampling + row * COLUMNS + 4)
    if penalty != 1.0:
        is_seen = tl.load(seen + row * V + token, mask=is_token, other=0).to(tl.int1)
        penalized = tl.where(x > 0, tl.div_rn(x, penalty + tl.zeros_like(x)), x * penalty)
        x = tl.where(is_seen, penalized, x)
    for each in range(RULES, COLUMNS):
        banned = tl.load(sampling + row * COLUMNS + each).to(tl.int32) - 1
        x = tl.where(token == banned, float("-inf"), x)
    x = tl.where(x != x, float("inf"), x)  # either fails the row
    x = tl.where(x == 0, 0.0, x)  # the two zeros are equal, but their bits are not
    tl.store(prepared + row * V + token, x, mask=is_token)
    highest = tl.max(x, 0)
    tl.store(chunk_max + row * C + chunk, highest)
    tl.store(chunk_first + row * C + chunk, tl.min(tl.where(x == highest, token, V), 0))
    tl.store(chunk_min + row * C + chunk, tl.min(tl.where(x == float("-inf"), float("inf"), x), 0))
    b = chunk * ZEROED + tl.arange(0, ZEROED)
    tl.store(counts + row * BINS + b, tl.zeros([ZEROED], tl.int32), mask=b < BINS)
    tl.store(masses + row * BINS + b, tl.zeros([ZEROED], tl.int64), mask=b < BINS)
    if chunk == 0:
        tl.store(num_candidates + row, 0)


@triton.jit
def mingc_sample_histogram(
    sampling, prepared, chunk_max, chunk_min, counts, masses, V, C,
    COLUMNS: tl.constexpr, C_PADDED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count and mass of the tokens in each bin, for rows with top_k or top_p."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(sampling + row * COLUMNS)
    top_k = tl.load(sampling + row * COLUMNS + 1)
    top_p = tl.load(sampling + row * COLUMNS + 2)
    c = tl.arange(0, C_PADDED)
    highest = tl.max(tl.load(chunk_max + row * C + c, mask=c < C, other=float("-inf")), 0)
    if _has_limit(temperature, top_k, top_p, highest):
        lowest = tl.min(tl.load(chunk_min + row * C + c, mask=c < C, other=float("inf")), 0)
        span = _span(temperature, highest, lowest)
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(prepared + row * V + token, mask=token < V, other=float("-inf"))
        mass = (_probability(x, highest, temperature) * _ONE).to(tl.int64)
        place = row * BINS + _bin(x, highest, span, BINS)
        tl.atomic_add(counts + place, (mass > 0).to(tl.int32), mask=mass > 0, sem="relaxed")
        tl.atomic_add(masses + place, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def mingc_sample_select(
    sampling, prepared, chunk_max, chunk_min, counts, masses, candidates, num_candidates, V, C,
    COLUMNS: tl.constexpr, C_PADDED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Collect the logits of the bins in which a threshold lies, in any order."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(sampling + row * COLUMNS)
    top_k = tl.load(sampling + row * COLUMNS + 1)
    top_p = tl.load(sampling + row * COLUMNS + 2)
    c = tl.arange(0, C_PADDED)
    highest = tl.max(tl.load(chunk_max + row * C + c, mask=c < C, other=float("-inf")), 0)
    if _has_limit(temperature, top_k, top_p, highest):
        lowest = tl.min(tl.load(chunk_min + row * C + c, mask=c < C, other=float("inf")), 0)
        span = _span(temperature, highest, lowest)
        b = tl.arange(0, BINS)
        k_bin, _count, _mass, p_first, p_last, _p_mass = _crossings(
            tl.load(counts + row * BINS + b), tl.load(masses + row * BINS + b), top_k, top_p, BINS
        )
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(prepared + row * V + token, mask=token < V, other=float("-inf"))
        mass = (_probability(x, highest, temperature) * _ONE).to(tl.int64)
        own = _bin(x, highest, span, BINS)
        is_candidate = (mass > 0) & ((own == k_bin) | ((own >= p_first) & (own <= p_last)))
        is_one = is_candidate.to(tl.int32)
        count = tl.sum(is_one, 0)
        if count > 0:
            start = tl.atomic_add(num_candidates + row, count, sem="relaxed")
            tl.store(candidates + row * V + start + tl.cumsum(is_one, 0) - 1, x, mask=is_candidate)


@triton.jit
def mingc_sample_threshold(
    sampling, chunk_max, chunk_min, counts, masses, candidates, num_candidates, thresholds, num_tied, V, C,
    COLUMNS: tl.constexpr, C_PADDED: tl.constexpr, BINS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Key of the least likely token that top_k and top_p keep, and how many tokens with this key, in order of id."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(sampling + row * COLUMNS)
    top_k = tl.load(sampling + row * COLUMNS + 1)
    top_p = tl.load(sampling + row * COLUMNS + 2)
    c = tl.arange(0, C_PADDED)
    highest = tl.max(tl.load(chunk_max + row * C + c, mask=c < C, other=float("-inf")), 0)
    key = tl.full([], _LOWEST_KEY, tl.int64)
    tied = tl.full([], 0, tl.int64)
    if _has_limit(temperature, top_k, top_p, highest):
        lowest = tl.min(tl.load(chunk_min + row * C + c, mask=c < C, other=float("inf")), 0)
        span = _span(temperature, highest, lowest)
        b = tl.arange(0, BINS)
        k_bin, k_count, k_mass, p_first, p_last, p_mass = _crossings(
            tl.load(counts + row * BINS + b), tl.load(masses + row * BINS + b), top_k, top_p, BINS
        )
        n, values = tl.load(num_candidates + row), candidates + row * V
        total = k_mass
        if k_bin < BINS:
            wanted = top_k.to(tl.int64) - k_count
            key, above, above_mass = _search(
                values, n, highest, span, temperature, k_bin, k_bin, wanted, False, BINS, LIST
            )
            tied = wanted - above
            of_each = _probability_of_key(key, highest, temperature)
            total += above_mass + tied * tl.sum((of_each * _ONE).to(tl.int64), 0)
        if top_p < 1.0:
            wanted = _share(top_p, total) - p_mass
            key, above, above_mass = _search(
                values, n, highest, span, temperature, p_first, p_last, wanted, True, BINS, LIST
            )
            of_each = _probability_of_key(key, highest, temperature)
            mass = tl.maximum(tl.sum((of_each * _ONE).to(tl.int64), 0), 1)
            tied = (wanted - above + mass - 1) // mass
    tl.store(thresholds + row, key.to(tl.int32))
    tl.store(num_tied + row, tied.to(tl.int32))


@triton.jit
def mingc_sample_weigh(
    sampling, prepared, chunk_max, thresholds, chunk_mass, chunk_tied, V, C,
    COLUMNS: tl.constexpr, C_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk, the mass of kept tokens above the threshold and the number of tokens at it."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(sampling + row * COLUMNS)
    top_k = tl.load(sampling + row * COLUMNS + 1)
    min_p = tl.minimum(tl.load(sampling + row * COLUMNS + 3), 1.0)
    c = tl.arange(0, C_PADDED)
    highest = tl.max(tl.load(chunk_max + row * C + c, mask=c < C, other=float("-inf")), 0)
    if _is_random(temperature, top_k, highest):
        threshold = tl.load(thresholds + row).to(tl.int64)
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(prepared + row * V + token, mask=token < V, other=float("-inf"))
        key, probability = _key(x), _probability(x, highest, temperature)
        is_above = (key > threshold) & (probability >= min_p)
        mass = tl.where(is_above, (probability * _ONE).to(tl.int64), 0)
        tl.store(chunk_mass + row * C + chunk, tl.sum(mass, 0))
        is_tied = (token < V) & (key == threshold)
        tl.store(chunk_tied + row * C + chunk, tl.sum(is_tied.to(tl.int32), 0))


@triton.jit
def mingc_sample_draw(
    sampling, prepared, chunk_max, chunk_first, thresholds, num_tied, chunk_mass, chunk_tied, tokens, V, C,
    COLUMNS: tl.constexpr, C_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept token, in order of id, at which the sum of masses exceeds the row's uniform number times all of them."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(sampling + row * COLUMNS)
    top_k = tl.load(sampling + row * COLUMNS + 1)
    min_p = tl.minimum(tl.load(sampling + row * COLUMNS + 3), 1.0)
    c = tl.arange(0, C_PADDED)
    maxima = tl.load(chunk_max + row * C + c, mask=c < C, other=float("-inf"))
    highest = tl.max(maxima, 0)
    first = tl.load(chunk_first + row * C + c, mask=c < C, other=V)
    is_finite = (highest > float("-inf")) & (highest < float("inf"))
    sampled = tl.where(is_finite, tl.min(tl.where(maxima == highest, first, V), 0), _NOT_FINITE)
    if _is_random(temperature, top_k, highest):
        threshold = tl.load(thresholds + row).to(tl.int64)
        kept = tl.load(num_tied + row)
        mass = tl.load(chunk_mass + row * C + c, mask=c < C, other=0)
        tied = tl.load(chunk_tied + row * C + c, mask=c < C, other=0)
        before = tl.cumsum(tied, 0) - tied
        own = tl.minimum(tl.maximum(kept - before, 0), tied)
        of_each = _probability_of_key(threshold, highest, temperature)
        of_each = tl.where(of_each >= min_p, (of_each * _ONE).to(tl.int64), 0)
        mass += own * tl.sum(of_each, 0)
        ends, total = tl.cumsum(mass, 0), tl.sum(mass, 0)
        point = tl.load(sampling + row * COLUMNS + 5).to(tl.float64)
        wanted = tl.minimum((point * total.to(tl.float64)).to(tl.int64), total - 1)
        chunk = tl.sum((ends <= wanted).to(tl.int32), 0)
        start = tl.sum(tl.where(c < chunk, mass, 0), 0)
        left = kept - tl.sum(tl.where(c < chunk, tied, 0), 0)
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(prepared + row * V + token, mask=token < V, other=float("-inf"))
        key, probability = _key(x), _probability(x, highest, temperature)
        is_tied = (key == threshold).to(tl.int32)
        is_kept = (key > threshold) | ((key == threshold) & (tl.cumsum(is_tied, 0) <= left))
        is_kept = is_kept & (probability >= min_p)
        sums = start + tl.cumsum(tl.where(is_kept, (probability * _ONE).to(tl.int64), 0), 0)
        sampled = tl.minimum(chunk * BLOCK + tl.sum((sums <= wanted).to(tl.int32), 0), V - 1)
    tl.store(tokens + row, sampled.to(tl.int64))


@torch.library.triton_op("mingc::sample_tokens", mutates_args={})
def sample_tokens(logits: Tensor, sampling: Tensor, seen: Tensor, num_rules: int) -> Tensor:
    """See `mingc.kernels.sample_tokens`; V below 2^19, columns of `sampling` after `num_rules` are banned tokens."""
    (batch, vocab), columns = logits.shape, sampling.shape[1]
    chunks = triton.cdiv(vocab, BLOCK)
    padded = triton.next_power_of_2(chunks)
    logits, sampling, seen = logits.contiguous(), sampling.contiguous(), seen.contiguous()

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    prepared = empty(batch, vocab, dtype=torch.float32)
    candidates = empty(batch, vocab, dtype=torch.float32)
    chunk_max, chunk_min = (empty(batch, chunks, dtype=torch.float32) for _ in range(2))
    chunk_first, chunk_tied = (empty(batch, chunks, dtype=torch.int32) for _ in range(2))
    chunk_mass = empty(batch, chunks, dtype=torch.int64)
    counts, masses = empty(batch, BINS, dtype=torch.int32), empty(batch, BINS, dtype=torch.int64)
    num_candidates, thresholds, num_tied = (empty(batch, dtype=torch.int32) for _ in range(3))
    tokens = empty(batch, dtype=torch.int64)
    torch.library.wrap_triton(mingc_sample_prepare)[(chunks, batch)](
        logits, sampling, seen, prepared, chunk_max, chunk_min, chunk_first, counts, masses, num_candidates, vocab,
        chunks, COLUMNS=columns, RULES=num_rules, BLOCK=BLOCK, BINS=BINS,
        ZEROED=triton.next_power_of_2(triton.cdiv(BINS, chunks)), num_warps=8,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_sample_histogram)[(chunks, batch)](
        sampling, prepared, chunk_max, chunk_min, counts, masses, vocab, chunks, COLUMNS=columns, C_PADDED=padded,
        BLOCK=BLOCK, BINS=BINS, num_warps=8,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_sample_select)[(chunks, batch)](
        sampling, prepared, chunk_max, chunk_min, counts, masses, candidates, num_candidates, vocab, chunks,
        COLUMNS=columns, C_PADDED=padded, BLOCK=BLOCK, BINS=BINS, num_warps=8,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_sample_threshold)[(batch,)](
        sampling, chunk_max, chunk_min, counts, masses, candidates, num_candidates, thresholds, num_tied, vocab,
        chunks, COLUMNS=columns, C_PADDED=padded, BINS=BINS, LIST=LIST, num_warps=8,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_sample_weigh)[(chunks, batch)](
        sampling, prepared, chunk_max, thresholds, chunk_mass, chunk_tied, vocab, chunks, COLUMNS=columns,
        C_PADDED=padded, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_sample_draw)[(batch,)](
        sampling, prepared, chunk_max, chunk_first, thresholds, num_tied, chunk_mass, chunk_tied, tokens, vocab,
        chunks, COLUMNS=columns, C_PADDED=padded, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return tokens
