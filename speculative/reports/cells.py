"""The columns of the result table, as text: one place for terminal, Markdown and HTML.

A cell is a tuple of lines, each a piece that must not be broken; `-` stands for a figure that the
run did not take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from speculative.records import Model, Record, Setting

Cell = tuple[str, ...]

NONE: Cell = ("-",)
FEWEST_EXAMPLES = 64
FEWEST_TOKENS = 2000
_NO_FILTER = "no filter"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
      header: the heading; lines may break at its blanks.
      group: `key` (names the row), `acceptance`, `time` or `quality`.
      cells: one cell per setting.
      numeric: aligned to the right, never broken or cut.
    """

    header: str
    group: str
    cells: tuple[Cell, ...]
    numeric: bool = True


def columns(record: Record) -> list[Column]:
    """The columns of a record's table, in the order of the paper's Table 2, then what it lacks.

    Verifier, batch size and dtype have a column only where they differ between settings; else
    `summary` gives them.
    """
    settings = record.settings

    def column(
        header: str, group: str, cell: Callable[[Setting], Cell], numeric: bool = True
    ) -> Column:
        return Column(header, group, tuple(cell(s) for s in settings), numeric)

    result = [
        column("task", "key", lambda s: (s.task,), numeric=False),
        column("draft", "key", lambda s: (s.draft.name,), numeric=False),
        column("T", "key", lambda s: (f"{s.temperature:g}",)),
        column("gamma", "key", lambda s: (str(s.gamma),)),
    ]
    for header, text in _VARYING:
        if len({text(s) for s in settings}) > 1:
            result.append(column(header, "key", lambda s, text=text: (text(s),), numeric=False))
    result += [
        column("alpha", "acceptance", _alpha),
        column("tokens per target run", "acceptance", lambda s: _number(s.tokens_per_target_run)),
        column("accepted of drafted", "acceptance", lambda s: _number(s.acceptance_of_drafted, 3)),
        column("c", "acceptance", lambda s: _number(s.c.estimate if s.c else None, 3)),
        column("verify ratio", "acceptance", lambda s: _number(s.verify_ratio)),
        column("identical outputs", "acceptance", _identical),
        column("auto- regressive ms/token", "time", lambda s: _per_token(s, "autoregressive")),
        column("speculative ms/token", "time", lambda s: _per_token(s, "speculative")),
        column("speed-up", "time", _speedup),
        column("predicted iid", "time", lambda s: _number(s.predicted_iid, 2, "x")),
        column("predicted parts", "time", lambda s: _number(s.predicted_parts, 2, "x")),
        column("quality auto- regressive", "quality", lambda s: _quality(s, "autoregressive")),
        column("quality speculative", "quality", lambda s: _quality(s, "speculative")),
    ]
    if any(s.quality and s.quality.copy_input for s in settings):
        result.append(
            column("quality copied input", "quality", lambda s: _quality(s, "copy_input"))
        )
    return result


def summary(record: Record) -> str:
    """One line: target, devices, and what all settings share."""
    parts = [f"target {model_text(record.target)}"]
    if record.provenance.devices:
        parts.append(f"on {', '.join(record.provenance.devices)}")
    for header, text in _VARYING:
        values = {text(s) for s in record.settings}
        if len(values) == 1 and values != {_NO_FILTER}:
            parts.append(f"{header} {values.pop()}")
    return "; ".join(parts)


def caveats(record: Record) -> list[str]:
    """What a reader of the figures must know, one sentence each, without repeats."""
    lines = []
    for s in record.settings:
        name = f"{s.task}, {s.draft.name}, T={s.temperature:g}, gamma={s.gamma}"
        if s.note:
            lines.append(s.note)
        if not s.exact:
            cost = "" if s.total_variation is None else f" (total variation {s.total_variation:g})"
            lines.append(f"{name}: {s.verifier} is lossy{cost}, not the target's law.")
        lines += [f"{name}: {line}" for line in _time_caveats(s)]
        same = s.identical_outputs
        if s.temperature == 0 and s.exact and same and same.identical < same.compared:
            differing = same.compared - same.identical
            lines.append(
                f"{name}: {differing} of {same.compared} outputs differ from the baseline's, "
                f"{same.near_ties} of them from a near-tie of the target's logits ({_dtype(s)})."
            )
    return list(dict.fromkeys(lines))


def model_text(model: Model) -> str:
    """`name (77M parameters)`."""
    if model.parameters is None:
        return model.name
    return f"{model.name} ({count_text(model.parameters)} parameters)"


def count_text(count: int) -> str:
    """`11.3B`, `77M`, `912`."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{float(f'{count / unit:.3g}'):g}{letter}"
    return str(count)


def _time_caveats(s: Setting) -> Iterable[str]:
    time = s.walltime
    if time is None:
        return
    if time.speedup < 1:
        yield "slower than the baseline; gamma 0 (no draft) is the better setting."
    examples = time.examples if time.examples is not None else s.num_examples
    tokens = time.tokens if time.tokens is not None else s.emitted
    if examples < FEWEST_EXAMPLES or (tokens is not None and tokens < FEWEST_TOKENS):
        found = f"{examples} examples" + ("" if tokens is None else f" and {tokens} tokens")
        yield (
            f"timed on {found}; a figure to publish needs at least {FEWEST_EXAMPLES} examples and "
            f"{FEWEST_TOKENS} tokens."
        )


def _dtype(s: Setting) -> str:
    kept = s.draft.weights_dtype
    parts = [s.dtype]
    if kept not in (None, s.dtype):
        parts.append(f"the draft's weights {kept}")
    if s.precision is not None:
        parts.append(f"precision {s.precision}")
    return ", ".join(parts)


def _sampling(s: Setting) -> str:
    filters = [f"top-k {s.top_k}"] if s.top_k else []
    filters += [f"top-p {s.top_p:g}"] if 0 < s.top_p < 1 else []
    return ", ".join(filters) or _NO_FILTER


_VARYING: tuple[tuple[str, Callable[[Setting], str]], ...] = (
    ("verifier", lambda s: s.verifier + ("" if s.exact else " (lossy)")),
    ("filter", _sampling),
    ("batch", lambda s: str(s.batch_size)),
    ("dtype", _dtype),
    ("split", lambda s: s.split),
)


def _number(value: float | None, digits: int = 2, unit: str = "") -> Cell:
    return NONE if value is None else (f"{value:.{digits}f}{unit}",)


def _interval(estimate: str, low: float | None, high: float | None, digits: int) -> Cell:
    if low is None or high is None:
        return (estimate,)
    return (estimate, f"[{low:.{digits}f}, {high:.{digits}f}]")


def _alpha(s: Setting) -> Cell:
    a = s.alpha
    return NONE if a is None else _interval(f"{a.estimate:.3f}", a.low, a.high, 3)


def _speedup(s: Setting) -> Cell:
    time = s.walltime
    return NONE if time is None else _interval(f"{time.speedup:.2f}x", time.low, time.high, 2)


def _per_token(s: Setting, which: str) -> Cell:
    return NONE if s.walltime is None else _number(getattr(s.walltime.per_token_ms, which))


def _identical(s: Setting) -> Cell:
    same = s.identical_outputs
    return NONE if same is None else (f"{same.identical}/{same.compared}",)


def _quality(s: Setting, which: str) -> Cell:
    metrics = s.quality and getattr(s.quality, which)
    if not metrics:
        return NONE
    return tuple(f"{n} {v:.{1 if abs(v) >= 10 else 3}f}" for n, v in metrics.items())
