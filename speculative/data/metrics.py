"""BLEU and ROUGE as T5 computes them: `metric(targets, predictions) -> {name: value}`, of strings.

The rules are those of T5's evaluation/metrics.py; the arithmetic is sacrebleu's and rouge-score's.
All values are percentages. No TensorFlow here.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU with sacrebleu's `intl` tokenisation and exponential smoothing.

    Args:
      targets: one reference a prediction.
      predictions: in the order of the targets.
    """
    import sacrebleu

    _same_length(targets, predictions)
    score = sacrebleu.corpus_bleu(
        list(predictions),
        [list(targets)],
        smooth_method="exp",
        smooth_value=0.0,
        force=False,
        lowercase=False,
        tokenize="intl",
        use_effective_order=False,
    )
    return {"bleu": score.score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean F-measure of ROUGE-1, ROUGE-2 and summary-level ROUGE-L.

    T5's tasks report the middle of a bootstrap (`rouge_bootstrap`), which draws from NumPy's global
    generator and so differs a little from call to call. This is the mean that it estimates (T5's
    `rouge_mean`), the same every time, and it is what our tasks use.
    """
    scores = _rouge_scores(targets, predictions)
    count = max(len(scores), 1)
    return {key: 100.0 * sum(s[key].fmeasure for s in scores) / count for key in ROUGE_KEYS}


def rouge_bootstrap(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """The middle of rouge-score's bootstrap interval: T5's published figure, random by nature."""
    from rouge_score import scoring

    aggregator = scoring.BootstrapAggregator()
    for score in _rouge_scores(targets, predictions):
        aggregator.add_scores(score)
    result = aggregator.aggregate()
    return {key: 100.0 * result[key].mid.fmeasure for key in ROUGE_KEYS}


def _rouge_scores(targets, predictions):
    from rouge_score import rouge_scorer

    _same_length(targets, predictions)
    scorer = rouge_scorer.RougeScorer(ROUGE_KEYS)

    def prepare(summary: str) -> str:
        # rougeLsum reads one sentence a line.
        return summary.replace(" . ", " .\n")

    return [
        scorer.score(target=prepare(target), prediction=prepare(prediction))
        for target, prediction in zip(targets, predictions, strict=True)
    ]


def _same_length(targets, predictions) -> None:
    if len(targets) != len(predictions):
        raise ValueError(f"{len(targets)} targets, but {len(predictions)} predictions")
