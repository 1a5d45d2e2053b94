"""The train run: a T5 from scratch, or on from a T5X checkpoint, on a SeqIO task."""

from __future__ import annotations

import dataclasses
import math

import optax
from etils import epath

from speculative import pair as pairs
from speculative.checkpoints import t5x as t5x_checkpoints
from speculative.data import batches as data_batches
from speculative.data import tasks
from speculative.errors import ConfigError
from speculative.models.config import T5Config, parameter_count, parameter_shapes
from speculative.reports import figures
from speculative.runs import progress
from speculative.training import trainer as training


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model whose laws the trained one is to follow: distillation of a draft.

    Attributes:
      checkpoint_path: a T5X checkpoint.
      config: its configuration; None reads it off the checkpoint.
      weight: see `Trainer.teacher_weight`.
    """

    checkpoint_path: str
    config: T5Config | None = None
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One task for a number of steps; stages follow each other within one run.

    Attributes:
      mixture_or_task_name: a SeqIO task (see `data.tasks`).
      steps: updates in this stage.
      batch_size: examples per update.
      task_feature_lengths: most tokens of `inputs` and `targets`.
      buckets: widths that rows of similar length are gathered in; None is one width for all.
      overlong: `trim` cuts longer texts, `drop` leaves them out.
    """

    mixture_or_task_name: str
    steps: int
    batch_size: int
    task_feature_lengths: dict[str, int]
    buckets: tuple[int, ...] | None = data_batches.BUCKETS
    overlong: str = "trim"

    def batches(self, task, *, seed: int, split: str = "train", start_step: int = 0):
        """Endless batches of this stage (see `data.batches.training_batches`)."""
        return data_batches.training_batches(
            task,
            split=split,
            lengths=self.task_feature_lengths,
            batch_size=self.batch_size,
            seed=seed,
            start_step=start_step,
            buckets=self.buckets,
            overlong=self.overlong,
        )


def train(
    *,
    model: T5Config,
    stages: list[Stage],
    model_dir: str,
    optimizer: optax.GradientTransformation,
    vocabulary_path: str | None = None,
    initial_checkpoint_path: str | None = None,
    teacher: Teacher | None = None,
    export_dtype: str = "bfloat16",
    seed: int = 0,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    validation_batches: int = 8,
    log_every: int = 50,
    evaluate_every: int = 500,
    checkpoint_every_s: float = 180.0,
    mixture_or_task_module: str | None = None,
) -> dict[str, float]:
    """Train, resuming what `model_dir` holds, and export a T5X checkpoint at the end.

    Args:
      model: configuration of the model.
      stages: what to train on, in order (for example short windows to be copied, then sentences).
      model_dir: gets `state/`, `train_metrics.jsonl`, `loss.png` and, at the end,
        `checkpoint_<step>/`.
      optimizer: an optax transformation (`training.optimizers`).
      vocabulary_path: a SentencePiece model for the tasks; None takes the tasks' own.
      initial_checkpoint_path: a T5X checkpoint to start from; None starts from the initialisers.
      teacher: a model to learn from beside the data; None learns from the data alone.
      export_dtype: of the exported parameters.
      seed: of parameters, dropout and data order.
      validation_batches: batches of the last stage's validation split behind each evaluation.
      checkpoint_every_s: seconds between checkpoints that a restart resumes from.
      mixture_or_task_module: a module to import first, because it registers the tasks.

    Returns:
      The last logged metrics.

    Raises:
      ConfigError: no stages, or the loss is NaN (nothing is exported then).
      KeyboardInterrupt: SIGTERM or SIGINT came; the state was saved, and the exit code is 130.
    """
    if not stages or any(stage.steps < 1 for stage in stages):
        raise ConfigError("train.stages", expected="one stage or more, each of 1 step or more")
    if teacher is not None and not 0 <= teacher.weight <= 1:
        raise ConfigError("train.Teacher.weight", expected="0 to 1", found=teacher.weight)
    tasks.import_module(mixture_or_task_module)
    named = [tasks.get_task(s.mixture_or_task_name, vocabulary=vocabulary_path) for s in stages]
    ends = [sum(s.steps for s in stages[: i + 1]) for i in range(len(stages))]

    def from_step(step: int):
        for task, stage, end in zip(named, stages, ends, strict=True):
            begin = end - stage.steps
            if step >= end:
                continue
            source = stage.batches(task, seed=seed, start_step=step - begin)
            while step < end:
                yield next(source)
                step += 1

    validation_source = stages[-1].batches(named[-1], seed=seed, split="validation")
    validation = [next(validation_source) for _ in range(validation_batches)]
    initial = None
    if initial_checkpoint_path:
        initial = t5x_checkpoints.read(
            initial_checkpoint_path, shapes=parameter_shapes(model), dtype="float32"
        )
    teacher_config = teacher_params = None
    if teacher is not None:
        teacher_config, teacher_params = pairs.read_parameters(
            teacher.checkpoint_path, teacher.config
        )
        if teacher_config.vocab_size != model.vocab_size:
            raise ConfigError(
                "train.teacher",
                expected=f"a model with the trained one's vocabulary of {model.vocab_size}",
                found=teacher_config.vocab_size,
            )
    total = ends[-1]
    last: dict[str, float] = {}
    with progress.bar(f"train {parameter_count(model):,} parameters", total) as bar:

        def report(line: dict[str, float]) -> None:
            last.update(line)
            bar.update(int(line["step"]), progress.describe(line))

        state = training.run(
            training.Trainer(
                config=model,
                optimizer=optimizer,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                seed=seed,
                teacher=teacher_config,
                teacher_weight=1.0 if teacher is None else teacher.weight,
            ),
            batches=from_step,
            validation=validation,
            model_dir=model_dir,
            total_steps=total,
            initial_params=initial,
            teacher_params=teacher_params,
            log_every=log_every,
            evaluate_every=evaluate_every,
            checkpoint_every_s=checkpoint_every_s,
            report=report,
        )
    if last:
        figures.loss_curve(f"{model_dir}/train_metrics.jsonl", f"{model_dir}/loss.png")
    if any(math.isnan(v) for v in last.values()):
        raise ConfigError("train diverged", found="NaN loss", mend="Lower the learning rate")
    step = int(state.step)
    if step < total:
        # Asked to stop, and saved: what follows this run in a script must not go on without it.
        raise KeyboardInterrupt(f"stopped after step {step} of {total}; the same command goes on")
    t5x_checkpoints.write(
        epath.Path(model_dir), state.params, step, dtype=export_dtype, overwrite=True
    )
    return last
