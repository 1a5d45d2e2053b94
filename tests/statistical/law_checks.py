"""The two checks that a law has to pass: by summation, and by sampling the compiled loop."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from speculative import sampling, testing
from speculative.decoding import loop
from speculative.decoding.round import Decoder, Request
from speculative.drafts.model import ModelDraft
from speculative.verification import TokenVerifier

MODEL = testing.TableLanguageModel(vocab_size=3, contexts=4)
SIGNIFICANCE = 1e-6
ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Named(TokenVerifier):
    """Token verification under a name, so that a patched loop is not taken from jit's cache."""

    name: str = ""


def decoder(**changes) -> Decoder:
    """Two rounds and more: gamma 2, four tokens, drafted by another table."""
    settings = {
        "target": MODEL,
        "draft": ModelDraft(MODEL),
        "gamma": 2,
        "max_length": 4,
        "mode": "sampled",
        "eos_id": None,
    }
    return Decoder(**(settings | changes))


def weights(target_seed: int = 0, draft_seed: int = 1, scale: float = 1.2):
    return {
        "target": testing.random_tables(MODEL, target_seed, scale=scale),
        "draft": testing.random_tables(MODEL, draft_seed, scale=scale),
    }


def enumeration_gap(decoder: Decoder, make_weights=weights, **settings) -> float:
    """Total variation, in float64, between what is emitted and the target's own law."""
    with jax.enable_x64(True):
        one = sampling.make(1, **({"temperature": 1.0} | settings))
        got = testing.exact_law(decoder, make_weights(), one)
        assert abs(sum(got.values()) - 1) < 1e-9
        return testing.total_variation(got, testing.target_law(decoder, make_weights(), one))


def check_by_summation(decoder: Decoder, make_weights=weights, **settings) -> None:
    gap = enumeration_gap(decoder, make_weights, **settings)
    assert gap < 1e-9, f"total variation {gap}"


def sample(
    decoder: Decoder, some_weights, *, batches: int, budgets=None, seed: int = 0, **settings
) -> dict[int, collections.Counter]:
    """How often each output came, for each budget, from batches of the real compiled loop."""
    budgets = np.full(ROWS, decoder.max_length) if budgets is None else np.asarray(budgets)
    counts: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    chosen = sampling.make(ROWS, **({"temperature": 1.0} | settings))
    for number in range(batches):
        request = Request(
            inputs=jnp.ones((ROWS, 1), jnp.int32),
            budgets=jnp.asarray(budgets, jnp.int32),
            sampling=chosen,
            keys=sampling.row_keys(sampling.base_key(seed), rows, jnp.full_like(rows, number)),
        )
        output = loop.decode(decoder, some_weights, request)
        seen = np.concatenate([budgets[:, None], output.lengths[:, None], output.tokens], axis=1)
        for row, count in zip(*np.unique(seen, axis=0, return_counts=True), strict=True):
            budget, length, tokens = int(row[0]), int(row[1]), row[2:]
            counts[budget][tuple(int(t) for t in tokens[:length])] += int(count)
    return counts


def chi_square(counts: collections.Counter, law: testing.SequenceLaw) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells with less than 5 expected are pooled."""
    strangers = [s for s in counts if law.get(s, 0.0) < 1e-12]
    assert not strangers, f"outside the target's support: {strangers[:5]}"
    total = counts.total()
    pairs = [(counts.get(s, 0), total * chance) for s, chance in law.items()]
    small = [pair for pair in pairs if pair[1] < 5]
    cells = [pair for pair in pairs if pair[1] >= 5]
    if small:
        cells.append((sum(o for o, _ in small), max(sum(e for _, e in small), 1.0)))
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def check_by_sampling(
    decoder: Decoder,
    *,
    batches: int = 16,
    budgets=None,
    make_weights=weights,
    inputs=(1,),
    **settings,
) -> None:
    """Chi-square of whole outputs against the target's joint law, at significance 1e-6."""
    counts = sample(decoder, make_weights(), batches=batches, budgets=budgets, **settings)
    one = sampling.make(1, **({"temperature": 1.0} | settings))
    statistic, freedom = 0.0, 0
    for budget, counted in counts.items():
        law = testing.target_law(decoder, make_weights(), one, budget=budget, inputs=inputs)
        part, cells = chi_square(counted, law)
        statistic, freedom = statistic + part, freedom + cells
    if freedom == 0:
        return
    chance = scipy.stats.chi2.sf(statistic, freedom)
    assert chance > SIGNIFICANCE, f"chi-square {statistic:.1f} on {freedom}: p = {chance:.1e}"


def detectable_total_variation(samples: int, freedom: int, power: float = 0.999) -> float:
    """A law this far from the target's fails the check with probability `power` at least.

    The statistic's noncentrality is N sum (d^2 / p), which is at least 4 N TV^2.
    """
    critical = scipy.stats.chi2.isf(SIGNIFICANCE, freedom)
    low, high = 0.0, 10.0 * critical + 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = scipy.stats.ncx2.sf(critical, freedom, middle) >= power
        low, high = (low, middle) if enough else (middle, high)
    return float(np.sqrt(high / (4 * samples)))
