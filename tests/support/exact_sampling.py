"""Sampling of one token in float64 with a stable sort, and the cases that samplers are compared on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SLACK = 2e-6  # of a probability in float32, and of sums of them
MAX_BANNED = 20

RULES: tuple[tuple[float, float, float, float], ...] = (
    # temperature, top_k, top_p, min_p
    *((1.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.0, 2, 1.0, 0.0)),
    *((1.0, 0, 0.9, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 0.0, 0.0), (0.6, 0, 0.999999, 0.0)),
    *(
        (1.0, 0, 1.0, 0.1),
        (1.0, 0, 1.0, 1.0),
        (1.3, 50, 0.95, 0.02),
        (2.0, 300, 0.97, 0.0),
        (0.3, 7, 0.5, 0.3),
    ),
    *((1e-6, 0, 0.9, 0.0), (1.0, 10_000_000, 0.8, 0.0), (5.0, 0, 0.5, 0.001), (1.7, 1000, 0.3, 0.0)),
)


def distributions(vocab: int) -> dict[str, Tensor]:
    """Logits (V,) float32 of every shape: random, tied, peaked, flat, with -inf, and rows that fail."""
    generator = torch.Generator().manual_seed(vocab)
    drawn = torch.randn(vocab, generator=generator)
    token = torch.arange(vocab)
    return {
        "random": 3 * drawn,
        "bfloat16": (3 * drawn).bfloat16().float(),
        "peaked": 25 * drawn,
        "narrow": 1e-3 * drawn,
        "minute": 1e-20 * drawn,
        "two values": (token % 2).float(),
        "mostly -inf": torch.where(torch.rand(vocab, generator=generator) < 0.9, -torch.inf, drawn),
        "one token": torch.where(token == vocab // 2, 0.0, -torch.inf),
        "two zeros": torch.where(torch.rand(vocab, generator=generator) < 0.5, -0.0, 0.0),
        "huge": 1e38 * drawn.clamp(-3, 3),
        "NaN": torch.where(token == vocab - 1, torch.nan, drawn),
        "inf": torch.where(token == 3, torch.inf, drawn),
        "all -inf": torch.full((vocab,), -torch.inf),
    }


def columns(
    rules: tuple[float, float, float, float],
    point: float,
    *,
    penalty: float = 1.0,
    banned: tuple[int, ...] = (),
) -> list[float]:
    """A row of `sampling`, written down here once more."""
    return [*rules, penalty, point, *(token + 1.0 for token in banned), *[0.0] * (MAX_BANNED - len(banned))]


def cases(logits: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, V), sampling (B, 26) and seen (B, V): every rule, with and without penalty and bans."""
    vocab, generator = len(logits), torch.Generator().manual_seed(seed)
    rows = []
    penalties, bans = itertools.cycle((1.0, 1.4, 0.7)), itertools.cycle((False, False, True, False))
    banned = tuple(sorted({0, vocab - 1, int(logits.nan_to_num(-1.0).argmax())}))
    for rules, penalty, is_banned in zip(RULES, penalties, bans, strict=False):
        point = float(torch.rand((), generator=generator))
        rows.append(columns(rules, point, penalty=penalty, banned=banned if is_banned else ()))
    seen = torch.rand(len(rows), vocab, generator=generator) < 0.1
    return logits.expand(len(rows), -1).contiguous(), torch.tensor(rows, dtype=torch.float32), seen


def possible_tokens(logits: Tensor, sampling: Tensor, seen: Tensor) -> Iterator[set[int]]:
    """Of each row the tokens that sampling may return: one, unless rounding in float32 may decide between some."""
    for row, rules, is_seen in zip(logits.numpy(), sampling.numpy(), seen.numpy(), strict=True):
        yield _possible(row, rules, is_seen)


def _possible(x: NDArray[np.float32], rules: NDArray[np.float32], seen: NDArray[np.bool_]) -> set[int]:
    temperature, top_k, top_p, min_p, penalty, point, *banned = rules
    x = x.copy()
    if penalty != 1.0:
        with np.errstate(over="ignore"):
            x[seen] = np.where(x > 0, x / penalty, x * penalty)[seen]
    x[[int(token) - 1 for token in banned if token > 0]] = -np.inf
    highest = x.max()  # NaN if any is
    if not np.isfinite(highest):
        return {-1}
    if temperature == 0 or top_k == 1:
        return {int(x.argmax())}
    order = np.argsort(-x, kind="stable")
    with np.errstate(over="ignore"):
        weights = np.exp(((x - highest) / temperature).astype(np.float64))[order]
    if 1 <= top_k < len(x):
        weights[int(top_k) :] = 0
    probabilities = weights / weights.sum()
    before = np.cumsum(probabilities) - probabilities
    found: set[int] = set()
    for slack_p, slack_min in itertools.product((-_SLACK, 0, _SLACK), repeat=2):
        keep = probabilities >= min_p * (1 + slack_min) * probabilities[0]
        if top_p < 1:
            keep &= before < top_p + slack_p
        if top_k >= 1:
            keep &= np.arange(len(x)) < top_k
        keep[0] = True
        kept = np.zeros(len(x))
        kept[order] = probabilities * keep
        ends = np.cumsum(kept) / kept.sum()
        possible = (ends > point - _SLACK) & (ends - kept / kept.sum() <= point + _SLACK) & (kept > 0)
        found |= {int(token) for token in np.flatnonzero(possible)}
    return found
