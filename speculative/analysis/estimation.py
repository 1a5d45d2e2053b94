"""Estimates with intervals from measured data, and the two predictions of a speed-up.

Every interval says which unit was resampled: tokens of one example are not independent, and times
are paired by the interleaved repeat that gave them. All randomness comes from the `seed` given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculative.analysis import theory
from speculative.analysis.theory import Numbers

_CHUNK = 1_000_000  # resampled indices held at a time


class Estimate(NamedTuple):
    """A value, its interval, and how many observations stand behind it.

    Attributes:
      estimate: the value from the whole data.
      low: lower end, never above `estimate`; None where one unit alone gives no interval.
      high: upper end, never below `estimate`; None as for `low`.
      count: observations (tokens, repeats), named by the function that made it.
    """

    estimate: float
    low: float | None
    high: float | None
    count: int


def mean_by_example(
    values_per_example: Sequence[Numbers],
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
) -> Estimate:
    """Mean over all tokens with a block-bootstrap interval: whole examples are resampled.

    With sum_x min(p, q) of every token as the values this is alpha (Corollary 3.6): each token
    weighs the same, so an example weighs as many tokens as it has. The interval is the percentile
    one (Efron and Tibshirani 1993, section 13).

    Args:
      values_per_example: for each example the values of its tokens, [tokens_i]. Examples without
        tokens carry no information and are left out.
      seed: seed of the resampling.
      level: coverage aimed at, in (0, 1).
      resamples: bootstrap samples.

    Returns:
      `Estimate` whose count is the number of tokens; no interval from fewer than two examples.

    Raises:
      ValueError: no token at all, a value that is not finite, or an argument out of range.
    """
    _check(level, resamples)
    arrays = [np.asarray(values, np.float64).ravel() for values in values_per_example]
    arrays = [values for values in arrays if values.size]
    if not arrays:
        raise ValueError("values_per_example holds no token.")
    if not all(np.all(np.isfinite(values)) for values in arrays):
        raise ValueError("values_per_example holds a value that is not finite.")
    sums = np.array([values.sum() for values in arrays])
    counts = np.array([values.size for values in arrays])
    means = [
        sums[rows].sum(axis=-1) / counts[rows].sum(axis=-1)
        for rows in _resampled_rows(len(arrays), seed, resamples)
    ]
    return _estimate(sums.sum() / counts.sum(), means, level, int(counts.sum()), len(arrays))


def ratio_of_medians(
    baseline_times: Numbers,
    candidate_times: Numbers,
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
) -> Estimate:
    """median(baseline) / median(candidate) from interleaved repeats, resampled as pairs.

    A speed-up when the candidate is speculative decoding; c when the baseline is a draft step and
    the candidate a target step. Resampling pairs keeps what a slow moment of the machine did to
    both. Below about ten repeats a percentile interval of medians is too narrow.

    Args:
      baseline_times: [repeats] seconds, > 0.
      candidate_times: [repeats] seconds, > 0; entry i was taken next to entry i of the baseline.
      seed: seed of the resampling.
      level: coverage aimed at, in (0, 1).
      resamples: bootstrap samples.

    Returns:
      `Estimate` whose count is the number of pairs; no interval from a single pair.

    Raises:
      ValueError: unequal numbers of repeats, none, a time that is not positive and finite.
    """
    _check(level, resamples)
    baseline = _times("baseline_times", baseline_times)
    candidate = _times("candidate_times", candidate_times)
    if baseline.size != candidate.size:
        raise ValueError(
            f"baseline_times and candidate_times must be paired: {baseline.size} and "
            f"{candidate.size} repeats."
        )
    ratios = [
        np.median(baseline[rows], axis=-1) / np.median(candidate[rows], axis=-1)
        for rows in _resampled_rows(baseline.size, seed, resamples)
    ]
    value = np.median(baseline) / np.median(candidate)
    return _estimate(value, ratios, level, baseline.size, baseline.size)


def median_interval(times: Numbers, level: float = 0.95) -> Estimate:
    """Median with the distribution-free interval between two order statistics.

    The k-th smallest and the k-th largest of n values enclose the median with probability
    1 - 2 P(Binomial(n, 1/2) < k), whatever the law (David and Nagaraja 2003, section 7.1); the
    largest k that still reaches `level` is taken. Below six values none reaches .95: the interval
    is then smallest to largest, and covers with probability 1 - 2^(1-n).

    Args:
      times: [repeats] seconds, > 0.
      level: coverage aimed at, in (0, 1).

    Returns:
      `Estimate` in seconds whose count is the number of repeats; no interval from one.

    Raises:
      ValueError: no times, or a time that is not positive and finite.
    """
    _check(level, 1)
    ordered = np.sort(_times("times", times))
    n = ordered.size
    median = float(np.median(ordered))
    if n == 1:
        return Estimate(median, None, None, 1)
    # tail = 2 P(Binomial(n, 1/2) < k + 1), in whole numbers so that it is exact for any n.
    k, tail = 1, 2 * (1 + n)
    while 2 * (k + 1) <= n and tail / 2**n <= 1 - level:
        k += 1
        tail += 2 * math.comb(n, k)
    return Estimate(median, float(ordered[k - 1]), float(ordered[n - k]), n)


def predicted_iid(alpha: float, gamma: int, c: float, verify_ratio: float = 1.0) -> float:
    """Speed-up by Theorem 3.8 with the measured verify cost, from alpha alone.

    See `theory.walltime_improvement` for the arguments and `theory` for what it assumes.
    """
    return float(theory.walltime_improvement(alpha, gamma, c, verify_ratio))


def predicted_parts(
    baseline_s: float,
    encoder_s: float,
    target_runs: int | float,
    gamma: int,
    draft_step_s: float,
    verify_s: float,
) -> float:
    """Speed-up that the parts predict: baseline_s / (encoder_s + runs (gamma t_q + t_v)).

    It uses the run's own number of target runs, so it assumes nothing about acceptance: what is
    left between it and the measured speed-up is the loop's own cost.

    Args:
      baseline_s: autoregressive decoding of the same examples, seconds, its encoder included.
      encoder_s: encoder runs of target and draft, seconds.
      target_runs: target runs of the loop (in a batch, rounds: rows share a run), >= 0.
      gamma: drafted tokens per target run, >= 0.
      draft_step_s: t_q, seconds of one draft step.
      verify_s: t_v, seconds of one target run over gamma + 1 positions.

    Returns:
      Predicted autoregressive time / speculative time.

    Raises:
      ValueError: a negative or non-finite argument, or parts that take no time at all.
    """
    arguments = {
        "baseline_s": baseline_s,
        "encoder_s": encoder_s,
        "target_runs": target_runs,
        "gamma": gamma,
        "draft_step_s": draft_step_s,
        "verify_s": verify_s,
    }
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, not {value}.")
    parts_s = encoder_s + target_runs * (gamma * draft_step_s + verify_s)
    if parts_s <= 0:
        raise ValueError("encoder_s and target_runs * (gamma * draft_step_s + verify_s) are 0.")
    return float(baseline_s / parts_s)


def _check(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}.")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, not {resamples}.")


def _times(name: str, times: Numbers) -> np.ndarray:
    times = np.asarray(times, np.float64).ravel()
    if not times.size:
        raise ValueError(f"{name} is empty.")
    if not np.all(np.isfinite(times) & (times > 0)):
        raise ValueError(f"{name} must be positive and finite.")
    return times


def _resampled_rows(n: int, seed: int, resamples: int):
    """Yields [some, n] indices drawn with replacement, `resamples` rows of them in all."""
    generator = np.random.default_rng(seed)
    step = max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        yield generator.integers(n, size=(min(step, resamples - start), n))


def _estimate(
    value: float, resampled: list[np.ndarray], level: float, count: int, units: int
) -> Estimate:
    value = float(value)
    if units < 2:
        return Estimate(value, None, None, count)
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(resampled), [tail, 1 - tail])
    return Estimate(value, min(float(low), value), max(float(high), value), count)
