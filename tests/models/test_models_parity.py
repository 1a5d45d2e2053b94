"""The network against T5X's own outputs: teacher-forced, step by step, and in blocks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.models import t5
from speculative.models.language_model import T5LanguageModel
from speculative.models.weights import LAYOUTS, prepare
from tests.models import references

FLOAT32 = ("1.1", "1.0")
teacher_forced = jax.jit(t5.teacher_forced, static_argnums=1)
encode = jax.jit(t5.encode, static_argnums=1)


def extend(model, weights, state, tokens):
    return model.extend(weights, state, tokens)


@partial(jax.jit, static_argnums=0)
def prefill(model, weights, inputs):
    return model.prefill(weights, inputs, None, 13)


def batch_of(outputs):
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    return [jnp.asarray(outputs[f"in/{name}"]) for name in names]


def forced_logits(config, weights, outputs):
    return np.asarray(teacher_forced(weights, config, *batch_of(outputs)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FLOAT32)
def test_teacher_forced_logits(case, layout):
    config, tree, outputs = references.load(case)
    weights = prepare(tree, config, layout=layout)
    logits = forced_logits(config, weights, outputs)
    # T5X's logits of padded positions mean nothing; ours neither.
    real = outputs["in/decoder_target_tokens"] > 0
    np.testing.assert_allclose(logits[real], outputs["logits"][real], atol=2e-5)
    log_p = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    picked = np.take_along_axis(log_p, outputs["in/decoder_target_tokens"][:, :, None], axis=2)
    np.testing.assert_allclose(np.sum(picked[:, :, 0] * real, axis=1), outputs["score"], rtol=1e-5)


def test_encoder_output():
    config, tree, outputs = references.load("1.1")
    inputs = outputs["in/encoder_input_tokens"]
    encoded = np.asarray(encode(prepare(tree, config), config, inputs))
    np.testing.assert_allclose(encoded[inputs > 0], outputs["encoded"][inputs > 0], atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FLOAT32)
def test_cached_logits_one_by_one_and_in_blocks(case, layout):
    """As the drivers compile it, whatever the size, and as a user would."""
    step = jax.jit(extend, static_argnums=0)
    config, tree, outputs = references.load(case)
    model = T5LanguageModel(config, layout=layout)
    weights = model.prepare(tree)
    fed = outputs["in/decoder_input_tokens"]
    start = prefill(model, weights, outputs["in/encoder_input_tokens"])
    for width in (1, 4):
        state, logits = start, []
        for at in range(0, fed.shape[1], width):
            block, state = step(model, weights, state, fed[:, at : at + width])
            logits.append(block)
        assert logits[0].dtype == jnp.float32
        np.testing.assert_allclose(
            np.concatenate(logits, axis=1), outputs["step_logits"], atol=2e-5
        )


def test_bfloat16_activations():
    config, tree, outputs = references.load("1.1 bfloat16")
    weights = prepare(tree, config)
    lowered = teacher_forced.lower(weights, config, *batch_of(outputs))
    real = outputs["in/decoder_target_tokens"] > 0
    # Where every intermediate value is really rounded to bfloat16, the logits are T5X's. By default
    # XLA leaves roundings out within what it fuses, in our program others than in T5X's; that is
    # worth .10 here, as much as bfloat16 itself is (.16).
    for excess, atol in ((False, 1e-2), (True, 0.16)):
        compiled = lowered.compile({"xla_allow_excess_precision": excess})
        logits = np.asarray(compiled(weights, *batch_of(outputs)))
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits[real], outputs["logits"][real], atol=atol, rtol=0)


def test_linen_module_gives_the_same_logits():
    config, tree, outputs = references.load("1.1")
    logits = t5.T5(config).apply({"params": tree}, *batch_of(outputs))
    real = outputs["in/decoder_target_tokens"] > 0
    np.testing.assert_allclose(logits[real], outputs["logits"][real], atol=2e-5)
