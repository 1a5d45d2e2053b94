import json

from speculative.reports import figures


def test_the_curve_is_a_png_of_both_losses(tmp_path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "validation_loss": 2.5}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    path = figures.loss_curve(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")
