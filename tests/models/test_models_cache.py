"""The laws of a cache: blocks and steps, going back, ragged rows, neighbours and padding."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import testing
from speculative.kernels import engine
from speculative.models import kv_cache, t5
from speculative.models.weights import default_layout
from tests.decoding import toys

MODELS = {
    "t5": toys.TARGET,
    "t5 transposed": dataclasses.replace(toys.TARGET, layout="transposed"),
    "t5 kernels": toys.KERNEL_TARGET,
    "table": testing.TableLanguageModel(32, 8),
}
ROWS, SPACE = 4, 16


@partial(jax.jit, static_argnums=0)
def extend(model, weights, state, tokens):
    return model.extend(weights, state, tokens)


@partial(jax.jit, static_argnums=0)
def prefill(model, weights, inputs):
    return model.prefill(weights, inputs, None, SPACE)


def weights_of(name):
    if name != "table":
        return MODELS[name].prepare(toys.random_tree(MODELS[name].config, 3))
    return testing.random_tables(MODELS[name], 3)


def tokens_of(width, seed=0):
    return np.random.default_rng(seed).integers(2, 32, size=(ROWS, width)).astype(np.int32)


def step_by_step(model, weights, state, tokens):
    logits = []
    for at in range(tokens.shape[1]):
        one, state = extend(model, weights, state, tokens[:, at : at + 1])
        logits.append(np.asarray(one[:, 0]))
    return np.stack(logits, axis=1), state


@pytest.fixture(params=MODELS, scope="module")
def started(request):
    """(model, weights, empty state, fed tokens [4, 8], their logits one by one)."""
    model, weights = MODELS[request.param], weights_of(request.param)
    state = prefill(model, weights, toys.encoder_inputs(ROWS))
    tokens = tokens_of(8)
    return model, weights, state, tokens, step_by_step(model, weights, state, tokens)[0]


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    np.testing.assert_array_equal(np.argmax(got, axis=-1), np.argmax(wanted, axis=-1))


def test_a_block_equals_its_steps(started):
    model, weights, state, tokens, wanted = started
    first, state = extend(model, weights, state, tokens[:, :4])
    second, state = extend(model, weights, state, tokens[:, 4:])
    close(np.concatenate([first, second], axis=1), wanted)
    np.testing.assert_array_equal(state.lengths, 8)


@pytest.mark.skipif(default_layout() != "panels", reason="the kernels are for CPU")
@pytest.mark.skipif(engine.machine() is None, reason="there are no kernels for this processor")
def test_on_kernels_it_equals_them_to_the_bit():
    model, weights, tokens = toys.KERNEL_TARGET, weights_of("t5 kernels"), tokens_of(8)
    state = prefill(model, weights, toys.encoder_inputs(ROWS))
    wanted, _ = step_by_step(model, weights, state, tokens)
    for width in (2, 4, 8):
        block, at = [], state
        for begin in range(0, 8, width):
            logits, at = extend(model, weights, at, tokens[:, begin : begin + width])
            block.append(logits)
        np.testing.assert_array_equal(np.concatenate(block, axis=1), wanted)


def test_going_back_and_on_equals_a_fresh_cache_on_ragged_rows(started):
    model, weights, state, tokens, wanted = started
    _, state = extend(model, weights, state, tokens[:, :4])
    _, state = extend(model, weights, state, tokens_of(4, seed=1))  # to be forgotten
    lengths = np.asarray([4, 2, 3, 1], np.int32)
    state = model.truncate(state, jnp.asarray(lengths))
    rest = np.stack([tokens[row, n : n + 4] for row, n in enumerate(lengths)])
    logits, state = extend(model, weights, state, rest)
    close(logits, np.stack([wanted[row, n : n + 4] for row, n in enumerate(lengths)]))
    np.testing.assert_array_equal(state.lengths, lengths + 4)


def test_neighbours_do_not_change_a_row(started):
    model, weights, _, tokens, wanted = started
    inputs = np.array(toys.encoder_inputs(ROWS))
    inputs[1:] = toys.encoder_inputs(ROWS, seed=9)[1:][::-1]
    state = prefill(model, weights, inputs)
    other = np.concatenate([tokens[:1], tokens_of(8, seed=2)[1:]])
    first, state = extend(model, weights, state, other[:, :4])
    second, _ = extend(model, weights, state, other[:, 4:])
    np.testing.assert_array_equal(first[0], extend(*fresh(started), tokens[:, :4])[0][0])
    close(np.concatenate([first, second], axis=1)[0], wanted[0])


def fresh(started):
    return started[:3]


def test_taken_and_inserted_rows_go_on_as_before(started):
    model, weights, state, tokens, wanted = started
    _, state = extend(model, weights, state, tokens[:, :4])
    rows = jnp.asarray([3, 0, 0, 2], jnp.int32)
    taken = kv_cache.take(state, rows)
    logits, _ = extend(model, weights, taken, tokens[np.asarray(rows), 4:])
    close(logits, wanted[np.asarray(rows), 4:])
    # Rows 1 and 2 are replaced by fresh ones, which begin at their own first position.
    new = kv_cache.take(fresh(started)[2], jnp.asarray([1, 2], jnp.int32))
    mixed = kv_cache.insert(state, jnp.asarray([1, 2], jnp.int32), new)
    fed = np.concatenate([tokens[:1, 4:], tokens[1:3, :4], tokens[3:, 4:]])
    logits, mixed = extend(model, weights, mixed, fed)
    np.testing.assert_array_equal(mixed.lengths, [8, 4, 4, 8])
    close(logits, np.concatenate([wanted[:1, 4:], wanted[1:3, :4], wanted[3:, 4:]]))


def test_padding_of_the_inputs_does_not_change_a_row():
    model, weights, tokens = toys.TARGET, weights_of("t5"), tokens_of(4)
    inputs = toys.encoder_inputs(ROWS)
    narrow = extend(model, weights, prefill(model, weights, inputs), tokens)[0]
    wide = extend(
        model, weights, prefill(model, weights, np.pad(inputs, ((0, 0), (0, 20)))), tokens
    )[0]
    close(wide, narrow)


def test_a_prompt_is_fed_first():
    model, weights, tokens = toys.TARGET, weights_of("t5"), jnp.asarray(tokens_of(8))
    inputs = jnp.asarray(toys.encoder_inputs(ROWS))
    prompted = jax.jit(lambda w: model.prefill(w, inputs, tokens[:, :4], SPACE))(weights)
    _, state = extend(model, weights, prefill(model, weights, inputs), tokens[:, :4])
    np.testing.assert_array_equal(prompted.lengths, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), prompted, state)


@pytest.mark.parametrize(("name", "atol"), [("t5", 1e-5), ("t5 kernels", 2e-5)])
def test_far_positions_equal_a_full_forward_pass(name, atol):
    """(The larger of the two has larger logits.)"""
    model, weights = MODELS[name], weights_of(name)
    # Teacher forcing in the plain layout, which is held to T5X's own logits.
    plain = dataclasses.replace(model, layout="plain").prepare(toys.random_tree(model.config, 3))
    random = np.random.default_rng(5)
    tokens = jnp.asarray(random.integers(2, 32, size=(2, 158)), jnp.int32)
    inputs = jnp.asarray(toys.encoder_inputs(2))

    @jax.jit
    def all_ways(weights, plain):
        full = t5.teacher_forced(plain, model.config, inputs, tokens, jnp.ones_like(tokens))
        state = model.prefill(weights, inputs, tokens[:, :150], 160)
        one, _ = model.extend(weights, state, tokens[:, 150:151])
        block, _ = model.extend(weights, state, tokens[:, 150:])
        picked, features, _ = model.extend(
            weights,
            state,
            tokens[:, 150:],
            logits_at=jnp.asarray([[2], [7]], jnp.int32),
            features=True,
        )
        return full, one, block, picked, features

    full, one, block, picked, features = all_ways(weights, plain)
    np.testing.assert_allclose(one, full[:, 150:151], atol=atol)
    np.testing.assert_allclose(block, full[:, 150:], atol=atol)
    np.testing.assert_allclose(picked[:, 0], np.stack([full[0, 152], full[1, 157]]), atol=atol)
    assert features.shape == (2, 8, model.config.emb_dim)
