"""Progress on the terminal: a bar where there is one, plain lines where output goes to a file."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping

# Where there is no terminal: a line at most this often, unless it says something.
_SECONDS_BETWEEN_LINES = 2.0


def describe(metrics: Mapping[str, float]) -> str:
    """`loss 1.234  accuracy 0.567`, the step left out."""
    return "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k != "step")


class Bar:
    """Shows how far a run is."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, max(total, 1), 0
        self._first, self._printed = None, -math.inf
        self._rich = self._task = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._rich = Progress(console=Console(stderr=True), transient=True)
            self._task = self._rich.add_task(title, total=self._total)
            self._rich.start()

    def update(self, done: int, note: str = "") -> None:
        """`done` of the total are done; `note` says more."""
        self._done = done
        if self._rich is not None:
            self._rich.update(self._task, completed=done, description=f"{self._title}  {note}")
            return
        now = time.monotonic()
        if not note and done < self._total and now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        if self._first is None:
            self._first = (done, now)
        rate = (done - self._first[0]) / max(now - self._first[1], 1e-9)
        left = f"  {(self._total - done) / rate / 60:.0f} min left" if rate > 0 else ""
        print(f"{self._title}: {done}/{self._total}  {note}{left}", file=sys.stderr, flush=True)

    def advance(self, note: str = "") -> None:
        """One more is done."""
        self.update(self._done + 1, note)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._rich is not None:
            self._rich.stop()


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Bar]:
    """A `Bar` that is taken away at the end, whatever happens."""
    shown = Bar(title, total)
    try:
        yield shown
    finally:
        shown.close()
