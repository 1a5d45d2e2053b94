"""What an evaluation says about its outputs: predictions, quality, identity, traces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from speculative import pair as pairs
from speculative import records
from speculative.data import vocabulary as vocabularies
from speculative.decoding import loop, scoring
from speculative.decoding.round import Decoder, Request
from speculative.files import write_text_atomic
from speculative.runs import measure

# A lead of the best over the second logit below this is a near-tie in float32.
NEAR_TIE = 1e-3
_NOTES = {
    "kjv_to_web": "Much of a verse is copied from input to output, so drafts have an easy time of "
    "it: see the quality of copying the input.",
}


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One example, decoded both ways. Tokens end with EOS where the row did."""

    example_id: int
    inputs: tuple[int, ...]
    inputs_text: str
    targets_text: str
    fields: dict[str, Any]
    baseline: tuple[int, ...]
    speculative: tuple[int, ...]
    baseline_text: str
    speculative_text: str


def vocabulary_path(task) -> str:
    """The SentencePiece file of a task's targets."""
    return task.output_features["targets"].vocabulary.sentencepiece_model_file


def collect(batches, times: measure.Repeats, vocabulary: vocabularies.Vocabulary) -> list[Decoded]:
    """The valid rows of all batches, in the task's order."""
    done = []
    for batch, plain, fast in zip(batches, times.baseline, times.speculative, strict=True):
        for i in range(batch.num_examples):
            baseline = tuple(int(t) for t in plain.tokens[i, : plain.lengths[i]])
            speculative = tuple(int(t) for t in fast.tokens[i, : fast.lengths[i]])
            done.append(
                Decoded(
                    example_id=int(batch.example_ids[i]),
                    inputs=tuple(int(t) for t in batch.inputs[i] if t),
                    inputs_text=batch.inputs_text[i],
                    targets_text=batch.targets_text[i],
                    fields={name: values[i] for name, values in batch.fields.items()},
                    baseline=baseline,
                    speculative=speculative,
                    baseline_text=vocabulary.decode(baseline),
                    speculative_text=vocabulary.decode(speculative),
                )
            )
    return sorted(done, key=lambda row: row.example_id)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over all rows; `loop_runs` counts the loop's rounds, whatever the batch."""

    emitted: int
    accepted: int
    proposed: int
    target_runs: int
    draft_runs: int
    ended_on_draft: int
    accepted_per_position: tuple[int, ...]
    loop_runs: int


def totals(outputs: Sequence[loop.Output]) -> Totals:
    """Add up the statistics of several requests."""

    def total(name: str) -> int:
        return int(sum(getattr(o.statistics, name).sum() for o in outputs))

    places = np.sum([o.statistics.accepted_per_position.sum(axis=0) for o in outputs], axis=0)
    return Totals(
        emitted=total("emitted"),
        accepted=total("accepted"),
        proposed=total("proposed"),
        target_runs=total("target_runs"),
        draft_runs=total("draft_runs"),
        ended_on_draft=total("ended_on_draft"),
        accepted_per_position=tuple(int(n) for n in places),
        loop_runs=int(sum(o.statistics.target_runs.max() for o in outputs)),
    )


def quality(task, done: Sequence[Decoded]) -> records.Quality:
    """The task's own metrics of both decoders, and of copying the input."""

    def measured(predictions: list[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in task.metric_fns:
            for name, value in metric([row.targets_text for row in done], predictions).items():
                found[name] = float(getattr(value, "value", value))
        return found

    return records.Quality(
        autoregressive=measured([row.baseline_text for row in done]),
        speculative=measured([row.speculative_text for row in done]),
        copy_input=measured([row.inputs_text for row in done]),
    )


def identical(bench, done: Sequence[Decoded], temperature: float):
    """At temperature 0: how many outputs are equal to the last token; None above it."""
    if temperature != 0:
        return None
    near = 0
    differing = [row for row in done if row.baseline != row.speculative]
    for row in differing:
        pairwise = zip(row.baseline, row.speculative, strict=False)
        shorter = min(len(row.baseline), len(row.speculative))
        at = next((i for i, (a, b) in enumerate(pairwise) if a != b), shorter)
        tokens = np.zeros((1, bench.lengths["targets"]), np.int32)
        tokens[0, : len(row.baseline)] = row.baseline
        gaps = scoring.top_two_gap(
            bench.pair.target.model,
            bench.pair.weights,
            pairs.pad_inputs([row.inputs]),
            tokens,
            bench.settings(1, temperature),
        )
        near += float(gaps[0, min(at, gaps.shape[1] - 1)]) < NEAR_TIE
    return records.IdenticalOutputs(len(done), len(done) - len(differing), int(near))


def write_predictions(task, temperature: float, done: Sequence[Decoded], output_dir: str) -> None:
    """`<task>-temperature<T>.jsonl`: T5X's fields, one example a line."""
    lines = []
    for row in done:
        inputs = {k: v for k, v in row.fields.items() if isinstance(v, str | int | float)}
        inputs.setdefault("inputs_pretokenized", row.inputs_text)
        inputs.setdefault("targets_pretokenized", row.targets_text)
        line = {
            "inputs": inputs,
            "targets": row.targets_text,
            "prediction": row.speculative_text,
            "prediction_tokens": row.speculative,
            "aux": {
                "example_id": row.example_id,
                "autoregressive": row.baseline_text,
                "identical": row.baseline == row.speculative,
            },
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    path = f"{output_dir}/{task.name}-temperature{temperature:g}.jsonl"
    write_text_atomic(path, "".join(line + "\n" for line in lines))


def trace(decoder: Decoder, pair: pairs.Pair, batch, request: Request) -> records.Trace:
    """The rounds of a batch's first row, stepped."""
    words = pair.vocabulary

    def piece(token: int) -> str:
        return words.pieces[token] if 0 <= token < words.size else f"<{token}>"

    shown: list[records.Round] = []
    tokens: list[int] = []
    for _, record in loop.rounds(decoder, pair.weights, request):
        if not bool(record.live[0]):
            break
        drafted = [piece(int(t)) for t in record.proposal.tokens[0]]
        proposed = int(record.proposal.length[0])
        emitted = int(record.emitted[0])
        accepted = min(int(record.verdict.accepted[0]), emitted)
        tokens += [int(t) for t in record.proposal.tokens[0, :accepted]]
        ended_on_draft = emitted == accepted
        if ended_on_draft:
            kind, following = "end", ""
        else:
            kind = "bonus" if accepted == proposed else "correction"
            following = piece(int(record.verdict.next_token[0]))
            tokens.append(int(record.verdict.next_token[0]))
        shown.append(
            records.Round(
                accepted=tuple(drafted[:accepted]),
                rejected=tuple(drafted[accepted:proposed]),
                next=following,
                kind=kind,
            )
        )
    return records.Trace(
        example_id=int(batch.example_ids[0]),
        input_text=batch.inputs_text[0],
        output_text=words.decode(tokens),
        rounds=tuple(shown),
    )


def note(task) -> str | None:
    """A sentence that a reader of this task's figures must know."""
    return _NOTES.get(task.name)
