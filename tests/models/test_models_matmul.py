"""`matmul` in every layout, by the product of our own and by XLA's."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.kernels import product as kernels
from speculative.models.weights import LAYOUTS, Panels, Plain, Transposed, matmul, matrix

# What panels can be made of, and what is left to XLA: outputs that are no multiple of 16, inputs
# that are none of 4.
WIDTHS, OUTPUTS = (64, 72, 70), (1, 126, 127, 128)
product = jax.jit(matmul)


def kernel(outputs, width, dtype=jnp.float32, seed=0):
    values = np.random.default_rng(seed).normal(size=(width, outputs)).astype(np.float32)
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_products(layout, outputs, width):
    values = kernel(outputs, width)
    record = matrix([values], layout=layout)
    for rows in (1, 2, 4, 7, 8, 12, 16, 17):
        x = np.random.default_rng(1).normal(size=(1, rows, width)).astype(np.float32)
        wanted = x.astype(np.float64) @ np.asarray(values, np.float64)
        got = product(jnp.asarray(x), record)
        assert got.shape == (1, rows, outputs)
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_matrices(layout):
    values = [kernel(n, 32, seed=n) for n in (32, 16, 48)]
    record = matrix(values, layout=layout)
    assert record.sizes == (32, 16, 48)
    x = jnp.ones((2, 3, 32))
    wanted = np.concatenate([np.asarray(x) @ np.asarray(v) for v in values], axis=-1)
    np.testing.assert_allclose(product(x, record), wanted, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("width", [2048, 2056])
@pytest.mark.parametrize("layout", ["transposed", "panels"])
def test_bfloat16_is_summed_in_float32(layout, rows, width):
    """Ones summed in bfloat16 would stay at 256. (2,056 rounds to 2,048 there.)"""
    record = matrix([jnp.ones((width, 16), jnp.bfloat16)], layout=layout)
    got = product(jnp.ones((1, rows, width), jnp.bfloat16), record)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, np.full((1, rows, 16), jnp.asarray(width, jnp.bfloat16)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_in_another_dtype(layout):
    """bfloat16 weights and float32 activations: the products of the same numbers in float32."""
    values = kernel(48, 64, jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 5, 64)), jnp.float32)
    wanted = product(x, matrix([values.astype(jnp.float32)], layout=layout))
    got = product(x, matrix([values], layout=layout))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, atol=2e-5 if layout != "panels" else 0)


def native():
    return kernels.supports((64, 16), "float32")


@pytest.mark.parametrize(
    "outputs, width, panels", [(512, 64, True), (126, 64, False), (128, 70, False)]
)
def test_which_matrices_are_panels(outputs, width, panels):
    kind = type(matrix([kernel(outputs, width)], layout="panels"))
    assert kind is (Panels if panels and native() else Transposed)
    assert type(matrix([kernel(outputs, width)], layout="transposed")) is Transposed
    assert type(matrix([kernel(outputs, width)], layout="plain")) is Plain


@pytest.mark.parametrize("rows", [1, 4, 8, 12, 40])
def test_who_computes(rows):
    """Ours where it can, and then nothing of the product is left to XLA."""

    @jax.jit
    def gated(x, gate, matrix):
        return matmul(jnp.maximum(x, gate), matrix)

    for outputs in (512, 126):
        x = jnp.ones((1, rows, 64))
        record = matrix([kernel(outputs, 64)], layout="panels")
        text = gated.lower(x, x, record).compile().as_text()
        ours = isinstance(record, Panels)
        assert ours == (native() and outputs == 512)
        assert ("speculative_product_float32" in text) == ours
        assert bool(re.search(r"\bdot\(|ynn", text)) == (not ours)
        # What the rows come from is computed once, not for every output.
        assert len(re.findall(r" maximum\(", text)) == 1
