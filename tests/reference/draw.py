"""Choosing a token from logits, in plain Python: what runtime/sampling.py must agree with.

A second implementation of the same words. Never imports the engine; keeps no state between draws.
Every choice comes with its gap: how far it was from coming out otherwise.
"""

import math
from dataclasses import dataclass

SAMPLE = 1  # the purpose that keeps these draws apart from others of the same seed
MASK = 2**64 - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox(counter: int, key: tuple[int, int]) -> int:
    """The first word of Philox 4x64 with ten rounds (Salmon et al. 2011)."""
    a, b, c, d = (counter >> 64 * word & MASK for word in range(4))
    first, second = key
    for _ in range(10):
        left, right = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = right >> 64 ^ b ^ first, right & MASK, left >> 64 ^ d ^ second, left & MASK
        first, second = first + KEY_STEPS[0] & MASK, second + KEY_STEPS[1] & MASK
    return a


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), 53 bits. Counter 0 of a stream is never used: blocks are counted from 1."""
    return (philox(output_index + 1, (seed & MASK, SAMPLE)) >> 11) / 2**53


@dataclass(frozen=True)
class Choice:
    token: int
    gap: float  # below 1e-4: rounding may decide; a tie


def greedy(logits: list[float]) -> Choice:
    best, second = sorted(logits, reverse=True)[:2]
    return Choice(logits.index(best), best - second)


def draw(
    logits: list[float], *, temperature: float, top_k: int, top_p: float, seed: int, index: int
) -> Choice:
    """Keep the top_k largest, of these the likeliest whose mass reaches top_p, then one point on
    the line of what is left, in order of token IDs. Equal logits: the lower ID ranks higher."""
    if temperature == 0.0:
        return greedy(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    gaps = []
    if 0 < top_k < len(ranked):
        gaps.append(logits[ranked[top_k - 1]] - logits[ranked[top_k]])
        ranked = ranked[:top_k]
    weights = {t: math.exp((logits[t] - logits[ranked[0]]) / temperature) for t in ranked}
    if top_p < 1.0:
        total, before = sum(weights.values()), 0.0
        kept: list[int] = []
        for token in ranked:
            if kept:
                gaps.append(abs(before - top_p))
            if kept and before >= top_p:
                break
            kept.append(token)
            before += weights[token] / total
        ranked = kept
    total, edge = sum(weights[token] for token in ranked), 0.0
    point = uniform(seed, index)
    chosen = None
    for token in sorted(ranked):
        edge += weights[token] / total
        gaps.append(abs(edge - point))
        if chosen is None and edge > point:
            chosen = token
    return Choice(max(ranked) if chosen is None else chosen, min(gaps))
