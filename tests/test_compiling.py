"""Programs whose sums may be added in any order: when they are, and what they compute."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import compiling
from speculative.models import attention

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are XLA's on CPU")


@partial(compiling.jit, static_argnums=1)
def asked(x, offset):
    """What the trace sees, and a number."""
    return jnp.asarray(compiling.sums_reorder()), x + offset


@on_cpu
def test_only_its_own_programs_reorder():
    assert not compiling.sums_reorder()
    assert bool(asked(jnp.zeros(()), 1.0)[0])
    assert not compiling.sums_reorder()
    assert asked.cache_size() >= 1


def test_within_another_program_it_is_an_ordinary_jit():
    """Compiler options belong to the outermost program."""
    reorders, value = jax.jit(lambda x: asked(x, 2.0))(jnp.ones(()))
    assert not bool(reorders)
    assert float(value) == 3.0


def test_a_failed_trace_leaves_nothing_behind():
    @compiling.jit
    def fails(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails(jnp.zeros(()))
    assert not compiling.sums_reorder()


@pytest.mark.parametrize("few", [1, 3, 16])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_attention_of_few_queries(few, heads):
    rng = np.random.default_rng(few)
    query, key = (jnp.asarray(rng.normal(size=(2, heads, n, 8)), jnp.float32) for n in (few, 11))
    value = jnp.asarray(rng.normal(size=(2, heads, 8, 11)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(1, heads, few, 11)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 1, few, 11)) < 0.7).at[..., 0].set(True)
    wanted = attention.attend(query, key, value, bias, mask)
    got = compiling.jit(attention.attend)(query, key, value, bias, mask)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
