"""Speed-up against gamma as an inline SVG, coloured by the page's own CSS."""

from __future__ import annotations

import math
from html import escape

from speculative.records import GammaSearch

_WIDTH, _HEIGHT = 420.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 16.0, 24.0, 40.0
_STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_MOST_TICKS = 6


def gamma_chart(search: GammaSearch, chosen: int, title: str) -> str:
    """An SVG element: one point per gamma with its value, the chosen gamma ringed, 1x dashed.

    Args:
      search: the search, gammas rising.
      chosen: gamma of the reported setting; ringed if among the points.
      title: what the chart shows, read out by screen readers.
    """
    points = search.points
    gammas = [p.gamma for p in points]
    first, last = min(gammas), max(gammas)
    top, step = _axis(max(1.0, *(p.speedup for p in points)))

    def x(gamma: int) -> float:
        share = (gamma - first) / (last - first) if last > first else 0.5
        return _LEFT + 14 + share * (_WIDTH - _LEFT - _RIGHT - 28)

    def y(speedup: float) -> float:
        return _HEIGHT - _BOTTOM - speedup / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img">',
        f"<title>{escape(title)}</title>",
    ]
    for i in range(round(top / step) + 1):
        value = i * step
        parts.append(_line("grid", _LEFT, y(value), _WIDTH - _RIGHT, y(value)))
        parts.append(_text("tick", _LEFT - 6, y(value) + 4, f"{value:g}x", "end"))
    parts.append(_line("one", _LEFT, y(1.0), _WIDTH - _RIGHT, y(1.0)))
    for gamma in _labelled(gammas):
        parts.append(_text("tick", x(gamma), _HEIGHT - _BOTTOM + 16, str(gamma)))
    parts.append(_text("axis", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "gamma"))
    path = " ".join(f"{x(p.gamma):.1f},{y(p.speedup):.1f}" for p in points)
    parts.append(f'<polyline class="curve" points="{path}"/>')
    for p in points:
        mark = "point chosen" if p.gamma == chosen else "point"
        radius = 6 if p.gamma == chosen else 3.5
        parts.append(
            f'<circle class="{mark}" cx="{x(p.gamma):.1f}" cy="{y(p.speedup):.1f}" r="{radius}">'
            f"<title>gamma {p.gamma}: {p.speedup:.2f}x, {p.ms_per_token:.2f} ms/token</title>"
            "</circle>"
        )
        if p.gamma in _labelled(gammas) or p.gamma == chosen:
            label = "value chosen" if p.gamma == chosen else "value"
            parts.append(_text(label, x(p.gamma), y(p.speedup) - 10, f"{p.speedup:.2f}"))
    parts.append("</svg>")
    return "\n".join(parts)


def _axis(largest: float) -> tuple[float, float]:
    """End of the axis above `largest`, and the step between its ticks."""
    step = next((s for s in _STEPS if largest * 1.1 / s <= _MOST_TICKS), largest)
    return math.ceil(largest * 1.1 / step) * step, step


def _labelled(gammas: list[int]) -> list[int]:
    """The gammas that have room for a label."""
    return gammas[:: math.ceil(len(gammas) / 12)]


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
