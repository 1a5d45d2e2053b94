"""The paper's formulas against its own tables and against identities that hold for any law."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.analysis import theory

TABLE_1 = [  # alpha, gamma, operations, speed (paper, Table 1: c = c_hat = 0)
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

TABLE_4 = [  # gamma, alpha, c, Exp (paper, Tables 2 and 4; EnDe then CNN/DM)
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]

BEST_GAMMA = [  # alpha, c, best gamma, its improvement (recomputed from the printed alpha and c)
    (0.75, 0.02, 9, 3.199),
    (0.82, 0.11, 6, 2.512),
    (0.68, 0.04, 6, 2.351),
    (0.53, 0.02, 5, 1.891),
    (0.56, 0.11, 3, 1.541),
]

unit = st.floats(0, 1, allow_subnormal=False)


@st.composite
def laws(draw):
    size = draw(st.integers(1, 6))
    pair = []
    for _ in range(2):
        weights = np.array(draw(st.lists(st.integers(0, 50), min_size=size, max_size=size)), float)
        weights[draw(st.integers(0, size - 1))] += 1
        pair.append(weights / weights.sum())
    return pair


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert round(float(theory.operations_factor(alpha, gamma, 0)), 2) == operations
    assert round(float(theory.walltime_improvement(alpha, gamma, 0)), 2) == speed


def test_table_4_expected_within_the_rounding_of_its_inputs():
    gamma, alpha, c, expected = np.array(TABLE_4).T
    improvement = theory.walltime_improvement(alpha, gamma, c)
    np.testing.assert_allclose(improvement, expected, rtol=0, atol=0.07)
    # Three rows round to another last digit; alpha and c within their own rounding cover them.
    low = theory.walltime_improvement(alpha - 0.005, gamma, c + 0.005)
    high = theory.walltime_improvement(alpha + 0.005, gamma, c - 0.005)
    assert np.all((low <= expected + 0.05) & (expected - 0.05 <= high))


def test_anchors():
    assert theory.walltime_improvement(0.75, 1, 0.02) == pytest.approx(1.716, abs=5e-4)
    np.testing.assert_allclose(
        theory.walltime_improvement(0.75, 7, 0.12, [1.0, 1.4]), [1.956, 1.607], atol=5e-4
    )
    assert theory.walltime_improvement(0.07, 5, 0.11) == pytest.approx(0.69, abs=5e-3)
    assert theory.expected_tokens(0.8, 5) == pytest.approx(3.689, abs=5e-4)
    assert theory.acceptance_of_drafted(0.8, 5) == pytest.approx(0.5379, abs=5e-5)
    assert theory.expected_tokens(0.2, 3) == pytest.approx(1.248, abs=5e-4)


def test_a5_at_temperature_0():
    improvement = theory.walltime_improvement([0.75, 0.75, 0.80, 0.87], 8, 0.015)
    np.testing.assert_allclose(improvement, [3.303, 3.303, 3.865, 4.907], atol=5e-4)


@pytest.mark.parametrize(
    ("p", "q", "alpha"),
    [
        ((0.6, 0.4), (0.8, 0.2), 0.8),
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2 / 3),
        ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 0.7),
    ],
)
def test_check_pairs(p, q, alpha):
    assert theory.acceptance_probability(p, q) == pytest.approx(alpha, abs=1e-12)


@given(laws())
def test_alpha_is_one_less_total_variation(pair):
    p, q = pair
    total_variation = 0.5 * np.abs(p - q).sum()
    assert theory.divergence(p, q) == pytest.approx(total_variation, abs=1e-12)
    assert theory.acceptance_probability(p, q) == pytest.approx(1 - total_variation, abs=1e-12)


@given(laws())
def test_corollary_3_4(pair):
    p, q = pair
    divergence = theory.divergence(p, q)
    assert divergence == theory.divergence(q, p)
    assert 0 <= divergence <= 1
    assert theory.divergence(p, p) == 0
    assert (divergence == pytest.approx(1, abs=1e-12)) == (not np.any((p > 0) & (q > 0)))


@given(unit, st.integers(0, 40))
def test_expected_tokens_is_the_geometric_sum(alpha, gamma):
    tokens = theory.expected_tokens(alpha, gamma)
    assert tokens == pytest.approx(sum(alpha**i for i in range(gamma + 1)), rel=1e-12)
    assert 1 <= tokens <= gamma + 1


@pytest.mark.parametrize("below_one", [0, 1e-15, 1e-12, 1e-9, 1e-6])
def test_expected_tokens_near_one(below_one):
    assert theory.expected_tokens(1 - below_one, 7) == pytest.approx(8 - 28 * below_one, rel=1e-10)


def test_expected_tokens_without_a_cap():
    np.testing.assert_allclose(theory.expected_tokens([0, 0.5, 0.75], np.inf), [1, 2, 4])


@given(unit, st.floats(0, 1), st.integers(0, 12), st.floats(1, 3))
def test_improvement_and_operations_are_tokens_over_cost(alpha, c, gamma, ratio):
    tokens = theory.expected_tokens(alpha, gamma)
    improvement = theory.walltime_improvement(alpha, gamma, c, ratio)
    assert improvement * (gamma * c + ratio) == pytest.approx(tokens)
    assert theory.operations_factor(alpha, gamma, c) * tokens == pytest.approx(
        gamma * c + gamma + 1
    )


@given(unit, st.floats(0, 0.99))
def test_corollary_3_9(alpha, c):
    best = theory.best_gamma(alpha, c, max_gamma=8)
    if alpha > c:
        assert best.improvement >= (1 + alpha) / (1 + c) - 1e-12
    else:
        assert best.gamma == 0 and best.improvement == 1


@pytest.mark.parametrize(("alpha", "c", "gamma", "improvement"), BEST_GAMMA)
def test_best_gamma(alpha, c, gamma, improvement):
    best = theory.best_gamma(alpha, c)
    assert best.gamma == gamma
    assert best.improvement == pytest.approx(improvement, abs=5e-4)


@settings(max_examples=30)
@given(unit, st.floats(0, 1), st.floats(0, 0.3))
def test_best_gamma_with_a_verify_ratio_is_the_best_of_all(alpha, c, slope):
    def ratio(positions):
        return 1 + slope * (positions - 1)

    values = [theory.walltime_improvement(alpha, g, c, ratio(g + 1)) for g in range(11)]
    for given_as in (ratio, [ratio(g + 1) for g in range(11)]):
        best = theory.best_gamma(alpha, c, given_as, max_gamma=10)
        assert best.improvement == values[best.gamma]
        assert best.improvement == pytest.approx(max(values), rel=1e-12)


def test_best_gamma_broadcasts_and_takes_one_ratio():
    best = theory.best_gamma(np.array([[0.07], [0.75]]), np.array([0.02, 0.11]), 1.4)
    assert best.gamma.shape == (2, 2)
    assert best.gamma[0].tolist() == [0, 0]  # a bad draft is best left out
    assert best.improvement[1, 0] == pytest.approx(
        max(theory.walltime_improvement(0.75, np.arange(1, 33), 0.02, 1.4))
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "alpha"),
        (lambda: theory.expected_tokens(np.nan, 3), "alpha"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma"),
        (lambda: theory.expected_tokens(0.5, 1.5), "gamma"),
        (lambda: theory.acceptance_of_drafted(0.5, 0), "gamma"),
        (lambda: theory.walltime_improvement(0.5, 3, -0.1), "c "),
        (lambda: theory.walltime_improvement(0.5, 3, 0.1, 0), "verify_ratio"),
        (lambda: theory.operations_factor(0.5, 3, np.inf), "c_hat"),
        (lambda: theory.best_gamma(0.5, 0.1, max_gamma=-1), "max_gamma"),
        (lambda: theory.best_gamma(0.5, 0.1, [1, 1.1], max_gamma=4), "verify_ratio"),
        (lambda: theory.divergence([0.5, 0.4], [0.5, 0.5]), "p "),
        (lambda: theory.divergence([0.5, 0.5], [1.5, -0.5]), "q "),
        (lambda: theory.acceptance_probability([1.0], [0.5, 0.5]), "same tokens"),
        (lambda: theory.acceptance_probability(1.0, [1.0]), "axis"),
    ],
)
def test_an_argument_out_of_range_is_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
