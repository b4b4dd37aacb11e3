"""Chooses output tokens from logits: greedy, temperature, top-k, top-p, with log-probabilities.

Pure: a choice depends on one row's logits, its parameters and its output index alone. Kept tokens
are laid out in vocabulary order for the draw, so that rounding in a sort cannot change the outcome.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .plans import CodaRow, RowFailure, SampledToken
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
