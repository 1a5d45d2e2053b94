"""Training goes down, and a run that was cut off ends as one that was not."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from speculative.training import optimizers, trainer
from tests import tiny

CONFIG = tiny.config(vocab_size=16, emb_dim=8, head_dim=4, mlp_dim=16, dropout_rate=0.1)
STEPS = 20


def batch(number: int) -> dict[str, np.ndarray]:
    """Copying: the targets are the inputs."""
    random = np.random.default_rng(number)
    targets = random.integers(2, 16, size=(8, 5)).astype(np.int32)
    targets[:4, 3:] = [1, 0]
    return {
        "encoder_input_tokens": targets,
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


def batches(step: int):
    while True:
        yield batch(step)
        step += 1


@pytest.fixture(scope="module")
def one_trainer():
    return trainer.Trainer(CONFIG, optimizers.adafactor(3e-2))


@pytest.fixture(scope="module")
def train(one_trainer):
    def run(model_dir, total_steps=STEPS, batches=batches, **settings):
        lines = []
        state = trainer.run(
            one_trainer,
            batches=batches,
            validation=[batch(10_000)],
            model_dir=str(model_dir),
            total_steps=total_steps,
            log_every=5,
            evaluate_every=10,
            report=lines.append,
            **settings,
        )
        return state, lines

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return *train(directory), directory


def test_the_loss_goes_down(whole):
    state, lines, directory = whole
    assert int(state.step) == STEPS
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    assert lines[-1]["validation_loss"] < lines[1]["validation_loss"]
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    logged = (directory / "train_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [5, 10, 15, 20]


class Killed(Exception):
    pass


def test_a_run_that_was_killed_ends_as_one_that_was_not(whole, train, tmp_path):
    # Saved at step 7; killed at step 12, after more was logged than was saved.
    train(tmp_path, total_steps=7)

    def until_killed(step):
        for number, one in enumerate(batches(step), start=step):
            if number == 12:
                raise Killed
            yield one

    with pytest.raises(Killed):
        train(tmp_path, batches=until_killed)
    state, _ = train(tmp_path)
    assert int(state.step) == STEPS
    jax.tree.map(np.testing.assert_array_equal, state.params, whole[0].params)
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, whole[0].optimizer)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "train_metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


def test_a_finished_run_is_left_as_it_is(whole, train):
    state, lines = train(whole[2])
    assert lines == []
    jax.tree.map(np.testing.assert_array_equal, state.params, whole[0].params)


def test_metrics_are_per_token_over_all_batches():
    sums = [
        {"loss": np.float32(6.0), "correct": np.float32(1.0), "tokens": np.float32(3.0)},
        {"loss": np.float32(2.0), "correct": np.float32(1.0), "tokens": np.float32(1.0)},
    ]
    assert trainer.mean_metrics(sums) == {"loss": 2.0, "accuracy": 0.5, "tokens": 4.0}
