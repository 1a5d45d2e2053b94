"""The train run: two stages, an interruption, the checkpoint at the end."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import numpy as np
import pytest

from speculative import main as main_module
from speculative import pair as pairs
from speculative.checkpoints import t5x
from speculative.models.config import parameter_count
from speculative.runs import progress
from tests import tiny

RUN_GIN = """
from __gin__ import dynamic_registration

from speculative.models import config
from speculative.runs import train
from speculative.training import optimizers

MODEL_DIR = %gin.REQUIRED

train.train:
  model = @config.T5Config()
  stages = [@windows/train.Stage(), @verses/train.Stage()]
  model_dir = %MODEL_DIR
  optimizer = @optimizers.adafactor()
  validation_batches = 1
  log_every = 1

config.T5Config:
  vocab_size = 4096
  emb_dim = 16
  num_heads = 2
  head_dim = 8
  num_encoder_layers = 1
  num_decoder_layers = 1
  mlp_dim = 16
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.1

optimizers.adafactor.learning_rate = 1e-2

windows/train.Stage:
  mixture_or_task_name = 'copy_windows'
  steps = 2
  batch_size = 4
  task_feature_lengths = {'inputs': 12, 'targets': 12}
  buckets = None

verses/train.Stage:
  mixture_or_task_name = 'kjv_to_web'
  steps = 3
  batch_size = 4
  task_feature_lengths = {'inputs': 24, 'targets': 16}
  buckets = None
"""
TEACHER_GIN = """
from __gin__ import dynamic_registration

from speculative.runs import train

TEACHER = %gin.REQUIRED

train.train:
  stages = [@verses/train.Stage()]
  teacher = @train.Teacher()

train.Teacher.checkpoint_path = %TEACHER
"""
STEPS, STOP_AT = 5, 3
CONFIG = tiny.config(mlp_dim=16, dropout_rate=0.1)


class Folder:
    """A run file, and `main` on it."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        (path / "train.gin").write_text(RUN_GIN)

    def train(self, name: str, *more: str) -> int:
        return main_module.main(
            [
                "--run_mode=train",
                f"--gin_file={self.path}/train.gin",
                f"--gin.MODEL_DIR='{self.path / name}'",
                *more,
            ]
        )

    def lines(self, name: str) -> list[dict]:
        text = (self.path / name / "train_metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def checkpoints(self, name: str) -> list[str]:
        return sorted(p.name for p in (self.path / name).glob("checkpoint_*"))


@pytest.fixture(scope="module", autouse=True)
def small_shuffle():
    """Reading all of the corpus before the first batch would be most of the time."""
    from speculative.data import batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "SHUFFLE_BUFFER", 64)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_shuffle):
    """`whole`, and `stopped`: told to end in its second stage, then started again."""
    folder = Folder(tmp_path_factory.mktemp("train"))
    assert folder.train("whole") == 0
    update = progress.Bar.update

    def update_and_stop(self, done, note=""):
        update(self, done, note)
        if done == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress.Bar, "update", update_and_stop)
        assert folder.train("stopped") == 130
    folder.interrupted = (folder.lines("stopped"), folder.checkpoints("stopped"))
    assert folder.train("stopped") == 0
    return folder


def test_an_interrupted_run_keeps_its_steps_and_exports_nothing(trained):
    lines, checkpoints = trained.interrupted
    assert [line["step"] for line in lines] == list(range(1, STOP_AT + 1))
    assert checkpoints == []


def test_it_resumes_as_if_it_had_not_been_interrupted(trained):
    whole, stopped = trained.lines("whole"), trained.lines("stopped")
    assert [line["step"] for line in stopped] == list(range(1, STEPS + 1))
    measured = ("step", "loss", "accuracy", "validation_loss", "validation_accuracy")
    for one, other in zip(whole, stopped, strict=True):
        assert {k: one.get(k) for k in measured} == {k: other.get(k) for k in measured}
    one, other = (t5x.read(trained.path / name, dtype="float32") for name in ("whole", "stopped"))
    assert_equal_trees(one, other)


