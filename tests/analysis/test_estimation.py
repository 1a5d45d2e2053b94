"""Estimates: values by hand, coverage of the intervals with fixed seeds, and the predictions."""

import numpy as np
import pytest
import scipy.stats

from speculative.analysis import estimation


def test_mean_by_example_weighs_tokens_not_examples():
    estimate = estimation.mean_by_example([[1.0, 1.0, 1.0], [], [0.0]], seed=0)
    assert estimate.estimate == 0.75
    assert estimate.count == 4
    assert 0 <= estimate.low <= 0.75 <= estimate.high <= 1


def test_resampled_means_weigh_tokens_too():
    # Long examples at 1, short ones at 0: a mean of the examples' means would be near .5.
    values = [np.ones(90), np.zeros(10)] * 20
    estimate = estimation.mean_by_example(values, seed=0)
    assert estimate.estimate == 0.9
    assert 0.8 < estimate.low < 0.87 and 0.93 < estimate.high < 0.96


def test_mean_by_example_repeats_with_its_seed_only():
    generator = np.random.default_rng(1)
    values = [generator.random(5) for _ in range(20)]
    first = estimation.mean_by_example(values, seed=3)
    assert first == estimation.mean_by_example(values, seed=3)
    assert first != estimation.mean_by_example(values, seed=4)


def test_mean_by_example_is_the_same_in_chunks(monkeypatch):
    values = [[i / 10, 1 - i / 30] for i in range(10)]
    whole = estimation.mean_by_example(values, seed=0)
    monkeypatch.setattr(estimation, "_CHUNK", 70)
    assert estimation.mean_by_example(values, seed=0) == whole


def test_one_example_or_pair_gives_no_interval():
    assert estimation.mean_by_example([[0.5, 0.7]], seed=0)[1:] == (None, None, 2)
    assert estimation.ratio_of_medians([2.0], [1.0], seed=0) == (2.0, None, None, 1)
    assert estimation.median_interval([2.0]) == (2.0, None, None, 1)


def test_block_bootstrap_covers_and_a_token_bootstrap_would_not():
    # Tokens of an example share a level: the blocks' interval must be as wide as that makes it.
    generator = np.random.default_rng(0)
    covered = covered_by_tokens = 0
    for trial in range(200):
        levels = generator.uniform(0.4, 1.0, size=40)
        lengths = generator.integers(10, 50, size=40)
        values = [np.full(n, level) for level, n in zip(levels, lengths, strict=True)]
        blocks = estimation.mean_by_example(values, seed=trial, resamples=300)
        covered += blocks.low <= 0.7 <= blocks.high
        tokens = np.concatenate(values)
        error = 1.96 * tokens.std() / np.sqrt(tokens.size)
        covered_by_tokens += abs(tokens.mean() - 0.7) <= error
    assert 178 <= covered <= 199  # 95% of 200 is 190; standard deviation 3.1
    assert covered_by_tokens < 120


def test_ratio_of_medians_by_hand():
    estimate = estimation.ratio_of_medians([4.0, 6.0, 5.0], [2.0, 2.5, 9.0], seed=0)
    assert estimate.estimate == 2.0
    assert estimate.count == 3
    assert estimate.low <= 2.0 <= estimate.high


def test_ratio_of_medians_keeps_pairs():
    # A machine whose speed drifts slows both: the ratio of each pair is exactly 3.
    drift = np.random.default_rng(0).uniform(1, 2, size=25)
    estimate = estimation.ratio_of_medians(3 * drift, drift, seed=0)
    assert estimate[:3] == pytest.approx((3, 3, 3))


def test_ratio_of_medians_covers():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        moment = generator.lognormal(0, 0.2, size=25)
        baseline = 2 * moment * generator.lognormal(0, 0.05, size=25)
        candidate = moment * generator.lognormal(0, 0.05, size=25)
        estimate = estimation.ratio_of_medians(baseline, candidate, seed=trial, resamples=300)
        covered += estimate.low <= 2 <= estimate.high
    assert 176 <= covered <= 200


@pytest.mark.parametrize("n", [2, 5, 6, 11, 100, 1500])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_median_interval_is_the_shortest_that_the_binomial_allows(n, level):
    estimate = estimation.median_interval(np.arange(1, n + 1)[::-1], level)
    k = int(estimate.low)
    assert estimate == ((n + 1) / 2, k, n + 1 - k, n)
    coverage = 1 - 2 * scipy.stats.binom.cdf(np.array([k - 1, k]), n, 0.5)
    assert coverage[0] >= level or k == 1
    assert coverage[1] < level


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimation.mean_by_example([[], []], seed=0), "no token"),
        (lambda: estimation.mean_by_example([[np.nan]], seed=0), "not finite"),
        (lambda: estimation.mean_by_example([[1.0]], seed=0, level=1.0), "level"),
        (lambda: estimation.mean_by_example([[1.0]], seed=0, resamples=0), "resamples"),
        (lambda: estimation.ratio_of_medians([1.0], [1.0, 2.0], seed=0), "paired"),
        (lambda: estimation.ratio_of_medians([1.0], [0.0], seed=0), "candidate_times"),
        (lambda: estimation.median_interval([]), "empty"),
        (lambda: estimation.median_interval([np.inf]), "positive and finite"),
        (lambda: estimation.predicted_parts(1.0, 0.0, 10, 5, -0.1, 1.0), "draft_step_s"),
        (lambda: estimation.predicted_parts(1.0, 0.0, 0, 5, 0.1, 1.0), "are 0"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_predicted_iid():
    assert estimation.predicted_iid(0.75, 7, 0.12) == pytest.approx(1.956, abs=5e-4)
    assert estimation.predicted_iid(0.75, 7, 0.12, 1.4) == pytest.approx(1.607, abs=5e-4)
    assert estimation.predicted_iid(0.07, 5, 0.11) == pytest.approx(0.69, abs=5e-3)


def test_predicted_parts():
    # 100 runs of 5 drafts at 1 ms and a verify run of 15 ms, after 50 ms of encoders.
    predicted = estimation.predicted_parts(4.1, 0.05, 100, 5, 0.001, 0.015)
    assert predicted == pytest.approx(4.1 / (0.05 + 100 * 0.02))


def test_both_predictions_agree_where_the_betas_are_independent():
    alpha, gamma, c, ratio, step_s, runs = 0.8, 5, 0.1, 1.3, 0.01, 1000
    tokens = runs * estimation.theory.expected_tokens(alpha, gamma)
    parts = estimation.predicted_parts(
        tokens * step_s, 0.0, runs, gamma, c * step_s, ratio * step_s
    )
    assert parts == pytest.approx(estimation.predicted_iid(alpha, gamma, c, ratio))
