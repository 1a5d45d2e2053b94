"""The token loss against sums written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from speculative.training import losses

VOCAB = 5

cross_entropy = jax.jit(losses.cross_entropy, static_argnames=("label_smoothing", "z_loss"))
forward_kl = jax.jit(losses.forward_kl)


def example():
    random = np.random.default_rng(0)
    logits = random.normal(scale=2.0, size=(2, 3, VOCAB))
    targets = random.integers(0, VOCAB, size=(2, 3))
    weights = np.asarray([[1, 1, 1], [1, 0, 0]])
    return (
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(weights, jnp.int32),
    )


def test_plain_loss_is_that_of_optax():
    logits, targets, weights = example()
    loss, sums = cross_entropy(logits, targets, weights)
    each = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, targets)
    wanted = float(np.sum(np.asarray(each) * np.asarray(weights)))
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    assert float(sums["loss"]) == pytest.approx(wanted, rel=1e-6)
    assert float(sums["tokens"]) == 4
    right = np.argmax(np.asarray(logits), axis=-1) == np.asarray(targets)
    assert float(sums["correct"]) == (right * np.asarray(weights)).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_smoothing_and_z_loss(smoothing, z_loss):
    logits, targets, weights = example()
    loss, sums = cross_entropy(logits, targets, weights, label_smoothing=smoothing, z_loss=z_loss)
    wide = np.asarray(logits, np.float64)
    log_z = scipy.special.logsumexp(wide, axis=-1)
    soft = np.full((2, 3, VOCAB), smoothing / (VOCAB - 1))
    np.put_along_axis(soft, np.asarray(targets)[:, :, None], 1 - smoothing, axis=-1)
    # Cross-entropy to the smoothed law less that law's entropy is a divergence: 0 at best.
    divergence = np.sum(scipy.special.rel_entr(soft, np.exp(wide - log_z[..., None])), axis=-1)
    wanted = np.sum((divergence + z_loss * log_z**2) * np.asarray(weights))
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    plain, _ = cross_entropy(logits, targets, weights)
    assert float(sums["loss"]) == pytest.approx(float(plain), rel=1e-6)  # what is logged


def test_a_perfect_model_scores_zero_under_smoothing():
    law = np.full((1, 1, VOCAB), 0.1 / (VOCAB - 1))
    law[..., 2] = 0.9
    logits = jnp.asarray(np.log(law), jnp.float32)
    one = jnp.ones((1, 1), jnp.int32)
    loss, _ = cross_entropy(logits, 2 * one, one, label_smoothing=0.1)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


def test_padding_has_no_gradient():
    logits, targets, weights = example()
    gradient = jax.jit(
        jax.grad(lambda x: cross_entropy(x, targets, weights, label_smoothing=0.1, z_loss=1e-2)[0])
    )(logits)
    padded = np.asarray(weights) == 0
    assert (np.asarray(gradient)[padded] == 0).all()
    assert (np.abs(np.asarray(gradient)[~padded]).sum(axis=-1) > 0).all()


def test_the_divergence_is_that_of_scipy():
    logits, _, weights = example()
    teacher = jnp.asarray(np.random.default_rng(1).normal(size=logits.shape), jnp.float32)
    p = scipy.special.softmax(np.asarray(teacher, np.float64), axis=-1)
    q = scipy.special.softmax(np.asarray(logits, np.float64), axis=-1)
    each = np.sum(scipy.special.rel_entr(p, q), axis=-1)
    wanted = np.sum(each * np.asarray(weights))
    assert float(forward_kl(logits, teacher, weights)) == pytest.approx(wanted, rel=1e-5)
    assert float(forward_kl(teacher, teacher, weights)) == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_moves_the_student_alone():
    logits, _, weights = example()
    teacher = logits + jnp.asarray(np.random.default_rng(1).normal(size=logits.shape), jnp.float32)
    gradients = jax.jit(jax.grad(losses.forward_kl, argnums=(0, 1)))
    of_student, of_teacher = gradients(logits, teacher, weights)
    assert (np.asarray(of_teacher) == 0).all()
    # Its gradient is q - p: it would be p's own entropy's, too, if p were not held fixed.
    difference = np.asarray(jax.nn.softmax(logits) - jax.nn.softmax(teacher))
    np.testing.assert_allclose(of_student, difference * np.asarray(weights)[:, :, None], atol=1e-6)
