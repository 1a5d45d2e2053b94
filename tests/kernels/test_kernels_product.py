"""The CPU product against float64, for every machine that there is code for.

Code for another vector width runs here too: LLVM takes the vectors apart.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from speculative.kernels import engine, llvm, product_code, sharing
from speculative.kernels import product as kernels

MACHINES = {
    "avx2": llvm.AVX2,
    "avx512": llvm.AVX512,
    "neon": llvm.NEON,
    "avx2_bfloat16": dataclasses.replace(llvm.AVX2, bfloat16=True),
    "avx512_bfloat16": dataclasses.replace(llvm.AVX512, bfloat16=True),
}


@pytest.fixture(scope="module", params=list(MACHINES))
def product(request):
    """A machine's product of rows and a kernel [K, N], its dtype as attribute."""
    made_for = MACHINES[request.param]
    name = f"test_product_{request.param}"
    engine.register(name, product_code.write, made_for)

    def compute(rows, kernel):
        return kernels.call(name, rows, kernels.panels(kernel))

    compute.dtype = jnp.bfloat16 if made_for.bfloat16 else jnp.float32
    return compute


def matrices(rows, outputs, width, dtype, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, width)).astype(np.float32)
    kernel = random.normal(size=(width, outputs)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(kernel).astype(dtype)


def expected(x, kernel):
    return np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)


@pytest.mark.parametrize("outputs", [16, 176, 400, 2048])
def test_against_float64(product, outputs):
    """Rows for one tile and for several passes, panels that tiles leave a rest of; the last are
    shared among threads."""
    for rows in (*range(1, 14), 19, 25, 40):
        x, kernel = matrices(rows, outputs, 48, product.dtype, seed=rows)
        got = product(x, kernel)
        assert got.shape == (rows, outputs)
        np.testing.assert_allclose(got, expected(x, kernel), atol=2e-5)


@pytest.mark.parametrize("width", [4, 12, 508, 512, 516, 1400])
def test_every_block_of_the_sum(product, width):
    """Sums over one block, a part of one, and several."""
    for rows in (1, 7, 30):
        x, kernel = matrices(rows, 48, width, product.dtype, seed=width)
        x = x / np.sqrt(width)
        np.testing.assert_allclose(product(x, kernel), expected(x, kernel), atol=5e-6)


def test_a_row_does_not_depend_on_the_others(product):
    x, kernel = matrices(13, 112, 1064, product.dtype)
    alone = np.concatenate([np.asarray(product(x[i : i + 1], kernel)) for i in range(13)])
    for rows in (2, 3, 4, 5, 6, 7, 8, 13):
        np.testing.assert_array_equal(np.asarray(product(x[:rows], kernel)), alone[:rows])


def test_nor_does_an_output(product):
    """Nor on where it stands, nor on how the work is cut up among threads."""
    x, kernel = matrices(5, 4096, 160, product.dtype)
    whole = np.asarray(product(x, kernel))
    for begin, end in ((0, 16), (16, 64), (4000, 4096)):
        part = np.asarray(product(x, kernel[:, begin:end]))
        np.testing.assert_array_equal(part, whole[:, begin:end])


def test_numbers_that_are_none(product):
    x, kernel = matrices(6, 32, 16, product.dtype)
    x = x.at[0, 3].set(jnp.nan).at[1, 0].set(jnp.inf).at[2].set(0.0).at[3].set(1e-40)
    kernel = kernel.at[0].set(1.0)
    got = np.asarray(product(x, kernel))
    assert np.isnan(got[0]).all()
    assert (np.abs(got[3]) < 1e-37).all()  # Subnormal, or 0 where the processor flushes them.
    assert (got[1] == np.inf).all()
    assert (got[2] == 0).all()
    np.testing.assert_allclose(got[4:], expected(x, kernel)[4:], atol=2e-5)


SOME = (16, 48, 1008)


def test_nothing_outside_is_written(product):
    """The outputs of a call lie between others."""
    x, kernel = matrices(7, 1008, 64, product.dtype)

    @jax.jit
    def several(x, kernel):
        parts = [product(x[:m], kernel[:, :n]) for m in (1, 4, 7) for n in SOME]
        return [*parts, product(x, kernel)]

    got = several(x, kernel)
    wanted = [(m, n) for m in (1, 4, 7) for n in SOME] + [(7, 1008)]
    for value, (m, n) in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, expected(x[:m], kernel[:, :n]), atol=2e-5)


def test_within_a_compiled_loop(product):
    x, kernel = matrices(4, 512, 512, jnp.float32)
    kernel = (kernel / 30).astype(product.dtype)

    @jax.jit
    def repeat(x, kernel):
        return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(product(y, kernel)), x)

    wanted = np.asarray(x, np.float64)
    for _ in range(20):
        wanted = np.tanh(wanted @ np.asarray(kernel, np.float64))
    np.testing.assert_allclose(repeat(x, kernel), wanted, atol=1e-4)


def test_many_calls_at_once(product):
    """From several threads, on several devices: the shared work of one is never another's."""
    devices = jax.devices("cpu")
    jobs = []
    for number in range(24):
        x, kernel = matrices(1 + number % 9, 1504 + 16 * number, 64, product.dtype, seed=number)
        jobs.append(jax.device_put((x, kernel), devices[number % len(devices)]))
    compute = jax.jit(product)
    wanted = [expected(*job) for job in jobs]
    started = threading.Barrier(8)

    def work(worker):
        started.wait()
        for _ in range(5):
            for number in range(worker, len(jobs), 8):
                np.testing.assert_allclose(compute(*jobs[number]), wanted[number], atol=2e-5)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, worker) for worker in range(8)]:
            done.result()
    memory = (ctypes.c_int64 * (sharing._SLOTS + 8)).from_address(sharing._LOOKING)
    patience = time.monotonic() + 30
    while any(memory) and time.monotonic() < patience:
        time.sleep(0.01)  # Threads that have helped look for more for a while.
    assert not any(memory), "somebody still looks, or a slot is not empty"


@pytest.mark.parametrize(
    "shape, dtype",
    [((42, 16), "float32"), ((40, 24), "float32"), ((0, 16), "float32"), ((32, 16), "float16")],
)
def test_what_is_left_to_xla(shape, dtype):
    assert not kernels.supports(shape, dtype)


def test_what_does_not_go_together_is_refused(product):
    x, kernel = matrices(2, 16, 32, product.dtype)
    with pytest.raises(ValueError, match="do not go together"):
        product(x[:, :28], kernel)
    with pytest.raises(ValueError, match="do not go together"):
        product(x[:, :30], kernel[:30])


def test_two_threads_may_be_the_first():
    """Both trace at once; the code is compiled and registered once."""
    started, names = threading.Barrier(2), []

    def write(module, made_for):
        time.sleep(0.2)
        product_code.write(module, made_for)

    def first():
        started.wait()
        names.append(engine.registered("test_first", write, "float32"))

    threads = [threading.Thread(target=first) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = None if engine.machine() is None else "speculative_test_first_float32"
    assert names == [wanted, wanted]


def test_no_rows(product):
    assert product(*matrices(0, 32, 16, product.dtype)).shape == (0, 32)


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or engine.machine() is None,
    reason="there is a product on CPUs alone, and not on this one",
)
def test_the_dtype_is_that_of_the_rows():
    """Ones summed in bfloat16 would stay at 256."""
    panels = kernels.panels(jnp.ones((2048, 16), jnp.bfloat16))
    for dtype in (jnp.float32, jnp.bfloat16):
        got = kernels.product(jnp.ones((2, 2048), dtype), panels)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.full((2, 16), 2048))
