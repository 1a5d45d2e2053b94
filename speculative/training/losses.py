"""Losses on teacher-forced logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "B M V"],
    targets: Int[Array, "B M"],
    weights: Int[Array, "B M"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """T5's token loss.

    Label smoothing gives every wrong token `label_smoothing / (V - 1)` and takes off the entropy
    of that law, so that a perfect model still scores 0; the z-loss, `z_loss * log(Z)**2`, keeps
    the softmax normaliser near 1 (both as in T5X's losses).

    Args:
      logits: float32.
      targets: token ids.
      weights: 1 where a target counts, 0 where it is padding.

    Returns:
      The summed loss in nats, and sums to average over tokens: `loss`, `correct`, `tokens`.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    nll = log_z - picked
    if label_smoothing:
        confidence = 1.0 - label_smoothing
        low = label_smoothing / (logits.shape[-1] - 1)
        mean_log = jnp.sum(logits, axis=-1) - logits.shape[-1] * log_z
        smooth = -(confidence - low) * (picked - log_z) - low * mean_log
        entropy = confidence * jnp.log(confidence) + label_smoothing * jnp.log(low + 1e-20)
        loss = smooth + entropy
    else:
        loss = nll
    if z_loss:
        loss = loss + z_loss * log_z**2
    count = weights.astype(logits.dtype)
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(logits.dtype)
    sums = {
        "loss": jnp.sum(nll * count),
        "correct": jnp.sum(correct * count),
        "tokens": jnp.sum(count),
    }
    return jnp.sum(loss * count), sums


def forward_kl(
    logits: Float[Array, "B M V"],
    teacher_logits: Float[Array, "B M V"],
    weights: Int[Array, "B M"],
) -> jax.Array:
    """The summed Kullback-Leibler divergence of the student's laws from the teacher's, in nats.

    Sum over tokens of sum_x p(x) (log p(x) - log q(x)), with p the teacher's law and q the
    student's: token-level distillation. No gradient reaches the teacher.

    Args:
      logits: the student's, float32.
      teacher_logits: the teacher's, float32.
      weights: 1 where a position counts, 0 where it is padding.
    """
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits), axis=-1)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jnp.sum(divergence * weights.astype(logits.dtype))
