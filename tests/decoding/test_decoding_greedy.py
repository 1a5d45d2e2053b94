"""Temperature 0 on tiny random T5s: speculative equals autoregressive, token for token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from speculative.decoding import loop
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import ENDED_BY_EOS
from speculative.drafts.model import ModelDraft
from tests.decoding import toys

MODELS = 200
BUDGETS = np.arange(10)  # one row for each


@pytest.fixture(scope="module")
def models():
    return [toys.pair_weights(seed) for seed in range(MODELS)]


def requests():
    return [toys.request(toys.encoder_inputs(10, seed), BUDGETS) for seed in range(MODELS)]


@pytest.fixture(scope="module")
def baseline(models):
    base = autoregressive(toys.t5_decoder(1))
    return [loop.decode(base, w, r) for w, r in zip(models, requests(), strict=True)]


def assert_same_output(got, wanted):
    for field in ("tokens", "lengths", "end_reason"):
        np.testing.assert_array_equal(getattr(got, field), getattr(wanted, field))


def test_baseline_is_varied_and_ends_in_every_way(baseline):
    reasons = np.concatenate([output.end_reason for output in baseline])
    assert (reasons == ENDED_BY_EOS).sum() > 5
    tokens = np.concatenate([output.tokens[-1] for output in baseline])
    assert len(np.unique(tokens)) > 20
    for output in baseline:
        assert (output.lengths <= BUDGETS).all()
        by_budget = output.end_reason != ENDED_BY_EOS
        np.testing.assert_array_equal(output.lengths[by_budget], BUDGETS[by_budget])


@pytest.mark.parametrize("gamma", range(1, 9))
def test_speculative_equals_autoregressive(gamma, models, baseline):
    decoder = toys.t5_decoder(gamma)
    assert autoregressive(decoder) == autoregressive(toys.t5_decoder(1))
    accepted = proposed = 0
    for weights, request, wanted in zip(models, requests(), baseline, strict=True):
        got = loop.decode(decoder, weights, request)
        assert_same_output(got, wanted)
        counts = got.statistics
        np.testing.assert_array_equal(
            counts.emitted, counts.accepted + counts.target_runs - counts.ended_on_draft
        )
        accepted, proposed = accepted + counts.accepted.sum(), proposed + counts.proposed.sum()
    assert 0.05 < accepted / proposed < 0.95  # neither a draft that is never right nor always


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_and_so_it_does_in_the_layout_of_this_backend(gamma):
    """On CPU: panels, and attention, norm and argmax as kernels."""
    pair = {"target": toys.KERNEL_TARGET, "draft": toys.KERNEL_DRAFT}
    decoder = toys.t5_decoder(gamma, **pair | {"draft": ModelDraft(toys.KERNEL_DRAFT)})
    accepted = proposed = 0
    for seed, request in enumerate(requests()[:50]):
        weights = toys.pair_weights(seed, **pair)
        got = loop.decode(decoder, weights, request)
        assert_same_output(got, loop.decode(autoregressive(decoder), weights, request))
        accepted += got.statistics.accepted.sum()
        proposed += got.statistics.proposed.sum()
    assert 0.05 < accepted / proposed < 0.95


def test_draft_that_is_the_target_is_accepted_whole(models, baseline):
    decoder = toys.t5_decoder(3, draft=ModelDraft(toys.TARGET, "block"))
    for weights, request, wanted in list(zip(models, requests(), baseline, strict=True))[:8]:
        same = {"target": weights["target"], "draft": weights["target"]}
        got = loop.decode(decoder, same, request)
        assert_same_output(got, wanted)
        np.testing.assert_array_equal(got.statistics.target_runs, -(-wanted.lengths // 4))


def test_seeds_change_nothing(models):
    decoder = toys.t5_decoder(3)
    one, other = (
        loop.decode(decoder, models[0], dataclasses.replace(requests()[0], keys=keys))
        for keys in (requests()[0].keys, toys.request(np.ones((10, 1)), 1, seed=9).keys)
    )
    assert_same_output(one, other)
