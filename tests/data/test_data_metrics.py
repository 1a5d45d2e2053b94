"""Metrics: the values of sacrebleu and rouge-score, with T5's settings."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer

from speculative.data import metrics, offline

TARGETS = [
    "Das Licht ist gut, sagte er (1.5%).",
    "Er sah die Stadt\u2026",
    "Am Anfang war das Wort.",
]
PREDICTIONS = ["Das Licht war gut, sagt er (1,5%).", "Er sah eine Stadt...", "Am Anfang war Wort."]


def test_bleu_is_sacrebleu_with_intl_tokens():
    scorer = sacrebleu.BLEU(tokenize="intl", smooth_method="exp", effective_order=False)
    expected = scorer.corpus_score(PREDICTIONS, [TARGETS]).score
    assert metrics.bleu(TARGETS, PREDICTIONS) == {"bleu": pytest.approx(expected, abs=1e-12)}
    assert metrics.bleu(TARGETS, TARGETS)["bleu"] == pytest.approx(100)
    other = sacrebleu.corpus_bleu(PREDICTIONS, [TARGETS], tokenize="13a").score
    assert expected != pytest.approx(other)


def test_copying_the_input_of_the_embedded_task():
    pairs = offline.verse_pairs("test")
    score = metrics.bleu([p.target for p in pairs], [p.source for p in pairs])["bleu"]
    assert score == pytest.approx(53.384, abs=5e-3)


def test_rouge_is_the_mean_of_rouge_score():
    targets = ["the cat sat . the dog ran .", "a quiet street in the city ."]
    predictions = ["the dog ran . a cat sat .", "the city has a street ."]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeLsum"])
    rows = [
        scorer.score(target=t.replace(" . ", " .\n"), prediction=p.replace(" . ", " .\n"))
        for t, p in zip(targets, predictions, strict=True)
    ]
    found = metrics.rouge(targets, predictions)
    assert list(found) == ["rouge1", "rouge2", "rougeLsum"]
    for key, value in found.items():
        assert value == pytest.approx(100 * np.mean([row[key].fmeasure for row in rows]))
    assert metrics.rouge(targets, predictions) == found
    # The line break matters: summary-level ROUGE-L matches sentence by sentence.
    unbroken = scorer.score(target=targets[0], prediction=predictions[0])
    assert unbroken["rougeLsum"].fmeasure < rows[0]["rougeLsum"].fmeasure


def test_rouge_bootstrap_surrounds_the_mean():
    targets = [f"the number {i} and the {i % 3} of them" for i in range(30)]
    predictions = [f"a number {i} or the {i % 4} of these" for i in range(30)]
    np.random.seed(0)  # rouge-score draws from NumPy's global generator
    drawn = metrics.rouge_bootstrap(targets, predictions)
    assert drawn == pytest.approx(metrics.rouge(targets, predictions), abs=1.0)


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.rouge])
def test_a_missing_prediction_is_an_error(metric):
    with pytest.raises(ValueError, match="3 targets, but 2 predictions"):
        metric(TARGETS, PREDICTIONS[:2])
