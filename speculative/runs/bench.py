"""A pair on a task, as every setting of an evaluation decodes it; its gamma and its alpha."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from speculative import pair as pairs
from speculative import records, sampling
from speculative.analysis import estimation
from speculative.data import batches as data_batches
from speculative.decoding import scoring
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Decoder, Request
from speculative.drafts.model import ModelDraft
from speculative.errors import TaskError
from speculative.runs import measure, outputs, progress

# Rows of a teacher-forced pass: its logits are [rows, targets, vocabulary].
_SCORING_ROWS = 16
# Interleaved repeats behind the choice of gamma.
_SEARCH_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all settings of a run share: the pair, the task, and how it is decoded."""

    pair: pairs.Pair
    task: Any
    lengths: dict[str, int]
    batch_size: int
    buckets: tuple[int, ...] | None
    seed: int
    top_k: int
    top_p: float
    positions: int

    def decoder(self, gamma: int, temperature: float) -> Decoder:
        """The speculative decoder of a setting."""
        return Decoder(
            target=self.pair.target.model,
            draft=ModelDraft(self.pair.draft.model),
            gamma=gamma,
            max_length=self.lengths["targets"],
            mode="greedy" if temperature == 0 else "sampled",
            eos_id=self.pair.vocabulary.eos_id,
            positions=self.positions,
        )

    def settings(self, batch: int, temperature: float) -> sampling.Sampling:
        """The law's settings for `batch` rows."""
        return sampling.make(
            batch,
            temperature=temperature,
            top_k=self.top_k or None,
            top_p=None if self.top_p == 1.0 else self.top_p,
        )

    def request(self, batch: data_batches.EvaluationBatch, temperature: float) -> Request:
        """What is asked of the decoder for a batch of examples."""
        request = pairs.make_request(
            batch.inputs,
            max_length=self.lengths["targets"],
            settings=self.settings(len(batch.inputs), temperature),
            seed=self.seed,
            example_ids=np.maximum(batch.example_ids, 0),
        )
        # Rows that only fill up the batch have no budget: they end before they begin.
        return dataclasses.replace(
            request, budgets=request.budgets * np.asarray(batch.valid, np.int32)
        )

    def batches(self, split: str, count: int | None) -> list[data_batches.EvaluationBatch]:
        """The first `count` examples of a split (None: all); TaskError if it has none."""
        found = list(
            data_batches.evaluation_batches(
                self.task,
                split=split,
                lengths=self.lengths,
                batch_size=self.batch_size,
                num_examples=count,
                buckets=self.buckets,
            )
        )
        if not found:
            raise TaskError(f"the split {split!r} of {self.task.name} has no example")
        return found


def choose_gamma(bench: Bench, temperature: float, gammas, validation, split: str):
    """The fastest gamma on validation examples of one width, and the search behind it."""
    if len(gammas) == 1:
        return gammas[0], None
    by_width: dict[int, list] = {}
    for batch in validation:
        by_width.setdefault(batch.inputs.shape[1], []).append(batch)
    chosen = max(by_width.values(), key=len)
    requests = [bench.request(batch, temperature) for batch in chosen]
    fast = [bench.decoder(gamma, temperature) for gamma in gammas]
    decoders = [autoregressive(fast[0]), *fast]
    title = f"choose gamma at temperature {temperature:g}"
    with progress.bar(title, 1 + _SEARCH_REPEATS * len(requests)) as bar:
        measure.warm_up(decoders, bench.pair.weights, requests)
        bar.advance()
        times = measure.interleaved(
            decoders, bench.pair.weights, requests, _SEARCH_REPEATS, bar.advance
        )
    baseline, *per_token = (_seconds_per_token(decoded) for decoded in times)
    points = [
        records.GammaPoint(gamma, seconds * 1e3, baseline / seconds)
        for gamma, seconds in zip(gammas, per_token, strict=True)
    ]
    best = max(points, key=lambda point: point.speedup)
    return best.gamma, records.GammaSearch(split, tuple(points))


def _seconds_per_token(decoded: Sequence[Sequence[measure.Decoded]]) -> float:
    """Median over repeats, encoders included."""
    emitted = sum(int(one.output.lengths.sum()) for one in decoded[0])
    return float(np.median([measure.total_s(repeat) for repeat in decoded])) / max(emitted, 1)


def alpha_of(bench: Bench, temperature: float, done: Sequence[outputs.Decoded]):
    """alpha over the tokens that the target generated autoregressively, by example."""
    values = []
    mode = "greedy" if temperature == 0 else "sampled"
    width = bench.lengths["inputs"]
    for at in range(0, len(done), _SCORING_ROWS):
        rows = done[at : at + _SCORING_ROWS]
        inputs = np.zeros((_SCORING_ROWS, width), np.int32)
        tokens = np.zeros((_SCORING_ROWS, bench.lengths["targets"]), np.int32)
        for i, row in enumerate(rows):
            inputs[i, : len(row.inputs)] = row.inputs
            tokens[i, : len(row.baseline)] = row.baseline
        overlap = scoring.acceptance(
            bench.pair.target.model,
            bench.pair.draft.model,
            bench.pair.weights,
            inputs,
            tokens,
            bench.settings(_SCORING_ROWS, temperature),
            mode=mode,
        )
        overlap = np.asarray(overlap, np.float64)
        values += [overlap[i, : len(row.baseline)] for i, row in enumerate(rows)]
    return estimation.mean_by_example([v for v in values if len(v)], bench.seed)
