"""Sampling: support of the filters, repeatable draws, right frequencies, log-probabilities."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlt.runtime.plans import CodaRow
from rlt.runtime.rng import Purpose, uniform
from rlt.runtime.sampling import choose, distribution, gap_of, log_probabilities, sample
from rlt.runtime.types import Generation, SamplingParams

PINNED = (0.8133540609793564, 0.08079128712214878)
LOGITS = st.lists(st.floats(-20, 20), min_size=2, max_size=40).map(
    lambda values: np.round(values, 4)
)


def row(generation: int, params: SamplingParams, index: int = 0) -> CodaRow:
    return CodaRow(Generation(generation), 0, index, params)


@given(LOGITS, st.integers(1, 50), st.floats(0.1, 3))
def test_top_k_keeps_the_k_best(
    logits: np.ndarray[tuple[int], np.dtype[np.float64]], k: int, temperature: float
) -> None:
    tokens, _ = distribution(logits, SamplingParams(top_k=k, temperature=temperature))
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert tokens.tolist() == sorted(ranked[:k])


@given(LOGITS, st.floats(0.01, 0.999), st.floats(0.1, 3))
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    logits: np.ndarray[tuple[int], np.dtype[np.float64]], p: float, temperature: float
) -> None:
    tokens, _ = distribution(logits, SamplingParams(top_p=p, temperature=temperature))
    weights = np.exp((logits - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    kept = probabilities[tokens]
    assert kept.sum() >= p - 1e-9
    assert kept.sum() - kept.min() < p + 1e-9
    assert kept.min() >= np.delete(probabilities, tokens).max(initial=0.0)


@given(
    LOGITS, st.integers(0, 10), st.floats(0.05, 1), st.integers(0, 2**64 - 1), st.integers(0, 99)
)
def test_a_choice_is_one_of_the_kept_tokens_and_always_the_same(
    logits: np.ndarray[tuple[int], np.dtype[np.float64]], k: int, p: float, seed: int, index: int
) -> None:
    params = SamplingParams(temperature=0.8, top_k=k, top_p=p, seed=seed)
    token = choose(logits, params, index)
    assert token in distribution(logits, params)[0]
    assert token == choose(logits, params, index)


@given(LOGITS)
def test_top_k_1_is_greedy_and_so_is_a_tiny_top_p(
    logits: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    best = int(np.argmax(logits))
    assert choose(logits, SamplingParams(temperature=1.5, top_k=1, seed=3), 0) == best
    assert choose(logits, SamplingParams(temperature=0.5, top_p=1e-9, seed=3), 0) == best


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.3, top_p=0.8),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15]))
    tokens, weights = distribution(logits, params)
    want = dict(zip(tokens.tolist(), weights / weights.sum(), strict=True))
    draws = 4000
    seeded = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=11
    )
    counts = Counter(choose(logits, seeded, index) for index in range(draws))
    assert set(counts) == set(want)
    for token, probability in want.items():
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[token] - draws * probability) < 4 * deviation


def test_a_draw_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    rows = [
        row(n, SamplingParams(temperature=0.5 * n, top_k=5 * n, seed=n, logprobs=n % 2), n)
        for n in range(6)
    ]
    together = {token.generation: token for token in sample(logits, rows).told}
    for order in ([5, 3, 1], [0, 2, 4]):
        for token in sample(logits[order], [rows[index] for index in order]).told:
            assert token == together[token.generation]


def test_draws_differ_by_seed_and_index_and_fill_the_unit_interval() -> None:
    values = [uniform(seed, Purpose.SAMPLE, index) for seed in range(40) for index in range(50)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert abs(float(np.mean(values)) - 0.5) < 4 / math.sqrt(12 * len(values))


def test_draws_are_pinned_across_versions() -> None:
    # Changing these breaks every seeded request that is replayed after an upgrade.
    assert uniform(0, Purpose.SAMPLE, 0) == PINNED[0]
    assert uniform(2**64 - 1, Purpose.SAMPLE, 77) == PINNED[1]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [4, 7]] = 2.0
    for params in (SamplingParams(), SamplingParams(logprobs=2)):
        assert sample(logits, [row(1, params)]).told[0].token == 4


def test_log_probabilities_ignore_temperature_and_filters() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=3, seed=0)
    [sampled] = sample(logits, [row(1, params)]).told
    want = torch.log_softmax(logits[0].double(), -1).tolist()
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(want[1])
    assert [token for token, _ in sampled.logprobs.top] == [1, 2, 3]
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(
        [want[1], want[2], want[3]]
    )


def test_log_probabilities_are_left_out_unless_asked_for() -> None:
    plain, chosen_only = (SamplingParams(temperature=1.0, seed=1, logprobs=n) for n in (None, 0))
    first, second = sample(torch.randn(2, 5), [row(1, plain), row(2, chosen_only)]).told
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs.top == ()


def test_more_alternatives_than_tokens_gives_all_of_them() -> None:
    assert len(log_probabilities(np.zeros(3), 0, 20).top) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_whose_logits_are_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0], [bad, bad], [4.0, 2.0]])
    params = SamplingParams(temperature=temperature, top_k=1, seed=0)
    sampled = sample(logits, [row(n, params, 5) for n in (1, 2, 3)])
    assert [(told.generation, told.token) for told in sampled.told] == [(1, 1), (3, 0)]
    [failure] = sampled.failed
    assert failure.generation == 2
    assert "not finite" in failure.reason
    assert all(0 <= token < 2 for token in sampled.tokens.tolist())


def test_a_very_low_temperature_does_not_overflow() -> None:
    logits = np.array([1000.0, -1000.0, 999.0])
    assert choose(logits, SamplingParams(temperature=1e-6, seed=5), 0) == 0


def expecting(token: int, params: SamplingParams, index: int = 0) -> CodaRow:
    return CodaRow(Generation(1), 0, index, params, expected=token)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_gap_of_an_expected_token_is_told_only_where_another_comes_out(
    logprobs: int | None,
) -> None:
    greedy = SamplingParams(logprobs=logprobs)
    logits = torch.tensor([[0.5, 2.0, 1.75]] * 3)
    rows = [expecting(1, greedy), expecting(2, greedy), row(1, greedy)]
    told = sample(logits, rows).told
    assert [(t.token, t.gap) for t in told] == [(1, None), (1, 0.25), (1, None)]


@given(LOGITS, st.floats(0.3, 3), st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_of_a_draw_the_gap_is_its_distance_from_the_share_of_the_token(
    logits: np.ndarray[tuple[int], np.dtype[np.float64]], temperature: float, seed: int, index: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)
    point = uniform(seed, Purpose.SAMPLE, index)
    weights = np.exp((logits - logits.max()) / temperature)
    edges = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
    for token in range(len(logits)):
        distance = max(edges[token] - point, point - edges[token + 1], 0.0)
        assert gap_of(logits, params, index, token) == pytest.approx(distance, abs=4e-4)
    assert gap_of(logits, params, index, choose(logits, params, index)) < 1e-9


def test_a_token_that_a_filter_dropped_by_less_than_rounding_is_near() -> None:
    logits = np.array([1.0, 0.9, 0.9 - 5e-5, 0.9 - 3e-4, -5.0])
    seeds = range(60)
    kept = SamplingParams(temperature=1.0, top_k=2)
    near = [gap_of(logits, msgspec.structs.replace(kept, seed=seed), 0, 2) for seed in seeds]
    assert min(near) == 0.0, "its share was met by no draw"
    dropped = [gap_of(logits, msgspec.structs.replace(kept, seed=seed), 0, 3) for seed in seeds]
    assert min(dropped) == math.inf


@pytest.mark.parametrize(("above", "near"), [(5e-5, True), (5e-3, False)])
def test_the_edge_of_the_nucleus_may_fall_either_way_by_rounding(above: float, near: bool) -> None:
    """Token 1 is in the nucleus or not; token 2 is what the draw gives if it is."""
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    params = SamplingParams(temperature=1.0, top_p=0.5 - above)
    assert distribution(logits, params)[0].tolist() == [0]
    gaps = [gap_of(logits, msgspec.structs.replace(params, seed=seed), 0, 1) for seed in range(60)]
    assert (min(gaps) == 0.0) == near
