"""The paper's formulas (Leviathan, Kalman, Matias, ICML 2023, section 3), in vectorised NumPy.

Symbols are the paper's: `p` and `q` are the laws of target and draft, `beta` the probability that
one drafted token is accepted, `alpha = E(beta)`, `gamma` the drafted tokens per target run, `c` the
time of a draft step over the time of a target step, `c_hat` the same ratio in arithmetic
operations. Every function broadcasts its arguments as NumPy does and returns float64; scalars in
give a scalar out. An argument outside its range is a `ValueError` that names it.

Equation 1, and all that follows from it here, assumes that the betas of successive positions are
independent and equal in law, and that outputs are long against gamma: at about 30 tokens it
overstates by several per cent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_SUM_TOLERANCE = 1e-3  # float32 softmaxes over 32k tokens sum to one within about 1e-5
_TIE = 1e-12  # relative: what rounding alone can make of equal improvements

Numbers = ArrayLike | int | float  # a number or whatever NumPy makes an array of
Values = np.ndarray | np.floating  # an array, or a scalar where all arguments are scalars

# Time of a target run over M positions, relative to a run over one.
VerifyRatio = Numbers | Callable[[int], float]


class BestGamma(NamedTuple):
    """A gamma (int, or an array of them) and the walltime improvement that it gives."""

    gamma: np.ndarray | np.integer
    improvement: Values


def divergence(p: Numbers, q: Numbers) -> Values:
    """D_LK(p, q) = sum_x |p - M|, M = (p + q) / 2 (Definition 3.2): the total variation.

    Args:
      p: [..., V] laws; the last axis sums to one.
      q: [..., V] laws; leading axes broadcast against those of `p`.

    Returns:
      [...] in [0, 1]: 0 iff p = q, 1 iff the supports are disjoint (Corollary 3.4).
    """
    p, q = _laws(p, q)
    return np.minimum(np.abs(p - q).sum(axis=-1) / 2, 1)  # |p - M| = |p - q| / 2


def acceptance_probability(p: Numbers, q: Numbers) -> Values:
    """beta = sum_x min(p, q) = 1 - D_LK(p, q) (Lemma 3.3, Theorem 3.5).

    Its mean over positions is alpha (Corollary 3.6).

    Args:
      p: [..., V] laws of the target; the last axis sums to one.
      q: [..., V] laws of the draft; leading axes broadcast against those of `p`.

    Returns:
      [...] probabilities in [0, 1].
    """
    p, q = _laws(p, q)
    return np.minimum(np.minimum(p, q).sum(axis=-1), 1)  # laws sum to one only up to rounding


def expected_tokens(alpha: Numbers, gamma: Numbers) -> Values:
    """Tokens per target run, (1 - alpha^(gamma+1)) / (1 - alpha) (Equation 1).

    The limit at alpha = 1 is gamma + 1, and `gamma = np.inf` gives 1 / (1 - alpha) (section 3.6).

    Args:
      alpha: acceptance probability, in [0, 1].
      gamma: drafted tokens per target run, whole numbers >= 0 or infinity.

    Returns:
      Tokens, in [1, gamma + 1].
    """
    alpha, gamma = np.broadcast_arrays(_unit("alpha", alpha), _gamma(gamma))
    with np.errstate(divide="ignore", invalid="ignore"):
        # expm1 and log keep all digits where alpha is close to one.
        tokens = -np.expm1((gamma + 1) * np.log(alpha)) / (1 - alpha)
    # The bounds hold exactly, not only up to rounding.
    return np.clip(np.where(alpha == 1, gamma + 1, tokens), 1, gamma + 1)[()]


def acceptance_of_drafted(alpha: Numbers, gamma: Numbers) -> Values:
    """Accepted over drafted tokens, (E(tokens per run) - 1) / gamma.

    Not alpha, and below it for gamma > 1: every draft behind a rejection counts as drafted too.

    Args:
      alpha: acceptance probability, in [0, 1].
      gamma: drafted tokens per target run, whole numbers >= 1.

    Returns:
      Fractions in [0, alpha].
    """
    gamma = _gamma(gamma)
    if np.any(gamma < 1):
        raise ValueError("gamma must be at least 1 for a fraction of drafted tokens.")
    return (expected_tokens(alpha, gamma) - 1) / gamma


def walltime_improvement(
    alpha: Numbers, gamma: Numbers, c: Numbers, verify_ratio: Numbers = 1.0
) -> Values:
    """Expected speed-up, (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + v)) (Theorem 3.8).

    The paper takes v = 1: a target run over gamma + 1 positions costs what a run over one does.
    A measured v extends the theorem to machines where it does not.

    Args:
      alpha: acceptance probability, in [0, 1].
      gamma: drafted tokens per target run, whole numbers >= 0.
      c: time of a draft step / time of a target step, >= 0 (Definition 3.7).
      verify_ratio: v, time of a target run over gamma + 1 positions / over one, > 0.

    Returns:
      Autoregressive time / speculative time; above 1 is faster.
    """
    gamma = _gamma(gamma)
    c = _nonnegative("c", c)
    verify_ratio = _nonnegative("verify_ratio", verify_ratio)
    if np.any(verify_ratio == 0):
        raise ValueError("verify_ratio must be above 0.")
    return expected_tokens(alpha, gamma) / (gamma * c + verify_ratio)


def operations_factor(alpha: Numbers, gamma: Numbers, c_hat: Numbers = 0.0) -> Values:
    """Factor of total operations, (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1)).

    Theorem 3.11.

    Args:
      alpha: acceptance probability, in [0, 1].
      gamma: drafted tokens per target run, whole numbers >= 0.
      c_hat: operations per token of the draft / of the target, >= 0 (Definition 3.10).

    Returns:
      Speculative operations / autoregressive operations, at least 1 for c_hat = 0.
    """
    gamma = _gamma(gamma)
    c_hat = _nonnegative("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: Numbers, c: Numbers, verify_ratio: VerifyRatio = 1.0, max_gamma: int = 32
) -> BestGamma:
    """The whole gamma in 0 .. max_gamma that maximises Theorem 3.8 (section 3.5).

    Gamma 0 is plain autoregressive decoding with improvement 1: it wins where no draft helps, with
    v = 1 wherever alpha <= c (the converse of Corollary 3.9). Of equal values, up to rounding, the
    smallest gamma wins.

    Args:
      alpha: acceptance probability, in [0, 1].
      c: time of a draft step / time of a target step, >= 0; broadcast against `alpha`.
      verify_ratio: v, relative to a run over one position: one number for every gamma >= 1; or an
        array of max_gamma + 1 values whose entry g belongs to gamma = g; or a callable that is
        given the positions M = gamma + 1 of the run.
      max_gamma: largest gamma tried, >= 0.

    Returns:
      `BestGamma(gamma, improvement)`, each of the broadcast shape of `alpha` and `c`.
    """
    if max_gamma < 0:
        raise ValueError(f"max_gamma must be at least 0, not {max_gamma}.")
    gammas = np.arange(max_gamma + 1)
    if callable(verify_ratio):
        ratios = np.array([verify_ratio(int(gamma) + 1) for gamma in gammas], np.float64)
    else:
        ratios = np.asarray(verify_ratio, np.float64)
        if ratios.ndim == 0:
            ratios = np.where(gammas == 0, 1.0, ratios)
        elif ratios.shape != gammas.shape:
            raise ValueError(
                f"verify_ratio must be a number or hold one value for each gamma in 0 .. "
                f"{max_gamma} (shape {gammas.shape}), not shape {ratios.shape}."
            )
    alpha, c = np.broadcast_arrays(_unit("alpha", alpha), _nonnegative("c", c))
    improvements = walltime_improvement(alpha[..., None], gammas, c[..., None], ratios)
    largest = np.max(improvements, axis=-1, keepdims=True)
    best = np.argmax(improvements >= largest * (1 - _TIE), axis=-1)
    value = np.take_along_axis(improvements, best[..., None], axis=-1)[..., 0]
    return BestGamma(best[()], value[()])


def _laws(p: Numbers, q: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Both laws as float64; raises unless they are laws over the same tokens."""
    laws = []
    for name, law in (("p", p), ("q", q)):
        law = np.asarray(law, np.float64)
        if law.ndim == 0:
            raise ValueError(f"{name} must have an axis of tokens.")
        if not np.all(law >= 0) or not np.allclose(law.sum(axis=-1), 1, atol=_SUM_TOLERANCE):
            raise ValueError(f"{name} must be non-negative and sum to one over its last axis.")
        laws.append(law)
    if laws[0].shape[-1] != laws[1].shape[-1]:
        raise ValueError(
            f"p and q must be over the same tokens, not {laws[0].shape[-1]} and "
            f"{laws[1].shape[-1]}."
        )
    return laws[0], laws[1]


def _unit(name: str, value: Numbers) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if not np.all((value >= 0) & (value <= 1)):
        raise ValueError(f"{name} must lie in [0, 1].")
    return value


def _nonnegative(name: str, value: Numbers) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if not np.all((value >= 0) & np.isfinite(value)):
        raise ValueError(f"{name} must be finite and at least 0.")
    return value


def _gamma(gamma: Numbers) -> np.ndarray:
    gamma = np.asarray(gamma, np.float64)
    if not np.all((gamma >= 0) & (gamma == np.floor(gamma))):
        raise ValueError("gamma must be a whole number, at least 0.")
    return gamma
