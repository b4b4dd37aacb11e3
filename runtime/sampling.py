"""Chooses output tokens from logits: greedy, temperature, top-k, top-p, with log-probabilities.

Pure: a choice depends on one row's logits, its parameters and its output index alone. Kept tokens
are laid out in vocabulary order for the draw, so that rounding in a sort cannot change the outcome.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .plans import CodaRow, RowFailure, SampledToken
from .replay import TIE
from .rng import Purpose, uniform
from .types import SamplingParams, TokenLogprobs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


NOT_FINITE = "the model's logits are not finite; check the checkpoint, or try --dtype float32"


class Sampled(NamedTuple):
    """tokens: [rows] int64, on the device, without meaning for a row that failed. told: what the
    host hears of the others."""

    tokens: Tensor
    told: tuple[SampledToken, ...]
    failed: tuple[RowFailure, ...]


def sample(logits: Tensor, rows: Sequence[CodaRow]) -> Sampled:
    """logits: [rows, vocab_size] float32. A row whose logits are not finite fails alone."""
    values, best = logits.max(-1)
    finite: list[bool] = values.isfinite().tolist()
    tokens: list[int] = best.tolist()
    needs_host = any(r.sampling.temperature > 0 or r.sampling.logprobs is not None for r in rows)
    host = logits.cpu().numpy() if needs_host else None
    told = []
    for index, row in enumerate(rows):
        if finite[index] and host is not None:
            told.append(_sample_row(host[index].astype(np.float64), row))
            tokens[index] = told[-1].token
        elif finite[index]:
            told.append(SampledToken(row.generation, row.output_index, tokens[index], None))
        if finite[index] and row.expected is not None and row.expected != tokens[index]:
            values_of_row = logits[index].cpu().numpy().astype(np.float64)
            gap = gap_of(values_of_row, row.sampling, row.output_index, row.expected)
            told[-1] = msgspec.structs.replace(told[-1], gap=gap)
    failed = tuple(
        RowFailure(row.generation, NOT_FINITE)
        for row, good in zip(rows, finite, strict=True)
        if not good
    )
    chosen = torch.tensor(tokens, device=logits.device) if needs_host else best
    return Sampled(chosen, tuple(told), failed)


def _sample_row(logits: Floats, row: CodaRow) -> SampledToken:
    token = choose(logits, row.sampling, row.output_index)
    count = row.sampling.logprobs
    logprobs = None if count is None else log_probabilities(logits, token, count)
    return SampledToken(row.generation, row.output_index, token, logprobs)


def choose(logits: Floats, params: SamplingParams, output_index: int) -> int:
    """One row: [vocab_size] -> a token ID."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    tokens, weights = distribution(logits, params)
    cumulative = np.cumsum(weights)
    point = uniform(params.seed or 0, Purpose.SAMPLE, output_index) * cumulative[-1]
    chosen = int(np.searchsorted(cumulative, point, side="right"))
    return int(tokens[min(chosen, len(tokens) - 1)])


def gap_of(logits: Floats, params: SamplingParams, output_index: int, token: int) -> float:
    """How far `token` was from being chosen: its logit from the largest, or the draw from its share
    of the distribution, where rounding may lift it over a filter or move the edge of the nucleus.
    """
    if params.temperature == 0:
        return float(logits.max() - logits[token])
    lifted = logits.copy()
    lifted[token] += TIE
    edges = {params.top_p}
    if params.top_p < 1.0:
        edges |= {max(0.0, params.top_p - TIE), min(1.0, params.top_p + TIE)}
    nearby = (msgspec.structs.replace(params, top_p=edge) for edge in edges)
    return min(_distance(lifted, near, output_index, token) for near in nearby)


def _distance(logits: Floats, params: SamplingParams, output_index: int, token: int) -> float:
    tokens, weights = distribution(logits, params)
    place = int(np.searchsorted(tokens, token))
    if place == len(tokens) or tokens[place] != token:
        return math.inf
    cumulative = np.cumsum(weights) / weights.sum()
    point = uniform(params.seed or 0, Purpose.SAMPLE, output_index)
    low = float(cumulative[place - 1]) if place else 0.0
    return max(low - point, point - float(cumulative[place]), 0.0)


def distribution(logits: Floats, params: SamplingParams) -> tuple[Ints, Floats]:
    """The tokens that the filters keep, in vocabulary order, and their unnormalised weights.

    top-k first, then top-p over what is left; of equal logits the lower token ID ranks higher.
    """
    tokens = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        threshold = np.partition(logits, -params.top_k)[-params.top_k]
        tokens = np.flatnonzero(logits >= threshold)
        order = np.argsort(-logits[tokens], kind="stable")[: params.top_k]
        tokens = np.sort(tokens[order])
    weights = np.exp((logits[tokens] - logits.max()) / params.temperature)
    if params.top_p < 1.0:
        kept = _nucleus(weights / weights.sum(), params.top_p)
        tokens, weights = tokens[kept], weights[kept]
    return tokens, weights


def _nucleus(probabilities: Floats, top_p: float) -> Ints:
    """Indices of the smallest set of most likely tokens whose mass reaches top_p; never empty."""
    # Tokens below this bound weigh less than 1 - top_p together, so the nucleus needs none of them.
    bound = (1.0 - top_p) / len(probabilities)
    likely = np.flatnonzero(probabilities >= min(bound, probabilities.max()))
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[(before < top_p) | (np.arange(len(order)) == 0)]
    return np.sort(kept)


def log_probabilities(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Of the plain distribution: no temperature, no filter."""
    values = logits - logits.max()
    values -= np.log(np.exp(values).sum())
    count = min(count, len(values))
    top: list[int] = []
    if count:
        threshold = np.partition(values, -count)[-count]
        candidates = np.flatnonzero(values >= threshold)
        order = np.argsort(-values[candidates], kind="stable")[:count]
        top = candidates[order].tolist()
    return TokenLogprobs(float(values[token]), tuple((t, float(values[t])) for t in top))
