"""alpha and top-two gaps against a plain computation from teacher-forced logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import sampling
from speculative.decoding import scoring
from speculative.models import t5
from tests.decoding import toys

ROWS, LENGTH = 3, 6
# Of the same structure all, so that one program serves them.
NEUTRAL = {"top_k": 0, "bias": {0: 0.0}, "vocab_size": 32}


@pytest.fixture(scope="module")
def case():
    """(weights, inputs, tokens without padding, the logits of target and of draft)."""
    weights = toys.pair_weights(0)
    inputs = toys.encoder_inputs(ROWS, seed=1)
    tokens = np.random.default_rng(2).integers(2, 32, size=(ROWS, LENGTH)).astype(np.int32)
    fed = np.concatenate([np.zeros((ROWS, 1), np.int32), tokens[:, :-1]], axis=1)
    # The training path: whole sequences without a cache.
    teacher_forced = jax.jit(t5.teacher_forced, static_argnums=1)
    logits = [
        np.asarray(teacher_forced(weights[name], model.config, inputs, fed, tokens), np.float64)
        for name, model in (("target", toys.TARGET), ("draft", toys.DRAFT))
    ]
    return weights, inputs, tokens, logits


def measured(case, mode, **settings):
    weights, inputs, tokens, _ = case
    settings = sampling.make(ROWS, **(NEUTRAL | settings))
    overlap = scoring.acceptance(
        toys.TARGET,
        toys.DRAFT,
        weights,
        jnp.asarray(inputs),
        jnp.asarray(tokens),
        settings,
        mode=mode,
    )
    assert overlap.shape == (ROWS, LENGTH)
    return np.asarray(overlap)


def softmax(logits):
    law = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return law / law.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_sampled_alpha_is_the_common_mass_of_both_laws(case, temperature):
    p, q = (softmax(logits / temperature) for logits in case[3])
    wanted = np.minimum(p, q).sum(axis=-1)
    assert wanted.min() < 0.5 < wanted.max()
    np.testing.assert_allclose(measured(case, "sampled", temperature=temperature), wanted, 1e-4)


def test_sampled_alpha_is_of_the_laws_after_every_filter(case):
    def law(logits):
        logits = logits / 0.8
        third = np.sort(logits, axis=-1)[..., -3:-2]
        return softmax(np.where(logits >= third, logits, -np.inf))

    wanted = np.minimum(*map(law, case[3])).sum(axis=-1)
    unfiltered = np.minimum(*(softmax(logits / 0.8) for logits in case[3])).sum(axis=-1)
    assert np.abs(wanted - unfiltered).max() > 0.01
    got = measured(case, "sampled", temperature=0.8, top_k=3)
    np.testing.assert_allclose(got, wanted, 1e-4, atol=1e-7)


def test_greedy_alpha_says_where_the_best_tokens_agree(case):
    p, q = (logits.argmax(axis=-1) for logits in case[3])
    assert 0 < (p == q).mean() < 1
    np.testing.assert_array_equal(measured(case, "greedy"), p == q)


def test_forbidden_tokens_count_for_neither_law(case):
    forbidden = [int(t) for t in np.unique(case[3][0].argmax(axis=-1))]
    allowed = [np.where(np.isin(np.arange(32), forbidden), -np.inf, x) for x in case[3]]
    p, q = (logits.argmax(axis=-1) for logits in allowed)
    np.testing.assert_array_equal(measured(case, "greedy", forbidden_ids=forbidden), p == q)


def test_a_model_agrees_with_itself(case):
    weights, inputs, tokens, _ = case
    settings = sampling.make(ROWS, temperature=0.7)
    overlap = scoring.acceptance(
        toys.TARGET,
        toys.TARGET,
        {"target": weights["target"], "draft": weights["target"]},
        jnp.asarray(inputs),
        jnp.asarray(tokens),
        settings,
        mode="sampled",
    )
    np.testing.assert_allclose(overlap, 1.0, rtol=1e-6)


@pytest.mark.parametrize("forbidden", [(), (5, 9)])
def test_top_two_gap(case, forbidden):
    weights, inputs, tokens, (logits, _) = case
    settings = sampling.make(ROWS, **(NEUTRAL | {"forbidden_ids": forbidden}))
    gap = scoring.top_two_gap(
        toys.TARGET, weights, jnp.asarray(inputs), jnp.asarray(tokens), settings
    )
    best = np.sort(np.delete(logits, forbidden, axis=-1), axis=-1)
    np.testing.assert_allclose(gap, best[..., -1] - best[..., -2], rtol=1e-4, atol=1e-5)
