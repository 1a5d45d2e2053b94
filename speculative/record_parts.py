"""The parts of a record: intervals, models, times, counts of ends, traces.

`records` puts them together and is what other modules import. Units are in the names: seconds end
in `_s`, milliseconds in `_ms`. `faults` of a part yields what its fields get wrong together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from speculative.schema import Checked, Count, Fault, NonNegative, Positive, PositiveCount, Share

_ROUNDING = 1e-3  # figures may be written rounded, but not contradict their parts


def interval_faults(
    name: str, estimate: float, low: float | None, high: float | None
) -> Iterator[Fault]:
    """What is wrong where an interval has one end only or does not hold its estimate."""
    if (low is None) != (high is None):
        yield "low", "both low and high, or neither", {"low": low, "high": high}
    elif low is not None and high is not None and not low <= estimate <= high:
        yield name, f"a number from low to high, {low} to {high}", estimate


def ratio_faults(
    name: str, ratio: float | None, over: int | float | None, under: int | float | None
) -> Iterator[Fault]:
    """What is wrong where a ratio, if known, is not that of its parts, if known."""
    if ratio is None or over is None or under is None:
        return
    if not under:
        yield name, "null where it would be a division by 0", ratio
    elif not math.isclose(ratio, over / under, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        yield name, f"{over} / {under} = {over / under:.4g}", ratio


@dataclasses.dataclass(frozen=True)
class Interval(Checked):
    """A value with an interval; `low` and `high` are both None where there is none."""

    estimate: NonNegative
    low: NonNegative | None = None
    high: NonNegative | None = None

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        yield from interval_faults("estimate", self.estimate, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Alpha(Checked):
    """E[sum_x min(p, q)] (Corollary 3.6) and the number of tokens behind it."""

    estimate: Share
    low: Share | None
    high: Share | None
    tokens: PositiveCount

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        yield from interval_faults("estimate", self.estimate, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Model:
    """A target or draft: name, parameters (0 for a draft without), checkpoint as the user gave, and
    the dtype that its matrices were kept in, where that is not the setting's."""

    name: str
    parameters: Count | None = None
    checkpoint: str | None = None
    weights_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class PerToken:
    """Milliseconds per emitted token, over the whole call (encoders included)."""

    autoregressive: Positive
    speculative: Positive


@dataclasses.dataclass(frozen=True)
class Walltime(Checked):
    """Interleaved repeats, after compilation and warm-up. Times are medians, in seconds.

    Attributes:
      autoregressive_s: baseline over all timed examples.
      speculative_s: speculative decoding of the same examples.
      per_token_ms: both, per emitted token.
      repeats: pairs of repeats.
      speedup: autoregressive_s / speculative_s; `low` and `high` its interval.
      compile_s: compilation of both loops; no part of the times above.
      encoder_s, draft_s, verify_s: parts of speculative_s; `other_s` is what they leave.
      examples, tokens: timed examples, and tokens that they emitted speculatively.
    """

    autoregressive_s: Positive
    speculative_s: Positive
    per_token_ms: PerToken
    repeats: PositiveCount
    speedup: Positive
    low: NonNegative | None = None
    high: NonNegative | None = None
    compile_s: NonNegative | None = None
    encoder_s: NonNegative | None = None
    draft_s: NonNegative | None = None
    verify_s: NonNegative | None = None
    other_s: float | None = None
    examples: PositiveCount | None = None
    tokens: PositiveCount | None = None

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        yield from interval_faults("speedup", self.speedup, self.low, self.high)
        yield from ratio_faults("speedup", self.speedup, self.autoregressive_s, self.speculative_s)


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of separately compiled steps called alternately on the run's real shapes.

    Attributes:
      target_step_s: one target run over one position.
      draft_step_s: t_q, one draft step.
      verify_s: t_v, one target run over gamma + 1 positions.
    """

    target_step_s: Positive
    draft_step_s: NonNegative
    verify_s: Positive


@dataclasses.dataclass(frozen=True)
class Memory:
    """How near the baseline comes to the machine's memory.

    Attributes:
      bandwidth_gb_s: measured read bandwidth, 1e9 bytes per second.
      baseline_share: of that bandwidth, what an autoregressive step reaches; above 1 where a cache
        holds the weights.
      bytes_per_target_step: weights that a target step reads.
    """

    bandwidth_gb_s: Positive | None = None
    baseline_share: NonNegative | None = None
    bytes_per_target_step: Count | None = None


@dataclasses.dataclass(frozen=True)
class GammaPoint:
    """One gamma of the search: milliseconds per token and speed-up over the baseline."""

    gamma: Count
    ms_per_token: Positive
    speedup: Positive


@dataclasses.dataclass(frozen=True)
class GammaSearch(Checked):
    """The search for gamma, on the split named (not the one that is reported)."""

    split: str
    points: tuple[GammaPoint, ...]

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        gammas = [point.gamma for point in self.points]
        if not gammas or sorted(set(gammas)) != gammas:
            yield "points", "at least one point, each gamma once, in rising order", gammas


@dataclasses.dataclass(frozen=True)
class IdenticalOutputs(Checked):
    """Speculative against autoregressive outputs of the same examples, token for token.

    Attributes:
      compared: examples compared.
      identical: of these, equal to the last token.
      near_ties: of the others, those whose first difference arose at a near-tie of the target's
        two largest logits.
    """

    compared: Count
    identical: Count
    near_ties: Count = 0

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        if self.identical > self.compared:
            yield "identical", f"at most compared, {self.compared}", self.identical
        elif self.near_ties > self.compared - self.identical:
            yield "near_ties", f"at most {self.compared - self.identical}", self.near_ties


@dataclasses.dataclass(frozen=True)
class Quality(Checked):
    """The task's metrics by name for both decoders, and for copying the input unchanged."""

    autoregressive: dict[str, float]
    speculative: dict[str, float]
    copy_input: dict[str, float] | None = None

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        if set(self.autoregressive) != set(self.speculative):
            expected = f"the metrics of autoregressive, {sorted(self.autoregressive)}"
            yield "speculative", expected, sorted(self.speculative)


@dataclasses.dataclass(frozen=True)
class Ends:
    """How rows ended: at the end-of-sequence token, or at the budget of tokens."""

    eos: Count
    budget: Count


@dataclasses.dataclass(frozen=True)
class Round(Checked):
    """One round of a trace, as pieces of text.

    Attributes:
      accepted: accepted drafted tokens.
      rejected: the rejected draft, and the drafts behind it or behind the end of the row.
      next: the token that the target adds; empty where the row ended on a drafted token.
      kind: `correction` after a rejection, `bonus` after a block accepted whole, `end` where the
        row ended on a drafted token.
    """

    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    next: str
    kind: Literal["correction", "bonus", "end"]

    def faults(self) -> Iterator[Fault]:
        """What the fields get wrong together."""
        if self.kind == "correction" and not self.rejected:
            yield "rejected", "at least one token in a round of kind 'correction'", []
        if self.kind == "bonus" and self.rejected:
            yield "rejected", "no token in a round of kind 'bonus'", list(self.rejected)
        if self.kind == "end" and (self.next or not self.accepted):
            yield "next", "'' after an accepted token in a round of kind 'end'", self.next


@dataclasses.dataclass(frozen=True)
class Trace:
    """One example decoded speculatively, round by round."""

    example_id: Count
    input_text: str
    output_text: str
    rounds: tuple[Round, ...]
