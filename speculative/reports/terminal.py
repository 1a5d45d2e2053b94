"""Traces on the terminal, in colour where it has any: figure 1 of the paper."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from speculative.records import Record, Trace

# Beside the colour each kind has a form of its own, for those who see or print none.
STYLES = {
    "accepted": "green",
    "rejected": "red strike",
    "correction": "bold blue",
    "bonus": "underline blue",
}
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark of a blank


def print_traces(record: Record, console: Console | None = None, *, most: int = 2) -> None:
    """Print the first traces of every setting.

    Args:
      record: the record.
      console: where to print; standard output by default.
      most: traces per setting.
    """
    console = console or Console(file=sys.stdout)
    legend = Text("one line per target run: ")
    for kind, style in STYLES.items():
        legend.append(kind, style=style)
        legend.append(" ")
    for setting in record.settings:
        if not setting.examples:
            continue
        console.print()
        console.print(Text(f"temperature {setting.temperature:g}, gamma {setting.gamma}"))
        console.print(legend)
        for trace in setting.examples[:most]:
            _print_trace(trace, console)


def _print_trace(trace: Trace, console: Console) -> None:
    console.print()
    console.print(Text(f"input   {trace.input_text}"))
    for made in trace.rounds:
        line = Text("        ")
        for token in made.accepted:
            line.append(_shown(token), style=STYLES["accepted"])
        for token in made.rejected:
            line.append(_shown(token), style=STYLES["rejected"])
        if made.next:
            line.append(_shown(made.next), style=STYLES[made.kind])
        console.print(line)
    console.print(Text(f"output  {trace.output_text}"))


def _shown(token: str) -> str:
    return token.replace(_BLANK, " ").replace("\n", " ")
