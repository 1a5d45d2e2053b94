"""The training loop: one jitted step, Orbax checkpoints, exact resumption.

A run is a pure function of its configuration: parameters come from `seed`, batch n from the data's
own seed and n, and a restart continues with the step after the last saved one.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath

from speculative.models import parameters, t5
from speculative.models.config import T5Config
from speculative.models.weights import prepare
from speculative.training import losses
from speculative.types import Leaf

Batch = Mapping[str, np.ndarray | jax.Array]


@partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "optimizer"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a restart needs: step count, parameters (float32), optimiser state."""

    step: Leaf
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Teacher-forced training of one T5, alone or after a larger one (distillation).

    Attributes:
      config: the model.
      optimizer: from `training.optimizers`, or any optax transformation.
      label_smoothing, z_loss: see `losses.cross_entropy`.
      seed: of the parameters and the dropout masks.
      teacher: configuration of the model to learn from; its parameters go into `step` and
        `evaluate`. None learns from the data alone.
      teacher_weight: share of the loss that is the divergence from the teacher's laws
        (`losses.forward_kl`); the rest is the cross-entropy of the data, with its smoothing and
        z-loss.
    """

    config: T5Config
    optimizer: optax.GradientTransformation
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    seed: int = 0
    teacher: T5Config | None = None
    teacher_weight: float = 1.0

    def init(self, params: Any | None = None) -> TrainState:
        """A state at step 0, from T5's initialisers or from given parameters."""
        if params is None:
            params = parameters.init(self.config, jax.random.key(self.seed))
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))

    def _loss(self, params, batch: Batch, teacher_params, key: jax.Array | None):
        dropout = None if key is None else t5.Dropout(key, self.config.dropout_rate)

        def logits_of(config, params, dropout):
            return t5.teacher_forced(
                prepare(params, config),
                config,
                batch["encoder_input_tokens"],
                batch["decoder_input_tokens"],
                batch["decoder_target_tokens"],
                dropout,
            )

        logits = logits_of(self.config, params, dropout)
        weights = batch["decoder_loss_weights"]
        loss, sums = losses.cross_entropy(
            logits,
            batch["decoder_target_tokens"],
            weights,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )
        if self.teacher is None:
            return loss, sums
        teacher_logits = logits_of(self.teacher, teacher_params, None)
        divergence = losses.forward_kl(logits, teacher_logits, weights)
        agreed = jnp.argmax(logits, axis=-1) == jnp.argmax(teacher_logits, axis=-1)
        sums["divergence"] = divergence
        sums["agreement"] = jnp.sum(agreed.astype(logits.dtype) * weights.astype(logits.dtype))
        share = self.teacher_weight
        return (1.0 - share) * loss + share * divergence, sums

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(
        self, state: TrainState, batch: Batch, teacher_params: Any | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; gradients are of the mean loss per real target token."""
        key = jax.random.fold_in(jax.random.key(self.seed + 1), state.step)
        grads, sums = jax.grad(self._loss, has_aux=True)(state.params, batch, teacher_params, key)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer), sums

    @partial(jax.jit, static_argnums=0)
    def evaluate(
        self, params, batch: Batch, teacher_params: Any | None = None
    ) -> dict[str, jax.Array]:
        """Sums over one batch without dropout, for `mean_metrics`."""
        return self._loss(params, batch, teacher_params, None)[1]


# What `Trainer` sums up over tokens, and the name of its mean.
_MEANS = {
    "loss": "loss",
    "correct": "accuracy",
    "divergence": "divergence",
    "agreement": "agreement",
}


def mean_metrics(sums: list[Mapping[str, Any]]) -> dict[str, float]:
    """Means per token over all batches together: loss in nats, token accuracy; with a teacher, the
    divergence from it in nats, and how often both models' likeliest tokens are the same."""
    total = {name: float(sum(np.asarray(s[name]) for s in sums)) for name in sums[0]}
    tokens = max(total["tokens"], 1.0)
    means = {mean: total[name] / tokens for name, mean in _MEANS.items() if name in total}
    return {**means, "tokens": total["tokens"]}


class _Stop:
    """Set by SIGTERM and SIGINT, so that the loop saves before it leaves."""

    def __init__(self):
        self.asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, *_):
        self.asked = True

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run(
    trainer: Trainer,
    *,
    batches: Callable[[int], Iterator[Batch]],
    validation: list[Batch],
    model_dir: str,
    total_steps: int,
    initial_params: Any | None = None,
    teacher_params: Any | None = None,
    log_every: int = 50,
    evaluate_every: int = 500,
    checkpoint_every_s: float = 180.0,
    keep: int = 2,
    report: Callable[[dict[str, float]], None] = lambda line: None,
) -> TrainState:
    """Train to `total_steps`, resuming from `model_dir` if it holds a checkpoint.

    Args:
      batches: from a step number to the batches from that step on.
      validation: batches whose mean loss is logged every `evaluate_every` steps.
      model_dir: gets `state/` (Orbax) and `train_metrics.jsonl` (one line per log).
      initial_params: a T5X tree to start from; None starts from the initialisers.
      teacher_params: of `trainer.teacher`.
      checkpoint_every_s: seconds between saves; a save is also made at the end and on SIGTERM.
      keep: how many of the last checkpoints stay.
      report: called with every line that is logged.

    Returns:
      The state after the last step that was made (`total_steps`, unless it was asked to stop).
    """
    directory = epath.Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory / "train_metrics.jsonl"
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    with (
        ocp.CheckpointManager((directory / "state").resolve(), options=options) as manager,
        _Stop() as stop,
    ):
        # Committed to its device, as what is restored is: else a resumed run's step is another
        # program than a fresh one's, and is not found in the compilation cache.
        state = jax.device_put(trainer.init(initial_params), jax.local_devices()[0])
        if manager.latest_step() is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))
        step = int(state.step)
        lines = log_path.read_text().splitlines() if log_path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        source = batches(step)
        window: list[Mapping[str, Any]] = []
        started = saved = time.monotonic()
        while step < total_steps and not stop.asked:
            state, sums = trainer.step(state, dict(next(source)), teacher_params)
            step += 1
            window.append(sums)
            if step % log_every == 0 or step == total_steps:
                line = {"step": step, **mean_metrics(window)}
                elapsed = time.monotonic() - started
                line["tokens_per_s"] = line.pop("tokens") / elapsed
                if step % evaluate_every == 0 or step == total_steps:
                    measured = mean_metrics(
                        [trainer.evaluate(state.params, b, teacher_params) for b in validation]
                    )
                    line |= {f"validation_{k}": v for k, v in measured.items() if k != "tokens"}
                window, started = [], time.monotonic()
                kept.append(json.dumps(line))
                log_path.write_text("\n".join(kept) + "\n")
                report(line)
            if time.monotonic() - saved > checkpoint_every_s:
                manager.save(step, args=ocp.args.StandardSave(state))
                saved = time.monotonic()
        if manager.latest_step() != step:
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return state
