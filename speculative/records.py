"""`record.json`: what a run measured, in one versioned schema that is checked both ways.

Reports read nothing else. Optional figures are None (JSON null) where a run did not take them;
an absent optional field reads as None, an unknown field is an error. Seconds end in `_s`,
milliseconds in `_ms`. Three acceptance figures are kept apart: `alpha`, E[sum_x min(p, q)] over the
tokens that the target generated; `acceptance_of_drafted`, accepted over drafted tokens;
`tokens_per_target_run`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator

from etils import epath

from speculative import schema
from speculative.errors import RecordError
from speculative.files import write_text_atomic
from speculative.provenance import Host, Provenance, provenance
from speculative.record_parts import (
    Alpha,
    Ends,
    GammaPoint,
    GammaSearch,
    IdenticalOutputs,
    Interval,
    Memory,
    Model,
    PerToken,
    Quality,
    Round,
    StepTimes,
    Trace,
    Walltime,
    ratio_faults,
)
from speculative.schema import Checked, Count, Fault, NonNegative, Positive, PositiveCount, Share

__all__ = [
    "VERSION",
    "Alpha",
    "Ends",
    "GammaPoint",
    "GammaSearch",
    "Host",
    "IdenticalOutputs",
    "Interval",
    "Memory",
    "Model",
    "PerToken",
    "Provenance",
    "Quality",
    "Record",
    "Round",
    "Setting",
    "StepTimes",
    "Trace",
    "Walltime",
    "provenance",
    "read_record",
    "write_record",
]

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Setting(Checked):
    """One task, draft and way of sampling, with everything measured for it.

    Attributes (those whose name does not say it):
      exact: whether the verifier keeps the target's law; else `total_variation` is what it costs.
      top_k, top_p: 0 (and 1 for top_p) where off.
      precision: matrix-multiplication precision that goes with `dtype`.
      accepted_per_position: accepted drafted tokens by place in the block, [gamma] counts.
      verify_ratio: time of a target run over gamma + 1 positions / over one.
      predicted_iid, predicted_parts: speed-ups, see `analysis.estimation`.
      emitted .. ended_on_draft: sums over rows, live rows only; `ended_on_draft` counts rows whose
        last token was a drafted one. emitted = accepted + target_runs - ended_on_draft.
      note: a sentence that a reader of the figures must know.
    """

    task: str
    split: str
    num_examples: PositiveCount
    draft: Model
    verifier: str
    exact: bool
    temperature: NonNegative
    top_k: Count
    top_p: Share
    gamma: Count
    batch_size: PositiveCount
    dtype: str
    precision: str | None = None
    total_variation: Share | None = None
    alpha: Alpha | None = None
    acceptance_of_drafted: Share | None = None
    tokens_per_target_run: NonNegative | None = None
    accepted_per_position: tuple[Count, ...] | None = None
    c: Interval | None = None
    verify_ratio: Positive | None = None
    walltime: Walltime | None = None
    step_times: StepTimes | None = None
    predicted_iid: Positive | None = None
    predicted_parts: Positive | None = None
    identical_outputs: IdenticalOutputs | None = None
    quality: Quality | None = None
    emitted: Count | None = None
    accepted: Count | None = None
    proposed: Count | None = None
    target_runs: Count | None = None
    draft_runs: Count | None = None
    ended_on_draft: Count | None = None
    ends: Ends | None = None
    memory: Memory | None = None
    gamma_search: GammaSearch | None = None
    examples: tuple[Trace, ...] | None = None
    note: str | None = None

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        accepted, proposed, runs = self.accepted, self.proposed, self.target_runs
        emitted, ended, ends = self.emitted, self.ended_on_draft, self.ends
        if accepted is not None and runs is not None and ended is not None:
            total = accepted + runs - ended
            if emitted is not None and emitted != total:
                rule = "accepted + target_runs - ended_on_draft"
                yield "emitted", f"{rule} = {accepted} + {runs} - {ended} = {total}", emitted
        if accepted is not None and proposed is not None and accepted > proposed:
            yield "accepted", f"at most proposed, {proposed}", accepted
        if proposed is not None and runs is not None and proposed > self.gamma * runs:
            yield "proposed", f"at most gamma * target_runs, {self.gamma * runs}", proposed
        if ends is not None and ended is not None and ended > ends.eos + ends.budget:
            yield "ended_on_draft", f"at most the rows in ends, {ends.eos + ends.budget}", ended
        yield from ratio_faults(
            "acceptance_of_drafted", self.acceptance_of_drafted, accepted, proposed
        )
        yield from ratio_faults("tokens_per_target_run", self.tokens_per_target_run, emitted, runs)
        places = self.accepted_per_position
        if places is not None:
            if len(places) != self.gamma or sorted(places, reverse=True) != list(places):
                expected = f"{self.gamma} counts (gamma), none above the one before it"
                yield "accepted_per_position", expected, list(places)
            elif accepted is not None and sum(places) != accepted:
                expected = f"counts that add up to accepted, {accepted}"
                yield "accepted_per_position", expected, list(places)


@dataclasses.dataclass(frozen=True)
class Record(Checked):
    """One run. `created` is an ISO 8601 time with its offset; `version` is the schema's."""

    run_mode: str
    created: str
    provenance: Provenance
    target: Model
    settings: tuple[Setting, ...]
    version: int = VERSION

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        try:
            aware = datetime.datetime.fromisoformat(self.created).tzinfo is not None
        except ValueError:
            aware = False
        if not aware:
            yield "created", "an ISO 8601 time with its offset", self.created
        if not self.settings:
            yield "settings", "at least one setting", []


def write_record(record: Record, path: epath.PathLike) -> epath.Path:
    """Checks a record and writes it whole (see `write_text_atomic`); returns the path.

    NumPy scalars and arrays among its values are written as numbers and lists.

    Raises:
      RecordError: the record does not follow the schema; nothing is written then.
      OSError: the file system refuses the file.
    """
    value = schema.to_json(record)
    _check_version(value)
    value = schema.to_json(schema.from_json(Record, value, "record"))
    text = json.dumps({"version": VERSION, **value}, indent=2, ensure_ascii=False, allow_nan=False)
    return write_text_atomic(path, text + "\n")


def read_record(path: epath.PathLike) -> Record:
    """Reads and checks a record.

    Raises:
      RecordError: no file, not JSON, another version, or not the schema; one line naming the field,
        what was expected and what was found.
    """
    path = epath.Path(path)
    try:
        text = path.read_text()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise RecordError(f"No record at {path}", mend="Give the path of a record.json") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not JSON", found=error) from None
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON", found=error) from None
    _check_version(value)
    return schema.from_json(Record, value, "record")


def _check_version(value: object) -> None:
    if not isinstance(value, dict):
        raise schema.fault("record", "an object", value)
    version = value.get("version")
    if type(version) is not int or version != VERSION:
        raise RecordError(
            "record.version is not one that this code reads",
            expected=VERSION,
            found=repr(version),
            mend="Run again with this code, or read it with the code that wrote it",
        )
