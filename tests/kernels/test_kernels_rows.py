"""Argmax and norm of every row against numpy, for every machine that there is code for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import sampling
from speculative.kernels import engine, llvm, rows, rows_code

MACHINES = {"avx2": llvm.AVX2, "avx512": llvm.AVX512, "neon": llvm.NEON}
# The last is shared among threads.
SHAPES = [(1, 1), (3, 5), (7, 16), (4, 4096), (12, 131), (300, 2048)]


@pytest.fixture(scope="module", params=list(MACHINES))
def names(request):
    """(argmax, norm) of a machine."""
    names = [f"test_{kind}_{request.param}" for kind in ("largest", "norm")]
    made_for = MACHINES[request.param]
    engine.register(names[0], rows_code.write_largest, made_for)
    engine.register(names[1], rows_code.write_norm, made_for)
    return names


@pytest.mark.parametrize("shape", SHAPES)
def test_first_largest(names, shape):
    """Small whole numbers: most rows have their largest value several times."""
    x = np.round(np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    got = rows.largest_call(names[0], jnp.asarray(x))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, np.argmax(x, axis=-1))


def test_every_place(names):
    x = jnp.eye(70, dtype=jnp.float32)
    np.testing.assert_array_equal(rows.largest_call(names[0], x), np.arange(70))
    np.testing.assert_array_equal(rows.largest_call(names[0], -(1 - x)), np.arange(70))


def test_numbers_that_are_none(names):
    x = np.zeros((6, 37), np.float32)
    x[0] = -np.inf
    x[1, 5] = np.inf
    x[2, 0] = x[3, 17] = x[4, 36] = np.nan
    x[4, 3] = np.inf
    got = rows.largest_call(names[0], jnp.asarray(x))
    np.testing.assert_array_equal(got, [0, 5, 36, 36, 36, 0])


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(names, shape):
    random = np.random.default_rng(0)
    x, scale = random.normal(size=shape), random.normal(size=shape[1:])
    got = rows.norm_call(names[1], jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32))
    wanted = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(got, wanted, atol=3e-6)


def test_norm_of_nothing(names):
    """The epsilon is under the root."""
    got = rows.norm_call(names[1], jnp.full((1, 20), 1e-4), jnp.ones((20,)))
    np.testing.assert_allclose(got, np.full((1, 20), 1e-4 / np.sqrt(1e-8 + 1e-6)), rtol=1e-6)


def test_the_samplers_argmax_is_the_kernels():
    """Of any rank, under jit and vmap."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 50)), jnp.float32)
    wanted = np.argmax(x, axis=-1)
    for compute in (
        sampling.first_largest,
        jax.jit(sampling.first_largest),
        jax.vmap(sampling.first_largest),
    ):
        np.testing.assert_array_equal(compute(x), wanted)

    # Within a function whose gradient is taken.
    def product(x):
        return jnp.sum(x * sampling.first_largest(x)[..., None].astype(jnp.float32))

    slope = jax.grad(product)(x)
    np.testing.assert_array_equal(slope, np.broadcast_to(wanted[..., None], x.shape))
    native = jax.default_backend() == "cpu" and engine.machine() is not None
    text = jax.jit(sampling.first_largest).lower(x).compile().as_text()
    assert ("speculative_largest" in text) == native
