"""Figures, by matplotlib, without a display."""

from __future__ import annotations

import json
import os

from etils import epath


def loss_curve(metrics_path: str | os.PathLike[str], path: str | os.PathLike[str]) -> epath.Path:
    """Training and validation loss by step, from a train run's `train_metrics.jsonl`.

    Args:
      metrics_path: one JSON object a line: `step`, `loss`, sometimes `validation_loss` (nats per
        token).
      path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in epath.Path(metrics_path).read_text().splitlines()]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([m["step"] for m in lines], [m["loss"] for m in lines], label="training")
    measured = [m for m in lines if "validation_loss" in m]
    axes.plot(
        [m["step"] for m in measured],
        [m["validation_loss"] for m in measured],
        "o-",
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path = epath.Path(path)
    with path.open("wb") as file:
        figure.savefig(file, format="png")
    return path
