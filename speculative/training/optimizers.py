"""Optimisers in T5's setting, from optax."""

from __future__ import annotations

import jax.numpy as jnp
import optax


def adafactor(learning_rate: float | optax.Schedule) -> optax.GradientTransformation:
    """Adafactor as T5X configures it: factored from 128, no momentum, steps relative to each
    parameter's own scale, updates clipped at root mean square 1, decay exponent 0.8.

    `learning_rate` is thus a *relative* step size: 1e-3 for T5 fine-tuning, 1e-2 at the start of
    T5 pre-training.
    """
    return optax.adafactor(
        learning_rate,
        min_dim_size_to_factor=128,
        decay_rate=0.8,
        multiply_by_parameter_scale=True,
        clipping_threshold=1.0,
        momentum=None,
        weight_decay_rate=None,
    )


def constant(value: float = 1e-3) -> optax.Schedule:
    """The same step size throughout (T5 fine-tuning: 1e-3)."""
    return optax.constant_schedule(value)


def inverse_square_root(base: float = 1.0, warmup_steps: int = 10_000) -> optax.Schedule:
    """`base / sqrt(max(step, warmup_steps))`: T5's pre-training schedule."""

    def inverse(step):
        return base / jnp.sqrt(jnp.maximum(jnp.asarray(step, jnp.float32), warmup_steps))

    return inverse


def warmup_hold_decay(
    peak: float, total_steps: int, *, warmup_steps: int = 100, decay_fraction: float = 0.4
) -> optax.Schedule:
    """Linear warm-up, then `peak`, then a linear fall to `peak / 50` over the last part."""
    decay_steps = max(1, int(total_steps * decay_fraction))
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / 50, peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak / 50, decay_steps),
        ],
        [warmup_steps, max(warmup_steps, total_steps - decay_steps)],
    )
