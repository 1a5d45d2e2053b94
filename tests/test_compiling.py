"""Programs whose sums may be added in any order: when they are, and what they compute."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import compiling
from speculative.models import attention
from speculative.models.weights import Transposed, matmul

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


def transposed(outputs, width, dtype, seed=0):
    kernel = np.random.default_rng(seed).normal(size=(outputs, width)).astype(np.float32)
    return Transposed(jnp.asarray(kernel, dtype), jnp.ones((), dtype), (outputs,))


product = compiling.jit(matmul)


@pytest.mark.parametrize("outputs", [1, 126, 127, 128])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 12, 16, 17])
def test_products_of_few_rows(rows, outputs):
    """With outputs that parts divide and that they do not, and a matrix that is too small."""
    matrix = transposed(outputs, 72, jnp.float32)
    x = np.random.default_rng(1).normal(size=(1, rows, 72)).astype(np.float32)
    wanted = x.astype(np.float64) @ np.asarray(matrix.kernel, np.float64).T
    got = product(jnp.asarray(x), matrix)
    assert got.shape == (1, rows, outputs)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 8])
def test_bfloat16_is_summed_in_float32(rows):
    """2,048 ones summed in bfloat16 would stay at 256."""
    matrix = Transposed(jnp.ones((4, 2048), jnp.bfloat16), jnp.ones((), jnp.bfloat16), (4,))
    got = product(jnp.ones((1, rows, 2048), jnp.bfloat16), matrix)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 2048.0)


@on_cpu
@pytest.mark.parametrize("rows", [1, 4, 8, 12])
def test_few_rows_are_reductions_in_the_compiled_program(rows):
    """XLA turns a reduction with one sum back into a product, and computes again what it can."""

    @compiling.jit
    def gated(x, gate, matrix):
        return matmul(jnp.maximum(x, gate), matrix)

    x = jnp.ones((1, rows, 512))
    text = gated.lower(x, x, transposed(512, 512, jnp.float32)).compile().as_text()
    assert not re.search(r"\bdot\(", text)
    # What the rows come from is computed once, not in the reduction.
    assert len(re.findall(r" maximum\(", text)) == 1


@on_cpu
def test_small_matrices_are_products():
    """As reductions, 16 rows and 12 outputs take XLA most of a minute to compile."""
    text = product.lower(jnp.ones((1, 16, 40)), transposed(12, 40, jnp.float32)).as_text()
    assert "dot_general" in text and "reduce" not in text


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