def test_metrics(trained):
    lines = trained.lines("whole")
    for line in lines:
        assert 0 < line["loss"] < 20 and 0 <= line["accuracy"] <= 1 and line["tokens_per_s"] > 0
        assert ("validation_loss" in line) == (line["step"] == STEPS)
    curve = (trained.path / "whole" / "loss.png").read_bytes()
    assert curve.startswith(b"\x89PNG")


def test_the_exported_checkpoint_is_a_model(trained):
    assert trained.checkpoints("stopped") == [f"checkpoint_{STEPS}"]
    infos = t5x.tensor_shapes(trained.path / "stopped")
    assert {info.dtype for info in infos.values()} == {"bfloat16"}
    loaded = pairs.load_model(trained.path / "stopped")
    assert loaded.model.config == CONFIG and loaded.parameters == parameter_count(CONFIG)
    text = (trained.path / "stopped" / "config.gin").read_text()
    assert "steps = 3" in text and "export_dtype = 'bfloat16'" in text


def test_a_finished_run_has_nothing_left_to_do(trained):
    before = trained.lines("whole")
    assert trained.train("whole") == 0
    assert trained.lines("whole") == before
    assert trained.checkpoints("whole") == [f"checkpoint_{STEPS}"]


@pytest.fixture
def taught(trained, tmp_path):
    """A folder, and the flags by which a run in it learns from `whole`."""
    (tmp_path / "teacher.gin").write_text(TEACHER_GIN)
    teacher = trained.path / "whole"
    flags = (f"--gin_file={tmp_path}/teacher.gin", f"--gin.TEACHER='{teacher}'")
    return Folder(tmp_path), flags, teacher


def test_after_itself_a_draft_has_nothing_to_learn(taught):
    folder, flags, teacher = taught
    start = f"--gin.train.train.initial_checkpoint_path='{teacher}'"
    still = ("--gin.T5Config.dropout_rate=0.0", "--gin.adafactor.learning_rate=0.0")
    assert folder.train("same", *flags, start, *still) == 0
    for line in folder.lines("same"):
        assert line["divergence"] == pytest.approx(0.0, abs=1e-5)
        assert line["agreement"] == 1.0


def test_a_draft_comes_nearer_to_its_teacher(taught):
    folder, flags, _ = taught
    more = ("--gin.verses/train.Stage.steps=12", "--gin.train.train.seed=5")
    assert folder.train("other", *flags, *more) == 0
    lines = folder.lines("other")
    assert 0 < lines[-1]["divergence"] < lines[0]["divergence"]
    assert 0 <= lines[-1]["validation_agreement"] <= 1


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("T5Config.vocab_size=4224", "vocabulary of 4224; found 4096"),
        ("train.Teacher.weight=1.5", "train.Teacher.weight; expected 0 to 1; found 1.5"),
        ("TEACHER='nowhere'", "There is no checkpoint"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(taught, capsys, binding, said):
    folder, flags, _ = taught
    assert folder.train("out", *flags, f"--gin.{binding}") == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1, found


def test_a_diverged_run_exports_nothing(tmp_path, capsys):
    folder = Folder(tmp_path)
    once = "--gin.train.train.stages=[@windows/train.Stage()]"
    assert folder.train("out", once, "--gin.adafactor.learning_rate=1e38") == 2
    assert "error: train diverged; found NaN loss." in capsys.readouterr().err
    assert folder.checkpoints("out") == []


@pytest.mark.parametrize(
    ("binding", "parts"),
    [
        ("train.stages=[]", ["train.stages", "one stage or more"]),
        ("verses/Stage.steps=0", ["train.stages", "each of 1 step or more"]),
        ("verses/Stage.mixture_or_task_name='kjv_to_wbe'", ["'kjv_to_wbe'", "kjv_to_web"]),
        ("T5Config.mlp_dim=0", ["T5Config.mlp_dim", "found 0"]),
        ("train.initial_checkpoint_path='nowhere'", ["There is no checkpoint", "nowhere"]),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, binding, parts):
    assert Folder(tmp_path).train("out", f"--gin.{binding}") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    for part in parts:
        assert part in said


def assert_equal_trees(one, other):
    assert set(one) == set(other)
    for name, value in one.items():
        if isinstance(value, dict):
            assert_equal_trees(value, other[name])
        else:
            np.testing.assert_array_equal(value, other[name])
