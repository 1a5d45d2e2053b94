"""The result table of a record, after the paper's Table 2: for terminals and in Markdown."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculative.records import Record
from speculative.reports.cells import Column, caveats, columns, summary

WIDE = 120  # columns of a terminal that may show one table
_MEASURING_WIDTH = 10_000


def print_tables(record: Record, console: Console | None = None) -> None:
    """Prints the table, or stacked tables on a narrow terminal, with summary and caveats.

    Numbers are never cut: where even one figure beside the row's name is wider than the terminal,
    the lines run on past its edge.

    Args:
      record: the record.
      console: where to print; standard output by default.
    """
    console = console or Console(file=sys.stdout)
    tables = _layout(columns(record), console.width)
    console.print(Text(summary(record)))
    for table in tables:
        console.print()
        if _width(table) <= console.width:
            console.print(table)
        else:  # rich would cut its cells; printed as text, the terminal breaks its lines instead
            wide = io.StringIO()
            _plain_console(wide, _MEASURING_WIDTH).print(table)
            console.print(Text(wide.getvalue()), soft_wrap=True, end="")
    notes = caveats(record)
    if notes:
        console.print()
    for line in notes:
        console.print(Text(f"! {line}"))


def to_text(record: Record, width: int = WIDE) -> str:
    """What `print_tables` prints on a terminal of `width` columns, as plain text."""
    text = io.StringIO()
    print_tables(record, _plain_console(text, width))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def to_markdown(record: Record) -> str:
    """Summary, one table with every column, and caveats, in GitHub's Markdown."""
    shown = columns(record)
    rows = [
        [column.header.replace("- ", "") for column in shown],
        ["---:" if column.numeric else ":---" for column in shown],
    ]
    rows += [
        [_markdown(_joined(column.cells[i])) for column in shown]
        for i in range(len(record.settings))
    ]
    lines = [_markdown(summary(record)), ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    notes = caveats(record)
    if notes:
        lines += ["", *(f"- {_markdown(line)}" for line in notes)]
    return "\n".join(lines) + "\n"


def _joined(cell: tuple[str, ...]) -> str:
    """An interval stands behind its estimate, metrics behind each other."""
    return (" " if cell[-1].startswith("[") else ", ").join(cell)


def _markdown(text: str) -> str:
    for mark in ("\\", "|", "<", "*", "`", "_"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def _layout(shown: list[Column], width: int) -> list[Table]:
    """One table where it fits, else as few as hold the groups, else as few as hold the columns.

    In stacked tables one column names the row on several lines, so that figures have the room.
    """
    key = [column for column in shown if column.group == "key"]
    figures = [column for column in shown if column.group != "key"]
    if width >= WIDE:
        for whole in (_table(shown), _table([_row_names(key), *figures])):
            if _width(whole) <= width:
                return [whole]
    name = _row_names(key)
    groups = [list(group) for _, group in itertools.groupby(figures, lambda c: c.group)]
    return [
        _table([name, *part])
        for run in _packed(groups, name, width)
        for part in _packed([[column] for column in run], name, width)
    ]


def _packed(pieces: list[list[Column]], name: Column, width: int) -> Iterator[list[Column]]:
    """Joins neighbouring pieces as long as their table stays within `width`."""
    taken: list[Column] = []
    for piece in pieces:
        if taken and _width(_table([name, *taken, *piece])) > width:
            yield taken
            taken = []
        taken = [*taken, *piece]
    yield taken


def _row_names(key: list[Column]) -> Column:
    """The key columns in one: text on lines of its own, the numbers T and gamma on the last."""

    def cell(i: int) -> tuple[str, ...]:
        words = [column.cells[i][0] for column in key if not column.numeric]
        numbers = [f"{c.header}={c.cells[i][0]}" for c in key if c.numeric]
        return (*words, " ".join(numbers))

    return Column("setting", "key", tuple(cell(i) for i in range(len(key[0].cells))), numeric=False)


def _table(shown: list[Column]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, leading=1
    )
    for column in shown:
        header = Text("\n".join(column.header.split()))
        table.add_column(header, justify="right" if column.numeric else "left", no_wrap=True)
    for i in range(len(shown[0].cells)):
        table.add_row(*(Text("\n".join(column.cells[i])) for column in shown))
    return table


def _width(table: Table) -> int:
    """Columns of a terminal that the table takes when nothing in it is broken."""
    return _plain_console(io.StringIO(), _MEASURING_WIDTH).measure(table).maximum


def _plain_console(file: io.StringIO, width: int) -> Console:
    """A console that writes plain text, the same whatever terminal or notebook surrounds it."""
    return Console(
        file=file,
        width=width,
        height=100,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        legacy_windows=False,
    )
