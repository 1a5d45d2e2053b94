"""The law of the whole output, by sampling the compiled loop: chi-square over joint laws.

Every law here has at most 81 outputs. At significance 1e-6, 16 batches of 4,096 rows find a total
variation of 0.025 with probability 0.999 or more, 64 batches find 0.0125
(`detectable_total_variation`).
"""

import numpy as np
import pytest
import scipy.stats

from speculative import sampling, testing
from speculative.decoding.autoregressive import autoregressive
from speculative.drafts.model import ModelDraft
from speculative.models.language_model import T5LanguageModel
from tests.decoding import toys
from tests.statistical.law_checks import (
    MODEL,
    ROWS,
    SIGNIFICANCE,
    check_by_sampling,
    chi_square,
    decoder,
    detectable_total_variation,
    sample,
    weights,
)


def test_what_the_samples_can_detect():
    assert detectable_total_variation(16 * ROWS, 80) < 0.025
    assert detectable_total_variation(64 * ROWS, 80) < 0.0125


@pytest.mark.parametrize(
    ("gamma", "catch_up"), [(1, "step"), (2, "step"), (2, "block"), (4, "block")]
)
def test_output_has_the_targets_law(gamma, catch_up):
    check_by_sampling(decoder(gamma=gamma, draft=ModelDraft(MODEL, catch_up)), batches=64)


def test_filters_eos_and_ragged_budgets():
    budgets = np.resize([1, 2, 3, 4, 4, 4], ROWS)
    check_by_sampling(
        decoder(eos_id=2), budgets=budgets, temperature=1.3, top_k=3, top_p=0.9, min_p=0.05
    )


def test_point_masses():
    check_by_sampling(decoder(draft=testing.PointMassDraft(MODEL), eos_id=2))


def test_rows_of_temperature_zero_among_others_change_no_law():
    temperature = np.resize([1.0, 0.0], ROWS)
    budgets = np.where(temperature > 0, 4, 3)  # keeps the two kinds of rows apart
    mixed = decoder(mode="mixed")
    counts = sample(mixed, weights(), batches=4, budgets=budgets, temperature=temperature)
    (greedy,) = counts[3]
    assert counts[3][greedy] == 4 * ROWS // 2
    one = sampling.make(1, temperature=1.0)
    statistic, freedom = chi_square(counts[4], testing.target_law(decoder(), weights(), one))
    assert scipy.stats.chi2.sf(statistic, freedom) > SIGNIFICANCE


def test_draft_that_is_the_target():
    check_by_sampling(decoder(), make_weights=lambda: weights(0, 0))


def test_autoregressive_baseline_has_the_targets_law():
    check_by_sampling(autoregressive(decoder(eos_id=2)))


def test_tiny_t5s_have_the_targets_law():
    config = toys.CONFIG.replace(vocab_size=3, emb_dim=8, head_dim=4, num_decoder_layers=1)
    model = T5LanguageModel(config, layout="plain")

    def pair():
        return {
            name: model.prepare(toys.random_tree(config, seed))
            for seed, name in enumerate(("target", "draft"))
        }

    check_by_sampling(
        decoder(target=model, draft=ModelDraft(model), eos_id=2),
        make_weights=pair,
        batches=8,
        temperature=2.0,
    )
