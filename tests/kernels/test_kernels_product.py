"""The CPU product against float64, for every machine that there is code for.

Code for another vector width runs here too: LLVM takes the vectors apart.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from speculative.kernels import call_frame, product_code
from speculative.kernels import product as kernels

MACHINES = {
    "avx2": product_code.AVX2,
    "avx512": product_code.AVX512,
    "neon": product_code.NEON,
    "avx2_bfloat16": dataclasses.replace(product_code.AVX2, bfloat16=True),
    "avx512_bfloat16": dataclasses.replace(product_code.AVX512, bfloat16=True),
}

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or kernels.machine() is None, reason="no code for this device"
)


@pytest.fixture(scope="module", params=list(MACHINES))
def product(request):
    """A machine's product, its dtype as attribute."""
    made_for = MACHINES[request.param]
    name = f"test_{request.param}"
    engine = kernels.register(name, made_for)

    def compute(rows, kernel):
        return kernels.call(name, rows, kernel)

    compute.dtype = jnp.bfloat16 if made_for.bfloat16 else jnp.float32
    compute.engine = engine  # kept alive
    return compute


def matrices(rows, outputs, width, dtype, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, width)).astype(np.float32)
    kernel = random.normal(size=(outputs, width)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(kernel).astype(dtype)


def expected(x, kernel):
    return np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T


@pytest.mark.parametrize("outputs", [1, 11, 25, 2050])
def test_against_float64(product, outputs):
    """Rows for one tile to four and for many, outputs that tiles and groups leave a rest of; the
    last are shared among threads."""
    for rows in (*range(1, 10), 13, 19, 40):
        x, kernel = matrices(rows, outputs, 48, product.dtype, seed=rows)
        got = product(x, kernel)
        assert got.shape == (rows, outputs)
        np.testing.assert_allclose(got, expected(x, kernel), atol=2.5e-4)


def test_a_row_does_not_depend_on_the_others(product):
    x, kernel = matrices(13, 100, 64, product.dtype)
    alone = np.concatenate([np.asarray(product(x[i : i + 1], kernel)) for i in range(13)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 13):
        np.testing.assert_array_equal(np.asarray(product(x[:rows], kernel)), alone[:rows])


def test_nor_does_an_output(product):
    """Nor on where it stands, nor on how the work is cut up among threads."""
    x, kernel = matrices(5, 4096, 32, product.dtype)
    whole = np.asarray(product(x, kernel))
    for begin, end in ((0, 1), (7, 40), (4001, 4096)):
        part = np.asarray(product(x, kernel[begin:end]))
        np.testing.assert_array_equal(part, whole[:, begin:end])


def test_numbers_that_are_none(product):
    x, kernel = matrices(6, 30, 16, product.dtype)
    x = x.at[0, 3].set(jnp.nan).at[1, 0].set(jnp.inf).at[2].set(0.0).at[3].set(1e-40)
    kernel = kernel.at[:, 0].set(1.0)
    got = np.asarray(product(x, kernel))
    assert np.isnan(got[0]).all()
    assert (got[1] == np.inf).all()
    assert (got[2] == 0).all()
    np.testing.assert_allclose(got[4:], expected(x, kernel)[4:], atol=1e-4)


def test_nothing_outside_is_written():
    """The outputs of a call lie between others."""
    x, kernel = matrices(7, 1000, 64, jnp.float32)

    @jax.jit
    def several(x, kernel):
        parts = [kernels.product(x[:m], kernel[:n]) for m in (1, 4, 7) for n in (1, 37, 1000)]
        return [*parts, kernels.product(x, kernel)]

    got = several(x, kernel)
    wanted = [(m, n) for m in (1, 4, 7) for n in (1, 37, 1000)] + [(7, 1000)]
    for value, (m, n) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, expected(x[:m], kernel[:n]), atol=1e-4)


def test_within_a_compiled_loop():
    x, kernel = matrices(4, 512, 512, jnp.float32)
    kernel = kernel / 30

    @jax.jit
    def repeat(x, kernel):
        return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(kernels.product(y, kernel)), x)

    wanted = np.asarray(x, np.float64)
    for _ in range(20):
        wanted = np.tanh(wanted @ np.asarray(kernel, np.float64).T)
    np.testing.assert_allclose(repeat(x, kernel), wanted, atol=1e-4)


def test_many_calls_at_once():
    """From several threads, on several devices: the shared work of one is never another's."""
    devices = jax.devices()
    jobs = []
    for number in range(24):
        x, kernel = matrices(1 + number % 9, 1500 + number, 64, jnp.float32, seed=number)
        jobs.append(jax.device_put((x, kernel), devices[number % len(devices)]))
    compute = jax.jit(kernels.product)
    wanted = [expected(*job) for job in jobs]
    started = threading.Barrier(8)

    def work(worker):
        started.wait()
        for _ in range(5):
            for number in range(worker, len(jobs), 8):
                np.testing.assert_allclose(compute(*jobs[number]), wanted[number], atol=2e-4)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, worker) for worker in range(8)]:
            done.result()


def test_bfloat16_rows():
    """2,048 ones summed in bfloat16 would stay at 256."""
    rows, kernel = jnp.ones((3, 2048), jnp.bfloat16), jnp.ones((4, 2048), jnp.bfloat16)
    assert kernels.supports(rows, kernel)
    got = kernels.product(rows, kernel)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 2048.0)


@pytest.mark.parametrize(
    "rows, kernel",
    [
        (jnp.zeros((1, 40)), jnp.zeros((8, 40))),  # K is no multiple of a line
        (jnp.zeros((0, 32)), jnp.zeros((8, 32))),
        (jnp.zeros((1, 32), jnp.bfloat16), jnp.zeros((8, 32))),
        (jnp.zeros((1, 32), jnp.float16), jnp.zeros((8, 32), jnp.float16)),
    ],
)
def test_what_is_left_to_xla(rows, kernel):
    assert not kernels.supports(rows, kernel)


def test_the_thread_pool_is_where_the_header_says():
    """A field that was moved would make the call jump into another function."""
    offset = call_frame._function_offset
    assert offset("XLA_FFI_Error_Create") == 48
    after = offset("XLA_FFI_ThreadPool_NumThreads") - offset("XLA_FFI_ThreadPool_Schedule")
    assert after == 8
