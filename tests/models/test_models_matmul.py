"""`matmul` in both layouts, by the product of our own and by XLA's."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import compiling
from speculative.kernels import product as kernels
from speculative.models.weights import Transposed, matmul

# A multiple of a cache line's floats, which the product takes, and none, which is XLA's.
WIDTHS = (64, 72)


def transposed(outputs, width, dtype, seed=0):
    kernel = np.random.default_rng(seed).normal(size=(outputs, width)).astype(np.float32)
    return Transposed(jnp.asarray(kernel, dtype), (outputs,))


product = compiling.jit(matmul)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("outputs", [1, 126, 127, 128])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 12, 16, 17])
def test_products(rows, outputs, width):
    matrix = transposed(outputs, width, jnp.float32)
    x = np.random.default_rng(1).normal(size=(1, rows, width)).astype(np.float32)
    wanted = x.astype(np.float64) @ np.asarray(matrix.kernel, np.float64).T
    got = product(jnp.asarray(x), matrix)
    assert got.shape == (1, rows, outputs)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("width", [2048, 2056])
def test_bfloat16_is_summed_in_float32(rows, width):
    """Ones summed in bfloat16 would stay at 256. (2,056 rounds to 2,048 there.)"""
    matrix = Transposed(jnp.ones((4, width), jnp.bfloat16), (4,))
    got = product(jnp.ones((1, rows, width), jnp.bfloat16), matrix)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, np.full((1, rows, 4), jnp.asarray(width, jnp.bfloat16)))


@pytest.mark.parametrize("rows", [1, 4, 8, 12, 40])
def test_who_computes(rows):
    """Ours where it can, and then nothing of the product is left to XLA."""

    @compiling.jit
    def gated(x, gate, matrix):
        return matmul(jnp.maximum(x, gate), matrix)

    for width in WIDTHS:
        x, matrix = jnp.ones((1, rows, width)), transposed(512, width, jnp.float32)
        text = gated.lower(x, x, matrix).compile().as_text()
        ours = kernels.supports(x[0], matrix.kernel)
        native = jax.default_backend() == "cpu" and kernels.machine() is not None
        assert ours == (native and width % 16 == 0)
        assert ("speculative_product_f32" in text) == ours
        assert bool(re.search(r"\bdot\(|ynn", text)) == (not ours)
        # What the rows come from is computed once, not for every output.
        assert len(re.findall(r" maximum\(", text)) == 1
